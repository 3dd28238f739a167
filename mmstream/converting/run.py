"""Convert's frame around the shards: from a file of rows to one finished dataset for each split.

Every destination is looked at before any is touched. The rest is one list of jobs, so splits share
the processes, and a dataset is finished when all of its shards are committed.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.converting.destination import (
    REJECTS_NAME,
    State,
    begin,
    finish,
    give_up,
    inspect,
)
from mmstream.converting.plan import Options, plan_of, select, shard_name
from mmstream.converting.pool import run_jobs
from mmstream.converting.rows import RowFile, open_rows
from mmstream.converting.shard import ShardJob, ShardReport
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.errors import ConfigError, MMStreamError
from mmstream.storage import Store, is_remote, join_url, open_store

__all__ = ["ConvertReport", "run_conversion"]


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, over all of its datasets."""

    num_rows: int
    num_samples: int
    num_rejects: int
    num_shards: int
    """Shards with samples: those that the manifest names."""
    num_bytes: int
    """Of all tars."""
    num_new_bytes: int
    """Of the tars that this run wrote; the others stood there from an earlier run."""
    seconds: float
    was_finished: bool = False
    """The destination held this conversion already: nothing was done. See `overwrite`."""
    splits: dict[str, ConvertReport] = field(default_factory=dict)
    """The same for each split; empty without splits."""

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6) of tars that this run wrote, per second of the whole run."""
        return self.num_new_bytes / 1e6 / self.seconds if self.seconds > 0 else 0.0


class _Part(NamedTuple):
    """One dataset of a conversion: the whole, or one split."""

    split: str | None
    store: Store
    rows: npt.NDArray[np.int64]
    """int64 [n] 0-based row numbers, in the order of the shards."""
    plan: dict[str, Any]
    state: State


def run_conversion(
    rows: str,
    dest: str,
    media_root: str | None,
    options: Options,
    *,
    num_workers: int,
    overwrite: bool,
    progress: bool,
) -> ConvertReport:
    """Convert; arguments and errors as `mmstream.converting.convert`."""
    begun = time.monotonic()
    if num_workers < 0:
        raise ConfigError(f"num_workers={num_workers}: must be 0 or more")
    store, root = open_store(dest), _media_root(rows, media_root)
    if num_workers > 1 and store.url.startswith("memory://"):
        raise ConfigError(
            f"{dest}: only this process sees what lies in its memory; use num_workers=1"
        )
    command = _command(rows, dest, media_root, options)
    with open_rows(rows) as row_file:
        parts = _parts(store, row_file, options, root, overwrite)
        for part in parts:
            if part.state != "finished":
                begin(part.store, part.state, part.plan, root, command)
        reports = _write(parts, row_file, options, root, num_workers, progress)
    _require_samples(parts, reports, root)
    done: dict[str | None, ConvertReport] = {}
    for part in parts:
        if part.state != "finished":
            finish(part.store, part.plan, reports[part.split])
        done[part.split] = _report(part, reports[part.split], time.monotonic() - begun)
    if options.splits is None:
        return done[None]
    return _total(done, time.monotonic() - begun)


def _media_root(rows: str, media_root: str | None) -> str | None:
    """Return the real path of the media's folder; None beside rows that are remote."""
    if media_root is None:
        return None if is_remote(rows) else os.path.realpath(Path(_local(rows)).parent)
    if is_remote(media_root):
        raise ConfigError(f"media_root={media_root}: must be a local folder; fetch the media first")
    if not Path(_local(media_root)).is_dir():
        raise ConfigError(f"media_root={media_root}: no such folder")
    return os.path.realpath(_local(media_root))


def _local(path: str) -> str:
    return path.removeprefix("file://")


def _parts(
    store: Store, row_file: RowFile, options: Options, root: str | None, overwrite: bool
) -> list[_Part]:
    parts: list[_Part] = []
    for split, rows in select(row_file, options).items():
        there = store if split is None else open_store(join_url(store.url, split))
        folder = there.local_path("")
        if folder is not None and Path(folder).is_file():
            raise ConfigError(f"{there.url}: is a file, not a folder")
        plan = plan_of(row_file, options, split, len(rows))
        parts.append(_Part(split, there, rows, plan, inspect(there, plan, root, overwrite)))
    return parts


def _write(
    parts: list[_Part],
    row_file: RowFile,
    options: Options,
    root: str | None,
    num_workers: int,
    progress: bool,
) -> dict[str | None, list[ShardReport]]:
    """Write all shards; return the reports of each split in shard order."""
    splits = {part.store.url: part.split for part in parts}
    reports: dict[str | None, list[ShardReport]] = {part.split: [] for part in parts}
    todo = [part for part in parts if part.state != "finished"]
    total = sum(len(part.rows) for part in todo)
    jobs = (job for part in todo for job in _jobs(part, row_file, options, root))
    with tqdm(total=total, unit="row", desc="convert", disable=None if progress else True) as bar:
        for url, report in run_jobs(jobs, num_workers):
            reports[splits[url]].append(report)
            bar.update(report.num_rows)
    return {split: sorted(done, key=_shard_order) for split, done in reports.items()}


def _require_samples(
    parts: list[_Part], reports: dict[str | None, list[ShardReport]], root: str | None
) -> None:
    """Refuse to leave a dataset behind that would be empty; its rejects stay."""
    done = any(report.num_samples for split in reports.values() for report in split)
    if done or any(part.state == "finished" for part in parts):
        return
    for part in parts:
        give_up(part.store, part.plan, reports[part.split])
    rejects = [
        (part.store.url_of(REJECTS_NAME), reject)
        for part in parts
        for report in reports[part.split]
        for reject in report.rejects
    ]
    where, first = rejects[0]
    hint = ""
    if first.reason.endswith(("no such file", "media root")):
        hint = f". Media are looked for in {root} (media_root=)"
    elif first.reason.startswith("not JSON"):
        hint = ". Rows are JSON objects, one a line, or one array of them"
    raise MMStreamError(
        f"none of {len(rejects):,} rows became a sample, so no dataset was made; all reasons are "
        f"in {where}, the first: row {first.row}: {first.reason}{hint}"
    )


def _shard_order(report: ShardReport) -> tuple[int, str]:
    return len(report.name), report.name  # a million shards later names grow longer


def _jobs(part: _Part, row_file: RowFile, options: Options, root: str | None) -> Iterator[ShardJob]:
    size = options.samples_per_shard
    for i, start in enumerate(range(0, len(part.rows), size)):
        rows = row_file.select(part.rows[start : start + size])
        yield ShardJob(part.store, shard_name(i), rows, root, options.format, options.captions)


def _report(part: _Part, reports: list[ShardReport], seconds: float) -> ConvertReport:
    manifest = Manifest.from_bytes(part.store.read(MANIFEST_NAME))
    return ConvertReport(
        num_rows=len(part.rows),
        num_samples=manifest.num_samples,
        num_rejects=manifest.source["num_rejects"],
        num_shards=len(manifest.shards),
        num_bytes=manifest.num_bytes,
        num_new_bytes=sum(report.num_bytes for report in reports if not report.reused),
        seconds=seconds,
        was_finished=part.state == "finished",
    )


def _total(done: dict[str | None, ConvertReport], seconds: float) -> ConvertReport:
    sums: Counter[str] = Counter()
    for report in done.values():
        sums.update({f.name: getattr(report, f.name) for f in fields(report) if f.type == "int"})
    splits = {split: report for split, report in done.items() if split is not None}
    finished = all(report.was_finished for report in done.values())
    return ConvertReport(**sums, seconds=seconds, was_finished=finished, splits=splits)


def _command(rows: str, dest: str, media_root: str | None, options: Options) -> str:
    """Return the command line that goes on with this conversion."""
    words = ["mmstream", "convert", rows, dest]
    words += ["--media-root", media_root] if media_root is not None else []
    words += ["--samples-per-shard", str(options.samples_per_shard)]
    words += ["--format", options.format] if options.format else []
    words += ["--captions", options.captions] if options.captions != "all" else []
    words += (
        ["--shuffle-seed", str(options.shuffle_seed)] if options.shuffle_seed is not None else []
    )
    if options.splits:
        words += ["--split", ",".join(f"{name}={fraction!r}" for name, fraction in options.splits)]
    return shlex.join(words)
