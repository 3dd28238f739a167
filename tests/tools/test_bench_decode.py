"""The decoding benchmark: its files are what it says, and it measures what it names."""

from __future__ import annotations

import numpy as np
import pytest
import simplejpeg

from mmstream import ImageDecoder
from tools.bench import decode as bench_decode


def test_mosaics_are_jpegs_of_the_asked_size_and_differ() -> None:
    files = [bench_decode.mosaic((700, 500), seed) for seed in (0, 0, 1)]
    assert simplejpeg.decode_jpeg_header(files[0])[:2] == (500, 700)
    assert files[0] == files[1] != files[2]


def test_every_way_makes_the_same_picture_and_two_are_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = bench_decode.mosaic((1000, 800), 0)
    expected = bench_decode.resize_whole(ImageDecoder()(data))
    exact = 0
    for name, way in bench_decode.all_ways().items():
        near = bench_decode.psnr(way(data), expected)
        exact += near == 99
        assert near > 30 or "float" in name or "decode only" in name or "OpenCV" in name, name
    assert exact == 2
    bench_decode.report("one", [data], rounds=1)
    assert "ImageDecoder(size=224)" in capsys.readouterr().out


def test_the_measure_of_nearness_notices_a_shift() -> None:
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    assert bench_decode.psnr(image, image) == 99
    assert bench_decode.psnr(np.roll(image, 1, axis=1), image) < 20
