"""The promise as one property: whatever the data and whoever reads, nothing lost, nothing twice."""

from __future__ import annotations

import json
import tempfile
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
from mmstream.state import make_state
from tests.helpers.bad_corpus import make_pipeline, policy, write_tiny
from tests.helpers.states import load_state
from tests.helpers.topology import Step, run

EPOCHS = 2


def refs_of(counts: list[int]) -> list[tuple[int, int]]:
    return [(shard, index) for shard, count in enumerate(counts) for index in range(count)]


@st.composite
def corpora(draw):
    """(counts, bad, of these listed): zeros, one shard, a handful of samples; 0-20 % are bad."""
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), "counts")
    refs = refs_of(counts)
    num_bad = draw(st.integers(0, len(refs) // 5), "num_bad")
    bad = draw(st.lists(st.sampled_from(refs), min_size=num_bad, max_size=num_bad, unique=True))
    return counts, set(bad), set(bad[: draw(st.integers(0, num_bad), "num_listed")])


def write(folder: str, counts: list[int], bad: set, listed: set) -> None:
    numbers = {ref: number for number, ref in enumerate(refs_of(counts))}
    write_bad(mm.open_dataset(write_tiny(folder, counts, {numbers[ref] for ref in bad})), listed)


def read_on(pipeline: mm.Pipeline, state: dict, num_steps: int, size: int, num_workers: int):
    """The next steps of a run on a topology of its own, and the state after them, as JSON."""
    epoch, step = load_state(pipeline.order, json.loads(json.dumps(state)))
    steps: list[Step] = []
    while num_steps and epoch < EPOCHS:
        stop = min(pipeline.order.steps_per_epoch, step + num_steps)
        steps += run(pipeline, size, num_workers, range(step, stop), epoch).steps
        num_steps -= stop - step
        state = make_state(pipeline.order, epoch, stop)
        epoch, step = state["epoch"], state["step"]
    return steps, json.loads(json.dumps(state))


def assert_nothing_is_lost_or_twice(
    pipeline: mm.Pipeline, steps: list[Step], bad: set, listed: set
):
    """Of one epoch: what is planned, and what of it is shown."""
    good = set(refs_of(pipeline.dataset.counts.tolist())) - listed
    planned, shown = Counter(), Counter()
    for step in steps:
        records = {record.row: record for record in step.bad}
        for row, (ref, other) in enumerate(zip(step.planned, step.shown, strict=True)):
            assert other not in bad
            assert other == ref or ref in bad
            counts = step.valid[row] or row in records
            planned[ref] += counts
            shown[ref] += counts and row not in records
            assert (row in records) == (ref in bad and counts)
    assert not set(planned) - good
    assert set(planned.values()) <= {0, 1}
    left_out = len(good) % pipeline.global_batch_size if pipeline.drop_last else 0
    assert planned.total() == len(good) - left_out
    assert +shown == Counter({ref: 1 for ref, n in planned.items() if n and ref not in bad})


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=40)
def test_any_corpus_on_any_chain_of_topologies_comes_whole_and_the_same(data):
    counts, bad, listed = data.draw(corpora(), "corpus")
    num_planned = sum(counts) - len(listed)
    rows = data.draw(st.integers(1, 12), "rows")
    drop_last = num_planned >= rows and data.draw(st.booleans(), "drop_last")
    action = data.draw(st.sampled_from(["substitute", "mask"]), "action")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, counts, bad, listed)

        def opened() -> mm.Pipeline:
            return make_pipeline(
                folder,
                global_batch_size=rows,
                drop_last=drop_last,
                shuffle=shuffle,
                window=window,
                grid=grid,
                seed=seed,
                bad_samples=policy(action=action),
            )

        shuffle = data.draw(st.booleans(), "shuffle")
        window = data.draw(st.sampled_from([None, 1, 5, 30]), "window")
        lanes = data.draw(
            st.sampled_from([q for q in range(1, rows + 1) if rows % q == 0]), "lanes"
        )
        grid = data.draw(st.sampled_from([None, (1, lanes), (2, lanes), (4, lanes)]), "grid")
        seed = data.draw(st.integers(0, 99), "seed")
        pipeline = opened()
        if num_planned <= len(bad - listed):  # not one good sample: nothing can be shown
            return
        num_steps = EPOCHS * pipeline.order.steps_per_epoch
        assert num_steps == EPOCHS * (num_planned // rows if drop_last else -(-num_planned // rows))
        state = make_state(pipeline.order, 0, 0)
        whole, _ = read_on(pipeline, state, num_steps, 1, 1)
        for epoch in range(EPOCHS):
            steps = [step for step in whole if step.epoch == epoch]
            assert_nothing_is_lost_or_twice(pipeline, steps, bad, listed)
        steps_read: list[Step] = []
        for leg in range(3):
            size = data.draw(st.integers(1, rows), "size")
            num_workers = data.draw(st.integers(1, 4), "num_workers")
            most = num_steps if leg == 2 else data.draw(st.integers(0, num_steps), "steps")
            steps, state = read_on(opened(), state, most, size, num_workers)
            steps_read += steps
        assert steps_read == whole
        assert (state["epoch"], state["step"]) == (EPOCHS, 0)


def test_a_whole_missing_shard_on_the_list_stops_no_run(tmp_path):
    write(str(tmp_path), [20, 9, 20], set(), {(1, index) for index in range(9)})
    (tmp_path / "shard-000001.tar").unlink()
    (tmp_path / "shard-000001.tar.idx").unlink()
    pipeline = make_pipeline(
        str(tmp_path), global_batch_size=4, bad_samples=mm.BadSamplePolicy(quarantine=None)
    )
    loader = mm.Loader(pipeline)
    keys = [key for batch in loader for key in batch["__key__"]]
    assert sorted(keys) == [f"{n:06d}" for n in [*range(20), *range(29, 49)]]
    assert loader.stats.num_bad == 0
