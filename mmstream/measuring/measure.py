"""A corpus -> a measure: the lengths of all samples, by the decoders of training.

    shards -> samples -> `Counter` -> a file for each shard -> `Measure`

Samples are counted by the code that training tokenizes with. They go through `RowDecoder.prepare`,
as those of a step do: functions before decoding, plans of media, one call of the tokenizer.
`find_plan.py` counts a few of them anew.

Shards are measured by several processes. What a shard gives is written as soon as it is there, so a
call that was killed goes on where it was. The result is the same for any number of processes.

A measure and a plan are named by the hash of what decides the lengths: tokenizer, template,
decoders, draws. The plan keeps it, so `find_plan` says what differs when a pipeline counts
otherwise. A function counts by its name alone: of its module there are two names where it is the
main script.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.facts import Fact, read_facts
from mmstream.dataset.positions import refs_at
from mmstream.dataset.shard_samples import shard_samples
from mmstream.decoding.decode import Decode
from mmstream.decoding.fields import image_fields, own_names
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.sample import (
    IMAGE_FIELDS,
    TEXT_FIELDS,
    MeasuredSample,
    measure_sample,
    parse_fields,
)
from mmstream.decoding.substitute import PreparedSample, RowDecoder, Transform, one_by_one
from mmstream.decoding.text.decoder import DecodedText, TextDecoder, TextLengths
from mmstream.decoding.user_functions import kept_generators
from mmstream.errors import (
    ConfigError,
    ManifestError,
    MMStreamError,
    SampleError,
    ShardError,
    SkipSample,
    escaped,
    where,
)
from mmstream.machine import num_cores
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
from mmstream.process_pool import run_in_processes
from mmstream.progress import Progress
from mmstream.reading.lookup import FixedDraws
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.storage import Store, open_store
from mmstream.types import IGNORED_LABEL, IntArray, Sample, SampleRef

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
    samples = _samples(work, shard)
    while batch := list(islice(samples, SAMPLES_AT_ONCE)):
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
        yield from shard_samples(dataset, shard)
        return
    url = dataset.url_of(shard)
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
    by_facts = [fact.sample(dataset.url_of(shard), (shard, index)) for index, fact in checked]
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


SAMPLES_AT_ONCE = 128
"""Samples whose texts are tokenized together."""

MAX_LENGTH = 1 << 40
"""No text is cut: a plan must know how long it is."""


class SampleLengths(NamedTuple):
    """The lengths of a sample."""

    values: tuple[int, ...]
    """One for each of `COLUMNS`. Of a sample that cannot be used: -1, then zeros."""
    reason: str = ""
    """Why the sample cannot be used."""


@dataclass(frozen=True)
class Counter:
    """Counts samples as a pipeline with these decoders would make them.

    Attributes:
        decode: The decoders. Those of texts must be there.
        before: The functions before decoding.
        patch_size: Side of a patch of the vision tower, in pixels.

    Raises:
        ConfigError: There is no decoder of texts.
    """

    decode: Decode
    before: tuple[Transform, ...] = ()
    patch_size: int = 14

    def __post_init__(self) -> None:
        text = self.decode.text
        if text is None:
            raise ConfigError(
                "plan: no decoder makes the tokens of texts: give decode=mm.Decode(text=...)"
            )
        if text.max_length != MAX_LENGTH:
            whole = replace(text, max_length=MAX_LENGTH, padding="longest")
            object.__setattr__(self, "decode", replace(self.decode, text=whole))

    @property
    def may_draw(self) -> bool:
        """Whether lengths may depend on random draws."""
        text = self.decode.text
        return bool(self.before) or self.decode.has_media or callable(text.field if text else None)

    def lengths(
        self,
        outcomes: Sequence[Outcome],
        refs: Sequence[SampleRef],
        shard_name: Callable[[int], str],
        seed: int = 0,
        epoch: int = 0,
    ) -> list[SampleLengths]:
        """Return the lengths of samples.

        Texts and pictures are counted without making samples of them. What that cannot count, such
        as a damaged sample, goes through `decoded_lengths`. Arguments and errors are the same.
        """
        lengths = self._counted(outcomes)
        left = [number for number, each in enumerate(lengths) if each is None]
        if left:
            decoded = self.decoded_lengths(
                [outcomes[number] for number in left],
                [refs[number] for number in left],
                shard_name,
                seed,
                epoch,
            )
            for number, each in zip(left, decoded, strict=True):
                lengths[number] = each
        return [each for each in lengths if each is not None]

    def _counted(self, outcomes: Sequence[Outcome]) -> list[SampleLengths | None]:
        """Count samples of texts and pictures. None: only the code of training can tell."""
        decode, text = self.decode, self.decode.text
        assert text is not None
        results: list[SampleLengths | None] = [None] * len(outcomes)
        if self.before or decode.has_media or decode.fields or callable(text.field):
            return results
        numbers: list[int] = []
        samples: list[Sample] = []
        shapes: list[tuple[ImageShape, ...]] = []
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, dict):
                continue
            images = self._image_shapes(outcome)
            if images is None:
                continue
            try:
                sample = parse_fields(outcome, decode)
            except SampleError:
                continue
            samples.append(sample)
            numbers.append(number)
            shapes.append(images)
        counted = text.count_all(
            samples, [MediaShapes(images) for images in shapes], media=decode.media
        )
        for number, images, lengths in zip(numbers, shapes, counted, strict=True):
            if not isinstance(lengths, SampleError):
                media = _picture_lengths(images, self.patch_size)
                results[number] = SampleLengths(self._values(lengths, media))
        return results

    def _image_shapes(self, sample: Sample) -> tuple[ImageShape, ...] | None:
        """Return the shapes of a sample's pictures. None: its names are odd, or a header is."""
        names = _names_of_pictures(tuple(sample))
        decoder = self.decode.image
        if names is None or decoder is None or not names:
            return None if names is None else ()
        size = decoder.output_shape
        if size is not None and not self.decode.needed_shapes:
            return (ImageShape(*size, size),) * len(names)
        decoder = decoder.of_sample(len(names))
        shapes = [decoder.prepared_shape(sample[name]) for name in names]
        known = tuple(shape for shape in shapes if shape is not None)
        return known if len(known) == len(names) else None

    def decoded_lengths(
        self,
        outcomes: Sequence[Outcome],
        refs: Sequence[SampleRef],
        shard_name: Callable[[int], str],
        seed: int = 0,
        epoch: int = 0,
    ) -> list[SampleLengths]:
        """Return the lengths of samples, by all the code of training.

        Args:
            outcomes: Raw samples, or why there are none.
            refs: (shard, index) of each.
            shard_name: Returns the name of a shard.
            seed: Of the random draws.
            epoch: Of the random draws.

        Raises:
            ShardError, StorageError: A file that is read by ranges cannot be read.
            ConfigError: A function of the user returned something of the wrong type.
            NameError, AttributeError, ...: A function of the user has a bug.
        """
        rows = RowDecoder(
            FixedDraws(seed, epoch, shard_name),  # type: ignore[arg-type]  # nothing is read again
            self.decode,
            self.before,
            (),
            BadSamplePolicy(),
            Progress(),
        )
        planned = list(refs)
        lineage = BatchLineage(epoch, 0, 0, planned, [True] * len(planned), planned)
        results = []
        with kept_generators():
            prepared = rows.prepare(RawStep(lineage, list(outcomes)), one_by_one)
            for outcome, entry in zip(outcomes, prepared, strict=True):
                try:
                    results.append(self._lengths(outcome if entry is None else entry))
                except SkipSample as error:
                    results.append(_unusable(f"left out: {error}"))
                except SampleError as error:
                    results.append(_unusable(str(error)))
        return results

    def _lengths(self, prepared: Outcome | PreparedSample) -> SampleLengths:
        if isinstance(prepared, SampleError | ShardError):
            raise prepared
        assert isinstance(prepared, PreparedSample)
        measured = measure_sample(prepared.sample, self.decode, prepared.tokens, prepared.plans)
        return self._counts(measured)

    def _counts(self, measured: MeasuredSample) -> SampleLengths:
        assert measured.text is not None
        ids = _documents(measured.text, "input_ids")
        labels = _documents(measured.text, "labels")
        # The first token of a document has no token before it that could predict it.
        num_labels = sum(int(np.count_nonzero(each[1:] != IGNORED_LABEL)) for each in labels)
        lengths = TextLengths(sum(map(len, ids)), num_labels, len(ids))
        media = _media_lengths(measured.shapes, self.patch_size)
        return SampleLengths(self._values(lengths, media))

    def _values(self, lengths: TextLengths, media: _MediaLengths) -> tuple[int, ...]:
        """Return the columns of a sample."""
        num_times = 1
        if lengths.num_texts > 1 and self.decode.text and self.decode.text.counted_media:
            # Media that have tokens in the text come again for each document.
            num_times = lengths.num_texts
        return (
            *lengths,
            media.num_images * num_times,
            media.patches * num_times,
            media.squared_patches * num_times,
            math.ceil(media.seconds * num_times),
        )


def _documents(text: DecodedText, name: str) -> list[IntArray]:
    """Return a field of tokens of each text of a sample."""
    values = text.tokens[name]
    return values if isinstance(values, list) else [values]


def num_patches(shapes: MediaShapes, patch_size: int) -> Iterator[int]:
    """Yield the patches of each picture, tile and pair of frames that a vision tower takes.

    Examples:
        >>> from mmstream.decoding.image.image_shape import ImageShape
        >>> shapes = MediaShapes([ImageShape(336, 336, (600, 800), num_tiles=2)])
        >>> list(num_patches(shapes, 14))
        [576, 576]
    """
    for image in shapes.images:
        num_of_tile = -(-image.height // patch_size) * -(-image.width // patch_size)
        yield from [num_of_tile] * image.num_tiles
    for video in shapes.videos:
        num_of_frame = -(-video.height // patch_size) * -(-video.width // patch_size)
        yield from [num_of_frame] * -(-video.num_frames // 2)


class _MediaLengths(NamedTuple):
    """What the media of a sample add to its columns."""

    num_images: int
    patches: int
    squared_patches: int
    seconds: float


def _media_lengths(shapes: MediaShapes, patch_size: int) -> _MediaLengths:
    patches = list(num_patches(shapes, patch_size))
    seconds = sum(audio.num_samples / audio.sample_rate for audio in shapes.audios)
    squared_patches = sum(each * each for each in patches)
    return _MediaLengths(len(shapes.images), sum(patches), squared_patches, seconds)


@lru_cache(maxsize=4096)
def _picture_lengths(images: tuple[ImageShape, ...], patch_size: int) -> _MediaLengths:
    return _media_lengths(MediaShapes(images), patch_size)


@lru_cache(maxsize=1024)
def _names_of_pictures(names: tuple[str, ...]) -> list[str] | None:
    """Return the names of a sample's pictures, in order.

    None: the sample has several pictures with names of their own, or a file whose name a decoder
    gives to what it makes. Training has rules for these.
    """
    pictures = image_fields(names)
    if len(pictures) > 1 and own_names(pictures):
        return None
    return None if {*IMAGE_FIELDS, *TEXT_FIELDS}.intersection(names) else pictures


def _unusable(reason: str) -> SampleLengths:
    return SampleLengths((-1, *[0] * (len(COLUMNS) - 1)), reason)


_OTHER_FIELDS = ("tokenizer", "max_length", "padding")
"""Settings of a text decoder that have a line of their own, or decide no length."""


_NO_LENGTH = (
    "scaled_decoding",
    "interpolation",
    "fill",
    "flip",
    "mask",
    "max_memory",
    "timeout_s",
)
"""Settings of decoders of media that decide no length."""


def settings_of(
    counter: Counter,
    seed: int | None = None,
    epochs: Sequence[int] | None = None,
    room: int = 0,
) -> dict[str, Any]:
    """Return what decides the lengths, in plain JSON types.

    Args:
        counter: Decoders and functions.
        seed: Of the random draws that were measured. None: lengths do not depend on any.
        epochs: Their epochs.
        room: Tokens that each sample got more.
    """
    decode = counter.decode
    text = decode.text
    assert text is not None
    tokenizer = text.tokenizer
    return {
        "tokenizer": _sha256(core_without_limits(tokenizer)),
        "chat_template": _sha256(str(getattr(tokenizer, "chat_template", None) or "")),
        "text": _fields(text, _OTHER_FIELDS),
        "image": None if decode.image is None else _fields(decode.image, _NO_LENGTH),
        "video": None if decode.video is None else _fields(decode.video, _NO_LENGTH),
        "audio": None if decode.audio is None else _fields(decode.audio, _NO_LENGTH),
        "fields": sorted(decode.fields or {}),
        "before": [_plain(function) for function in counter.before],
        "patch_size": counter.patch_size,
        "seed": seed,
        "epochs": None if epochs is None else list(epochs),
        "room": room,
    }


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ, such as "tokenizer" or "image.size"."""
    names = []
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            names += [f"{name}.{inner}" for inner in differing_settings(before, now)]
        else:
            names.append(name)
    return names


def core_without_limits(tokenizer: Any) -> str:
    """Return what a tokenizer's core is, without the settings that a caller leaves in it."""
    core = tokenizer.backend_tokenizer
    copy = type(core).from_str(core.to_str())
    copy.no_padding()
    copy.no_truncation()
    return str(copy.to_str())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields(decoder: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        field.name: _plain(getattr(decoder, field.name))
        for field in dataclasses.fields(decoder)
        if field.init and field.name not in without
    }


def _plain(value: Any) -> Any:
    """Return a value in plain JSON types. Equal settings give equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, partial):
        words = [_plain(value.func), [_plain(each) for each in value.args], _plain(value.keywords)]
        return words if value.args or value.keywords else words[0]
    if isinstance(value, TextDecoder | Decode):
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **_fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)
