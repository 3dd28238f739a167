"""The plan of a conversion: which rows go into which shard.

It is made once, after the file of rows was scanned. It depends only on the rows and the options:

1. The rows are in the order of the file, or shuffled by `shuffle_seed`.
2. With splits, each split takes the rows whose id hashes into it.
3. Shard i of a dataset holds its rows [i*R, (i+1)*R), with R = `samples_per_shard`.

With R = 2, rows 0 to 4 make the shards (0, 1), (2, 3), (4). If row 1 is rejected, shard 0 has one
sample, and shard 1 still starts at row 2. So any process can write any shard, and an interrupted
conversion knows which shards are missing.

Rows that share media stay in one split: `Splitting(by_media=True)`.

    rows -> drafts -> references of media -> BY MEDIA: groups of rows -> plan

Two rows belong together if they name the same medium, or if a chain of other rows connects them. No
media file is opened. So two names of equal bytes are two media here.

Rejected rows that are tried again: extra shards after the last one.

    a finished dataset -> rows of its rejects -> RETRY -> jobs -> engines -> destination

The shards of a dataset come in rounds. Round 0 holds the shards of the plan. Each retry adds a
round: the rows that the round before rejected, in their order, cut into shards as in the plan. The
manifest's ``retried_shards`` gives the number of shards of each retry. Nothing else is stored: the
rejects of a round's shards (``reports/``) never change, so they name the rows of the next round.

Example: 10 rows in shards of 4 are shards 0 to 2. Rows 1, 5 and 8 were rejected. The first retry
writes shard 3 with these rows. If row 5 is rejected again, the second retry writes it to shard 4.

The dataset stays open for readers meanwhile. The new manifest is the only commit: a killed retry
leaves files that the next one takes over.

Rows that are added to a finished dataset: `Rerun.append`.

    rows -> APPEND: which of them the dataset has -> extra shards after the last one -> manifest

A row that the dataset has already becomes a reject. It is known by its key, where the rows are
samples with keys of their own; else by its id; or by its number, where these very rows were
converted before. The sidecars tell which keys and ids are there. Of erased samples, the list of
what was taken down has digests of them.

A shard ends with its R-th new row. With R = 2, the rows N K N K N, of which K are known, make the
shards (N K N K) and (N). So shards are full, also where most rows of an export were converted
before.

The dataset stays open here, too. The reports of the new shards have a digest of the append: the
same command takes over what a killed one left, any other one rewrites these shards.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mmstream.converting.draft import MediaRef, RowError
from mmstream.converting.duplicates import Hashes, equal_to_first, read_contents
from mmstream.converting.media.references import (
    MediaAccess,
    inline_bytes,
    parse_reference,
    plain_path,
)
from mmstream.converting.options import Options
from mmstream.converting.report import REPORTS, rejects_name, rejects_of
from mmstream.converting.rows.records import RowSource, SampleSource
from mmstream.converting.shard import row_key
from mmstream.converting.sidecar import content_hash, id_of
from mmstream.dataset.bad_list import erased_keys, located, read_removed
from mmstream.dataset.columns import read_rows
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, json_lines
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.order.permute import permutation
from mmstream.settings import refuse_broken
from mmstream.storage import Store, open_store
from mmstream.storage.store import map_requests
from mmstream.types import IntArray, SampleRef

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 5
"""Saved in every plan. It must be raised when any byte of the output changes."""


def plan_of(rows: RowSource, options: Options, split: str | None, num_rows: int) -> dict[str, Any]:
    """Return all that the bytes of a dataset depend on, except for the media files.

    Paths and the number of workers are not part of it. The manifest saves it as its ``source``.
    """
    reading = options.reading
    splitting = options.splitting
    return {
        "converter": CONVERTER_VERSION,
        "rows": rows.name,
        "rows_sha256": rows.sha256,
        "rows_total": rows.num_rows,
        "samples_per_shard": options.samples_per_shard,
        "format": options.format.name,
        **options.format.plan(),
        "captions": reading.captions,
        "shuffle_seed": options.shuffle_seed,
        "media": options.media.plan(),
        "splits": _splits(rows, options),
        **(
            {"split_by": splitting.split_by} if splitting and splitting.split_by is not None else {}
        ),
        **({"split_by_media": True} if splitting and splitting.by_media else {}),
        **({"keys": "kept"} if isinstance(rows, SampleSource) else {}),
        **({"encoding": reading.encoding} if reading.encoding is not None else {}),
        **({"limit": reading.limit} if reading.limit is not None else {}),
        **({"group_spans": True} if reading.group_spans else {}),
        "split": split,
        "sidecar": options.sidecar,
        "duplicates": options.duplicates.exact,
        "near_duplicates": options.duplicates.near,
        "num_rows": num_rows,
    }


def _splits(rows: RowSource, options: Options) -> list[list[Any]] | None:
    """Return [name, fraction] of each split in order; no fraction where the rows come in splits."""
    if options.splitting is not None:
        return [list(pair) for pair in options.splitting.splits.items()]
    return [[name, None] for name in rows.splits] if rows.splits else None


def select(
    rows: RowSource, options: Options, root: str | None
) -> dict[str | None, IntArray | range]:
    """Return {split: 0-based row numbers, in the order of the shards}.

    They are int64 [n], or a range where nothing is shuffled and there are no splits.

    Without splits, the only key is None. With splits, every row is in exactly one of them. A hash
    of its id decides, or of its content if it has no id. So a row stays in its split when other
    rows are added. With `split_by`, a hash of this field decides. Rows that come in splits already,
    such as the folders train and val, stay in these.

    With {"train": 0.75, "val": 0.25} there is one bound, 0.75 * 2^64. A row goes to "train" if its
    hash is below the bound, otherwise to "val".
    """
    order: IntArray | range = range(rows.num_rows)
    if options.shuffle_seed is not None:
        order = permutation(rows.num_rows, "convert", options.shuffle_seed)
    if rows.splits:
        return _own_splits(rows, options, order)
    if options.splitting is None:
        return {None: order}
    splits = options.splitting.splits
    order = np.asarray(order)
    ends = np.cumsum(list(splits.values()))[:-1]
    bounds = np.array([round(float(end) * 2**64) for end in ends], dtype=np.uint64)
    if options.splitting.by_media:
        split_of_row = split_by_media(rows, options, root, bounds)[order]
    else:
        hashes = rows.id_hashes(options.splitting.split_by)[order]
        split_of_row = np.searchsorted(bounds, hashes, side="right")
    return {name: order[split_of_row == i] for i, name in enumerate(splits)}


def _own_splits(
    rows: RowSource, options: Options, order: IntArray | range
) -> dict[str | None, IntArray | range]:
    """Return the rows of each split that the source has."""
    if options.splitting is not None:
        raise ConfigError(
            f"{rows.name}: has the splits {', '.join(rows.splits)} already; convert them as they "
            "are, or name the files of one of them"
        )
    selected: dict[str | None, IntArray | range] = {}
    for split, own in rows.splits.items():
        if isinstance(order, range):
            selected[split] = own
        else:
            selected[split] = order[(order >= own.start) & (order < own.stop)]
    return selected


def shard_name(index: int) -> str:
    """Return the file name of shard `index`."""
    return f"shard-{index:06d}.tar"


def num_shards(plan: Mapping[str, Any]) -> int:
    """Return the number of shards of a plan, those included whose rows will all be rejected."""
    return -(-int(plan["num_rows"]) // int(plan["samples_per_shard"]))


NAME_BYTES = 16
"""Bytes of the hash of a medium, or of what else a row is known by."""

NUM_DEVIATIONS = 3
"""Standard deviations of a split of single rows. Groups move where a split is further off."""

_SIGNATURE = re.compile(
    r"(?i)(?<=[?&])(?:x-(?:amz|goog)-[^=&]*|awsaccesskeyid|googleaccessid|signature|expires)=[^&]*&?"
)
"""What differs between two signed URLs of one object."""


def split_by_media(
    rows: RowSource, options: Options, root: str | None, bounds: npt.NDArray[np.uint64]
) -> IntArray:
    """Return the position of the split of each row: int64 [num_rows].

    The first medium of a group's first row decides, by its hash: rows that are added later change
    nothing, unless they connect two groups or groups move. These move only where large ones leave a
    split further from its fraction than chance would. Rows without media are where they would be
    anyway.

    Args:
        rows: All rows.
        options: With `Splitting.splits`.
        root: The folder or URL prefix of the media.
        bounds: uint64 [number of splits - 1]: see `plan.select`.
    """
    assert options.splitting is not None
    split_by, fractions = options.splitting.split_by, options.splitting.splits.values()
    names, counts, has_media = bytearray(), array("q"), bytearray()
    media_of_rows = _media_of_rows(rows, options, MediaAccess(root))
    for own, media in zip(rows.id_hashes(split_by), media_of_rows, strict=True):
        of_row = media if media and split_by is None else 2 * own.tobytes() + media
        names += of_row
        counts.append(len(of_row) // NAME_BYTES)
        has_media.append(bool(media))
    sizes = np.frombuffer(counts, np.int64)
    hashes = np.frombuffer(names, "<u8").reshape(-1, 2).astype(np.uint64, copy=False)
    root_of_row = _connected(sizes, hashes)
    is_root = root_of_row == np.arange(len(sizes))
    first, group = np.flatnonzero(is_root), (np.cumsum(is_root) - 1)[root_of_row]
    hash_of_group = hashes[(np.cumsum(sizes) - sizes)[first], 0]
    split = np.searchsorted(bounds, hash_of_group, side="right").astype(np.int64)
    of_media = np.flatnonzero(np.bincount(group, np.frombuffer(has_media, np.uint8)))
    split[of_media] = _nearer(
        split[of_media], np.bincount(group)[of_media], hash_of_group[of_media], [*fractions]
    )
    return np.asarray(split[group], dtype=np.int64)


def _connected(sizes: IntArray, names: Hashes) -> IntArray:
    """Return the first row that each row is connected with: int64 [num_rows].

    Args:
        sizes: int64 [num_rows]: how many names a row has, at least one.
        names: uint64 [n, 2]: the names of all rows, in order.
    """
    root, row = np.arange(len(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    a, b = (row[numbers] for numbers in equal_to_first(names))  # pairs of rows with one name
    while (root[a] != root[b]).any():
        lower = np.minimum(root[a], root[b])
        for end in (a, b):
            np.minimum.at(root, root[end], lower)
        while (root[root] != root).any():
            root = root[root]
    return root


def _nearer(
    split: IntArray, sizes: IntArray, hashes: npt.NDArray[np.uint64], fractions: Sequence[float]
) -> IntArray:
    """Return the splits of groups, after some have moved to where the fractions are kept.

    Args:
        split: int64 [n]
        sizes: int64 [n]: rows of each group.
        hashes: uint64 [n]: of two groups of one size, the one with the smaller hash moves first.
        fractions: Of all splits.
    """
    wanted = np.array(fractions) * sizes.sum()
    chance = NUM_DEVIATIONS * np.sqrt(wanted * (1 - np.array(fractions))) + 1
    excess = np.bincount(split, sizes, len(fractions)) - wanted
    for number in np.lexsort((hashes, -sizes)).tolist():  # the largest first
        if (np.abs(excess) <= chance).all():
            return split
        old, new, size = split[number], excess.argmin(), sizes[number]
        if abs(excess[old] - size) + abs(excess[new] + size) < abs(excess[[old, new]]).sum():
            excess[[old, new]] += -size, size
            split[number] = new
    if (np.abs(excess) > chance).any():
        logger.warning(
            "split_by_media: rows that share media cannot be divided as %s: the largest group has "
            "%s of %s rows with media; a picture that many rows share, such as a placeholder, "
            "joins them",
            ", ".join(f"{fraction:g}" for fraction in fractions),
            f"{sizes.max():,}",
            f"{sizes.sum():,}",
        )
    return split


def _media_of_rows(rows: RowSource, options: Options, access: MediaAccess) -> Iterator[bytes]:
    """Yield the hashes of the media of each row, in order."""
    if isinstance(rows, SampleSource):
        yield from _media_of_samples(rows)
        return
    for row in rows.read():
        try:
            draft = options.format.draft(row.value, row.file)
        except RowError:  # it will be a reject
            yield b""
        else:
            yield b"".join(_hash_of(f, access) for f in draft.files if not f.frames)


def _media_of_samples(rows: SampleSource) -> Iterator[bytes]:
    """Yield the same for samples of tars, by the hashes of their sidecars where they have some."""
    refs = rows.select(range(rows.num_rows))
    for shard in range(rows.dataset.num_shards):
        first, last = np.searchsorted(refs.shards, [shard, shard + 1])
        contents = read_contents(rows.dataset, shard)
        media = np.split(contents.entries["media"].hashes, np.cumsum(contents.num_media)[:-1])
        yield from (media[position].tobytes() for position in refs.positions[first:last].tolist())


def _hash_of(ref: MediaRef, access: MediaAccess) -> bytes:
    """Return the hash of what tells a medium from others: its bytes, or where they lie.

    Examples:
        >>> access = MediaAccess("/data")
        >>> len({_hash_of(MediaRef("image", path), access) for path in ("./a", "file:///data/a")})
        1
    """
    try:
        data = inline_bytes(ref.path) if ref.data is None else ref.data
        name = data or _spelled(ref, access).encode("utf-8", "surrogatepass")
    except RowError:  # it will be a reject, or the loader may read more than is known here
        name = ref.path.encode("utf-8", "surrogatepass")
    return content_hash(name)


def _spelled(ref: MediaRef, access: MediaAccess) -> str:
    """Return where a medium lies, in one of the spellings that mean the same."""
    reference = parse_reference(ref.path, access)
    location, root = reference.location, (access.root or "").rstrip("/")
    if reference.source == "file":
        location = os.path.normpath(os.path.join(root, plain_path(location)))  # noqa: PTH118
        location = location.removeprefix(f"{root}/")
    elif reference.source == "web":  # without scheme, fragment and signature
        url = _SIGNATURE.sub("", location.partition("://")[2].partition("#")[0])
        host, slash, path = url.rstrip("?&").partition("/")
        location = unquote(f"{host.lower()}{slash}{path}")
    # Rows keep their splits only while this text stays, letter by letter.
    return (
        f"Reference(source={reference.source!r}, location={location!r}, "
        f"member={reference.member!r}, is_zip={reference.is_zip}, span={reference.span})None"
    )


RETRIED_SHARDS = "retried_shards"
"""Key of the manifest's ``source``: the number of shards of each retry."""


_CURE = f"bring {REPORTS}/ back, or convert again with rerun=mm.Rerun(overwrite=True)"


def rounds(store: Store, source: Mapping[str, Any]) -> Iterator[dict[str, IntArray]]:
    """Yield {name of a shard: 0-based rows} of each retry of a finished dataset.

    Args:
        store: The dataset.
        source: What its manifest says of the conversion: the plan and the retries.

    Raises:
        ManifestError: The rejects that name the rows are lost or damaged.
    """
    first, count = 0, num_shards(source)
    for next_count in source.get(RETRIED_SHARDS, []):
        # Where an erased one was, any row gives a shard with other bytes, which is refused.
        rows = np.maximum(_rejected_rows(store, range(first, first + count), source), 0)
        first, count = first + count, next_count
        yield _cut(rows, first, count, source)


class Append(msgspec.Struct, frozen=True):
    """Rows that were added to a finished dataset, or are added now.

    Example: 12 rows were appended to 40 in shards 0 to 4, as shards 5 and 6 of 8 rows. Then
    `first_row` is 40, so row 0 has the key ``000000041``; `first_shard` is 5, `starts` is [0, 8].
    """

    rows: str
    """Name of their source."""
    rows_sha256: str
    rows_total: int
    """Rows of the source, over all splits."""
    num_rows: int
    """Rows of this dataset."""
    first_row: int
    """Rows of all conversions before, over all splits."""
    first_shard: int
    starts: list[int]
    """Position among the rows of the dataset at which each shard begins."""
    digest: str = ""
    """Stands in the reports of its shards."""

    def shards(self, rows: IntArray | range) -> dict[str, IntArray | range]:
        """Return {name of a shard: its rows}, from the 0-based numbers of the dataset's rows."""
        return {
            shard_name(self.first_shard + i): rows[start:stop]
            for i, (start, stop) in enumerate(pairwise([*self.starts, len(rows)]))
        }


APPENDED = "appended"
"""Key of the manifest's ``source``: an `Append` for each one, in order."""


def appends_of(source: Mapping[str, Any]) -> list[Append]:
    """Return what was appended to a dataset, in order.

    Raises:
        ManifestError: What the manifest says of it is malformed.
    """
    try:
        return msgspec.convert(source.get(APPENDED, []), list[Append])
    except msgspec.ValidationError as error:
        raise ManifestError(f"{MANIFEST_NAME}: {APPENDED}: {error}; {_CURE}") from None


def num_rows_of(source: Mapping[str, Any]) -> int:
    """Return the number of rows of a conversion, with those that were appended."""
    return int(source["num_rows"]) + sum(append.num_rows for append in appends_of(source))


def num_own_shards(source: Mapping[str, Any]) -> int:
    """Return the number of shards of a conversion and of its retries. Argument as `rounds`."""
    return num_shards(source) + sum(map(int, source.get(RETRIED_SHARDS, [])))


def num_all_shards(source: Mapping[str, Any]) -> int:
    """Return the number of shards with those that were appended. Argument as `rounds`."""
    return num_own_shards(source) + sum(len(append.starts) for append in appends_of(source))


def next_round(store: Store, source: Mapping[str, Any]) -> dict[str, IntArray]:
    """Return {name of a shard: 0-based rows} of the next retry. Arguments as `rounds`."""
    counts = [num_shards(source), *source.get(RETRIED_SHARDS, [])]
    rows = _rejected_rows(store, range(sum(counts[:-1]), sum(counts)), source)
    rows = rows[rows >= 0]
    count = -(-len(rows) // source["samples_per_shard"])
    return _cut(rows, sum(counts), count, source)


def _cut(rows: IntArray, first: int, count: int, source: Mapping[str, Any]) -> dict[str, IntArray]:
    """Cut rows into shards. Shard `first` gets the first of them."""
    num_rows = source["samples_per_shard"]
    if count != -(-len(rows) // num_rows):
        raise ManifestError(
            f"{len(rows)} rejected rows in {REPORTS}/ are not those that the manifest's retry had; "
            f"{_CURE}"
        )
    return {shard_name(first + i): rows[i * num_rows : (i + 1) * num_rows] for i in range(count)}


def _rejected_rows(store: Store, shards: range, source: Mapping[str, Any]) -> IntArray:
    """Return int64 [n]: the 0-based rows that some shards rejected, in the order of the shards.

    -1: it was erased, and so is the sample that a retry made of it, or one of its id.
    """
    present = open_store(store.url_of(REPORTS)).list()
    names = [shard_name(i) for i in shards if Path(rejects_name(shard_name(i))).name in present]
    rows: list[int] = []
    try:
        for rejects in map_requests(store, partial(rejects_of, store), names):
            rows += [int(reject.key or 0) - 1 for reject in rejects]
    except (ManifestError, ValueError) as error:
        raise ManifestError(f"{store.url_of(REPORTS)}: {error}; {_CURE}") from None
    if rows and not -1 <= min(rows) <= max(rows) < source["rows_total"]:
        raise ManifestError(
            f"{store.url_of(REPORTS)}: names rows that the plan does not have; {_CURE}"
        )
    return np.array(rows, np.int64)


# -- rows that are appended ------------------------------------------------------------------------

MAX_ROWS_PER_SAMPLE = 100
"""Most rows of a shard, times `samples_per_shard`: a worker has the reason of each known one."""

_OWN_TAR = re.compile(r"shard-\d{6,}\.tar")
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
        if name.endswith(".tar") and name not in shards and not _OWN_TAR.fullmatch(name)
    ]
    refuse_broken(
        (
            MARKER_NAME in names,
            f"{store.url}: an unfinished conversion: complete it, then append",
        ),
        (
            MANIFEST_NAME not in names,
            f"{store.url}: holds no finished dataset to append to; first convert without "
            "append=True; where it was written in splits, give the same splits",
        ),
        (
            "rows_total" not in manifest.source,
            f"{store.url}: no conversion wrote this dataset, so nothing can be appended; convert "
            "the rows into a folder of their own, and train on a mixture of both",
        ),
        (
            foreign,
            f"{store.url}: holds {escaped(''.join(foreign[:1]))}, which is not of this dataset: "
            "move it away, then append",
        ),
        (
            not manifest.source.get("sidecar"),
            f"{store.url}: has no sidecars, which tell what rows it has already: convert all rows "
            "again",
        ),
        (
            plan.get("split_by_media"),
            f"{store.url}: split_by_media: a new row may connect rows of two splits, which cannot "
            "move any more; convert all rows again",
        ),
    )
    return manifest


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
    takedowns = located(read_removed(store).takedowns, store, manifest)
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
    for row in source.read():
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
