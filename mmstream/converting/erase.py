"""``mmstream takedown --erase``: overwrite what samples held that were taken down.

    list of removed samples -> ERASE -> tar, checksums, sidecar, report of each shard
                                     -> rejects, duplicates -> index, manifest -> the list again

The list says first which samples are erased, by their places and by digests of their keys. It also
names the shards that are not finished. So a call that was killed is repeated from the list alone:
each of its steps gives the same bytes again.

Every file is rewritten and then takes the place of the old one, in a folder as in an object
store. So a reader sees the old shard or the new one, and a run that has mapped a shard goes on with
the old file. A sample keeps its place: its members have the lengths that they had, and new names.
``000017.jpg`` of sample 16 becomes ``erased-16.jpg``, filled with ``0``; a ``json`` becomes ``{}``
and spaces.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from mmstream.converting.duplicates import DUPLICATES_NAME
from mmstream.converting.outputs import LEFTOVERS
from mmstream.converting.report import (
    REJECTS_NAME,
    REPORT_NAME,
    REPORTS,
    Reject,
    lines_of,
    read_report,
    rejects_name,
    rejects_of,
    remove_leftovers,
    report_name,
)
from mmstream.converting.sidecar import are_of_erased, empty_rows
from mmstream.dataset.bad_list import digest_of, mark_erased, read_removed
from mmstream.dataset.columns import read_columns, sidecar_name
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import (
    READ_BYTES,
    Checksums,
    checksums_name,
    encode_checksums,
    encode_index,
    read_checksums,
    sample_checksum,
    walk_tar,
)
from mmstream.dataset.keys import read_keys
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    Manifest,
    json_lines,
    read_json,
)
from mmstream.dataset.shard_indexes import write_part
from mmstream.errors import ConfigError, ManifestError, ShardError, escaped, where
from mmstream.storage import LocalStore, Store, open_store
from mmstream.storage.store import map_requests
from mmstream.storage.write_lock import write_lock
from mmstream.tar.header import BLOCK, Member
from mmstream.tar.samples import split_member
from mmstream.types import SampleRef

UNTOUCHED = (
    "bakes, reshards and other copies; indexes of these tars in other folders; node caches; logs "
    "and quarantine files; old versions in a bucket that keeps them; other names (hard links), "
    "snapshots and backups of the files; measures, plans and conditions of stored selections; "
    "lists of duplicates of other splits; tables of other programs beside the tars"
)
"""What may hold something of erased samples, and is left as it is."""


class ErasedShard(NamedTuple):
    """A shard of which samples were erased."""

    name: str
    num_samples: int
    """Erased samples of it, those of earlier calls included."""
    before: str
    """SHA-256 of the tar before this call, in hexadecimal."""
    after: str


class _Edit(NamedTuple):
    """Bytes [start, stop) of a tar that become `head`, and then `fill` again and again."""

    start: int
    stop: int
    head: bytes
    fill: bytes


def require_erasable(dataset: Dataset, refs: Sequence[SampleRef]) -> None:
    """Raise an error if samples cannot be erased. Nothing is written.

    Raises:
        ConfigError: A tar cannot be written, or is of a dataset in another folder. Or a file of
            another sample is a link into one of these.
        ShardError: A tar is damaged, or is not the indexed one.
        StorageError: The storage failed.
    """
    store, index_store = dataset.store, dataset.index_store
    for shard, indexes in _by_shard(refs).items():
        folder, path = dirname(dataset.name_of(shard)), _real_path(store, dataset.name_of(shard))
        is_own = not folder and store.url == index_store.url
        if not is_own and store.exists(join(folder, MANIFEST_NAME)):
            raise ConfigError(
                f"erase: {store.url_of(dataset.name_of(shard))} is of a dataset in its own folder, "
                f"whose checksums would fit no more: erase in {store.url_of(folder)}"
            )
        if path is not None and not all(os.access(p, os.W_OK) for p in (path, path.parent)):
            raise ConfigError(
                f"erase: {path} or its folder cannot be written: run this as a user who may; "
                "nothing was changed"
            )
        _edits(dataset, shard, indexes)
    for folder_store in dict.fromkeys((store, index_store)):
        with write_lock(folder_store, "takedown"):  # an object store tells only who tries to write
            pass


def digests_of(dataset: Dataset, refs: Sequence[SampleRef]) -> dict[SampleRef, list[str]]:
    """Return what `take_down` keeps of the keys of samples, and of the ids that sidecars have.

    Where each caption is a sample, ``000000012-3``, it keeps the key of the row, too.
    """
    is_of_row = dataset.manifest.source.get("captions") == "each"
    digests = {
        ref: [digest_of(name) for name in dict.fromkeys((key, key.partition("-")[0]))]
        if is_of_row
        else [digest_of(key)]
        for ref, key in zip(refs, read_keys(dataset.shards, refs), strict=True)
        if key is not None
    }
    for shard, indexes in _by_shard(refs).items():
        with suppress(ConfigError, ShardError):  # it has no sidecar
            ids = read_columns(dataset, shard, ["id"])["id"]
            for index in indexes:
                if (text := ids[index].as_py()) is not None:
                    digests[shard, index].append(digest_of(text, "id"))
    return digests


def erase(dataset: Dataset) -> Iterator[ErasedShard]:
    """Overwrite all samples that are to be erased by the list of removed samples.

    Yields:
        The shards that were rewritten. All is done when the last one was yielded.

    Raises:
        LockedError: Another process writes there.
        ConfigError, ShardError, StorageError: As `require_erasable`.
    """
    store = dataset.index_store
    shards = {info.name: number for number, info in enumerate(dataset.manifest.shards)}
    with write_lock(store, "takedown"):
        file = read_removed(store)
        unfinished = [name for name in file.unfinished if name in shards]
        if not unfinished:
            return
        _remove_leftovers(dataset, unfinished)
        digests = {
            digest
            for of_shard in file.erased.values()
            for of_sample in of_shard.values()
            for digest in of_sample
        }
        manifest = dataset.manifest
        with suppress(FileNotFoundError):
            manifest = Manifest.read(store)
        tars = dict[str, _Tar]()
        for name in unfinished:
            shard, indexes = shards[name], sorted(file.erased[name])
            tars[name] = tar = _rewrite_tar(dataset, shard, indexes)
            _rewrite_small_files(dataset, shard, tar)
            known = manifest.erased.get(name) or dataset.manifest.shards[shard].sha256
            yield ErasedShard(name, len(indexes), known or tar.before, tar.after)
        _rewrite_reports(store, digests, manifest.source.get("keys") != "kept")
        if store.exists(MANIFEST_NAME):
            _rewrite_manifest(store, manifest, tars)
        mark_erased(store, unfinished)


def _remove_leftovers(dataset: Dataset, shards: Sequence[str]) -> None:
    """Remove what killed calls left of files that they were writing."""
    beside = (str, checksums_name, sidecar_name)
    names = "|".join(re.escape(name_of(shard)) for shard in shards for name_of in beside)
    for store in dict.fromkeys((dataset.index_store, dataset.store)):
        remove_leftovers(store, LEFTOVERS)
        remove_leftovers(store, {"": names})


def _by_shard(refs: Sequence[SampleRef]) -> dict[int, list[int]]:
    by_shard: dict[int, list[int]] = {}
    for shard, index in refs:
        by_shard.setdefault(shard, []).append(index)
    return by_shard


# -- the tar ---------------------------------------------------------------------------------------


@dataclass
class _Tar:
    """A tar that was rewritten."""

    keys: dict[int, str]
    """The new keys of erased samples, by their indexes."""
    before: str
    after: str
    """SHA-256 of its bytes before and now."""
    checksums: dict[int, int]
    """CRC-32C of the erased samples."""
    column: Checksums | None = None
    """That of all samples, if it is known."""


def _rewrite_tar(dataset: Dataset, shard: int, indexes: Sequence[int]) -> _Tar:
    """Rewrite a tar, with other bytes where samples are erased."""
    store, name = dataset.store, dataset.name_of(shard)
    edits, keys = _edits(dataset, shard, indexes)
    offsets, size = dataset.shards.offsets(shard), dataset.manifest.shards[shard].num_bytes
    before, after = hashlib.sha256(), hashlib.sha256()
    with _create(store, name) as file:
        for start in range(0, size, READ_BYTES):
            stop = min(size, start + READ_BYTES)
            data = bytearray(store.read_range(name, start, stop))
            before.update(data)
            for edit in edits:
                first, end = max(start, edit.start), min(stop, edit.stop)
                if first < end:
                    new = edit.head[first - edit.start : end - edit.start]
                    data[first - start : end - start] = new.ljust(end - first, edit.fill)
            after.update(data)
            file.write(data)
    checksums = {
        index: sample_checksum(store.read_range(name, *offsets[index : index + 2].tolist()))
        for index in indexes
    }
    return _Tar(keys, before.hexdigest(), after.hexdigest(), checksums)


def _edits(
    dataset: Dataset, shard: int, indexes: Collection[int]
) -> tuple[list[_Edit], dict[int, str]]:
    """Return what changes in a tar where samples are erased, and their new keys.

    A new key follows from the index alone, unless another sample has it. So the edits of a tar that
    was edited already are the same.
    """
    name, offsets = dataset.name_of(shard), dataset.shards.offsets(shard)
    size = dataset.store.size(name)
    try:
        members = list(walk_tar(dataset.store, name, size))
    except ShardError as error:
        raise ShardError(
            f"{name}: {error}; `mmstream reshard` writes the dataset without what was taken down"
        ) from error
    starts = np.array([member.offset for member in members], dtype=np.int64)
    owners = (np.searchsorted(offsets, starts, side="right") - 1).tolist()
    if size != dataset.manifest.shards[shard].num_bytes or not np.isin(offsets[:-1], starts).all():
        raise ShardError(f"{name}: is not the tar that was indexed; run `mmstream verify`")
    erased = set(indexes)
    gone = {normpath(m.name) for m, owner in zip(members, owners, strict=True) if owner in erased}
    kept_keys = set()
    for member, owner in zip(members, owners, strict=True):
        if owner not in erased and (split := split_member(member)):
            kept_keys.add(split[0])
            if member.link is not None and normpath(member.link) in gone:
                raise ConfigError(
                    f"erase: {where(name, owner)} {escaped(member.name)} is a link to a file that "
                    "is to be erased: take this sample down too, or leave both out of a reshard"
                )
    keys: dict[int, str] = {}
    for index in indexes:
        keys[index] = f"erased-{index}"
        while keys[index] in kept_keys:
            keys[index] += "-"
    return [
        edit
        for member, owner in zip(members, owners, strict=True)
        if owner in erased and (member.is_file or member.link is not None)
        for edit in _overwritten(member, keys[owner], where(name, owner))
    ], keys


def _overwritten(member: Member, key: str, address: str) -> tuple[_Edit, _Edit]:
    """Return what takes the place of a member: a file of its length with another key."""
    split, size = split_member(member), 0 if member.link is not None else member.size
    # What is not a file of a sample stays none: readers leave out what begins so.
    name = f"._{key}" if split is None else key + member.name[len(split[0]) :]
    head, stop = _header(name, size, member.data_offset - member.offset), member.data_offset + size
    if not head:
        raise ConfigError(
            f"erase: {address} {escaped(member.name)}: a header of such names cannot be "
            "overwritten; `mmstream reshard` writes the dataset without this sample"
        )
    fill = b"0"
    if split is not None and split[1].endswith("json") and size >= 2:
        head, fill = head + b"{}", b" "
    return _Edit(member.offset, stop, head, fill), _Edit(stop, member.end, b"", b"\0")


def _header(name: str, size: int, num_bytes: int) -> bytes:
    """Return a header of a file that takes so many bytes; none if there is no such header.

    Where a long name took more than a block, a comment takes its place.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    if num_bytes == BLOCK:
        header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    else:
        header, comment = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"), ""
        while len(header) < num_bytes:  # a comment of any length takes two blocks more
            comment += " " * max(BLOCK // 2, num_bytes - len(header) - 3 * BLOCK)
            info.pax_headers = {"comment": comment}
            header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return header if len(header) == num_bytes else b""


# -- the files beside it ---------------------------------------------------------------------------


def _rewrite_small_files(dataset: Dataset, shard: int, tar: _Tar) -> None:
    """Rewrite the checksums, the sidecar and the report of a shard."""
    store, name = dataset.index_store, dataset.name_of(shard)
    columns = dataset.shards.indexes.columns(shard)
    index, checksums = encode_index(columns.offsets()), columns.checksums
    with suppress(FileNotFoundError, ShardError):
        checksums = read_checksums(store, name, index)
    if checksums is not None:
        checksums = checksums.copy()
        checksums[list(tar.checksums)] = list(tar.checksums.values())
        tar.column = checksums
        _write(store, checksums_name(name), encode_checksums(checksums, index))
    store.remove(f"{name}.facts")  # texts that earlier versions kept here
    for folder in dict.fromkeys((store, dataset.store)):
        _rewrite_sidecar(folder, name, tar.keys)


def _rewrite_sidecar(
    store: Store, shard: str, keys: Mapping[int, str], rejects: Collection[int] = ()
) -> None:
    """Rewrite a sidecar, as `empty_rows` returns it, and what the shard's report says of it."""
    sidecar = empty_rows(store, shard, keys, rejects)
    if sidecar is None:
        return
    _write(store, sidecar_name(shard), sidecar)
    if store.exists(report_name(shard)):
        report = read_json(store, report_name(shard))
        report["sidecar_bytes"] = len(sidecar)
        report["sidecar_sha256"] = hashlib.sha256(sidecar).hexdigest()
        _write(store, report_name(shard), msgspec.json.encode(report) + b"\n")


def _rewrite_reports(store: Store, digests: Collection[str], have_row_keys: bool) -> None:
    """Empty the rejects of rows that became samples later, and leave out pairs of duplicates.

    The sidecars tell which these are. So they are written last.

    Args:
        store: Of the reports.
        digests: What `digest_of` made of the keys and ids of erased samples.
        have_row_keys: Samples have the keys of their rows, as rejects have. Those of tars have not.
    """

    def erased_rejects(shard: str) -> dict[int, str]:
        rejects, are_erased = rejects_of(store, shard), are_of_erased(store, shard, digests)
        if are_erased is None or len(are_erased) != len(rejects):
            are_erased = [have_row_keys and digest_of(reject.key) in digests for reject in rejects]
        return {  # empty ones, too: a call that was killed may have got so far
            number: reject.key
            for number, reject in enumerate(rejects)
            if are_erased[number] or reject == _NO_REJECT
        }

    names = open_store(store.url_of(REPORTS)).list()
    shards = [f"{name.removesuffix(_REJECTS)}.tar" for name in names if name.endswith(_REJECTS)]
    emptied = dict(zip(shards, map_requests(store, erased_rejects, shards), strict=True))
    all_keys = {key for keys in emptied.values() for key in keys.values()} - {""}

    def is_erased(reject: Mapping[str, Any]) -> bool:
        key = reject.get("key", "")
        return key in all_keys or (have_row_keys and digest_of(key) in digests)

    def is_of_pair(pair: Mapping[str, Any]) -> bool:
        keys = pair.get("key", ""), pair.get("first", {}).get("key", "")
        return any(digest_of(key) in digests for key in keys)

    _leave_out(store, REJECTS_NAME, is_erased, are_kept=True)
    _leave_out(store, DUPLICATES_NAME, is_of_pair, are_kept=False)
    report = read_report(store)
    kinds = () if report is None else report.reject_kinds
    if report is not None and any(is_erased({"key": kind.example.key}) for kind in kinds):
        emptied_kinds = tuple(
            replace(kind, example=_NO_REJECT) if is_erased({"key": kind.example.key}) else kind
            for kind in kinds
        )
        _write(store, REPORT_NAME, json_lines(replace(report, reject_kinds=emptied_kinds)))
    for shard, keys in emptied.items():
        if keys:
            _leave_out(store, rejects_name(shard), is_erased, are_kept=True)
            _rewrite_sidecar(store, shard, {}, keys)


_REJECTS = ".rejects.jsonl"
_NO_REJECT = Reject("", 0, "")
_EMPTY_REJECT = msgspec.json.encode(_NO_REJECT)


def _leave_out(
    store: Store, name: str, is_erased: Callable[[dict[str, Any]], bool], *, are_kept: bool
) -> None:
    """Rewrite a file of JSON lines without those of erased samples, if it has some.

    Args:
        store: Holds the file.
        name: Of the file.
        is_erased: Tells this of a line.
        are_kept: They stay as empty rejects of their lengths: each row counts, and so do the bytes.
    """
    if not store.exists(name) or not any(map(is_erased, _values(store, name))):
        return
    with _create(store, name) as file:
        for line, value in zip(lines_of(store, name), _values(store, name), strict=True):
            if not is_erased(value):
                file.write(line + b"\n")
            elif are_kept:
                file.write(_EMPTY_REJECT.ljust(len(line)) + b"\n")


def _values(store: Store, name: str) -> Iterator[dict[str, Any]]:
    for line in lines_of(store, name):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ManifestError(
                f"{store.url_of(name)}: {error}; remove this line, and run this again"
            ) from None


def _rewrite_manifest(store: Store, manifest: Manifest, tars: Mapping[str, _Tar]) -> None:
    """Rewrite the parts of the index that have other checksums now, and the manifest."""
    checksums, parts = {name: tar.column for name, tar in tars.items()}, []
    for part in manifest.index_parts:
        first, last = part.first_shard, part.last_shard
        names = {info.name for info in manifest.shards[first : last + 1]}
        if manifest.checksums is not None and names & tars.keys():
            part = write_part(store, manifest, first, last, rewritten=checksums) or part
        parts.append(part)
    names = {info.name for info in manifest.shards}
    erased = manifest.erased | {name: tar.after for name, tar in tars.items() if name in names}
    new_manifest = replace(manifest, erased=erased, index_parts=tuple(parts))
    store.write(MANIFEST_NAME, new_manifest.to_bytes())
    for name in store.list():
        if INDEX_PART_NAME.fullmatch(name) and name not in {part.name for part in parts}:
            store.remove(name)


def _write(store: Store, name: str, data: bytes) -> None:
    with _create(store, name) as file:
        file.write(data)


@contextmanager
def _create(store: Store, name: str) -> Iterator[BinaryIO]:
    """Open the new file of an old one. It has its mode, and lies where a link leads to."""
    path = _real_path(store, name)
    folder = store if path is None else LocalStore(str(path.parent))
    with folder.create(name if path is None else path.name) as file:
        if path is not None:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
        yield file


def _real_path(store: Store, name: str) -> Path | None:
    """Return where a file of a folder lies. None: of an object."""
    return Path(store.url, name).resolve() if isinstance(store, LocalStore) else None
