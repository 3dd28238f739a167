"""Rows that are added to a finished dataset: ``convert`` with `Rerun.append`.

    rows -> APPEND: which of them the dataset has -> extra shards after the last one -> manifest

A row that the dataset has already becomes a reject. It is known by its key, where the rows are
samples with keys of their own; else by its id; or by its number, where these very rows were
converted before. The sidecars tell which keys and ids are there. Of erased samples, the list of
what was taken down has digests of them.

A shard ends with its R-th new row, R being `samples_per_shard`. With R = 2, the rows N K N K N, of
which K are known, make the shards (N K N K) and (N). So shards are full, also where most rows of an
export were converted before.

The dataset stays open for readers meanwhile. The new manifest is the only commit. The reports of
the new shards have a digest of the append: the same command takes over what a killed one left, any
other one rewrites these shards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mmstream.converting.plan import Append, appends_of, num_all_shards, shard_name
from mmstream.converting.rows.records import RowSource
from mmstream.converting.rows.samples import SampleSource
from mmstream.converting.shard import row_key
from mmstream.converting.sidecar import id_of
from mmstream.dataset.columns import read_rows
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.files import json_lines
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.dataset.removed import erased_keys, located, read_takedowns
from mmstream.errors import ConfigError, escaped
from mmstream.storage import Store
from mmstream.storage.store import map_requests
from mmstream.types import IntArray, SampleRef

logger = logging.getLogger(__name__)

MAX_ROWS_PER_SAMPLE = 100
"""Most rows of a shard, times `samples_per_shard`: a worker has the reason of each known one."""

ROWS_AT_ONCE = 1 << 20
"""Rows that are selected together. A row group of Parquet starts again for each selection."""

_IS_THERE = "is in the dataset already, by its {}"
_TAKEN_DOWN = "was taken down from the dataset ({}), by its {}"


def require_appendable(store: Store, plan: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a dataset to which rows can be appended.

    Raises:
        ConfigError: No conversion finished there, or tars of others lie beside its shards.
        ManifestError: The manifest is damaged.
    """
    names = store.list()
    manifest = Manifest.read(store) if MANIFEST_NAME in names else Manifest(())
    shards = {shard.name for shard in manifest.shards}
    foreign = [
        name
        for name in names
        if name.endswith(".tar") and name not in shards and not _is_of_conversion(name)
    ]
    for is_broken, message in (
        (MARKER_NAME in names, "an unfinished conversion: complete it, then append"),
        (
            MANIFEST_NAME not in names,
            "holds no finished dataset to append to; first convert without append=True; where it "
            "was written in splits, give the same splits",
        ),
        (
            "rows_total" not in manifest.source,
            "no conversion wrote this dataset, so nothing can be appended; convert the rows into a "
            "folder of their own, and train on a mixture of both",
        ),
        (
            bool(foreign),
            f"holds {escaped(''.join(foreign[:1]))}, which is not of this dataset: move it away, "
            "then append",
        ),
        (
            not manifest.source.get("sidecar"),
            "has no sidecars, which tell what rows it has already: convert all rows again",
        ),
        (
            bool(plan.get("split_by_media")),
            "split_by_media: a new row may connect rows of two splits, which cannot move any more; "
            "convert all rows again",
        ),
    ):
        if is_broken:
            raise ConfigError(f"{store.url}: {message}")
    return manifest


def _is_of_conversion(name: str) -> bool:
    digits = name.removeprefix("shard-").removesuffix(".tar")
    return digits.isdecimal() and name == shard_name(int(digits))


@dataclass(frozen=True)
class KnownRows:
    """Which rows a dataset has already."""

    codes: npt.NDArray[np.uint16]
    """uint16 [rows of the source]: 0 for a new row, else 1 more than the position of its reason."""
    reasons: tuple[str, ...]

    def refused(self, rows: IntArray | range, first_row: int) -> dict[str, str]:
        """Return {key: reason} of the known ones of some rows. Arguments as of `Append`."""
        numbers = np.asarray(rows, np.int64)
        numbers = numbers[self.codes[numbers] > 0]
        known = zip(numbers.tolist(), self.codes[numbers].tolist(), strict=True)
        return {row_key(first_row + row): self.reasons[code - 1] for row, code in known}


def known_rows(store: Store, manifest: Manifest, source: RowSource) -> KnownRows:
    """Return which rows a dataset has already, or had before they were taken down.

    64 bits of a hash of each key and id are compared: among 10^6 new rows and 10^8 old ones, two
    are taken for the same with a chance of 5e-6.

    Raises:
        ConfigError, ShardError: A sidecar is missing, damaged, or of another program.
        StorageError: The storage failed after retries.
    """
    takedowns = located(read_takedowns(store), store, manifest)
    dataset = Dataset(manifest, store, takedowns=takedowns)
    shards = {info.name: shard for shard, info in enumerate(manifest.shards)}
    codes, reasons = np.zeros(source.num_rows, np.uint16), dict[str, int]()

    def code_of(ref: SampleRef, column: str) -> int:
        why = dataset.removed.get(ref)
        reason = _IS_THERE.format(column) if why is None else _TAKEN_DOWN.format(why, column)
        return reasons.setdefault(reason, len(reasons) + 1)

    for column, names in _names(manifest, source):
        hashes, erased = np.zeros(source.num_rows, np.uint64), erased_keys(store, column)
        for row, name in enumerate(names):
            if name is not None:
                hashes[row] = _hash(name)
                for shard, index in erased(name):
                    codes[row] = code_of((shards[shard], index), column)
        refs = _places(dataset, column, hashes, is_whole=isinstance(source, SampleSource))
        known = np.isin(hashes, np.fromiter(refs, np.uint64)) & (codes == 0)
        for row in np.flatnonzero(known).tolist():
            codes[row] = code_of(refs[int(hashes[row])], column)
    return KnownRows(codes, tuple(reasons))


def _names(
    manifest: Manifest, source: RowSource
) -> Iterator[tuple[Literal["key", "id"], Iterable[str | None]]]:
    """Yield by what rows are known, a column of the sidecars, and its value for each row."""
    if isinstance(source, SampleSource):
        yield "key", (key.decode("utf-8", "replace") for key, _ in source.identities(None))
        return
    yield "id", _ids(source)
    conversions = [(manifest.source["rows_sha256"], 0)]
    conversions += [
        (append.rows_sha256, append.first_row) for append in appends_of(manifest.source)
    ]
    for sha256, first_row in conversions:
        if sha256 == source.sha256:
            yield "key", map(row_key, range(first_row, first_row + source.num_rows))


def _ids(source: RowSource) -> Iterator[str | None]:
    num_without = 0
    for start in range(0, source.num_rows, ROWS_AT_ONCE):
        rows = source.select(range(start, min(source.num_rows, start + ROWS_AT_ONCE)))
        for row in rows.read():
            values = row.value if isinstance(row.value, dict) else {}
            row_id = id_of({str(name).lower(): value for name, value in values.items()})
            num_without += row_id is None
            yield row_id
    if num_without:
        logger.warning(
            "%s: %d of %d rows have no id; one of these that the dataset has already is known only "
            "if all rows are those of an earlier call; `mmstream duplicates` finds equal samples",
            source.name,
            num_without,
            source.num_rows,
        )


def _hash(name: str) -> int:
    return xxh3_64_intdigest(name.encode("utf-8", "replace"))


def _places(
    dataset: Dataset, column: str, hashes: npt.NDArray[np.uint64], *, is_whole: bool
) -> dict[int, SampleRef]:
    """Return {hash: (shard, index)} of stored samples with one of these hashes.

    Where several have it, one that was taken down is returned.

    Args:
        dataset: The dataset.
        column: Of the sidecars: "key" or "id".
        hashes: Of keys or ids; 0 for none.
        is_whole: Keys count as they are; otherwise ``000000012-3`` is of the row ``000000012``.
    """
    wanted = np.unique(hashes[hashes > 0])

    def in_shard(shard: int) -> list[tuple[int, SampleRef]]:
        try:
            table = read_rows(dataset, shard, [column])
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error}, so it is not known which rows are there already: run the command again "
                "that wrote the shard, which mends it; or `mmstream index --columns`"
            ) from None
        columns = (table[name].to_pylist() for name in (column, "index", "status"))
        stored = [
            (_hash(name if is_whole or column == "id" else name.partition("-")[0]), (shard, index))
            for name, index, status in zip(*columns, strict=True)
            if name is not None and index is not None and status != "erased"
        ]
        is_wanted = np.isin(np.array([name for name, _ in stored], np.uint64), wanted)
        return [stored[number] for number in np.flatnonzero(is_wanted).tolist()]

    places: dict[int, SampleRef] = {}
    shards = range(dataset.num_shards) if wanted.size else ()
    for of_shard in map_requests(dataset.store, in_shard, shards):
        for name, ref in of_shard:
            if name not in places or ref in dataset.removed:
                places[name] = ref
    return places


def plan_append(
    manifest: Manifest, plan: Mapping[str, Any], rows: IntArray | range, known: KnownRows
) -> Append:
    """Return the shards of an append. Where nothing is new, they hold the known rows alone.

    Args:
        manifest: Of the dataset as it is.
        plan: Of the new rows.
        rows: 0-based numbers of the new rows of this dataset, in the order of the shards.
        known: Which of them it has already.
    """
    earlier = [append.rows_total for append in appends_of(manifest.source)]
    numbers, per_shard = np.asarray(rows, np.int64), plan["samples_per_shard"]
    ends = np.flatnonzero(known.codes[numbers] == 0)[per_shard::per_shard].tolist()
    most_rows = MAX_ROWS_PER_SAMPLE * per_shard
    append = Append(
        rows=plan["rows"],
        rows_sha256=plan["rows_sha256"],
        rows_total=plan["rows_total"],
        num_rows=plan["num_rows"],
        first_row=manifest.source["rows_total"] + sum(earlier),
        first_shard=num_all_shards(manifest.source),
        starts=[
            start
            for first, last in pairwise([0, *ends, len(numbers)])
            for start in range(first, last, most_rows)
        ],
    )
    digest = hashlib.sha256(json_lines([plan, append, known.reasons]))
    digest.update(numbers.tobytes() + known.codes.tobytes())
    return msgspec.structs.replace(append, digest=digest.hexdigest()[:32])
