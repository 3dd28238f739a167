"""Rows of captions -> rows of conversations, for benchmarks and tests of vision-language models.

The first caption of a row gets a question::

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


QUESTION = "<image>Describe the image."


def conversations_of(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a conversation for each row of captions.

    Write them to a JSONL file, and convert that.

    Args:
        rows: Rows with ``image`` (a path) and either ``captions`` (a list) or ``caption``.

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
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": captions[0]},
        ]
        yield {**other_fields, "messages": messages, "images": [row["image"]]}
