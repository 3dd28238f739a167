"""The steps of a rank from transfers that a test controls: memory, errors, jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.errors import ChecksumError, ConfigError, ShardError, StorageError
from mmstream.reading.plan import needs_single_samples, window_bytes
from mmstream.reading.rank_reader import RankReader
from mmstream.storage.store import ObjectStat, ReplacedError
from mmstream.storage.transfers import RangeRequest, TransferCounts
from tests.helpers.corpora import write_corpus
from tests.helpers.virtual_time import in_virtual_time

COUNTS = [40, 40, 40]


class FakeTransfers:
    """Reads ranges of local shards at once, or as `answer` says."""

    def __init__(self, dataset: mm.Dataset) -> None:
        self.dataset = dataset
        self.requests: list[RangeRequest] = []
        self.answer: Callable[[RangeRequest], bytes | Exception] = self.read
        self.is_held = False
        self.futures: list[asyncio.Future[memoryview]] = []
        self.needed_clock = -1

    def read(self, request: RangeRequest) -> bytes:
        return self.dataset.store.read_range(*request[1:4])

    def submit(self, request: RangeRequest) -> asyncio.Future[memoryview]:
        self.requests.append(request)
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if not self.is_held:
            answer = self.answer(request)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(memoryview(answer))
        return future

    def needed(self, clock: int) -> AbstractContextManager[None]:
        self.needed_clock = clock
        return nullcontext()

    def lacks_since(self, deadline: int, since: float | None) -> float:
        return 0.0 if since is None else since + 1

    def lacks_memory(self, deadline: int, lacks_since: float) -> bool:
        return deadline <= self.needed_clock and lacks_since == 3

    def cancel(self, futures: Any) -> None:
        for future in futures:
            future.cancel()

    def pop_counts(self) -> TransferCounts:
        return TransferCounts(num_requests=len(self.requests))

    @property
    def num_bytes(self) -> int:
        return sum(request.stop - request.start for request in self.requests)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until something holds."""
    while not condition():
        await asyncio.sleep(0.01)


def sample(number: int) -> dict[str, bytes]:
    return {"bin": bytes([number % 256]) * 10_000}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("corpus")
    return mm.open_dataset(write_corpus(folder, COUNTS, sample, checksums=True))


def plain(dataset: mm.Dataset) -> mm.Dataset:
    """The dataset without its checksums."""
    return mm.Dataset(dataset.manifest, dataset.store, checksums=False)


@asynccontextmanager
async def reading(
    dataset: mm.Dataset,
    horizon_bytes: int = 1 << 30,
    begins: bool = True,
    **settings: Any,
) -> AsyncIterator[tuple[RankReader, FakeTransfers]]:
    """A reader that begins with the first epoch, and its transfers."""
    settings = {"global_batch_size": 8, "window": 12, "grid": (1, 2), **settings}
    order = dataset.plan_order(**settings)
    transfers = FakeTransfers(dataset)
    reader = RankReader(dataset, order, transfers, [dataset], horizon_bytes=horizon_bytes)
    if begins:
        reader.begin(0, 0, (0, 8))
    try:
        yield reader, transfers
    finally:
        await reader.close()


@in_virtual_time
async def test_the_next_epoch_is_read_ahead_and_kept(dataset: mm.Dataset) -> None:
    async with reading(dataset) as (reader, transfers):
        for step in range(15):
            await reader.step(0, step)
        await until(lambda: reader._plan is not None and reader._plan.next_clock == 45)
        await asyncio.sleep(0.05)
        num_requests = len(transfers.requests)
        reader.begin(1, 0, (0, 8))
        await reader.step(1, 0)
        assert num_requests == len(transfers.requests)
        reader.begin(1, 0, (0, 8))  # a jump back
        await reader.step(1, 0)
        assert num_requests < len(transfers.requests)


@in_virtual_time
async def test_a_jump_gives_up_what_is_under_way(dataset: mm.Dataset) -> None:
    async with reading(dataset) as (reader, transfers):
        transfers.is_held = True
        waiting = asyncio.create_task(reader.step(0, 0))
        await asyncio.sleep(0.1)
        assert "ranges, such as shard-" in reader.describe()
        waiting.cancel()
        transfers.is_held = False
        reader.begin(0, 5, (0, 8))
        assert all(future.cancelled() for future in transfers.futures)
        await reader.step(0, 5)
        await asyncio.sleep(0.1)
        assert "its next step is there" in reader.describe()


@pytest.mark.parametrize("is_later_step_taken", [False, True])
@in_virtual_time
async def test_a_step_that_was_given_up_while_it_waited_can_be_asked_for_again(
    dataset: mm.Dataset, is_later_step_taken: bool
) -> None:
    async with reading(dataset) as (reader, transfers):

        def answer(is_wanted: Callable[[RangeRequest], bool]) -> None:
            for request, future in zip(transfers.requests, transfers.futures, strict=True):
                if is_wanted(request) and not future.done():
                    future.set_result(memoryview(transfers.read(request)))

        expected = [(await reader.step(0, step)).data for step in range(4)]
        transfers.is_held = True
        reader.begin(0, 1, (0, 8))
        given_up = asyncio.create_task(reader.step(0, 1))
        await until(lambda: any(not future.done() for future in transfers.futures))
        if is_later_step_taken:
            later = asyncio.create_task(reader.step(0, 2))
            while not later.done():
                answer(lambda request: request.deadline > 1)
                await asyncio.sleep(0.01)
        given_up.cancel()
        transfers.is_held = False
        reader.begin(0, 1, (0, 8))
        answer(lambda _: True)
        assert [(await reader.step(0, step)).data for step in (1, 2, 3)] == expected[1:]


async def errors_of_epoch(
    dataset: mm.Dataset, answer: Any, **settings: Any
) -> tuple[list[Any], int]:
    """The errors of all rows of an epoch, and how many reads came wrong."""

    async with reading(dataset, **settings) as (reader, transfers):
        transfers.answer = lambda request: answer(transfers, request)
        errors = [
            error for step in range(15) for error in (await reader.step(0, step)).errors.values()
        ]
        return errors, reader.pop_counts()[1]


@in_virtual_time
async def test_wrong_bytes_are_read_again(dataset: mm.Dataset) -> None:
    seen = set[Any]()

    def flip_once(transfers: FakeTransfers, request: RangeRequest) -> bytes:
        data = bytearray(transfers.read(request))
        if request not in seen:
            seen.add(request)
            data[700] ^= 1
        return bytes(data)

    errors, num_wrong = await errors_of_epoch(dataset, flip_once)
    assert errors == []
    of_this_epoch = [request for request in seen if request.deadline < sum(COUNTS) // 8]
    assert num_wrong >= len(of_this_epoch) > 20


@in_virtual_time
async def test_bytes_that_stay_wrong_are_an_error_in_the_place_of_the_sample(
    dataset: mm.Dataset,
) -> None:
    def flip(transfers: FakeTransfers, request: RangeRequest) -> bytes:
        data = bytearray(transfers.read(request))
        if request.name == "shard-000001.tar" and request.start == 0:
            data[700] ^= 1
        return bytes(data)

    errors, num_wrong = await errors_of_epoch(dataset, flip)
    assert [type(error) for error in errors] == [ChecksumError]
    assert num_wrong >= 2


@in_virtual_time
async def test_a_storage_error_ends_the_step_that_needs_the_range(dataset: mm.Dataset) -> None:
    with pytest.raises(StorageError, match="away"):
        await errors_of_epoch(dataset, lambda *_: StorageError("away"), horizon_bytes=1)


@in_virtual_time
async def test_a_replaced_shard_is_an_error_unless_checksums_decide(dataset: mm.Dataset) -> None:
    replaced: list[str] = []

    def answer(transfers: FakeTransfers, request: RangeRequest) -> bytes | Exception:
        if request.name != "shard-000001.tar" or len(replaced) >= 3:
            return transfers.read(request)
        if transfers.dataset.has_checksums:
            replaced.append(request.name)
        stats = ObjectStat(1, "a"), ObjectStat(1, "b")
        return ReplacedError(request.name, *stats)

    assert (await errors_of_epoch(dataset, answer))[0] == []
    replaced.clear()
    errors, _ = await errors_of_epoch(plain(dataset), answer)
    assert len(errors) == COUNTS[1]
    assert all(isinstance(error, ShardError) for error in errors)


@in_virtual_time
async def test_samples_before_the_end_of_a_cut_shard_are_good(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, COUNTS, sample))
    path = tmp_path / "shard-000001.tar"
    cut = int(dataset.shards.offsets(1)[25])
    path.write_bytes(path.read_bytes()[:cut])
    dataset = mm.Dataset(dataset.manifest, dataset.store)

    def answer(transfers: FakeTransfers, request: RangeRequest) -> bytes | Exception:
        if request.name == path.name and request.stop > cut:
            return StorageError("it ends before")
        return transfers.read(request)

    errors, _ = await errors_of_epoch(dataset, answer)
    assert len(errors) == COUNTS[1] - 25
    assert all("truncated" in str(error) for error in errors)


@in_virtual_time
async def test_a_shard_without_an_index_is_an_error_in_its_rows(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, COUNTS, sample))
    (tmp_path / "shard-000001.tar.idx").write_bytes(b"")
    errors, num_wrong = await errors_of_epoch(dataset, FakeTransfers.read)
    assert len(errors) == COUNTS[1]
    assert num_wrong > 0


def test_windows_that_do_not_fit_are_single_samples_or_an_error(
    dataset: mm.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order = dataset.plan_order(global_batch_size=8, window=12, grid=(1, 2))
    wanted = window_bytes(dataset, order, 8)
    assert wanted == pytest.approx(2 * 12 * dataset.manifest.num_bytes / 120)
    assert window_bytes(dataset, order, 2) == pytest.approx(wanted / 4)
    assert not needs_single_samples(dataset, order, 8, int(4.1 * wanted))
    with pytest.raises(ConfigError, match=r"8 of 8 rows.*more ranks"):
        needs_single_samples(dataset, order, 8, int(3.9 * wanted))
    large = mm.open_dataset(write_corpus(tmp_path, [8], lambda _: {"bin": bytes(70_000)}))
    order = large.plan_order(global_batch_size=4)
    assert needs_single_samples(large, order, 4, 1)
    assert "read one by one" in caplog.text
