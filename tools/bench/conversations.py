"""Rows of captions -> rows of conversations, for benchmarks and tests of vision-language models.

Each caption gets a question::

    {"id": 1, "image": "1.jpg", "captions": ["A bear.", "A brown bear."]}
    -> {"id": 1, "images": ["1.jpg"], "messages": [
           {"role": "user", "content": "<image>Describe the image."},
           {"role": "assistant", "content": "A bear."}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mmstream.errors import ConfigError

__all__ = ["conversations_of"]


def conversations_of(
    rows: Iterable[dict[str, Any]],
    *,
    question: str = "Describe the image.",
    follow_up: str = "In other words?",
    num_captions: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield a conversation for each row of captions.

    Write them to a JSONL file, and convert that.

    Args:
        rows: Rows with ``image`` (a path) and either ``captions`` (a list) or ``caption``.
        question: What the user asks first, after the image.
        follow_up: What the user asks for each further caption.
        num_captions: Use at most the first so many captions of each row.

    Yields:
        ``messages`` and ``images`` in LLaMA-Factory's format, and the row's other fields.

    Raises:
        ConfigError: A row has no image or no captions.

    Examples:
        >>> [row] = conversations_of([{"image": "1.jpg", "caption": "A bear."}])
        >>> row["images"], [message["content"] for message in row["messages"]]
        (['1.jpg'], ['<image>Describe the image.', 'A bear.'])
    """
    for number, row in enumerate(rows, start=1):
        other_fields = {k: v for k, v in row.items() if k not in ("image", "caption", "captions")}
        captions = row.get("captions") or [row.get("caption")]
        if not isinstance(row.get("image"), str) or not isinstance(captions[0], str):
            raise ConfigError(
                f"row {number}: needs image (a path) and captions (a list of strings) or caption"
            )
        messages = []
        for i, caption in enumerate(captions[:num_captions]):
            prompt = follow_up if i else f"<image>{question}"
            messages.append({"role": "user", "content": prompt})
            messages.append({"role": "assistant", "content": caption})
        yield {**other_fields, "messages": messages, "images": [row["image"]]}
