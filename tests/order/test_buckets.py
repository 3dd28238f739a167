"""The order of buckets, without any data: exactly once, one bucket a step, spread evenly."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.order import BucketOrder, Buckets, Corpus
from mmstream.order.selection import Selection
from tests.helpers.orders import pairs


def selections_of(counts: Sequence[int], numbers: Sequence[int]) -> list[Selection]:
    """The samples of each of four buckets; 4: in none."""
    parts = np.split(np.array(numbers, dtype=int), np.cumsum(counts)[:-1])
    sizes = np.array(counts)
    return [Selection.of_shards((part == n for part in parts), sizes) for n in range(4)]


EDGES = [2, 4, 8, 16]


def make_order(
    counts: Sequence[int],
    numbers: Sequence[int],
    min_steps: int = 1,
    bad: Any = (),
    table: Any = None,
    **settings: Any,
) -> BucketOrder:
    corpus = Corpus(np.array(counts), bad=np.array(bad, dtype=int).reshape(-1, 2))
    buckets = Buckets("duration_s", edges=EDGES, min_steps=min_steps, rows=table)
    return BucketOrder.from_corpus(corpus, buckets, selections_of(counts, numbers), **settings)


@settings(max_examples=30)
@given(data=st.data())
def test_each_sample_comes_once_in_steps_of_one_bucket(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5), "counts")
    size = sum(counts)
    numbers = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size), "buckets")
    rows = data.draw(st.sampled_from([1, 2, 6]), "rows")
    tables = [None, {16: 6}, {2: 6, 8: 3, 16: 3}, {16: 2, 4: 6}] if rows == 6 else [None]
    table = data.draw(st.sampled_from(tables), "table")
    refs = [(shard, index) for shard, count in enumerate(counts) for index in range(count)]
    bucket_of = dict(zip(refs, numbers, strict=True))
    bad = data.draw(st.lists(st.sampled_from(refs), max_size=5), "bad") if refs else []
    wanted = {ref for ref in refs if bucket_of[ref] < 4} - set(bad)
    given_settings = {
        "global_batch_size": rows,
        "seed": data.draw(st.integers(0, 3), "seed"),
        "drop_last": data.draw(st.booleans(), "drop_last"),
        "shuffle": data.draw(st.booleans(), "shuffle"),
        "grid": data.draw(st.sampled_from([None, (1, 1 if table else rows), (2, 1)]), "grid"),
        "window": data.draw(st.sampled_from([None, 1, 7]), "window"),
    }
    min_steps = data.draw(st.integers(1, 5), "min_steps")
    try:
        order = make_order(counts, numbers, min_steps, bad, table, **given_settings)
    except mm.ConfigError:
        assert len(wanted) < (rows if given_settings["drop_last"] else 1)
        return
    rows_of_edge = dict(zip(EDGES, order.settings.rows_of(rows), strict=True))
    num_ranks = np.gcd.reduce([*rows_of_edge.values()])
    part_of = {EDGES.index(of): part for part in order.buckets for of in part.joined}
    for epoch in range(2):
        seen = []
        for step in range(order.steps_per_epoch):
            of_step = order.refs(epoch, step)
            planned = pairs(of_step)
            assert len(planned) == rows_of_edge[order.edge(epoch, step)]
            shares = [rows * rank // num_ranks for rank in range(num_ranks + 1)]
            of_ranks = [order.rows_of(epoch, step, share) for share in pairwise(shares)]
            assert len({stop - start for start, stop in of_ranks}) == 1
            ranks = [pairs(order.refs(epoch, step, of_rank)) for of_rank in of_ranks]
            assert [pair for rank in ranks for pair in rank] == planned
            valid = [
                pair for pair, is_valid in zip(planned, of_step.valid, strict=True) if is_valid
            ]
            assert {part_of[bucket_of[pair]].edge for pair in valid} == {order.edge(epoch, step)}
            seen += valid
            for row, number in enumerate(order.windows(epoch, step).tolist()):
                window = order.window(epoch, number)
                here = (window.step == step) & (window.row == row)
                assert (window.shard[here][0], window.index[here][0]) == planned[row]
                assert (np.diff(window.step) >= 0).all()
            window = order.window(epoch, int(order.windows(epoch, step)[0]))
            others = np.stack([window.shard, window.index], axis=1)[window.step != step].tolist()
            near = order.substitute(epoch, step, 0, step % 8)
            assert not others or list(near) in others
            substitute = order.substitute(epoch, step, 0, step % 16)
            assert part_of[bucket_of[substitute]].edge == order.edge(epoch, step)
            assert substitute in wanted
        assert len(seen) == len(set(seen))
        left_out = wanted - set(seen)
        if given_settings["drop_last"]:
            of_parts = Counter(part_of[bucket_of[ref]].edge for ref in left_out)
            assert all(number < rows_of_edge[edge] for edge, number in of_parts.items())
        else:
            assert not left_out


def test_no_bucket_is_far_from_its_share_at_any_step() -> None:
    """Steps of a bucket up to any step, against an even share; one bucket may be the largest."""
    for sizes, most in (([900] * 4, 1.0), ([2800, 300, 300, 200], 4.0)):
        numbers = np.repeat(np.arange(4), sizes)
        order = make_order([sum(sizes)], numbers, global_batch_size=2)
        total = order.steps_per_epoch
        for epoch in range(3):
            edges = [order.edge(epoch, step) for step in range(total)]
            for edge, size in zip(EDGES, sizes, strict=True):
                before = np.cumsum([of == edge for of in edges])
                even = np.arange(1, total + 1) * size / sum(sizes)
                assert np.abs(before - even).max() <= most
        assert edges != [order.edge(0, step) for step in range(total)]


def test_small_buckets_are_joined() -> None:
    lengths = Buckets("duration_s", edges=EDGES)
    rows = [8] * 4
    assert lengths.joined([100, 100, 100, 100], rows) == [0, 1, 2, 3]
    assert lengths.joined([5, 90, 90, 7], rows) == [1, 1, 3, 3]  # the last keeps its edge
    assert lengths.joined([3, 3, 3, 3], rows) == [3, 3, 3, 3]
    assert lengths.joined([100, 0, 0, 31], rows) == [3, 1, 2, 3]
    shapes = Buckets("aspect", edges=[(64, 128), (96, 96), (64, 96), (128, 64)])
    assert shapes.edges == ((128, 64), (96, 96), (64, 96), (64, 128))
    assert shapes.joined([100, 100, 5, 100], rows) == [0, 1, 3, 3]
    assert shapes.joined([100, 9, 31, 5], rows) == [0, 2, 2, 2]
    order = make_order([40], [0] * 20 + [1] * 3 + [2] * 17, min_steps=4, global_batch_size=2)
    assert [(part.edge, part.joined) for part in order.buckets] == [(2, (2,)), (8, (4, 8))]
    assert "17" not in repr(order)
    assert "8, joined of 4, 8" in repr(order)


def test_a_picture_is_in_the_bucket_of_the_nearest_ratio() -> None:
    buckets = Buckets("aspect", edges=mm.aspect_edges(512))
    ratios = [width / height for height, width in buckets.edges]
    borders = [float(text.split("<= ")[1]) for text in buckets.conditions[:-1]]
    for ratio in np.exp(np.random.default_rng(0).uniform(-2, 2, 500)):
        nearest = int(np.argmin(np.abs(np.log(ratios) - np.log(ratio))))
        assert np.searchsorted(borders, ratio) == nearest


def test_edges_of_pictures_have_about_one_area() -> None:
    edges = mm.aspect_edges(512)
    assert edges == [
        *[(1024, 256), (768, 320), (640, 384), (576, 448), (512, 512)],
        *[(448, 576), (384, 640), (320, 768), (256, 1024)],
    ]
    for resolution, multiple_of in ((1024, 64), (500, 32), (64, 64)):
        for height, width in mm.aspect_edges(resolution, multiple_of=multiple_of):
            assert height % multiple_of == width % multiple_of == 0
            assert 0.7 * resolution**2 <= height * width <= resolution**2 or resolution == 64
    with pytest.raises(mm.ConfigError, match="at least the multiple"):
        mm.aspect_edges(32)


@pytest.mark.parametrize(
    ("column", "edges", "message"),
    [
        ("duration_s", [], "0 edges"),
        ("duration_s", [2, 2], "2 after 2: edges must rise"),
        ("duration_s", [4, 2], "2 after 4"),
        ("duration_s", [1.0, float("nan")], "edges"),
        ("duration_s", list(range(300)), "300 edges"),
        ("duration_s", [(2, 3)], "pairs of .height, width. are for aspect"),
        ("aspects", [(2, 3)], "pairs of .height, width. are for aspect"),
        ("duration_s", [1, (2, 3)], "give rising numbers"),
        ("duration_s", "2,4", "give rising numbers"),
        ("aspect", [(64, 64), (32, 32)], "two of one ratio"),
        ("", [2], "column"),
    ],
)
def test_wrong_edges_are_refused(column: str, edges: Any, message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        Buckets(column, edges=edges)


def test_pictures_have_no_padding_and_their_ratio_may_be_a_key_of_the_json() -> None:
    with pytest.raises(mm.ConfigError, match="have no padding"):
        Buckets("aspect", edges=[(2, 4)], pad_to="edge")
    assert Buckets("json.ratio", edges=[(4, 2), (2, 8)]).conditions[0].startswith("json.ratio > 0")


@pytest.mark.parametrize(
    ("edges", "rows", "message"),
    [
        ([2, 4], {3: 8}, "give rows up to the last edge, 4"),
        ([2, 4], {}, "give rows up to the last edge"),
        ([(2, 4)], {4: 8}, "have one area, and no rows"),
        ([2, 4], {4: 0}, "rows"),
        ([2, 4], [8], "give rows by upper edge"),
    ],
)
def test_wrong_rows_are_refused(edges: Any, rows: Any, message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        Buckets("aspect", edges=edges, rows=rows)


def test_rows_are_the_same_in_any_order() -> None:
    tables = [{2: 6, 8: 3, 16: 3}, {16: 3, 8: 3, 2: 6}]
    orders = [
        make_order([40], [0] * 20 + [2] * 20, table=table, global_batch_size=6) for table in tables
    ]
    first, second = (json.dumps(order.identity()) for order in orders)
    assert first == second


def test_a_dataset_without_a_step_is_refused() -> None:
    with pytest.raises(
        mm.ConfigError, match=r"no sample is in a bucket: each is above .* 16, has no"
    ):
        make_order([5], [4] * 5, global_batch_size=2)
    with pytest.raises(mm.ConfigError, match=r"5 samples do not fill one step of .* 8"):
        make_order([5], [0, 1, 1, 2, 3], global_batch_size=8)
    order = make_order([5], [0, 1, 1, 2, 3], global_batch_size=8, drop_last=False)
    assert order.steps_per_epoch == 1


def test_an_order_is_the_same_after_pickling_and_from_its_identity() -> None:
    counts, numbers = [70, 0, 90], [n % 5 for n in range(160)]
    settings = {"global_batch_size": 4, "seed": 3, "drop_last": False, "table": {4: 4, 16: 2}}
    order = make_order(counts, numbers, 4, window=8, grid=(1, 2), **settings)
    identity = json.loads(json.dumps(order.identity()))
    corpus, selections = Corpus(np.array(counts)), selections_of(counts, numbers)
    saved = BucketOrder.from_saved(identity, corpus, order.settings, selections)
    for other in (pickle.loads(pickle.dumps(order)), saved):
        assert other.identity() == order.identity()
        for step in range(order.steps_per_epoch):
            assert pairs(other.refs(1, step)) == pairs(order.refs(1, step))
    others = selections_of(counts, [1, 0, *numbers[2:]])  # as many in each bucket
    with pytest.raises(mm.StateError, match="not those of the state, in buckets"):
        BucketOrder.from_saved(identity, corpus, order.settings, others)
    for key in ("buckets", "seed", "global_batch_size"):
        broken = {name: value for name, value in identity.items() if name != key}
        with pytest.raises(mm.StateError):
            BucketOrder.from_saved(broken, corpus, order.settings, selections)
