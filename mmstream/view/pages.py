"""What the pages share: templates, what an address says, parts of lists, and samples as tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from mmstream.dataset.dataset import load_indexes
from mmstream.display.contents import Recording, recordings_of
from mmstream.display.html import (
    TILE_SECONDS,
    TILE_SPECTROGRAM_SIZE,
    element,
    environment,
    played_as,
    recording_tile,
    spectrogram_of,
)
from mmstream.display.samples import tile_of
from mmstream.errors import ConfigError, MMStreamError, escaped, where
from mmstream.media.types import kind_of
from mmstream.types import SampleRef
from mmstream.view.content import Content

MAX_NUMBER = 1 << 53
"""Largest number of an address."""


def link(*path: object, **query: object) -> Markup:
    """Return an address of this server, escaped for HTML. What is None or "" is left out.

    Examples:
        >>> link("sample", 3, 17, where='a < "b"')
        Markup('/sample/3/17?where=a+%3C+%22b%22')
    """
    given = {name: value for name, value in query.items() if value not in (None, "")}
    address = "/" + "/".join(quote(str(part), safe="", errors="surrogateescape") for part in path)
    return escape(address + ("?" + urlencode(given, errors="replace") if given else ""))


TEMPLATES = environment(Path(__file__).with_name("templates"))
TEMPLATES.globals |= {"link": link}

NAVIGATION = (
    ("samples", "Samples", "/"),
    ("order", "Order", "/order"),
    ("problems", "Problems", "/problems"),
    ("statistics", "Statistics", "/statistics"),
    ("run", "Run", "/run"),
)


def show(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page.

    Args:
        request: What it answers.
        template: In ``templates/``.
        status: Of HTTP.
        values: For the template.
    """
    text = TEMPLATES.get_template(template).render(
        values,
        url=request.app.state.content.url,
        navigation=NAVIGATION,
        query=request.query_params,
    )
    return HTMLResponse(text, status)


def number_of(values: Mapping[str, str], name: str, default: int = 0, least: int = 0) -> int:
    """Return a whole number of an address or a form.

    Raises:
        ConfigError: It is none, or too small or large.
    """
    text = values.get(name, "").strip().replace(",", "") or str(default)
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= MAX_NUMBER):
        raise ConfigError(f"{name} {escaped(repr(text))}: give a whole number from {least} up")
    return int(text)


class Pager(NamedTuple):
    """Which part of a list a page shows."""

    start: int
    stop: int
    total: int
    previous: Markup | None
    """Address of the part before."""
    next: Markup | None

    @classmethod
    def of(cls, request: Request, size: int, total: int) -> Pager:
        """Return the part that begins at ``start`` of an address, or the last one."""
        start = min(number_of(request.query_params, "start"), max(0, total - 1) // size * size)
        stop = min(start + size, total)

        address = request.url.remove_query_params("token")

        def at(position: int) -> Markup:
            return escape(str(address.include_query_params(start=position)))

        before = at(max(0, start - size)) if start else None
        return cls(start, stop, total, before, at(stop) if stop < total else None)


# -- samples as tiles ------------------------------------------------------------------------------
#
# A picture, players, the start of the text, or why the sample is bad.

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
        shown, names = tile_of(sample, SIDE, _recording), islice(recordings_of(sample), MAX_PLAYERS)
        players = [player(content, ref, name) for name in names]
        return tile._replace(key=shown.key, media=shown.media, players=players, text=shown.text)
    except (MMStreamError, OSError) as error:
        return tile._replace(problem=str(error))


def _recording(name: str, recording: Recording) -> Markup:
    """Return a sound as its spectrogram, or else a recording as `recording_tile` shows it."""
    if isinstance(recording, bytes) and is_sound(name):
        sound = spectrogram_of(name, recording, TILE_SPECTROGRAM_SIZE, TILE_SECONDS)
        if not sound.problem:
            picture = '<img class="sound" alt="{}" title="{}" src="{}"><div class="small">{}</div>'
            seconds = f"{sound.num_seconds:,.1f} s"
            return Markup(picture).format(sound.label, sound.label, sound.source, seconds)
    return recording_tile(name, recording)


def is_sound(name: str) -> bool:
    """Tell whether a file is a sound by its name."""
    return kind_of(name) == "audio"


def player(content: Content, ref: SampleRef, name: str) -> Markup:
    """Return a player of a file of a sample; nothing where browsers do not play it."""
    if played_as(name) is None:
        return Markup()
    kind = "audio" if is_sound(name) else "video"
    return element(kind, link(*content.path, "file", *ref, name), name, "none")
