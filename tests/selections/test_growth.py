"""A dataset that grows: its runs go on, and views keep what they chose of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.audit import replay
from mmstream.dataset.bad_list import take_down, write_bad
from mmstream.order import Order
from mmstream.state import make_state, order_of_state, resume
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.convert_corpus import run as convert, write_rows
from tests.helpers.topology import Step, described, joined

COUNTS = (7, 5, 18)


def loader(view: mm.Dataset) -> mm.Loader:
    pipeline = mm.Pipeline(view, global_batch_size=4)
    return mm.Loader(pipeline, world=mm.World(0, 1), on_change="finish_epoch")


@pytest.mark.parametrize("num_chosen", [5, None])
def test_another_selection_begins_with_an_epoch_of_a_grown_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_chosen: int | None
) -> None:
    old = mm.open_dataset(write_tiny(tmp_path / "old", COUNTS))
    new = mm.open_dataset(write_tiny(tmp_path / "new", (*COUNTS, 9)))
    run = loader(old[::2])
    states = [run.state_dict() for _ in run]
    with caplog.at_level(logging.INFO, "mmstream"):
        grown = loader(new if num_chosen is None else new[:num_chosen])
        grown.load_state_dict(states[-1])
    assert "before, 15 chosen took part" in caplog.text
    assert grown.state_dict()["order"]["num_shards"] == 4
    assert len(list(grown)) == (39 if num_chosen is None else num_chosen) // 4
    with pytest.raises(mm.StateError, match="the chosen samples are not those of the state"):
        loader(new[1::2]).load_state_dict(states[0])


def test_an_epoch_may_begin_with_samples_of_appended_shards_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(view: mm.Dataset) -> mm.Loader:
        pipeline = mm.Pipeline(view, global_batch_size=4)
        return mm.Loader(pipeline, world=mm.World(0, 1))

    before = run(mm.open_dataset(write_tiny(tmp_path / "corpus", COUNTS)))
    states = [before.state_dict() for _ in before]
    assert states[-1]["step"] == 0 < states[0]["step"]
    after = run(mm.open_dataset(write_tiny(tmp_path / "corpus", (*COUNTS, 9)))[-8:])
    with caplog.at_level(logging.INFO, "mmstream"):
        after.load_state_dict(states[-1])
    assert "grown from 3 to 4 shards: epoch 1 begins with 8 samples" in caplog.text
    assert {shard for batch in after for shard, _ in described(batch).shown} == {3}
    with pytest.raises(mm.StateError, match="num_shards was 3 and is 4"):
        after.load_state_dict(states[0])


# -- a state in the middle of an epoch -------------------------------------------------------------

SETTINGS = {"global_batch_size": 6, "seed": 5}


def part_of_run(
    dataset: mm.Dataset, state: dict[str, Any] | None, size: int, num_steps: int, workers: int = 0
) -> tuple[list[Step], dict[str, Any]]:
    """Read some steps on some ranks, without `on_change`, over the ends of epochs."""
    parts, states = [], []
    for rank in range(size):
        pipeline = mm.Pipeline(dataset, **SETTINGS)
        loader = mm.Loader(
            pipeline,
            world=mm.World(rank, size),
            rows_per_rank="balanced",
            num_workers=workers,
            num_threads=1,
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        steps: list[Step] = []
        while len(steps) < num_steps:
            for batch in loader:
                steps.append(described(batch))
                if len(steps) == num_steps:
                    states.append(loader.state_dict())
                    break
        loader.close()
        parts.append(steps)
    assert all(each == states[0] for each in states)
    return [joined(step) for step in zip(*parts, strict=True)], states[0]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", [lambda data: data, lambda data: data.sample(0.7)])
def test_each_sample_comes_once_an_epoch_across_growth_and_topologies(
    tmp_path: Path, workers: int, view: Callable[[mm.Dataset], mm.Dataset]
) -> None:
    folder, counts = tmp_path / "corpus", [17, 30, 11]
    epochs: dict[int, list[Step]] = {}
    state, sizes = None, {}
    for size, num_steps, more in (
        (2, 3, []),
        (1, 2, [9]),
        (3, 5, [13, 2]),
        (2, 9, []),
        (1, 20, [40]),
    ):
        counts += more
        data = view(mm.open_dataset(write_tiny(folder, counts)))
        epoch = 0 if state is None else state["epoch"]
        sizes.setdefault(epoch, len(data))
        steps, state = part_of_run(data, state, size, num_steps, workers)
        for step in steps:
            epochs.setdefault(step.epoch, []).append(step)
            sizes.setdefault(step.epoch, len(data))
    assert [step.epoch for steps in epochs.values() for step in steps] == sorted(
        step.epoch for steps in epochs.values() for step in steps
    )
    assert max(epochs) >= 2
    for epoch, steps in epochs.items():
        assert [step.step for step in steps] == list(range(len(steps)))
        shown = [ref for step in steps for ref in step.shown]
        assert len(set(shown)) == len(shown)
        if epoch < max(epochs):
            assert len(steps) == sizes[epoch] // 6
    assert {shard for step in epochs[max(epochs)] for shard, _ in step.shown} >= {3, 4, 5}


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    more=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    settings=st.fixed_dictionaries(
        {},
        optional={
            "window": st.integers(1, 9),
            "chunk": st.integers(1, 4),
            "shuffle": st.booleans(),
            "drop_last": st.booleans(),
            "reshuffle": st.sampled_from(["global", "lanes"]),
            "window_bytes": st.integers(1, 999),
        },
    ),
    place=st.integers(0, 99),
)
def test_an_epoch_ends_as_planned_for_any_growth_and_settings(
    counts: list[int], more: list[int], rows: int, settings: dict[str, Any], place: int
) -> None:
    def order(counts: list[int]) -> Order:
        names = [f"{n}" for n in range(len(counts))]
        sizes = [700 * count for count in counts]
        return Order.from_counts(
            counts, names=names, sizes=sizes, global_batch_size=rows, seed=1, **settings
        )

    class Source:
        can_finish_epoch = True

    try:
        before, now = order(counts), order(counts + more)
    except mm.ConfigError:  # too few samples, or settings that exclude each other
        return
    step = place % before.steps_per_epoch
    *where, resumed = resume(Source(), now, make_state(before, 3, step), "refuse")  # type: ignore[arg-type]
    assert where == [3, step]
    expected = before if step else now
    assert resumed.identity() == expected.identity()
    for each in range(step, expected.steps_per_epoch):
        assert all(
            (one == other).all()
            for one, other in zip(resumed.refs(3, each), expected.refs(3, each), strict=True)
        )


def stopped(folder: str, **settings: Any) -> tuple[dict[str, Any], list[Step]]:
    """Return the state after two steps, and the rest of the epoch."""
    data = mm.open_dataset(folder)
    run_of = mm.Loader(mm.Pipeline(data, **SETTINGS | settings), world=mm.World(0, 1))
    batches = iter(run_of)
    _ = [next(batches) for _ in range(2)]
    state = json.loads(json.dumps(run_of.state_dict()))
    return state, [described(batch) for batch in batches]


def test_what_was_taken_down_and_appended_meanwhile_changes_no_other_row(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "corpus", COUNTS)
    state, rest = stopped(folder)
    gone = [rest[0].shown[1], rest[1].shown[2]]
    write_tiny(folder, (*COUNTS, 9))
    take_down(mm.open_dataset(folder), [*gone, (3, 5)], "request 17")
    dataset = mm.open_dataset(folder)
    again = mm.Loader(mm.Pipeline(dataset, **SETTINGS), world=mm.World(0, 1))
    again.load_state_dict(state)
    delivered = [described(batch) for batch in again]
    assert [step.planned for step in delivered] == [step.planned for step in rest]
    for step, expected in zip(delivered, rest, strict=True):
        for ref, other in zip(step.shown, expected.shown, strict=True):
            assert ref == other if other not in gone else ref not in (*gone, (3, 5))
    assert len({ref for batch in again for ref in described(batch).shown}) == 36
    order, epoch, step = order_of_state(state, dataset)
    rows = [*replay(dataset, order, epoch, [step])]
    assert [(int(row.shard[6:12]), row.index) for row in rows] == rest[0].planned


def test_a_bad_list_that_came_with_the_growth_is_refused_as_ever(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "corpus", COUNTS)
    state, rest = stopped(folder)
    write_tiny(folder, (*COUNTS, 9))
    write_bad(mm.open_dataset(folder), [(3, 1)])
    loader_of = mm.Loader(mm.Pipeline(mm.open_dataset(folder), **SETTINGS), world=mm.World(0, 1))
    loader_of.load_state_dict(state)  # it names new samples alone
    assert [described(batch) for batch in loader_of] == rest
    write_bad(mm.open_dataset(folder), [(0, 1), (3, 1)])
    loader_of = mm.Loader(mm.Pipeline(mm.open_dataset(folder), **SETTINGS), world=mm.World(0, 1))
    with pytest.raises(mm.StateError, match="bad was None"):
        loader_of.load_state_dict(state)


def test_a_run_goes_on_after_an_append(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weeks = [range(40), range(40, 70), range(60, 90)]
    files = [
        write_rows(tmp_path / f"{n}.jsonl", [{"id": i, "text": f"row {i}"} for i in week])
        for n, week in enumerate(weeks)
    ]
    folder = str(tmp_path / "out")
    convert(files[0], folder)
    state, rest = stopped(folder)
    steps: list[list[str]] = []
    for file in files[1:]:
        convert(file, folder, append=True)
        with caplog.at_level(logging.INFO, "mmstream.state"):
            loader_of = mm.Loader(
                mm.Pipeline(mm.open_dataset(folder), **SETTINGS), world=mm.World(0, 1)
            )
            loader_of.load_state_dict(state)
        assert [described(batch) for batch in loader_of] == rest
        batches = [described(batch) for batch in loader_of]
        steps.append([key for batch in batches for key in batch.keys])
        assert len(set(steps[-1])) == len(steps[-1])
    assert [len(keys) for keys in steps] == [66, 90]
    assert all(set(a) < set(b) or len(a) < len(b) for a, b in pairwise(steps))
    assert "grown from 5 to 9 shards: epoch 1 begins with 70 samples; epoch 0 ends" in caplog.text
