"""The last shards of a conversion get the CPUs of the workers that have no shard any more.

They check media for a shard: the same rows in the same order, and bounded memory.
"""

from __future__ import annotations

import io
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from mmstream.converting import shard
from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.media import load as load_module
from mmstream.converting.media.images import unwarned
from mmstream.converting.media.load import load_rows
from mmstream.converting.media.references import MediaAccess
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows.records import Row
from mmstream.converting.shard import HashedFile
from tests.helpers.convert_corpus import run, tree
from tests.helpers.corpora import jpeg

SMALL = MediaOptions(max_image_side=20)


@pytest.mark.slow
def test_a_shard_that_two_cpus_check_has_the_same_bytes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "num_cores", lambda: 2)  # also where there is one
    run(corpus, tmp_path / "two", samples_per_shard=30, media=SMALL, num_workers=2)
    run(corpus, tmp_path / "one", samples_per_shard=30, media=SMALL)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_idle_workers_are_shared_out_when_no_shard_is_left_to_begin(corpus, tmp_path, monkeypatch):
    run(corpus, tmp_path / "one", media=SMALL)
    checked, names, shares = load_module.checked, set(), []

    def noted(*args):
        names.add(threading.current_thread().name)
        return checked(*args)

    def in_turns(function, jobs, num_workers, *, command, prepare, prepare_args):
        """Like two workers that end their shards in turns; in this process."""
        prepare(*prepare_args)
        running = [next(jobs), next(jobs)]
        while running:
            shares.append(prepare_args[0].value)
            if (job := next(jobs, None)) is not None:
                running.append(job)
            yield running[0], function(running.pop(0))

    monkeypatch.setattr(load_module, "checked", noted)
    monkeypatch.setattr(shard, "run_in_processes", in_turns)
    monkeypatch.setattr(shard, "num_cores", lambda: 2)
    run(corpus, tmp_path / "two", media=SMALL, num_workers=2)
    assert shares == [1, 1, 1, 1, 2]
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert any(name.startswith("mmstream-check") for name in names)
    assert threading.current_thread().name in names


# -- rows whose media are checked elsewhere: the same ones in their order, in bounded memory


class IdleCpus:
    """Checks a batch when its rows are asked for."""

    def __init__(self, count):
        self.counts = count if isinstance(count, list) else [count]
        self.num_batches = self.under_way = self.most_under_way = 0

    def count(self):
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def submit(self, check):
        self.num_batches += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)

        def result():
            self.under_way -= 1
            return check()

        return SimpleNamespace(result=result)


def drafts():
    """Rows of every kind: several images, texts, errors, and two faults in one row."""
    good, small, bad = jpeg(0), jpeg(1, (16, 12)), b"<html>"
    for i in range(12):
        row = Row(i, "rows.jsonl", i + 1, {})
        if i == 2:
            yield row, RowError("no such format")
        elif i == 5:
            yield row, Draft({"text": "no media"}, texts=("no media",))
        else:
            names = [f"{i}.jpg", "small.jpg", "bad.html" if i % 4 == 3 else f"again-{i}.jpg"]
            data = [good, small, bad if i % 4 == 3 else jpeg(i)]
            media = [MediaRef("image", *pair) for pair in zip(names, data, strict=True)]
            if i in (4, 7):  # in row 7 the first fault counts, as for one CPU
                media.append(MediaRef("image", "absent.jpg"))
            yield row, Draft({"id": i}, tuple(media))


def load(idle_cpus=None, options=SMALL, rows=None):
    loaded = load_rows(rows or drafts(), MediaAccess(None), options, idle_cpus)
    return [
        (row, str(draft) if isinstance(draft, RowError) else draft, media)
        for row, draft, media in loaded
    ]


@pytest.mark.parametrize("rows_per_batch", [1, 3, 64])
def test_rows_are_those_of_one_cpu(monkeypatch, rows_per_batch):
    alone = load()
    assert sum(isinstance(draft, str) for _, draft, _ in alone) == 5
    monkeypatch.setattr(load_module, "BATCH_ROWS", rows_per_batch)
    idle_cpus = IdleCpus(2)
    assert load(idle_cpus) == alone
    assert idle_cpus.num_batches >= 12 // rows_per_batch
    assert load(IdleCpus([0, 0, 1, 0, 3, 0, 0])) == alone  # they come and go


def test_each_cpu_has_one_batch_and_together_they_have_few_bytes(monkeypatch):
    monkeypatch.setattr(load_module, "BATCH_ROWS", 1)
    idle_cpus = IdleCpus(2)
    load(idle_cpus)
    assert idle_cpus.most_under_way == 3
    monkeypatch.setattr(load_module, "MAX_BYTES_AT_ONCE", 1)
    idle_cpus = IdleCpus(2)
    load(idle_cpus)
    assert idle_cpus.most_under_way == 1


def test_what_is_no_fault_of_a_row_ends_the_conversion():
    class Broken(IdleCpus):
        def submit(self, batch):
            answer = Future()
            answer.set_exception(MemoryError("no memory"))
            return answer

    with pytest.raises(MemoryError, match="no memory"):
        load(Broken(1))


# -- threads of a conversion: one writes the bytes of a tar, several use Pillow


def test_a_slow_file_bounds_what_is_in_memory(monkeypatch):
    monkeypatch.setattr(shard, "BLOCK_BYTES", 10)
    may_write, written = threading.Event(), []

    class SlowFile(io.RawIOBase):
        def write(self, data):
            assert may_write.wait(timeout=500)
            return len(data)

    def produce():
        for block in range(100):
            hashed.write(bytes(20))
            written.append(block)

    with HashedFile(SlowFile()) as hashed, ThreadPoolExecutor() as pool:
        producer = pool.submit(produce)
        wait([producer], timeout=0.2)
        assert len(written) <= shard.MAX_WAITING
        may_write.set()
        producer.result(500)
        hashed.close()
    assert len(written) == 100


# -- Pillow's warnings are off while any thread works with a picture, and on again afterwards


def test_the_filters_are_back_when_the_last_of_several_threads_is_done():
    before = list(warnings.filters)
    with unwarned, ThreadPoolExecutor() as pool:
        pool.submit(unwarned.__enter__).result()
        pool.submit(unwarned.__exit__, None, None, None).result()
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("odd metadata", stacklevel=1)
    assert seen == []
    assert list(warnings.filters) == before
