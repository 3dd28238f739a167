"""Samples of another dataset on their way into a new one.

tars -> STORED SAMPLES -> drafts -> media -> shard

By default all of their fields are taken byte for byte. Where media are checked or changed, their
images, audios and videos are media of a `Draft`, as those of a row are.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmstream.converting.draft import Draft, Kind, Media, MediaRef, StoredSample
from mmstream.converting.media.options import MediaOptions
from mmstream.decoding.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

__all__ = ["draft_of", "media_of"]


def draft_of(sample: StoredSample, options: MediaOptions) -> Draft:
    """Return the draft of a stored sample. With no checks or changes, it has no media."""
    if options.is_plain:
        return Draft({}, fields=sample.fields, key=sample.key)
    media = tuple(
        MediaRef(kind, name, data, field=name)
        for name, data in sample.fields.items()
        if (kind := _kind_of(name)) is not None
    )
    others = {name: data for name, data in sample.fields.items() if _kind_of(name) is None}
    return Draft({}, media, fields=others, key=sample.key)


def media_of(fields: Mapping[str, bytes]) -> list[Media]:
    """Return the media among the fields of a sample, by their names. They are not read."""
    return [
        Media(name.rpartition(".")[2], data)
        for name, data in fields.items()
        if _kind_of(name) is not None
    ]


def _kind_of(field: str) -> Kind | None:
    extension = field.rpartition(".")[2]
    if extension in IMAGE_EXTENSIONS:
        return "image"
    if extension in VIDEO_EXTENSIONS:
        return "video"
    return "audio" if extension in AUDIO_EXTENSIONS else None
