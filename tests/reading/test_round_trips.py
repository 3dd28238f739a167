"""Round trips until the first batch: counted by what a server holds."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.index_tars import index_tars
from mmstream.pipeline import PipelineRunner
from mmstream.reading.step import Job
from tests.helpers.aws import set_only
from tests.helpers.bad_corpus import make_pipeline, write_tiny
from tests.helpers.far_limits import set_far_limits
from tests.helpers.reader_thread import reader_thread
from tests.helpers.web_stubs import Stub, running

ROWS, STEPS, NUM_SHARDS = 8, 20, 16
REQUEST_TIMEOUT_S = 300
"""Only a test that fails waits for so long."""

Range = tuple[str, int, int]


class Gate:
    """Holds answers back until they are released, and notes the ranges of shards."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_open = False
        self.held: dict[threading.Event, str] = {}
        self.ranges: list[Range] = []

    def hold(self, name: str, range_header: str | None) -> None:
        """Wait until the answer may be sent."""
        event = threading.Event()
        with self.changed:
            self.changed.notify_all()
            bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", range_header or "")
            if bounds is not None and name.endswith(".tar"):
                self.ranges.append((name, int(bounds[1]), int(bounds[2]) + 1))
            if self.is_open:
                return
            self.held[event] = name
        event.wait(REQUEST_TIMEOUT_S)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, REQUEST_TIMEOUT_S), sorted(self.held.values())

    def release(self) -> None:
        """End a round trip: answer what has come so far, and nothing that comes later."""
        with self.changed:
            for event in self.held:
                event.set()
            self.held.clear()

    def open(self) -> None:
        with self.changed:
            self.is_open = True
        self.release()

    def names(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.held.values()}

    def has_all(self, samples: list[Range]) -> bool:
        """Tell whether all of these samples were requested."""
        return all(
            any(
                name == other and first <= start and stop <= end
                for other, first, end in self.ranges
            )
            for name, start, stop in samples
        )


OPENED = {"mmstream.json", "mmstream.bad.json", "mmstream.removed.json"}
"""What opening a dataset asks for, side by side."""


class GatedS3(Stub):
    """S3 with path style, as far as a reader needs it."""

    gate: Gate

    def get(self) -> None:
        self.gate.hold(self.name, self.headers.get("Range"))
        self.answer_object(self.name)


@pytest.fixture
def local(tmp_path) -> str:
    folder = write_tiny(tmp_path / "corpus", [ROWS * STEPS // NUM_SHARDS] * NUM_SHARDS)
    for path in (tmp_path / "corpus").iterdir():
        if path.suffix != ".tar":
            path.unlink()
    index_tars(folder, progress=False)
    return folder


@pytest.fixture
def gate(local, tmp_path, monkeypatch) -> Iterator[Gate]:
    objects = {
        f"bucket/corpus/{path.name}": path.read_bytes() for path in (tmp_path / "corpus").iterdir()
    }
    gate = Gate()
    set_only(monkeypatch, tmp_path)  # no index is in the cache yet
    set_far_limits(monkeypatch)  # a second request for what is held would be held, too
    with running(GatedS3, objects, gate=gate) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield gate


def samples_of(local: str, epoch: int, step: int) -> list[Range]:
    """Return where the samples of a step lie."""
    pipeline = pipeline_of(local)
    shards, indexes, _ = pipeline.order.refs(epoch, step)
    samples = []
    for shard, index in zip(shards.tolist(), indexes.tolist(), strict=True):
        bounds = pipeline.dataset.shards.bounds(shard, np.array([index]))
        name = f"bucket/corpus/{pipeline.dataset.name_of(shard)}"
        samples.append((name, int(bounds.start[0]), int(bounds.stop[0])))
    return samples


def pipeline_of(url: str) -> mm.Pipeline:
    return make_pipeline(url, global_batch_size=ROWS, window=None)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 7], ids=["start", "resume"])
def test_the_first_batch_takes_three_round_trips(local: str, gate: Gate, first: int) -> None:
    samples = samples_of(local, 0, first)
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        stack.callback(gate.open)  # whatever fails, nothing waits for ever
        opened = thread.submit(pipeline_of, "s3://bucket/corpus")
        gate.wait_for(lambda: gate.names() == OPENED)
        gate.release()
        pipeline = opened.result()

        reader = stack.enter_context(reader_thread(pipeline))
        runner = PipelineRunner(pipeline, connection=reader.connections[0])
        stack.enter_context(closing(runner))
        job = Job(0, first, 0, ROWS, iteration=reader.begin(0, first, (0, ROWS)))
        gate.wait_for(lambda: any(name.startswith("mmstream.index.") for name in gate.names()))
        gate.release()

        batch = thread.submit(runner.batch, job)
        gate.wait_for(lambda: gate.has_all(samples))
        gate.release()
        batch.result()  # while all later answers are held
