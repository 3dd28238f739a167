"""What a pack may hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from mmstream.errors import ConfigError
from mmstream.packing.condition import columns_in
from mmstream.wrong_arguments import refuse_bools

__all__ = ["MAX_PACK_TOKENS", "Overlong", "PackLimits"]

Overlong = Literal["reject", "truncate"]
"""What becomes of a sample that is longer than a pack."""

MAX_PACK_TOKENS = 1 << 30
"""Longest pack."""

MAX_LIMIT = 1 << 40
"""Largest other limit."""


@dataclass(frozen=True)
class PackLimits:
    """What a pack may hold, and which samples are packed.

    Attributes:
        max_tokens: T, tokens of a pack.
        max_documents: Documents of a pack. None: no limit.
        max_images: Images of a pack. None: no limit.
        max_patches: Patches of all pictures and frames of a pack. None: no limit.
        max_seconds: Seconds of sound of a pack. None: no limit.
        document_multiple_of: Each document takes a multiple of so many tokens of its pack.
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

    max_tokens: int
    max_documents: int | None = None
    max_images: int | None = None
    max_patches: int | None = None
    max_seconds: int | None = None
    document_multiple_of: int = 1
    where: str = ""
    overlong: Overlong = "reject"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("where", "overlong") or (value is None and field.default is None):
                continue
            refuse_bools(**{field.name: value})
            most = MAX_PACK_TOKENS if "max_tokens" in field.name else MAX_LIMIT
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{field.name} {value!r}: needs an integer from 1 to {most:,}")
        if self.max_tokens % self.document_multiple_of:
            raise ConfigError(
                f"max_tokens {self.max_tokens}: needs a multiple of document_multiple_of "
                f"{self.document_multiple_of}"
            )
        if self.overlong not in get_args(Overlong):
            raise ConfigError(f'overlong {self.overlong!r}: use "reject" or "truncate"')
        if not isinstance(self.where, str):
            raise ConfigError(f"where {self.where!r}: needs a text")
        if self.where:
            columns_in(self.where)

    def as_json(self) -> dict[str, Any]:
        """Return the settings in plain JSON types."""
        return asdict(self)
