"""Step 4 of a conversion: one shard, from its rows to its report.

    rows -> formats -> media -> SHARD

`write_shard` is the job of a worker process; it calls the steps before it, row by row. It writes
the tar, its index, the checksums of its samples, its facts where they are asked for, its sidecar,
its rejects and its report, in this order, each of them whole or not at all. The report commits the
shard: with a report, and the others of the right size, the shard is finished.

Samples of another dataset: by default all of their fields are taken byte for byte. Where media are
checked or changed, their images, audios and videos are media of a `Draft`, as those of a row are.

Bakes and re-sharding write the files of their shards by the same functions.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import BinaryIO, cast

import msgspec

from mmstream.converting.draft import (
    Draft,
    LeftOutError,
    MediaRef,
    RowError,
    StoredSample,
    media_of,
    samples_of,
)
from mmstream.converting.media.load import IdleCpus, load_rows
from mmstream.converting.media.references import MediaAccess
from mmstream.converting.options import MediaOptions, Options
from mmstream.converting.report import (
    Reject,
    RowCounter,
    RowCounts,
    ShardRejects,
    read_shard_report,
    rejects_name,
    rejects_of,
    report_name,
)
from mmstream.converting.rows.records import Row, RowRange, encodable
from mmstream.converting.sidecar import SidecarWriter, perceptual_hash
from mmstream.dataset.columns import sidecar_name
from mmstream.dataset.index import (
    checksums_name,
    checksums_size,
    decode_index,
    encode_checksums,
    encode_index,
    index_name,
    index_size,
    object_sha256,
    read_samples,
    sample_checksum,
)
from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import MMStreamError, ShardError, StorageError
from mmstream.media.fields import media_files
from mmstream.media.types import kind_of
from mmstream.storage import Store
from mmstream.storage.store import map_requests, sizes_of
from mmstream.storage.write_lock import WriteLock
from mmstream.tar.header import BLOCK
from mmstream.tar.writer import TarWriter

KEY_DIGITS = 9
"""Keys of equal length sort like their rows, up to a billion rows. Longer keys are still unique."""

Samples = Iterator[tuple[str, dict[str, bytes]]]


@dataclass(frozen=True)
class ShardReport:
    """The result of one shard."""

    name: str
    num_rows: int
    num_samples: int
    num_bytes: int
    """Size of the tar. 0 if every row was rejected; there is no tar then."""
    sha256: str | None
    """Checksum of the tar."""
    fields: dict[str, int]
    """{field: number of samples that have it}."""
    num_rejects: int
    rejects_bytes: int
    """Size of the file of the shard's rejects. 0: there is no such file."""
    counts: RowCounts = field(default_factory=RowCounts)
    """Formats, keys that nothing read, and media of the rows that became samples."""
    sidecar_bytes: int = 0
    """Size of the sidecar. 0: there is none, or its size is not known."""
    sidecar_sha256: str | None = None
    """Checksum of the sidecar."""
    reused: bool = False
    """True: an earlier call wrote the shard. Not stored."""
    repaired: bool = False
    """True: an earlier call wrote the shard, but it was damaged since. Not stored."""
    append: str | None = None
    """As in `ShardJob`. Stored where it is known."""

    @property
    def shard(self) -> ShardInfo:
        """What a manifest says of the shard."""
        return ShardInfo(self.name, self.num_samples, self.num_bytes, self.sha256)


@dataclass(frozen=True)
class ShardJob:
    """What a process needs to write one shard."""

    store: Store
    name: str
    rows: RowRange
    access: MediaAccess
    options: Options
    split: str | None
    """Name of the split, for the sidecar."""
    lock: WriteLock
    """Held by the main process. Nothing is committed without it."""
    check: bool = False
    """Read a shard that an earlier call wrote, and compare its checksums."""
    expected: ShardInfo | None = None
    """The shard as the manifest of a finished dataset has it."""
    append: str | None = None
    """Digest of the append that the shard is of. None: it is of the conversion, or of a retry."""
    first_row: int = 0
    """Rows of all conversions before: the key of a row is its number, plus this, plus 1."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """{key: reason} of the rows that the dataset has already."""


def write_shard(job: ShardJob, idle_cpus: IdleCpus | None = None) -> ShardReport:
    """Write one shard, unless an earlier call did. Return its report.

    A row that cannot be used raises nothing. It becomes a line of the shard's rejects.

    Args:
        job: The shard.
        idle_cpus: What helps to check media. The bytes of the shard do not depend on it.

    Raises:
        MMStreamError: The file of rows changed since the conversion began, the lock was lost, or a
            shard of a finished dataset cannot be written again as it was.
        StorageError: Storage failed after retries.
        OSError: The local disk failed.
    """
    committed = _committed_report(job)
    if committed is not None and _is_intact(job, committed):
        return replace(committed, reused=True)
    report = ShardReport(job.name, len(job.rows), 0, 0, None, {}, 0, 0, append=job.append)
    counter = RowCounter()
    with _sidecar(job) as sidecar, ExitStack() as stack:
        rejects = ShardRejects(job.store, job.name, stack)
        samples = _samples(job, rejects, sidecar, counter, idle_cpus)
        first = next(samples, None)
        if first is not None:
            report = _write_tar(job, chain([first], samples), report)
        report = replace(
            report,
            num_rejects=rejects.num_rejects,
            rejects_bytes=rejects.num_bytes,
            counts=counter.counts,
        )
        _require_expected(job, report.sha256)
        job.lock.require()
    if sidecar is not None:
        report = replace(report, sidecar_bytes=sidecar.num_bytes, sidecar_sha256=sidecar.sha256)
    stored = msgspec.to_builtins(report)
    del stored["reused"], stored["repaired"]
    if job.append is None:
        del stored["append"]
    job.lock.require()
    job.store.write(report_name(job.name), msgspec.json.encode(stored) + b"\n")
    return replace(report, repaired=committed is not None)


def files_of(report: ShardReport) -> dict[str, int]:
    """Return {name: bytes} of all files of a written shard but its report."""
    sizes = shard_sizes(report.shard)
    if report.rejects_bytes:
        sizes[rejects_name(report.name)] = report.rejects_bytes
    if report.sidecar_bytes:
        sizes[sidecar_name(report.name)] = report.sidecar_bytes
    return sizes


def missing_file(job: ShardJob, report: ShardReport) -> str | None:
    """Return the first file of a written shard that is missing or has another size, or None."""
    sizes = files_of(report)
    if job.options.sidecar:
        sizes.setdefault(sidecar_name(job.name), report.sidecar_bytes)
    return wrong_size(job.store, sizes)


def _committed_report(job: ShardJob) -> ShardReport | None:
    """Return the report of a shard that an earlier call wrote, otherwise None."""
    if job.expected is not None:
        shard, stored = job.expected, read_shard_report(job.store, job.name, ShardReport)
        return ShardReport(
            shard.name,
            len(job.rows),
            shard.num_samples,
            shard.num_bytes,
            shard.sha256,
            {},
            0,
            0,
            sidecar_bytes=stored.sidecar_bytes if stored else 0,
            sidecar_sha256=stored.sidecar_sha256 if stored else None,
        )
    report = read_shard_report(job.store, job.name, ShardReport)  # damaged: it is written again
    return report if report is not None and report.append == job.append else None


def _is_intact(job: ShardJob, report: ShardReport) -> bool:
    """Tell whether the files of a shard are still those that an earlier call wrote.

    Their lengths are compared, and with `ShardJob.check` their content.
    """
    if missing_file(job, report) is not None:
        return False
    if not job.check:
        return True
    if job.options.sidecar and report.sidecar_sha256 != object_sha256(
        job.store, sidecar_name(job.name), report.sidecar_bytes
    ):
        return False
    if not report.num_samples:
        return True
    index = job.store.read(index_name(job.name))
    try:
        offsets = decode_index(index, index_name(job.name))
    except ShardError:
        return False
    if int(offsets[-1]) + 2 * BLOCK != report.num_bytes:
        return False
    digest = hashlib.sha256()
    samples = read_samples(job.store, job.name, report.num_bytes, offsets, digest.update)
    column = encode_checksums([sample_checksum(sample) for sample in samples], index)
    is_same = digest.hexdigest() == report.sha256
    return is_same and job.store.read(checksums_name(job.name)) == column


def _require_expected(job: ShardJob, sha256: str | None) -> None:
    """Raise an MMStreamError if a damaged shard of a finished dataset cannot be written again."""
    if job.expected is not None and sha256 != job.expected.sha256:
        raise MMStreamError(
            f"{job.store.url_of(job.name)}: is damaged, and its rows give other bytes now: a media "
            "file is missing or has changed, or samples were erased, which must not come back. "
            "Restore it and run the same command again, or convert all again with "
            "rerun=mm.Rerun(overwrite=True)"
        )


def _write_tar(job: ShardJob, samples: Samples, report: ShardReport) -> ShardReport:
    num_with_field: Counter[str] = Counter()

    def counted() -> Samples:
        for key, fields in samples:
            num_with_field.update(fields.keys())
            yield key, fields

    def require(shard: ShardInfo) -> None:
        _require_expected(job, shard.sha256)
        job.lock.require()

    shard = write_tar(job.store, job.name, counted(), require)
    name = wrong_size(job.store, shard_sizes(shard))
    if name is not None:
        raise StorageError(
            f"{job.store.url_of(name)}: has another size than what was written: the storage or its "
            "client library lost bytes, or another program writes there too. Run the same command "
            "again; if this comes again, convert to a folder and copy that"
        )
    return replace(
        report,
        num_samples=shard.num_samples,
        num_bytes=shard.num_bytes,
        sha256=shard.sha256,
        fields={encodable(name): num_with_field[name] for name in sorted(num_with_field)},
    )


def _sidecar(job: ShardJob) -> AbstractContextManager[SidecarWriter | None]:
    if not job.options.sidecar:
        return nullcontext()
    hash_image = perceptual_hash if job.options.duplicates.near else None
    return SidecarWriter(job.store, job.name, job.split, hash_image)


def _samples(
    job: ShardJob,
    rejects: ShardRejects,
    sidecar: SidecarWriter | None,
    counter: RowCounter,
    idle_cpus: IdleCpus | None,
) -> Samples:
    """Yield (key, fields) of every sample. Add the rows that cannot be used to `rejects`.

    The sidecar gets both.
    """
    per_caption = job.options.reading.captions == "each"
    for row, draft, media in load_rows(_drafts(job), job.access, job.options.media, idle_cpus):
        key = row_key(job.first_row + row.index)
        if isinstance(draft, RowError):
            left_out = isinstance(draft, LeftOutError)
            rejects.add(Reject(row.file, row.number, str(draft), key, left_out))
            if sidecar is not None:
                if left_out and job.append is not None:
                    # The dataset has this row. Once its sample is erased, no id may be left here.
                    row = msgspec.structs.replace(row, value=None)
                own_key = row.value.key if isinstance(row.value, StoredSample) else key
                sidecar.add_reject(row, own_key, str(draft))
            continue
        stored = media or (media_of(draft.fields) if draft.key is not None else media)
        counter.add(draft, stored)
        for sample_key, fields in samples_of(key, draft, media, per_caption):
            if sidecar is not None:
                sidecar.add_sample(row, sample_key, fields, stored)
            yield sample_key, fields


def _drafts(job: ShardJob) -> Iterator[tuple[Row, Draft | RowError]]:
    """Yield each row of a shard with its draft, or with the reason why it has none."""
    rejects_by_key = _known_rejects(job)
    for row in job.rows.read():
        if rejects_by_key and (reject := rejects_by_key.get(row_key(job.first_row + row.index))):
            yield row, reject
        elif isinstance(row.value, RowError):
            yield row, row.value
        elif isinstance(row.value, StoredSample):
            yield row, draft_of(row.value, job.options.media)
        else:
            try:
                draft = job.options.format.draft(row.value, row.file)
            except RowError as error:
                yield row, error
            else:
                yield row, draft


def _known_rejects(job: ShardJob) -> dict[str, RowError]:
    """Return {key: why} of the rows that a shard of a finished dataset rejected.

    Their media may be there by now. But their place is an extra shard of a retry. Of a shard that
    is appended, they are the rows that the dataset has already.
    """
    if job.expected is None:
        return {key: LeftOutError(reason) for key, reason in job.refused.items()}
    return {
        reject.key: (LeftOutError if reject.left_out else RowError)(reject.reason)
        for reject in rejects_of(job.store, job.name)
    }


def row_key(number: int) -> str:
    """Return the key of a row by its number from 0, over all that were converted before."""
    return str(number + 1).zfill(KEY_DIGITS)


def draft_of(sample: StoredSample, options: MediaOptions) -> Draft:
    """Return the draft of a stored sample. With no checks or changes, it has no media."""
    if options.is_plain:
        return Draft({}, fields=sample.fields, key=sample.key)

    def ref(name: str, frames: Iterable[str] = ()) -> MediaRef:
        kind = kind_of(name) or "image"
        files = tuple(map(ref, frames))
        return MediaRef(kind, name, sample.fields[name], field=name, frames=files)

    media = tuple(ref(name, frames) for name, frames in media_files(sample.fields).items())
    others = {name: data for name, data in sample.fields.items() if kind_of(name) is None}
    return Draft({}, media, fields=others, key=sample.key)


# -- the files of a shard --------------------------------------------------------------------------


def shard_sizes(shard: ShardInfo) -> dict[str, int]:
    """Return {name: bytes} of the files of a shard. A shard without samples has none."""
    if not shard.num_samples:
        return {}
    return {
        shard.name: shard.num_bytes,
        index_name(shard.name): index_size(shard.num_samples),
        checksums_name(shard.name): checksums_size(shard.num_samples),
    }


def wrong_size(store: Store, sizes: Mapping[str, int]) -> str | None:
    """Return the first file that is missing or has another size, or None."""
    current = sizes_of(store, sizes)
    wrong = [name for name, size in zip(sizes, current, strict=True) if size != sizes[name]]
    return wrong[0] if wrong else None


def write_tar(
    store: Store,
    name: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    require: Callable[[ShardInfo], None],
) -> ShardInfo:
    """Write the tar of a shard, and then the small files beside it.

    Args:
        store: The destination.
        name: Of the tar.
        samples: Pairs (key, fields).
        require: Called before the tar appears. What it raises leaves no tar.
    """
    with store.create(name) as file, HashedFile(file) as hashed:
        writer = TarWriter(cast(BinaryIO, hashed))
        for key, fields in samples:
            writer.add(key, fields)
        writer.close()
        sha256 = hashed.close()
        info = ShardInfo(name, len(writer.offsets) - 1, writer.num_bytes, sha256)
        require(info)
    write_indexes(store, name, writer.offsets, writer.checksums)
    return info


def write_indexes(
    store: Store,
    shard: str,
    offsets: list[int],
    checksums: list[int],
) -> None:
    """Write the small files beside a tar: its index, and the checksums of its samples.

    Args:
        store: Holds the tar.
        shard: Its name.
        offsets: Of its samples, and after the last one.
        checksums: Of its samples.
    """
    index = encode_index(offsets)
    files = {index_name(shard): index, checksums_name(shard): encode_checksums(checksums, index)}
    map_requests(store, lambda file: store.write(*file), files.items())


BLOCK_BYTES = 1 << 20
"""Small pieces, such as headers, are joined to blocks of this size. Larger ones stay whole."""
MAX_WAITING = 4


class HashedFile:
    """Passes bytes on to a file, and computes their SHA-256.

    A context manager. All bytes are written when `close` returns; an error in the file is raised by
    `close` or by a later `write`.

    Args:
        file: Where the bytes go. It stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1, "mmstream-write")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> int:
        """Take bytes, and wait while too many others are not written yet."""
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= BLOCK_BYTES:
            self._pass_on()
        return len(data)

    def close(self) -> str:
        """Wait until all bytes are written, and return their SHA-256 as 64 hexadecimal digits."""
        self._pass_on()
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        while len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, self._pieces))
        self._pieces, self._num_bytes = [], 0

    def _write(self, pieces: list[bytes]) -> None:
        block = b"".join(pieces)
        self._file.write(block)
        self._digest.update(block)
