"""The limits of packs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from mmstream.dataset.condition import Condition
from mmstream.errors import ConfigError
from mmstream.settings import Within, checked

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
            ``"num_images = 0 or num_label_tokens > 8"``. Other samples are left out. "": all.
        overlong: "reject" leaves out samples with more than T tokens. "truncate" keeps those of
            plain text: a `TextDecoder` with ``max_length=T`` cuts them to T tokens. Conversations
            and samples with media are left out too: a cut may take their answers or media.

    Raises:
        ConfigError: A number is not positive, T is not a multiple of `document_multiple_of`, or the
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
            import pyarrow as pa

            condition = Condition.parse(self.where)
            # All columns of a measure are integers, so whether values compare is known at once.
            condition.evaluate(dict.fromkeys(condition.names, pa.array([], pa.int64())))

    def as_json(self) -> dict[str, Any]:
        """Return the settings in plain JSON types."""
        return asdict(self)
