"""Odd values where media belong: each is a sample or a reject, and none ends the conversion."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.convert import ConvertReport
from tests.helpers.convert_corpus import rejects
from tests.helpers.odd_media import odd_media
from tests.helpers.pictures import encoded


def converted(rows: list[dict[str, Any]], folder: Path, **options: Any) -> ConvertReport:
    return mm.convert(
        iter(rows),
        folder / "out",
        media_root=str(folder),
        max_rejects=len(rows),
        num_workers=1,
        progress=False,
        media=mm.MediaOptions(**options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("image", {}),
        ("image", {"check": "full"}),
        ("image", {"image_format": "webp", "max_image_side": 4}),
        ("image", {"image_format": "jpg"}),
        ("audio", {}),
        ("audio", {"check": "full"}),
        ("video", {}),
        ("video", {"check": "full", "video_format": "mp4"}),
    ],
)
def test_every_odd_value_is_a_sample_or_a_reject(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{kind: value, "text": "a"} for value in odd_media(kind, tmp_path)]
    assert len(rows) > 300
    report = converted(rows, tmp_path, **options)
    assert report.num_samples + report.num_rejects == len(rows)
    assert min(report.num_samples, report.num_rejects) > 20
    assert len(rejects(tmp_path / "out")) == report.num_rejects


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *(("jpg", (65_501, 4)), ("jpg", (16_384, 2)), ("png", (4, 65_535))),
        *(("webp", (16_384, 2)), ("webp", (16_383, 2))),
    ],
)
def test_a_side_that_a_format_cannot_have_is_a_reject(
    size: tuple[int, int], form: str, tmp_path: Path
) -> None:
    data = [encoded(Image.new("RGB", side), "PNG") for side in ((8, 8), size, (8, 8))]
    report = converted([{"image": each, "text": "a"} for each in data], tmp_path, image_format=form)
    most = {"jpg": 65_500, "png": 65_535, "webp": 16_383}[form]
    assert (report.num_samples, report.num_rejects) == ((2, 1) if max(size) > most else (3, 0))


def test_a_picture_of_pillow_is_stored_as_it_is_seen(tmp_path: Path) -> None:
    colours = [Image.new("RGB", (9, 9), name) for name in ("red", "blue")]
    file = encoded(colours[0], "GIF", save_all=True, append_images=colours[1:])
    image = Image.open(io.BytesIO(file))
    image.seek(1)
    converted([{"image": image, "text": "a"}], tmp_path)
    stored = mm.open_dataset(tmp_path / "out")[0]["png"]
    np.testing.assert_array_equal(mm.ImageDecoder()(stored), np.asarray(colours[1]))
