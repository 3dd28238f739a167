"""Before convert: rows of captions as rows of conversations, for models that are asked questions.

{"id": 1, "image": "1.jpg", "captions": ["A bear.", "A brown bear."]}
-> {"id": 1, "images": ["1.jpg"], "messages": [user: "<image>Describe the image.",
                                               assistant: "A bear."]}
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
    again: str = "In other words?",
    num_captions: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield a conversation for each row of captions; write them as JSONL for `mmstream.convert`.

    Args:
        rows: Each with ``image``, a path, and ``captions``, a list of strings, or ``caption``.
        question: What the user asks first, behind the image.
        again: What the user asks for each further caption.
        num_captions: Captions to take of each row, from the first; fewer where it has fewer.

    Yields:
        ``messages`` and ``images`` as LLaMA-Factory writes them, and the row's other fields.

    Raises:
        ConfigError: A row without image or captions.
    """
    for number, row in enumerate(rows, start=1):
        rest = {k: v for k, v in row.items() if k not in ("image", "caption", "captions")}
        captions = row.get("captions") or [row.get("caption")]
        if not isinstance(row.get("image"), str) or not isinstance(captions[0], str):
            raise ConfigError(f"row {number}: no image with captions")
        messages = []
        for i, caption in enumerate(captions[:num_captions]):
            asked = again if i else f"<image>{question}"
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": caption})
        yield {**rest, "messages": messages, "images": [row["image"]]}
