"""Step 4 of a conversion: shards, from their rows to their reports, and who writes them.

    rows -> formats -> media -> SHARD
    plan -> jobs -> ENGINE of `write_shard` -> reports -> manifest

`write_shard` is the job of a worker process; it calls the steps before it, row by row. It writes
the tar, its index, the checksums of its samples, its sidecar, its rejects and its report, in this
order, each of them whole or not at all. The report commits the shard: with a report, and the others
of the right size, the shard is finished.

Samples of another dataset: by default all of their fields are taken byte for byte. Where media are
checked or changed, their images, audios and videos are media of a `Draft`, as those of a row are.

Bakes and re-sharding write the files of their shards by the same functions.

Several shards are written at a time. A job is one shard.

Worker processes: each holds one sample in memory. What they write does not depend on their number.
When no shard is left to begin, the CPUs of idle workers go to the shards that are still written:
their processes check media in threads, because decoders and encoders release Python's lock.

Tasks of a Ray cluster: a task of a worker or node that died runs again on another one. A shard that
was committed is not written twice. Ray gives each task to the next free CPU: a slow shard holds one
CPU, and the others go on. All nodes must see the destination and the media under the same paths.
Rows need not be there: they go with their job, where they lie on this machine.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from traceback import format_exc
from typing import Any, BinaryIO, Literal, TypeAlias, cast

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
from mmstream.converting.media.references import MediaAccess, folder_stamp
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
from mmstream.errors import ConfigError, MMStreamError, ShardError, StorageError
from mmstream.media.fields import media_files
from mmstream.media.types import kind_of
from mmstream.processes.machine import num_cores
from mmstream.processes.workers import run_in_processes
from mmstream.storage import Store, is_remote, open_store
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
    shard, fields, counter = ShardInfo(job.name, 0, 0), dict[str, int](), RowCounter()
    with _sidecar(job) as sidecar, ExitStack() as stack:
        rejects = ShardRejects(job.store, job.name, stack)
        samples = _samples(job, rejects, sidecar, counter, idle_cpus)
        first = next(samples, None)
        if first is not None:
            shard, fields = _write_tar(job, chain([first], samples))
        _require_expected(job, shard.sha256)
        job.lock.require()
    report = ShardReport(
        job.name,
        len(job.rows),
        shard.num_samples,
        shard.num_bytes,
        shard.sha256,
        fields,
        rejects.num_rejects,
        rejects.num_bytes,
        counter.counts,
        append=job.append,
    )
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


def _write_tar(job: ShardJob, samples: Samples) -> tuple[ShardInfo, dict[str, int]]:
    """Write the tar of a shard. Return it, and how many samples have each field."""
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
    return shard, {encodable(name): num_with_field[name] for name in sorted(num_with_field)}


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
    samples: Iterable[tuple[str, Mapping[str, bytes]] | bytes],
    require: Callable[[ShardInfo], None],
) -> ShardInfo:
    """Write the tar of a shard, and then the small files beside it.

    Args:
        store: The destination.
        name: Of the tar.
        samples: Pairs (key, fields), or the bytes of samples of other tars.
        require: Called before the tar appears. What it raises leaves no tar.
    """
    with store.create(name) as file, HashedFile(file) as hashed:
        writer = TarWriter(cast(BinaryIO, hashed))
        for sample in samples:
            if isinstance(sample, tuple):
                writer.add(*sample)
            else:
                writer.copy(sample)
        writer.close()
        sha256 = hashed.close()
        info = ShardInfo(name, len(writer.offsets) - 1, writer.num_bytes, sha256)
        require(info)
    index = encode_index(writer.offsets)
    checksums = encode_checksums(writer.checksums, index)
    files = {index_name(name): index, checksums_name(name): checksums}
    map_requests(store, lambda file: store.write(*file), files.items())
    return info


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


# -- engines: who writes the shards of a conversion ------------------------------------------------

EngineName: TypeAlias = Literal["processes", "ray"]


def write_shards(
    jobs: Iterable[ShardJob], engine: EngineName, num_workers: int | None
) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    Args:
        jobs: One for each shard.
        engine: Ray is imported only if it is named.
        num_workers: Processes, or tasks of Ray at a time. Default: 1 process, or two tasks for each
            CPU of the cluster.
    """
    if engine == "ray":
        return _run_on_ray(jobs, num_workers)
    return _run_in_workers(jobs, num_workers or 1)


def _run_in_workers(
    jobs: Iterable[ShardJob], num_workers: int
) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    With `num_workers` 0 or 1, this process writes them.

    Raises:
        MMStreamError: A worker process died. Finished shards are kept.
        Exception: Whatever `write_shard` raises. The other workers are stopped.
    """
    if num_workers <= 1:
        yield from ((job.store.url, write_shard(job)) for job in jobs)
        return
    num_cpus = min(num_workers, num_cores())
    cpus_per_shard = multiprocessing.get_context("forkserver").RawValue("i", 1)
    num_unfinished, all_begun = 0, False

    def begun() -> Iterator[ShardJob]:
        nonlocal num_unfinished, all_begun
        for job in jobs:
            num_unfinished += 1
            yield job
        all_begun = True
        share_cpus()

    def share_cpus() -> None:
        cpus_per_shard.value = max(1, num_cpus // max(1, num_unfinished))

    for job, report in run_in_processes(
        _write_shard_in_worker,
        begun(),
        num_workers,
        command="convert",
        prepare=IdleCpus.begin,
        prepare_args=(cpus_per_shard,),
    ):
        num_unfinished -= 1
        if all_begun:
            share_cpus()
        yield job.store.url, report


def _write_shard_in_worker(job: ShardJob) -> ShardReport:
    with closing(IdleCpus()) as idle_cpus:
        return write_shard(job, idle_cpus)


MAX_RETRIES = 5
"""Deaths of a worker or node that a task survives."""

TASKS_PER_CPU = 2
"""Tasks in flight. One of them waits, so that a CPU never does. Each holds the rows of a shard."""


def _run_on_ray(
    jobs: Iterable[ShardJob], num_workers: int | None = None
) -> Iterator[tuple[str, ShardReport]]:
    """Write shards. Yield (URL of the store, report) for each job, when it is done.

    It uses the Ray that this process has started, or the cluster of ``RAY_ADDRESS``. Otherwise it
    starts Ray on this machine, and ends it afterwards.

    Args:
        jobs: One for each shard.
        num_workers: Most tasks at a time. Default: two for each CPU of the cluster.

    Raises:
        ConfigError: Ray is not installed.
        MMStreamError: A task died again and again. Finished shards are kept.
        StorageError: This machine does not see what a node wrote.
        Exception: Whatever `write_shard` raises. The other tasks are cancelled.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("engine='ray': Ray is not installed; pip install 'ray[train]'") from None

    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield from _drain(ray, iter(jobs), num_workers)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise MMStreamError(
            f"convert: a task of Ray died {MAX_RETRIES + 1} times ({reason}). Finished shards are "
            "kept; to continue, run the same command again"
        ) from None
    finally:
        if is_own:
            ray.shutdown()


def _drain(
    ray: Any, jobs: Iterator[ShardJob], num_workers: int | None
) -> Iterator[tuple[str, ShardReport]]:
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_write_shard_on_ray)
    running: dict[Any, ShardJob] = {}
    try:
        while True:
            # The cluster may grow and shrink.
            num_cpus = int(ray.cluster_resources().get("CPU", 1))
            limit = num_workers or max(2, TASKS_PER_CPU * num_cpus)
            for job in islice(jobs, max(0, limit - len(running))):
                running[task.remote(_portable(job), job.options.media.plan())] = job
            if not running:
                return
            for reference in ray.wait(list(running), num_returns=1)[0]:
                job, report = running.pop(reference), ray.get(reference)
                if isinstance(report, Exception):
                    raise report
                _require_visible(job, report)
                yield job.store.url, report
    finally:
        # Ctrl-C, or a task failed: nobody waits for the other shards.
        for reference in running:
            ray.cancel(reference, force=True)


def _portable(job: ShardJob) -> ShardJob:
    """Return a job that any node can do: with its rows, and without relative paths."""
    store, lock = job.store, job.lock
    if store.local_path("") is not None:
        store = open_store(str(Path(store.url).absolute()))
        lock = replace(lock, store=store)
    return replace(job, store=store, lock=lock, rows=job.rows.detached())


def _write_shard_on_ray(job: ShardJob, media_plan: dict[str, Any]) -> ShardReport | Exception:
    """Write a shard. An error is returned: Ray would wrap it in a traceback."""
    try:
        _require_same_libraries(job.options.media, media_plan)
        return write_shard(replace(job, access=_on_this_node(job.access)))
    except Exception as error:
        error.add_note(format_exc())  # a traceback does not travel; a function of the user needs it
        return error


def _require_same_libraries(media: MediaOptions, media_plan: dict[str, Any]) -> None:
    """Refuse to change images with other libraries than the machine that made the plan."""
    own = media.plan()
    if own != media_plan:
        raise ConfigError(
            f"a node of Ray would write other images: it has {own}, and this machine has "
            f"{media_plan}; install the same versions on all nodes"
        )


def _on_this_node(access: MediaAccess) -> MediaAccess:
    """Return the access to media with what identifies their folder on this node."""
    if access.root is None or is_remote(access.root):
        return access
    stamp = folder_stamp(access.root)
    if stamp is None:
        raise StorageError(
            f"{access.root}: a node of Ray does not see this folder of media; share it with all "
            "nodes, or name an s3:// prefix"
        )
    return replace(access, root_stamp=stamp)


def _require_visible(job: ShardJob, report: ShardReport) -> None:
    name = missing_file(job, report)
    if name is not None:
        raise StorageError(
            f"{job.store.url_of(name)}: a node of Ray wrote it, and this machine does not see it; "
            "write to a folder that all nodes share, or to s3://"
        )
