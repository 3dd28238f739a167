"""What the first rows would become, without a destination: `mmstream convert --dry-run N`.

The rows are converted as always, to the memory of this process and with one row in a shard. So what
is shown is what a conversion would write.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mmstream.converting.convert import convert
from mmstream.converting.options import RowReading
from mmstream.converting.plan import shard_name
from mmstream.converting.report import REJECTS_NAME, REPORTS, Reject, report_name
from mmstream.converting.shard import ShardReport
from mmstream.dataset.open import open_dataset
from mmstream.errors import MMStreamError
from mmstream.storage import Store, open_store

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
    used |= {"num_workers": 1, "progress": False, "max_rejects": 1.0}
    used["reading"] = replace(reading or RowReading(), limit=num_rows)
    with _folder_in_memory() as store:
        try:
            report = convert(rows, store.url, samples_per_shard=1, sidecar=False, **used)
        except MMStreamError:
            rejects = _rejects(store)
            if not rejects:
                raise  # not for lack of samples
            return [DryRow(i + 1, "", (), (), reject) for i, reject in enumerate(rejects)]
        return list(_rows(store, report.num_rows))


def _rows(store: Store, num_rows: int) -> Iterator[DryRow]:
    dataset = open_dataset(store.url)
    rejects = iter(_rejects(store))
    start = 0
    for i in range(num_rows):
        shard = msgspec.json.decode(store.read(report_name(shard_name(i))), type=ShardReport)
        samples = tuple(_fields(dataset[j]) for j in range(start, start + shard.num_samples))
        start += shard.num_samples
        reject = next(rejects) if shard.num_rejects else None
        formats, unread = shard.counts.formats, shard.counts.unread_keys
        yield DryRow(i + 1, next(iter(formats), ""), samples, tuple(unread), reject)


def _fields(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample without its shard, which a conversion would not write."""
    return {name: value for name, value in sample.items() if name not in ("__url__", "__lineage__")}


def _rejects(store: Store) -> list[Reject]:
    try:
        lines = store.read(REJECTS_NAME).splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Reject) for line in lines]


@contextmanager
def _folder_in_memory() -> Iterator[Store]:
    store = open_store(f"memory://mmstream-dry-run-{secrets.token_hex(8)}")
    try:
        yield store
    finally:
        for folder in (store, open_store(store.url_of(REPORTS))):
            for name in folder.list():
                folder.remove(name)
