"""Samples -> lengths, by the code that training tokenizes with.

Place in the flow: `measure.py` calls it for the samples of a shard, and `find_plan.py` for a few.
The samples go through `RowDecoder.plan`, as those of a step do: functions before decoding, plans
of media, one call of the tokenizer. Then they are counted.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.sample import MeasuredSample, SampleDecoding
from mmstream.decoding.sample_rng import kept_generators
from mmstream.decoding.substitute import Prepared, RowDecoder, Transform, one_by_one
from mmstream.decoding.text.decoder import DecodedText, TextDecoder, TextLengths
from mmstream.errors import ConfigError, SampleError, ShardError, SkipSample
from mmstream.families.registry import settings_of_families, versions_of
from mmstream.packing.measure_file import COLUMNS
from mmstream.progress import Progress
from mmstream.reading.lookup import FixedDraws
from mmstream.reading.step import BatchLineage, Outcome, RawStep
from mmstream.types import IGNORED_LABEL, IntArray, SampleRef

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
        return (
            bool(self.before)
            or bool(self.decode.table.media)
            or callable(text.field if text else None)
        )

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
        with kept_generators():
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
        if self.before or decode.table.media or decode.fields or callable(text.field):
            return results
        numbers, samples, shapes = [], [], []
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, dict):
                continue
            decoding = SampleDecoding(outcome, decode)
            try:
                media = decoding.all_shapes(decodes=False)
            except SampleError:
                continue
            if media is not None:
                numbers.append(number)
                samples.append(decoding.sample)
                shapes.append(media)
        counted = text.count_all(samples, shapes, media=decode.media)
        for number, of_sample, lengths in zip(numbers, shapes, counted, strict=True):
            if not isinstance(lengths, SampleError):
                media_lengths = _picture_lengths(tuple(of_sample.images), self.patch_size)
                results[number] = SampleLengths(self._values(lengths, media_lengths))
        return results

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
            step = RawStep(lineage, list(outcomes))
            prepared = rows.plan(step, one_by_one, all_shapes=True)
            for outcome, entry in zip(outcomes, prepared, strict=True):
                try:
                    results.append(self._lengths(outcome if entry is None else entry))
                except SkipSample as error:
                    results.append(_unusable(f"left out: {error}"))
                except SampleError as error:
                    results.append(_unusable(str(error)))
        return results

    def _lengths(self, prepared: Outcome | Prepared) -> SampleLengths:
        if isinstance(prepared, SampleError | ShardError):
            raise prepared
        assert isinstance(prepared, SampleDecoding)
        return self._counts(prepared.measured())

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
        >>> from mmstream.decoding.image.geometry import ImageShape
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


def batches(samples: Iterator[Outcome]) -> Iterator[list[Outcome]]:
    """Cut samples into lists whose texts are tokenized together."""
    while batch := list(islice(samples, SAMPLES_AT_ONCE)):
        yield batch


def _unusable(reason: str) -> SampleLengths:
    return SampleLengths((-1, *[0] * (len(COLUMNS) - 1)), reason)


# -- what decides the lengths, in words ------------------------------------------------------------
#
# A function counts by its name alone: of its module there are two names where it is the main
# script.

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
    versions = versions_of(*settings_of_families(decode))
    return {
        **({"versions of families": versions} if versions else {}),
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
