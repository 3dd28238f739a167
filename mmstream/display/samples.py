"""Samples and batches for notebooks: contact sheets, whole samples, conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from mmstream.display.contents import (
    address_of,
    batch_pictures,
    field_table,
    fields_named,
    messages_of,
    pictures_of,
    row_of,
    text_of,
)
from mmstream.display.markup import (
    MAX_FILE_BYTES,
    QUIET,
    details,
    html_text,
    page,
    picture,
    size_text,
    small_line,
)
from mmstream.display.pipelines import key_text, rows_of_sources
from mmstream.display.recordings import (
    Clip,
    Features,
    Recording,
    batch_recordings,
    clip_html,
    clip_tiles,
    features_html,
    file_html,
    file_thumbnail,
    recordings_of,
    sound_html,
    spectrogram,
    waveform,
)
from mmstream.display.tokens import tokens_html

MAX_TILES = 16
"""Samples of a contact sheet."""
MAX_PICTURES = 12
"""Pictures of one sample."""
MAX_TURNS = 20
"""Turns of one conversation."""
MAX_RECORDINGS = 4
"""Videos and sounds of one sample."""
MAX_JSON_CHARACTERS = 20_000
DEFAULT_SAMPLE_RATE = 16_000
"""Of decoded sounds, as of `AudioDecoder`."""


def samples_html(samples: Iterable[Any]) -> str:
    """Return samples side by side, each with its first picture and the start of its text."""
    tiles = []
    for sample in islice(samples, MAX_TILES):
        if isinstance(sample, Exception):
            tiles.append(_tile(f'<span style="color:#b00020">{html_text(sample, 200)}</span>'))
            continue
        pictures = pictures_of(sample)
        first = next(iter(pictures.items()), None)
        shown = "" if first is None else picture(first[1], 144, sample["__key__"])
        more = f'<div style="{QUIET}">{len(pictures)} images</div>' if len(pictures) > 1 else ""
        if first is None:
            for name, recording in islice(recordings_of(sample).items(), 1):
                shown = _recording_thumbnail(name, recording)
        tiles.append(_tile(shown, more, html_text(text_of(sample), 110), key=key_text(sample)))
    return _sheet(tiles)


def sample_html(
    sample: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    note: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
    sample_rate: int = DEFAULT_SAMPLE_RATE,
) -> str:
    """Return a whole sample: pictures, text, recordings, or a conversation with its media inline.

    Args:
        sample: raw or decoded.
        tokenizer: shows ``input_ids`` and ``labels`` as text, where the sample has them.
        note: what to say of the sample, such as its step and row.
        max_file_bytes: larger recordings get no player.
        sample_rate: samples per second of decoded sounds.
    """
    head = f"<b>{html_text(key_text(sample))}</b>"
    for words in filter(None, (address_of(sample), note)):
        head += f' <span style="{QUIET}">{html_text(words, 300)}</span>'
    parts = [head]
    pictures = pictures_of(sample)
    messages = messages_of(sample)
    inline = set(fields_named(messages[:MAX_TURNS]))
    shown = [picture(v, 288, n) for n, v in pictures.items() if n not in inline]
    parts.append(_sheet([f"<div>{item}</div>" for item in shown[:MAX_PICTURES]]))
    if len(shown) > MAX_PICTURES:
        parts.append(f'<div style="{QUIET}">... {len(shown) - MAX_PICTURES} more images</div>')
    text = sample.get("txt") or (not messages and text_of(sample))
    if isinstance(text, str | bytes):
        parts.append(
            f'<div style="max-width:60em;white-space:pre-wrap">{html_text(text, 2000)}</div>'
        )
    recordings = {
        name: _recording_html(name, recording, max_file_bytes, sample_rate)
        for name, recording in islice(recordings_of(sample).items(), MAX_RECORDINGS)
    }
    parts += [_turn(turn, sample, pictures, recordings) for turn in messages[:MAX_TURNS]]
    if len(messages) > MAX_TURNS:
        parts.append(f'<div style="{QUIET}">... {len(messages) - MAX_TURNS} more turns</div>')
    parts += [f"<div>{html}</div>" for name, html in recordings.items() if name not in inline]
    if tokenizer is not None and "input_ids" in sample:
        parts.append(tokens_html(tokenizer, sample))
    parts.append(field_table(sample))
    if "json" in sample:
        parts.append(details("json", _json_text(sample["json"]), MAX_JSON_CHARACTERS))
    return page(*parts)


def batch_html(batch: Mapping[str, Any]) -> str:
    """Return a contact sheet of a batch with the texts of its rows, and a table of its fields."""
    num_rows = len(batch["__key__"])
    lineage = batch.get("__lineage__")
    head = f"<b>Batch of {num_rows}</b>{html_text(rows_of_sources(batch), 300)}"
    if lineage:
        rows = f"rows {lineage.start} to {lineage.start + num_rows - 1} of the global batch"
        position = f"epoch {lineage.epoch}, step {lineage.step}, {rows}"
        head += f' <span style="{QUIET}">{position}</span>'
    num_more = num_rows - MAX_TILES
    more = f'<div style="{QUIET}">... {num_more} more rows</div>' if num_more > 0 else ""
    return page(head, _batch_sheet(batch), more, field_table(batch))


def _batch_sheet(batch: Mapping[str, Any]) -> str:
    """Return a contact sheet of a batch. Rows that are substitutes or not valid say why."""
    keys = batch["__key__"]
    lineage = batch.get("__lineage__")
    valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(keys)
    start = lineage.start if lineage else 0
    bad = {record.row - start: record.reason for record in lineage.bad} if lineage else {}
    pictures = batch_pictures(batch)
    recordings = batch_recordings(batch)
    tiles = []
    for row in range(min(len(keys), MAX_TILES)):
        side = 144 if len(pictures[row]) == 1 else 68
        thumbnails = [picture(value, side, keys[row]) for value in pictures[row][:4]]
        thumbnails += [_recording_thumbnail(*named) for named in recordings[row][:2]]
        shown = " ".join(thumbnails)
        note = "" if valid[row] else "not valid: padding"
        if row in bad:
            note = f"substitute for {bad[row]}" if valid[row] else f"not valid: {bad[row]}"
        warning = f'<span style="color:#b06000">{html_text(note, 150)}</span>' if note else ""
        text = html_text(text_of({name: row_of(value, row) for name, value in batch.items()}), 110)
        tiles.append(_tile(shown, warning, text, key=key_text(batch, row)))
    return _sheet(tiles)


def _tile(*parts: str, key: str = "") -> str:
    name = small_line(html_text(key, 40)) if key else ""
    style = "width:144px;overflow-wrap:anywhere;font-size:12px;line-height:1.35"
    return f'<div style="{style}">{"".join(map(_line, parts))}{name}</div>'


def _line(part: str) -> str:
    return f"<div>{part}</div>" if part else ""


def _sheet(tiles: Sequence[str]) -> str:
    style = "display:flex;flex-wrap:wrap;gap:12px;margin:8px 0"
    return f'<div style="{style}">{"".join(tiles)}</div>' if tiles else ""


def _turn(
    turn: Mapping[str, Any],
    sample: Mapping[str, Any],
    pictures: Mapping[str, Any],
    recordings: Mapping[str, str],
) -> str:
    """Return a message of a conversation as a bubble, with the media that it names."""
    role = str(turn.get("role", "?"))
    content = turn.get("content", "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = []
    for part in parts:
        field = part.get("field") if isinstance(part, Mapping) else None
        if isinstance(field, str) and field in pictures:
            shown.append(f"<div>{picture(pictures[field], 224, field)}</div>")
        elif isinstance(field, str) and field in recordings:
            shown.append(f"<div>{recordings[field]}</div>")
        elif isinstance(field, str) and isinstance(sample.get(field), bytes):
            shown.append(f"<div>{html_text(field, 60)}: {size_text(len(sample[field]))}</div>")
        else:
            text = part.get("text", part) if isinstance(part, Mapping) else part
            shown.append(html_text(text, 1500))
    tint = "rgba(70,130,220,.14)" if role == "assistant" else "rgba(128,128,128,.12)"
    indent = "3em" if role == "assistant" else "0"
    style = (
        f"background:{tint};border-radius:8px;padding:6px 10px;margin:6px 0 6px {indent};"
        "max-width:48em;white-space:pre-wrap"
    )
    return f'<div style="{style}">{small_line(html_text(role, 30))}{"".join(shown)}</div>'


def _recording_html(name: str, recording: Recording, max_file_bytes: int, sample_rate: int) -> str:
    """Return a video or a sound of a sample, as large as a page has room."""
    if isinstance(recording, bytes):
        return file_html(name, recording, max_file_bytes)
    if isinstance(recording, Clip):
        return clip_html(name, recording)
    if isinstance(recording, Features):
        return features_html(name, recording)
    return sound_html(name, recording, sample_rate, max_file_bytes)


def _recording_thumbnail(name: str, recording: Recording) -> str:
    """Return a video or a sound as a tile."""
    if isinstance(recording, bytes):
        return file_thumbnail(name, recording, 144)
    if isinstance(recording, Clip):
        tiles = clip_tiles(recording, 68, 4, label=name)
        return f'<div style="display:flex;flex-wrap:wrap;gap:4px">{"".join(tiles)}</div>'
    if isinstance(recording, Features):
        return spectrogram(recording.values, name, width=144)
    return waveform(recording.samples, 144, label=name)


def _json_text(value: Any) -> object:
    """Return JSON with indents, or the bytes where they are none."""
    try:
        if isinstance(value, bytes):
            return msgspec.json.format(value[: 2 * MAX_JSON_CHARACTERS], indent=2)
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return value
