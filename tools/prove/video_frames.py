"""Checksums of a video's frames by torchcodec: ``python -m tools.prove.video_frames FILE [FILE]``.

It prints JSON: the time and the CRC-32 of the RGB pixels of 16 frames of each file, decoded in
torchcodec's exact mode. The suite compares `mm.VideoDecoder` with the stored output, so that it
needs no torchcodec. Run it where torchcodec is installed, and store the output in
``tests/data/videos/frames.json``. Run with ``--compare FILE.json`` it checks `mm.VideoDecoder`.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

NUM_FRAMES = 16


def main() -> None:
    """Print checksums, or compare with stored ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", type=Path, help="stored output")
    options = parser.parse_args()
    if options.compare is None:
        frames = {path.name: by_torchcodec(path) for path in options.files}
        print(json.dumps(frames, indent=1))
        return
    stored = json.loads(options.compare.read_text())
    wrong = [path.name for path in options.files if by_mmstream(path) != stored[path.name]]
    print(f"{len(options.files) - len(wrong)} of {len(options.files)} files are equal", *wrong)
    sys.exit(bool(wrong))


def by_torchcodec(path: Path) -> dict[str, Any]:
    """Return the numbers, times and checksums of some frames."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(
        str(path), seek_mode="exact", dimension_order="NHWC", num_ffmpeg_threads=1
    )
    numbers = spread(len(decoder))
    batch = decoder.get_frames_at(numbers)
    times = batch.pts_seconds - decoder.metadata.begin_stream_seconds
    return summary(len(decoder), numbers, times.numpy(), batch.data.numpy())


def by_mmstream(path: Path) -> dict[str, Any]:
    """Return the same by `mm.VideoDecoder`."""
    import mmstream as mm

    data = path.read_bytes()
    total = mm.VideoDecoder(span=None).plan(data).file.timeline.num_frames
    numbers = spread(total)
    decoded = mm.VideoDecoder(indices=tuple(numbers), span=None).decode(data)
    return summary(total, numbers, decoded.times_s, decoded.pixels)


def spread(total: int) -> list[int]:
    """Return the numbers of frames to compare."""
    numbers: list[int] = (
        np.linspace(0, total - 1, min(total, NUM_FRAMES)).round().astype(int).tolist()
    )
    return numbers


def summary(total: int, numbers: list[int], times_s: Any, pixels: Any) -> dict[str, Any]:
    """Return what is stored of a file."""
    return {
        "num_frames": total,
        "numbers": numbers,
        "times_s": [round(float(time), 6) for time in times_s],
        "crc32": [zlib.crc32(np.ascontiguousarray(frame).tobytes()) for frame in pixels],
    }


if __name__ == "__main__":
    main()
