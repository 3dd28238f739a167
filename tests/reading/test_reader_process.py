"""Steps that come from a reader process are those that a process reads by itself."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.pipeline import PipelineRunner
from mmstream.processes import workers
from mmstream.ranks import World, rows_of_rank
from mmstream.reading import process, server
from mmstream.reading.process import (
    MAX_AHEAD,
    ReaderEnded,
    ReaderProcess,
    ReaderSetup,
    StepConnection,
    StepHeader,
    StepRequest,
)
from mmstream.reading.rank_reader import RankReader
from mmstream.reading.server import main
from mmstream.reading.step import Job
from tests.helpers.bad_corpus import make_pipeline, policy, write_tiny
from tests.helpers.far_limits import set_far_limits
from tests.helpers.reader_thread import reader_thread
from tests.helpers.topology import described


@pytest.fixture
def pipeline(corpus: str) -> mm.Pipeline:
    """Of the small corpus, in steps of eight rows."""
    return make_pipeline(corpus)


def contents(batch: dict[str, Any]) -> Any:
    """All of a batch but counts of requests, comparable."""
    fields = [
        value
        for name, value in batch.items()
        if not torch.is_tensor(value) and name != "__lineage__"
    ]
    return described(batch), fields


def own_batch(pipeline: mm.Pipeline, job: Job) -> Any:
    with closing(PipelineRunner(pipeline)) as runner:
        return contents(runner.batch(job))


@given(data=st.data())
@settings(max_examples=15)
def test_any_topology_gets_the_same_batches(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any), "counts")
    num_samples = sum(counts)
    bad = data.draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples // 5), "bad")
    rows = data.draw(st.integers(1, num_samples), "rows")
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(folder, counts, bad)
        pipeline = make_pipeline(
            folder,
            global_batch_size=rows,
            drop_last=data.draw(st.booleans(), "drop_last"),
            window=data.draw(st.sampled_from([None, 1, 5, 30]), "window"),
            bad_samples=policy(action="mask"),
        )
        size = data.draw(st.integers(1, rows), "size")
        rank = data.draw(st.integers(0, size - 1), "rank")
        num_workers = data.draw(st.integers(1, 3), "num_workers")
        rank_rows = rows_of_rank(rows, World(rank, size), "balanced")
        steps = pipeline.order.steps_per_epoch
        with reader_thread(pipeline, num_workers) as reader:
            runners = [
                PipelineRunner(pipeline, connection=connection) for connection in reader.connections
            ]
            for _ in range(3):  # the next iteration may go on, or jump
                epoch = data.draw(st.integers(0, 2), "epoch")
                first = data.draw(st.integers(0, steps - 1), "first")
                end = data.draw(st.integers(first + 1, steps), "end")
                iteration = reader.begin(epoch, first, rank_rows)
                for step in range(first, end):
                    job = Job(epoch, step, *rank_rows, num_workers, iteration)
                    batch = runners[step % num_workers].batch(job)
                    assert reader.connections[step % num_workers].num_ahead == MAX_AHEAD
                    assert contents(batch) == own_batch(pipeline, job)
            for runner in runners:
                runner.close()


def test_the_main_function_serves_and_sends_its_log(
    pipeline: mm.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("mmstream")
    handlers, level = list(logger.handlers), logger.level
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logger, "propagate", True)
    pair = socket.socketpair()
    ours = Connection(pair[0].detach())
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send((sys.path, logging.WARNING))
    ours.send(ReaderSetup(pipeline.dataset, pipeline.order))
    words = [str(pair[1].detach()), str(far.detach())]
    thread = threading.Thread(target=main, args=(words,), daemon=True)
    thread.start()
    try:
        connection = StepConnection(near)
        with pytest.raises(mm.MMStreamError, match="an iteration that is over"):
            connection.ask(StepRequest(-1, 0, 0))
        ours.send(("begin", 1, 0, 0, (0, 8), False))
        header, data = connection.ask(StepRequest(1, 0, 0))
        assert (header.samples.sizes > 0).all()
        assert len(data) > (header.starts + header.samples.sizes).max()
        logging.getLogger("mmstream.storage").warning("a shard of %s", "stone")
        kind, fields = ours.recv()
        assert (kind, fields["msg"], fields["args"]) == ("log", "a shard of stone", None)
        del data
        connection.close()
    finally:
        ours.close()
        thread.join(500)
        logger.handlers[:] = handlers
        logger.setLevel(level)
    assert not thread.is_alive()


def test_a_reader_that_cannot_be_killed_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    stuck = mock.Mock(pid=7)  # in a read of a folder whose server is mute
    stuck.wait.side_effect = subprocess.TimeoutExpired("reader", 0)
    process._end(stuck, mock.Mock(), [], os.getpid())
    stuck.kill.assert_called_once_with()
    assert "the reader process (pid 7) was killed and has not ended" in caplog.text


def test_a_reader_without_its_parent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("mmstream.processes.workers.os._exit", codes.append)
    workers._exit_with("0 0")  # there is no such process
    assert codes == [1]


def test_an_error_of_the_storage_crosses_to_whoever_asked(
    pipeline: mm.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: RankReader, epoch: int, step: int) -> None:
        raise ValueError("of a store", threading.Lock())

    with reader_thread(pipeline) as reader:
        for _ in range(2):  # a response of the first iteration may be dropped, with what it told
            request = StepRequest(reader.begin(0, 0, (0, 8)), 0, 0)
            header, _ = reader.connections[0].ask(request)
            assert header.read_shards
        monkeypatch.setattr(RankReader, "step", step)  # its error cannot be pickled
        request = StepRequest(reader.begin(0, 0, (0, 8)), 0, 0)
        with pytest.raises(mm.MMStreamError, match=r"ValueError: \('of a store', "):
            reader.connections[0].ask(request)
        monkeypatch.undo()
        iteration = reader.begin(0, 0, (0, 8))
        assert "it" in reader.describe()
        runner = PipelineRunner(pipeline, connection=reader.connections[0])
        with pytest.raises(mm.ConfigError), closing(runner):
            runner.batch(Job(-1, 0, 0, 8, 1, reader.begin(-1, 0, (0, 8))))
        assert iteration == 4
    with pytest.raises(ReaderEnded):
        reader.connections[0].ask(StepRequest(1, 0, 0))


def test_an_error_of_a_signal_handler_is_no_dead_reader_process() -> None:
    def give_up(*_: Any) -> None:
        raise TimeoutError("a limit of the user")

    def interrupt() -> None:
        theirs.recv(1 << 10)
        signal.pthread_kill(main_thread, signal.SIGUSR1)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main_thread = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, give_up)
    thread = threading.Thread(target=interrupt, daemon=True)
    try:
        with closing(theirs), closing(StepConnection(ours)) as connection:
            thread.start()
            with pytest.raises(TimeoutError, match="a limit of the user"):
                connection.ask(StepRequest(1, 0, 0))
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_loop_that_holds_all_its_samples_takes_no_room_from_the_reader_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, [40, 40], set())
    pipeline = make_pipeline(str(tmp_path), global_batch_size=8)
    # Ranges in use take up to 160 KiB, and leave holes. All samples together take more than that.
    monkeypatch.setattr(server, "most_bytes", lambda: 1 << 20)
    set_far_limits(monkeypatch)  # the loop may be slow to give room back
    held, expected, num_bytes = [], [], 0
    with (
        reader_thread(pipeline) as reader,
        closing(PipelineRunner(pipeline, connection=reader.connections[0])) as runner,
        closing(PipelineRunner(pipeline)) as own,
    ):
        iteration = reader.begin(0, 0, (0, 8))
        for epoch, step in product(range(20), range(pipeline.order.steps_per_epoch)):
            held.append(runner.batch(Job(epoch, step, 0, 8, 1, iteration)))
            num_bytes += held[-1]["__lineage__"].num_bytes
            expected.append(contents(own.batch(Job(epoch, step, 0, 8))))
    assert num_bytes > 1 << 20
    assert [contents(batch) for batch in held] == expected


def test_a_run_without_memory_for_a_step_ends_with_an_error(
    pipeline: mm.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "most_bytes", lambda: server.NUM_ROOMS * server.ROOM_BYTES + 4096)
    set_far_limits(monkeypatch, memory_s=0.0)
    with (
        reader_thread(pipeline) as reader,
        closing(PipelineRunner(pipeline, connection=reader.connections[0])) as runner,
        pytest.raises(MemoryError, match=r"no room for [\d,]+ bytes .* may have 102,400 bytes"),
    ):
        runner.batch(Job(0, 0, 0, 8, 1, reader.begin(0, 0, (0, 8))))


def test_a_process_without_file_descriptors_says_so(pipeline: mm.Pipeline) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with reader_thread(pipeline) as reader:
        connection, iteration = reader.connections[0], reader.begin(0, 0, (0, 8))
        connection._send(StepRequest(iteration, 0, 0))
        assert select.select([connection._socket], [], [], 500)[0]
        with ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            connection._ahead.append(StepRequest(iteration, 0, 0))
            with pytest.raises(mm.MMStreamError, match=r"file descriptor.*ulimit -n"):
                connection.ask(StepRequest(iteration, 0, 0))


def test_samples_stay_until_the_request_after_those_that_were_made_ahead(
    pipeline: mm.Pipeline,
) -> None:

    def samples_of(header: StepHeader, memory: memoryview) -> list[bytes]:
        stops = header.starts + header.samples.sizes
        return [bytes(memory[a:b]) for a, b in zip(header.starts, stops, strict=True)]

    with reader_thread(pipeline) as reader:
        connection, iteration = reader.connections[0], reader.begin(0, 0, (0, 8))
        requests = [
            StepRequest(iteration, *divmod(number, pipeline.order.steps_per_epoch))
            for number in range(30 + MAX_AHEAD)
        ]
        before = connection.ask(requests[0])
        expected = [samples_of(*before)]
        for number, request in enumerate(requests[1:30], start=1):
            while connection.num_ahead < MAX_AHEAD:
                connection.ask_ahead(requests[number + connection.num_ahead])
            assert select.select([connection._socket], [], [], 500)[0]
            assert samples_of(*before) == expected[-1]
            before = connection.ask(request)
            expected.append(samples_of(*before))
    assert expected[1] != expected[2]


def test_an_answer_that_comes_late_is_no_log_record(
    pipeline: mm.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ReaderProcess(pipeline.dataset, pipeline.order, 1)
    with closing(reader):
        monkeypatch.setattr(process, "ANSWER_S", 0.1)
        os.kill(reader.pid, signal.SIGSTOP)
        assert reader.describe().endswith("does not answer")
        os.kill(reader.pid, signal.SIGCONT)
        assert reader._control.poll(500)
        reader.pass_on_log()
        monkeypatch.setattr(process, "ANSWER_S", 500)
        assert "it has not begun" in reader.describe()


def test_a_log_record_is_sent_by_a_descriptor_above_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no more than 1,024 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        ours, theirs = socket.socketpair()
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD, 1100)
        theirs.close()
        with closing(Connection(ours.detach())) as receiver, closing(Connection(high)) as sender:
            handler = server.LogToMain(sender)
            handler.emit(logging.makeLogRecord({"msg": "the store is away"}))
            assert receiver.poll(0)
            assert receiver.recv()[1]["msg"] == "the store is away"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
