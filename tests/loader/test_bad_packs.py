"""Packs on their way to batches: bad samples, substitutes, resumes, and who reads them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.dataset.bad_list import take_down
from mmstream.packing.cost import deal
from mmstream.pipeline import PipelineRunner
from mmstream.ranks import rows_of_rank
from mmstream.reading.step import BatchLineage, Job
from mmstream.types import Batch
from tests.helpers.packed_texts import (
    fields_of,
    length_of,
    pack_pipeline,
    plan_texts,
    text_of,
    write_texts,
)
from tests.helpers.reader_thread import reader_thread
from tests.helpers.stores import watched

COUNTS = [40, 0, 25]


def damaged(number: int) -> dict[str, bytes]:
    """Every fourth text is none, and so are most long ones, which are packs alone."""
    is_bad = number % 4 == 0 or (length_of(number) > 30 and number % 3)
    return {"txt": b"\xff\xfe\xff"} if is_bad else fields_of(number)


def lenient(**options: Any) -> mm.BadSamplePolicy:
    return mm.BadSamplePolicy(
        **{"max_fraction": 1, "max_consecutive": 0, "quarantine": None, **options}
    )


def rows_of(batch: Batch) -> dict[int, Any]:
    """What each row of the global batch shows: keys, planned samples, records, and validity."""
    lineage: BatchLineage = batch["__lineage__"]
    assert len(lineage.rows) == len(lineage.shown) == len(batch["__key__"])
    rows: dict[int, Any] = {}
    for row in range(lineage.num_rows):
        number = lineage.order_row(row)
        rows[number] = (
            [key for key, of in zip(batch["__key__"], lineage.rows, strict=True) if of == row],
            [ref for ref, of in zip(lineage.shown, lineage.rows, strict=True) if of == row],
            [r for r, of in zip(lineage.planned, lineage.planned_rows, strict=True) if of == row],
            [record for record in lineage.bad if record.row == number],
            bool(batch["__valid__"][row]),
        )
    return rows


def global_steps(
    pipeline: mm.Pipeline, num_ranks: int = 1, num_workers: int = 1, epoch: int = 0
) -> list[dict[int, Any]]:
    """The rows of each step of an epoch, put together from ranks and workers."""
    steps: list[dict[int, Any]] = [{} for _ in range(pipeline.order.steps_per_epoch)]
    for rank in range(num_ranks):
        rows = rows_of_rank(pipeline.global_batch_size, mm.World(rank, num_ranks), "balanced")
        for worker in range(num_workers):
            with closing(PipelineRunner(pipeline, num_threads=1 + worker)) as runner:
                for step in range(worker, len(steps), num_workers):
                    batch = runner.batch(Job(epoch, step, *rows, num_workers))
                    steps[step] |= rows_of(batch)
    return [dict(sorted(step.items())) for step in steps]


def dealt(pipeline: mm.Pipeline, num_ranks: int) -> mm.Pipeline:
    """The pipeline with its rows dealt to ranks."""
    order = pipeline.order
    cost = mm.Cost(tokens=1, squared_tokens=1)
    return pipeline.with_order(order.with_ranks(num_ranks, deal, cost.modelled))


@pytest.fixture(scope="module")
def bad_texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_texts(tmp_path_factory.mktemp("bad"), COUNTS, fields_of=damaged)


@pytest.mark.parametrize("action", ["substitute", "mask"])
def test_every_topology_has_the_same_rows_and_substitutes(bad_texts: str, action: Any) -> None:
    pipeline = pack_pipeline(bad_texts, bad_samples=lenient(action=action), drop_last=False)
    expected = global_steps(pipeline)
    assert global_steps(pipeline, 2, 3) == expected
    assert global_steps(pipeline, 3) == expected
    assert global_steps(dealt(pipeline, 2), 2, 2) == expected
    rows = [row for step in expected for row in step.values()]
    planned = Counter(ref for row in rows for ref in row[2])
    assert len(planned) == 65
    assert set(planned.values()) == {1}
    is_replaced = [
        bool(refs and row[0] and not set(row[1]) & set(refs)) for row in rows for refs in [row[2]]
    ]
    assert any(is_replaced) == (action == "substitute")
    for (keys, shown, refs, bad, valid), replaced in zip(rows, is_replaced, strict=True):
        assert valid == bool(keys)
        assert {(int(r.shard[6:12]), r.index) for r in bad} == set(refs) - set(
            () if replaced else shown
        )
        assert [refs[record.document] for record in bad] == [
            (int(record.shard[6:12]), record.index) for record in bad
        ]
        assert {record.substitute is not None for record in bad} <= {replaced}
        if action == "mask" and refs:
            assert valid == (len(bad) < len(refs))


def leave_most_out(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["__key__"]) % 9:
        raise mm.SkipSample("one of nine stays")
    return sample


def leave_all_out(sample: dict[str, Any]) -> dict[str, Any]:
    raise mm.SkipSample("none stays")


def test_a_rank_without_a_good_sample_goes_on_where_one_rank_does(bad_texts: str) -> None:
    settings = {"bad_samples": lenient(), "rows": 4}
    pipeline = pack_pipeline(bad_texts, before=(leave_most_out,), **settings)
    expected = global_steps(pipeline)
    assert not all(row[-1] for step in expected for row in step.values())
    assert global_steps(pipeline, 4) == expected
    assert global_steps(dealt(pipeline, 4), 4) == expected
    pipeline = pack_pipeline(bad_texts, before=(leave_all_out,), **settings)
    for rank in range(4):
        with pytest.raises(
            mm.errors.BadSampleLimitError, match=r"no row has a good sample.*none stays"
        ):
            next(iter(mm.Loader(pipeline, world=mm.World(rank, 4))))


def test_bad_samples_of_packs_are_counted_and_written_down(bad_texts: str, tmp_path: Path) -> None:
    policy = lenient(quarantine=str(tmp_path))
    with closing(mm.Loader(pack_pipeline(bad_texts, rows=2, bad_samples=policy))) as loader:
        lineages = [batch["__lineage__"] for batch in loader]
        stats = loader.stats
    num_bad = sum(len(lineage.bad) for lineage in lineages)
    assert stats.num_samples == sum(len(lineage.planned) for lineage in lineages)
    assert stats.num_bad == stats.bad["DecodeError"] == num_bad > 10
    lines = (tmp_path / "quarantine-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["document"] for line in lines] == [
        record.document for lineage in lineages for record in lineage.bad
    ]


def test_a_run_that_bears_no_bad_sample_stops(bad_texts: str) -> None:
    pipeline = pack_pipeline(bad_texts, bad_samples=mm.BadSamplePolicy(action="raise"))
    with closing(mm.Loader(pipeline)) as loader, pytest.raises(mm.errors.DecodeError, match="txt"):
        list(loader)


def test_a_reader_process_gives_the_same_batches(bad_texts: str) -> None:
    policy = lenient(action="mask")
    pipeline = pack_pipeline(bad_texts, rows=6, bad_samples=policy, drop_last=False, window=5)
    for source in (pipeline, dealt(pipeline, 2)):
        rows = (3, 6)
        with reader_thread(source, 2) as reader:
            runners = [PipelineRunner(source, connection=end) for end in reader.connections]
            for first in (0, 2):
                iteration = reader.begin(1, first, rows)
                for step in range(first, source.order.steps_per_epoch):
                    job = Job(1, step, *rows, 2, iteration)
                    with closing(PipelineRunner(source)) as own:
                        expected = rows_of(own.batch(job))
                    assert rows_of(runners[step % 2].batch(job)) == expected
            for runner in runners:
                runner.close()


def test_windows_of_a_store_are_read_as_files_are(bad_texts: str) -> None:
    options = {"rows": 6, "bad_samples": lenient(), "drop_last": False, "window": 5}
    local = pack_pipeline(bad_texts, **options)
    store = watched(mm.open_dataset(bad_texts), concurrent=True, maps_files=False)
    assert global_steps(replace(local, dataset=store), 2, 2) == global_steps(local)


# -- samples unlike measured ------------------------------------------------------------------


def grown(number: int) -> dict[str, bytes]:
    """Every fifth text is 6 letters longer than measured, and every seventh 2 shorter."""
    text = text_of(number) + "y" * (6 * (number % 5 == 0))
    return {"txt": text[: -2 if number % 7 == 1 else None].encode()}


def test_samples_that_are_longer_than_measured_stay_where_there_is_room(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, COUNTS, fields_of=grown)
    pipeline = pack_pipeline(folder, rows=1, bad_samples=lenient(max_length_error_fraction=1))
    num_grown = num_left_out = 0
    with closing(mm.Loader(pipeline)) as loader:
        for batch in loader:
            lineage = batch["__lineage__"]
            assert batch["num_tokens"] <= 64
            numbers = [index + (40 if shard else 0) for shard, index in lineage.planned]
            lengths = [len(grown(number)["txt"]) + 2 for number in numbers]
            records = {record.document: record for record in lineage.bad}
            assert {record.kind for record in lineage.bad} <= {"LengthError"}
            if lineage.shown and set(lineage.shown) <= set(lineage.planned):
                assert bool(records) == (sum(lengths) > 64)
            for document, number in enumerate(numbers):
                num_grown += number % 5 == 0
                if document in records:
                    num_left_out += 1
                    assert number % 5 == 0
                    measured = length_of(number) + 2
                    assert f"{measured} were measured" in records[document].reason
    assert 0 < num_left_out < num_grown
    assert loader.stats.bad["LengthError"] == num_left_out
    assert loader.stats.num_longer >= num_grown
    assert loader.stats.num_shorter > 0


def test_the_first_sample_unlike_measured_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_texts(tmp_path, COUNTS, fields_of=grown)
    with closing(mm.Loader(pack_pipeline(folder, bad_samples=lenient()))) as loader:
        batch = next(iter(loader))
    assert batch["__lineage__"].num_longer
    (warning,) = [record for record in caplog.records if "measured:" in record.getMessage()]
    assert "measure and plan again" in warning.getMessage()


def test_too_many_samples_that_are_too_long_stop_a_run(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, COUNTS, fields_of=grown)
    policy = lenient(min_samples=10, max_length_error_fraction=0.01)
    with (
        closing(mm.Loader(pack_pipeline(folder, bad_samples=policy))) as loader,
        pytest.raises(mm.errors.BadSampleLimitError, match="max_length_error_fraction"),
    ):
        list(loader)


# -- states -----------------------------------------------------------------------------------


def loaded(pipeline: mm.Pipeline, state: dict[str, Any] | None = None, **options: Any) -> mm.Loader:
    loader = mm.Loader(pipeline, **options)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def test_an_epoch_is_finished_as_planned_after_shards_were_appended(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus", [120, 80])
    pipeline = pack_pipeline(folder, rows=8)
    with closing(mm.Loader(pipeline)) as loader:
        batches = iter(loader)
        first = [next(batches)["__key__"] for _ in range(3)]
        state = loader.state_dict()
        rest = [batch["__key__"] for batch in batches]
        assert len(first + rest) == len(loader)
    write_texts(folder, [120, 80, 80])
    plan = plan_texts(mm.open_dataset(folder), previous=pipeline.order.plan)
    grown_pipeline = pack_pipeline(folder, rows=8, plan=plan)
    with pytest.raises(mm.StateError, match="Shards were added"):
        loaded(grown_pipeline, state)
    with closing(loaded(grown_pipeline, state, on_change="finish_epoch")) as loader:
        assert [batch["__key__"] for batch in loader] == rest
        assert loader.state_dict()["epoch"] == 1
        keys = Counter(key for batch in loader for key in batch["__key__"])
    assert max(keys.values()) == 1
    assert len(keys) > 250


def test_an_epoch_begins_with_other_settings_after_a_pack_was_taken_down(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus", [120, 80])
    plan = plan_texts(mm.open_dataset(folder))
    shards, indexes = (column.tolist() for column in plan.units(np.array([1]))[1:3])
    pack = list(zip(shards, indexes, strict=True))
    take_down(mm.open_dataset(folder), pack, "request")
    with closing(mm.Loader(pack_pipeline(folder, rows=8, plan=plan))) as loader:
        assert len(list(loader)) == len(loader)
        state = loader.state_dict()
    changed = pack_pipeline(folder, rows=4, plan=plan, seed=9)
    with closing(loaded(changed, state, on_change="finish_epoch")) as loader:
        refs = {ref for batch in loader for ref in batch["__lineage__"].shown}
    assert refs.isdisjoint(pack)
    assert len(refs) > 150


@pytest.mark.slow
@given(st.data())
@settings(max_examples=3, deadline=None)
def test_any_chain_of_resumes_gives_the_same_rows(data: st.DataObject) -> None:
    counts = data.draw(
        st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda c: sum(c) > 20)
    )
    with tempfile.TemporaryDirectory() as folder:
        write_texts(folder, counts, fields_of=damaged)
        options = {"rows": 6, "bad_samples": lenient(), "drop_last": False}
        pipeline = pack_pipeline(folder, **options)
        expected = [step for epoch in range(2) for step in global_steps(pipeline, epoch=epoch)]
        state = None
        position = 0
        while position < len(expected):
            num_ranks = data.draw(st.sampled_from([1, 2, 3]))
            num_steps = data.draw(st.integers(1, 4))
            again = pack_pipeline(folder, **options)
            if data.draw(st.booleans()):
                again = dealt(again, num_ranks)
            loaders = [
                loaded(again, state, world=mm.World(rank, num_ranks)) for rank in range(num_ranks)
            ]
            iterators = [iter(loader) for loader in loaders]
            for _ in range(num_steps):
                parts = [next(iterator, None) for iterator in iterators]
                if parts[0] is None:
                    break
                rows = {}
                for part in parts:
                    rows |= rows_of(part)
                assert dict(sorted(rows.items())) == expected[position]
                position += 1
            states = [loader.state_dict() for loader in loaders]
            assert all(other == states[0] for other in states)
            state = states[0]
            for loader in loaders:
                loader.close()


def test_single_samples_of_packs_and_what_refuses_them(bad_texts: str) -> None:
    pipeline = pack_pipeline(bad_texts, bad_samples=lenient())
    taken = pipeline.take(7)
    assert [len(sample["input_ids"]) > 2 for sample in taken] == [True] * 7
    with pytest.raises(mm.ConfigError, match="as_webdataset"):
        pipeline.as_webdataset()
    with pytest.raises(mm.ConfigError, match="64"):
        mm.Loader(
            mm.Pipeline(
                pipeline.dataset,
                global_batch_size=2,
                decode=pipeline.decode,
                batching=mm.Pack(128, plan=plan_texts(mm.open_dataset(bad_texts))),
            )
        )
