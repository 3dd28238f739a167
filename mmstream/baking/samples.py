"""The samples of a shard, decoded and transformed in order. Bad ones keep their place.

    shard -> raw samples -> decoders, functions -> BATCH FUNCTION -> files of a sample

Place in the flow: `write_shard` writes what comes out. Samples go through `RowDecoder`, as those of
a step do, so that they are what training would see.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec
import torch

from mmstream.converting.report import read_shard_report, report_name
from mmstream.converting.shard import shard_sizes, write_tar, wrong_size
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import ShardInfo
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.rows import ORIGIN_FIELDS, RowDecoder, one_by_one
from mmstream.decoding.sample import NO_MEMORY, PLAIN
from mmstream.decoding.sample_rng import kept_generators, seed_draws
from mmstream.decoding.stored import StoredFile, encode_sample
from mmstream.errors import (
    BUGS,
    ConfigError,
    MMStreamError,
    SampleError,
    escaped,
    where,
)
from mmstream.pipeline import Pipeline
from mmstream.progress import Progress
from mmstream.reading.fetcher import Fetcher, FixedDraws, SampleLookup
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.storage import Store
from mmstream.storage.write_lock import WriteLock
from mmstream.tar.samples import REFUSED_FIELD, encode_refusal
from mmstream.types import FILTERED, IntArray, Sample, SampleRef

BatchFunction: TypeAlias = Callable[[list[Sample], torch.device], list[Sample]]
"""From decoded samples to as many samples, on a device."""

SAMPLES_AT_ONCE = 64
"""Samples whose texts are tokenized together."""

BYTES_AT_ONCE = 64 << 20
"""Raw bytes of samples that are held together, or one larger sample."""

CHECKED_SAMPLES = 8
"""Samples of each shard that are decoded again, with other draws too."""

_UNREADABLE = "unreadable-{:09d}"
"""Key of a sample whose own cannot be read."""

_ON_LIST = "it is on the bad list of the dataset that was baked"


class BakedSample(NamedTuple):
    """A sample as it is written."""

    key: str
    members: dict[str, bytes]
    """Of the tar: {name: bytes}."""
    files: dict[str, StoredFile]
    """What they are. Empty where the pipeline refused the sample."""
    kind: str = ""
    """Of the error, where the pipeline refused the sample."""
    reason: str = ""


class _Decoded(NamedTuple):
    """A sample after the functions of the pipeline, or why there is none."""

    key: str
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    sample: Sample | None
    kind: str = ""
    reason: str = ""

    @property
    def content(self) -> Any:
        """What two decodings of a sample have in common."""
        if self.sample is None:
            return self.reason
        return {name: data for name, (data, _) in encode_sample(self.sample).items()}


@dataclass(frozen=True)
class Baker:
    """Makes the samples of shards.

    Raises:
        ConfigError: A value cannot be stored, or depends on random draws.
    """

    pipeline: Pipeline
    batch_function: BatchFunction | None = None
    batch_size: int = 64
    device: str = "cpu"
    epoch_of_draws: int | None = None
    """None: nothing may depend on random draws."""

    @property
    def dataset(self) -> Dataset:
        """What is baked."""
        assert isinstance(self.pipeline.dataset, Dataset)
        return self.pipeline.dataset

    def samples(self, shard: int, max_samples: int | None = None) -> Iterator[BakedSample]:
        """Yield the samples of a shard that the dataset shows, in its order.

        A sample that the pipeline refuses has a file that says why.

        Raises:
            ShardError, StorageError: The shard cannot be read.
            MMStreamError: The batch function failed.
            ConfigError: A value cannot be stored, or depends on random draws.
            NameError, AttributeError, ...: A function has a bug.
        """
        decoded: Iterator[_Decoded] = islice(self._decoded(shard), max_samples)
        if self.batch_function is not None:
            decoded = self._in_batches(shard, decoded)
        for entry in decoded:
            if entry.sample is None:
                members = {REFUSED_FIELD: encode_refusal(entry.kind, entry.reason)}
                yield BakedSample(entry.key, members, {}, entry.kind, entry.reason)
                continue
            try:
                encoded = encode_sample(entry.sample)
            except ConfigError as error:
                raise ConfigError(f"{self._where(shard, entry)}: {error}") from None
            members = {name: data for name, (data, _) in encoded.items()}
            yield BakedSample(
                entry.key, members, {name: file for name, (_, file) in encoded.items()}
            )

    def _decoded(self, shard: int) -> Iterator[_Decoded]:
        start = 0
        is_listed = set(listed_indexes(self.dataset, shard).tolist())
        indexes = self.dataset.indexes_of(shard)
        for chunk in _chunks(self.dataset.shards.samples(shard, indexes)):
            refs = [(shard, index) for index in indexes[start : start + len(chunk)].tolist()]
            entries = self._decode_chunk(refs, chunk, is_listed)
            if start == 0:
                checked = slice(CHECKED_SAMPLES)
                self._check_draws(refs[checked], chunk[checked], entries, is_listed)
            yield from entries
            start += len(chunk)

    def _decode_chunk(
        self,
        refs: Sequence[SampleRef],
        chunk: Sequence[Outcome],
        is_listed: set[int],
        shift: int = 0,
    ) -> list[_Decoded]:
        """Decode samples of a shard.

        Args:
            refs: (shard, index) of each.
            chunk: Raw samples, or why there are none.
            is_listed: Numbers of the samples on the bad list. They are not decoded.
            shift: Added to seed, epoch and step of the draws.
        """
        read = [number for number, (_, index) in enumerate(refs) if index not in is_listed]
        epoch = (self.epoch_of_draws or 0) + shift
        # In place of an order.
        draws: Any = FixedDraws(self.pipeline.seed + shift, epoch, self.dataset.name_of)
        rows = RowDecoder(
            SampleLookup(self.dataset, draws, self._fetcher),
            self.pipeline.decode or PLAIN,
            self.pipeline.before,
            self.pipeline.transforms,
            BadSamplePolicy(),
            Progress(),
        )
        planned = [refs[number] for number in read]
        lineage = BatchLineage(epoch, shift, 0, planned, [True] * len(read), planned)
        step = RawStep(lineage, [chunk[number] for number in read])
        decoded = {}
        with kept_generators():
            prepared = rows.plan(step, one_by_one)
            for position, number in enumerate(read):
                document = rows.planned(step, position, prepared[position], NO_MEMORY)
                prepared[position] = None
                decoded[number] = document
        entries = []
        for number, (shard, index) in enumerate(refs):
            outcome, document_of = chunk[number], decoded.get(number)
            key = str(outcome["__key__"]) if isinstance(outcome, dict) else ""
            if not key or (shard, index) in self.dataset.removed:
                key = _UNREADABLE.format(index)
            if document_of is None:
                address = where(self.dataset.name_of(shard), index, key)
                entries.append(_Decoded(key, index, None, "SampleError", f"{address}: {_ON_LIST}"))
            elif document_of.refusal is not None:
                if document_of.refusal.kind == "TimeoutError":
                    raise MMStreamError(
                        f"{document_of.refusal.reason}; a slow machine must not make a good sample "
                        "a bad one for ever: run the same command again, or give its decoder a "
                        "larger timeout_s"
                    )
                entries.append(_Decoded(key, index, None, *document_of.refusal))
            else:
                entries.append(_Decoded(key, index, document_of.sample))
        return entries

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.dataset)

    def _check_draws(
        self,
        refs: Sequence[SampleRef],
        chunk: Sequence[Outcome],
        entries: Sequence[_Decoded],
        listed: set[int],
    ) -> None:
        """Refuse samples that would be others in another epoch, or in another call."""
        faults = {
            0: "differs from call to call: a function draws from a generator of its own, or counts "
            "its calls; let it draw from mm.sample_rng(sample)",
            1: "depends on random draws, and would be the same in every epoch once it is baked: "
            "leave that function to the pipeline over the baked dataset, or keep the draws of an "
            "epoch with epoch_of_draws=0",
        }
        for shift, fault in faults.items():
            if shift and self.epoch_of_draws is not None:
                return
            others = self._decode_chunk(refs, chunk, listed, shift)
            for entry, other in zip(entries, others, strict=False):
                if name := _differing_name(entry, other):
                    raise ConfigError(f"{self._where(refs[0][0], entry)}{name}: {fault}")

    def _in_batches(self, shard: int, decoded: Iterable[_Decoded]) -> Iterator[_Decoded]:
        """Call the batch function for every `batch_size` good samples, and for the last ones."""
        waiting: list[_Decoded] = []
        num_good = 0
        for entry in decoded:
            waiting.append(entry)
            num_good += entry.sample is not None
            if num_good == self.batch_size:
                yield from self._called(shard, waiting)
                waiting, num_good = [], 0
        yield from self._called(shard, waiting)

    def _called(self, shard: int, entries: Sequence[_Decoded]) -> Iterator[_Decoded]:
        samples = [entry.sample for entry in entries if entry.sample is not None]
        results = iter(self._call(shard, entries, samples) if samples else ())
        for entry in entries:
            if entry.sample is None:
                yield entry
                continue
            result = next(results)
            yield entry._replace(
                sample={name: result[name] for name in result if name not in ORIGIN_FIELDS}
                | {name: entry.sample[name] for name in ORIGIN_FIELDS if name in entry.sample}
            )

    def _call(self, shard: int, entries: Sequence[_Decoded], samples: list[Sample]) -> list[Sample]:
        function: Any = self.batch_function
        name = getattr(function, "__name__", type(function).__name__)
        address = f"{self.dataset.name_of(shard)}[{entries[0].index}..{entries[-1].index}]"
        num_samples = len(samples)
        try:
            with torch.no_grad(), kept_generators():
                epoch = self.epoch_of_draws or 0
                seed_draws("batch function", self.pipeline.seed, epoch, shard, entries[0].index)
                results = function(samples, torch.device(self.device))
        except (MMStreamError, *BUGS) as error:
            if not isinstance(error, SampleError):
                raise
            raise MMStreamError(f"{address}: {name}: {error}; {_NO_SINGLE}") from error
        except Exception as error:
            text = escaped(error, 300)
            raise MMStreamError(
                f"{address}: {name}: {type(error).__name__}: {text}; {_NO_SINGLE}"
            ) from error
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise ConfigError(f"{address}: {name} must return a list of samples, each a dict")
        if len(results) != num_samples:
            raise ConfigError(
                f"{address}: {name} got {num_samples} samples and returned {len(results)}: return "
                "as many; a function of transforms= leaves a sample out, with mm.SkipSample"
            )
        return results

    def _where(self, shard: int, entry: _Decoded) -> str:
        return where(self.dataset.name_of(shard), entry.index, entry.key)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fetcher"}


_NO_SINGLE = (
    "an error in a batch is of no single sample, so it ends the call; samples that do not fit are "
    "left out before, in transforms="
)


def listed_indexes(dataset: Dataset, shard: int) -> IntArray:
    """Return the samples of a shard that no epoch has: duplicates, taken down, known to be bad."""
    indexes: IntArray = dataset.bad[dataset.bad[:, 0] == shard, 1]
    return indexes


def _chunks(samples: Iterator[Outcome]) -> Iterator[list[Outcome]]:
    """Cut samples into lists of bounded bytes."""
    chunk: list[Outcome] = []
    num_bytes = 0
    for outcome in samples:
        chunk.append(outcome)
        if isinstance(outcome, dict):
            num_bytes += sum(len(value) for value in outcome.values() if isinstance(value, bytes))
        if len(chunk) == SAMPLES_AT_ONCE or num_bytes >= BYTES_AT_ONCE:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _differing_name(decoded: _Decoded, other: _Decoded) -> str:
    """Return ``.field`` of the first file in which two decodings differ. "": none does."""
    try:
        first, second = decoded.content, other.content
    except ConfigError:  # said again, with the address, when the sample is written
        return ""
    if first == second:
        return ""
    if isinstance(first, str) or isinstance(second, str):
        return ": whether it is left out"
    names = [name for name in first | second if first.get(name) != second.get(name)]
    return f".{escaped(names[0])}" if names else ""


# -- one shard -------------------------------------------------------------------------------------


class ShardReport(msgspec.Struct, frozen=True, omit_defaults=True):
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


class Worker:
    """What a process keeps between its shards: a tokenizer takes megabytes, so it is sent once."""

    job: ClassVar[BakeJob]

    @classmethod
    def begin(cls, job: BakeJob | bytes) -> None:
        """Take over the work."""
        cls.job = pickle.loads(job) if isinstance(job, bytes) else job


def write_shard(shard: int) -> ShardReport:
    """Write one shard, unless an earlier call did; see `Baker.samples` for what it raises."""
    job = Worker.job
    name = job.baker.dataset.name_of(shard)
    report = read_shard_report(job.store, name, ShardReport)
    if report is not None and wrong_size(job.store, shard_sizes(report.info)) is None:
        return msgspec.structs.replace(report, reused=True)
    return _write(job, shard, name)


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


def _write(job: BakeJob, shard: int, name: str) -> ShardReport:
    files: dict[str, StoredFile] = {}
    kinds: Counter[str] = Counter()
    first_reason = ""

    def samples() -> Iterator[tuple[str, dict[str, bytes]]]:
        nonlocal files, first_reason
        for sample in job.baker.samples(shard):
            try:
                files = joined_files(files, sample.files)
            except ConfigError as error:
                raise ConfigError(f"{name} {sample.key}: {error}") from None
            if sample.kind:
                kinds[sample.kind] += 1
                if sample.kind != FILTERED:
                    first_reason = first_reason or sample.reason
            yield sample.key, sample.members

    info = write_tar(job.store, name, samples(), lambda _: job.lock.require())
    report = ShardReport(info, files, kinds.total(), kinds[FILTERED], first_reason)
    job.lock.require()
    job.store.write(report_name(name), msgspec.json.encode(report) + b"\n")
    return report
