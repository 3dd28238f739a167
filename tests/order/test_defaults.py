"""The default grid, window and chunk size: functions of the dataset and the batch size alone."""

import pytest

from mmstream.order.defaults import (
    better_grid,
    default_chunk,
    default_grid,
    default_window,
    mixture_window,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("samples", "rows", "grid"),
    [
        (0, 16, (1, 1)),
        (100, 16, (1, 1)),
        (2 * 1024 - 1, 16, (1, 1)),
        (2 * 1024, 16, (1, 2)),
        (10_000, 16, (1, 8)),
        (16 * 1024 - 1, 16, (1, 8)),
        (16 * 1024, 16, (2, 8)),
        (64 * 1024 - 1, 16, (4, 8)),
        (64 * 1024, 16, (8, 8)),
        (10**6, 256, (8, 8)),
        (10**9, 256, (8, 8)),
        (10**6, 6, (8, 6)),
        (10**6, 7, (8, 7)),
        (10**6, 9, (8, 3)),
        (10**6, 22, (8, 2)),
        (10**6, 1, (8, 1)),
    ],
)
def test_the_default_grid_grows_with_the_corpus(samples, rows, grid):
    assert default_grid(samples, rows) == grid


@pytest.mark.parametrize(
    ("samples", "num_bytes", "grid", "window"),
    [
        (1000, None, (8, 8), 1024),
        (1000, 0, (8, 8), 1024),
        (1000, 1000 * 2 * GIB // 640, (2, 4), 80),
        (1000, 1000 * 2 * GIB // 640, (4, 2), 80),
        (1000, 1000 * GIB, (1, 1), 16),
        (1000, 1, (1, 1), 8192),
    ],
)
def test_all_default_windows_hold_2_gib_together(samples, num_bytes, grid, window):
    assert default_window(samples, num_bytes, grid) == window


def test_the_default_window_of_a_mixture_is_that_of_its_mean_sample():
    grid = (2, 4)
    one = default_window(100, 100 * 1_000_000, grid)
    assert mixture_window([3], [(10 * 1_000_000, 10)], grid) == one
    # 1 of 4 samples has 3 MB, 3 of 4 have 1/3 MB: 1 MB in the mean.
    assert mixture_window([1, 3], [(30_000_000, 10), (5_000_000, 15)], grid) == one
    assert mixture_window([1, 0], [(1_000_000, 1), (None, 9)], grid) == one
    assert mixture_window([1, 0], [(1_000_000, 1), (10**15, 9)], grid) == one
    assert mixture_window([1, 1], [(1_000_000, 1), (None, 9)], grid) == 1024


def test_chunks_grow_when_the_corpus_would_have_more_than_4_mi_of_them():
    assert default_chunk(0) == 64
    assert default_chunk(64 << 22) == 64
    assert default_chunk((64 << 22) + 63) == 64
    assert default_chunk((64 << 22) + 64) == 128
    assert default_chunk(10**10) == 4096


@pytest.mark.parametrize(
    ("samples", "rows", "grid", "world_size", "num_workers", "better"),
    [
        (10**6, 256, (8, 8), 8, 4, None),  # whole lanes already
        (10**6, 256, (8, 8), 1, 0, None),
        (10**6, 256, (8, 8), 16, 4, (8, 16)),
        (10**6, 240, (8, 8), 6, 3, (24, 24)),
        (10**6, 256, (8, 8), 2, 3, (24, 8)),
        (10**6, 256, (8, 8), 16, 0, (8, 16)),
        (10**6, 256, (1, 8), 16, 0, (1, 16)),
        (10**6, 256, (1, 8), 8, 1, None),
        (10**6, 256, (8, 8), 3, 1, None),  # 24 does not divide 256
        (5_000, 256, (1, 4), 8, 4, None),  # too small to matter
        (8 * 16 * 1024, 256, (8, 8), 16, 4, (8, 16)),
        (8 * 16 * 1024 - 1, 256, (8, 8), 16, 4, None),
    ],
)
def test_a_better_grid_is_named_only_if_it_pays(
    samples, rows, grid, world_size, num_workers, better
):
    assert better_grid(samples, rows, grid, world_size, num_workers) == better
