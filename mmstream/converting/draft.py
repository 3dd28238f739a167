"""Convert, the middle of the flow: what a row says, before its media files are opened.

    rows -> formats (one row -> one Draft) -> media -> shard

A `Draft` is all that the formats have in common; everything after it is the same for every format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from mmstream.errors import MMStreamError

__all__ = ["KINDS", "Draft", "Kind", "MediaRef", "RowError", "samples_of"]

Kind: TypeAlias = Literal["image", "video", "audio"]

KINDS: tuple[Kind, ...] = ("image", "video", "audio")


class RowError(MMStreamError):
    """One row cannot become a sample; the message is the reason that ``rejects.jsonl`` gives."""


class MediaRef(NamedTuple):
    """A media file as the row names it."""

    kind: Kind
    path: str


@dataclass(frozen=True)
class Draft:
    """One row in mmstream's canonical shape, its media still only named."""

    content: dict[str, Any]
    """What ``KEY.json`` will hold. The ``field`` of a media part is its place in `media`."""
    media: tuple[MediaRef, ...] = ()
    """In order of appearance; a file that is named twice is here twice."""
    texts: tuple[str, ...] = ()
    """Captions, or the one text of a text row; the first becomes ``KEY.txt``."""


def samples_of(
    key: str, draft: Draft, media: list[tuple[str, bytes]], each: bool
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, fields) of the sample, or of the several samples, of one row.

    Fields come in the order media, ``txt``, ``json``. The one medium of a captioned row is
    ``KEY.jpg``, as consumers of WebDataset expect; all others are numbered ``KEY.0.jpg``,
    ``KEY.1.png``, in order of appearance.

    Args:
        key: of the row; samples of one caption each get ``KEY-0``, ``KEY-1`` and so on.
        draft: the row.
        media: (extension, bytes) of every reference in `draft.media`.
        each: one sample of each caption, instead of one sample with all of them.
    """
    captioned = "captions" in draft.content
    single = captioned and len(media) == 1
    names = [ext if single else f"{i}.{ext}" for i, (ext, _) in enumerate(media)]
    fields = {name: data for name, (_, data) in zip(names, media, strict=True)}
    content = _with_fields(draft.content, names)
    if not (each and captioned):
        text = {"txt": draft.texts[0].encode()} if draft.texts else {}
        yield key, {**fields, **text, "json": msgspec.json.encode(content)}
        return
    for i, caption in enumerate(draft.texts):
        one = msgspec.json.encode({**content, "captions": [caption]})
        yield f"{key}-{i}", {**fields, "txt": caption.encode(), "json": one}


def _with_fields(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the content with every media part naming its field."""
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
