"""The `Draft`: what a row says, before its media files are read. The middle of a conversion.

    rows -> formats (one row -> one DRAFT) -> media -> shard

Each row format is turned into a `Draft`. The steps after it are the same for all formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import msgspec

from mmstream.errors import MMStreamError, escaped
from mmstream.media.fields import json_object, media_files
from mmstream.media.types import Kind

KINDS: tuple[Kind, ...] = ("image", "video", "audio")

DIALOGUE_KEYS = ("messages", "chosen", "rejected", "completion")
"""The keys of `Draft.content` that hold messages with content parts."""

_IMPLIED_KEYS = frozenset(("id", "media_paths"))
"""Keys of `Draft.content` that are not a reason to write it: paths of media, an id of null."""


class RowError(MMStreamError):
    """One row cannot become a sample. ``rejects.jsonl`` gives the message as the reason."""


def unreadable(name: str, error: Exception) -> RowError:
    """Return the reason of a row whose value raised an error when it was read, whatever it is."""
    return RowError(f"{name}: cannot be read: {type(error).__name__}: {escaped(error)}")


class LeftOutError(RowError):
    """A reject, but no fault: a blank line, or a row that is left out or converted already."""


class MediaRef(msgspec.Struct, frozen=True):
    """A media file, by the path or the bytes that the row gives."""

    kind: Kind
    path: str
    """Path or URL. With `data`, only a name for messages and ``media_paths``."""
    data: bytes | None = None
    """The bytes themselves, where the row holds them."""
    sha256: str | None = None
    """Checksum of the file that the row expects, in lower-case hex. Other bytes are a reject."""
    field: str | None = None
    """Name of its member of the tar where the row gives one, such as ``left.png``: for
    re-sharding. None: it is named by its number and type."""
    frames: tuple[MediaRef, ...] = ()
    """The pictures of a video that is a list of frames. Its own bytes state their times."""


@dataclass(frozen=True, slots=True)
class Media:
    """A media file that was read."""

    extension: str
    """By its content, without a dot: ``jpg``."""
    data: bytes
    """What the tar will hold."""
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    """What is known about it without decoding it again, such as ``width`` and ``duration_s``."""
    frames: tuple[Media, ...] = ()
    """The pictures of a list of frames."""

    @property
    def content(self) -> bytes:
        """What tells it from other media: its bytes, or those of its frames at any times."""
        return b"".join(frame.data for frame in self.frames) or self.data


class StoredSample(msgspec.Struct, frozen=True):
    """A sample of another dataset. It is written again as it is."""

    key: str
    fields: Mapping[str, bytes]
    """In the order of its tar."""


class Draft(msgspec.Struct, frozen=True):
    """One row in the canonical shape. Its media files are not read yet."""

    content: dict[str, Any]
    """What ``KEY.json`` will hold. The ``field`` of a media part is its index in `media`."""
    media: tuple[MediaRef, ...] = ()
    """Media files in order of appearance. A file that the row names twice is listed twice."""
    texts: tuple[str, ...] = ()
    """The captions, or the text of a text row. The first one becomes ``KEY.txt``."""
    fields: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    """Further members of the tar, byte for byte, such as ``cls``. With a ``json`` among them,
    `content` is not written."""
    unread: tuple[str, ...] = ()
    """The row's keys that its format does not use. They are kept in `content`."""
    format: str = ""
    """The format that the row was read as. The report of the conversion counts them."""
    key: str | None = None
    """Key of the sample, where the row is a sample already. Its members are `fields`."""

    @property
    def files(self) -> list[MediaRef]:
        """The files of `media`: the frames of a list follow it."""
        return [file for ref in self.media for file in (ref, *ref.frames)]


def samples_of(
    key: str, draft: Draft, media: Sequence[Media], per_caption: bool
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {field: bytes}) of every sample of one row.

    The fields come in the order media, ``txt``, others, ``json``. A single media file without a
    conversation is stored as ``KEY.jpg``, as WebDataset's users expect. Otherwise media are
    numbered in order of appearance: ``KEY.0.jpg``, ``KEY.1.png``. The frames of a list are
    numbered after its name: ``KEY.1.frames.000.jpg``. Where the row says nothing but its text or
    its media, there is no ``json``.

    Args:
        key: Key of the row. With `per_caption`, the samples have the keys ``KEY-0``, ``KEY-1``, ...
        draft: The row.
        media: Every file of `draft.media`, in order.
        per_caption: One sample per caption, instead of one sample with all captions.
    """
    key = draft.key or key
    content, further = draft.content, draft.fields
    fields: dict[str, bytes] = {}
    if draft.media:
        names = _field_names(draft, media)
        content = {
            key: [_named_parts(message, names, media) for message in value]
            if key in DIALOGUE_KEYS
            else value
            for key, value in content.items()
        }
        further = _further_fields(draft, names, media)
        for ref, name, medium in zip(draft.media, names, media, strict=True):
            fields[name] = medium.data
            for i, frame in enumerate(medium.frames):
                # Those of a stored sample keep their numbers: one may be missing.
                stored = ref.frames[i].field
                number = f"{i:03d}" if stored is None else stored.split(".")[-2]
                fields[f"{name}.{number}.{frame.extension}"] = frame.data
    if not (per_caption and "captions" in content):
        if draft.texts and "txt" not in draft.fields:
            fields["txt"] = draft.texts[0].encode()
        fields.update(further)
        if _says_more(content) and "json" not in fields:
            fields["json"] = msgspec.json.encode(content)
        yield key, fields
        return
    for i, caption in enumerate(draft.texts):
        own = {**content, "captions": [caption]}
        if not media:
            del own["captions"]  # `txt` says it
        sample_fields = {**fields, "txt": caption.encode(), **draft.fields}
        if _says_more(own):
            sample_fields["json"] = msgspec.json.encode(own)
        yield f"{key}-{i}", sample_fields


def media_of(fields: Mapping[str, bytes]) -> list[Media]:
    """Return the media among the fields of a sample, by their names. They are not read."""
    return [
        Media(
            name.rpartition(".")[2],
            fields[name],
            frames=tuple(Media(frame.rpartition(".")[2], fields[frame]) for frame in frames),
        )
        for name, frames in media_files(fields).items()
    ]


def _field_names(draft: Draft, media: Sequence[Media]) -> list[str]:
    """Return the names of all media in the tar.

    Images that are stored in another format take its name. Where it is taken, they get a number
    too: with ``image_format="webp"``, ``a.jpg`` and ``a.png`` become ``a.webp`` and ``a.1.webp``.
    """
    names = [_field_name(i, draft, medium) for i, medium in enumerate(media)]
    taken = {ref.field for ref in draft.media if ref.field is not None} | draft.fields.keys()
    for i, ref in enumerate(draft.media):
        if ref.field is None or names[i] == ref.field:
            continue
        stem = names[i].removesuffix(media[i].extension)
        numbered = (f"{stem}{number}.{media[i].extension}" for number in count(1))
        names[i] = next(name for name in chain([names[i]], numbered) if name not in taken)
        taken.add(names[i])
    return names


def _field_name(index: int, draft: Draft, medium: Media) -> str:
    """Return the name of a medium's member of the tar, if no other member has it."""
    ref = draft.media[index]
    if ref.field is None:
        is_single = len(draft.media) == 1 and not any(key in draft.content for key in DIALOGUE_KEYS)
        return medium.extension if is_single else f"{index}.{medium.extension}"
    if medium.data is ref.data:
        return ref.field
    stem, dot, _ = ref.field.rpartition(".")  # re-encoded: the name says the new type
    return f"{stem}{dot}{medium.extension}"


def _further_fields(draft: Draft, names: list[str], media: Sequence[Media]) -> Mapping[str, bytes]:
    """Return `Draft.fields`. A ``json`` among them names the media as they are stored now."""
    changed = {
        ref.field: i
        for i, ref in enumerate(draft.media)
        if ref.field is not None and media[i].data is not ref.data
    }
    if not changed or "json" not in draft.fields:
        return draft.fields
    content = json_object(draft.fields["json"])
    parts = [part for part in _media_parts(content) if part["field"] in changed]
    if not parts:
        return draft.fields
    for part in parts:
        index = changed[part["field"]]
        part["field"] = names[index]
        if part.get("type") == "bbox" and "width" not in part:
            part.update(_original_size(media[index]))
    return {**draft.fields, "json": msgspec.json.encode(content)}


def _media_parts(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of messages that name a field, from a ``json`` that anybody wrote."""
    messages = (
        message
        for key in DIALOGUE_KEYS
        if isinstance(content, dict) and isinstance(content.get(key), list)
        for message in content[key]
        if isinstance(message, dict) and isinstance(message.get("content"), list)
    )
    for message in messages:
        for part in message["content"]:
            if isinstance(part, dict) and isinstance(part.get("field"), str):
                yield part


def _says_more(content: dict[str, Any]) -> bool:
    """Tell whether a ``json`` would say anything that the other members do not."""
    return not content.keys() <= _IMPLIED_KEYS or content.get("id") is not None


def _named_parts(
    message: dict[str, Any], names: list[str], media: Sequence[Media]
) -> dict[str, Any]:
    """Return a message with the names of fields in place of the indexes of media files."""
    parts = []
    for part in message["content"]:
        if part["type"] in KINDS:
            part = {**part, "field": names[part["field"]]}
        elif part["type"] == "bbox":  # in pixels of the original image, so its size belongs to it
            size = _original_size(media[part["field"]])
            part = {**part, "field": names[part["field"]], **size}
        parts.append(part)
    return {**message, "content": parts}


def _original_size(medium: Media) -> dict[str, int | float | str]:
    """Return the width and height of a picture before it was processed, where they are known."""
    sides = {side: medium.facts.get(f"original_{side}") for side in ("width", "height")}
    return {
        side: value
        for side, original in sides.items()
        if (value := original or medium.facts.get(side)) is not None
    }
