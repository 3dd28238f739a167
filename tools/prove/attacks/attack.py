"""What an attack is, and how it runs: in a child process, with limits on time and memory.

An attack is held off in one of two ways. Either the victim goes on, and the attack's own checks
pass. Or it is refused with one line that names what is wrong. These are failures:

- an exception that mmstream does not raise on purpose, or a signal
- a message or a log line with a control character, or of more than one line
- more time or memory than the limits
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmstream as mm

MAX_SECONDS = 90
"""Longest time of one attack. Most take less than one second, all image bombs together 25."""

MAX_MEMORY_BYTES = 950_000_000
"""Most memory that a victim may take, besides what it has before. A worker process of a loader has
250 MB before, so it stays within 1.2 GB."""

NOT_PRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: What is attacked, and how.
        run: The victim's work. It gets an empty folder, writes the attack there, and does what a
            user would do. It raises AssertionError where the outcome is wrong.
        refusal: What the error must say (a regular expression). None: the victim must go on.
        may_go_on: Whether the victim may also go on where `refusal` is given.
        prepare: Writes the attack, in a process whose time and memory do not count. None: `run`
            writes it.
    """

    name: str
    run: Callable[[Path], object]
    refusal: str | None = None
    may_go_on: bool = False
    prepare: Callable[[Path], object] | None = None


@dataclass(frozen=True)
class Result:
    """How an attack ended.

    Attributes:
        name: Of the attack.
        failure: Why it succeeded. Empty: it was held off.
        message: What the victim said last.
        seconds: Of wall time.
        memory_bytes: Most memory of the victim, besides what it had before.
    """

    name: str
    failure: str
    message: str
    seconds: float
    memory_bytes: int


def run_attack(attack: Attack, *, max_seconds: float = MAX_SECONDS) -> Result:
    """Run an attack in a forked child, and judge how it ended."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        report = Path(folder, "report.json")
        victim_folder = Path(folder, "victim")
        victim_folder.mkdir()
        if attack.prepare is not None:
            _prepare(attack.prepare, victim_folder)
        started, resident_before = time.monotonic(), _resident_bytes()
        pid = os.fork()
        if pid == 0:
            _child(attack, Path(folder), report)
        status, resident_kib, timed_out = _wait(pid, started + max_seconds)
        seconds = time.monotonic() - started
        content = json.loads(report.read_bytes()) if report.exists() else {}
    failure = content.get("failure", "")
    memory_bytes = max(0, resident_kib * 1024 - resident_before)
    if timed_out:
        failure = f"still running after {max_seconds:g} s"
    elif status:
        failure = f"ended by {_reason(status)}"
    elif memory_bytes > MAX_MEMORY_BYTES:
        failure = f"took {memory_bytes / 1e6:,.0f} MB of memory"
    return Result(attack.name, failure, content.get("message", ""), seconds, memory_bytes)


def train(source: Any, *, num_samples: int | None = None, **settings: Any) -> mm.Loader:
    """Go through one epoch of a corpus as a training run does. Return the loader.

    Args:
        source: A folder, or an open dataset or mixture.
        num_samples: How many rows must be delivered. None: any number.
        settings: Of the pipeline.
    """
    dataset = source if isinstance(source, mm.Dataset | mm.Mixture) else mm.open_dataset(source)
    settings = {
        "global_batch_size": 4,
        "decode": mm.Decode(image=mm.ImageDecoder(size=32)),
        "bad_samples": mm.BadSamplePolicy(
            max_fraction=1.0, max_consecutive=0, quarantine=None, shards=True
        ),
        **settings,
    }
    loader = mm.Loader(mm.Pipeline(dataset, **settings), num_threads=1)
    delivered = sum(len(batch["__key__"]) for batch in loader)
    assert num_samples is None or delivered == num_samples, f"{delivered} rows"
    return loader


def _prepare(prepare: Callable[[Path], object], folder: Path) -> None:
    """Write an attack in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            prepare(folder)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("the attack could not be written")


def _child(attack: Attack, folder: Path, report: Path) -> None:
    """Run the attack, write the report, and end this process."""
    victim_folder = folder / "victim"
    os.chdir(victim_folder)
    log = folder / "log.txt"
    handler = logging.FileHandler(log, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(message)s\x00"))  # NUL ends a message
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    failure, message = "", ""
    try:
        attack.run(victim_folder)
    except (mm.MMStreamError, FileNotFoundError) as error:
        message = str(error)
        if attack.refusal is None:
            failure = f"refused: {message!r}"
        elif not re.search(attack.refusal, message):
            failure = f"the message does not say {attack.refusal!r}: {message!r}"
    except AssertionError as error:
        failure = f"went wrong: {error}"
    except BaseException as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        if attack.refusal is not None and not attack.may_go_on:
            failure = "was not refused"
    logged = [text.strip("\n") for text in log.read_text("utf-8").split("\x00")]
    for text in (message, *logged):
        if not failure and NOT_PRINTABLE.search(text):
            failure = f"says what is not printable: {text!r}"
    report.write_text(json.dumps({"failure": failure, "message": message}))
    os._exit(0)


def _wait(pid: int, deadline: float) -> tuple[int, int, bool]:
    """Wait for a child. Return its status, its most resident KiB, and whether it was too slow."""
    timed_out = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss, timed_out
        if not timed_out and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            timed_out = True
        time.sleep(0.005)


def _resident_bytes() -> int:
    """Return the memory of this process, which a forked child begins with."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.waitstatus_to_exitcode(status)}"
