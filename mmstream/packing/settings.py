"""The limits of packs, and conditions on their samples."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, escaped
from mmstream.settings import Within, checked
from mmstream.types import IntArray

# -- conditions over the columns of a measure ------------------------------------------------------
#
# A condition is read as Python reads an expression, and only comparisons, ``and``, ``or``, ``not``,
# ``+ - * /`` , numbers and names of columns may stand in it. Nothing is called, so the condition of
# a stranger can do no harm.

MAX_CHARACTERS = 2000
"""Longest condition."""
MAX_NUMBER = 1 << 53
"""Numbers of a condition are smaller."""
MAX_NODES = 300
"""Most names, numbers and signs of a condition."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALCULATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_HELP = 'write it as "width >= 200 and num_label_tokens > 8"'


def columns_in(condition: str) -> list[str]:
    """Return the columns that a condition names, sorted.

    Raises:
        ConfigError: It is no condition; the message shows the words that are not understood.

    Examples:
        >>> columns_in("width / height < 3 and not num_tokens > 100")
        ['height', 'num_tokens', 'width']
    """
    tree = _parsed(condition)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    _truth(tree, dict.fromkeys(names, np.ones(1)))
    return sorted(names)


def evaluate(condition: str, column: Callable[[str], IntArray]) -> npt.NDArray[np.bool_]:
    """Return which samples fulfil a condition, bool [n]. A division by 0 fulfils none.

    Args:
        condition: The condition.
        column: Returns int64 [n], the values of a column, by its name.

    Raises:
        ConfigError: As `columns_in`.

    Examples:
        >>> import numpy as np
        >>> columns = {"width": np.array([100, 300, 500])}
        >>> evaluate("200 <= width < 400", columns.__getitem__).tolist()
        [False, True, False]
    """
    # As float64, which is exact up to 2^53, so that no product can overflow.
    values = {name: column(name).astype(np.float64) for name in columns_in(condition)}
    with np.errstate(all="ignore"):
        return np.asarray(_truth(_parsed(condition), values), dtype=bool)


def _parsed(condition: str) -> ast.expr:
    error = ConfigError(f"where {escaped(repr(condition))}: is no condition over columns; {_HELP}")
    if len(condition) > MAX_CHARACTERS:
        raise error
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise error from None
    nodes = list(ast.walk(tree))
    if len(nodes) > MAX_NODES or not any(isinstance(node, ast.Name) for node in nodes):
        raise error
    return tree


def _truth(node: ast.expr, values: dict[str, npt.NDArray[np.float64]]) -> Any:
    """Return which samples fulfil a part of a condition."""
    if isinstance(node, ast.BoolOp):
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return combine.reduce([_truth(value, values) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return np.logical_not(_truth(node.operand, values))
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        numbers = [_number(item, values) for item in (node.left, *node.comparators)]
        pairs = zip(node.ops, numbers, numbers[1:], strict=False)
        truths = [_COMPARISONS[type(op)](left, right) for op, left, right in pairs]
        # Where a division by 0 gave no number, both x < 3 and x >= 3 are false.
        finite = [np.isfinite(number) for number in numbers]
        return np.logical_and.reduce(np.broadcast_arrays(*truths, *finite))
    raise _not_understood(node)


def _number(node: ast.expr, values: dict[str, npt.NDArray[np.float64]]) -> Any:
    """Return the values of a part of a condition that is a number for each sample."""
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        value: Any = node.value
        if type(value) in (int, float) and abs(value) < MAX_NUMBER:
            return np.float64(value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _CALCULATIONS:
        left, right = _number(node.left, values), _number(node.right, values)
        return _CALCULATIONS[type(node.op)](left, right)
    raise _not_understood(node)


def _not_understood(node: ast.expr) -> ConfigError:
    expression = escaped(ast.unparse(node), limit=80)
    return ConfigError(f"where: {expression} is not understood; {_HELP}")


# -- limits ----------------------------------------------------------------------------------------

Overlong = Literal["reject", "truncate"]
"""How a sample that is longer than a pack is treated."""

MAX_PACK_TOKENS = 1 << 30
"""Longest pack."""

Tokens: TypeAlias = Annotated[
    int, Within(1, MAX_PACK_TOKENS, f"a whole number from 1 to {MAX_PACK_TOKENS:,}")
]
Limit: TypeAlias = Annotated[int, Within(1, 1 << 40, f"a whole number from 1 to {1 << 40:,}")]


@checked()
@dataclass(frozen=True)
class PackLimits:
    """What a pack may hold, and which samples are packed.

    Attributes:
        max_tokens: T, tokens of a pack.
        max_documents: Documents of a pack. None: no limit.
        max_images: Images of a pack. None: no limit.
        max_patches: Patches of all pictures and frames of a pack. None: no limit.
        max_seconds: Seconds of sound of a pack. None: no limit.
        document_multiple_of: Each document takes a multiple of this number of tokens.
        where: Condition over the columns of the measure, such as
            ``"width >= 200 and num_label_tokens > 8"``. Other samples are left out. "": all.
        overlong: "reject" leaves out samples with more than T tokens. "truncate" keeps those of
            plain text: a `TextDecoder` with ``max_length=T`` cuts them to T tokens. Conversations
            and samples with media are left out too: a cut may take their answers or media.

    Raises:
        ConfigError: A number is not positive, T is no multiple of `document_multiple_of`, or the
            condition cannot be read.

    Examples:
        >>> from mmstream.packing.settings import PackLimits
        >>> PackLimits(8192, max_images=16).max_tokens
        8192
    """

    max_tokens: Tokens
    max_documents: Limit | None = None
    max_images: Limit | None = None
    max_patches: Limit | None = None
    max_seconds: Limit | None = None
    document_multiple_of: Limit = 1
    where: str = ""
    overlong: Overlong = "reject"

    def __post_init__(self) -> None:
        if self.max_tokens % self.document_multiple_of:
            raise ConfigError(
                f"max_tokens {self.max_tokens}: needs a multiple of document_multiple_of "
                f"{self.document_multiple_of}"
            )
        if self.where:
            columns_in(self.where)

    def as_json(self) -> dict[str, Any]:
        """Return the settings in plain JSON types."""
        return asdict(self)
