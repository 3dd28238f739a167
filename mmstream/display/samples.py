"""`mm.show`, and samples, batches and datasets for people: sheets, pages, lines for a terminal.

`mm.show`, `mmstream show`, `mmstream convert --dry-run` -> samples.py -> contents.py, html.py
`mmstream info --stats`, `Statistics` in a notebook -> samples.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from markupsafe import Markup

from mmstream.display.contents import (
    Recording,
    address_of,
    caption_of,
    fields_named,
    images_of,
    key_text,
    messages_of,
    parts_of,
    recordings_of,
    row_json,
    row_of_batch,
    spread,
    text_of,
    token_counts,
    token_runs,
    tokens_text,
    uncounted,
)
from mmstream.display.html import (
    MAX_FILE_BYTES,
    cut,
    document,
    element,
    page,
    recording_html,
    recording_text,
    recording_tile,
    render,
    thumbnail,
)
from mmstream.display.packs import pack_html, pack_text
from mmstream.display.text import (
    MAX_FIELDS,
    describe,
    file_kind,
    kind_of,
    public_fields,
    size_text,
    start_of_text,
    value_text,
)
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.media.frames import FrameList
from mmstream.settings import checked
from mmstream.storage.store import local_path
from mmstream.types import IGNORED_LABEL

MAX_TILES = 16
"""Samples of a contact sheet."""
MAX_TILE_IMAGES = 4
"""Images of a sample in a tile."""
TILE_SIDE = 144
"""Pixels of the longer side of a tile's image."""
MAX_IMAGES = 12
"""Images of one sample."""
MAX_TURNS = 20
"""Turns of one conversation."""
MAX_RECORDINGS = 4
"""Videos and sounds of one sample."""
MAX_SOURCES = 40
"""Sources of a batch that are named."""


@dataclass(frozen=True)
class Shown:
    """What `show` returns: HTML in a notebook, text elsewhere.

    Attributes:
        html: one ``<div>`` without scripts or links; images are embedded.
        text: one line per sample or batch.
    """

    html: str
    text: str

    @checked()
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an HTML page that needs no other file, and opens in any browser.

        Its content security policy forbids all scripts, and forbids the browser to load anything.
        So a page of data from strangers is safe to open.

        Args:
            path: a local file. It is replaced if it exists.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> mm.show(dataset[0]).save("sample.html").name
            'sample.html'
        """
        path = Path(local_path(os.fspath(path)))
        title = next(iter(self.text.splitlines()), "mmstream")
        path.write_text(document(title, self.html), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@checked()
def show(value: Any, *, tokenizer: Any = None) -> Shown:
    """Return a view of samples, batches or datasets that a notebook displays.

    Videos are shown as some of their frames, decoded ones as the model gets them. Files of sounds
    are shown as a player.

    The output is bounded: long texts are cut, images are thumbnails, and of many rows the first are
    shown. Batches on a device are copied to the host. Datasets read some samples that are spread
    over them, up to 32 MiB.

    Batches of a pipeline with `mm.Flat` or `mm.Pack` are drawn row by row: documents and their
    borders, how many tokens are learned, pictures, positions, padding and free room.

    Args:
        value: a sample (raw or decoded), a list of samples (`Pipeline.take`), a batch (on the host
            or a device), a Dataset or a view of one.
        tokenizer: shows ``input_ids`` as text, with the tokens that the model learns in colour. For
            samples that a `TextDecoder` with this tokenizer has decoded, and for batches without
            padding.

    Returns:
        An object that a notebook displays as HTML. Elsewhere its ``repr`` is text. Its `Shown.save`
        writes a page.

    Raises:
        ConfigError: `value` is none of these, or has no tokens to show.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.show(dataset[0])
        <sample 000000001: ...>
    """
    if isinstance(value, Mapping) and value.keys() >= {"cu_seq_lens_q", "document_row"}:
        return Shown(pack_html(value, tokenizer), pack_text(value))
    if tokenizer is not None:
        return _show_tokens(value, tokenizer)
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), str):
        return Shown(sample_html(value), describe(value))
    if isinstance(value, Mapping) and isinstance(value.get("__key__"), list):
        return Shown(batch_html(value), describe(value))
    if hasattr(value, "_repr_html_"):
        return Shown(value._repr_html_(), repr(value))
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        first = range(min(len(value), MAX_TILES))
        return Shown(page(sheet(value, first)), "\n".join(describe(item) for item in value))
    raise ConfigError(
        "show: give a sample, a list of samples, a batch or a Dataset, not a "
        f"{type(value).__name__}"
    )


def _show_tokens(value: Any, tokenizer: Any) -> Shown:
    """Show decoded samples whole, with their tokens."""
    samples = [value] if isinstance(value, Mapping) else value
    if not isinstance(samples, Sequence) or not all(
        isinstance(item, Mapping) and isinstance(item.get("__key__"), str) and "input_ids" in item
        for item in samples
    ):
        raise ConfigError(
            "show: tokenizer= goes with decoded samples, such as pipeline.take(8) of a pipeline "
            "with mm.Decode(text=mm.TextDecoder(tokenizer))"
        )
    cards = [Card(address_of(sample), sample) for sample in samples]
    text = "\n".join(describe(sample) for sample in samples)
    return Shown(cards_html("", cards, tokenizer), text)


# -- whole samples ---------------------------------------------------------------------------------


def sample_html(sample: Mapping[str, Any], tokenizer: Any = None) -> str:
    """Return a whole sample as the output of a cell; arguments as of `sample_part`."""
    return page(sample_part(sample, tokenizer=tokenizer))


def sample_part(
    sample: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    note: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Markup:
    """Return a whole sample: images, text, recordings, or a conversation with its media inline.

    Args:
        sample: raw or decoded.
        tokenizer: shows ``input_ids`` and ``labels`` as text, where the sample has them.
        note: what to say of the sample, such as its step and row.
        max_file_bytes: larger recordings get no player.
    """
    images, messages = images_of(sample), messages_of(sample)
    turns = messages[:MAX_TURNS]
    inline = set(fields_named(turns))
    beside = [name for name in images if name not in inline]
    recordings = {
        name: recording_html(name, recording, max_file_bytes)
        for name, recording in islice(recordings_of(sample).items(), MAX_RECORDINGS)
    }
    media = {name: thumbnail(images[name], 224, name) for name in inline & images.keys()}
    has_tokens = tokenizer is not None and "input_ids" in sample
    return render(
        "sample.html",
        key=key_text(sample),
        notes=[address_of(sample), note],
        images=[thumbnail(images[name], 288, name) for name in beside[:MAX_IMAGES]],
        num_more_images=len(beside) - MAX_IMAGES,
        caption=caption_of(sample),
        turns=[_turn(turn, sample, recordings | media) for turn in turns],
        num_more_turns=len(messages) - MAX_TURNS,
        recordings=[html for name, html in recordings.items() if name not in inline],
        token_counts=token_counts(sample) if has_tokens else "",
        runs=token_runs(tokenizer, sample) if has_tokens else [],
        fields=_field_rows(sample),
        json=_json_text(sample["json"]) if "json" in sample else "",
    )


def _turn(
    turn: Mapping[str, Any], sample: Mapping[str, Any], media: Mapping[str, Markup]
) -> tuple[str, list[Any]]:
    """Return the role of a message and its parts: texts, and the media that it names."""
    role = str(turn.get("role", "?"))
    parts: list[Any] = [cut(role, 30)]
    for part in parts_of(turn):
        field = part.get("field")
        if isinstance(field, str) and field in media:
            parts.append(media[field])
        elif isinstance(field, str) and isinstance(sample.get(field), bytes):
            parts.append(f"{field}: {size_text(len(sample[field]))}")
        else:
            parts.append(cut(part.get("text", part), 1500))
    return role, parts


def _json_text(value: Any) -> object:
    """Return JSON with indents, or the bytes where they are none."""
    try:
        if isinstance(value, bytes):
            return msgspec.json.format(value, indent=2)
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return value


def _field_rows(fields: Mapping[str, Any]) -> list[tuple[object, str, object]]:
    """Return the name and kind of each field, and the range or start of its values."""
    return [
        (cut(name, 60), kind_of(value), cut(_values_text(name, value), 100))
        for name, value in public_fields(fields)
    ]


def _values_text(name: str, value: Any) -> object:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        size = int(value.numel() if hasattr(value, "numel") else value.size)
        if name == "attention_mask" and size:
            return f"{100 * (1 - float(value.sum()) / size):.0f} % padding"
        if name == "labels":
            return f"{int((value != IGNORED_LABEL).sum())} tokens to learn"
        return f"{float(value.min()):.4g} to {float(value.max()):.4g}" if size else ""
    if isinstance(value, bytes):
        return value if start_of_text(value) and not file_kind(value) else ""
    return value if isinstance(value, str | int | float | dict) else ""


# -- contact sheets --------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A sample of a contact sheet, or of a grid."""

    media: list[Markup]
    key: str = ""
    text: object = ""
    note: str = ""


def sheet(samples: Sequence[Any], positions: Iterable[int]) -> Markup:
    """Return samples side by side, each with its first images and the start of its text."""
    return element("sheet", [_tile_at(samples, position) for position in positions])


def _tile_at(samples: Sequence[Any], position: int) -> Tile:
    """Return the tile of a sample, or why it cannot be read."""
    try:
        return tile_of(samples[position], TILE_SIDE, recording_tile)
    except (MMStreamError, OSError) as error:
        return Tile([element("problem", error)])


def tile_of(
    sample: Mapping[str, Any], side: int, recording: Callable[[str, Recording], Markup]
) -> Tile:
    """Return the first images of a sample, or else its first recording, and the start of its text.

    Args:
        sample: Raw or decoded, or a row of a batch.
        side: Pixels of the longer side of an image. Several images are as large together.
        recording: From the name of a recording and the recording to what is shown of it.
    """
    images, key = images_of(sample), key_text(sample)
    each_side = side if len(images) == 1 else (side - 8) // 2
    media = [thumbnail(each, each_side, key) for each in islice(images.values(), MAX_TILE_IMAGES)]
    if not media:
        media = [recording(*named) for named in islice(recordings_of(sample).items(), 1)]
    of_images = f", {len(images)} images" if len(images) > 1 else ""
    return Tile(media, key + of_images, text_of(sample))


def batch_html(batch: Mapping[str, Any]) -> str:
    """Return a contact sheet of a batch with the texts of its rows, and a table of its fields."""
    num_rows = len(batch["__key__"])
    lineage = batch.get("__lineage__")
    sources = Counter(batch.get("__source__", ())).most_common(MAX_SOURCES)
    position = ""
    if lineage:
        start = lineage.start * lineage.repeat
        rows = f"rows {start} to {start + num_rows - 1} of the global batch"
        position = f"epoch {lineage.epoch}, step {lineage.step}, {rows}"
    notes = [", ".join(f"{count} {name}" for name, count in sources), position]
    return page(
        element("head", f"Batch of {num_rows}", notes),
        element("sheet", _tiles_of_batch(batch)),
        element("more", num_rows - MAX_TILES, "rows"),
        element("table", _field_rows(batch), ("field", "kind", "values")),
    )


def _tiles_of_batch(batch: Mapping[str, Any]) -> list[Tile]:
    """Return the first rows of a batch. Those that are substitutes or not valid say why."""
    num_rows = len(batch["__key__"])
    lineage = batch.get("__lineage__")
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * num_rows
    repeat = lineage.repeat if lineage else 1
    reasons = {bad.row - lineage.start: bad.reason for bad in lineage.bad} if lineage else {}
    tiles = []
    for row in range(min(num_rows, MAX_TILES)):
        reason = reasons.get(row // repeat)
        note = "" if valid[row] else f"not valid: {reason or 'padding'}"
        if reason is not None and valid[row]:
            note = f"substitute for {reason}"
        tile = tile_of(row_of_batch(batch, row), TILE_SIDE, recording_tile)
        tiles.append(tile._replace(note=note))
    return tiles


# -- datasets --------------------------------------------------------------------------------------

MAX_PREVIEW_BYTES = 32 * 2**20
"""What showing a dataset may read. A dataset of long videos gets no thumbnails."""


def dataset_html(dataset: Any) -> str:
    """Return the line of a `Dataset` or a view, and samples that are spread over it."""
    mean_bytes = max(1, dataset.num_bytes // max(1, len(dataset)))
    positions = spread(len(dataset), min(MAX_TILES, MAX_PREVIEW_BYTES // mean_bytes))
    return page(
        element("head", repr(dataset)),
        sheet(dataset, positions),
        element("more", len(dataset) - len(positions), "samples"),
    )


# -- samples one below the other -------------------------------------------------------------------

MAX_EMBEDDED_BYTES = 8_000_000
"""Largest recording that a page embeds."""

MAX_PAGE_CHARACTERS = 128_000_000
"""Where a page has become so large, no more recordings are embedded."""

MAX_LINE_CHARACTERS = 500

MAX_SHORT_BYTES = 32
"""Files up to this size are shown themselves: a class, a number, an id."""


@dataclass(frozen=True)
class Card:
    """A sample to show.

    Attributes:
        address: ``shard[index]``.
        sample: Raw or decoded. None: it cannot be read.
        note: What to say of it, such as its step and row.
        problem: Why it is bad.
    """

    address: str
    sample: Mapping[str, Any] | None
    note: str = ""
    problem: str = ""


def cards_html(
    title: str,
    cards: Iterable[Card],
    tokenizer: Any = None,
) -> str:
    """Return all samples one below the other.

    Args:
        title: What they are, as text.
        cards: The samples. Each is read when its turn comes.
        tokenizer: Shows ``input_ids`` and ``labels`` as text.
    """

    def rows() -> Iterator[tuple[str, list[tuple[Card, Markup]]]]:
        num_characters = 0
        for card in cards:
            left = (MAX_PAGE_CHARACTERS - num_characters) * 3 // 4  # base64 takes 4 for 3 bytes
            max_bytes = max(0, min(MAX_EMBEDDED_BYTES, left))
            sample = _sample_part(card, max_bytes, tokenizer)
            num_characters += len(sample)
            yield "", [(card, sample)]

    return page(render("cards.html", title=title, rows=rows()))


def pairs_html(title: str, pairs: Iterable[tuple[str, Card, Card]]) -> str:
    """Return pairs of samples one below the other, such as duplicates.

    Args:
        title: What they are, as text.
        pairs: (what they share, the first sample, the later sample). Each is read when its turn
            comes.
    """
    rows = (
        (note, [(card, _sample_part(card, max_bytes=0)) for card in cards])
        for note, *cards in pairs
    )
    return page(render("cards.html", title=title, rows=rows))


def _sample_part(card: Card, max_bytes: int, tokenizer: Any = None) -> Markup:
    if card.sample is None:
        return Markup()
    return sample_part(card.sample, tokenizer=tokenizer, note=card.note, max_file_bytes=max_bytes)


# -- for a terminal --------------------------------------------------------------------------------


def card_lines(card: Card, tokenizer: Any = None) -> Iterator[str]:
    """Yield the lines of a sample for a terminal: address, fields, text, conversation, tokens."""
    key = "" if card.sample is None else escaped(key_text(card.sample), 200)
    yield "  ".join(filter(None, (escaped(card.address), key, card.note)))
    if card.problem:
        yield f"  bad: {escaped(card.problem, 1000)}"
    if card.sample is None:
        return
    yield from _field_lines(card.sample)
    yield from _text_lines(card.sample)
    if tokenizer is not None and "input_ids" in card.sample:
        yield f"  {token_counts(card.sample)} in [[ ]]:"
        for line in tokens_text(tokenizer, card.sample).splitlines():
            yield f"    {_line(line)}"


def _field_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield what each field holds, and what its recording was decoded to."""
    recordings = recordings_of(sample)
    for name, value in public_fields(sample):
        file = recordings.get(name)
        is_whole = isinstance(file, bytes | FrameList)  # not decoded
        text = recording_text(cast(Recording, file)) if is_whole else _field_text(name, value)
        yield f"  {escaped(name, 60)}: {escaped(text, 300)}"
    for name, recording in islice(recordings.items(), MAX_FIELDS):
        if not isinstance(recording, bytes | FrameList):
            yield f"  {escaped(name, 60)} decoded: {recording_text(recording)}"


def _text_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the caption, and the conversation or another JSON object."""
    if caption := caption_of(sample):
        yield f"  text: {_line(caption)}"
    messages, row = messages_of(sample), row_json(sample)
    for turn in messages[:MAX_TURNS]:
        yield f"  {escaped(turn.get('role', '?'), 30)}: {_line(_content_text(turn))}"
    if len(messages) > MAX_TURNS:
        yield f"  ... {len(messages) - MAX_TURNS} more turns"
    if row and not messages:
        yield f"  json: {_line(json.dumps(row, ensure_ascii=False, default=str))}"


def _field_text(name: str, value: Any) -> str:
    has_own_line = name in ("txt", "json")
    if isinstance(value, bytes) and len(value) <= MAX_SHORT_BYTES and not has_own_line:
        return value_text(value)  # such as a class
    return kind_of(value)


def _content_text(turn: Mapping[str, Any]) -> str:
    """Return the content of a message; media as ``<image 0.jpg>``."""
    return " ".join(
        str(part["text"])
        if "text" in part
        else f"<{part.get('type', '?')} {part.get('field', '')}>"
        for part in parts_of(turn)
    )


def _line(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return escaped(text, MAX_LINE_CHARACTERS)


# -- statistics of a dataset, as a table -----------------------------------------------------------

MAX_COUNTS = 16
"""Fields, and classes, that are named, the most frequent first."""

STATISTICS_HEAD = ("", "count", "min", "5 %", "median", "mean", "95 %", "max")


_UNITS = {
    "image width": "pixels",
    "image height": "pixels",
    "video width": "pixels",
    "video height": "pixels",
    "audio sample rate": "Hz",
}


def statistics_lines(stats: Any) -> Iterator[str]:
    """Yield `Statistics` for a terminal: what was read, and a table."""
    yield _measured_text(stats)
    yield from (f"  bad: {reason}" for reason in stats.reasons)
    rows = [STATISTICS_HEAD, *_statistics_rows(stats)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        yield f"  {name.ljust(widths[0])}  {numbers}"
    yield from (f"  {line}" for line in _notes(stats))


def statistics_html(stats: Any) -> str:
    """Return `Statistics` for a notebook or a page: what was read, and a table."""
    return page(
        element("head", "Statistics", [_measured_text(stats)]),
        *(element("problem", reason, 500) for reason in stats.reasons),
        element("table", _statistics_rows(stats), STATISTICS_HEAD),
        element("table", [(cut(note, 2000),) for note in _notes(stats)]),
    )


def _measured_text(stats: Any) -> str:
    text = f"{stats.num_measured:,} of {stats.num_samples:,} samples measured, spread over all"
    return text + (f"; {stats.num_bad:,} bad" if stats.num_bad else "")


def _notes(stats: Any) -> Iterator[str]:
    """Yield how many samples have each field and class, and what the table does not say."""
    if stats.fields:
        yield f"samples with each field: {_counts_text(stats.fields)}"
    if stats.classes:
        yield f"classes ({len(stats.classes):,}): {_counts_text(stats.classes)}"
    if stats.uncounted_media:
        yield uncounted(stats.uncounted_media)
    for kind, hours in stats.hours.items():
        line = f"hours of {kind}: {_number_text('hours', hours)}"
        if stats.num_measured < stats.num_samples:
            in_all = _number_text("hours", hours * stats.num_samples / stats.num_measured)
            line += f" in the samples measured, about {in_all} in all"
        yield line


def _counts_text(counts: Mapping[str, int]) -> str:
    texts = [f"{escaped(name)} {count:,}" for name, count in islice(counts.items(), MAX_COUNTS)]
    if len(counts) > MAX_COUNTS:
        texts.append(f"{len(counts) - MAX_COUNTS:,} more")
    return ", ".join(texts)


def _statistics_rows(stats: Any) -> list[list[str]]:
    """Return the rows of the table, below `STATISTICS_HEAD`."""
    rows = []
    for name, numbers in stats.summary()["values"].items():
        count, *others = numbers.values()
        unit = f" ({_UNITS[name]})" if name in _UNITS else ""
        rows.append([name + unit, f"{count:,}", *(_number_text(name, n) for n in others)])
    return rows


def _number_text(name: str, number: float) -> str:
    if name.endswith("bytes"):
        return size_text(number)
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
