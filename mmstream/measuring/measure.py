"""A corpus -> a measure: the lengths of all samples, by the decoders of training.

    shards -> samples -> `Counter` -> a file for each shard -> `Measure`

Shards are measured by several processes. What a shard gives is written as soon as it is there, so a
call that was killed goes on where it was. The result is the same for any number of processes.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.facts import Fact, read_facts
from mmstream.dataset.keys import refs_at
from mmstream.errors import (
    ConfigError,
    ManifestError,
    MMStreamError,
    SampleError,
    ShardError,
    escaped,
    where,
)
from mmstream.measuring.lengths import Counter, SampleLengths, batches, settings_of
from mmstream.packing.measure_file import (
    COLUMNS,
    UNUSABLE_NAME,
    Measure,
    ShardLengths,
    measure_folder,
    measure_of_shards,
    read_lengths,
    write_lengths,
)
from mmstream.processes import num_cores, run_in_processes
from mmstream.reading.step import Outcome
from mmstream.storage import Store, open_store
from mmstream.types import SampleRef

logger = logging.getLogger(__name__)

CHECKED_AGAIN = 16
"""Samples that are counted anew where lengths are there already."""

CHECKED_SAMPLES = 64
"""Samples of each shard that are measured with other draws too, where functions may draw."""

MAX_SERIAL_SAMPLES = 20_000
MAX_SERIAL_BYTES = 1 << 30
"""Less work is done in this process: others need seconds to start."""

CHECKED_FACTS = 4
"""Samples of each shard that are measured by their files too, where there are facts."""


@dataclass(frozen=True, eq=False)
class Work:
    """What a process needs to measure any shard."""

    dataset: Dataset
    counter: Counter
    seed: int = 0
    epochs: tuple[int, ...] | None = None
    """Whose draws are measured. None: lengths must not depend on draws."""
    room: int = 0
    """Tokens that each sample gets more."""

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the lengths."""
        seed = None if self.epochs is None else self.seed
        return settings_of(self.counter, seed, self.epochs, self.room)

    def lengths(self, batch: Sequence[Outcome], refs: Sequence[SampleRef]) -> list[SampleLengths]:
        """Return the lengths of samples: of all epochs that are measured, the longest of each."""
        first, *others = self.epochs or (0,)
        lengths = self.of_draws(batch, refs, self.seed, first)
        for epoch in others if self.counter.may_draw else ():
            again = self.of_draws(batch, refs, self.seed, epoch)
            lengths = [_longer(one, other) for one, other in zip(lengths, again, strict=True)]
        if self.room:
            lengths = [_with_room(each, self.room) for each in lengths]
        return lengths

    def of_draws(
        self, batch: Sequence[Outcome], refs: Sequence[SampleRef], seed: int, epoch: int
    ) -> list[SampleLengths]:
        """Return the lengths of samples with the draws of one epoch."""
        return self.counter.lengths(batch, refs, self.dataset.name_of, seed, epoch)


class Changed(NamedTuple):
    """A sample that has another length than before."""

    address: str
    now: SampleLengths
    before: int


def measure(
    work: Work,
    root: str,
    num_workers: int | None = None,
    progress: bool = True,
    *,
    is_anew: bool = False,
) -> Measure:
    """Measure the shards that are not measured yet, and return the lengths of all samples.

    The samples are read in long ranges, and go through the decoders of training up to the
    tokenizer. No pixel is decoded.

    Args:
        work: What to measure.
        root: Folder or URL that gets the folder of the measure.
        num_workers: Processes. None: as many as there are cores, or this process alone for little
            work.
        progress: Show a progress bar (on a terminal only).
        is_anew: Measure all shards. Otherwise that happens where samples that are measured already
            have another length now, because a function or a library counts otherwise.

    Raises:
        ConfigError: Lengths depend on draws, and neither epochs nor room is given. Or a function
            cannot be sent to another process.
        ShardError, StorageError: A shard cannot be read.
        MMStreamError: A process died. The shards that are done are kept.
    """
    shards, settings = work.dataset.manifest.shards, work.settings
    store = open_store(measure_folder(root, settings))
    lengths = read_lengths(store, shards)
    changed = _changed_since(work, lengths)
    if changed is not None:
        logger.warning(
            "%s: %s: all shards are measured anew", store.url, changed_text(changed, "before")
        )
    if is_anew or changed is not None:
        for file in store.list():
            store.remove(file)
        lengths = [None] * len(shards)
    left = [number for number, of_shard in enumerate(lengths) if of_shard is None]
    if left:
        _measure_shards(work, store, left, num_workers, progress)
        new = read_lengths(store, [shards[number] for number in left])
        for number, of_shard in zip(left, new, strict=True):
            lengths[number] = of_shard
    whole = [of_shard for of_shard in lengths if of_shard is not None]
    if len(whole) < len(shards):
        raise MMStreamError(f"{store.url}: was damaged on the way; run the same command again")
    lines = [
        msgspec.json.encode({"shard": shard.name, "index": index, "reason": reason}) + b"\n"
        for shard, of_shard in zip(shards, whole, strict=True)
        for index, reason in of_shard.reasons
    ]
    if lines:
        store.write(UNUSABLE_NAME, b"".join(lines))
        logger.warning(
            "%s samples cannot be used: %s says why",
            f"{len(lines):,}",
            store.url_of(UNUSABLE_NAME),
        )
    else:
        store.remove(UNUSABLE_NAME)
    return measure_of_shards(shards, whole, settings)


def _changed_since(work: Work, lengths: Sequence[ShardLengths | None]) -> Changed | None:
    """Count a few samples of the shards that are measured. Return one whose length has changed."""
    known = [of_shard.values[:, 0] for of_shard in lengths if of_shard is not None]
    counts = [0 if of_shard is None else len(of_shard.values) for of_shard in lengths]
    tokens = np.concatenate([np.zeros(0, np.int64), *known])
    rows = rows_to_check(tokens)
    return changed_sample(work, refs_at(np.cumsum(counts), np.array(rows)), tokens[rows].tolist())


def rows_to_check(tokens: npt.NDArray[np.signedinteger[Any]], *more: int) -> list[int]:
    """Return which samples to count anew: extreme ones, and others that are spread over all.

    Args:
        tokens: int [n], their lengths.
        more: Rows that are chosen besides.
    """
    if not tokens.size:
        return []
    chosen = [int(tokens.argmax()), int(tokens.argmin()), *more]
    spread = np.linspace(0, tokens.size - 1, CHECKED_AGAIN - len(chosen)).astype(np.int64)
    return sorted({*chosen, *spread.tolist()})


def changed_sample(
    work: Work, refs: Sequence[SampleRef], tokens: Sequence[int], max_tokens: int | None = None
) -> Changed | None:
    """Count samples, and return the first one that has another length. None: there is none.

    Args:
        work: Counts.
        refs: (shard, index) of each.
        tokens: What each had before.
        max_tokens: To how many tokens samples are cut. None: none is cut.
    """
    if not refs:
        return None
    with ThreadPoolExecutor(CHECKED_AGAIN) as pool:
        outcomes = list(pool.map(partial(_read_sample, work.dataset), refs))
    lengths = work.lengths(outcomes, refs)
    for ref, outcome, now, before in zip(refs, outcomes, lengths, tokens, strict=True):
        count = now.values[0] if max_tokens is None else min(now.values[0], max_tokens)
        if isinstance(outcome, dict) and count != before:  # else it is damaged: no fault of `work`
            address = where(work.dataset.name_of(ref[0]), ref[1], outcome["__key__"])
            return Changed(address, now, before)
    return None


def changed_text(changed: Changed, where_before: str) -> str:
    """Return both lengths in words."""
    now = changed.now
    counts = f"cannot be used ({now.reason})" if now.reason else f"has {now.values[0]:,} tokens"
    return f"{changed.address} {counts}, and {changed.before:,} {where_before}"


def _measure_shards(
    work: Work, store: Store, shards: Sequence[int], num_workers: int | None, progress: bool
) -> None:
    """Measure shards, and write what each gives."""
    infos = [work.dataset.manifest.shards[shard] for shard in shards]
    num_samples = sum(info.num_samples for info in infos)
    num_bytes = sum(info.num_bytes for info in infos)
    if num_workers is None:
        is_little = num_samples < MAX_SERIAL_SAMPLES and num_bytes < MAX_SERIAL_BYTES
        num_workers = 1 if is_little else num_cores()
    num_workers = min(num_workers, len(shards))
    logger.info(
        "%s: %s samples to measure, of %s MB, with %d processes",
        work.dataset.store.url,
        f"{num_samples:,}",
        f"{num_bytes / 1e6:,.1f}",
        max(1, num_workers),
    )
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
                _measure_shard(work, store, shard, bar.update)
            return
        try:
            data = pickle.dumps((work, store))
        except Exception as error:
            raise ConfigError(
                f"plan: cannot be sent to other processes ({escaped(error, 200)}): define the "
                "functions in a module, or give num_workers=1"
            ) from None
        jobs = run_in_processes(
            _Worker.measure,
            shards,
            num_workers,
            command="plan",
            prepare=_Worker.begin,
            prepare_args=(data,),
            environment={"TOKENIZERS_PARALLELISM": "false"},  # each process has one core
        )
        for shard, _ in jobs:
            bar.update(work.dataset.manifest.shards[shard].num_samples)


class _Worker:
    """What a worker process keeps between its shards."""

    work: Work
    store: Store

    @classmethod
    def begin(cls, data: bytes) -> None:
        """Take over the work. It is sent once, because a tokenizer takes megabytes."""
        cls.work, cls.store = pickle.loads(data)

    @classmethod
    def measure(cls, shard: int) -> None:
        """Measure one shard."""
        _measure_shard(cls.work, cls.store, shard)


def _measure_shard(
    work: Work, store: Store, shard: int, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Measure a shard, and write its lengths."""
    info = work.dataset.manifest.shards[shard]
    rows: list[tuple[int, ...]] = []
    reasons = []
    for batch in batches(_samples(work, shard)):
        refs = [(shard, len(rows) + number) for number in range(len(batch))]
        if work.counter.may_draw and work.epochs is None and not work.room:
            _refuse_draws(work, batch, refs)
        for ref, each in zip(refs, work.lengths(batch, refs), strict=True):
            rows.append(each.values)
            if each.reason:
                reasons.append((ref[1], each.reason))
        advance(len(batch))
    if len(rows) != info.num_samples:
        raise ManifestError(
            f"{info.name}: {len(rows)} samples, the manifest says {info.num_samples}; run "
            "`mmstream index --overwrite`"
        )
    values = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
    write_lengths(store, info, ShardLengths(values, reasons))


def _samples(work: Work, shard: int) -> Iterator[Outcome]:
    """Yield the samples of a shard: from its facts where they are there and fit, else from it."""
    dataset = work.dataset
    facts = _facts(work, shard)
    if facts is None:
        yield from dataset.shards.samples(shard)
        return
    url = dataset.shards.url_of(shard)
    for index, fact in enumerate(facts):
        ref = (shard, index)
        yield _read_sample(dataset, ref) if fact is None else fact.sample(url, ref)


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
    by_facts = [
        fact.sample(dataset.shards.url_of(shard), (shard, index)) for index, fact in checked
    ]
    by_files = [_read_sample(dataset, ref) for ref in refs]
    lengths = [work.lengths(samples, refs) for samples in (by_facts, by_files)]
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


def _read_sample(dataset: Dataset, ref: SampleRef) -> Outcome:
    """Return a raw sample, or why it cannot be used."""
    try:
        return dataset.read(*ref)
    except SampleError as error:
        return error


def _refuse_draws(work: Work, batch: Sequence[Outcome], refs: Sequence[SampleRef]) -> None:
    """Refuse lengths that depend on random draws: measure the first samples with others too."""
    checked = max(0, CHECKED_SAMPLES - refs[0][1])
    batch, refs = batch[:checked], refs[:checked]
    lengths = work.of_draws(batch, refs, work.seed, 0)
    again = work.of_draws(batch, refs, work.seed + 1, 1)
    for outcome, ref, one, other in zip(batch, refs, lengths, again, strict=True):
        if one.values != other.values:
            key = outcome["__key__"] if isinstance(outcome, dict) else ""
            raise ConfigError(
                f"{where(work.dataset.name_of(ref[0]), ref[1], key)}: its length depends on random "
                f"draws: {one.values[0]} or {other.values[0]} tokens; plan the draws of a run with "
                "epochs=range(3), or give room=, the tokens that a sample may have more"
            )


def _longer(one: SampleLengths, other: SampleLengths) -> SampleLengths:
    """Return the larger of each length of a sample in two epochs. One that fails is left out."""
    if one.reason or other.reason:
        return one if other.reason and not one.reason else other
    values = tuple(max(pair) for pair in zip(one.values, other.values, strict=True))
    return one._replace(values=values)


def _with_room(lengths: SampleLengths, room: int) -> SampleLengths:
    if lengths.reason:
        return lengths
    return lengths._replace(values=(lengths.values[0] + room, *lengths.values[1:]))
