"""Pairs of samples side by side, as a page: duplicates, and what two datasets share.

`mmstream duplicates`, `mmstream leakcheck` -> pairs.py -> samples.py
"""

from __future__ import annotations

from collections.abc import Iterable

from mmstream.display.cards import Card
from mmstream.display.markup import QUIET, html_text, page
from mmstream.display.samples import sample_html


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
