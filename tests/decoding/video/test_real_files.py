"""Frames of real files are those of torchcodec's exact mode, to the bit, and at the same times.

The stored checksums are CRC-32 of the RGB pixels of 16 frames, evenly spread, and were made with
torchcodec 0.13: ``VideoDecoder(file, seek_mode="exact", num_ffmpeg_threads=1)``.
"""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path

import av
import numpy as np
import pytest

import mmstream as mm
from tests.helpers.paths import DATA, ROOT

VIDEOS = DATA / "videos"
STORED = json.loads((VIDEOS / "frames.json").read_text())
MORE_VIDEOS = ROOT.parent / "shared" / "data"
"""Files that may not be stored here."""


def file(name: str) -> Path:
    path = next((path for folder in (VIDEOS, MORE_VIDEOS) for path in folder.rglob(name)), None)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    return path


@pytest.mark.parametrize("name", STORED)
def test_frames_and_times_are_those_of_an_exact_decoder(name: str) -> None:
    data, stored = file(name).read_bytes(), STORED[name]
    decoder = mm.VideoDecoder(indices=tuple(stored["numbers"][1::4]), span=None)
    plan = decoder.plan(data)
    assert plan.file.timeline.num_frames == stored["num_frames"]
    decoded = decoder.decode(data, plan)
    np.testing.assert_allclose(decoded.times_s, stored["times_s"][1::4], atol=1e-6)
    assert [zlib.crc32(frame) for frame in decoded.pixels] == stored["crc32"][1::4]


def test_ten_bits_become_eight_as_pyav_makes_them() -> None:
    data = file("h264_10bits.mp4").read_bytes()
    with av.open(io.BytesIO(data)) as container:
        wanted = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    np.testing.assert_array_equal(mm.VideoDecoder(span=None)(data), wanted)
