"""Boxes and shapes: those of torchvision and transformers, for thousands of pictures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.decoding.image.geometry import (
    View,
    budgeted_shape,
    fitting_shape,
    random_box,
    scaled_view,
    shrink_factor,
    whole_view,
)
from mmstream.families.family import import_torchvision

import_torchvision()

SIDES = st.integers(1, 3000)
rng = np.random.default_rng(0)
PICTURES = [(int(h), int(w)) for h, w in np.exp(rng.uniform(0, 8.5, (3000, 2)))]
PICTURES += [(n, n) for n in range(1, 400, 7)] + [(336, 672), (448, 896), (1344, 448)]


@pytest.mark.parametrize(
    ("multiple_of", "fewest", "most"),
    [(28, 56 * 56, 28 * 28 * 1280), (28, 200_000, 300_000), (32, 256 * 32 * 32, 1280 * 32 * 32)],
)
def test_budgeted_shapes_are_those_of_qwen_vl(multiple_of: int, fewest: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    num_refused = 0
    for picture in PICTURES:
        try:
            expected = smart_resize(*picture, multiple_of, fewest, most)
        except ValueError:
            num_refused += 1
            with pytest.raises(mm.errors.DecodeError, match="over 200 times"):
                budgeted_shape(picture, multiple_of, fewest, most)
            continue
        assert budgeted_shape(picture, multiple_of, fewest, most) == expected, picture
    assert 0 < num_refused < len(PICTURES) / 2


def test_any_resolution_chooses_and_fits_as_llava_next() -> None:
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution

    many = tuple((336 * i, 336 * j) for i in range(1, 5) for j in range(1, 5))
    for rule in (mm.families.llava.LlavaNextTiles(), mm.families.llava.LlavaNextTiles(many)):
        chosen = set()
        for picture in PICTURES:
            best = select_best_resolution(picture, list(rule.shapes))
            if best is None:  # of a line that would be thinner than a pixel
                continue
            assert rule.best(picture) == tuple(best), picture
            pixels = np.empty((3, *picture), np.bool_)
            assert fitting_shape(picture, best) == get_patch_output_size(
                pixels, best, "channels_first"
            )
            chosen.add(tuple(best))
        assert chosen == set(rule.shapes)


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (2, 40), (5, 5)])
def test_dynamic_tiles_choose_the_grid_of_internvl(fewest: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    for picture in PICTURES:
        columns, rows = get_optimal_tiled_canvas(picture, (448, 448), fewest, most)
        assert mm.families.internvl.InternVLTiles(fewest, most).best(picture, 448) == (
            rows,
            columns,
        ), picture


def boxes_of_torchvision(
    picture: tuple[int, int], num_boxes: int, **settings: object
) -> np.ndarray:
    from torchvision.transforms import RandomResizedCrop

    image = torch.empty((3, 1, 1)).expand(3, *picture)
    crop = RandomResizedCrop(8, **settings)
    torch.manual_seed(1)
    return np.array([crop.get_params(image, crop.scale, crop.ratio) for _ in range(num_boxes)])


def distance(some: np.ndarray, others: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest gap between two empirical distributions."""
    points = np.sort(np.concatenate([some, others]))
    shares = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (some, others)]
    return float(np.abs(shares[0] - shares[1]).max())


def features(boxes: np.ndarray, picture: tuple[int, int]) -> dict[str, np.ndarray]:
    top, left, height, width = boxes.T.astype(float)
    return {
        "area": height * width,
        "aspect": np.log(width / height),
        "top": top,
        "left": left,
        "room above": top / np.maximum(1, picture[0] - height),
        "room left": left / np.maximum(1, picture[1] - width),
    }


NUM_BOXES = 2000
SAME = 2.2 * math.sqrt(2 / NUM_BOXES)
"""Exceeded by chance once in 8,000 comparisons."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("picture", "settings"),
    [
        *((size, {}) for size in ((375, 500), (1500, 2000), (60, 900), (400, 50), (7, 9), (1, 1))),
        *((size, {"scale": (0.5, 1.0), "ratio": (0.5, 2.0)}) for size in ((375, 500), (60, 900))),
        *((size, {"scale": (0.9, 1.0)}) for size in ((375, 500), (400, 50))),
    ],
)
def test_random_boxes_are_distributed_as_torchvisions(
    picture: tuple[int, int], settings: dict[str, tuple[float, float]]
) -> None:
    given = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)} | settings
    rng = np.random.default_rng(2)
    ours = np.array([random_box(picture, rng=rng, **given) for _ in range(NUM_BOXES)])
    theirs = features(boxes_of_torchvision(picture, NUM_BOXES, **settings), picture)
    for name, values in features(ours, picture).items():
        assert distance(values, theirs[name]) < SAME, name


@given(st.tuples(SIDES, SIDES), st.integers(0, 2**32))
def test_a_random_box_lies_inside_the_picture(picture: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    top, left, height, width = random_box(picture, (0.08, 1), (3 / 4, 4 / 3), rng)
    assert 0 <= top <= top + height <= picture[0]
    assert 0 <= left <= left + width <= picture[1]
    assert height * width >= 1


@given(st.tuples(SIDES, SIDES), st.tuples(st.integers(1, 300), st.integers(1, 300)), st.data())
def test_a_picture_is_never_decoded_smaller_than_it_is_needed(
    picture: tuple[int, int], size: tuple[int, int], data: st.DataObject
) -> None:
    top, left = data.draw(st.integers(0, picture[0] - 1)), data.draw(st.integers(0, picture[1] - 1))
    box = (top, left, picture[0] - top, picture[1] - left)
    for view in (whole_view(picture, size), View(box, size, size, (0, 0))):
        factor = shrink_factor([view], picture)
        smaller = scaled_view(view, picture, factor)
        assert factor in (1, 2, 4, 8)
        if factor > 1:
            assert smaller.box[2] >= size[0]
            assert smaller.box[3] >= size[1]
        assert smaller.box[0] + smaller.box[2] <= -(-picture[0] // factor)
        assert smaller.box[1] + smaller.box[3] <= -(-picture[1] // factor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mm.families.llava.LlavaNextTiles(()),
        lambda: mm.families.llava.LlavaNextTiles(((336,),)),
        lambda: mm.families.llava.LlavaNextTiles(((0, 336),)),
        lambda: mm.families.llava.LlavaOnevisionTiles(background=(0, 0)),
        lambda: mm.families.llava.LlavaOnevisionTiles(background=(0, 0, 256)),
        lambda: mm.families.internvl.InternVLTiles(0),
        lambda: mm.families.internvl.InternVLTiles(5, 4),
        lambda: mm.families.internvl.InternVLTiles(max_tiles="12"),
        lambda: mm.families.internvl.InternVLTiles(max_tiles=2.5),
        lambda: mm.families.llava.LlavaNextTiles((336, 672)),
        lambda: mm.families.llava.LlavaOnevisionTiles(background=0),
    ],
)
def test_impossible_tiles_are_config_errors(make: object) -> None:
    with pytest.raises(mm.ConfigError):
        make()
