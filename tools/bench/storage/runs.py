"""The runs of `tools.bench.storage`: each row in a new process, behind the proxy."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.http_fault_proxy import Counts, FaultProxy, Faults
from tools.bench.peers import environments
from tools.bench.peers.runners import stored
from tools.bench.peers.runners.stored import LATE
from tools.bench.process_tree import PeakMemory
from tools.bench.storage.corpus import NUM_TARS, Bucket
from tools.bench.storage.rows import Row
from tools.bench.storage.scenarios import Scenario
from tools.s3_server import Server

__all__ = ["Bench", "Run", "copy_with_defaults", "figures_of"]

IMPORT_TIMEOUT_S = 60
"""For a runner's imports. What comes after them is bounded by the runner itself."""

AWAY_AFTER_S = 3.0

FOLDERS = ("TMPDIR", "HF_HOME", "ENERGON_LOCAL_COPY_TMP_DIR")
"""Environment variables of the folders in which loaders keep files: each run begins without."""

Moment = tuple[float, Counts]
"""A time, and what the proxy had done until then."""


@dataclass(frozen=True)
class Run:
    """The figures of one run. Times are in seconds from when all workers are up."""

    start_s: float | None
    """From the call that opens the data to when all workers are up. None: they never were."""
    seconds: float
    """How long the run was; without workers from the start."""
    late: float
    """Samples a second in the late part; ranges of a raw client count by their bytes."""
    first: dict[int, float]
    """Number of a batch -> when it came."""
    wait_p50: float
    wait_p99: float
    """Of the late part."""
    longest_s: float
    """The longest wait after the first batch."""
    cpu_s_per_gb: float
    """Of the late part, all processes of the row."""
    gets_per_gb: float
    """GETs for 10^9 bytes that were sent, in the late part."""
    read_per_used: float
    """Bytes that were sent to those of delivered samples, in the late part."""
    max_in_flight: int
    num_connections: int
    peak_bytes: int
    faults: int
    stats: dict[str, Any]
    error: str = ""


class Bench:
    """A server with all corpora, a proxy before it, and how a row is run there."""

    def __init__(
        self,
        server: Server,
        proxy: FaultProxy,
        folder: Path,
        sample_bytes: int,
        shard_bytes: int,
        cache: Path,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.proxy, self.bucket = proxy, Bucket(server)
        self.sample_bytes, self.shard_bytes = sample_bytes, shard_bytes
        self._variables = {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        self._folder, self._cache = folder, cache
        self.start_timeout_s = start_timeout_s
        self._prepared: set[tuple[str, int]] = set()
        self.bucket.upload(folder / "tars", "originals")
        proxy.hold()

    def prepare(self, row: Row, num_names: int) -> None:
        """Upload what a row needs for a corpus of so many shards, if it is not there yet."""
        prefix = self._prefix(row, num_names)
        if (prefix, num_names) in self._prepared:
            return
        self._prepared.add((prefix, num_names))
        names = {f"shard-{n:06d}.tar": f"tar-{n % 8}.tar" for n in range(num_names)}
        if row.prefix != "tars":
            own, names = self._files(row, num_names)
            self.bucket.upload(own, prefix)
        tars = {path.name for path in (self._folder / "tars").iterdir()}
        objects = {n: f"originals/{t}" if t in tars else f"{prefix}/{t}" for n, t in names.items()}
        self.bucket.add_names(prefix, objects.items())
        self.proxy.alias(self.bucket.aliases)
        self._warm(objects.values())

    def _files(self, row: Row, num_names: int) -> tuple[Path, dict[str, str]]:
        """Return the folder of what a row needs, and the further names of its files.

        The formats of other loaders are kept from run to run: to write them takes a minute.
        """
        if row.kind == "mmstream":
            own = self._folder / self._prefix(row, num_names)
            own.mkdir(exist_ok=True)
        else:
            own = self._cache / "prepared" / f"{self._prefix(row, num_names)}-{self._digest(row)}"
        listed = own.with_name(f"{own.name}.json")
        if not listed.exists():
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            words = [str(self._folder / "tars"), str(own), str(num_names)]
            names = self._call(row, ["prepare", *words], timeout_s=900)[0]["names"]
            listed.write_text(json.dumps(names))
        return own, json.loads(listed.read_text())

    def _digest(self, row: Row) -> str:
        """Return a name for the tars, a runner and the versions of its loader."""
        digest = hashlib.sha256()
        paths = [
            *sorted((self._folder / "tars").iterdir()),
            Path(stored.__file__).with_name(f"stored_{row.runner}.py"),
            environments.PINS / f"{row.environment}.txt",
        ]
        for path in paths:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:12]

    def _warm(self, objects: Iterable[str]) -> None:
        """Let the proxy read objects into its memory."""
        self.proxy.set(Faults())
        for name in sorted(set(objects)):
            connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port)
            with closing(connection):
                connection.request("HEAD", f"/{self.bucket.name}/{name}")
                connection.getresponse().read()

    def run(self, row: Row, scenario: Scenario, num_names: int, **more: Any) -> Run:
        """Run a row once and return its figures."""
        self.prepare(row, num_names)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            settings: dict[str, Any] = {
                "start_timeout_s": self.start_timeout_s,
                "bucket": self.bucket.name,
                "prefix": self._prefix(row, num_names),
                "num_names": num_names,
                "scratch": scratch,
                **row.settings,
                **more,
            }
            if settings.get("local"):
                settings["local"] = str(self._local(row))
            arguments = dict(row.arguments)
            if row.kind == "client":
                arguments["shard_bytes"] = self.shard_bytes
            settings["arguments"] = list(arguments.items())
            self.proxy.set(scenario.faults)
            self.proxy.reset_counts()
            moments: list[Moment] = []
            with _away(self.proxy, scenario.away_s, Path(scratch), settings), self._watch(moments):
                timeout_s = settings["start_timeout_s"] + settings["seconds"] + IMPORT_TIMEOUT_S
                try:
                    figures, peak = self._call(row, ["run", json.dumps(settings)], timeout_s)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    return _failed(str(error), self.proxy.counts())
            self.proxy.set(Faults())
        return figures_of(row, figures, moments, peak, self.sample_bytes)

    @contextmanager
    def _watch(self, moments: list[Moment]) -> Iterator[None]:
        """Ask again and again what the proxy did so far."""
        ended = threading.Event()

        def watch() -> None:
            is_over = False
            while not is_over:
                is_over = ended.wait(0.2)
                moments.append((time.monotonic(), self.proxy.counts()))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _prefix(self, row: Row, num_names: int) -> str:
        return f"{row.prefix}-{num_names}"

    def _local(self, row: Row) -> Path:
        """Return a local folder with the eight tars, indexed for a row."""
        folder = self._folder / f"local-{row.prefix}"
        if not folder.exists():
            own, names = self._files(row, NUM_TARS)
            shutil.copytree(own, folder)
            for name, target in names.items():
                if not (folder / name).exists():
                    os.link(self._folder / "tars" / target, folder / name)
        return folder

    def _call(self, row: Row, words: list[str], timeout_s: float) -> tuple[dict[str, Any], int]:
        """Run a runner's command; return its figures and its peak memory."""
        python = sys.executable
        if row.environment is not None:
            python = str(environments.peer_python(row.environment, self._cache))
        module = f"{environments.RUNNERS}.stored_{row.runner}"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            variables = {**environments.process_variables(), **self._variables}
            package = (row.checkout or environments.ROOT).resolve() / "mmstream"
            if row.limits:
                changes = {"storage/transfer_limits.py": row.limits}
                copy_with_defaults(package, Path(scratch, "mmstream"), changes)
            elif row.checkout is not None:
                Path(scratch, "mmstream").symlink_to(package)
            if row.limits or row.checkout is not None:  # that package, and the tools of this one
                variables["PYTHONPATH"] = f"{scratch}{os.pathsep}{variables['PYTHONPATH']}"
            with (
                Path(scratch, "out").open("w+") as out,
                Path(scratch, "errors").open("w+") as errors,
            ):
                process = subprocess.Popen(
                    [python, "-m", module, *row.words, *words],
                    env={**variables, **dict.fromkeys(FOLDERS, scratch)},
                    stdout=out,  # no pipe: workers that outlive the runner would hold it open
                    stderr=errors,
                    cwd=scratch,
                    start_new_session=True,
                )
                try:
                    with PeakMemory(process.pid) as peak:
                        process.wait(timeout=timeout_s)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                out.seek(0)
                errors.seek(0)
                lines, message = out.read().splitlines(), errors.read()[-2500:]
        if process.returncode:
            raise RuntimeError(f"{row.name}: exit {process.returncode}\n{message}")
        return json.loads(lines[-1]), peak.num_bytes


def figures_of(
    row: Row, figures: dict[str, Any], moments: list[Moment], peak: int, sample_bytes: int
) -> Run:
    """Return the figures of a run.

    Args:
        row: Which row it is of.
        figures: What its runner printed.
        moments: What the proxy had done at moments of the run, the last one at its end.
        peak: Memory of the run.
        sample_bytes: Mean size of a sample.
    """
    per_unit = 1 if row.kind == "client" else sample_bytes
    arrivals, waits, sizes = figures["arrivals"], figures["waits"], figures["counts"]
    ended, counts = figures["ended"], moments[-1][1]
    begin = LATE * ended
    late = [index for index, moment in enumerate(arrivals) if moment > begin]
    num_late = sum(sizes[index] for index in late[1:])
    seconds = ended - arrivals[late[0]] if late else 0.0
    pending = [] if figures["pending_s"] is None else [figures["pending_s"]]
    late_waits = sorted([*(waits[index] for index in late[1:]), *pending]) or [0.0]
    cpu = [entry for entry in figures["cpu"] if entry[0] >= begin]
    cpu_s, num_cpu = cpu[-1][1] - cpu[0][1], cpu[-1][2] - cpu[0][2]
    spans = [entry for entry in moments if begin <= entry[0] - figures["began"] <= ended]
    num_gets = num_bytes = used = 0
    if len(spans) > 1:
        (first, before), (last, after) = spans[0], spans[-1]
        num_gets = after.num_gets - before.num_gets
        num_bytes = after.num_bytes - before.num_bytes
        times = (
            (moment + figures["began"], size) for moment, size in zip(arrivals, sizes, strict=True)
        )
        used = per_unit * sum(size for moment, size in times if first < moment <= last)
    return Run(
        start_s=figures["start_s"],
        seconds=ended,
        late=num_late / seconds * per_unit / sample_bytes if seconds else 0.0,
        first={n: arrivals[n - 1] for n in (1, 10, 100) if len(arrivals) >= n},
        wait_p50=statistics.median(late_waits),
        wait_p99=late_waits[min(len(late_waits) - 1, int(0.99 * len(late_waits)))],
        longest_s=max([*waits[1:], *pending], default=0.0),
        cpu_s_per_gb=cpu_s / (num_cpu * per_unit / 1e9) if num_cpu else 0.0,
        gets_per_gb=num_gets / (num_bytes / 1e9) if num_bytes else 0.0,
        read_per_used=num_bytes / used if used else 0.0,
        max_in_flight=counts.max_in_flight,
        num_connections=counts.num_connections,
        peak_bytes=peak,
        faults=sum(counts.faults.values()),
        stats=figures.get("stats", {}),
    )


def copy_with_defaults(package: Path, target: Path, changes: dict[str, dict[str, float]]) -> None:
    """Copy a version of mmstream, with other numbers in some of its modules.

    Args:
        package: The folder of the version.
        target: The new folder.
        changes: Path of a module in the package -> names at the start of its lines -> numbers.
    """
    shutil.copytree(package, target)
    for path, numbers in changes.items():
        text = (target / path).read_text()
        for name, number in numbers.items():
            pattern = rf"(?m)^( *{name}(?:: \w+)? =) .*$"
            text, num_changed = re.subn(pattern, rf"\1 {number}", text)
            if num_changed != 1:
                raise RuntimeError(f"{path} has no number {name}")
        (target / path).write_text(text)


@contextmanager
def _away(
    proxy: FaultProxy, away_s: float, scratch: Path, settings: dict[str, Any]
) -> Iterator[None]:
    """Take the server away for some seconds, once all workers are up."""
    ended = threading.Event()

    def watch() -> None:
        num_workers = settings.get("num_workers", 2)
        while len(list(scratch.glob("up-*"))) < num_workers:
            if ended.wait(0.1):
                return
        if not ended.wait(AWAY_AFTER_S):
            proxy.go_away()
            ended.wait(away_s)
            proxy.come_back()

    thread = threading.Thread(target=watch, daemon=True)
    if away_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if away_s:
            thread.join()
            time.sleep(0.1)


def _failed(error: str, counts: Counts) -> Run:
    return Run(
        start_s=None,
        seconds=0.0,
        late=0.0,
        first={},
        wait_p50=0.0,
        wait_p99=0.0,
        longest_s=0.0,
        cpu_s_per_gb=0.0,
        gets_per_gb=0.0,
        read_per_used=0.0,
        max_in_flight=counts.max_in_flight,
        num_connections=counts.num_connections,
        peak_bytes=0,
        faults=sum(counts.faults.values()),
        stats={},
        error=error,
    )
