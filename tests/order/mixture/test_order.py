"""The order of mixtures: exact proportions, each source once in each of its epochs."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmstream as mm
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.mixtures import COUNTS, drawn, mixed, pipeline


def test_every_source_gives_its_part_to_less_than_a_sample_a_lane(datasets):
    order = pipeline(mixed(datasets)).order
    counts, num_lanes = Counter(), order.grid[0] * order.grid[1]
    for number, step in enumerate(drawn(order, 700), start=1):
        counts.update(source for source, _, _ in step)
        for source, weight in enumerate((0.2, 0.05, 0.75)):
            assert abs(counts[source] - weight * number * 12) < 2 * num_lanes
    assert [counts[0], counts[1], counts[2]] == pytest.approx([1680, 420, 6300], abs=num_lanes)


@given(weights=st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(any))
@settings(max_examples=60, deadline=None)
def test_at_every_place_of_a_schedule_each_source_has_had_its_due(weights):
    from mmstream.order.mixture.schedule import Schedule, whole_shares

    shares = whole_shares(weights)
    schedule, period = Schedule.from_shares(shares), sum(shares)
    due = np.arange(period + 1)[:, None] * np.array(shares)
    assert (np.abs(schedule.before * period - due) < period).all()  # exact, in whole numbers
    assert schedule.shares.tolist() == shares
    for source, share in enumerate(shares):
        draws = np.arange(3 * share)
        if share:
            assert (
                schedule.draws_before(source, schedule.position_of(source, draws)) == draws
            ).all()


def test_a_lane_is_never_two_samples_off_its_part():
    from mmstream.order.mixture.draws import Draws

    shares = np.array([45, 3, 17, 35])
    draws = Draws({0: shares.tolist()}, 16, (2, 4), 1, rotate=True)
    for step in range(150):
        positions = -(-(step - np.arange(8) % 2) // 2) * 4  # of lane q*2 + p
        assert (np.abs(draws.before(step) - positions[:, None] * shares / 100) < 2).all()


def test_weights_without_a_common_measure_are_shares_of_65536():
    from mmstream.order.mixture.schedule import whole_shares

    weights = np.array([np.pi, np.e, 0.01])
    shares = whole_shares(weights.tolist())
    assert sum(shares) == 65536
    assert shares == pytest.approx(weights / weights.sum() * 65536, abs=1)


@pytest.mark.parametrize("size", [384, 389, 391, 395])
@pytest.mark.parametrize("weight", [0, 5])
def test_an_epoch_of_all_is_no_step_longer_than_it_takes(size, weight):
    from mmstream.order import Corpus, MixtureOrder, Recipe

    weights = {"x": 7, "y": weight} if weight else {"x": 7}
    corpus = {name: Corpus(np.array([n])) for name, n in (("x", size), ("y", 5)) if name in weights}
    order = MixtureOrder(Recipe.of(
        corpus, {0: weights}, global_batch_size=12, grid=(2, 3), window=16, epoch_steps="all"
    ))  # fmt: skip
    assert not order._sources[0].small
    seen, steps = set(), 0
    while len(seen) < size:
        refs = order.refs(0, steps)
        seen |= set(refs.index[refs.shard == 0].tolist())
        steps += 1
    assert order.steps_per_epoch == steps


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_of_a_source_comes_once_in_each_of_its_epochs(datasets, shuffle):
    order = pipeline(mixed(datasets, 4, 1, 7), shuffle=shuffle).order
    shown = {source: [] for source in range(3)}
    for step in drawn(order, 500):
        for source, shard, index in step:
            shown[source].append((shard, index))
    for source, name in ((0, "a"), (1, "b")):  # small ones: in the order of steps
        size = sum(COUNTS[name])
        for start in range(0, len(shown[source]) - size + 1, size):
            assert len(set(shown[source][start : start + size])) == size
    visits = Counter(shown[2])
    assert len(visits) == sum(COUNTS["c"])
    assert max(visits.values()) - min(visits.values()) <= 1


def test_a_source_that_is_large_is_walked_in_columns_each_sample_once(datasets):
    order = pipeline(mixed(datasets, 1, 1, 6), global_batch_size=4, grid=(2, 2)).order
    (source,) = (s for s in order._sources if s.name == "c")
    assert not source.small
    shown = [(sh, i) for step in drawn(order, 2000) for s, sh, i in step if s == 2]
    visits = Counter(shown)
    assert len(visits) == 1250
    assert max(visits.values()) - min(visits.values()) <= 1
    assert min(visits.values()) == len(shown) // 1250


def test_a_rare_source_of_ten_samples_is_spread_over_64_lanes(tmp_path):
    rare, large = write_tiny(tmp_path / "rare", [10]), write_tiny(tmp_path / "large", [600] * 4)
    mixture = mm.Mixture(
        {"large": (mm.open_dataset(large), 0.998), "rare": (mm.open_dataset(rare), 0.002)},
        epoch_steps=100,
    )
    order = pipeline(mixture, global_batch_size=64, grid=(8, 8)).order
    batches = []
    for at in range(1000):
        refs = order.refs(*divmod(at, 100))
        batches.append([int(i) for s, i in zip(refs.shard, refs.index) if s == 4])
    flat = [index for batch in batches for index in batch]
    assert abs(len(flat) - 0.002 * 64 * 1000) <= 3
    assert max(map(len, batches)) <= 2
    for start in range(0, len(flat) - 9, 10):
        assert sorted(flat[start : start + 10]) == list(range(10))
    gaps = np.diff([at for at, batch in enumerate(batches) for _ in batch])
    assert gaps.max() <= 20  # one in 7.8 steps


def test_a_rank_of_one_row_sees_every_source(datasets):
    later = {5000: {"a": 1, "b": 1, "c": 1}}
    mixture = mixed(datasets, 1, 0, 1, epoch_steps=400, changes=later)
    order = pipeline(mixture, grid=(1, 1)).order  # a period of 2 in steps of 12 rows
    for row in range(12):
        seen = Counter(step[row][0] for step in drawn(order, 400))
        assert 140 < seen[0] < 260


@given(
    counts=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any), min_size=1, max_size=3
    ),
    rows=st.sampled_from([(1, 1), (4, 2), (6, 3), (12, 4)]),
    groups=st.integers(1, 4),
    weights=st.lists(
        st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=3
    ),
    epoch_steps=st.integers(1, 30),
    window=st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_mixture_draws_each_sample_once_an_epoch_of_its_source(
    counts, rows, groups, weights, epoch_steps, window, shuffle, seed
):
    from mmstream.order import Corpus, MixtureOrder, Recipe

    (size, lanes), names = rows, "abc"[: len(counts)]
    phases = {
        at * 17: dict(zip(names, (w if i else max(1, w) for i, w in enumerate(phase))))
        for at, phase in enumerate(weights)
    }
    phases[0] = {name: max(1, phases[0][name]) for name in names}
    order = MixtureOrder(Recipe.of(
        {name: Corpus(np.array(c)) for name, c in zip(names, counts)}, phases,
        global_batch_size=size, grid=(groups, lanes), window=window, seed=seed,
        epoch_steps=epoch_steps, shuffle=shuffle,
    ))  # fmt: skip
    first = np.cumsum([0, *map(len, counts)])
    epochs = {}
    for at in range(90):
        refs = order.refs(*divmod(at, epoch_steps))
        rows_of = order._step(at)
        numbers = order.windows(*divmod(at, epoch_steps))
        for row in range(size):
            source, shard, index = rows_of.source[row], refs.shard[row], refs.index[row]
            assert first[source] <= shard < first[source + 1]
            assert 0 <= index < counts[source][shard - first[source]]
            ref, key = (int(shard), int(index)), (int(source), int(rows_of.epoch[row]))
            assert ref not in epochs.setdefault(key, set())
            epochs[key].add(ref)
            window_of_row = order.window(at // epoch_steps, int(numbers[row]))
            assert (
                (window_of_row.step == at % epoch_steps) & (window_of_row.row == row)
            ).sum() == 1
            assert 0 <= window_of_row.step.min() <= window_of_row.step.max() < epoch_steps
    for (source, epoch), seen in epochs.items():
        total = sum(counts[source])
        ahead = max(e for s, e in epochs if s == source)
        assert len(seen) == total or ahead - epoch <= 2 + groups * size // total


@pytest.mark.parametrize(
    ("shares", "grid", "share"), [([8, 143], (2, 8), 4), ([16, 8, 197], (1, 8), 4)]
)
def test_lanes_do_not_draw_a_source_all_at_once(shares, grid, share):
    from mmstream.order.mixture.draws import Draws

    rows, part = grid[1] * share, shares[0] / sum(shares)
    draws = Draws({0: shares}, rows, grid, 3, rotate=True)
    counts = [int((draws.of_step(step)[0] == 0).sum()) for step in range(2 * sum(shares))]
    assert np.var(counts) < rows * part * (1 - part)  # evenly spread phases: 6 times as much


def test_a_window_of_a_large_source_comes_from_many_places():
    from mmstream.order import Corpus, MixtureOrder, Recipe

    order = MixtureOrder(Recipe.of(
        {"x": Corpus(np.array([8000]))}, {0: {"x": 1}},
        global_batch_size=4, grid=(1, 1), window=256, epoch_steps=2000,
    ))  # fmt: skip
    window = order.window(0, int(order.windows(0, 500)[0]))
    assert window.index.size == 256
    assert np.unique(window.index // 64).size >= 16  # runs of 16; a chunk has 64
    ahead = np.diff(window.index)
    assert (ahead == 1).mean() < 0.1


def test_sources_of_the_same_counts_have_orders_of_their_own():
    from mmstream.order import Corpus, MixtureOrder, Recipe

    corpus = {name: Corpus(np.array([50])) for name in "xy"}
    order = MixtureOrder(Recipe.of(
        corpus, {0: dict.fromkeys("xy", 1)}, global_batch_size=4, grid=(1, 1), epoch_steps=50
    ))  # fmt: skip
    shown = {0: [], 1: []}
    for step in range(25):
        refs = order.refs(0, step)
        for shard, index in zip(refs.shard.tolist(), refs.index.tolist()):
            shown[shard].append(index)
    assert sorted(shown[0]) == sorted(shown[1]) == list(range(50))
    assert shown[0] != shown[1]


def test_a_small_source_is_mixed_sample_by_sample(tmp_path):
    small, large = (
        write_tiny(tmp_path / "small", [900, 900]),
        write_tiny(tmp_path / "large", [9000]),
    )
    mixture = mm.Mixture(
        {"small": (mm.open_dataset(small), 1), "large": (mm.open_dataset(large), 1)}, epoch_steps=40
    )
    order = pipeline(mixture, global_batch_size=90, grid=(2, 3)).order
    assert [source.small for source in order._sources] == [True, False]
    together = shown = 0
    for step in range(40):
        refs = order.refs(0, step)
        places = np.sort((refs.shard * 900 + refs.index)[refs.shard < 2])
        together += int((np.diff(places) == 1).sum())
        shown += places.size
    assert together < 0.1 * shown  # 45 of 1,800 at random: 0.025


def test_a_walked_order_crosses_to_workers_as_small_as_a_new_one(datasets):
    order = pipeline(mixed(datasets)).order
    fresh = len(pickle.dumps(order))
    drawn(order, 40)
    assert len(pickle.dumps(order)) <= fresh + 10_000


def test_states_of_every_step_do_not_read_the_corpus_anew():
    from mmstream.order import Corpus, MixtureOrder, Recipe

    class Names(list):
        def __iter__(self):
            assert not ended
            return super().__iter__()

    ended = False
    corpus = Corpus(np.array([30, 20]), Names(["a", "b"]))
    recipe = Recipe.of({"x": corpus}, {0: {"x": 1}}, global_batch_size=4, epoch_steps=9)
    order = MixtureOrder(recipe)
    saved = order.identity()
    ended = True
    assert order.identity() == saved


def test_a_source_of_large_samples_that_comes_later_keeps_to_the_windows_bytes():
    from mmstream.order import Corpus, Recipe

    text = Corpus(np.array([10**6]), num_bytes=10**9)
    video = Corpus(np.array([10**5]), num_bytes=10**11)
    recipe = Recipe.of(
        {"text": text, "video": video}, {0: {"text": 1, "video": 0}, 50: {"text": 1, "video": 1}},
        global_batch_size=8, epoch_steps=9,
    )  # fmt: skip
    lanes = recipe.grid[0] * recipe.grid[1]
    assert recipe.settings["text"].window == 8192
    assert 1e9 < recipe.settings["video"].window * lanes * 10**6 < 2.5e9


def test_a_source_that_comes_later_chooses_nothing_of_those_before():
    from mmstream.order import Corpus, Recipe

    known, unknown = Corpus(np.array([4000]), num_bytes=10**9), Corpus(np.array([10**6]))
    weights = {0: {"known": 1, "later": 0}, 50: {"known": 1, "later": 1}}
    given = {"global_batch_size": 8, "epoch_steps": 9}
    two = Recipe.of({"known": known, "later": unknown}, weights, **given)
    one = Recipe.of({"known": known}, {0: {"known": 1}}, **given)
    assert two.grid == one.grid
    assert two.settings["known"] == one.settings["known"]


@pytest.mark.parametrize(("stop", "least"), [("first", 7), ("all", 1250)])
def test_an_epoch_stops_when_the_first_or_the_last_source_has_been_seen_once(datasets, stop, least):
    order = pipeline(mixed(datasets, stop=stop)).order
    steps = order.steps_per_epoch
    source = {"first": 1, "all": 2}[stop]
    before = {(sh, i) for step in drawn(order, steps - 1) for s, sh, i in step if s == source}
    after = {(sh, i) for step in drawn(order, steps) for s, sh, i in step if s == source}
    assert len(before) < least == len(after)


def test_weights_change_at_the_declared_step(datasets):
    changes = {30: {"a": 0, "b": 1, "c": 1}, 60: {"a": 1, "b": 0, "c": 0}}
    order = pipeline(mixed(datasets, 1, 0, 1, epoch_steps=25, changes=changes)).order
    steps = [Counter(source for source, _, _ in step) for step in drawn(order, 90)]
    assert not any(step[1] for step in steps[:30])
    assert not any(step[0] for step in steps[30:60])
    assert all(step[0] == 12 for step in steps[60:])
    totals = [sum((c for c in steps[a:b]), Counter()) for a, b in ((0, 30), (30, 60))]
    assert abs(totals[0][0] - 180) <= 6
    assert abs(totals[1][1] - 180) <= 6


def test_a_substitute_is_near_at_first_then_from_anywhere_in_the_source(datasets):
    order = pipeline(mixed(datasets, 1, 1, 6), global_batch_size=4, grid=(2, 2)).order
    first = np.cumsum([0, *map(len, COUNTS.values())])
    far = {source: set() for source in range(3)}
    for step in range(40):
        for row, (source, shard, index) in enumerate(drawn(order, step + 1)[step]):
            found = [order.substitute(0, step, row, attempt) for attempt in range(16)]
            assert all(first[source] <= other < first[source + 1] for other, _ in found)
            far[source].update(found[8:])
            if source == 2:  # the large one
                window = order.window(0, int(order.windows(0, step)[row]))
                later = window.step != step
                near = set(zip(window.shard[later].tolist(), window.index[later].tolist()))
                assert not near or set(found[:8]) <= near
                assert (shard, index) not in near
    assert len(far[1]) == 7
    assert len(far[2]) > 400  # of 1,250, drawn some 900 times


def test_window_numbers_tell_the_lane_of_a_large_source(datasets):
    order = pipeline(mixed(datasets, 1, 1, 6), global_batch_size=4, grid=(2, 2)).order
    lanes, others = {}, set()
    for step in range(40):
        source, lane, _ = order._draws.of_step(step)
        for key, number in zip(zip(source.tolist(), lane.tolist()), order.windows(0, step)):
            found = lanes.setdefault(key, set()) if key[0] == 2 else others
            found.add(int(number) % order.stride)
    assert len(lanes) == 4
    assert not others & set.union(*lanes.values())
    assert all(len(found) == 1 for found in lanes.values())
    assert len(set.union(*lanes.values())) == 4


@pytest.mark.parametrize(
    ("weight", "named"),
    [(-1, "number from 0"), (float("nan"), "number from 0"), (True, "number from 0"),
     (0, "leave it out"), (1e-7, "too small"), (None, "number from 0"), ("1", "number from 0"),
     pytest.param(10**400, "number from 0", id="huge")],
)  # fmt: skip
def test_impossible_weights_are_refused(datasets, weight, named):
    with pytest.raises(mm.ConfigError, match=named):
        pipeline(mixed(datasets, b=weight, c=1.0001))


def test_weights_that_change_too_often_are_refused(datasets):
    changes = {3 + 3 * n: {"a": 1, "b": 3 * (n % 2), "c": 3 * ((n + 1) % 2)} for n in range(400)}
    with pytest.raises(mm.ConfigError, match="change weights less often"):
        pipeline(mixed(datasets, epoch_steps=9, changes=changes), grid=(4, 1))


def test_golden_mixture():
    from mmstream.order import Corpus, MixtureOrder, Recipe

    order = MixtureOrder(Recipe.of(
        {"x": Corpus(np.array([300, 500])), "y": Corpus(np.array([9]))},
        {0: {"x": 0.9, "y": 0.1}, 40: {"x": 1, "y": 1}},
        global_batch_size=6, grid=(2, 2), window=32, seed=1, epoch_steps=30,
    ))  # fmt: skip
    found = [
        list(zip(*(column.tolist() for column in order.refs(epoch, step)[:2])))
        for epoch, step in ((0, 0), (0, 29), (1, 10), (50, 3))
    ]
    assert found == GOLDEN
    assert [
        order.substitute(1, 10, row, attempt) for row in (0, 2) for attempt in (0, 7, 8, 12)
    ] == (GOLDEN_SUBSTITUTES)
    assert [order.stream(50, 3, row) for row in (0, 1)] == GOLDEN_STREAMS


GOLDEN = [
    [(1, 431), (0, 19), (1, 466), (0, 213), (0, 211), (0, 208)],
    [(1, 30), (1, 184), (1, 218), (1, 469), (2, 3), (1, 128)],
    [(1, 339), (1, 254), (2, 1), (2, 0), (2, 2), (0, 182)],
    [(2, 1), (1, 129), (2, 0), (1, 83), (2, 6), (1, 217)],
]


GOLDEN_SUBSTITUTES = [(1, 258), (1, 338), (0, 8), (1, 32), (2, 0), (2, 3), (2, 3), (2, 1)]


GOLDEN_STREAMS = [
    (322226010498865699246031940426477035021, 490),
    (263014807067010510850813169504384291166, 5),
]
