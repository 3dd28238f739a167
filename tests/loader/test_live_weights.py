"""`loader.set_weights`: other weights in the middle of a run, exact at a resume on any topology."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist

import mmstream as mm
from mmstream import ranks as ranks_module
from mmstream.audit import (
    SampleLog,
    check_logs,
    log_files,
    orders_logged,
    read_lineage,
    replay,
    steps_logged,
)
from mmstream.ranks import World
from mmstream.state import order_of_state
from tests.helpers.bad_corpus import policy, write_faulty, write_tiny
from tests.helpers.gloo_ranks import join_group, run_ranks
from tests.helpers.stores import far
from tests.helpers.topology import described, joined

STEPS = 8
CHANGES = {3: {"a": 1, "b": 0}, 4: {"a": 0.25, "b": 0.75}, 11: {"a": 0.5, "b": 0.5}}
"""Weights that are set after so many batches of a run."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    write_faulty(folder / "a", [30, 20, 14], {0, 5, 31, 58, 60})
    write_tiny(folder / "b", [25])
    return folder


def pipeline_of(folder, *, changes=None, opened=mm.open_dataset, **given):
    sources = {name: (opened(f"{folder}/{name}"), 1) for name in "ab"}
    mixture = mm.Mixture(sources, epoch_steps=STEPS, changes=changes)
    given = {"global_batch_size": 4, "seed": 3, "window": 16, "bad_samples": policy(), **given}
    return mm.Pipeline(mixture, **given)


def walk(loader, stop, changes=CHANGES, state=None):
    """Deliver a run up to a step; return its steps, and the state after each."""
    if state is not None:
        loader.load_state_dict(state)
    states, steps = {}, {}
    while True:
        for batch in loader:
            number = batch["__lineage__"].epoch * STEPS + batch["__lineage__"].step + 1
            if number in changes:
                loader.set_weights(changes[number])
            steps[number - 1] = described(batch)
            states[number] = json.loads(json.dumps(loader.state_dict()))
            if number == stop:
                return steps, states


def test_weights_hold_from_the_next_batch_on_until_the_next_call(corpora):
    loader = mm.Loader(pipeline_of(corpora))
    loader.set_weights({"a": 0, "b": 2})  # before the first batch
    delivered = []
    for batch in loader:
        delivered.append(Counter(batch["__source__"]))
        if len(delivered) == 3:
            loader.set_weights({"a": 1, "b": 1})
            loader.set_weights({"a": 3, "b": 1})  # in its place
    assert delivered == [{"b": 4}] * 3 + [{"a": 3, "b": 1}] * 5
    loader.set_weights({"a": 1, "b": 0})  # between epochs
    assert Counter(next(iter(loader))["__source__"]) == {"a": 4}
    assert loader.state_dict()["order"]["weights"] == [
        {"step": 0, "shares": {"b": 1}, "live": True},
        {"step": 3, "shares": {"a": 3, "b": 1}, "live": True},
        {"step": 8, "shares": {"a": 1}, "live": True},
    ]


@pytest.mark.parametrize(
    ("num_workers", "is_ahead"),
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.slow)],
)
def test_a_resume_at_every_step_equals_the_run_without_a_stop(corpora, num_workers, is_ahead):
    pipeline = pipeline_of(corpora, changes={6: {"a": 1, "b": 5}})

    def made():
        loader = mm.Loader(pipeline, num_workers=num_workers)
        return mm.to_device(loader, "cpu") if is_ahead else loader

    walker = made()
    steps, states = walk(walker, 14)
    assert Counter(ref[0] for step in steps.values() for ref in step.planned)
    if not is_ahead:
        assert [line["step"] for line in states[14]["order"]["weights"]] == [0, 3, 4, 11]
    for number in range(1, 14) if num_workers == 0 else (2, 3, 10):
        later = {step: weights for step, weights in CHANGES.items() if step > number}
        loader = made()
        rest, after = walk(loader, 14, later, states[number])
        assert rest == {step: steps[step] for step in range(number, 14)}
        assert after[14] == states[14]
        getattr(loader, "loader", loader).close()
    getattr(walker, "loader", walker).close()


def test_other_ranks_have_the_same_global_batches_and_replay_follows_the_state(corpora):
    pipeline = pipeline_of(corpora)
    steps, states = walk(mm.Loader(pipeline), 14)
    parts = [
        walk(mm.Loader(pipeline, world=World(rank, 3), rows_per_rank="balanced"), 14)
        for rank in range(3)
    ]
    for step, whole in steps.items():
        assert joined([part[0][step] for part in parts]) == whole
    assert all(part[1] == states for part in parts)
    order, epoch, _ = order_of_state(states[14], pipeline.dataset)
    for step, whole in steps.items():
        planned = replay(pipeline.dataset, order, *divmod(step, STEPS)[:1], [step % STEPS])
        refs = [pipeline.dataset.name_of(shard) for shard, _ in whole.planned]
        assert [row.shard for row in planned] == refs
    assert epoch == 1


@pytest.mark.slow
def test_a_reader_process_reads_on_by_the_new_weights(corpora):
    steps, _ = walk(mm.Loader(pipeline_of(corpora)), 14)
    remote = pipeline_of(corpora, opened=lambda folder: far(mm.open_dataset(folder)))
    loader = mm.Loader(remote)
    assert walk(loader, 14)[0] == steps
    loader.close()


def test_logs_of_a_run_with_changes_fit_its_state(corpora, tmp_path):
    pipeline = pipeline_of(corpora)
    loader, samples = mm.Loader(pipeline), SampleLog(enabled=True)
    with (tmp_path / "metrics-rank0.jsonl").open("w") as file:
        for number in range(2 * STEPS):
            state = loader.state_dict()
            if number % STEPS == 0:
                batches = iter(loader)
            samples.add([next(batches)], state["order"])
            if number + 1 in CHANGES:
                loader.set_weights(CHANGES[number + 1])
            line = {"num_steps": number + 1, "rank": 0, "world_size": 1, **samples.take()}
            file.write(json.dumps(line) + "\n")
    logged = read_lineage(log_files([tmp_path]))
    order = order_of_state(loader.state_dict(), pipeline.dataset)[0]
    orders = orders_logged(order, logged, pipeline.dataset)
    check = check_logs(orders, logged, steps_logged(orders, logged))
    assert check.holds
    assert check.num_steps == 2 * STEPS


def test_a_loop_that_is_left_keeps_the_weights(corpora):
    loader = mm.Loader(pipeline_of(corpora))
    list(islice(loader, 2))
    loader.set_weights({"a": 1, "b": 0})
    assert Counter(next(iter(loader))["__source__"]) == {"a": 4}
    assert loader.state_dict()["epoch"] == 1


def test_a_source_may_begin_and_pause_and_end(corpora):
    sources = {
        name: (mm.open_dataset(f"{corpora}/{name}"), n) for name, n in {"a": 1, "b": 0}.items()
    }
    mixture = mm.Mixture(sources, epoch_steps=STEPS, changes={100: {"a": 1, "b": 1}})
    pipeline = mm.Pipeline(mixture, global_batch_size=4, window=8, bad_samples=policy())
    loader, keys = mm.Loader(pipeline), []
    for number, batch in enumerate(loader):
        keys += [k for k, s in zip(batch["__key__"], batch["__source__"], strict=True) if s == "b"]
        loader.set_weights({"a": 1, "b": (1, 0, 3)[number % 3]})
    assert len(set(keys)) == len(keys) == 12


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1}, r"got weights of \['a'\], and the sources are \['a', 'b'\]"),
        ({"a": 1, "b": 1, "c": 1}, r"got weights of .*'c'.*give each of them one, 0 for none"),
        ({"a": -1, "b": 1}, "weights.*-1.* from 0"),
        ({"a": float("nan"), "b": 1}, "weight"),
        ({"a": 0, "b": 0}, "at least one must be above 0"),
        ({"a": "1", "b": 1}, "weights"),
        (None, "weights"),
    ],
)
def test_impossible_weights_change_nothing(corpora, weights, words):
    loader = mm.Loader(pipeline_of(corpora))
    state = loader.state_dict()
    with pytest.raises(mm.ConfigError, match=words):
        loader.set_weights(weights)
    assert loader.state_dict() == state


def test_what_has_no_weights_is_refused(corpora):
    dataset = mm.open_dataset(f"{corpora}/b")
    loader = mm.Loader(mm.Pipeline(dataset, global_batch_size=4))
    with pytest.raises(
        mm.ConfigError, match=r"set_weights: is for single samples of an mm\.Mixture"
    ):
        loader.set_weights({"b": 1})
    loader = mm.Loader(pipeline_of(corpora))
    loader._channel = object()  # of share="broadcast", which needs a mesh
    with pytest.raises(mm.ConfigError, match='leave out share="broadcast"'):
        loader.set_weights({"a": 1, "b": 1})
    stopping = mm.Mixture({"b": (dataset, 1)}, stop="all")
    loader = mm.Loader(mm.Pipeline(stopping, global_batch_size=4))
    with pytest.raises(mm.ConfigError, match="epoch_steps=n in place of stop="):
        loader.set_weights({"b": 1})


# -- several ranks ---------------------------------------------------------------------------------


def play(rank: int, folder: str, out: str) -> None:
    join_group(rank, Path(out, "rendezvous"), 2, timeout_s=300)
    said = {}
    with closing(mm.Loader(pipeline_of(folder))) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_weights({"a": 1, "b": 0})
        said["same"] = Counter(next(batches)["__source__"])
        for name, weights, number in (
            ("weights", {"a": 1, "b": rank}, 1),
            ("place", {"a": 1, "b": 1}, 1 + rank),
        ):
            list(islice(batches, number))
            with pytest.raises(mm.ConfigError) as refused:
                loader.set_weights(weights)
            said[name] = str(refused.value)
    with closing(mm.Loader(pipeline_of(folder))) as loader:
        next(iter(loader))
        dist.barrier()
        ranks_module._default_store().set_timeout(timedelta(seconds=5))
        if rank == 0:
            with pytest.raises(mm.ConfigError) as refused:
                loader.set_weights({"a": 1, "b": 0})
            said["alone"] = str(refused.value)
        dist.barrier()
        if rank == 1:
            with pytest.raises(mm.ConfigError) as refused:  # noqa: PT012
                list(loader)
                list(loader)
            said["alone"] = str(refused.value)
    Path(out, f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_differs_or_does_not_call_is_named_on_every_rank(corpora, tmp_path):
    run_ranks(play, str(corpora), str(tmp_path), num_ranks=2)
    for rank in range(2):
        said = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert said["same"] == {"a": 2}
        assert "weights is " in said["weights"]
        assert "'b': 1" in said["weights"]
        assert "step of the run is '" in said["place"] or "step of the run is " in said["place"]
        assert "rank 1 has not begun set_weights: every rank must call it" in said["alone"]
