"""Mixtures of datasets: exact proportions, each source once in each of its epochs, elastic."""

import json
from collections import Counter

import numpy as np
import pytest
from bad_corpus import policy, write_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from topology import assert_resumes_exactly, described, run

import mmstream as mm

COUNTS = {"a": [40, 0, 31], "b": [7], "c": [400, 350, 500]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {name: write_tiny(root / name, counts) for name, counts in COUNTS.items()}


@pytest.fixture
def datasets(folders):
    return {name: mm.open_dataset(url) for name, url in folders.items()}


def mixed(datasets, a=2.0, b=0.5, c=7.5, **given):
    given = given or {"epoch_steps": 40}
    weights = {"a": a, "b": b, "c": c}
    return mm.Mixture({n: (d, weights[n]) for n, d in datasets.items()}, **given)


def pipeline(mixture, **given):
    given = {"global_batch_size": 12, "seed": 5, "grid": (2, 3), "window": 24,
             "on_bad": policy(), **given}  # fmt: skip
    return mm.Pipeline(mixture, **given)


def drawn(order, num_steps):
    """(source, shard, index) of each row of the first steps of a run, step by step."""
    first = np.cumsum([0, *map(len, COUNTS.values())])
    steps = []
    for at in range(num_steps):
        refs = order.refs(*divmod(at, order.steps_per_epoch))
        source = np.searchsorted(first, refs.shard, side="right") - 1
        steps.append(list(zip(source.tolist(), refs.shard.tolist(), refs.index.tolist())))
    return steps


def test_every_source_gives_its_part_to_less_than_a_sample_a_lane(datasets):
    order = pipeline(mixed(datasets)).order
    counts, num_lanes = Counter(), order.grid[0] * order.grid[1]
    for number, step in enumerate(drawn(order, 700), start=1):
        counts.update(source for source, _, _ in step)
        for source, weight in enumerate((0.2, 0.05, 0.75)):
            assert abs(counts[source] - weight * number * 12) < 2 * num_lanes
    assert [counts[0], counts[1], counts[2]] == pytest.approx([1680, 420, 6300], abs=num_lanes)


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
    order = pipeline(mixture, grid=(2, 1)).order
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
    for (source, epoch), seen in epochs.items():
        total = sum(counts[source])
        ahead = max(e for s, e in epochs if s == source)
        assert len(seen) == total or ahead - epoch <= 2 + groups * size // total


@pytest.mark.parametrize(("size", "num_workers"), [(1, 2), (2, 1), (3, 3), (4, 2), (12, 1)])
def test_every_topology_sees_the_same_batches(datasets, size, num_workers):
    made = pipeline(mixed(datasets))
    assert run(made, size, num_workers).steps == run(made).steps


def test_a_resume_at_every_step_is_exact(datasets):
    steps = assert_resumes_exactly(lambda: mm.Loader(pipeline(mixed(datasets, epoch_steps=9))))
    assert len(steps) == 18


def test_a_resume_on_other_workers_is_exact(datasets):
    made = pipeline(mixed(datasets, epoch_steps=9))
    loader = mm.Loader(made)
    whole = [described(batch) for _ in range(3) for batch in loader]
    other = mm.Loader(made, num_workers=2)
    state = json.loads(json.dumps({**loader.state_dict(), "epoch": 1, "step": 4}))
    other.load_state_dict(state)
    assert [described(batch) for _ in range(2) for batch in other] == whole[13:]
    other.close()


def test_a_batch_tells_the_source_of_each_row(datasets):
    batch = next(iter(mm.Loader(pipeline(mixed(datasets)))))
    assert set(batch["__source__"]) <= {"a", "b", "c"}
    urls = {n: d.store.url for n, d in datasets.items()}
    for source, url in zip(batch["__source__"], batch["__url__"]):
        assert url.startswith(urls[source])
    assert pipeline(mixed(datasets)).take(3)[0]["__source__"] in "abc"


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


def test_weights_that_lie_ahead_may_be_declared_anew(datasets):
    before = pipeline(mixed(datasets, epoch_steps=20))
    change = {"a": 5, "b": 5, "c": 0}
    now = pipeline(mixed(datasets, epoch_steps=20, changes={30: change}))
    assert [now.order.refs(1, s)[0].tolist() for s in range(10)] == [
        before.order.refs(1, s)[0].tolist() for s in range(10)
    ]
    loader = mm.Loader(before)
    list(loader)
    state = loader.state_dict()
    mm.Loader(now).load_state_dict(state)
    with pytest.raises(mm.StateError, match="weights from step 10"):
        mm.Loader(pipeline(mixed(datasets, epoch_steps=20, changes={10: change}))).load_state_dict(
            state
        )


def test_a_source_that_was_never_drawn_from_may_be_added(datasets):
    two = {name: (datasets[name], 1) for name in ("a", "c")}
    before = pipeline(mm.Mixture(two, epoch_steps=20))
    loader = mm.Loader(before)
    list(loader)
    state = loader.state_dict()
    later = {25: {"a": 1, "b": 2, "c": 1}}
    more = two | {"b": (datasets["b"], 0)}
    now = pipeline(mm.Mixture(more, epoch_steps=20, changes=later))
    other = mm.Loader(now)
    other.load_state_dict(state)
    steps = [described(batch) for batch in other]
    assert steps[:5] == run(before, epoch=1).steps[:5]
    assert any("/b/" in batch for batch in (r for b in [next(iter(other))] for r in b["__url__"]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"global_batch_size": 6}, "global_batch_size was 12 and is 6"),
        ({"grid": (1, 3)}, "grid was"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"window": 48}, "source c was"),
    ],
)
@pytest.mark.parametrize("step", [0, 3])
def test_what_has_begun_binds_at_an_epochs_begin_too(datasets, change, named, step):
    state = mm.Loader(pipeline(mixed(datasets))).state_dict() | {"epoch": 2, "step": step}
    with pytest.raises(mm.StateError, match=named):
        mm.Loader(pipeline(mixed(datasets), **change)).load_state_dict(state)


def test_a_mixtures_state_is_not_a_datasets(datasets):
    mixture, single = pipeline(mixed(datasets)), pipeline(datasets["c"])
    for one, other in ((mixture, single), (single, mixture)):
        with pytest.raises(mm.StateError, match="the state is of"):
            mm.Loader(other).load_state_dict(mm.Loader(one).state_dict())


def test_a_bad_sample_is_replaced_by_one_of_its_source(tmp_path):
    bad = write_tiny(tmp_path / "bad", [60, 60], bad=range(0, 120, 7))
    good = write_tiny(tmp_path / "good", [300])
    mixture = mm.Mixture(
        {"bad": (mm.open_dataset(bad), 1), "good": (mm.open_dataset(good), 1)}, epoch_steps=30
    )
    made = pipeline(mixture)
    whole = run(made)
    assert run(made, 3, 2).steps == whole.steps
    records = [record for step in whole.steps for record in step.bad]
    assert records
    for record in records:
        assert record.shard.startswith("bad/shard-")
        assert record.substitute[0].startswith("bad/shard-")
    assert all(all(step.valid) for step in whole.steps)


def test_a_transforms_draws_follow_the_sources_own_epochs(tmp_path):
    one, other = write_tiny(tmp_path / "one", [5]), write_tiny(tmp_path / "other", [50])
    mixture = mm.Mixture(
        {"one": (mm.open_dataset(one), 1), "other": (mm.open_dataset(other), 1)}, epoch_steps=5
    )
    draws = Counter()
    for batch in mm.Loader(pipeline(mixture, transforms=(_draw,))):
        draws.update(
            (key, draw)
            for key, draw, source in zip(batch["__key__"], batch["draw"], batch["__source__"])
            if source == "one"
        )
    assert len(draws) == sum(draws.values()) == 30  # five samples, six times each, all different


def _draw(sample):
    return sample | {"draw": str(mm.sample_rng(sample).integers(1 << 62))}


def test_a_bad_list_is_left_out_of_a_source(tmp_path):
    from mmstream.badlist import write_bad

    url = write_tiny(tmp_path / "one", [20, 20])
    write_bad(mm.open_dataset(url), [(0, 3), (1, 0)])
    mixture = mm.Mixture({"one": (mm.open_dataset(url), 1)}, stop="all")
    order = pipeline(mixture).order
    seen = {ref for step in drawn(order, 20) for ref in ((s, i) for _, s, i in step)}
    assert len(seen) == 38
    assert not seen & {(0, 3), (1, 0)}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "say when an epoch ends"),
        ({"stop": "first", "epoch_steps": 3}, "say when an epoch ends"),
        ({"stop": "last"}, "first or all"),
        ({"stop": "all", "changes": {3: {"a": 1, "b": 1, "c": 1}}}, "need epoch_steps"),
        ({"epoch_steps": 9, "changes": {3: {"a": 1}}}, "the sources are"),
        ({"epoch_steps": 9, "changes": {0: {"a": 1, "b": 1, "c": 1}}}, "count from 1"),
    ],
)
def test_impossible_mixtures_are_refused(datasets, given, named):
    with pytest.raises(mm.ConfigError, match=named):
        mm.Mixture({name: (dataset, 1) for name, dataset in datasets.items()}, **given)


@pytest.mark.parametrize(
    ("weight", "named"),
    [(-1, "number from 0"), (float("nan"), "number from 0"), (True, "number from 0"),
     (0, "leave it out"), (1e-7, "too small")],
)  # fmt: skip
def test_impossible_weights_are_refused(datasets, weight, named):
    with pytest.raises(mm.ConfigError, match=named):
        pipeline(mixed(datasets, b=weight, c=1.0001))


def test_a_source_without_samples_is_refused(tmp_path, datasets):
    empty = mm.open_dataset(write_tiny(tmp_path / "empty", [0]))
    with pytest.raises(mm.ConfigError, match="source 'empty' has no samples"):
        pipeline(mm.Mixture({"a": (datasets["a"], 1), "empty": (empty, 1)}, epoch_steps=3))


def test_weights_that_change_too_often_are_refused(datasets):
    changes = {3 + 3 * n: {"a": 1, "b": 3 * (n % 2), "c": 3 * ((n + 1) % 2)} for n in range(400)}
    with pytest.raises(mm.ConfigError, match="change weights less often"):
        pipeline(mixed(datasets, epoch_steps=9, changes=changes), grid=(4, 1))


def test_a_replay_of_a_mixture_tells_what_was_shown(datasets):
    from mmstream.planning import order_of_state
    from mmstream.replaying import replay

    made = pipeline(mixed(datasets, epoch_steps=9))
    loader = mm.Loader(made)
    batches = list(loader)
    plain = mm.Mixture({name: (d, 1) for name, d in datasets.items()}, epoch_steps=1)
    order, epoch, step = order_of_state(json.loads(json.dumps(loader.state_dict())), plain)
    assert (epoch, step) == (1, 0)
    rows = list(replay(plain, order, 0, range(9), keys=True))
    assert [row.key for row in rows] == [key for batch in batches for key in batch["__key__"]]
    assert rows[0].shard.split("/")[0] == batches[0]["__source__"][0]


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


GOLDEN = [
    [(1, 431), (0, 19), (1, 466), (0, 213), (0, 211), (0, 208)],
    [(1, 30), (1, 184), (1, 218), (1, 469), (2, 3), (1, 128)],
    [(1, 339), (1, 254), (2, 1), (2, 0), (2, 2), (0, 182)],
    [(2, 1), (1, 129), (2, 0), (1, 83), (2, 6), (1, 217)],
]
