"""Pictures of a fixed size: torchvision's bytes, written where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import JPEG, PNG, photo

from mmstream._torchvision import import_torchvision
from mmstream.decoding.image import ImageDecoder
from mmstream.decoding.resize import resize_and_crop, resized_shape
from mmstream.errors import ConfigError


def test_resizing_is_bit_equal_to_torchvision() -> None:
    import_torchvision()
    from torchvision.transforms import v2

    random = np.random.default_rng(1)
    for i in range(60):
        height, width = (int(n) for n in random.integers(1, 400, 2))
        size = int(random.integers(1, 120))
        resize_size = None if i % 2 else size + int(random.integers(0, 40))
        image = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        reference = v2.Compose(
            [v2.Resize(resize_size or size, antialias=True), v2.CenterCrop(size)]
        )
        expected = reference(torch.from_numpy(image).permute(2, 0, 1)).permute(1, 2, 0).numpy()
        actual = resize_and_crop(image, (size, size), resize_size, max_pixels=10**9)
        np.testing.assert_array_equal(actual, expected, f"{height}x{width}: {size}, {resize_size}")


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300))
def test_the_resized_picture_covers_the_crop_and_touches_it(
    height: int, width: int, crop_height: int, crop_width: int
) -> None:
    new_height, new_width = resized_shape(height, width, (crop_height, crop_width), None)
    assert new_height >= crop_height
    assert new_width >= crop_width
    assert new_height == crop_height or new_width == crop_width


def test_a_result_is_written_where_it_is_asked_for() -> None:
    batch = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    decoder = ImageDecoder(size=32)
    row = batch[1]
    assert decoder(JPEG, row) is row
    np.testing.assert_array_equal(batch[1], decoder(JPEG))
    assert not batch[[0, 2]].any()


def test_a_picture_of_the_right_size_is_copied_into_the_row() -> None:
    row = np.zeros((60, 90, 3), dtype=np.uint8)
    ImageDecoder(size=(60, 90))(PNG, row)
    np.testing.assert_array_equal(row, np.asarray(photo()))


@pytest.mark.parametrize(
    "row",
    [
        np.zeros((32, 33, 3), np.uint8),
        np.zeros((32, 32, 3), np.float32),
        np.zeros((3, 32, 32), np.uint8).transpose(1, 2, 0),
    ],
)
def test_a_row_that_cannot_hold_the_result_is_a_config_error(row: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="out"):
        ImageDecoder(size=32)(JPEG, row)
    with pytest.raises(ConfigError, match="out"):
        ImageDecoder()(JPEG, row)
