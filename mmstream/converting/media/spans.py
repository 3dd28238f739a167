"""Whether the spans of a row lie in its audio and video files, where their lengths are known.

load -> check -> SPANS -> the shard
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmstream.converting.draft import Media, RowError

__all__ = ["require_starts_inside"]


def require_starts_inside(content: Mapping[str, Any], media: Sequence[Media]) -> None:
    """Refuse a span that starts at the end of a file or later: training would find nothing there.

    An end behind that of the file is no fault: decoders cut it, and many corpora round up.

    Args:
        content: The ``json`` of the sample, with its ``segments``, or ``start_s``.
        media: Its files. Those whose duration is not known are not compared.

    Raises:
        RowError: A span starts too late. The message says where, and how long the file is.
    """
    durations = [medium.facts.get("duration_s") for medium in media]
    lengths = [value for value in durations if isinstance(value, int | float)]
    if not lengths:
        return
    for name, start_s in _starts(content):
        if start_s >= min(lengths):
            raise RowError(
                f"{name}: starts at {start_s:g} s, and the file lasts {min(lengths):g} s; it is "
                "another file, or was cut off"
            )


def _starts(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, seconds) of each span that states its start as a number."""
    segments = content.get("segments")
    spans = segments if isinstance(segments, list) else []
    named = [("start_s", content), *((f"segments[{i}]", span) for i, span in enumerate(spans))]
    for name, span in named:
        start = span.get("start_s") if isinstance(span, Mapping) else None
        if isinstance(start, int | float) and not isinstance(start, bool):
            yield name, start
