"""Text as a model gets it: its tokens, those that it learns apart from those that are masked.

samples.py, cards.py, packs.py -> tokens.py -> markup.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mmstream.display.markup import QUIET, html_text
from mmstream.types import IGNORED_LABEL

MAX_TOKENS = 8192
"""Tokens of one text that are shown."""

MIN_REPEATS = 8
"""So many equal tokens in a row are shown as one, with their number: those of an image."""

LEARNED = "background:rgba(0,160,80,.28)"


class TokenRun(NamedTuple):
    """Tokens in a row that are all learned, or all masked."""

    text: str
    is_learned: bool


def token_runs(tokenizer: Any, sample: Mapping[str, Any]) -> list[TokenRun]:
    """Return the text of a sample's tokens.

    Args:
        tokenizer: The tokenizer that made them.
        sample: Has ``input_ids`` and ``labels``, and ``attention_mask`` where it is padded.
    """
    ids = [int(i) for i in sample["input_ids"]]
    labels = [int(i) for i in sample.get("labels", ids)]
    mask = [int(i) for i in sample.get("attention_mask", [1] * len(ids))]
    tokens = [
        (token, label != IGNORED_LABEL)
        for token, label, is_text in zip(ids, labels, mask, strict=True)
        if is_text
    ]
    runs = [TokenRun(text, learned) for text, learned in _runs(tokenizer, tokens[:MAX_TOKENS])]
    if len(tokens) > MAX_TOKENS:
        runs.append(TokenRun(f" ... {len(tokens) - MAX_TOKENS:,} more tokens", False))
    return runs


def _runs(tokenizer: Any, tokens: list[tuple[int, bool]]) -> Iterator[tuple[str, bool]]:
    start = 0
    for stop in range(1, len(tokens) + 1):
        if stop < len(tokens) and tokens[stop][1] == tokens[start][1]:
            continue
        yield _text(tokenizer, [token for token, _ in tokens[start:stop]]), tokens[start][1]
        start = stop


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of token ids. Many equal ones become ``<image> x 576``."""
    parts = []
    start = i = 0
    while i < len(ids):
        stop = i
        while stop < len(ids) and ids[stop] == ids[i]:
            stop += 1
        if stop - i >= MIN_REPEATS:
            parts += [_decode(tokenizer, ids[start:i]), _decode(tokenizer, ids[i : i + 1])]
            parts.append(f" x {stop - i} ")
            start = stop
        i = stop
    return "".join([*parts, _decode(tokenizer, ids[start:])])


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""


def tokens_html(tokenizer: Any, sample: Mapping[str, Any]) -> str:
    """Return the tokens of a sample. What the model learns is coloured."""
    runs = token_runs(tokenizer, sample)
    spans = [
        f'<span style="{LEARNED}">{text}</span>' if learned else text
        for text, learned in ((html_text(run.text, 20_000), run.is_learned) for run in runs)
    ]
    style = "white-space:pre-wrap;max-width:60em;margin:4px 0"
    return (
        f'<div style="{QUIET};font-size:11px">{token_counts(sample)}; the model learns the '
        f'<span style="{LEARNED}">coloured</span> ones</div><pre style="{style}">'
        f"{''.join(spans)}</pre>"
    )


def tokens_text(tokenizer: Any, sample: Mapping[str, Any]) -> str:
    """Return the tokens of a sample as text. What the model learns stands in double brackets."""
    runs = token_runs(tokenizer, sample)
    return "".join(f"[[{run.text}]]" if run.is_learned else run.text for run in runs)


def uncounted(kinds: Iterable[str]) -> str:
    """Return that these kinds of media are not in the numbers of tokens, and what counts them."""
    names = " and ".join(f"{kind}s" if kind != "audio" else kind for kind in kinds)
    return (
        f"tokens of {names} are not counted: --tokenizer with the folder of a whole Qwen-VL model "
        "counts them, or `mmstream plan --pipeline` with the pipeline of training"
    )


def token_counts(sample: Mapping[str, Any]) -> str:
    """Return how many tokens a sample has, and how many of them are learned."""
    mask = sample.get("attention_mask")
    num_tokens = len(sample["input_ids"]) if mask is None else int(sum(int(m) for m in mask))
    labels = sample.get("labels", sample["input_ids"])
    num_learned = sum(int(label) != IGNORED_LABEL for label in labels)
    return f"{num_tokens:,} tokens, {num_learned:,} learned"
