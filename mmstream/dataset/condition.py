"""Conditions over the columns of samples: which of them fulfil "width >= 200 and lang = 'en'".

A condition is data, never code. One regular expression finds its words. Python's parser makes a
tree of its signs, with numbered names in place of all other words, so it never sees those. Arrow
computes each operation for whole columns. Nothing is called: the condition of a stranger does no
harm. It imports pyarrow, as `columns.py` does.

Unknown values are those of SQL: a comparison with NULL is NULL, and so is a division by 0.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mmstream.errors import ConfigError, escaped

MAX_CHARACTERS = 10_000
"""Longest condition."""

MAX_WORDS = 1_000
"""Most names, values and signs of a condition. A list counts as one."""

MAX_DEPTH = 40
"""Most operations within each other."""

MAX_DIGITS = 40
"""Longest number, in characters."""

_HELP = "write it as \"width >= 200 and lang in ('en', 'zh')\" (docs/selections.md)"
_SPACE = r"[ \t\r\n]*"
_TEXT = r"""(?:'(?:[^'\x00-\x1f\x7f-\x9f\ud800-\udfff]|'')*'"""
_TEXT += r"""|"(?:[^"\x00-\x1f\x7f-\x9f\ud800-\udfff]|"")*")"""
_NUMBER = r"(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_VALUE = rf"(?:{_TEXT}|-?{_NUMBER}|(?:true|false|null)\b)"
_VALUES = rf"{_SPACE}{_VALUE}(?:{_SPACE},{_SPACE}{_VALUE})*{_SPACE}"
_FLAGS = re.ASCII | re.IGNORECASE
_WORD = re.compile(
    rf"{_SPACE}(?:in{_SPACE}(?P<list>\({_VALUES}\)|\[{_VALUES}\])"
    rf"|(?P<value>(?!-){_VALUE})"
    r"|(?P<sign>[=!<>]=|<>|[=<>()+*/-]|(?:and|or|not|is)\b)"
    rf"|(?!in\b)(?P<name>[a-z_]\w*(?:\.(?:\w+|{_TEXT}))*))",
    _FLAGS,
)
_LISTED = re.compile(_VALUE, _FLAGS)
_NAME_PART = re.compile(rf"{_TEXT}|\w+", _FLAGS)
_WHOLE = re.compile(r"-?[\d_]+", _FLAGS)
_PLAIN = re.compile(r"\w+", _FLAGS)
_SAME_SIGNS = {"=": "==", "<>": "!="}
_CONSTANTS = {"true": True, "false": False, "null": None}

_COMPARISONS = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
"""Functions of `pyarrow.compute`."""
_CALCULATIONS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.USub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}
_MEMBERSHIPS = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
_FORMS = (ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, *_COMPARISONS, *_MEMBERSHIPS)
_FORMS += (ast.BinOp, *_CALCULATIONS, ast.Name, ast.Load)
"""All nodes that a tree may have."""
_KINDS = {"int64": "number", "double": "number", "large_string": "text", "bool": "true or false"}
"""What values are called in messages, by their Arrow type."""


class _Column(NamedTuple):
    """A name in a condition."""

    name: str


_Leaves = dict[str, Any]
"""The columns, values and lists of a condition, by how they are written."""


@dataclass(frozen=True)
class Condition:
    """A condition over the columns of samples.

    Attributes:
        text: The condition in one form: spaces, the case of keywords, the kind of quotes, ``==`` or
            ``=``, and parentheses that change nothing do not matter.

    Examples:
        >>> import pyarrow as pa
        >>> condition = Condition.parse('width/height<2 AND json.lang="en"')
        >>> condition.text
        "width / height < 2 and json.lang == 'en'"
        >>> condition.names
        ('height', 'json.lang', 'width')
        >>> columns = {"width": [300, 300, 900], "height": [200, 0, 200], "json.lang": ["en"] * 3}
        >>> arrays = {name: pa.array(values) for name, values in columns.items()}
        >>> condition.evaluate(arrays).to_pylist()
        [True, None, False]
    """

    text: str
    _tree: ast.expr = field(repr=False, compare=False)
    _leaves: _Leaves = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            ConfigError: It is none; the message shows the words that are not understood.
        """
        tree, leaves = _parsed(text)
        return cls(ast.unparse(tree), tree, leaves)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it names, sorted."""
        leaves = [self._leaves[node.id] for node in _leaf_nodes(self._tree)]
        return tuple(sorted({leaf.name for leaf in leaves if isinstance(leaf, _Column)}))

    @property
    def clauses(self) -> tuple[Condition, ...]:
        """The operands of the outermost ``and``. Without an ``and``: the condition itself."""
        trees = [self._tree]
        if isinstance(self._tree, ast.BoolOp) and isinstance(self._tree.op, ast.And):
            trees = self._tree.values
        return tuple(Condition(ast.unparse(tree), tree, self._leaves) for tree in trees)

    def evaluate(self, columns: Mapping[str, Any]) -> Any:
        """Return which samples fulfil it, as a BooleanArray of Arrow. NULL: unknown.

        Args:
            columns: Arrow arrays of one length, for all of `names`. NaN is NULL. Integers are
                compared exactly, and calculations are in float64.

        Raises:
            ConfigError: Values do not compare, such as numbers with texts.
        """
        values = {}
        for node in _leaf_nodes(self._tree):
            leaf = self._leaves[node.id]
            is_column = isinstance(leaf, _Column)
            values[node.id] = _column(columns[leaf.name]) if is_column else _constant(leaf)
        truth = _truth(self._tree, values)
        if isinstance(truth, pa.Scalar):  # a clause such as 1 = 1
            return pa.repeat(truth, len(next(iter(columns.values()))))
        return truth.combine_chunks() if isinstance(truth, pa.ChunkedArray) else truth


# -- a text -> a tree ------------------------------------------------------------------------------


def _parsed(text: str) -> tuple[ast.expr, _Leaves]:
    """Return the tree of a condition, and its leaves by their names in the tree."""
    words, starts, leaves = _words(text)
    if len(words) > MAX_WORDS:
        raise _error(text, f"has more than {MAX_WORDS:,} names, values and signs")
    if not any(isinstance(leaf, _Column) for _, leaf in leaves):
        raise _error(text, "names no column")
    too_deep = _error(text, f"has more than {MAX_DEPTH} operations within each other")
    try:
        tree = ast.parse(" \\\n".join(words), mode="eval").body  # each word in a line of its own
    except SyntaxError as error:
        raise _unclear(text, starts[(error.lineno or 1) - 1]) from None
    except (RecursionError, MemoryError):
        raise too_deep from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        for node in level:
            if not _is_known(node, leaves):
                raise _unclear(text, starts[getattr(node, "lineno", 1) - 1])
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise too_deep
    for name in _leaf_nodes(tree):
        name.id = leaves[int(name.id[1:])][0]
    return tree, dict(leaves)


def _words(text: str) -> tuple[list[str], list[int], list[tuple[str, Any]]]:
    """Return the words for Python's parser, where each begins in the text, and all leaves.

    The words are signs, and n0, n1, n2 in place of the leaves.
    """
    if len(text) > MAX_CHARACTERS:
        raise _error(text, f"has more than {MAX_CHARACTERS:,} characters")
    words: list[str] = []
    starts: list[int] = []
    leaves: list[tuple[str, Any]] = []
    end, stop = 0, len(text.rstrip(" \t\r\n"))
    while end < stop:
        match = _WORD.match(text, end)
        if match is None:
            raise _unclear(text, end)
        kind = str(match.lastgroup)
        word, end = match[kind], match.end()
        starts.append(match.start(kind))
        if kind == "sign":
            words.append(_SAME_SIGNS.get(word, word.lower()))
        else:
            words.append(f"in n{len(leaves)}" if kind == "list" else f"n{len(leaves)}")
            leaves.append(_leaf(kind, word))
    return words, starts, leaves


def _leaf(kind: str, word: str) -> tuple[str, Any]:
    """Return a name, a value or a list in its one form, and what it stands for."""
    if kind == "list":
        values = tuple(_leaf("value", value) for value in _LISTED.findall(word))
        return f"({', '.join(text for text, _ in values)})", values
    if kind == "name":
        name = ".".join(_unquoted(part) for part in _NAME_PART.findall(word))
        parts = [part if _PLAIN.fullmatch(part) else _quoted(part, '"') for part in name.split(".")]
        return ".".join(parts), _Column(name)
    if word[0] in "'\"":
        return _quoted(_unquoted(word), "'"), _unquoted(word)
    if word.lower() in _CONSTANTS:
        return word.lower(), _CONSTANTS[word.lower()]
    kind_of, most = (int, 1 << 63) if _WHOLE.fullmatch(word) else (float, math.inf)
    if len(word) > MAX_DIGITS or abs(number := kind_of(word)) >= most:
        raise ConfigError(f"where: {_shown(word)} is too large a number; {_HELP}")
    return repr(number), number


def _quoted(text: str, quote: str) -> str:
    return quote + text.replace(quote, quote * 2) + quote


def _unquoted(word: str) -> str:
    quote = word[0]
    return word[1:-1].replace(quote * 2, quote) if quote in "'\"" else word


def _leaf_nodes(tree: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _error(text: str, reason: str) -> ConfigError:
    return ConfigError(f"where {_shown(text)}: {reason}; {_HELP}")


def _unclear(text: str, start: int) -> ConfigError:
    """Return the error for the words from a place on."""
    return _error(text, f"{_shown(text[start:].strip())} is not understood")


def _shown(text: str) -> str:
    return escaped(repr(text), limit=80)


def _is_known(node: ast.AST, leaves: Sequence[tuple[str, Any]]) -> bool:
    """Tell whether a node may stand in a condition."""
    if isinstance(node, ast.Compare) and any(isinstance(op, _MEMBERSHIPS) for op in node.ops):
        other = node.comparators[0]
        leaf = leaves[int(other.id[1:])][1] if isinstance(other, ast.Name) else other
        return len(node.ops) == 1 and (leaf is None or type(leaf) is tuple)
    return isinstance(node, _FORMS)


# -- a tree and columns -> truth -------------------------------------------------------------------


def _truth(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return which samples fulfil a part of a condition."""
    truth = _computed(node, values)
    if truth.type not in (pa.bool_(), pa.null()):
        raise ConfigError(f"where: {_described(node, truth)} is not a condition; {_HELP}")
    return pc.cast(truth, pa.bool_())


def _computed(node: Any, values: Mapping[str, Any]) -> Any:
    """Return the values of a part of a condition, for each sample or one for all."""
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BoolOp):
        combine = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        return reduce(combine, [_truth(operand, values) for operand in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return pc.invert(_truth(node.operand, values))
    if isinstance(node, ast.Compare):
        return _compared(node, values)
    return _calculated(node, values)


def _compared(node: ast.Compare, values: Mapping[str, Any]) -> Any:
    first, *others = [(part, _computed(part, values)) for part in (node.left, *node.comparators)]
    sign = node.ops[0]
    if isinstance(sign, ast.Is | ast.IsNot):
        truth = pc.is_null(first[1])
    elif isinstance(sign, ast.In | ast.NotIn):
        listed = [(others[0][0], value) for value in others[0][1]]
        truth = reduce(pc.or_kleene, (_pair_compared(ast.Eq(), first, value) for value in listed))
    else:
        return reduce(pc.and_kleene, map(_pair_compared, node.ops, (first, *others), others))
    return pc.invert(truth) if isinstance(sign, ast.IsNot | ast.NotIn) else truth


def _pair_compared(sign: ast.cmpop, left: tuple[ast.expr, Any], right: tuple[ast.expr, Any]) -> Any:
    types = {values.type for _, values in (left, right)} - {pa.null()}
    kinds = {_KINDS.get(str(of)) for of in types}
    if len(kinds) > 1 or None in kinds:
        raise ConfigError(
            f"where: {_described(*left)} and {_described(*right)} do not compare; "
            "texts stand in quotes, and numbers do not"
        )
    common = types.pop() if len(types) == 1 else pa.float64()
    sides = [pc.cast(values, common, safe=False) for _, values in (left, right)]
    return getattr(pc, _COMPARISONS[type(sign)])(*sides)


def _calculated(node: ast.UnaryOp | ast.BinOp, values: Mapping[str, Any]) -> Any:
    """Return the results of a calculation, in float64 so that no product of integers overflows."""
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    numbers = [_computed(part, values) for part in parts]
    for part, number in zip(parts, numbers, strict=True):
        if number.type not in (pa.int64(), pa.float64(), pa.null()):
            raise ConfigError(f"where: {_described(part, number)} is not a number; {_HELP}")
    if isinstance(node, ast.UnaryOp) and isinstance(numbers[0], pa.Scalar):
        return pc.negate(numbers[0])  # of a number that is written here
    left, right = (pc.cast(of, pa.float64(), safe=False) for of in [pa.scalar(0), *numbers][-2:])
    if isinstance(node.op, ast.Div):
        right = pc.if_else(pc.equal(right, 0.0), pa.scalar(None, pa.float64()), right)
    return _without_nan(getattr(pc, _CALCULATIONS[type(node.op)])(left, right))


def _column(column: Any) -> Any:
    """Return a column as int64, float64, text, bool or null where it is one of these."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.cast(column, pa.large_string())
    if pa.types.is_floating(kind) or kind == pa.uint64():
        return _without_nan(pc.cast(column, pa.float64(), safe=False))
    return pc.cast(column, pa.int64()) if pa.types.is_integer(kind) else column


def _constant(value: Any) -> Any:
    """Return a value of a condition for Arrow, and a list of them as a list."""
    if isinstance(value, tuple):
        return [_constant(of) for _, of in value]
    return pa.scalar(value, pa.large_string() if isinstance(value, str) else None)


def _without_nan(values: Any) -> Any:
    return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)


def _described(node: ast.expr, values: Any) -> str:
    kind = _KINDS.get(str(values.type), str(values.type))
    return f"{escaped(ast.unparse(node), limit=80)} ({escaped(kind)})"
