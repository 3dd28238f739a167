"""The runs of `tools.bench.storage`: each row in a new process, behind the proxy."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.http_fault_proxy import Counts, FaultProxy
from tools.bench.peers import environments
from tools.bench.peers.runners.stored import LATE
from tools.bench.process_tree import PeakMemory
from tools.bench.storage.corpus import Bucket
from tools.bench.storage.rows import Row
from tools.bench.storage.scenarios import Scenario
from tools.s3_server import Server

__all__ = ["Bench", "Run", "figures_of"]

START_TIMEOUT_S = 120
"""For imports and the first batch. HF datasets asks for each of 1,000 shards before it."""

AWAY_AFTER_S = 3.0


@dataclass(frozen=True)
class Run:
    """The figures of one run. Times are in seconds from when all workers are up."""

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
    """GETs for 10^9 bytes that were sent."""
    read_per_used: float
    """Bytes that were sent, read ahead included, to those of delivered samples."""
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
    ) -> None:
        self.proxy, self.bucket = proxy, Bucket(server)
        self.sample_bytes, self.shard_bytes = sample_bytes, shard_bytes
        self._variables = {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        self._folder, self._cache = folder, cache
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
            own = self._folder / prefix
            own.mkdir()
            words = [str(self._folder / "tars"), str(own), str(num_names)]
            names = self._call(row, ["prepare", *words], timeout_s=600)[0]["names"]
            self.bucket.upload(own, prefix)
        tars = {path.name for path in (self._folder / "tars").iterdir()}
        self.bucket.add_names(
            prefix,
            ((n, f"originals/{t}" if t in tars else f"{prefix}/{t}") for n, t in names.items()),
        )
        self.proxy.alias(self.bucket.aliases)

    def run(self, row: Row, scenario: Scenario, num_names: int, **more: Any) -> Run:
        """Run a row once and return its figures."""
        self.prepare(row, num_names)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            settings: dict[str, Any] = {
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
            with _away(self.proxy, scenario.away_s, Path(scratch), settings):
                timeout_s = settings["seconds"] + scenario.away_s + START_TIMEOUT_S
                try:
                    figures, peak = self._call(row, ["run", json.dumps(settings)], timeout_s)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    return _failed(str(error), self.proxy.counts())
            counts = self.proxy.counts()
        return figures_of(row, figures, counts, peak, self.sample_bytes)

    def _prefix(self, row: Row, num_names: int) -> str:
        return f"{row.prefix}-{num_names}"

    def _local(self, row: Row) -> Path:
        """Return a local folder with the eight tars, indexed for a row."""
        folder = self._folder / f"local-{row.prefix}"
        if not folder.exists():
            folder.mkdir()
            words = [str(self._folder / "tars"), str(folder), "8"]
            names = self._call(row, ["prepare", *words], timeout_s=600)[0]["names"]
            for name, target in names.items():
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
            if row.checkout is not None:  # its package alone, and the tools of this version
                Path(scratch, "mmstream").symlink_to(row.checkout.resolve() / "mmstream")
                variables["PYTHONPATH"] = f"{scratch}{os.pathsep}{variables['PYTHONPATH']}"
            process = subprocess.Popen(
                [python, "-m", module, *row.words, *words],
                env={**variables, "TMPDIR": scratch, "HF_HOME": scratch},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=scratch,
                start_new_session=True,
            )
            try:
                with PeakMemory(process.pid) as peak:
                    out, errors = process.communicate(timeout=timeout_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise RuntimeError(f"{row.name}: exit {process.returncode}\n{errors[-2500:]}")
        return json.loads(out.splitlines()[-1]), peak.num_bytes


def figures_of(
    row: Row, figures: dict[str, Any], counts: Counts, peak: int, sample_bytes: int
) -> Run:
    """Return the figures of a run.

    Args:
        row: Which row it is of.
        figures: What its runner printed.
        counts: What the proxy did.
        peak: Memory of the run.
        sample_bytes: Mean size of a sample.
    """
    per_unit = 1 if row.kind == "client" else sample_bytes
    arrivals, waits, sizes = figures["arrivals"], figures["waits"], figures["counts"]
    if len(arrivals) < 3:
        return _failed(f"{len(arrivals)} batches in the time of the run", counts, arrivals)
    begin = LATE * arrivals[-1]
    late = [index for index, moment in enumerate(arrivals) if moment > begin] or [0]
    num_late = sum(sizes[index] for index in late[1:])
    seconds = arrivals[-1] - arrivals[late[0]] or 1e-9
    late_waits = sorted(waits[index] for index in late[1:]) or [0.0]
    cpu = [entry for entry in figures["cpu"] if entry[0] >= begin]
    cpu_s, num_cpu = cpu[-1][1] - cpu[0][1], cpu[-1][2] - cpu[0][2]
    used = sum(sizes) * per_unit
    return Run(
        late=num_late / seconds * per_unit / sample_bytes,
        first={n: arrivals[n - 1] for n in (1, 10, 100) if len(arrivals) >= n},
        wait_p50=statistics.median(late_waits),
        wait_p99=late_waits[min(len(late_waits) - 1, int(0.99 * len(late_waits)))],
        longest_s=max(waits[1:]),
        cpu_s_per_gb=cpu_s / max(num_cpu * per_unit / 1e9, 1e-9),
        gets_per_gb=counts.num_gets / max(counts.num_bytes / 1e9, 1e-9),
        read_per_used=counts.num_bytes / used,
        max_in_flight=counts.max_in_flight,
        num_connections=counts.num_connections,
        peak_bytes=peak,
        faults=sum(counts.faults.values()),
        stats=figures.get("stats", {}),
    )


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


def _failed(error: str, counts: Counts, arrivals: list[float] | None = None) -> Run:
    first = {number: moment for number, moment in enumerate(arrivals or [], 1) if number == 1}
    return Run(
        late=0.0,
        first=first,
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
