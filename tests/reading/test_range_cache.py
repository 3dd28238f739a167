"""A rank reader with a node cache: the same samples, and storage is asked once."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.errors import ConfigError, StorageError
from mmstream.reading import range_cache
from mmstream.reading.process import node_cache_settings
from mmstream.reading.range_cache import RangeCache, needs_of
from mmstream.reading.rank_reader import RankReader
from mmstream.storage import node_cache
from mmstream.storage.node_cache import NodeCache, open_cache_dir
from mmstream.storage.transfers import RangeRequest, own_memory
from tests.helpers.corpora import write_corpus
from tests.reading.test_rank_reader import FakeTransfers, plain, sample, until

COUNTS = [40, 40, 40]
CORPUS_BYTES = 120 * 10_752
STEPS = 15


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("corpus")
    return mm.open_dataset(write_corpus(folder, COUNTS, sample, checksums=True))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(range_cache, "FILE_BYTES", 100_000)  # 8 samples a file
    monkeypatch.setattr(range_cache, "is_behind_network", lambda dataset: True)
    return open_cache_dir(str(tmp_path / "cache"), None)


class Run:
    """What a run of a rank has read."""

    def __init__(self) -> None:
        self.samples: list[bytes] = []
        self.requests: list[RangeRequest] = []
        self.counts: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(request.stop - request.start for request in self.requests)


def run(
    dataset: mm.Dataset,
    root: str | None,
    *epochs: int,
    rows: tuple[int, int] = (0, 8),
    max_bytes: int = 1 << 30,
    least_large_bytes: int | None = None,
    answer: Callable[[RangeRequest], bytes] | None = None,
    when_taken: Callable[[], None] = lambda: None,
    when_read: Callable[[], None] = lambda: None,
    new_memory: Callable[[int], memoryview] = own_memory,
    allows_errors: bool = False,
    **settings: Any,
) -> Run:
    """Read whole epochs.

    `when_taken` is called before the cached samples of each step are read, and `when_read` at the
    end of each epoch, before writes are waited for. `answer` is what comes for a request.
    """
    settings = {"global_batch_size": 8, "window": 12, "grid": (1, 2), **settings}
    order = dataset.plan_order(**settings)
    result = Run()

    async def main() -> None:
        transfers = FakeTransfers(dataset)
        transfers.answer = answer or transfers.read
        cache = None
        if root is not None:
            node_cache = NodeCache(root, needs_of(dataset, order, 1.0), max_bytes)
            cache = RangeCache(dataset, node_cache)
            read_samples = cache.read_samples

            async def read_later(places: Any) -> list[bool]:
                when_taken()
                return await read_samples(places)

            cache.read_samples = read_later
        reader = RankReader(
            dataset,
            order,
            transfers,
            [dataset],
            horizon_bytes=1,
            least_large_bytes=least_large_bytes,
            cache=cache,
            new_memory=new_memory,
        )
        try:
            for epoch in epochs:
                reader.begin(epoch, 0, rows)
                for step in range(STEPS):
                    taken = await reader.step(epoch, step)
                    assert allows_errors or not taken.errors
                    result.samples += map(bytes, taken.data)
                when_read()
                if cache is not None:
                    await until(lambda: not node_cache._queue)
        finally:  # else its thread waits for writes for ever
            await reader.close()
        if cache is not None:
            await until(lambda: not node_cache._thread.is_alive())
            counts, _ = reader.pop_counts()
            result.counts = {name: getattr(counts, name) for name in counts.__slots__}
        end = (epochs[-1] + 1) * STEPS  # the step after it is read ahead
        result.requests = [one for one in transfers.requests if one.deadline < end]

    asyncio.run(asyncio.wait_for(main(), 500))
    return result


def test_the_second_epoch_asks_storage_for_nothing(dataset, root):
    first = run(dataset, root, 0)
    assert first.num_bytes == CORPUS_BYTES
    assert first.counts["num_cached_bytes"] == CORPUS_BYTES
    second = run(dataset, root, 1)
    assert not second.requests
    assert second.samples == run(dataset, None, 1).samples
    assert second.counts["num_cache_hit_bytes"] >= CORPUS_BYTES  # the next epoch begins
    other = {"seed": 5, "global_batch_size": 4, "window": 6, "grid": (1, 1)}
    assert not run(dataset, root, 0, rows=(0, 4), **other).requests  # of another run


def test_one_process_reads_two_epochs_fetches_each_byte_once_and_again_what_is_lost(dataset, root):
    both = run(dataset, root, 0, 1)
    assert both.samples == run(dataset, None, 0, 1).samples
    assert both.num_bytes == CORPUS_BYTES

    def answer(request: RangeRequest) -> bytes:
        raise StorageError("the server is away")

    def when_taken() -> None:
        for path in cached_files(root):
            path.unlink()

    with pytest.raises(StorageError, match="is away"):
        run(dataset, root, 1, answer=answer, when_taken=when_taken)


@pytest.mark.parametrize("kind", ["without checksums", "large", "of this machine"])
def test_some_samples_are_not_kept(dataset, root, monkeypatch, caplog, kind):
    least_large_bytes = 10_000 if kind == "large" else None
    if kind == "without checksums":
        dataset = plain(dataset)
    elif kind == "of this machine":
        monkeypatch.setattr(range_cache, "is_behind_network", lambda dataset: False)
    first, second = (
        run(dataset, root, epoch, least_large_bytes=least_large_bytes) for epoch in (0, 1)
    )
    assert not cached_files(root)
    assert min(first.num_bytes, second.num_bytes) > 0.8 * CORPUS_BYTES
    assert ("the node cache does not keep" in caplog.text) == (kind == "large")


def test_a_cache_of_half_the_corpus_gives_half_of_it_in_every_epoch(dataset, root):
    run(dataset, root, 0, max_bytes=CORPUS_BYTES // 2)
    for epoch in (1, 2):
        later = run(dataset, root, epoch, max_bytes=CORPUS_BYTES // 2)
        assert later.samples == run(dataset, None, epoch).samples
        hits = later.counts["num_cache_hit_bytes"]
        # Small files: heads and the rest of pages take a good part.
        assert 0.3 * CORPUS_BYTES < hits <= 0.55 * CORPUS_BYTES
        assert hits + later.num_bytes >= CORPUS_BYTES
        assert later.num_bytes < 0.75 * CORPUS_BYTES


@pytest.mark.parametrize("num_refused", [2, 100])
def test_memory_for_samples_that_were_cached_is_waited_for(dataset, root, num_refused):
    run(dataset, root, 0)
    refused = iter(range(num_refused))

    def new_memory(num_bytes: int) -> memoryview:
        if next(refused, None) is not None:
            raise MemoryError("no room")
        return own_memory(num_bytes)

    if num_refused == 2:
        assert not run(dataset, root, 1, new_memory=new_memory).requests
    else:
        with pytest.raises(MemoryError, match="no room"):
            run(dataset, root, 1, new_memory=new_memory)


def cached_files(root: str) -> list[Path]:
    return sorted(path for path in Path(root).rglob("*") if len(path.name) == 40)


@pytest.mark.parametrize("step", [0, STEPS])
def test_files_that_go_between_word_and_read_change_no_sample(dataset, root, step):
    run(dataset, root, 0)
    steps = iter(range(2 * STEPS))

    def when_taken() -> None:
        if next(steps) == step:
            for path in cached_files(root):
                path.unlink()

    ranges_of_many: dict[str, Any] = {"grid": (1, 1), "window": 60, "interleave": 1, "chunk": 20}
    later = run(dataset, root, 1, 2, when_taken=when_taken, **ranges_of_many)
    assert later.samples == run(dataset, None, 1, 2, **ranges_of_many).samples
    assert not later.counts["num_cache_damaged"]
    assert later.counts["num_cache_hit_bytes"] + later.num_bytes >= 2 * CORPUS_BYTES
    assert len(later.requests) < 40  # what lies beside a sample comes with it


def test_a_file_that_is_written_anew_between_word_and_read_is_no_other_shard(dataset, root):
    run(dataset, root, 0)
    files = cached_files(root)
    contents = [path.read_bytes() for path in files]
    random.Random(0).shuffle(contents)

    def when_taken() -> None:
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content)

    later = run(dataset, root, 1, when_taken=when_taken)
    assert later.samples == run(dataset, None, 1).samples
    assert later.counts["num_cache_damaged"] >= 1


def test_bytes_that_come_along_between_samples_are_not_used(dataset, root, monkeypatch):
    """They were compared with no checksum: storage may send anything there."""
    access = replace(dataset.store.access, max_gap_bytes=20_000)
    monkeypatch.setattr(RankReader, "_access", lambda self, shard: access)
    run(dataset, root, 0)
    for path in cached_files(root):
        with path.open("r+b") as file:
            for number in range(1, 8, 2):  # every other sample is there no more
                file.seek(40 + 8 * number)
                file.write(bytes(8))

    def answer(request: RangeRequest) -> bytes:
        data = bytearray(dataset.store.read_range(*request[1:4]))
        for start in range(10_752, len(data), 2 * 10_752):  # the first sample is wanted
            data[start : start + 10_752] = bytes(10_752)
        return bytes(data)

    later = run(dataset, root, 1, answer=answer)
    assert later.samples == run(dataset, None, 1).samples
    assert later.num_bytes > 0.55 * CORPUS_BYTES  # half of it, and bytes between samples


def test_wrong_bytes_of_storage_are_not_kept(dataset, root):
    def answer(request: RangeRequest) -> bytes:
        return bytes(request.stop - request.start)

    assert not run(dataset, root, 0, answer=answer, allows_errors=True).counts["num_cached_bytes"]
    assert run(dataset, root, 0).num_bytes == CORPUS_BYTES


def test_a_node_keeps_what_it_has_when_its_ranks_change(dataset, root):
    def read(epoch: int, *bounds: int) -> tuple[int, int]:
        """Let the ranks of a node read the rows between bounds; return bytes kept, and requests."""
        settings: dict[str, Any] = {"grid": (1, 4), "window": 6, "reshuffle": "lanes"}
        ranks = []
        for rows in pairwise(bounds):
            ranks.append(run(dataset, root, epoch, rows=rows, **settings))
            assert ranks[-1].samples == run(dataset, None, epoch, rows=rows, **settings).samples
        kept = sum(rank.counts["num_cached_bytes"] for rank in ranks)
        return kept, sum(len(rank.requests) for rank in ranks)

    half = CORPUS_BYTES // 2
    assert read(0, 0, 2, 4)[0] == half  # 2 of 4 ranks are on this node
    assert read(1, 0, 1, 2, 3, 4) == (0, 0)  # 4 of 8 ranks, with the same rows
    assert read(2, 2, 3, 4, 5, 6)[0] == half // 2  # other rows: two lanes of four are new
    assert read(3, 0, 2, 4) == (0, 0)


def test_a_disk_that_takes_nothing_makes_no_step_wait(dataset, root, monkeypatch):
    is_disk_free, write_all = threading.Event(), node_cache._write_all

    def slow_write_all(*arguments: Any) -> None:
        is_disk_free.wait()
        write_all(*arguments)

    monkeypatch.setattr(node_cache, "_write_all", slow_write_all)
    limit = "mmstream.storage.node_cache.MAX_QUEUED_BYTES"
    monkeypatch.setattr(limit, 300_000)
    first = run(dataset, root, 0, when_read=is_disk_free.set)
    assert first.samples == run(dataset, None, 0).samples
    assert (
        first.counts["num_cached_bytes"] + first.counts["num_cache_dropped_bytes"] >= CORPUS_BYTES
    )
    assert 0 < first.counts["num_cached_bytes"] < 0.5 * CORPUS_BYTES
    monkeypatch.setattr(limit, CORPUS_BYTES)
    assert run(dataset, root, 1).counts["num_cached_bytes"] == (
        CORPUS_BYTES - first.counts["num_cached_bytes"]
    )
    assert not run(dataset, root, 2).requests


def test_a_cache_that_is_removed_under_a_run_changes_no_batch(dataset, root, caplog):
    def remove() -> None:
        while Path(root).exists():  # it is written to meanwhile
            shutil.rmtree(root, ignore_errors=True)

    assert run(dataset, root, 0, 1, when_read=remove).samples == run(dataset, None, 0, 1).samples
    assert caplog.text.count("takes nothing more: No such file or directory") == 1
    assert run(dataset, open_cache_dir(str(Path(root).parent), None), 1).num_bytes == CORPUS_BYTES
    assert not run(dataset, root, 2).requests


def test_a_shard_that_was_replaced_is_fetched_anew(tmp_path, root):
    def other(number: int) -> dict[str, bytes]:
        return {"bin": bytes([(number + 1) % 256]) * 10_000}

    url = write_corpus(tmp_path / "corpus", COUNTS, sample, checksums=True)
    run(mm.open_dataset(url), root, 0)
    write_corpus(tmp_path / "corpus", COUNTS, other, checksums=True)
    dataset = mm.open_dataset(url)
    later = run(dataset, root, 0)
    assert later.num_bytes == CORPUS_BYTES
    assert later.samples == run(dataset, None, 0).samples
    assert not run(dataset, root, 1).requests


def test_a_reader_process_is_told_of_the_cache(dataset, root, tmp_path):
    settings = node_cache_settings(dataset, str(tmp_path), 1000, 4)
    assert settings is not None
    assert settings.max_bytes == 1000
    assert Path(settings.root).parent == tmp_path
    assert node_cache_settings(plain(dataset), str(tmp_path), None, 1) is None
    assert node_cache_settings(dataset, None, None, 1) is None
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="give another folder"):
        node_cache_settings(dataset, str(tmp_path / "file"), None, 1)


@pytest.mark.usefixtures("root")
def test_the_source_that_comes_again_soonest_needs_its_room_first(tmp_path):
    rare = mm.open_dataset(write_corpus(tmp_path / "rare", [40], sample, checksums=True))
    often = mm.open_dataset(write_corpus(tmp_path / "often", [40], sample, checksums=True))
    mixture = mm.Mixture({"rare": (rare, 1), "often": (often, 3)}, epoch_steps=5)
    order = mixture.plan_order(global_batch_size=8)
    needs = needs_of(mixture, order, 1.0)
    assert list(needs) == [range_cache._folder_of(often), range_cache._folder_of(rare)]
    assert set(needs.values()) == {often.manifest.num_bytes}
