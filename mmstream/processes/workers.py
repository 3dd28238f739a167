"""How worker processes start, follow their main process, and end.

Workers end with their main process, however that ends:

- The environment names the main process while workers, their fork server or a reader process
  start. `follow_main_process` goes by it.
- A worker that still imports the main script is not yet ours: the script may hang in that import.
  So it follows before the script is imported (``forkserver_preload.py``), or when the script
  imports mmstream (spawn).
- A worker that was forked follows from `join_parent` on.

Python starts helper processes as ``python -c``, which would look for modules in the current folder
first. That may be a folder of data with a module of a stranger in it. So `without_current_folder`
is around each start. Helpers look where their parent looks: ``sys.path`` goes over to them.

`run_in_processes` does jobs in such workers.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import Distribution, EntryPoint, distributions
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from mmstream.errors import ConfigError, MMStreamError
from mmstream.processes.machine import process_state, words_of_exit

MAIN_PROCESS = "MMSTREAM_MAIN_PROCESS"
"""Environment variable of processes that start: ``pid start`` of the main process."""

FROM_PARENT = "MMSTREAM_FROM_PARENT"
"""Environment variable of a fork server that starts: JSON for `take_over_from_parent`."""

FREED_BYTES = 31 << 20
"""The most that glibc takes into account is 32 MiB."""

END_S = 5.0
"""Seconds in which processes end after SIGKILL."""

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at whether the main process still runs."""

JOB_SIGNALS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that a terminal or a scheduler sends to all processes of a job. The main process decides
what they mean, and the others follow it."""


def start_fork_server(modules: Iterable[str]) -> None:
    """Start the process that workers are forked from, if it does not run; does not wait for it.

    Args:
        modules: what it imports once for all workers.

    Raises:
        ConfigError: the path of temporary files is too long for a socket.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["mmstream.processes.forkserver_preload", *(name for name in modules if name != "__main__")]
    )
    # Helpers start with the signal mask of this thread. So signals to the process group wait until
    # the server can ignore them, and never end the resource tracker. The latter lifts a part of the
    # mask here, so it is started before.
    try:
        with job_signals_blocked(), without_current_folder():
            resource_tracker.ensure_running()
        with job_signals_blocked(), marked_as_main_process(), _environment(_for_fork_server()):
            forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        raise ConfigError(
            f"TMPDIR: {tempfile.gettempdir()} is too long for the sockets of worker processes; "
            "set it to a shorter path, such as /tmp"
        ) from None


def _forget_fork_server() -> None:
    """Forget the fork server of the parent, in a forked child.

    Python would wait for it as for a child of its own, which is an error.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.close(server._forkserver_alive_fd)
        modules = server._preload_modules
        server.__init__()
        server.set_forkserver_preload(modules)


os.register_at_fork(after_in_child=_forget_fork_server)


def end_fork_server() -> None:
    """End the process that workers are forked from, if it runs; another one starts when needed.

    A thread that waits for a worker from it gets an EOFError. Returns when the process has ended,
    or after `END_S`: as long as it is there, Python starts no other one.
    """
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        with suppress(ChildProcessError):
            while not _is_waitable(pid) and time.monotonic() < deadline:
                time.sleep(0.01)


def _is_waitable(pid: int) -> bool:
    """Tell whether a child has ended with all its threads. Its exit status stays for others.

    A process whose first thread has ended is a zombie in ``/proc``, but others may still end.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Let the processes that start meanwhile begin with `JOB_SIGNALS` blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def main_process_mark() -> dict[str, str]:
    """Return the variable that tells a process that starts which main process it ends with."""
    if MAIN_PROCESS in os.environ:  # this is a worker itself
        return {}
    _, start = process_state(os.getpid())
    return {MAIN_PROCESS: f"{os.getpid()} {start}"}


def marked_as_main_process() -> AbstractContextManager[None]:
    """Tell the processes that start meanwhile that they end with this one."""
    return _environment(main_process_mark())


def without_current_folder() -> AbstractContextManager[None]:
    """Let the Python processes that start meanwhile import nothing from the current folder.

    The variable has no effect under ``python -E``; ``python -P`` does the same there.
    """
    return _environment({"PYTHONSAFEPATH": "1"})


def installed_entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of installed packages, without those in the current folder.

    That may be a downloaded dataset or model, or hold a package that is installed elsewhere, too.
    Of a package that is installed twice, the first in ``sys.path`` counts: it is the one imported.
    """
    packages: dict[str, Distribution] = {}
    for package in distributions():
        if Path(str(package.locate_file(""))).resolve() != Path.cwd():
            packages.setdefault(re.sub(r"[-_.]+", "-", package.name).lower(), package)
    return [
        entry for package in packages.values() for entry in package.entry_points.select(group=group)
    ]


def safe_environment() -> dict[str, str]:
    """Return variables with which a Python process finds mmstream, and not the current folder.

    It finds this mmstream also where it is not installed.
    """
    changes = {"PYTHONSAFEPATH": "1"}
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # else it would hide Python's modules
        paths = [os.environ.get("PYTHONPATH"), str(root)]
        changes["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return changes


def _for_fork_server() -> dict[str, str]:
    """Return the environment in which a fork server starts."""
    changes = safe_environment()
    before = {name: os.environ.get(name) for name in changes}
    sys_path = [os.fspath(path) for path in sys.path]
    return changes | {FROM_PARENT: json.dumps({"sys_path": sys_path, "environment": before})}


def take_over_from_parent() -> None:
    """In a fork server: take over ``sys.path``, and undo what was set for its start."""
    text = os.environ.pop(FROM_PARENT, None)
    if text is not None:
        values = json.loads(text)
        sys.path[:] = values["sys_path"]
        _set_environment(values["environment"])


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change environment variables for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def follow_while_starting() -> None:
    """End with the main process, in a worker that imports the main script now; else do nothing."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        follow_main_process()


def follow_main_process() -> None:
    """Start a thread that ends this process soon after its main process has ended.

    Signals are not for this thread: it starts before a worker has decided about them.
    """
    if MAIN_PROCESS not in os.environ or any(
        thread.name == "mmstream-follow-main" for thread in threading.enumerate()
    ):
        return
    main_process = os.environ[MAIN_PROCESS]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(
            target=_exit_with, args=(main_process,), name="mmstream-follow-main", daemon=True
        ).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_main_process_alive(main_process: str | None = None) -> bool:
    """Tell whether the main process that the environment names still runs.

    A process that ended and whose parent has not noticed it yet counts as ended.
    """
    main_process = main_process or os.environ.get(MAIN_PROCESS)
    if main_process is None:
        return True
    pid, start = main_process.split(" ", 1)
    return is_running(int(pid), start)


def is_running(pid: int, start: str) -> bool:
    """Tell whether the process that began at a start still runs, maybe stopped.

    Args:
        pid: its process id, which another process may have by now.
        start: when it began, as `process_state` says it.
    """
    state, present_start = process_state(pid)
    return state not in ("", "Z", "X") and present_start == start


def _exit_with(main_process: str) -> None:
    while is_main_process_alive(main_process):
        time.sleep(POLL_INTERVAL_S)
    os._exit(1)


@functools.cache  # one call is enough, and the third one would get memory that must be cleared
def keep_freed_memory() -> None:
    """Have glibc use freed memory of batches again, instead of new pages from the system.

    By default it gives long bytes back as they are freed, and new pages cost more than all copies:
    0.6 CPU s/GB. When a block that has pages of its own is freed, glibc gives back only longer ones
    from then on, and only what exceeds twice its length at the end of the heap. This block is never
    touched, so it takes no memory. Other systems are not changed.
    """
    bytes(FREED_BYTES)


def join_parent(environment: dict[str, str]) -> None:
    """Set up a worker process, however it was started.

    The worker takes over the main process' environment, leaves `JOB_SIGNALS` except SIGTERM to it,
    and ends with it:

    - A fork server keeps the environment of its own start. Credentials set since would be missing.
    - A fork server waits for its workers. After a ``kill -9`` of the main process, both would stay
      for ever.

    Args:
        environment: ``dict(os.environ)`` of the main process.
    """
    follow_main_process()  # what it goes by is in the environment of the start
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in JOB_SIGNALS - {signal.SIGINT, signal.SIGTERM}:
        if signal.getsignal(number) is signal.SIG_DFL:  # else the script has a handler of its own
            signal.signal(number, signal.SIG_IGN)


# -- jobs in worker processes ----------------------------------------------------------------------
#
# The workers share nothing. They come from a fork server, so they inherit no threads and no open
# connections from the caller. They end with the main process, however that ends.

Job = TypeVar("Job")

Result = TypeVar("Result")

UNKNOWN = 255
"""The exit code of a worker whose own could not be read, for Python's multiprocessing."""


def run_in_processes(
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    num_workers: int,
    *,
    command: str,
    prepare: Callable[..., object] | None = None,
    prepare_args: tuple[Any, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Do jobs. Yield each job with its result, when it is done.

    Args:
        function: Does one job. It and the jobs are pickled.
        jobs: Taken two for each worker at a time.
        num_workers: Number of processes. 0 or 1: this process does the jobs.
        command: For messages, such as "convert".
        prepare: Called once in each process, before its first job.
        prepare_args: Its arguments. They are pickled once for each process.
        environment: Variables of the workers, beside those of this process.

    Raises:
        MMStreamError: A worker process died.
        Exception: Whatever `function` raises. The other workers are stopped.
    """
    if num_workers <= 1:
        if prepare is not None:
            prepare(*prepare_args)
        yield from ((job, function(job)) for job in jobs)
        return
    earlier_children = set(multiprocessing.active_children())
    workers: list[BaseProcess] = []
    context = multiprocessing.get_context("forkserver")
    start_fork_server([function.__module__])
    variables = {**os.environ, **(environment or {})}
    pool = ProcessPoolExecutor(
        num_workers, context, _start_worker, (variables, prepare, prepare_args)
    )
    try:
        yield from _drain(pool, function, iter(jobs), num_workers, workers)
    except BrokenProcessPool:
        pool.shutdown()  # joins the workers, so that each has an exit code
        raise MMStreamError(
            f"{command}: a worker process {_death(workers)}. Finished shards are kept; "
            f"to continue, run the same command again. In a script, call {command} under "
            "`if __name__ == '__main__':`"
        ) from None
    except BaseException:
        # Ctrl-C, or a job failed: nobody waits for the other workers' results.
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(
    environment: dict[str, str],
    prepare: Callable[..., object] | None,
    prepare_args: tuple[Any, ...],
) -> None:
    join_parent(environment)
    if prepare is not None:
        prepare(*prepare_args)


def _drain(
    pool: ProcessPoolExecutor,
    function: Callable[[Job], Result],
    jobs: Iterator[Job],
    num_workers: int,
    workers: list[BaseProcess],
) -> Iterator[tuple[Job, Result]]:
    # Submit two jobs per worker, not all of them: a job may be large.
    running: dict[Future[Result], Job] = {}
    while True:
        for job in islice(jobs, 2 * num_workers - len(running)):
            running[pool.submit(function, job)] = job
        if len(workers) < num_workers:
            workers[:] = multiprocessing.active_children()
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


def _death(workers: list[BaseProcess]) -> str:
    """Say how the worker ended that died first; the pool ends the others by SIGTERM."""
    by_itself = [
        worker for worker in workers if worker.exitcode not in (None, 0, -signal.SIGTERM, UNKNOWN)
    ]
    if not by_itself:
        return "died (killed, or out of memory)"
    description = words_of_exit(by_itself[0].exitcode or 0)
    hint = ", for lack of memory?" if by_itself[0].exitcode == -signal.SIGKILL else ""
    return f"(pid {by_itself[0].pid}) {description}{hint}"
