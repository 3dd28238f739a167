"""Workers that hang or die: named at once, in one line, with what they worked on."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.loader.watchdog import StallLimits, Watchdog, WorkerGroup
from mmstream.processes.workers import end_fork_server, start_fork_server
from mmstream.progress import Progress, Stage
from mmstream.reading.step import Job
from mmstream.state import resume_hint
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.corpora import write_corpus
from tests.helpers.wait import has_ended, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process states come from /proc")


class Acts:
    """A transform that does something to its own process at one sample of a step."""

    def __init__(self, action, step: int = 3, unless: Path | None = None) -> None:
        self.action, self.step, self.unless = action, step, unless

    def __call__(self, sample):
        is_due = sample["__lineage__"].step == self.step
        if is_due and not (self.unless and self.unless.exists()):
            self.action()
        return sample


stop_itself = partial(signal.raise_signal, signal.SIGSTOP)
kill_itself = partial(signal.raise_signal, signal.SIGKILL)
sleep_long = partial(time.sleep, 10_000)


def stop_when_told(gate: Path) -> None:
    wait_until(gate.exists)
    stop_itself()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), [24, 24])


def make_loader(tiny, action=None, *, step=3, unless=None, num_workers=2, **settings):
    transforms = (Acts(action, step, unless),) if action else ()
    pipeline = mm.Pipeline(
        mm.open_dataset(tiny), global_batch_size=4, transforms=transforms, shuffle=False
    )
    return mm.Loader(pipeline, num_workers=num_workers, **settings)


def steps(loader):
    return [batch["__lineage__"].step for batch in loader]


# -- workers that die ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "step"),
    [
        pytest.param("forkserver", 0, marks=pytest.mark.slow),
        ("fork", 3),
    ],
)
def test_a_killed_worker_is_one_line_with_its_signal_and_its_last_sample(
    tiny, tmp_path, context, step
):
    calm = tmp_path / "calm"
    loader = make_loader(tiny, kill_itself, step=step, unless=calm, multiprocessing_context=context)
    with closing(loader), pytest.raises(mm.MMStreamError) as caught:
        steps(loader)
    stands = loader.state_dict()["step"]  # what a killed worker had made ahead is lost with it
    assert re.fullmatch(
        rf"worker {step % 2} \(pid \d+\) was killed by SIGKILL \(exit code -9\) at step {step}, "
        rf"last sample shard-000000\.tar\[{4 * step}\] .*memory ran out.*"
        rf"{re.escape(resume_hint(stands))}",
        str(caught.value),
    )
    assert type(caught.value) is mm.MMStreamError
    assert caught.value.__suppress_context__
    assert stands <= step
    calm.touch()
    loader.load_state_dict(loader.state_dict())
    assert steps(loader) == list(range(stands, 12))
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "words"),
    [
        (partial(signal.raise_signal, signal.SIGSEGV), "was killed by SIGSEGV (exit code -11)"),
        (partial(os._exit, 1), "ended itself with exit code 1"),
    ],
)
def test_how_a_worker_ended_is_said_also_in_its_first_batch(tiny, action, words):
    loader = make_loader(tiny, action, step=0, num_workers=1)
    with closing(loader), pytest.raises(mm.MMStreamError) as caught:
        steps(loader)
    assert words in str(caught.value)
    assert "at step 0, last sample shard-000000.tar[0] " in str(caught.value)
    assert not isinstance(caught.value, mm.ConfigError)


@pytest.mark.slow
def test_to_device_raises_the_same_line_after_the_batch_before_it(tiny):
    loader = make_loader(tiny, kill_itself)
    seen = []
    with closing(loader), pytest.raises(mm.MMStreamError, match="SIGKILL") as caught:  # noqa: PT012
        for batch in mm.to_device(loader, "cpu"):
            seen.append(batch["__lineage__"].step)
    assert seen == list(range(loader.state_dict()["step"]))
    assert str(caught.value).endswith(resume_hint(len(seen)))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_worker_that_dies_while_the_loop_is_busy_is_told_at_the_next_batch(tiny, context):
    loader = make_loader(tiny, num_workers=1, multiprocessing_context=context)
    with closing(loader):
        batches = iter(loader)
        next(batches)
        (pid,) = loader._makers.workers.pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: has_ended(pid))  # torch raises its own error here, on SIGCHLD
        with pytest.raises(
            mm.MMStreamError, match=rf"worker 0 \(pid {pid}\) was killed by SIGKILL"
        ):
            list(batches)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_message_keeps_nobody_waiting(tmp_path):
    big = write_corpus(tmp_path / "big", [8], lambda _: {"bin": os.urandom(8_000_000)})
    pipeline = mm.Pipeline(mm.open_dataset(big), global_batch_size=4)
    with closing(mm.Loader(pipeline, num_workers=1)) as loader:
        batches = iter(loader)
        next(batches)
        (pid,) = loader._makers.workers.pids
        # The next batch fills the pipe, and its sender waits for a reader.
        reader = loader._makers.workers._transport._iterator._worker_result_queue._reader
        assert reader.poll(500)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(mm.MMStreamError, match="was killed by SIGKILL"):
            next(batches)


@pytest.mark.slow
def test_a_fork_server_that_was_killed_is_no_endless_wait(tiny):
    from multiprocessing import forkserver

    loader = make_loader(tiny, sleep_long, num_workers=1)
    with closing(loader):
        batches = iter(loader)
        next(batches)
        (pid,) = loader._makers.workers.pids
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        with pytest.raises(mm.MMStreamError, match="worker 0"):
            list(batches)
        wait_until(lambda: has_ended(pid))  # it would have slept on
    with closing(make_loader(tiny)) as loader:  # a new server starts
        assert steps(loader) == list(range(12))


# -- workers that hang --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fork_server_that_hangs_is_ended_at_the_time_limit(tiny):
    from multiprocessing import forkserver

    start_fork_server(["torch"])
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    message = (
        r"the workers have not started: their fork server imports modules \(stall_timeout_s=1\)"
    )
    with pytest.raises(mm.MMStreamError, match=message):
        steps(make_loader(tiny, num_workers=1, stall_timeout_s=1))
    with closing(make_loader(tiny)) as loader:  # a new server starts
        assert steps(loader) == list(range(12))


@pytest.mark.slow
def test_workers_that_start_after_the_time_limit_are_not_waited_for(tiny, monkeypatch):
    attach, workers = WorkerGroup.attach, []

    def attach_late(group, processes, *arguments):
        time.sleep(1)
        workers.extend(processes)
        attach(group, processes, *arguments)

    monkeypatch.setattr(WorkerGroup, "attach", attach_late)
    try:
        with pytest.raises(mm.MMStreamError, match=r"stall_timeout_s=0\.2"):
            steps(make_loader(tiny, stop_itself, step=0, num_workers=1, stall_timeout_s=0.2))
        # Their fork server has ended, so only /proc tells how they are.
        wait_until(lambda: all(has_ended(worker.pid) for worker in workers))
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


@pytest.mark.slow
def test_close_ends_a_stopped_worker_whose_fork_server_has_ended(tiny):
    loader = make_loader(tiny, num_workers=1)
    with closing(loader):
        next(iter(loader))
        (pid,) = loader._makers.workers.pids
        os.kill(pid, signal.SIGSTOP)
        end_fork_server()
    try:
        wait_until(lambda: has_ended(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_stopped_worker_is_warned_of_again_and_again_and_then_ended(tiny, tmp_path, caplog):
    gate = tmp_path / "gate"
    action = partial(stop_when_told, gate)
    loader = make_loader(tiny, action, step=5, multiprocessing_context="fork")
    caplog.set_level(logging.WARNING, logger="mmstream")
    batches = iter(loader)
    for _ in range(5):  # a busy machine takes longer than the limit for these
        next(batches)
    gate.touch()
    loader._makers.workers._watchdog._limits = StallLimits(0.25, 5)
    with pytest.raises(mm.MMStreamError) as caught:
        list(batches)
    assert re.fullmatch(
        r"worker 1 \(pid \d+, state T: stopped by a signal.*\) has not answered: "
        r"step 5 of epoch 0, decoding shard-000000\.tar\[20\] .*\(stall_timeout_s=5\); "
        rf"{re.escape(resume_hint(loader.state_dict()['step']))}",
        str(caught.value),
    )
    warnings = [r.getMessage() for r in caplog.records if "worker 1 (pid" in r.getMessage()]
    assert len(warnings) >= 2
    assert "state T: stopped" in warnings[-1]
    assert "decoding shard-000000.tar[20] " in warnings[-1]
    assert loader._makers.workers is None


@pytest.mark.slow
def test_a_worker_that_goes_on_after_the_warning_loses_nothing(tiny, caplog):
    loader = make_loader(tiny, stop_itself, num_workers=1, stall_warning_s=1)
    caplog.set_level(logging.WARNING, logger="mmstream")
    threading.Thread(target=continue_when_warned, args=(loader, caplog), daemon=True).start()
    with closing(loader):
        assert steps(loader) == list(range(12))
    assert "state T: stopped" in caplog.text


def continue_when_warned(loader, caplog):
    """Let a worker go on at each of its four stops, the first time after a warning."""
    wait_until(lambda: "state T" in caplog.text)
    (pid,) = loader._makers.workers.pids
    while loader._makers.workers is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def test_a_loader_without_workers_warns_of_itself(tiny, caplog):
    own = f"this process (pid {os.getpid()}) has not finished: step 3 of epoch 0"
    wait_for_the_warning = partial(wait_until, lambda: own in caplog.text)
    loader = make_loader(
        tiny, wait_for_the_warning, num_workers=0, stall_warning_s=0.5, num_threads=1
    )
    with caplog.at_level(logging.WARNING, logger="mmstream"):
        assert steps(loader) == list(range(12))
    assert "decoding shard-000000.tar[1" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"stall_warning_s": 0},
        {"stall_warning_s": float("nan")},
        {"stall_timeout_s": -1, "num_workers": 1},
        {"stall_timeout_s": 5, "num_workers": 0},
    ],
)
def test_impossible_limits_are_refused(tiny, settings):
    with pytest.raises(mm.ConfigError, match="stall_"):
        make_loader(tiny, **{"num_workers": 0, **settings})


# -- the watchdog alone -------------------------------------------------------------------------


class Nobody:
    """Processes that make no batches, and do not end."""

    def describe(self, job):
        return f"nobody makes step {job.step}"

    def have_ended(self):
        return False

    def end(self):
        raise AssertionError("ended")


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("mmstream.loader.watchdog.time.monotonic", lambda: now[0])
    return now


def test_warnings_come_at_doubling_times_and_anew_for_each_batch(caplog, clock):
    dog = Watchdog(Nobody(), StallLimits(10, None))  # without its thread: the test looks by itself
    for start, step in ((1000, 5), (3000, 6)):
        clock[0] = start
        seconds, warned = [], None
        with dog.waiting_for(Job(0, step, 0, 4)):
            for second in range(100):
                clock[0] = start + second
                caplog.clear()
                warned = dog.poll_once(warned)
                if caplog.records:
                    seconds.append(second)
                    message = f"waiting for {second} s: nobody makes step {step}"
                    assert caplog.messages == [message]
        assert seconds == [10, 20, 40, 80]


def test_nothing_is_warned_of_while_nobody_waits(caplog, clock):
    dog = Watchdog(Nobody(), StallLimits(10, 20))
    with dog.waiting_for(Job(0, 5, 0, 4)):
        pass
    clock[0] += 1000
    assert dog.poll_once(None) is None
    assert (caplog.records, dog.error) == ([], None)


def test_a_watchdog_that_nobody_holds_ends_its_thread():
    dog = Watchdog(Nobody(), StallLimits(60, None))
    dog.start()
    thread = dog._thread
    del dog
    thread.join(500)
    assert not thread.is_alive()


def drop(watchdogs: list[Watchdog]) -> None:
    watchdogs.clear()
    gc.collect()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_watchdog_that_is_dropped_in_a_child_waits_for_no_lock_of_the_parent():
    watchdogs = [Watchdog(Nobody(), StallLimits(60, None))]
    held, release = threading.Event(), threading.Event()

    def hold(condition=watchdogs[0]._closed._cond):  # as the watchdog's thread does while it wakes
        with condition:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=drop, args=(watchdogs,))
    child.start()
    child.join(500)  # it ends at once; where it waits for the lock, it waits for ever
    is_done = child.exitcode == 0
    child.kill()
    release.set()
    thread.join()
    assert is_done


# -- notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "k" * 500, "é" * 60, "\udcff\ud800", "a\nb\x1b[2J"])
def test_any_key_can_be_noted_and_is_shown_in_one_printable_line(key):
    progress = Progress()
    progress.begin_sample(Stage.DECODE, 0, 1, 2, 3, key)
    shown = progress.last().sample("shard-{}.tar".format)
    assert shown.startswith("shard-2.tar[3]")
    assert shown.isprintable()
