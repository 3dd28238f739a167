"""Samples one below the other, each of them whole, as a page or as text for a terminal.

`mmstream show`, `mm.show` with a tokenizer -> cards.py -> samples.py, tokens.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mmstream.display.contents import (
    MAX_FIELDS,
    kind_of,
    messages_of,
    row_json,
    text_of,
)
from mmstream.display.markup import QUIET, html_text, page, problem_html
from mmstream.display.pipelines import key_text
from mmstream.display.recordings import field_text, is_media_file, recording_text, recordings_of
from mmstream.display.sample_dict import value_text
from mmstream.display.samples import DEFAULT_SAMPLE_RATE, MAX_TURNS, sample_html
from mmstream.display.tokens import token_counts, tokens_text
from mmstream.errors import escaped

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
    head: str,
    cards: Iterable[Card],
    tokenizer: Any = None,
    sample_rate: int = DEFAULT_SAMPLE_RATE,
) -> str:
    """Return all samples one below the other.

    Args:
        head: What they are, as text.
        cards: The samples. Each is read when its turn comes.
        tokenizer: Shows ``input_ids`` and ``labels`` as text.
        sample_rate: Samples per second of decoded sounds.
    """
    style = "border-top:1px solid rgba(128,128,128,.35);padding:12px 0"
    parts: list[str] = []
    num_characters = 0
    for card in cards:
        left = (MAX_PAGE_CHARACTERS - num_characters) * 3 // 4
        shown = problem_html(card.problem, 1000) if card.problem else ""
        if card.sample is None:
            shown = f"<b>{html_text(card.address, 200)}</b>{_note_html(card.note)}{shown}"
        else:
            shown += sample_html(
                card.sample,
                tokenizer=tokenizer,
                note=card.note,
                max_file_bytes=max(0, min(MAX_EMBEDDED_BYTES, left)),
                sample_rate=sample_rate,
            )
        parts.append(f'<div style="{style}">{shown}</div>')
        num_characters += len(shown)
    title = f'<p style="font-size:1.2em">{html_text(head, 1000)}</p>' if head else ""
    return page(title, *parts)


def _note_html(note: str) -> str:
    return f' <span style="{QUIET}">{html_text(note, 300)}</span>' if note else ""


def card_lines(
    card: Card, tokenizer: Any = None, sample_rate: int = DEFAULT_SAMPLE_RATE
) -> Iterator[str]:
    """Yield the lines of a sample for a terminal: address, fields, text, conversation, tokens."""
    key = "" if card.sample is None else escaped(key_text(card.sample), 200)
    yield "  ".join(filter(None, (escaped(card.address), key, card.note)))
    if card.problem:
        yield f"  bad: {escaped(card.problem, 1000)}"
    if card.sample is None:
        return
    sample = card.sample
    yield from _field_lines(sample, sample_rate)
    messages = messages_of(sample)
    text = sample.get("txt") or (not messages and text_of(sample))
    if isinstance(text, str | bytes) and text:
        yield f"  text: {_line(text)}"
    for turn in messages[:MAX_TURNS]:
        yield f"  {escaped(turn.get('role', '?'), 30)}: {_line(_content_text(turn))}"
    if len(messages) > MAX_TURNS:
        yield f"  ... {len(messages) - MAX_TURNS} more turns"
    row = row_json(sample)
    if row and not messages:
        yield f"  json: {_line(json.dumps(row, ensure_ascii=False, default=str))}"
    if tokenizer is not None and "input_ids" in sample:
        yield f"  {token_counts(sample)} in [[ ]]:"
        for line in tokens_text(tokenizer, sample).splitlines():
            yield f"    {_line(line)}"


def _field_lines(sample: Mapping[str, Any], sample_rate: int) -> Iterator[str]:
    """Yield what each field holds, and what its recording was decoded to."""
    public = ((name, value) for name, value in sample.items() if name[:2] != "__")
    for name, value in islice(public, MAX_FIELDS):
        yield f"  {escaped(name, 60)}: {_field_text(name, value)}"
    for name, recording in islice(recordings_of(sample).items(), MAX_FIELDS):
        if not isinstance(recording, bytes):
            yield f"  {escaped(name, 60)} decoded: {recording_text(recording, sample_rate)}"


def _field_text(name: str, value: Any) -> str:
    if is_media_file(name, value):
        return escaped(field_text(value), 300)
    has_own_line = name in ("txt", "json")
    if isinstance(value, bytes) and len(value) <= MAX_SHORT_BYTES and not has_own_line:
        return value_text(value)  # such as a class
    return kind_of(value)


def _content_text(turn: Mapping[str, Any]) -> str:
    """Return the content of a message; media as ``<image 0.jpg>``."""
    content = turn.get("content", "")
    if not isinstance(content, list):
        return str(content)
    words = []
    for part in content:
        if isinstance(part, Mapping) and "text" not in part:
            words.append(f"<{part.get('type', '?')} {part.get('field', '')}>")
        else:
            words.append(str(part.get("text") if isinstance(part, Mapping) else part))
    return " ".join(words)


def _line(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return escaped(text, MAX_LINE_CHARACTERS)


# -- pairs of samples side by side: duplicates, and what two datasets share ------------------------


def pairs_html(head: str, pairs: Iterable[tuple[str, Card, Card]]) -> str:
    """Return pairs of samples one below the other.

    Args:
        head: What they are, as text.
        pairs: (what they share, the first sample, the later sample). Each is read when its turn
            comes.
    """
    parts = [f'<p style="font-size:1.2em">{html_text(head, 1000)}</p>']
    for note, first, second in pairs:
        sides = "".join(
            f'<div style="flex:1 1 0;min-width:0">{_card_html(card)}</div>'
            for card in (first, second)
        )
        parts.append(
            '<div style="border-top:1px solid rgba(128,128,128,.35);padding:12px 0">'
            f'<div style="{QUIET}">{html_text(note, 300)}</div>'
            f'<div style="display:flex;gap:24px">{sides}</div></div>'
        )
    return page(*parts)


def _card_html(card: Card) -> str:
    if card.sample is None:
        return f"<b>{html_text(card.address, 200)}</b> {html_text(card.problem, 1000)}"
    return sample_html(card.sample, note=card.note, max_file_bytes=0)
