"""`mm.bake`: what a pipeline makes of a dataset, as a dataset of its own.

    dataset -> decoders, functions -> BAKE -> shards, index, manifest

Each shard becomes one shard of the same name, with the same keys in the same order. A shard is
committed by its report, as in a conversion, so a call that was killed goes on where it was. The
manifest is written last.

What makes a baked dataset stands in ``mmstream.bake.json``, in words: its bytes depend on nothing
else. It is written before the first shard. A call that finds another one there is refused, with the
first difference.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import os
import pickle
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tqdm import tqdm

from mmstream.baking.samples import (
    BakeJob,
    Baker,
    BatchFunction,
    ShardReport,
    Worker,
    joined_files,
    listed_indexes,
    write_shard,
)
from mmstream.batching.processor import ProcessorText
from mmstream.converting.formats.formats import source_sha256
from mmstream.converting.report import remove_leftovers, remove_reports, report_name
from mmstream.converting.rows.records import encodable
from mmstream.dataset.bad_list import BAD_NAME, write_bad
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index import checksums_name, index_name
from mmstream.dataset.manifest import (
    INDEX_PART_NAME,
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    json_lines,
    read_json,
)
from mmstream.dataset.open import require_files
from mmstream.dataset.shard_indexes import README_NAME, commit
from mmstream.decoding.decode import Decode
from mmstream.decoding.stored import (
    MAX_PADDED_LENGTH,
    BakedContent,
    CollateSettings,
    StoredFile,
    baked_content,
    tensor_bytes,
)
from mmstream.decoding.text.decoder import TextDecoder, own_core
from mmstream.display.text import count_text, time_text
from mmstream.errors import BadSampleLimitError, ConfigError, ManifestError, MMStreamError, escaped
from mmstream.pipeline import Pipeline
from mmstream.processes.workers import run_in_processes
from mmstream.settings import NonNegativeInt, PositiveInt, checked, refuse_broken, shown
from mmstream.storage import Store, open_store, require_shared
from mmstream.storage.write_lock import WriteLock, write_lock
from mmstream.tar.header import BLOCK, padded
from mmstream.tar.samples import REFUSED_FIELD
from mmstream.types import FILTERED

logger = logging.getLogger(__name__)

TRIED_SAMPLES = 16
"""Samples that tell how large the result will be."""


@checked({"device": "give cpu, cuda or cuda:1"})
def bake(
    pipeline: Pipeline,
    dest: str | os.PathLike[str],
    *,
    batch_function: BatchFunction | None = None,
    batch_size: PositiveInt = 64,
    device: str = "cpu",
    epoch_of_draws: NonNegativeInt | None = None,
    num_workers: NonNegativeInt = 1,
    progress: bool = True,
) -> BakeReport:
    """Write what a pipeline makes of its dataset, as a dataset that is decoded once and for all.

    Each sample is read, decoded and transformed as in training, and its fields are written: arrays
    and tensors as ``.npy``, text, numbers and JSON as such, bytes as they are. Keys, shards and
    their order are those of the source. A pipeline with ``decode=mm.Decode.baked()`` over the new
    dataset has the same steps and the same batches. Of a view, the chosen samples alone are baked.
    The new dataset renumbers them in their shards.

    A sample that the pipeline refuses stays a bad sample, for the same reason. So each row shows
    the same substitute.

    To continue an interrupted call, make it again. The shards that were written are kept. Their
    bytes do not depend on `num_workers`.

    Args:
        pipeline: What is baked: its dataset, decoders, ``before`` and ``transforms``. Its order,
            ``collate`` and ``batching`` have no part in it.
        dest: A local folder, or a URL prefix such as ``s3://bucket/baked``. It must be empty.
        batch_function: A function from a list of samples to as many samples, such as one that
            makes latents on a GPU. It comes after the ``transforms``, and its second argument is a
            ``torch.device``. It is called without gradients.
        batch_size: Samples of a call, from 1 up. The last call of a shard gets fewer.
        device: What the batch function gets as its device, such as "cuda" or "cuda:1".
        epoch_of_draws: Where decoders or functions draw at random: the epoch of the pipeline's seed
            whose draws are kept for all epochs. Default: samples that depend on draws are refused.
        num_workers: Worker processes. With 0 or 1, this process does the work.
        progress: Show a progress bar (on a terminal only).

    Returns:
        Counts, bytes and time.

    Raises:
        ConfigError: The pipeline cannot be baked, a value cannot be stored, samples depend on
            random draws, or `dest` holds something else: the first setting that differs is named.
        BadSampleLimitError: More samples are bad than the pipeline's policy allows. Finished shards
            are kept.
        LockedError: Another process writes there.
        ShardError, StorageError: A shard cannot be read or written.
        MMStreamError: The batch function failed, no sample is good, or a worker process died.

    Examples:
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     decode=mm.Decode(image=mm.ImageDecoder(size=32)),
        ... )
        >>> report = mm.bake(pipeline, "baked/", progress=False)
        >>> report.num_samples, report.num_bad
        (480, 0)
        >>> baked = mm.Pipeline(
        ...     mm.open_dataset("baked/"), global_batch_size=8, decode=mm.Decode.baked()
        ... )
        >>> [sample["__key__"] for sample in baked.take(2)] == [
        ...     sample["__key__"] for sample in pipeline.take(2)
        ... ]
        True
    """
    baker = baker_of(pipeline, batch_function, batch_size, device, epoch_of_draws)
    return bake_into(baker, os.fspath(dest), num_workers, progress)


def baker_of(
    pipeline: Pipeline,
    batch_function: BatchFunction | None = None,
    batch_size: int = 64,
    device: str = "cpu",
    epoch_of_draws: int | None = None,
) -> Baker:
    """Return what makes the samples of a baked dataset. Reads nothing; raises as `bake`."""
    try:
        torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={shown(device)}: give cpu, cuda or cuda:1") from None
    has_device = not device.startswith("cuda") or torch.cuda.is_available()
    has_functions = pipeline.before or pipeline.transforms or batch_function is not None
    refuse_broken(
        (
            not isinstance(pipeline.dataset, Dataset),
            "bake: a mixture is several datasets; bake each of them, and mix these",
        ),
        (
            batch_function is not None and not has_device,
            f"device={device!r}: torch finds no CUDA device here; give cpu",
        ),
        (pipeline.zero_copy, "bake: zero_copy=True decodes nothing; leave it out"),
        (
            pipeline.decode is None and not has_functions,
            "bake: the pipeline has no decoders and no functions; copy the shards",
        ),
    )
    _check_decoders(pipeline.decode, epoch_of_draws)
    return Baker(pipeline, batch_function, batch_size, device, epoch_of_draws)


def _check_decoders(decode: Decode | None, epoch_of_draws: int | None) -> None:
    """Refuse random decoders unless their draws are kept, and absurd lengths."""
    if decode is None:
        return
    if isinstance(decode.text, ProcessorText):
        raise ConfigError(
            "bake: mm.processor_collate(...) makes tokens of whole batches, not of samples: "
            "bake with decode=mm.Decode(text=...)"
        )
    if decode.text is not None and (decode.text.pad_to or 0) > MAX_PADDED_LENGTH:
        raise ConfigError(
            f"bake: texts are padded to max_length={decode.text.max_length}, and a manifest may "
            f'say {MAX_PADDED_LENGTH} at most: lower max_length, or leave out padding="max_length"'
        )
    table = decode.table
    decoders = table.decoders("image") | table.decoders("video") | dict(table.sounds)
    for name, decoder in decoders.items():
        if epoch_of_draws is None and getattr(decoder, "is_random", False):
            raise ConfigError(
                f"bake: the decoder of {name!r} crops, flips or cuts at random, and would do so "
                "alike in every epoch once it is baked: bake without that and augment in the "
                "pipeline over the baked dataset, or keep the draws of an epoch with "
                "epoch_of_draws=0"
            )


def bake_into(baker: Baker, dest: str, num_workers: int, progress: bool) -> BakeReport:
    """Bake a dataset; raises as `bake`.

    Args:
        baker: Makes the samples.
        dest: Folder or URL of the new dataset.
        num_workers: Worker processes.
        progress: Show a progress bar (on a terminal only).
    """
    started = time.monotonic()
    if not baker.dataset.corpus.num_samples:
        raise ConfigError(f"bake: {baker.dataset!r} has no samples to write: choose others")
    store = open_destination(dest, baker.dataset)
    require_shared([baker.dataset.store.url, store.url], num_workers)
    settings = settings_of(baker)
    fingerprint = fingerprint_of(settings)
    with write_lock(store, "bake") as lock:
        if is_finished(store, settings):
            finished = baked_content(Dataset(Manifest.read(store), store))
            assert finished is not None
            return _report(store, finished, started)
        # A function that fails is noticed before anything is written.
        logger.info("%s: %s", store.url, estimate(baker, TRIED_SAMPLES, num_workers)[-1])
        begin(store, baker.dataset, settings)
        reports = _write_shards(BakeJob(baker, store, lock), num_workers, progress)
        content = _content(baker, fingerprint, reports)
        finish(store, baker.dataset, reports, content, lock)
    return _report(store, content, started, reports)


def _write_shards(job: BakeJob, num_workers: int, progress: bool) -> list[ShardReport]:
    """Write all shards. Return their reports in order."""
    counts = job.baker.dataset.shown_counts
    sent: BakeJob | bytes = job
    if num_workers > 1:
        try:
            sent = pickle.dumps(job)
        except Exception as error:
            raise ConfigError(
                f"bake: cannot be sent to other processes ({escaped(error, 200)}): define the "
                "functions in a module, or give num_workers=1"
            ) from None
    jobs = run_in_processes(
        write_shard,
        range(len(counts)),
        num_workers,
        command="bake",
        prepare=Worker.begin,
        prepare_args=(sent,),
        environment={"TOKENIZERS_PARALLELISM": "false"},  # each process has one core
    )
    reports: dict[int, ShardReport] = {}
    num_bad = num_samples = 0
    disable = None if progress else True
    with tqdm(total=int(counts.sum()), unit=" samples", desc="bake", disable=disable) as bar:
        for shard, report in jobs:
            reports[shard] = report
            dataset = job.baker.dataset
            is_listed = np.isin(dataset.indexes_of(shard), listed_indexes(dataset, shard))
            num_bad += report.num_bad - report.num_left_out - int(is_listed.sum())
            num_samples += report.info.num_samples
            _check_limit(job.baker.pipeline, num_bad, num_samples, reports.values())
            bar.update(report.info.num_samples)
    ordered = [reports[shard] for shard in range(len(counts))]
    for shard, report in enumerate(ordered):
        if report.info.num_samples != counts[shard]:
            raise ManifestError(
                f"{report.info.name}: {report.info.num_samples} samples, the manifest says "
                f"{counts[shard]}; run `mmstream index --overwrite`"
            )
    return ordered


def _check_limit(
    pipeline: Pipeline, num_bad: int, num_samples: int, reports: Iterable[ShardReport]
) -> None:
    """Stop where training would stop, too: at the limit of the pipeline's policy.

    Args:
        pipeline: What is baked.
        num_bad: Bad samples so far, without those that a filter or the bad list leaves out.
        num_samples: Samples so far.
        reports: Of these samples. One of them says why.
    """
    policy = pipeline.bad_samples
    if num_samples >= policy.min_samples and num_bad > policy.max_fraction * num_samples:
        raise BadSampleLimitError(
            f"bake: {num_bad:,} of {num_samples:,} samples are bad, more than "
            f"max_fraction={policy.max_fraction} allows; the first: {_first_reason(reports)}; "
            "finished shards are kept"
        )


def _first_reason(reports: Iterable[ShardReport]) -> str:
    return next((report.first_reason for report in reports if report.first_reason), "")


def _content(baker: Baker, fingerprint: str, reports: Sequence[ShardReport]) -> BakedContent:
    """Return what the manifest will say.

    Raises:
        ConfigError: A file is not the same in two shards.
        MMStreamError: There is no good sample.
    """
    decode = baker.pipeline.decode
    files: dict[str, StoredFile] = {}
    for report in reports:
        files = joined_files(files, report.files)
    num_bad = sum(report.num_bad for report in reports)
    num_samples = sum(report.info.num_samples for report in reports)
    if num_bad == num_samples:
        reason = _first_reason(reports) or f"all raise {FILTERED}"
        raise MMStreamError(f"bake: none of {num_samples:,} samples is good; the first: {reason}")
    return BakedContent(
        fingerprint,
        baker.dataset.corpus.chosen_bytes or 0,
        num_bad,
        sum(report.num_left_out for report in reports),
        dict(sorted(files.items())),
        CollateSettings() if decode is None else decode.collate_settings,
    )


def _report(
    store: Store,
    content: BakedContent,
    started: float,
    reports: Sequence[ShardReport] | None = None,
) -> BakeReport:
    """Return the report of a finished dataset. Without `reports`, an earlier call wrote it."""
    manifest = Manifest.read(store)
    return BakeReport(
        manifest.num_samples,
        content.num_bad,
        content.num_left_out,
        len(manifest.shards),
        manifest.num_bytes,
        sum(report.info.num_bytes for report in reports or () if not report.reused),
        time.monotonic() - started,
        content.fingerprint,
        _first_reason(reports or ()),
        was_finished=reports is None,
    )


# -- what it will take, and what it did ------------------------------------------------------------

MAX_REASONS = 5
"""Reasons of bad samples that an estimate shows."""

MAX_SHARDS = 8
"""Shards whose first samples are tried."""


@dataclasses.dataclass(frozen=True)
class BakeReport:
    """What `bake` did.

    Attributes:
        num_samples: Samples of the new dataset, as many as the source shows.
        num_bad: Samples that the pipeline refused. They are bad samples of the new dataset too.
        num_left_out: Those of `num_bad` that a filter left out: no fault.
        num_shards: Shards of the new dataset.
        num_bytes: Size of all tars.
        num_new_bytes: Size of the tars that this call wrote. An earlier, interrupted call wrote the
            others.
        seconds: Wall time of this call.
        fingerprint: Of what made the dataset: ``mmstream.bake.json`` has the settings.
        first_reason: Why the first bad sample was refused that no filter left out.
        was_finished: True: the destination held this dataset already. Nothing was written.
    """

    num_samples: int
    num_bad: int
    num_left_out: int
    num_shards: int
    num_bytes: int
    num_new_bytes: int
    seconds: float
    fingerprint: str
    first_reason: str = ""
    was_finished: bool = False

    def __repr__(self) -> str:
        return f"<BakeReport: {self.summary()}>"

    def summary(self) -> str:
        """Return one line: the samples and their size."""
        return (
            f"{count_text(self.num_samples, 'sample')} in {count_text(self.num_shards, 'shard')}, "
            f"{self.num_bytes / 1e6:,.1f} MB"
        )


def estimate(baker: Baker, num_samples: int, num_workers: int = 1) -> list[str]:
    """Try the first samples of some shards, in this process. Nothing is written.

    Returns:
        Lines that say what the files of a sample are, what was refused, and last how much it is
        and how long it takes.

    Raises:
        ConfigError: A value cannot be stored, or depends on random draws. And what
            `Baker.samples` raises.
    """
    dataset = baker.dataset
    shards = [shard for shard in range(dataset.num_shards) if dataset.shown_counts[shard]]
    shards = shards[:: -(-len(shards) // MAX_SHARDS)] if shards else []
    per_shard = -(-num_samples // max(1, len(shards)))
    files: dict[str, StoredFile] = {}
    samples: list[tuple[int, str, str]] = []
    started = time.monotonic()
    for shard in shards:
        for sample in baker.samples(shard, min(per_shard, num_samples - len(samples))):
            num_bytes = sum(BLOCK + padded(len(data)) for data in sample.members.values())
            samples.append((num_bytes, sample.kind, sample.reason))
            files = joined_files(files, sample.files)
    num_tried = max(1, len(samples))
    seconds = (time.monotonic() - started) / num_tried * len(dataset) / max(1, num_workers)
    sample_bytes = sum(num_bytes for num_bytes, _, _ in samples) / num_tried
    num_bad = sum(bool(kind) for _, kind, _ in samples)
    lines = [f"{len(samples):,} samples tried, {num_bad:,} of them bad or left out"]
    for name, file in files.items():
        shape = "" if file.shape is None else f" {list(file.shape)}"
        kind = file.kind if file.dtype is None else f"{file.dtype}{shape}"
        mean_bytes = file.num_bytes / max(1, file.num_samples)
        lines.append(f"  .{name}: {kind}, {mean_bytes:,.0f} bytes, in {file.num_samples:,} samples")
    reasons = [reason for _, kind, reason in samples if kind and kind != FILTERED]
    lines += [f"  bad: {reason}" for reason in reasons[:MAX_REASONS]]
    lines.append(
        f"{len(dataset):,} samples of {sample_bytes / 1e6:.3g} MB, about "
        f"{sample_bytes * len(dataset) / 1e9:,.3g} GB "
        f"in all (the source has {dataset.num_bytes / 1e9:,.3g} GB) and "
        f"{time_text(seconds)} with {max(1, num_workers)} "
        f"{'processes' if num_workers > 1 else 'process'}"
    )
    return lines


# -- where it is written ---------------------------------------------------------------------------
#
# The marker and the fingerprint are written first: they say what is baked.
# The manifest commits the dataset; then the reports and the marker are removed.


def open_destination(dest: str, source: Dataset) -> Store:
    """Return the store of a destination; nothing is read or written.

    Raises:
        ConfigError: It is the source, or a file, or its URL holds a secret.
    """
    store = open_store(dest)
    if _real_folder(store) in map(_real_folder, (source.store, source.index_store)):
        raise ConfigError(f"{store.url}: is the source; name another destination")
    folder = store.local_path("")
    if folder is not None and Path(folder).is_file():
        raise ConfigError(f"{store.url}: is a file, not a folder; name another folder")
    return store


def _real_folder(store: Store) -> str:
    """Return what two names of one folder or prefix have in common."""
    folder = store.local_path("")
    return store.url.rstrip("/") if folder is None else os.path.realpath(folder)


def is_finished(store: Store, settings: dict[str, Any]) -> bool:
    """Tell whether an earlier call wrote the dataset.

    Raises:
        ConfigError: There is something else.
        ManifestError: A file is damaged.
    """
    require_files(store)
    names = store.list().keys()
    if not names:
        return False
    is_whole, saved = MANIFEST_NAME in names, None
    if MARKER_NAME in names:
        saved = read_json(store, MARKER_NAME).get("bake")
    elif is_whole and FINGERPRINT_NAME in names and "bake" in Manifest.read(store).source:
        saved = read_json(store, FINGERPRINT_NAME).get("settings")
    if saved is None:
        raise ConfigError(f"{store.url}: holds something else; give an empty folder or prefix")
    if difference := first_difference(saved, settings):
        content = "a dataset" if is_whole else "an unfinished dataset"
        advice = "Name" if is_whole else "Undo that to finish it, name"
        raise ConfigError(
            f"{store.url}: holds {content} that was baked otherwise: {escaped(difference, 600)}. "
            f"{advice} another destination, or empty this one"
        )
    if is_whole and MARKER_NAME in names:  # killed after its last write
        _clean_up(store)
    return is_whole


def begin(store: Store, dataset: Dataset, settings: dict[str, Any]) -> None:
    """Write the marker and the fingerprint. Before, remove what killed calls left."""
    _remove_temporary_files(store, dataset)
    if not store.exists(MARKER_NAME):
        store.write(MARKER_NAME, json_lines({"bake": settings}))
    content = {"fingerprint": fingerprint_of(settings), "settings": settings}
    store.write(FINGERPRINT_NAME, json_lines(content))


def _remove_temporary_files(store: Store, dataset: Dataset) -> None:
    """Remove what killed calls left of files that they were writing, and nothing of others."""
    shards = [shard.name for shard in dataset.manifest.shards]
    names = [
        *(name for shard in shards for name in (shard, index_name(shard), checksums_name(shard))),
        *map(report_name, shards),
        *(MARKER_NAME, MANIFEST_NAME, FINGERPRINT_NAME, BAD_NAME, README_NAME),
    ]
    by_folder = {"": [INDEX_PART_NAME.pattern]}
    for name in names:
        folder, _, file = name.rpartition("/")
        by_folder.setdefault(folder, []).append(re.escape(file))
    remove_leftovers(store, {folder: "|".join(files) for folder, files in by_folder.items()})


def finish(
    store: Store,
    source: Dataset,
    reports: Sequence[ShardReport],
    content: BakedContent,
    lock: WriteLock,
) -> None:
    """Write the bad list, the index and the manifest, which commits the dataset."""
    fields = {name: file.num_samples for name, file in content.files.items()}
    if content.num_bad:
        fields[REFUSED_FIELD] = content.num_bad
    manifest = Manifest(
        tuple(report.info for report in reports),
        fields=fields,
        source={"by": "mmstream bake", "bake": msgspec.to_builtins(content)},
        checksums="written",
    )
    lock.require()
    write_bad(Dataset(manifest, store), source.corpus.chosen.bad)
    commit(store, manifest)
    _clean_up(store)


def _clean_up(store: Store) -> None:
    """Remove what a finished dataset does not need. The marker goes last."""
    remove_reports(store, [report_name(shard.name) for shard in Manifest.read(store).shards])
    store.remove(MARKER_NAME)


# -- what makes it, in words ----------------------------------------------------------------------

FINGERPRINT_NAME = "mmstream.bake.json"

BAKER_VERSION = 1
"""It must be raised when any byte of the output changes."""

_LIBRARIES = (
    "mmstream",
    "numpy",
    "torch",
    "pillow",
    "simplejpeg",
    "av",
    "soundfile",
    "soxr",
    "tokenizers",
    "transformers",
)
"""Libraries whose version may change what decoders make. Those that are not installed do not
count."""


def settings_of(baker: Baker) -> dict[str, Any]:
    """Return what decides the bytes of a baked dataset, in plain JSON types."""
    pipeline, epoch = baker.pipeline, baker.epoch_of_draws
    batch = None
    if baker.batch_function is not None:
        batch = {
            "function": _plain(baker.batch_function),
            "batch_size": baker.batch_size,
            "device": _device(baker.device),
        }
    return {
        "baker": BAKER_VERSION,
        "source": _source(baker.dataset),
        "decode": _plain(pipeline.decode),
        "before": [_plain(function) for function in pipeline.before],
        "transforms": [_plain(function) for function in pipeline.transforms],
        "batch": batch,
        "draws": None if epoch is None else {"seed": pipeline.seed, "epoch": epoch},
        "libraries": _versions(),
    }


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of settings: 64 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()


def first_difference(saved: Any, present: Any) -> str:
    """Return the first setting that differs, and both values. "": none does.

    Examples:
        >>> first_difference({"decode": {"size": 224}}, {"decode": {"size": 256}})
        'decode.size was 224 and is now 256'
        >>> first_difference(
        ...     {"name": "train.crop", "source": "3f"}, {"name": "train.crop", "source": "9a"}
        ... )
        'the code of train.crop or of its module has changed'
    """
    return next(_differences(saved, present, ""), "")


def _differences(saved: Any, present: Any, name: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys([*present, *saved]):
            inner = f"{name}.{key}" if name else str(key)
            saved_value, present_value = saved.get(key), present.get(key)
            if key == "source" and isinstance(saved_value, str) and isinstance(present_value, str):
                if saved_value != present_value:
                    owner = present.get("name") or present.get("type")
                    yield f"the code of {owner} or of its module has changed"
                continue
            yield from _differences(saved_value, present_value, inner)
    elif isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        for number, pair in enumerate(zip(saved, present, strict=True)):
            yield from _differences(*pair, f"{name}[{number}]")
    elif saved != present:
        yield f"{name} was {_shown(saved)} and is now {_shown(present)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()[:200].strip('"')


def _source(dataset: Dataset) -> dict[str, Any]:
    """Return the identity of a dataset: shards with their contents, bad list and selection."""
    manifest = dataset.manifest
    shards = [
        [shard.name, shard.num_samples, shard.num_bytes, shard.sha256] for shard in manifest.shards
    ]
    chosen = {} if dataset.selection is None else {"selection": dataset.selection.digest}
    return {
        **chosen,
        "num_shards": dataset.num_shards,
        "num_samples": len(dataset),
        "num_bytes": manifest.num_bytes,
        "shards": _sha256(msgspec.json.encode(shards)),
        "bad": _sha256(dataset.bad.tobytes()) if dataset.bad.size else None,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _device(device: str) -> dict[str, Any]:
    """Return what a batch function's numbers may depend on: other devices give other last bits."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return {"type": device.partition(":")[0]}
    return {
        "type": "cuda",
        "name": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _weights(module: torch.nn.Module) -> str:
    """Return the checksum of a model's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()[:32]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Return a value in plain JSON types. Equal settings give equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return encodable(value) if isinstance(value, str) else value
    if isinstance(value, bytes):
        return _sha256(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), _sha256(value.tobytes())]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, torch.nn.Module):
        return {"module": _name(type(value)), "weights": _weights(value)}
    if isinstance(value, partial):
        return {
            "function": _plain(value.func),
            "arguments": [_plain(argument) for argument in value.args],
            **{str(name): _plain(argument) for name, argument in value.keywords.items()},
        }
    if isinstance(value, Decode) and value.stored is not None:
        return {"baked": value.stored.content.fingerprint}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": _name(type(value)), **_fields(value)}
    return _plain_function(value)


def _fields(value: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        setting = getattr(value, field.name)
        is_tokenizer = isinstance(value, TextDecoder) and field.name == "tokenizer"
        settings[field.name] = _tokenizer(setting) if is_tokenizer else _plain(setting)
    if callable(value) and not type(value).__module__.startswith("mmstream."):
        settings["source"] = source_sha256(type(value))[:32]
    return settings


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return {
        "core": _sha256(own_core(tokenizer).to_str().encode()),
        "chat_template": _sha256(template.encode()),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_side": str(tokenizer.padding_side),
    }


def _plain_function(value: Any) -> Any:
    """Return the name and the source of a function, or of the class of an object."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    owner = value if hasattr(value, "__qualname__") else type(value)
    if owner.__module__.startswith("mmstream."):  # its version is among those of libraries
        described: dict[str, Any] = {"name": _name(owner)}
    else:
        described = {"name": _name(owner), "source": source_sha256(owner)[:32]}
    values = _enclosed(value) if owner is value else dict(getattr(value, "__dict__", {}))
    simple = {
        name: _plain(variable)
        for name, variable in values.items()
        if variable is None
        or isinstance(variable, bool | int | float | str | bytes | np.ndarray | torch.nn.Module)
    }
    return described | ({"values": simple} if simple else {})


def _enclosed(function: Any) -> dict[str, Any]:
    """Return the variables of an enclosing function that a function uses."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
