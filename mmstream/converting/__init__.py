"""Beside the flow, in front of it: rows (JSONL and media files) become shards, once.

    rows.py         a file of rows -> byte ranges of its lines
    plan.py         which rows go into which shard
    formats.py      one row -> a draft in the canonical shape (dialogue.py, fields.py, draft.py)
    media.py        the bytes of its media files, known by what they hold
    shard.py        tar, index, report of one shard
    pool.py         shards by several processes
    destination.py  the unfinished marker, the rejects, the manifest
    run.py          all of it for the datasets of one conversion

The output is a function of the rows, the media and the options: the same bytes on every run, for
every number of workers, and after any kill.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from mmstream.converting.formats import FORMATS
from mmstream.converting.plan import Options
from mmstream.converting.run import ConvertReport, run_conversion

__all__ = ["FORMATS", "ConvertReport", "convert"]

logger = logging.getLogger(__name__)


def convert(
    rows: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    media_root: str | os.PathLike[str] | None = None,
    samples_per_shard: int = 5000,
    num_workers: int = 1,
    format: str | None = None,
    captions: str = "all",
    shuffle_seed: int | None = None,
    splits: Mapping[str, float] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Convert a file of rows and its media files to shards.

    A killed run goes on where it stood when it is called again; a finished one does nothing.
    Every row becomes a sample (with `captions` "each", one or more) or a line of
    ``rejects.jsonl``. Memory: one sample a worker, 8 bytes a row, and the rejects.

    Args:
        rows: JSONL (also gzipped) or a JSON array; a path or a URL.
        dest: a folder or an ``s3://`` prefix.
        media_root: folder that media paths are relative to and may not leave; the folder of
            `rows` when None.
        samples_per_shard: rows of a shard; rejects leave it smaller, they move no boundary.
        num_workers: processes; 0 and 1 both work in this one. Never changes a byte.
        format: one of `FORMATS` for all rows; None recognises each row by its keys.
        captions: "all" captions of a row in one sample, or a sample for "each".
        shuffle_seed: permutes the rows first, as a corpus needs that is sorted by class.
        splits: {name: fraction}, summing to 1: one dataset each at ``DEST/NAME``, by a hash of
            the row's id, so a row keeps its split when rows are added.
        overwrite: replace another, or an unfinished, conversion at `dest`.
        progress: a bar on a terminal.

    Raises:
        ConfigError: impossible options, no rows, a JSON array that does not parse, or a `dest`
            that holds something else.
        FileNotFoundError: no such file of rows.
        StorageError: storage failed after retries.
        MMStreamError: a worker process died, or no row became a sample: ``rejects.jsonl`` says why,
            and the same call tries again.
    """
    options = Options(
        samples_per_shard=samples_per_shard,
        format=format,
        captions=captions,
        shuffle_seed=shuffle_seed,
        splits=None if splits is None else tuple(splits.items()),
    )
    report = run_conversion(
        os.fspath(rows),
        os.fspath(dest),
        None if media_root is None else os.fspath(media_root),
        options,
        num_workers=num_workers,
        overwrite=overwrite,
        progress=progress,
    )
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
