"""Samples as tiles: a picture, players, the start of the text, or why the sample is bad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from markupsafe import Markup

from mmstream.dataset.source import load_indexes
from mmstream.display.contents import Recording, images_of, key_text, recordings_of, text_of
from mmstream.display.media import recording_tile, thumbnail
from mmstream.errors import MMStreamError, where
from mmstream.media.types import AUDIO_EXTENSIONS, BY_EXTENSION
from mmstream.types import SampleRef
from mmstream.view.content import Content
from mmstream.view.pages import link
from mmstream.view.spectrogram import TILE_HEIGHT, TILE_SECONDS, TILE_WIDTH, spectrogram_of

NUM_THREADS = 8
"""Samples that are read and drawn side by side."""

SIDE = 176
"""Pixels of the longer side of a picture."""

MAX_PLAYERS = 2
"""Players of one tile."""


class Tile(NamedTuple):
    """A sample of a grid."""

    address: str
    href: Markup
    key: str = ""
    media: Sequence[Markup] = ()
    players: Sequence[Markup] = ()
    text: object = ""
    problem: str = ""
    note: str = ""
    """What the page says of it, such as its row."""


def tiles_of(
    content: Content, refs: Sequence[SampleRef], notes: Iterable[str] | None = None
) -> list[Tile]:
    """Return tiles of samples, which are read side by side.

    Args:
        content: Holds the samples.
        refs: (shard, index) of each.
        notes: What to say of each.
    """
    load_indexes(content.data, [shard for shard, _ in refs])
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        tiles = pool.map(lambda ref: _tile(content, ref), refs)
        if notes is None:
            return list(tiles)
        return [tile._replace(note=note) for tile, note in zip(tiles, notes, strict=True)]


def _tile(content: Content, ref: SampleRef) -> Tile:
    address = where(content.data.name_of(ref[0]), ref[1])
    tile = Tile(address, link(*content.path, "sample", *ref))
    try:
        sample = content.read(*ref)
        images, recordings = images_of(sample), recordings_of(sample)
        key = key_text(sample)
        media = [thumbnail(image, SIDE, key) for image in islice(images.values(), 1)]
        if not images:
            media = [_recording(*named) for named in islice(recordings.items(), 1)]
        players = [player(content, ref, name) for name in islice(recordings, MAX_PLAYERS)]
        of_images = f", {len(images)} images" if len(images) > 1 else ""
        return tile._replace(
            key=key + of_images, media=media, players=players, text=text_of(sample)
        )
    except (MMStreamError, OSError) as error:
        return tile._replace(problem=str(error))


def _recording(name: str, recording: Recording) -> Markup:
    """Return a sound as its spectrogram, or else a recording as `recording_tile` shows it."""
    if isinstance(recording, bytes) and is_sound(name):
        sound = spectrogram_of(name, recording, (TILE_WIDTH, TILE_HEIGHT), TILE_SECONDS)
        if not sound.problem:
            picture = '<img class="sound" alt="{}" title="{}" src="{}"><div class="small">{}</div>'
            seconds = f"{sound.num_seconds:,.1f} s"
            return Markup(picture).format(sound.label, sound.label, sound.source, seconds)
    return recording_tile(name, recording)


def is_sound(name: str) -> bool:
    """Tell whether a file is a sound by its name."""
    return name.rpartition(".")[2] in AUDIO_EXTENSIONS


def player(content: Content, ref: SampleRef, name: str) -> Markup:
    """Return a player of a file of a sample; nothing where browsers do not play it."""
    if played_as(name) is None:
        return Markup()
    kind = "audio" if is_sound(name) else "video"
    tag = '<{} controls preload="none" aria-label="{}" src="{}"></{}>'
    return Markup(tag).format(kind, name, link(*content.path, "file", *ref, name), kind)


def played_as(name: str) -> str | None:
    """Return the media type that a browser plays a file as. None: it plays none."""
    media_type = BY_EXTENSION.get(name.rpartition(".")[2])
    return None if media_type is None else media_type.played_as
