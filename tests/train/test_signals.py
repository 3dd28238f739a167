"""SIGTERM and Ctrl-C: saved as of the last optimizer step, left in order, gone on from exactly."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from mmstream.cli import main
from mmstream.train import TrainResult, distributed
from mmstream.train.demo import free_port
from mmstream.train.distributed import (
    StopRequest,
    note_signals,
)
from tests.helpers.gloo_ranks import start_ranks
from tests.helpers.logged_runs import metrics
from tests.helpers.wait import wait_until


def start(corpus: str, out: Path, world_size: int = 1, *more: str) -> list[BaseProcess]:
    """Start ``mmstream train`` as torchrun would; each rank is a process group of its own."""
    command = [
        "mmstream", "train", corpus, "--out", str(out), "--device", "cpu",
        "--image-size", "32", "--global-batch-size", "8", "--num-workers", "1", "--epochs", "500",
        "--checkpoint-every", "1000", "--log-keys", *more,
    ]  # fmt: skip
    out.mkdir(exist_ok=True)
    group = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    imports = ["tests.helpers.model_imports"]
    arguments = (command, str(out), group)
    return start_ranks(train, *arguments, num_ranks=world_size, late_imports=imports).processes


def train(rank: int, command: list[str], out: str, group: dict[str, str]) -> None:
    """What each rank does."""
    os.setsid()
    with Path(out, f"rank{rank}.log").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ |= {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    forkserver._forkserver.__init__()  # its workers come from a server of its own
    sys.argv = command
    main()


def wait_for_steps(out: Path, ranks: list[BaseProcess], num_steps: int) -> None:
    wait_until(
        lambda: len(metrics(out)) >= num_steps or any(rank.exitcode is not None for rank in ranks)
    )
    assert len(metrics(out)) >= num_steps, (out / "rank0.log").read_text()


def codes(ranks: list[BaseProcess]) -> list[int | None]:
    try:
        for rank in ranks:
            rank.join(500)
        return [rank.exitcode for rank in ranks]
    finally:
        end(ranks)


def end(ranks: list[BaseProcess]) -> None:
    for rank in ranks:
        rank.kill()
        rank.join()


def saved_steps(out: Path) -> list[int]:
    return [int(path.stem[5:]) for path in (out / "checkpoints").iterdir()]


@pytest.mark.slow
def test_sigterm_to_all_processes_saves_the_last_step_and_exits_with_0(
    corpus: str, tmp_path: Path
) -> None:
    ranks = start(corpus, tmp_path)
    wait_for_steps(tmp_path, ranks, 3)
    os.killpg(ranks[0].pid, signal.SIGTERM)  # a scheduler's goes to the loader's workers too
    assert codes(ranks) == [0]
    done = [line["num_steps"] for line in metrics(tmp_path)]
    assert done == list(range(1, len(done) + 1))
    assert saved_steps(tmp_path) == [done[-1]]
    log = (tmp_path / "rank0.log").read_text()
    assert f"stopped by SIGTERM: {done[-1]} steps" in log


@pytest.mark.slow
def test_ctrl_c_on_two_ranks_saves_the_same_step_and_exits_with_130(
    corpus: str, tmp_path: Path
) -> None:
    ranks = start(corpus, tmp_path, 2)
    wait_for_steps(tmp_path, ranks, 3)
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGINT)
    assert codes(ranks) == [130, 130]
    assert metrics(tmp_path, 0)[-1]["num_steps"] == metrics(tmp_path, 1)[-1]["num_steps"]
    assert saved_steps(tmp_path) == [metrics(tmp_path)[-1]["num_steps"]]
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("rank*.log"))


def test_a_second_ctrl_c_leaves_at_once_but_not_an_echo_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with note_signals() as stop:
        monkeypatch.setattr(distributed, "ECHO_S", 1000.0)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.flags() == (0.0, 1.0)
        monkeypatch.setattr(distributed, "ECHO_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("is_saving", "expected"), [(False, []), (True, ["checkpoint"])])
def test_a_second_sigterm_leaves_with_143_after_the_checkpoint_that_is_being_written(
    is_saving: bool, expected: list[str]
) -> None:
    stop, written = StopRequest(), []
    stop.note(signal.SIGTERM, None)
    assert stop.flags() == (1.0, 0.0)
    stop.times[signal.SIGTERM] -= 1.5

    def save() -> None:
        with stop.saving() if is_saving else nullcontext():
            stop.note(signal.SIGTERM, None)
            written.append("checkpoint")

    with pytest.raises(SystemExit) as caught:
        save()
    assert (caught.value.code, written) == (143, expected)


@pytest.mark.parametrize(("all_received_signal", "code"), [(True, 0), (False, 75)])
def test_the_exit_code_says_whether_a_launcher_should_start_all_again(
    monkeypatch: pytest.MonkeyPatch, all_received_signal: bool, code: int
) -> None:
    result = TrainResult(3, 0, 1.0, {"epoch": 0}, None, "SIGTERM", all_received_signal)
    monkeypatch.setattr("mmstream.train.train", lambda config, pipeline: result)
    monkeypatch.setattr(sys, "argv", ["mmstream", "train", "shards/", "--out", "run/"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


def test_handlers_of_the_caller_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        with note_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert noted == [signal.SIGTERM]
        assert stop.flags() == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGTERM, before)


# -- a loader worker that is killed ----------------------------------------------------------------


def worker_of(pid: int) -> psutil.Process:
    """Return the loader worker of a rank: the only child of its fork server."""
    workers = [
        worker
        for server in psutil.Process(pid).children()
        if "forkserver" in " ".join(server.cmdline())
        for worker in server.children()
    ]
    assert len(workers) == 1
    return workers[0]


def test_a_killed_worker_ends_its_rank_with_one_line(corpus: str, tmp_path: Path) -> None:
    ranks = start(corpus, tmp_path, 2)
    try:
        wait_for_steps(tmp_path, ranks, 3)
        worker_of(ranks[-1].pid).send_signal(signal.SIGKILL)
        ranks[-1].join(500)
        assert ranks[-1].exitcode == 1
    finally:
        end(ranks)  # the others wait for the rank that has ended; torchrun ends them
    log = (tmp_path / "rank1.log").read_text()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith("error: rank 1: worker 0 (pid ")
    assert "was killed by SIGKILL (exit code -9)" in last
    assert "the state is at step" in last
    assert "Traceback" not in log
    assert "DataLoader" not in log
