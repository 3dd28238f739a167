"""`mm.convert`: from a file of rows to one finished dataset for each split.

    rows -> COLUMNS -> PLAN -> shards, by worker processes -> manifest

All destinations are checked before anything is written, and so are columns that the caller maps:
some row must have them. A misspelled name would otherwise lose a column of all rows in silence. The
shards of all splits are one list of jobs, so the splits share the worker processes. A dataset gets
its manifest when all of its shards are written.

`mm.finalize`: from the shards of several ranges to one finished dataset.

    ranges of shards, on any machines -> FINALIZE -> rejects, index, manifest

It needs neither rows nor media. The marker at the destination has the plan, and so tells how many
shards there must be. The report of each shard says what its files are.

`dry_run`: what the first rows would become, without a destination: `mmstream convert --dry-run N`.
The rows are converted as always, to the memory of this process and with one row in a shard. So what
is shown is what a conversion would write.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mmstream.converting.media.references import MediaAccess, folder_stamp, require_prefixes
from mmstream.converting.options import (
    GROUPS,
    DownloadOptions,
    Duplicates,
    MediaOptions,
    Options,
    Rerun,
    RowReading,
    Splitting,
)
from mmstream.converting.outputs import (
    Output,
    Work,
    begin_output,
    finish_output,
    give_up,
    jobs_of,
    lock_all,
    locked_outputs,
    mark_duplicates,
    num_ranks,
    shards_of,
    warn_of_leaks,
)
from mmstream.converting.plan import num_rows_of, num_shards, shard_name
from mmstream.converting.report import (
    REJECTS_NAME,
    REPORTS,
    CorpusReport,
    Reject,
    RowCounts,
    all_rejects,
    group_rejects,
    joined_groups,
    read_report,
    read_shard_report,
    rejects_name,
    report_name,
    total_counts,
)
from mmstream.converting.rows.open import Rows, file_names, input_urls, media_folder, open_rows
from mmstream.converting.rows.records import RowSource, SampleSource
from mmstream.converting.shard import (
    EngineName,
    ShardJob,
    ShardReport,
    files_of,
    write_shards,
)
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, read_json
from mmstream.dataset.open import open_dataset
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.settings import (
    AnyInt,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    checked,
    refuse_broken,
)
from mmstream.storage import Store, is_remote, join_url, open_store, require_shared
from mmstream.storage.store import local_path, map_requests, require_no_secret, require_two_slashes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class ConvertReport(CorpusReport):
    """What a conversion did. With splits, the numbers are sums over all of them.

    After an append, they are about the appended rows alone.

    Attributes:
        num_rows: Rows of the file.
        num_samples: Samples in the shards.
        num_rejects: Rows that became no sample. ``rejects.jsonl`` says why.
        num_shards: Shards that hold samples, as the manifest lists them.
        num_bytes: Size of all tars.
        num_new_bytes: Size of the tars that this call wrote. An earlier, interrupted call wrote the
            others.
        seconds: Wall time of this call.
        num_repaired: Shards of an earlier call whose files were missing, or had another length or
            (with `check`) another content. This call wrote them again.
        was_finished: True: the destination held this conversion already. Nothing was written,
            except for the shards of `num_repaired`.
        formats: {format: rows that were read as it}.
        unread_keys: {key that nothing read: rows that have it}. The ``json`` of a sample keeps
            these keys.
        media: {extension: media files of this type, and their bytes}.
        reject_kinds: Rejected rows by their reason, the most frequent first, with an example each.
        num_left_out: Those of `num_rejects` that are not faults: blank lines, rows for which a
            function of yours returned None, and those that an append found in the dataset already.
        num_retried: Rejected rows that this call tried again, with `retry_rejects`.
        num_recovered: Those of `num_retried` that became samples.
        num_pairs: {kind: pairs in ``duplicates.jsonl``}, if this call looked for duplicates.
        num_dropped: Samples that epochs leave out as duplicates, if this call looked for them.
        splits: The report of each split. Empty without splits.
    """

    num_new_bytes: int = 0
    seconds: float = 0.0
    num_repaired: int = 0
    was_finished: bool = False
    num_retried: int = 0
    num_recovered: int = 0
    num_pairs: dict[str, int] = field(default_factory=dict)
    num_dropped: int = 0
    splits: dict[str, ConvertReport] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ConvertReport: {self.summary()}>"

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6 bytes) of tars that this call wrote per second."""
        return self.num_new_bytes / 1e6 / self.seconds if self.seconds > 0 else 0.0

    def has_more_rejects_than(self, limit: float) -> bool:
        """Tell whether more rows were rejected than a limit allows.

        Blank lines, and rows that a function of yours left out, do not count.

        Args:
            limit: A fraction of all rows (a float from 0 to 1), or a number of rows (an int).
        """
        num_rejects = self.num_rejects - self.num_left_out
        return num_rejects > (limit * self.num_rows if isinstance(limit, float) else limit)

    def summary(self) -> str:
        """Return one line: what became of the rows."""
        left_out = (
            f" ({self.num_left_out:,} of them blank lines, left out by your function, or known "
            "already)"
        )
        return (
            f"{count_text(self.num_rows, 'row')} -> {count_text(self.num_samples, 'sample')} in "
            f"{count_text(self.num_shards, 'shard')}, {self.num_rejects:,} rejected"
            f"{left_out if self.num_left_out else ''}"
        )


_ADVICE = {
    field.name: f"write {argument}=mm.{group.__name__}({field.name}=...)"
    for argument, group in GROUPS.items()
    for field in fields(group)
}
"""Settings that are flags of the command line."""
_ADVICE |= {argument: f"pass mm.{group.__name__}(...)" for argument, group in GROUPS.items()}
_ADVICE |= {
    "shard_range": "give the first shard, from 0, and the one after the last",
    "allow_urls": "give a list of URL prefixes, such as ['s3://bucket/photos/']",
    "max_rejects": "give a fraction from 0.0 to 1.0, or a number of rows",
}


@checked(_ADVICE, own=("rows",))
def convert(
    rows: Rows,
    dest: str | os.PathLike[str],
    *,
    media_root: str | os.PathLike[str] | None = None,
    samples_per_shard: PositiveInt = 5000,
    num_workers: NonNegativeInt | None = None,
    row: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    reading: RowReading | None = None,
    shuffle_seed: AnyInt | None = None,
    splitting: Splitting | None = None,
    media: MediaOptions | None = None,
    downloads: DownloadOptions | None = None,
    allow_urls: Sequence[str] = (),
    duplicates: Duplicates | None = None,
    sidecar: bool = True,
    engine: EngineName = "processes",
    shard_range: tuple[NonNegativeInt, PositiveInt] | None = None,
    rerun: Rerun | None = None,
    max_rejects: NonNegativeFloat = 0.01,
    progress: bool = True,
) -> ConvertReport:
    """Convert a file of rows and its media files to tar shards.

    Each row becomes one sample, or several with ``RowReading(captions="each")``. A row that cannot
    be used becomes a line of ``rejects.jsonl``, with the reason.

    To continue an interrupted conversion, make the same call again. The shards that were written
    are kept. For a finished conversion, the same call compares the sizes of all shards with the
    manifest. It writes those again that are missing or damaged, and nothing else.

    The shards are the same bytes on every run and for every `num_workers`. A worker holds one
    sample in memory. With `shuffle_seed` or `splitting`, the main process holds some numbers per
    row; otherwise its memory does not depend on the number of rows or rejects.

    Args:
        rows: Where the rows are: a path, URL or pattern, a list of them, or ``-`` for standard
            input. Or the rows themselves: any iterable of dicts. The page on rows and media lists
            what they may lie in.
        dest: A local folder, or a URL prefix such as ``s3://bucket/corpus``.
        media_root: Folder that the rows' media paths are relative to, or a URL prefix such as
            ``s3://bucket/media``. Paths that lead out of it are rejected. Default: the folder of
            `rows`; the current one for rows from Python.
        samples_per_shard: Rows per shard. A shard with rejected rows has fewer samples; the next
            shard still starts at the same row.
        num_workers: Worker processes, by default 1. With 0 or 1, this process does the work. With
            Ray: tasks at a time, by default two for each CPU of the cluster.
        row: Your function from a row to a row of any known format. It returns None to leave a row
            out, which does not count against `max_rejects`. Workers import it by its name. If it
            raises, the row is rejected; a bug, such as a NameError, stops the conversion.
        reading: How rows are read, and what they mean. Default: `RowReading()`, which goes by their
            content.
        shuffle_seed: Shuffle the rows with this seed before they are cut into shards. Useful when
            the rows are sorted, for example by class. Default: keep the order of the file.
        splitting: Which rows go to which split. Default: one dataset, unless the rows come in
            splits already.
        media: Checks of media files, and how images are made smaller or encoded again. Default:
            `MediaOptions()`, which reads headers and changes nothing.
        downloads: Limits of the downloads, for media that rows name by http(s) URLs. They are not
            in the plan: an interrupted conversion may go on with others. Default:
            `DownloadOptions()`.
        allow_urls: URL prefixes outside `media_root` that rows may name, such as
            ``"s3://bucket/photos/"``. They are read with your credentials.
        duplicates: Which duplicates to look for at the end. Default: none.
        sidecar: Write a Parquet file beside each shard, ``shard-000000.parquet``, that says what
            the shard holds: keys, rows, sizes, hashes, rejects.
        engine: "processes" of this machine, or "ray": tasks of a Ray cluster, one for each shard.
        shard_range: Write only the shards from the first number up to, but not including, the
            second. They are counted from 0 over all splits in order. Other machines may write other
            ranges at the same time. Then `finalize` turns them into a dataset.
        rerun: How to treat an earlier conversion at `dest`. Default: `Rerun()`, which continues it.
        max_rejects: How many rejected rows bring no warning: a fraction of all rows (a float from
            0 to 1), or a number of rows (an int). Beyond that a warning is logged, and the dataset
            is still completed. `ConvertReport.has_more_rejects_than` checks for it.
        progress: Show a progress bar (on a terminal only).

    Several ranks of one job (``WORLD_SIZE`` above 1) may call it with the same arguments. The first
    one writes. The others wait, with a line of the log each minute, and return the report of the
    finished dataset, without counts of duplicates. If the first one fails, one of them goes on.

    Returns:
        Counts, bytes and time of the conversion.

    Raises:
        ConfigError: The options are impossible, there are no rows, a JSON array cannot be parsed,
            `dest` holds something else, or another process writes there. Nothing was written.
        FileNotFoundError: There is no such file of rows.
        StorageError: Storage failed after retries.
        MMStreamError: No row became a sample (see ``rejects.jsonl``), a worker process died, or the
            file of rows changed during the conversion.

    Examples:
        The rows have the keys "image" and "text". The images lie in the folder media/.

        >>> report = mm.convert("rows.jsonl", "photos/", media_root="media/", progress=False)
        >>> report.num_samples, report.num_rejects
        (480, 0)
        >>> len(mm.open_dataset("photos/"))
        480
    """
    options = Options(
        samples_per_shard=samples_per_shard,
        reading=RowReading() if reading is None else reading,
        row=row,
        shuffle_seed=shuffle_seed,
        splitting=splitting,
        media=MediaOptions() if media is None else media,
        sidecar=sidecar,
        duplicates=Duplicates() if duplicates is None else duplicates,
    )
    dest = os.fspath(dest)
    media_root = None if media_root is None else os.fspath(media_root)
    for url in (*(file_names(rows) or []), dest, media_root or ""):
        require_no_secret(url)
        require_two_slashes(url)
    check_max_rejects(max_rejects)
    if shard_range is not None and file_names(rows) in (None, ["-"]):
        raise ConfigError(
            "shard_range: each range reads the rows again; write them to a file for it"
        )
    work = Work(Rerun() if rerun is None else rerun, shard_range)
    _require_one_process(work.rerun)
    root = _media_folder(rows, media_root)
    require_shared([dest], 2 if engine == "ray" else num_workers or 0)
    if engine == "ray" or (num_workers or 0) > 1:
        options.format.require_portable()
    access = MediaAccess(
        root,
        require_prefixes(allow_urls),
        DownloadOptions() if downloads is None else downloads,
        num_processes=max(1, num_workers or 1),
        root_stamp=None if root is None or is_remote(root) else folder_stamp(root),
    )
    rows_root = root if media_root is None else None
    run_length = samples_per_shard if shuffle_seed is None else 1
    with open_rows(rows, options.reading, rows_root, run_length) as source:
        report = _converted(
            open_store(dest),
            source,
            input_urls(rows),
            options,
            access,
            work,
            partial(write_shards, engine=engine, num_workers=num_workers),
            progress,
        )
    if shard_range is None:
        _warn_of_rejects(report, max_rejects, dest)
    logger.info(
        "%s: %d rows, %d samples in %d shards, %d rejects, %.1f MB/s",
        dest,
        report.num_rows,
        report.num_samples,
        report.num_shards,
        report.num_rejects,
        report.mb_per_s,
    )
    return report


def _converted(
    store: Store,
    source: RowSource,
    rows_urls: Sequence[str],
    options: Options,
    access: MediaAccess,
    work: Work,
    run_jobs: Callable[[Iterable[ShardJob]], Iterator[tuple[str, ShardReport]]],
    progress: bool,
) -> ConvertReport:
    """Write the datasets of a conversion, or those of their shards that `work` names."""
    started = time.monotonic()
    if isinstance(source, SampleSource):
        _refuse_options_of_rows(options)
        if num_left_out := source.left_out.size:
            logger.warning("%s: %d samples on its bad list are left out", source.name, num_left_out)
    require_columns(source, options.format.columns)
    with ExitStack() as locks:
        outputs = locked_outputs(store, rows_urls, source, options, access.root, work, locks)
        for output in outputs:
            begin_output(output, access.root)
        shard_reports = _write_shards(outputs, source, options, access, run_jobs, progress)
        report = _finish(outputs, shard_reports, access.root, progress, started)
    warn_of_leaks(outputs, progress)
    return report


def _finish(
    outputs: list[Output],
    shard_reports: dict[str | None, list[ShardReport]],
    root: str | None,
    progress: bool,
    started: float,
) -> ConvertReport:
    """Make datasets of shards, unless they are a range, and return what this call did."""
    num_pairs: dict[str, int] = {}
    num_dropped = 0
    if outputs[0].work.shard_range is None:
        _require_samples(outputs, shard_reports, root)
        num_pairs, num_dropped = mark_duplicates(outputs, shard_reports, progress)
    reports: dict[str | None, ConvertReport] = {}
    for output in outputs:
        shards, seconds = shard_reports[output.split], time.monotonic() - started
        if output.known is not None:  # where nothing is new, the rejects go when it finishes
            reports[output.split] = _report_of_append(output.store, shards, seconds)
        finish_output(output, shards)
        if output.known is None:
            seconds = time.monotonic() - started
            reports[output.split] = _report_of(output, shards, seconds)
    report = reports[None] if None in reports else _total_of(reports, started)
    return replace(report, num_pairs=num_pairs, num_dropped=num_dropped)


def _require_one_process(rerun: Rerun) -> None:
    """Refuse to replace a dataset in a job of several ranks."""
    names = [name for name in ("overwrite", "retry_rejects", "append") if getattr(rerun, name)]
    if num_ranks() > 1 and names:
        raise ConfigError(
            f"{names[0]}=True in a job of {num_ranks()} ranks (WORLD_SIZE): a later rank would "
            "replace what others read already; convert before torchrun"
        )


def _refuse_options_of_rows(options: Options) -> None:
    """Refuse options that say how a row becomes a sample, where the rows are samples already."""
    row_format, reading = options.format, options.reading
    row_options = {
        f"encoding={reading.encoding!r}": reading.encoding,
        f"captions={reading.captions!r}": reading.captions != "all",
        "columns": row_format.columns,
        f"format={row_format.name!r}": row_format.name,
        "row": row_format.function,
        "dataset_info": row_format.dataset_info,
        "group_spans=True": reading.group_spans,
    }
    effect = "has no effect on tars of samples, whose fields stay as they are; leave it out"
    refuse_broken(*((is_given, f"{name}: {effect}") for name, is_given in row_options.items()))


def _media_folder(rows: Rows, media_root: str | None) -> str | None:
    """Return the real path of the media's folder, or its URL prefix.

    None: the rows are remote, and no `media_root` is named.
    """
    if media_root is None:
        return media_folder(rows)
    if is_remote(media_root):
        if "::" in media_root or not media_root.partition("://")[2].strip("/"):
            raise ConfigError(f"media_root={media_root}: not the URL of a bucket or a folder in it")
        return media_root.rstrip("/")
    if not Path(local_path(media_root)).is_dir():
        raise ConfigError(f"media_root={media_root}: no such folder")
    return os.path.realpath(local_path(media_root))


def _write_shards(
    outputs: list[Output],
    source: RowSource,
    options: Options,
    access: MediaAccess,
    run_jobs: Callable[[Iterable[ShardJob]], Iterator[tuple[str, ShardReport]]],
    progress: bool,
) -> dict[str | None, list[ShardReport]]:
    """Write all shards. Return the reports of each split, in the order of its shards."""
    split_of_url = {output.store.url: output.split for output in outputs}
    reports: dict[str | None, list[ShardReport]] = {output.split: [] for output in outputs}
    jobs = (job for output in outputs for job in jobs_of(output, source, options, access))
    num_rows = sum(len(rows) for output in outputs for _, rows in shards_of(output))
    num_rejects, is_hidden = 0, None if progress else True
    with tqdm(total=num_rows, unit="row", desc="convert", disable=is_hidden) as bar:
        for url, report in run_jobs(jobs):
            reports[split_of_url[url]].append(report)
            if report.repaired:
                logger.warning("%s/%s: was missing or damaged; written again", url, report.name)
            num_rejects += report.num_rejects
            bar.set_postfix_str(f"{num_rejects:,} rejected", refresh=False)
            bar.update(report.num_rows)
    for shards in reports.values():  # from shard-1000000.tar on, names are longer
        shards.sort(key=lambda report: (len(report.name), report.name))
    return reports


def _require_samples(
    outputs: list[Output], reports: dict[str | None, list[ShardReport]], root: str | None
) -> None:
    """Refuse to finish datasets that would all be empty. Their rejects stay."""
    has_samples = any(report.num_samples for shards in reports.values() for report in shards)
    if has_samples or any(output.state == "finished" for output in outputs):
        return
    for output in outputs:
        give_up(output.store, reports[output.split])
    num_rejects = sum(report.num_rejects for shards in reports.values() for report in shards)
    store = next(output.store for output in outputs if len(output.rows))
    first = next(all_rejects(store))
    hint = ""
    if "no such file" in first.reason:
        hint = f". Media paths are relative to {root}; name another folder with media_root="
    elif first.reason.startswith("not JSON"):
        hint = ". Rows are JSON objects, one per line, or one JSON array of them"
    path = store.url_of(REJECTS_NAME)
    path = path if is_remote(path) else os.path.realpath(path)  # without ".."
    raise MMStreamError(
        f"none of {num_rejects:,} rows became a sample, so no dataset was written. All reasons "
        f"are in {path}. The first is row {first.row}: {first.reason}{hint}"
    )


def _report_of(output: Output, shards: list[ShardReport], seconds: float) -> ConvertReport:
    """Return the report of one dataset, from its manifest and the shards of this call."""
    if output.work.shard_range is not None and output.state != "finished":
        return _report_of_range(shards, seconds)
    manifest = Manifest.from_bytes(output.store.read(MANIFEST_NAME))
    corpus = read_report(output.store)
    facts = {} if corpus is None else vars(corpus)
    num_retried = sum(shard.num_rows for shard in shards) if output.work.rerun.retry_rejects else 0
    counts = {
        "num_rows": num_rows_of(manifest.source),
        "num_samples": manifest.num_samples,
        "num_rejects": manifest.source["num_rejects"],
        "num_shards": len(manifest.shards),
        "num_bytes": manifest.num_bytes,
    }
    return ConvertReport(
        **(facts | counts),
        num_new_bytes=sum(shard.num_bytes for shard in shards if not shard.reused),
        seconds=seconds,
        num_repaired=sum(shard.repaired for shard in shards),
        was_finished=output.state == "finished" and not output.work.rerun.retry_rejects,
        num_retried=num_retried,
        num_recovered=num_retried and num_retried - sum(shard.num_rejects for shard in shards),
    )


def _report_of_range(shards: list[ShardReport], seconds: float) -> ConvertReport:
    """Return the report of a range of shards, whose dataset is not finished yet."""
    return ConvertReport(
        num_rows=sum(shard.num_rows for shard in shards),
        num_samples=sum(shard.num_samples for shard in shards),
        num_rejects=sum(shard.num_rejects for shard in shards),
        num_shards=sum(shard.num_samples > 0 for shard in shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
        num_new_bytes=sum(shard.num_bytes for shard in shards if not shard.reused),
        seconds=seconds,
        num_repaired=sum(shard.repaired for shard in shards),
    )


def _report_of_append(store: Store, shards: list[ShardReport], seconds: float) -> ConvertReport:
    """Return the report of the rows that are appended to a dataset, before that is finished."""
    rejects = (
        all_rejects(store, rejects_name(shard.name)) for shard in shards if shard.num_rejects
    )
    groups = group_rejects(chain.from_iterable(rejects))
    report = replace(
        _report_of_range(shards, seconds),
        reject_kinds=joined_groups(groups),
        num_left_out=sum(group.num_rows for group in groups if group.example.left_out),
        **vars(total_counts(shard.counts for shard in shards)),
    )
    if not report.num_samples:
        logger.warning(
            "%s: no row of %s became a new sample, so the dataset stays as it is",
            store.url,
            f"{report.num_rows:,}",
        )
    return report


def check_max_rejects(max_rejects: float) -> None:
    """Raise a ConfigError if it is neither a fraction nor a number of rows."""
    if not 0 <= max_rejects <= (1 if isinstance(max_rejects, float) else max_rejects):
        raise ConfigError(f"max_rejects={max_rejects}: {_ADVICE['max_rejects']}")


def _warn_of_rejects(report: ConvertReport, max_rejects: float, dest: str) -> None:
    """Warn if a finished conversion rejected more rows than were allowed."""
    if report.has_more_rejects_than(max_rejects):
        logger.warning(
            "%s: the dataset is complete, but %d of %d rows were rejected, more than "
            "max_rejects=%s allows; see %s",
            *(dest, report.num_rejects - report.num_left_out, report.num_rows),
            *(max_rejects, REJECTS_NAME),
        )


def _total_of(reports: dict[str | None, ConvertReport], started: float) -> ConvertReport:
    """Return the sums over all splits."""
    sums: dict[str, Any] = {
        f.name: sum(getattr(report, f.name) for report in reports.values())
        for f in fields(ConvertReport)
        if f.type == "int"
    }
    counts = total_counts(
        RowCounts(report.formats, report.unread_keys, report.media) for report in reports.values()
    )
    return ConvertReport(
        **sums,
        seconds=time.monotonic() - started,
        was_finished=all(report.was_finished for report in reports.values()),
        formats=counts.formats,
        unread_keys=counts.unread_keys,
        media=counts.media,
        reject_kinds=joined_groups(chain(*(report.reject_kinds for report in reports.values()))),
        splits={split: report for split, report in reports.items() if split is not None},
    )


MAX_ROWS = 10_000
"""Rows that are looked through. Usually the first one has all columns."""

MAX_NAMED = 20
"""Columns, or ranges of missing shards, that a message names."""


def require_columns(source: RowSource, columns: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if a mapped column is in none of the first 10,000 rows.

    A single row may lack it: an empty cell of a table is an absent key.

    Args:
        source: The rows.
        columns: Pairs (name that the formats know, name in the rows).
    """
    absent = {theirs: ours for ours, theirs in columns}
    first: tuple[int, list[str]] | None = None
    if not absent or not source.num_rows:
        return
    for row in source.select(range(min(source.num_rows, MAX_ROWS))).read():
        if isinstance(row.value, dict):
            first = first or (row.number, list(row.value))
            absent = {theirs: ours for theirs, ours in absent.items() if theirs not in row.value}
        if not absent:
            return
    if first is None:
        return  # each row is a reject that says why, or a sample already
    number, names = first
    listing = ", ".join(escaped(name, 60) for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED:,} others" if len(names) > MAX_NAMED else ""
    of_first = f" of the first {MAX_ROWS:,}" if source.num_rows > MAX_ROWS else ""
    missing = ", ".join(f"{theirs} (as {ours})" for theirs, ours in absent.items())
    raise ConfigError(
        f"columns: no row{of_first} has the column {escaped(missing, 200)}; row {number:,} has "
        f"{listing}{more}"
    )


@checked({"max_rejects": _ADVICE["max_rejects"]})
def finalize(
    dest: str | os.PathLike[str],
    *,
    splits: Sequence[str] | None = None,
    max_rejects: NonNegativeFloat = 0.01,
) -> ConvertReport:
    """Make a dataset of the shards that `convert` wrote with ``shard_range=``.

    All shards of the plan must be there. Then ``rejects.jsonl``, the index and the manifest are
    written, as a conversion without ranges writes them. No range may be written meanwhile.

    If it was interrupted, make the same call again. On a finished dataset it does nothing.

    Args:
        dest: The folder or URL prefix that the ranges were written to.
        splits: Names of all splits, if the conversion has some.
        max_rejects: As in `convert`.

    Returns:
        Counts and bytes of the dataset.

    Raises:
        ConfigError: `dest` holds no conversion, or a process still writes there.
        MMStreamError: Shards are missing or damaged, and the message names them. Or no row became
            a sample. No dataset was written.
        StorageError: Storage failed after retries.

    Examples:
        Two machines write half of the shards each.

        >>> for shard_range in ((0, 1), (1, 2)):
        ...     _ = mm.convert(
        ...         "rows.jsonl", "both/", media_root="media/", samples_per_shard=240,
        ...         shard_range=shard_range, progress=False,
        ...     )
        >>> mm.finalize("both/").num_samples
        480
    """
    started = time.monotonic()
    dest = os.fspath(dest)
    check_max_rejects(max_rejects)
    if splits is not None and (not splits or len(set(splits)) < len(splits)):
        raise ConfigError(f"splits={splits!r}: name all of them with splits=, each once")
    store = open_store(dest)
    with ExitStack() as locks:
        names: Sequence[str | None] = splits or (None,)
        outputs = _in_order([_output(store, split, locks) for split in names])
        reports = {output.split: _reports(output) for output in outputs}
        _require_all(outputs, reports)
        written = {
            split: [report for report in shards.values() if report is not None]
            for split, shards in reports.items()
        }
        report = _finish(outputs, written, None, False, started)
    warn_of_leaks(outputs, progress=False)
    _warn_of_rejects(report, max_rejects, dest)
    return report


def _output(root: Store, split: str | None, locks: ExitStack) -> Output:
    """Return the dataset that a marker or a manifest describes. An unfinished one is locked."""
    store = root if split is None else open_store(join_url(root.url, split))
    if not store.exists(MARKER_NAME):
        if not store.exists(MANIFEST_NAME):
            hint = "" if split else "; if it has splits, name all of them with splits="
            raise ConfigError(f"{store.url}: no shard range was converted to here{hint}")
        plan = Manifest.read(store).source
        if "num_rows" not in plan:
            raise ConfigError(f"{store.url}: holds a dataset that no conversion wrote")
        return Output(split, store, range(plan["num_rows"]), plan, "finished", Work())
    lock = lock_all(store, "finalize", locks)
    marker = read_json(store, MARKER_NAME)
    if marker.get("clearing"):
        raise ConfigError(
            f"{store.url}: an overwrite was interrupted here; run it again to its end"
        )
    plan = marker["plan"]
    return Output(split, store, range(plan["num_rows"]), plan, "unfinished", Work(), lock=lock)


def _in_order(outputs: list[Output]) -> list[Output]:
    """Return splits in the order of the plan, with the number of the first shard of each.

    Raises:
        ConfigError: The splits are not those of the plan.
    """
    by_split = {output.split: output for output in outputs}
    planned = outputs[0].plan["splits"]
    names = [None] if planned is None else [name for name, _ in planned]
    if set(names) != set(by_split):
        raise ConfigError(
            f"splits={[output.split for output in outputs]}: the conversion has {names}"
        )
    ordered: list[Output] = []
    for name in names:
        first_shard = sum(num_shards(output.plan) for output in ordered)
        ordered.append(by_split[name]._replace(first_shard=first_shard))
    return ordered


def _reports(output: Output) -> dict[int, ShardReport | None]:
    """Return {shard: report} of an unfinished dataset. None: it is not written, or is damaged."""
    if output.lock is None:
        return {}
    sizes = {name: file.size for name, file in output.store.list().items()}
    for name, file in open_store(output.store.url_of(REPORTS)).list().items():
        sizes[f"{REPORTS}/{name}"] = file.size

    def read(index: int) -> ShardReport | None:
        name = shard_name(index)
        report = None
        if report_name(name) in sizes:
            report = read_shard_report(output.store, name, ShardReport)
        if report is None or not files_of(report).items() <= sizes.items():
            return None
        return replace(report, reused=True)

    shards = output.shards
    return dict(zip(shards, map_requests(output.store, read, shards), strict=True))


def _require_all(
    outputs: list[Output], reports: dict[str | None, dict[int, ShardReport | None]]
) -> None:
    """Raise an MMStreamError that names the shards that are missing, counted over all splits."""
    missing = [
        output.first_shard + index
        for output in outputs
        for index, report in reports[output.split].items()
        if report is None
    ]
    if not missing:
        return
    ranges = np.split(np.array(missing), np.flatnonzero(np.diff(missing) > 1) + 1)
    names = [f"{shards[0]}:{shards[-1] + 1}" for shards in ranges[:MAX_NAMED]]
    num_all = sum(num_shards(output.plan) for output in outputs)
    raise MMStreamError(
        f"{len(missing):,} of {num_all:,} shards are missing or damaged: {', '.join(names)}"
        f"{', ...' * (len(ranges) > MAX_NAMED)}; write them with shard_range=, then finalize again"
    )


WHOLE_ONLY = (
    *("splitting", "shuffle_seed", "samples_per_shard", "sidecar", "duplicates", "rerun"),
    *("engine", "shard_range"),
)
"""Options that say where rows go, not what they become. A dry run leaves them out."""


@dataclass(frozen=True)
class DryRow:
    """What one row becomes."""

    number: int
    """From 1, over all files of rows."""
    format: str
    """The format that it was read as. Empty for a reject."""
    samples: tuple[Mapping[str, Any], ...]
    """As a dataset gives them, but without a shard: {field: bytes}."""
    unread: tuple[str, ...]
    """Its keys that nothing read."""
    reject: Reject | None
    """Why it becomes no sample."""


def dry_run(
    rows: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    num_rows: int,
    reading: RowReading | None = None,
    **options: Any,
) -> list[DryRow]:
    """Return what the first rows become. Nothing is written, except for temporary files.

    The samples of all these rows are in memory.

    Args:
        rows: As for `mm.convert`.
        num_rows: How many rows.
        reading: As for `mm.convert`, without `limit`.
        options: Of `mm.convert`. Those that say where rows go, such as `splitting`, have no effect.

    Raises:
        MMStreamError: As for `mm.convert`, but for rows that become no sample: they are returned.
    """
    used = {name: value for name, value in options.items() if name not in WHOLE_ONLY}
    used["reading"] = replace(reading or RowReading(), limit=num_rows)
    used |= {"num_workers": 1, "progress": False, "max_rejects": 1.0}
    store = open_store(f"memory://mmstream-dry-run-{secrets.token_hex(8)}")
    try:
        report = convert(rows, store.url, samples_per_shard=1, sidecar=False, **used)
    except MMStreamError:
        if not store.exists(REJECTS_NAME):
            raise  # not for lack of samples
        return [DryRow(i, "", (), (), reject) for i, reject in enumerate(all_rejects(store), 1)]
    else:
        return list(_rows(store, report.num_rows))
    finally:
        for folder in (store, open_store(store.url_of(REPORTS))):
            for name in folder.list():
                folder.remove(name)


def _rows(store: Store, num_rows: int) -> Iterator[DryRow]:
    dataset = open_dataset(store.url)
    rejects = all_rejects(store)
    start = 0
    for i in range(num_rows):
        shard = read_shard_report(store, shard_name(i), ShardReport)
        assert shard is not None
        samples = tuple(_fields(dataset[j]) for j in range(start, start + shard.num_samples))
        start += shard.num_samples
        reject = next(rejects) if shard.num_rejects else None
        formats, unread = shard.counts.formats, shard.counts.unread_keys
        yield DryRow(i + 1, next(iter(formats), ""), samples, tuple(unread), reject)


def _fields(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample without its shard, which a conversion would not write."""
    return {name: value for name, value in sample.items() if name not in ("__url__", "__lineage__")}
