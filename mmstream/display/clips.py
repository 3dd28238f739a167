"""Videos for people: some frames side by side, each with its time.

samples.py -> clips.py -> markup.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmstream.display.markup import html_text, picture_of_pixels, small_line, stretched
from mmstream.display.recordings import Clip, array_of, clip_text

SIDE = 112
"""Pixels of the longer side of a frame on a sheet."""

MAX_FRAMES = 8
"""Frames of a clip that are shown, spread over all."""


def clip_tiles(clip: Clip, side: int, max_frames: int = MAX_FRAMES, *, label: str) -> list[str]:
    """Return frames of a clip as thumbnails with their times.

    Args:
        clip: uint8 or normalised. The values of normalised frames are stretched to 0..255, those of
            all frames alike.
        side: Pixels of the longer side.
        max_frames: So many are shown, spread over all, the first and the last included.
        label: Name of the video.
    """
    times = None if clip.times_s is None else array_of(clip.times_s)
    tiles = []
    for number, pixels in _spread_frames(clip.frames, max_frames):
        time = "" if times is None else f"{float(times[number]):.2f} s"
        words = small_line(time) if time else ""
        shown = picture_of_pixels(pixels, side, f"{label} {time}".strip())
        tiles.append(f"<div>{shown}{words}</div>")
    return tiles


def clip_html(name: str, clip: Clip) -> str:
    """Return a contact sheet of a clip, and what it is."""
    text = html_text(f"{name}: {clip_text(clip)}", 200)
    tiles = clip_tiles(clip, SIDE, label=name) if clip_text(clip) != "no video" else []
    return frames_html(tiles) + small_line(text)


def frames_html(tiles: Sequence[str]) -> str:
    """Return frames side by side; nothing where there are none."""
    style = "display:flex;flex-wrap:wrap;gap:4px;margin:4px 0"
    return f'<div style="{style}">{"".join(tiles)}</div>' if tiles else ""


def _spread_frames(frames: Any, max_frames: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield (number, pixels uint8 [H, W, 3]) of frames that are spread over a clip."""
    count = min(max_frames, len(frames))
    numbers = np.unique(np.linspace(0, len(frames) - 1, count).round().astype(np.int64))
    chosen = array_of(frames[numbers.tolist()]) if count else np.zeros((0, 3, 1, 1), np.uint8)
    if chosen.dtype.kind == "f":
        chosen = stretched(chosen)
    for number, pixels in zip(numbers.tolist(), chosen, strict=True):
        yield number, np.ascontiguousarray(pixels.transpose(1, 2, 0))
