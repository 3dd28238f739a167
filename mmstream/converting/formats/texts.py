"""Rows of The Cauldron and FineVision. Part of step 2 of a conversion.

{"images": [{"bytes": ..., "path": null}], "texts": [{"user": "...", "assistant": "..."}]}

What else is said of a pair, such as The Cauldron's ``source``, stays under ``texts``.
"""

from __future__ import annotations

from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import pair_of, parse_dialogue, rest_of
from mmstream.converting.formats.fields import expect

FACTS = (
    *("source", "relevance_ratings", "relevance_min", "formatting_ratings", "formatting_min"),
    *("visual_dependency_ratings", "visual_dependency_min"),
    *("image_correspondence_ratings", "image_correspondence_min"),
)


def is_texts(row: dict[str, Any]) -> bool:
    """Tell whether a row has a list of questions and answers in ``texts``."""
    turns = row.get("texts")
    return isinstance(turns, list) and any(isinstance(turn, dict) for turn in turns)


def texts(row: dict[str, Any]) -> Draft:
    """Return the draft of pictures with questions and answers about them.

    Pictures come before the first question, as Idefics was trained.
    """
    items = expect(row.get("texts"), list, "texts")
    if not items:
        raise RowError("texts is empty")
    turns = []
    for i, item in enumerate(items):
        name = f"texts[{i}]"
        user = expect(expect(item, dict, name).get("user"), str, f"{name}: user")
        answer = expect(item.get("assistant"), str, f"{name}: assistant")
        turns += pair_of(user, answer)
    rest = rest_of("texts", items, {"user", "assistant"})
    return parse_dialogue(row, {"messages": turns}, {"texts"}, main=rest, kept=FACTS)
