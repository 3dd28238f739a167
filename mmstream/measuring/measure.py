"""A corpus -> a measure: the lengths of all samples, by the decoders of training.

    shards -> samples -> `Counter` -> columns of a shard -> ... -> `Measure`

Shards are measured by several processes. What a shard gives is written as soon as it is there, so a
call that was killed goes on where it was. The result is the same for any number of processes.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.facts import Fact, facts_name, read_facts
from mmstream.dataset.open import open_dataset
from mmstream.dataset.shard_samples import shard_samples
from mmstream.decoding.decode import Decode
from mmstream.decoding.substitute import Transform
from mmstream.display.markup import time_text
from mmstream.errors import (
    ConfigError,
    SampleError,
    ShardError,
    escaped,
    where,
)
from mmstream.machine import num_cores
from mmstream.measuring.lengths import Counter, SampleLengths, batches
from mmstream.measuring.pieces import Piece, Pieces
from mmstream.measuring.probes import encode_probes, kind_of, probes_of
from mmstream.measuring.settings import library_versions, settings_of
from mmstream.packing.measure_file import (
    COLUMNS,
    Measure,
    measure_folder,
    open_measure,
    write_measure,
)
from mmstream.process_pool import run_in_processes
from mmstream.reading.step import Outcome
from mmstream.types import SampleRef
from mmstream.wrong_arguments import require_counts, require_numbers

__all__ = ["Estimate", "Work", "estimate", "measure", "measure_into"]

logger = logging.getLogger(__name__)

TRIED_SAMPLES = 256
"""Samples that tell how long all will take."""

CHECKED_SAMPLES = 64
"""Samples of each shard that are measured with other draws too, where functions may draw."""

MIN_PARALLEL_S = 30.0
"""Work that takes less is done in this process: others need seconds to start."""

CHECKED_FACTS = 4
"""Samples of each shard that are measured by their files too, where there are facts."""

TOKENS = COLUMNS.index("num_tokens")


class Estimate(NamedTuple):
    """What measuring will take."""

    num_samples: int
    """Samples that are not measured yet."""
    num_bytes: int
    """Bytes that will be read."""
    seconds: float
    """Of one process."""

    def text(self, num_workers: int = 1) -> str:
        """Return one line."""
        seconds = self.seconds / max(1, num_workers)
        return (
            f"{self.num_samples:,} samples to measure, {self.num_bytes / 1e6:,.1f} MB to read, "
            f"about {time_text(seconds)} with {max(1, num_workers)} "
            f"{'processes' if num_workers > 1 else 'process'}"
        )


@dataclass(frozen=True, eq=False)
class Work:
    """What a process needs to measure any shard."""

    dataset: Dataset
    counter: Counter
    seed: int = 0
    epochs: tuple[int, ...] | None = None
    """Whose draws are measured. None: lengths must not depend on draws."""
    room: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the lengths."""
        seed = None if self.epochs is None else self.seed
        return settings_of(self.counter, seed, self.epochs, self.room)


def measure(
    source: str | os.PathLike[str] | Dataset,
    *,
    decode: Decode,
    before: Sequence[Transform] = (),
    name: str = "default",
    folder: str | None = None,
    seed: int = 0,
    epochs: Sequence[int] | None = None,
    room: int = 0,
    patch_size: int = 14,
    num_workers: int | None = None,
    progress: bool = True,
) -> Measure:
    """Measure the lengths of all samples of a dataset, and write them beside it.

    The samples are read in long ranges, and go through the decoders of training up to the
    tokenizer. No pixel is decoded. A call that was killed goes on where it was. Shards that were
    appended since an earlier call are measured alone.

    Args:
        source: A dataset, or what `open_dataset` takes.
        decode: The decoders of training. ``max_length`` of the text does not count: a measure knows
            how long a text is before it is cut.
        before: The functions before decoding, as of the pipeline.
        name: Of the measure.
        folder: Folder or URL of the measure. None: ``mmstream.measure.NAME`` beside the index.
        seed: Seed of the random draws, as of the pipeline.
        epochs: Where lengths depend on draws, such as one of several captions: the epochs that are
            measured. A sample counts with its longest length.
        room: Tokens that each sample gets more, in place of `epochs`.
        patch_size: Side of a patch of the vision tower, in pixels.
        num_workers: Processes. None: as many as there are cores, or this process alone for a few
            seconds of work.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The measure. A sample that cannot be used has -1 tokens; ``unusable.jsonl`` in the folder
        says why.

    Raises:
        ConfigError: Lengths depend on draws, and neither `epochs` nor `room` is given. Or `decode`
            has no text decoder, or a function cannot be sent to another process.
        ManifestError: There is no such dataset.
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The shards that are done are kept.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer()))
        >>> measure = mm.measure("shards/", decode=decode, name="bytes")
        >>> measure.num_samples
        480
    """
    require_numbers(
        seed=seed, epochs=epochs, room=room, patch_size=patch_size, num_workers=num_workers
    )
    dataset = source if isinstance(source, Dataset) else open_dataset(source)
    if not isinstance(dataset, Dataset):
        raise ConfigError("measure: a mixture has no lengths of its own; measure each source")
    require_counts(patch_size=patch_size)
    if room < 0:
        raise ConfigError(f"measure: room={room}: give a number from 0 up")
    if epochs is not None and (not epochs or min(epochs) < 0):
        raise ConfigError(f"epochs={epochs!r}: give numbers from 0 up, such as range(3)")
    counter = Counter(decode, tuple(before), patch_size)
    chosen = None if epochs is None else tuple(sorted(set(epochs)))
    work = Work(dataset, counter, seed, chosen, room)
    target = folder or measure_folder(dataset.index_store.url, name)
    return measure_into(work, target, num_workers, progress)


def measure_into(
    work: Work,
    folder: str,
    num_workers: int | None = None,
    progress: bool = True,
) -> Measure:
    """Measure what is not measured yet, and write the measure; errors as `measure`.

    Args:
        work: What to measure.
        folder: Of the measure.
        num_workers: Processes. None: chosen by the time that it will take.
        progress: Show a progress bar (on a terminal only).
    """
    shards = work.dataset.manifest.shards
    settings = work.settings
    pieces = Pieces(folder, settings, shards)
    left = pieces.missing()
    if left:
        expected = estimate(work, left)
        num_workers = _num_workers(num_workers, expected, len(left))
        logger.info("%s: %s", work.dataset.store.url, expected.text(num_workers))
        _measure_shards(work, pieces, left, num_workers, progress)
    joined = pieces.join()
    values = joined.values
    epoch = (work.epochs or (0,))[0]
    probes = probes_of(work.dataset, work.counter, values, joined.kinds, epoch, work.seed)
    if work.room:
        tokens = values[:, TOKENS]
        values[:, TOKENS] = np.where(tokens < 0, tokens, tokens + work.room)
    columns = {name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(COLUMNS)}
    details = {"libraries": library_versions(), "probes": encode_probes(probes)}
    write_measure(Measure(shards, columns, settings, details), folder, joined.unusable)
    pieces.remove()
    return open_measure(folder)


def estimate(work: Work, shards: Sequence[int]) -> Estimate:
    """Measure the first samples of the first of these shards, to say how long all will take."""
    infos = work.dataset.manifest.shards
    num_samples = sum(infos[shard].num_samples for shard in shards)
    existing = work.dataset.index_store.list()
    facts = [existing.get(facts_name(infos[shard].name)) for shard in shards]
    num_bytes = sum(
        infos[shard].num_bytes if fact is None else fact.size
        for shard, fact in zip(shards, facts, strict=True)
    )
    seconds = 0.0
    first = next((shard for shard in shards if infos[shard].num_samples), None)
    if first is not None:
        list(_shard_lengths(work, first, max_samples=8))  # what is loaded once does not count
        begin = time.monotonic()
        tried = len(list(_shard_lengths(work, first, max_samples=TRIED_SAMPLES)))
        seconds = (time.monotonic() - begin) / max(1, tried) * num_samples
    return Estimate(num_samples, num_bytes, seconds)


def _num_workers(num_workers: int | None, expected: Estimate, num_shards: int) -> int:
    if num_workers is None:
        num_workers = num_cores() if expected.seconds > MIN_PARALLEL_S else 1
    return min(num_workers, num_shards)


def _measure_shards(
    work: Work, pieces: Pieces, shards: Sequence[int], num_workers: int, progress: bool
) -> None:
    """Measure shards, and write what each gives."""
    infos = work.dataset.manifest.shards
    num_samples = sum(infos[shard].num_samples for shard in shards)
    bar = tqdm(
        total=num_samples,
        unit=" samples",
        unit_scale=True,
        desc="measure",
        disable=None if progress else True,
        smoothing=0.1,
    )
    with bar:
        if num_workers <= 1:
            for shard in shards:
                pieces.write(shard, Piece.of(_shard_lengths(work, shard, advance=bar.update)))
            return
        try:
            data = pickle.dumps((work, pieces))
        except Exception as error:
            raise ConfigError(
                f"measure: cannot be sent to other processes ({escaped(error, 200)}): define the "
                "functions in a module, or give num_workers=1"
            ) from None
        jobs = run_in_processes(
            _measure_shard,
            shards,
            num_workers,
            command="measure",
            prepare=_Worker.begin,
            prepare_args=(data,),
            environment={"TOKENIZERS_PARALLELISM": "false"},  # each process has one core
        )
        for shard, _ in jobs:
            bar.update(infos[shard].num_samples)


class _Worker:
    """What a worker process keeps between its shards."""

    work: Work
    pieces: Pieces

    @classmethod
    def begin(cls, data: bytes) -> None:
        """Take over the work. It is sent once, because a tokenizer takes megabytes."""
        cls.work, cls.pieces = pickle.loads(data)


def _measure_shard(shard: int) -> None:
    _Worker.pieces.write(shard, Piece.of(_shard_lengths(_Worker.work, shard)))


def _shard_lengths(
    work: Work,
    shard: int,
    *,
    max_samples: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[SampleLengths, str]]:
    """Yield the lengths of the samples of a shard, in order, and the kind of each.

    Raises:
        ConfigError: They depend on draws, and `Work.epochs` does not say whose.
    """
    index = 0
    for batch in batches(islice(_samples(work, shard), max_samples)):
        refs = [(shard, index + number) for number in range(len(batch))]
        lengths = _longest(work, batch, refs)
        for outcome, each in zip(batch, lengths, strict=True):
            yield each, "" if each.reason or not isinstance(outcome, dict) else kind_of(outcome)
        index += len(batch)
        advance(len(batch))


def _samples(work: Work, shard: int) -> Iterator[Outcome]:
    """Yield the samples of a shard: from its facts where they are there and fit, else from it."""
    dataset = work.dataset
    facts = _facts(work, shard)
    if facts is None:
        yield from shard_samples(dataset, shard)
        return
    url = dataset.url_of(shard)
    for index, fact in enumerate(facts):
        yield _read(dataset, shard, index) if fact is None else fact.sample(url, (shard, index))


def _facts(work: Work, shard: int) -> list[Fact | None] | None:
    """Return the facts of a shard. None: the shard itself must be read. A warning says why."""
    dataset = work.dataset
    try:
        facts = read_facts(dataset, shard)
    except FileNotFoundError:
        return None
    except ShardError as error:
        logger.warning("%s; the shard is read instead", error)
        return None
    known = [(index, fact) for index, fact in enumerate(facts) if fact is not None]
    if 2 * len(known) < len(facts):
        return None  # most samples would be read one by one
    checked = known[:: max(1, len(known) // CHECKED_FACTS)][:CHECKED_FACTS]
    refs = [(shard, index) for index, _ in checked]
    by_facts = [fact.sample(dataset.url_of(shard), (shard, index)) for index, fact in checked]
    epoch = (work.epochs or (0,))[0]
    lengths = [
        work.counter.lengths(samples, refs, dataset.name_of, work.seed, epoch)
        for samples in (by_facts, [_read(dataset, *ref) for ref in refs])
    ]
    for ref, fast, whole in zip(refs, *lengths, strict=True):
        if fast.values != whole.values:
            logger.warning(
                "%s: %s by its facts, and %s by its files; the shard is read instead "
                "(a function before decoding that looks at pictures?)",
                where(dataset.name_of(shard), ref[1]),
                _count_text(fast),
                _count_text(whole),
            )
            return None
    return facts


def _count_text(lengths: SampleLengths) -> str:
    return "cannot be used" if lengths.reason else f"{lengths.values[0]:,} tokens"


def _read(dataset: Dataset, shard: int, index: int) -> Outcome:
    try:
        return dataset.read(shard, index)
    except SampleError as error:
        return error


def _longest(
    work: Work, batch: Sequence[Outcome], refs: Sequence[SampleRef]
) -> list[SampleLengths]:
    """Return the lengths of samples: of all epochs that are measured, the longest of each."""
    counter, name_of = work.counter, work.dataset.name_of
    first, *others = work.epochs or (0,)
    lengths = counter.lengths(batch, refs, name_of, work.seed, first)
    if not counter.may_draw:
        return lengths
    if work.epochs is None and not work.room:
        checked = max(0, CHECKED_SAMPLES - refs[0][1])
        again = counter.lengths(batch[:checked], refs[:checked], name_of, work.seed + 1, 1)
        for outcome, ref, one, other in zip(batch, refs, lengths, again, strict=False):
            if one.values != other.values:
                raise _draws_error(work, outcome, ref, one, other)
    for epoch in others:
        again = counter.lengths(batch, refs, name_of, work.seed, epoch)
        lengths = [_longer(one, other) for one, other in zip(lengths, again, strict=True)]
    return lengths


def _longer(one: SampleLengths, other: SampleLengths) -> SampleLengths:
    """Return the larger of each length of a sample in two epochs. One that fails is left out."""
    if one.reason or other.reason:
        return one if other.reason and not one.reason else other
    values = tuple(max(pair) for pair in zip(one.values, other.values, strict=True))
    return one._replace(values=values)


def _draws_error(
    work: Work, outcome: Outcome, ref: SampleRef, one: SampleLengths, other: SampleLengths
) -> ConfigError:
    key = outcome["__key__"] if isinstance(outcome, dict) else ""
    address = where(work.dataset.name_of(ref[0]), ref[1], key)
    return ConfigError(
        f"{address}: its length depends on random draws: {one.values[0]} or {other.values[0]} "
        "tokens; measure the draws of a run with seed=0, epochs=range(3), or give room=, the "
        "tokens that a sample may have more"
    )
