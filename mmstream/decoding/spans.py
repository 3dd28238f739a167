"""Spans of time, as settings of decoders and rows state them.

Place in the flow: the decoders of videos and recordings ask which part of a file is meant, before
they plan it. Both have the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.wrong_arguments import shown

Span: TypeAlias = tuple[float, float]
"""(start, end) in seconds. The end is left out. It may be infinite."""

_SHOWN = 40


def is_span(value: object) -> bool:
    """Tell whether a value is a tuple of a start and a later end in seconds, from 0 up.

    Examples:
        >>> is_span((0, 2.5)), is_span((2.5, 2.5)), is_span((0, True))
        (True, False, False)
    """
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    start, end = map(_seconds, value)
    return start is not None and end is not None and 0 <= start < end


def require_span(setting: object) -> None:
    """Raise a ConfigError for a setting that is neither a span, "row" nor None."""
    is_word = isinstance(setting, str) and setting == "row"
    if not (setting is None or is_word or is_span(setting)):
        raise ConfigError(f'span={shown(setting)}: give "row", (start_s, end_s) or None')


def row_span(row: Mapping[str, Any] | None) -> Span | None:
    """Return the span that a row states by ``start_s`` and ``end_s``. None: it states none.

    Raises:
        DecodeError: They are no span of time.
    """
    start, end = (None, None) if row is None else (row.get("start_s"), row.get("end_s"))
    if start is None and end is None:
        return None
    start = 0.0 if start is None else start
    end = math.inf if end is None else end
    if not is_span((start, end)):
        start, end = (escaped(repr(value), _SHOWN) for value in (start, end))
        raise DecodeError(f"start_s={start}, end_s={end}: not a span in seconds")
    return float(start), float(end)


def row_of_span(span: Span | None, setting: object) -> dict[str, float] | None:
    """Return a row that states the span of a decoder's call.

    Args:
        span: What the call gives. None: nothing.
        setting: The ``span`` of the decoder.

    Raises:
        ConfigError: The decoder does not go by the row.
    """
    if span is None:
        return None
    if setting != "row":
        raise ConfigError(f'span={span!r}: it needs a decoder with span="row", not {setting!r}')
    return {"start_s": span[0], "end_s": span[1]}


def _seconds(value: object) -> float | None:
    """Return a number as a float. None: it is no number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
