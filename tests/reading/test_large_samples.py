"""Large files whose decoders read by ranges: the same batches, from far fewer bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
import mmstream.pipeline as pipeline_module
from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.pipeline import PipelineRunner
from mmstream.reading.fetcher import FIRST_BYTES, Fetcher, LargeFiles
from mmstream.reading.plan import needs_single_samples, window_bytes
from mmstream.reading.step import Job
from mmstream.tar.lazy_bytes import MIN_FETCH_BYTES, LazyBytes
from tests.helpers.corpora import write_corpus
from tests.helpers.reader_thread import reader_thread
from tests.helpers.stores import watched_pipeline

COUNTS = [7, 0, 9]
MIN_LAZY_BYTES = 1 << 18
VIDEO_BYTES = 3 << 20
NUM_BATCH_ROWS = 4


class EightFrames:
    """Takes eight short pieces of a file, as a decoder of videos does."""

    reads_ranges = True

    def __init__(self, refused: frozenset[bytes] = frozenset()) -> None:
        self.refused = refused

    def __call__(self, data: bytes | LazyBytes) -> bytes:
        positions = np.linspace(0, len(data) - 100, 8).astype(int).tolist()
        frames = b"".join(data[position : position + 100] for position in positions)
        if frames[:4] in self.refused:
            raise ValueError("no such codec")
        return frames


def video(number: int) -> bytes:
    return np.random.default_rng(number).bytes(VIDEO_BYTES + 1000 * number)


def sample(number: int) -> dict[str, bytes]:
    """Large and small samples, whose files come in different orders."""
    row = {"json": json.dumps({"id": number}).encode()}
    if number % 5 == 4:
        return {"mp4": video(number)[:10_000], **row}
    if number % 5 == 3:
        return {"txt": b"text" * number, **row, "mp4": video(number)}
    if number % 5 == 2:  # a small file that does not fit into the first bytes, and a long name
        return {"wav": video(number)[:150_000], "mp4": video(number), "x" * 120: b"1", **row}
    return {"mp4": video(number), **row}


@pytest.fixture(scope="module", params=["with checksums", "without checksums"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("large")
    return write_corpus(path, COUNTS, sample, checksums=request.param == "with checksums")


@contextmanager
def served(pipeline: mm.Pipeline) -> Iterator[Callable[[], Any]]:
    """Yield what takes the first step from a reader process."""
    with reader_thread(pipeline) as reader, closing(reader.connections[0]) as connection:
        iteration = reader.begin(0, 0, (0, NUM_BATCH_ROWS))
        with closing(PipelineRunner(pipeline, connection=connection)) as runner:
            yield lambda: runner.batch(Job(0, 0, 0, NUM_BATCH_ROWS, iteration=iteration))


def pipeline_of(folder: str | mm.Dataset, decoder: Any = None, **settings: Any) -> mm.Pipeline:
    decode = mm.Decode(
        {"mp4": decoder or EightFrames()},
        min_lazy_bytes=settings.pop("min_lazy_bytes", MIN_LAZY_BYTES),
    )
    dataset = mm.open_dataset(folder) if isinstance(folder, str) else folder
    settings = {"global_batch_size": NUM_BATCH_ROWS, "seed": 1} | settings
    return mm.Pipeline(dataset, decode=decode, **settings)


def batches(pipeline: mm.Pipeline, connection: Any = None, iteration: int = 0) -> list[Any]:
    """What each step of an epoch delivers, comparable."""
    with closing(PipelineRunner(pipeline, connection=connection)) as runner:
        steps = range(pipeline.order.steps_per_epoch)
        rows = pipeline.global_batch_size
        jobs = [Job(0, step, 0, rows, iteration=iteration) for step in steps]
        return [
            {
                name: value.shown if name == "__lineage__" else value
                for name, value in runner.batch(job).items()
                if name not in ("__valid__", "__url__")
            }
            for job in jobs
        ]


def test_batches_are_those_of_samples_that_are_read_whole(folder: str) -> None:
    whole = batches(pipeline_of(folder, min_lazy_bytes=None))
    lazy = pipeline_of(folder)
    assert batches(lazy) == whole  # a block of local files
    remote, _ = watched_pipeline(lazy, concurrent=True, maps_files=False)
    assert batches(remote) == whole  # windows
    with reader_thread(lazy) as reader:
        iteration = reader.begin(0, 0, (0, NUM_BATCH_ROWS))
        assert batches(lazy, reader.connections[0], iteration) == whole


def test_little_more_is_read_than_is_needed(folder: str) -> None:
    pipeline, store = watched_pipeline(pipeline_of(folder), maps_files=False)
    with closing(PipelineRunner(pipeline)) as runner:
        lineage = runner.batch(Job(0, 0, 0, NUM_BATCH_ROWS))["__lineage__"]
    requests = [each for each in store.ranges if each[0].endswith(".tar")]
    num_bytes = sum(stop - start for _, start, stop in requests)
    assert num_bytes <= NUM_BATCH_ROWS * (FIRST_BYTES + 9 * MIN_FETCH_BYTES + 150_000)
    # All of it is counted with the step that needed it.
    assert (lineage.num_bytes, lineage.num_requests) == (num_bytes, len(requests))
    with served(pipeline_of(folder, shuffle=False)) as first_batch:
        counts = first_batch()["__lineage__"].transfers
    # It has read this step and some of what fits into the horizon, which may end in a later epoch.
    assert 0 < counts.num_bytes <= counts.num_requests * FIRST_BYTES


def test_windows_of_large_samples_need_little_memory(folder: str) -> None:
    pipeline = pipeline_of(folder)
    rows = NUM_BATCH_ROWS
    whole = window_bytes(pipeline.dataset, pipeline.order, rows)
    assert whole > 2 * MIN_LAZY_BYTES
    first = window_bytes(pipeline.dataset, pipeline.order, rows, least_large_bytes=MIN_LAZY_BYTES)
    assert first < whole / 5
    memory = int(4 * whole) - 4
    setup = pipeline.dataset, pipeline.order, rows, memory
    assert needs_single_samples(*setup)
    assert not needs_single_samples(*setup, least_large_bytes=MIN_LAZY_BYTES)


def test_take_and_random_access_give_the_same_files_and_what_nobody_takes_becomes_bytes(
    folder: str,
) -> None:
    def rename(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"original": raw["mp4"]}

    dataset = mm.open_dataset(folder)
    for taken in pipeline_of(folder, before=(rename,)).take(8):
        lineage = taken["__lineage__"]
        raw = dataset.read(lineage.shard, lineage.index)
        assert taken["mp4"] == EightFrames()(raw["mp4"])
        assert (taken["original"], taken["json"]) == (raw["mp4"], json.loads(raw["json"]))


def test_functions_before_decoding_see_what_the_decoder_takes(folder: str) -> None:
    kinds = set[tuple[type, type]]()

    def look(raw: dict[str, Any]) -> dict[str, Any]:
        kinds.add((type(raw["mp4"]), type(raw.get("wav", b""))))
        assert len(raw["mp4"]) == len(bytes(raw["mp4"]))
        return raw

    pipeline_of(folder, before=(look,)).take(12)
    assert kinds == {(LazyBytes, bytes), (bytes, bytes)}

    kinds.clear()
    pipeline_of(folder, lambda data: data[:10], before=(look,)).take(12)
    assert kinds == {(bytes, bytes)}


def test_a_sample_without_such_a_file_is_read_whole_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "HUGE_SAMPLE_BYTES", MIN_LAZY_BYTES)
    fields = {"npy": video(0), "json": b"1"}
    folder = write_corpus(tmp_path, [4], lambda _: fields, checksums=True)
    decode = mm.Decode({"json": ..., "mp4;npy": len}, min_lazy_bytes=MIN_LAZY_BYTES)
    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=4, decode=decode)
    with served(pipeline) as first_batch:
        batch = first_batch()
    assert batch["mp4"].tolist() == [len(fields["npy"])] * 4
    lineage = batch["__lineage__"]
    assert lineage.num_bytes > 4 * len(fields["npy"])
    # The reader process has read no more, for this step and that of the next epoch.
    assert lineage.transfers.num_bytes <= 2 * 4 * FIRST_BYTES

    shard = tmp_path / "shard-000000.tar"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1  # in one of the files
    shard.write_bytes(data)
    (bad,) = bad_samples(replace(pipeline, dataset=mm.open_dataset(folder)))
    assert bad.kind == "ChecksumError"


def bad_samples(pipeline: mm.Pipeline) -> tuple[Any, ...]:
    with closing(PipelineRunner(pipeline)) as runner:
        return runner.batch(Job(0, 0, 0, pipeline.global_batch_size))["__lineage__"].bad


def test_a_bad_file_is_read_again_where_it_was_read(folder: str) -> None:
    refused = frozenset({video(0)[:4]})
    pipeline, store = watched_pipeline(
        pipeline_of(folder, EightFrames(refused), shuffle=False), maps_files=False
    )
    (bad,) = bad_samples(pipeline)
    assert (bad.index, bad.kind) == (0, "DecodeError")
    assert "no such codec" in bad.reason
    reads_of_last_frame = [
        (start, stop)
        for name, start, stop in store.ranges
        if name.endswith(".tar") and start <= VIDEO_BYTES + 511 < stop
    ]
    assert len(reads_of_last_frame) == 2
    assert all(stop - start <= MIN_FETCH_BYTES for start, stop in reads_of_last_frame)


@pytest.mark.parametrize("first_byte", [VIDEO_BYTES // 2, VIDEO_BYTES + 512])
def test_a_fault_that_storage_makes_once_is_no_fault_of_the_sample(
    first_byte: int, folder: str
) -> None:
    num_faults = 0

    def is_later(name: str, bounds: tuple[int, int] | None, answer: Any) -> bool:
        return name.endswith(".tar") and bounds is not None and bounds[0] >= first_byte

    def change(*read: Any) -> Any:
        """Answer zeros once, for a frame or for the header behind the video."""
        nonlocal num_faults
        answer = read[2]
        if is_later(*read):
            num_faults += 1
            return bytes(len(answer)) if num_faults == 1 else answer
        return answer

    class NoZeros(EightFrames):
        def __call__(self, data: bytes | LazyBytes) -> bytes:
            frames = super().__call__(data)
            if bytes(100) in frames:
                raise ValueError("zeros")
            return frames

    expected = pipeline_of(folder, shuffle=False).take(1)[0]
    pipeline, _ = watched_pipeline(
        pipeline_of(folder, NoZeros(), shuffle=False), change, maps_files=False
    )
    assert pipeline.take(1)[0] == expected
    assert num_faults >= 2
    pipeline, _ = watched_pipeline(
        pipeline_of(folder, shuffle=False),
        lambda *read: mm.errors.StorageError("away") if is_later(*read) else read[2],
        maps_files=False,
    )
    with pytest.raises(mm.errors.StorageError, match="away"):  # that stays
        pipeline.take(4)


def cut(folder: Path) -> None:
    shard = folder / "shard-000000.tar"
    with shard.open("rb+") as file:
        file.truncate(VIDEO_BYTES // 2)


def replace_by_another(folder: Path) -> None:
    shard = folder / "shard-000000.tar"
    copy = folder / "copy"
    copy.write_bytes(shard.read_bytes())
    copy.replace(shard)  # at once: other threads read meanwhile, and would see half a file


@pytest.mark.parametrize("change", [cut, replace_by_another])
def test_a_shard_that_changes_while_it_is_read_is_an_error(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = write_corpus(tmp_path, [4], lambda n: {"mp4": video(n)}, checksums=True)
    num_calls = 0

    class ChangesShard(EightFrames):
        def __call__(self, data: bytes | LazyBytes) -> bytes:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                change(tmp_path)
            return super().__call__(data)

    with pytest.raises(mm.errors.ShardError, match=r"shard-000000\.tar"):
        pipeline_of(folder, ChangesShard(), shuffle=False).take(4)
    assert num_calls <= MAX_SAMPLE_READS

    write_corpus(tmp_path, [4, 20], lambda n: {"mp4": video(n)}, checksums=True)
    num_calls = 0
    tolerant = pipeline_of(
        folder, ChangesShard(), shuffle=False, bad_samples=mm.BadSamplePolicy(shards=True)
    )
    assert {bad.kind for bad in bad_samples(tolerant)} == {"ShardError"}


@pytest.fixture(scope="module")
def one_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one sample, whose headers lie at bytes 0, 300,544 and 301,568."""
    folder = tmp_path_factory.mktemp("one")
    write_corpus(folder, [1], lambda n: {"mp4": video(n)[:300_000], "json": b"1", "txt": b"2"})
    return folder


@given(
    header=st.sampled_from((0, 300_544, 301_568)),
    offset=st.integers(0, 511),
    value=st.binary(min_size=1, max_size=1),
)
@settings(max_examples=30)
def test_damaged_headers_are_errors_as_when_the_sample_is_read_whole(
    header: int, offset: int, value: bytes, one_sample: Path
) -> None:
    shard = one_sample / "shard-000000.tar"
    content = shard.read_bytes()
    position = header + offset

    def outcome(large_files: LargeFiles | None) -> object:
        held = Fetcher(dataset, large_files=large_files).fetch([(0, 0)])
        read = held.take(0)
        if isinstance(read, Exception):
            return type(read), str(read)
        return {
            name: bytes(field) if isinstance(field, LazyBytes) else field
            for name, field in read.items()
        }

    try:
        shard.write_bytes(content[:position] + value + content[position + 1 :])
        dataset = mm.open_dataset(one_sample)
        ranged = LargeFiles(MIN_LAZY_BYTES, lambda field: field == "mp4")
        assert outcome(ranged) == outcome(None)
    finally:
        shard.write_bytes(content)
