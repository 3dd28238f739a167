"""One shard of a baked dataset: from the samples of a shard to its report.

Place in the flow: `bake` gives the shards to worker processes. Tar, index, checksums and report are
written in this order, each of them whole or not at all. The report commits the shard.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, cast

import msgspec

from mmstream.bad_samples.quarantine import FILTERED
from mmstream.baking.samples import Baker
from mmstream.converting.report import report_name
from mmstream.converting.shard import HashedFile
from mmstream.dataset.checksums import checksums_name, checksums_size, encode_checksums
from mmstream.dataset.index import encode_index, index_name, index_size
from mmstream.dataset.manifest import ShardInfo
from mmstream.decoding.stored import StoredFile
from mmstream.errors import ConfigError
from mmstream.storage import Store
from mmstream.storage.side_by_side import sizes_of
from mmstream.storage.write_lock import WriteLock
from mmstream.tar.writer import TarWriter


class ShardReport(msgspec.Struct, frozen=True):
    """The result of one shard."""

    info: ShardInfo
    files: dict[str, StoredFile]
    num_bad: int
    """Samples that the pipeline refused, those of `num_left_out` among them."""
    num_left_out: int
    first_reason: str
    """Why the first of them was refused that is no `num_left_out`."""
    reused: bool = False
    """True: an earlier call wrote the shard. Not stored."""


@dataclass(frozen=True)
class BakeJob:
    """What a process needs to write any shard."""

    baker: Baker
    store: Store
    lock: WriteLock


class _Worker:
    """What a process keeps between its shards: a tokenizer takes megabytes, so it is sent once."""

    job: ClassVar[BakeJob]

    @classmethod
    def begin(cls, job: BakeJob | bytes) -> None:
        """Take over the work."""
        cls.job = pickle.loads(job) if isinstance(job, bytes) else job


begin_worker = _Worker.begin


def write_shard(shard: int) -> ShardReport:
    """Write one shard, unless an earlier call did; see `Baker.samples` for what it raises."""
    job = _Worker.job
    name = job.baker.dataset.name_of(shard)
    report = _committed(job, name)
    return (
        _write(job, shard, name) if report is None else msgspec.structs.replace(report, reused=True)
    )


def joined_files(
    files: dict[str, StoredFile], others: dict[str, StoredFile]
) -> dict[str, StoredFile]:
    """Return what is known of the files of two groups of samples.

    Raises:
        ConfigError: A file is not the same in both.
    """
    joined = dict(files)
    for name, file in others.items():
        joined[name] = joined[name].joined(name, file) if name in joined else file
    return joined


def _committed(job: BakeJob, name: str) -> ShardReport | None:
    """Return the report of a shard that an earlier call wrote, if its files are all there."""
    try:
        report = msgspec.json.decode(job.store.read(report_name(name)), type=ShardReport)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    num_samples = report.info.num_samples
    sizes = {
        name: report.info.num_bytes,
        index_name(name): index_size(num_samples),
        checksums_name(name): checksums_size(num_samples),
    }
    return report if sizes_of(job.store, sizes) == list(sizes.values()) else None


def _write(job: BakeJob, shard: int, name: str) -> ShardReport:
    files: dict[str, StoredFile] = {}
    kinds: Counter[str] = Counter()
    first_reason = ""
    with job.store.create(name) as file, HashedFile(file) as hashed:
        writer = TarWriter(cast(BinaryIO, hashed))
        for sample in job.baker.samples(shard):
            try:
                files = joined_files(files, sample.files)
            except ConfigError as error:
                raise ConfigError(f"{name} {sample.key}: {error}") from None
            writer.add(sample.key, sample.members)
            if sample.kind:
                kinds[sample.kind] += 1
                if sample.kind != FILTERED:
                    first_reason = first_reason or sample.reason
        writer.close()
        sha256 = hashed.close()
        job.lock.require()
    index = encode_index(writer.offsets)
    job.store.write(index_name(name), index)
    job.store.write(checksums_name(name), encode_checksums(writer.checksums, index))
    info = ShardInfo(name, len(writer.offsets) - 1, writer.num_bytes, sha256)
    report = ShardReport(info, files, kinds.total(), kinds[FILTERED], first_reason)
    stored = msgspec.to_builtins(report)
    del stored["reused"]
    job.lock.require()
    job.store.write(report_name(name), msgspec.json.encode(stored) + b"\n")
    return report
