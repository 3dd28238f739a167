"""The `Draft`: what a row says, before its media files are read. The middle of a conversion.

    rows -> formats (one row -> one DRAFT) -> media -> shard

Each row format is turned into a `Draft`. The steps after it are the same for all formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from mmstream.errors import MMStreamError

__all__ = ["KINDS", "Draft", "Kind", "Media", "MediaRef", "RowError", "samples_of"]

Kind: TypeAlias = Literal["image", "video", "audio"]

KINDS: tuple[Kind, ...] = ("image", "video", "audio")


class RowError(MMStreamError):
    """One row cannot become a sample. ``rejects.jsonl`` gives the message as the reason."""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A media file, by the path or the bytes that the row gives."""

    kind: Kind
    path: str
    """Path or URL. With `data`, only a name for messages and ``media_paths``."""
    data: bytes | None = None
    """The bytes themselves, where the row holds them."""


@dataclass(frozen=True, slots=True)
class Media:
    """A media file that was read."""

    extension: str
    """By its content, without a dot: ``jpg``."""
    data: bytes
    """What the tar will hold."""
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    """What is known about it without decoding it again, such as ``width`` and ``duration_s``."""


@dataclass(frozen=True)
class Draft:
    """One row in the canonical shape. Its media files are not read yet."""

    content: dict[str, Any]
    """What ``KEY.json`` will hold. The ``field`` of a media part is its index in `media`."""
    media: tuple[MediaRef, ...] = ()
    """Media files in order of appearance. A file that the row names twice is listed twice."""
    texts: tuple[str, ...] = ()
    """The captions, or the text of a text row. The first one becomes ``KEY.txt``."""


def samples_of(
    key: str, draft: Draft, media: Sequence[Media], each: bool
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {field: bytes}) of every sample of one row.

    The fields come in the order media, ``txt``, ``json``. A captioned row with one media file
    stores it as ``KEY.jpg``, as WebDataset's users expect. Otherwise media are numbered in order of
    appearance: ``KEY.0.jpg``, ``KEY.1.png``.

    Args:
        key: Key of the row. With `each`, the samples have the keys ``KEY-0``, ``KEY-1``, ...
        draft: The row.
        media: Every file of `draft.media`, in order.
        each: One sample per caption, instead of one sample with all captions.
    """
    captioned = "captions" in draft.content
    single = captioned and len(media) == 1
    names = [
        medium.extension if single else f"{i}.{medium.extension}" for i, medium in enumerate(media)
    ]
    fields = {name: medium.data for name, medium in zip(names, media, strict=True)}
    content = _with_fields(draft.content, names)
    if not (each and captioned):
        text = {"txt": draft.texts[0].encode()} if draft.texts else {}
        yield key, {**fields, **text, "json": msgspec.json.encode(content)}
        return
    for i, caption in enumerate(draft.texts):
        encoded = msgspec.json.encode({**content, "captions": [caption]})
        yield f"{key}-{i}", {**fields, "txt": caption.encode(), "json": encoded}


def _with_fields(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the content with the names of fields in place of the indexes of media files."""
    if "messages" not in content:
        return content
    messages = [
        {
            **message,
            "content": [
                {**part, "field": names[part["field"]]} if part["type"] in KINDS else part
                for part in message["content"]
            ],
        }
        for message in content["messages"]
    ]
    return {**content, "messages": messages}
