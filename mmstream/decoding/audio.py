"""`AudioDecoder`: the bytes of an audio file become samples, or log-mel features.

Place in the flow: `decoding.field` calls it for every audio field of a sample. One file takes
these steps:

    header -> `plan` chooses the span of the result
           -> `media.audio` decodes what the span needs, in pieces
           -> channels are mixed and resampled piece by piece -> int16 or `features`

A result is a span of one line of samples: the whole file at the rate of the result. Where in the
file a span begins does not change its samples:

- The span from `start_s` to `end_s` holds the samples ``round(start_s * rate)`` to before
  ``round(end_s * rate)``. So spans that follow each other have no gap and no overlap.
- Without resampling they equal the samples of the whole file, bit by bit, in every format. With
  resampling they are equal but for the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import soxr
import torch
from numpy.typing import NDArray

from mmstream.decoding.media_shapes import AudioShape, Span, require_span, row_of_span, row_span
from mmstream.decoding.threaded_calls import resolve_vector_math
from mmstream.errors import ConfigError, DecodeError
from mmstream.media.audio import AudioSource, open_audio
from mmstream.media.audio_headers import refuse_short
from mmstream.media.limits import Deadline, out_of_memory_refused
from mmstream.media.types import EncodedMedia
from mmstream.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    checked,
    refuse_broken,
    refuse_overridden,
    shown,
)

SAMPLE_RATE = 16_000
"""Default of `AudioDecoder.sample_rate`, and the rate of all features."""
MAX_BYTES = 4 << 30
"""Default of `AudioDecoder.max_bytes`."""
MAX_DURATION_S = 3600.0
"""Default of `AudioDecoder.max_duration_s`."""
TIMEOUT_S = 60.0
"""Default of `AudioDecoder.timeout_s`."""

MAX_RESULT_BYTES = 2 << 30
"""Most bytes of a result as float32: an hour of 48 kHz with three channels."""


class AudioLimits(NamedTuple):
    """The limits of decoding the audio of one sample."""

    max_duration_s: float
    """Longest results, all together."""
    deadline: Deadline
    """When the time is over."""
    held_s: float = 0.0
    """Length of the results of the sample's earlier files."""

    def check_duration(self, duration_s: float) -> None:
        """Refuse a result that is too long.

        Raises:
            DecodeError: Names the length and the limit.
        """
        if duration_s + self.held_s > self.max_duration_s:
            held = f" after {self.held_s:.1f} s of the sample's other audio" if self.held_s else ""
            raise DecodeError(
                f"audio of {duration_s:.1f} s{held} exceeds max_duration_s={self.max_duration_s:g}"
            )

    def holding(self, duration_s: float) -> AudioLimits:
        """Return the limits of the sample's next file, after a result of this length."""
        return self._replace(held_s=self.held_s + duration_s)


def check_result(num_samples: int, num_channels: int) -> None:
    """Refuse a result of one file that needs too much memory, such as one with 200 channels.

    Raises:
        DecodeError: Names the need and the limit.
    """
    num_bytes = num_samples * num_channels * 4
    if num_bytes > MAX_RESULT_BYTES:
        raise DecodeError(
            f"audio of {num_samples:,} samples and {num_channels} channels needs "
            f"{num_bytes >> 20:,} MiB, more than {MAX_RESULT_BYTES >> 20:,}"
        )


class AudioPlan(NamedTuple):
    """Which samples of a file become the result. `AudioDecoder.plan` makes it from the header."""

    num_source_samples: int
    """Samples per channel of the whole file."""
    start: int
    """First sample of the result, counted from the start of the file at the result's rate."""
    stop: int
    """The sample after the last."""
    start_s: float
    """Time of the first sample in seconds; in a file with a video, after its first frame."""
    shape: AudioShape
    """What a text is told about the result."""


class DecodedAudio(NamedTuple):
    """The result of one file."""

    samples: NDArray[np.float32] | NDArray[np.int16] | None
    """[T] with one channel, else [C, T]. None where `features` took their place."""
    features: NDArray[np.float32] | None
    """float32 [num_mels, num_frames]. None without `AudioDecoder.features`."""
    plan: AudioPlan
    """Which samples of the file they are made of."""

    @property
    def num_samples(self) -> int:
        """Samples per channel of the result."""
        return self.plan.shape.num_samples


@checked({"features": "give mm.families.whisper.WhisperFeatures(...)"}, own=("span",))
@dataclass(frozen=True, kw_only=True)
class AudioDecoder:
    """Decode one audio file: a callable from bytes to an array of samples.

    It reads wav, flac, mp3, ogg (Vorbis), opus, m4a (AAC), aiff, and the audio track of a video:
    mp4, mov, mkv, webm, avi and others that FFmpeg reads. It holds settings and no state: it can be
    pickled, and called from many threads at once.

    Attributes:
        sample_rate: Samples per second of the result. The file is resampled to it by libsoxr, as
            librosa does. None: the file's own rate.
        channels: Number of channels of the result. 1: the mean of all channels, as librosa and
            torchcodec mix stereo. A file with one channel is repeated. None: the channels of the
            file.
        dtype: "float32": -1 to 1. "int16": -32,768 to 32,767, half the memory.
        offset_s: Seconds that are left out at the beginning of the span.
        duration_s: Longest result in seconds. None: no limit.
        span: Which part of the file is decoded, in seconds. "row": from ``start_s`` to ``end_s`` of
            the row, where it has them, else all. (start_s, end_s): the same part of every file.
            None: all. In a file with a video, time counts from its first frame. A span that goes
            beyond the file ends with it.
        crop: "random": `duration_s` seconds from a random part of the span. A shorter span is taken
            whole. None: the span from its beginning.
        features: `WhisperFeatures` to make log-mel features of the samples, in the worker. They
            need ``sample_rate=16000``, ``channels=1`` and ``dtype="float32"``.
        max_bytes: Limit on the size of the file. The default is 4 GiB, as for videos.
        max_duration_s: Limit on the length of the results of one sample, all together. The default
            is one hour.
        timeout_s: Seconds of processor time that decoding the audio of one sample may take, all
            together. It is a last resort: the limits above hold on every machine alike. A sample
            that takes longer is bad, and has an `mmstream.errors.TimeoutError`. The default is a
            minute. None: no limit.

    Raises:
        ConfigError: A setting has the wrong type or range, or does not go with another. The message
            names the setting and says what to give.

    Examples:
        >>> speech = AudioDecoder()  # 16 kHz, mono, float32
        >>> five_seconds = AudioDecoder(crop="random", duration_s=5.0)
        >>> whisper = AudioDecoder(features=WhisperFeatures(num_mels=80))
        >>> music = AudioDecoder(sample_rate=44_100, channels=2, dtype="int16")
    """

    decoded_medium: ClassVar[str] = "audio"
    reads_ranges: ClassVar[bool] = True

    sample_rate: PositiveInt | None = SAMPLE_RATE
    channels: PositiveInt | None = 1
    dtype: Literal["float32", "int16"] = "float32"
    offset_s: NonNegativeFloat = 0.0
    duration_s: PositiveFloat | None = None
    span: Literal["row"] | Span | None = "row"
    crop: Literal["random"] | None = None
    features: WhisperFeatures | None = None
    max_bytes: PositiveInt = MAX_BYTES
    max_duration_s: PositiveFloat = MAX_DURATION_S
    timeout_s: PositiveFloat | None = TIMEOUT_S

    def __post_init__(self) -> None:
        refuse_overridden(self, AudioDecoder, "samples")
        _check_settings(self)

    @classmethod
    def from_processor(cls, processor: Any, **settings: Any) -> AudioDecoder:
        """Take over the settings of a Hugging Face processor.

        Args:
            processor: A feature extractor, or a processor that holds a ``feature_extractor``. Known
                is ``WhisperFeatureExtractor``, in the processors of Whisper, Qwen2-Audio,
                Qwen2.5-Omni and Qwen3-Omni.
            **settings: Settings of the decoder that replace the processor's.

        Returns:
            A decoder that makes the same features. A recording that is too long is refused, where
            the extractor cuts it: give ``duration_s=30`` to cut it.

        Raises:
            ConfigError: The processor is not known, or does something that this decoder cannot do;
                the message says what.
        """
        return cls(**{**settings_of(processor), **settings})

    @property
    def is_random(self) -> bool:
        """Whether results depend on a random generator."""
        return self.crop == "random"

    def __call__(
        self,
        data: EncodedMedia,
        rng: np.random.Generator | None = None,
        span: Span | None = None,
    ) -> NDArray[np.float32] | NDArray[np.int16]:
        """Decode one file.

        Args:
            data: The encoded file.
            rng: The generator for random crops, which need one. In a pipeline it is the sample's
                own, ``mm.sample_rng(sample, "audio")``.
            span: (start_s, end_s), for a decoder with ``span="row"``. None: the whole file.

        Returns:
            Samples: float32 or int16, [T] with one channel, else [C, T]. Or features: float32
            [num_mels, num_frames].

        Raises:
            DecodeError: The bytes are not a whole audio file, or exceed a limit. The reason is one
                line.
            TimeoutError: Decoding takes longer than `timeout_s`.
            ConfigError: ``rng`` is missing. Or the decoder has another span.
        """
        result = self.decode(data, row=row_of_span(span, self.span), rng=rng)
        values = result.samples if result.features is None else result.features
        assert values is not None
        return values

    def plan(
        self,
        data: EncodedMedia,
        row: Mapping[str, Any] | None = None,
        rng: np.random.Generator | None = None,
        limits: AudioLimits | None = None,
    ) -> AudioPlan:
        """Choose the samples of a file that become the result, and tell how many they are.

        The header tells the length of most files. Files of mkv, webm and some other containers are
        decoded once to count their samples.

        Args:
            data: The encoded file.
            row: What may have ``start_s`` and ``end_s`` for ``span="row"``: the row of the sample,
                or the part of its messages that names the file.
            rng: As in a call.
            limits: What `start_limits` returned for this sample. None: they start now.

        Raises:
            DecodeError: The file is damaged, has no audio, has none in the span, or exceeds a
                limit. Or the row's span is not a span.
            TimeoutError: It takes longer than `timeout_s`.
            ConfigError: ``rng`` is missing.
        """
        limits = limits or self.start_limits()
        self._check_bytes(data)
        with open_audio(data, limits.deadline) as source:
            return self._plan(source, row, rng, limits)

    def decode(
        self,
        data: EncodedMedia,
        plan: AudioPlan | None = None,
        row: Mapping[str, Any] | None = None,
        rng: np.random.Generator | None = None,
        limits: AudioLimits | None = None,
    ) -> DecodedAudio:
        """Decode one file as a call does. The outcome also says which samples it is made of.

        Args:
            data: The encoded file.
            plan: What `plan` returned for this file. None: it is planned now.
            row: As for `plan`. Not used with a plan.
            rng: As in a call. Not used with a plan.
            limits: What `start_limits` returned for this sample. None: they start now.

        Raises:
            DecodeError: As in a call. Or the machine has not enough memory for this file.
            TimeoutError: As in a call.
            ConfigError: As in a call.
        """
        limits = limits or self.start_limits()
        self._check_bytes(data)
        with out_of_memory_refused("audio"), open_audio(data, limits.deadline) as source:
            if plan is None:
                plan = self._plan(source, row, rng, limits)
            samples = self._samples(source, plan)
        if self.features is None:
            return DecodedAudio(self._result(samples), None, plan)
        features = self.features(torch.from_numpy(samples[:, 0]))
        return DecodedAudio(None, features.numpy(), plan)

    def start_limits(self) -> AudioLimits:
        """Return the limits of decoding the audio of one sample. Their time starts now."""
        return AudioLimits(self.max_duration_s, Deadline.start(self.timeout_s))

    def _check_bytes(self, data: EncodedMedia) -> None:
        if len(data) > self.max_bytes:
            raise DecodeError(f"audio of {len(data)} bytes exceeds max_bytes={self.max_bytes}")

    def _plan(
        self,
        source: AudioSource,
        row: Mapping[str, Any] | None,
        rng: np.random.Generator | None,
        limits: AudioLimits,
    ) -> AudioPlan:
        rate = self.sample_rate or source.sample_rate
        num_samples = num_resampled(source.num_samples, source.sample_rate, rate)
        start, stop = 0, num_samples
        span = row_span(row) if self.span == "row" else self.span
        if span is not None:
            start = _clipped(span[0] - source.start_s, rate, num_samples)
            stop = _clipped(span[1] - source.start_s, rate, num_samples)
        start = min(stop, start + round(self.offset_s * rate))
        if start >= stop:
            seconds = source.num_samples / source.sample_rate
            raise DecodeError(f"no audio in the span: the file has {seconds:g} s")
        if self.duration_s is not None:
            num_kept = min(stop - start, max(1, round(self.duration_s * rate)))
            if self.crop == "random":
                if rng is None:
                    raise ConfigError('rng: a random crop needs mm.sample_rng(sample, "audio")')
                start += int(rng.integers(stop - start - num_kept + 1))
            stop = start + num_kept
        num_kept = stop - start
        limits.check_duration(num_kept / rate)
        check_result(num_kept, self.channels or source.num_channels)
        num_frames = 0
        if self.features is not None:
            limit = self.features.max_samples
            if limit is not None and num_kept > limit:
                raise DecodeError(
                    f"audio of {num_kept / SAMPLE_RATE:.2f} s is longer than the features' "
                    f"{limit // SAMPLE_RATE} s: give its row a span, draw a segment with "
                    f"before=(mm.one_segment,), or cut it with duration_s={limit // SAMPLE_RATE}"
                )
            num_frames = self.features.num_frames(num_kept)
        return AudioPlan(
            source.num_samples,
            start,
            stop,
            source.start_s + start / rate,
            AudioShape(num_kept, num_frames, rate),
        )

    def _samples(self, source: AudioSource, plan: AudioPlan) -> NDArray[np.float32]:
        """Return the samples of the result, float32 [T, C]."""
        shape = plan.shape
        piece = source_piece(
            plan.start, plan.stop, plan.num_source_samples, source.sample_rate, shape.sample_rate
        )
        num_channels = self.channels or source.num_channels
        is_changed = (source.sample_rate, source.num_channels) != (shape.sample_rate, num_channels)
        stream = None
        if source.sample_rate != shape.sample_rate:
            stream = soxr.ResampleStream(
                source.sample_rate, shape.sample_rate, num_channels, dtype="float32"
            )
        samples = np.empty((shape.num_samples, num_channels), np.float32)
        num_missing, position = piece.stop - piece.start, -piece.offset
        for block in source.blocks(piece.start, piece.stop, None if is_changed else samples):
            num_missing -= len(block)
            if is_changed:
                mixed = _mixed(block, num_channels)
                position = _put(_resampled(stream, mixed, num_missing <= 0), samples, position)
            else:
                position += len(block)
        if num_missing > 0:
            rate = source.sample_rate
            refuse_short(plan.num_source_samples / rate, (piece.stop - num_missing) / rate)
            silence = np.zeros((num_missing, num_channels), np.float32)
            position = _put(_resampled(stream, silence, last=True), samples, position)
        samples[max(0, position) :] = 0  # a resampler may end a sample early
        # Both are NaN where a sample is. `isfinite` of all samples would take memory for each.
        if not (np.isfinite(samples.min()) and np.isfinite(samples.max())):
            raise DecodeError("holds samples that are NaN or infinite")
        return samples

    def _result(self, samples: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.int16]:
        """Return samples [T, C] in the type and the shape of the result."""
        turned = samples[:, 0] if self.channels == 1 else samples.T
        if self.dtype == "float32":
            return np.ascontiguousarray(turned)
        levels = np.clip(np.rint(turned * np.float32(2**15)), -(2**15), 2**15 - 1)
        return np.ascontiguousarray(levels, np.int16)


def _put(block: NDArray[np.float32], samples: NDArray[np.float32], position: int) -> int:
    """Write a block into a result from `position` on, as far as it fits. Return where it ends."""
    stop = position + len(block)
    first, last = max(0, position), min(stop, len(samples))
    if first < last:
        samples[first:last] = block[first - position : last - position]
    return stop


def _mixed(block: NDArray[np.float32], num_channels: int) -> NDArray[np.float32]:
    """Return samples [T, C] with another number of channels."""
    if block.shape[1] == num_channels:
        return block
    if num_channels == 1:
        total = block[:, :1] + block[:, 1:2]
        for channel in range(2, block.shape[1]):
            total += block[:, channel : channel + 1]
        total /= block.shape[1]
        return total
    if block.shape[1] == 1:
        return np.broadcast_to(block, (len(block), num_channels))
    raise DecodeError(f"has {block.shape[1]} channels, and channels={num_channels} was asked for")


def _clipped(seconds: float, rate: int, num_samples: int) -> int:
    """Return the sample at a time, within the file."""
    return num_samples if seconds * rate >= num_samples else max(0, round(seconds * rate))


def _check_settings(decoder: AudioDecoder) -> None:
    """Refuse settings that do not go with each other."""
    require_span(decoder.span)
    settings = (decoder.sample_rate, decoder.channels, decoder.dtype)
    refuse_broken(
        (
            decoder.crop == "random" and decoder.duration_s is None,
            'crop="random": give duration_s too',
        ),
        (
            decoder.features is not None and settings != (SAMPLE_RATE, 1, "float32"),
            'features need sample_rate=16000, channels=1 and dtype="float32"',
        ),
    )


# -- settings of Hugging Face feature extractors ---------------------------------------------------

_PADDINGS = {"Qwen2_5OmniProcessor": "valid", "Qwen3OmniMoeProcessor": "longest"}
"""How a processor calls the extractor, by the name of its class. All others pad to the maximum."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an `AudioDecoder` that makes the same features.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    extractor = getattr(processor, "feature_extractor", processor)
    name = type(extractor).__name__
    if name != "WhisperFeatureExtractor":
        raise ConfigError(f"{name}: not WhisperFeatureExtractor; run it as a transform")
    expected = {
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP,
        "n_fft": FFT_SIZE,
        "dither": 0.0,
        "padding_value": 0.0,
        "do_normalize": False,
    }
    for setting, expected_value in expected.items():
        value = getattr(extractor, setting, expected_value)
        if value != expected_value:
            raise ConfigError(
                f"{name}: {setting}={shown(value)} has no counterpart in WhisperFeatures"
            )
    padding: Any = _PADDINGS.get(type(processor).__name__, "max")
    features = WhisperFeatures(
        num_mels=extractor.feature_size, padding=padding, chunk_s=extractor.chunk_length
    )
    return {"sample_rate": SAMPLE_RATE, "channels": 1, "features": features}


# -- samples at another rate -----------------------------------------------------------------------
#
# A span of the result is a span of the whole file's result. So the samples around it are read too
# (`MARGIN_S`), and the piece begins where both rates have a sample at the same time:
#
#     44,100 -> 16,000 Hz: every 441 samples of the source are 160 of the result.
#     Result 100,000 to 110,000 is source 275,625 to 303,188. With a margin of 8,820 samples the
#     piece begins at 266,805 = 605 x 441, which is sample 605 x 160 = 96,800 of the result.

MARGIN_S = 0.2
"""Seconds beside a span that take part in its resampling."""


class Piece(NamedTuple):
    """The samples of the source that a span of the result needs."""

    start: int
    """First sample of the source."""
    stop: int
    """The sample of the source after the last."""
    offset: int
    """How many samples of the piece's result come before the span."""


def num_resampled(num_samples: int, source_rate: int, rate: int) -> int:
    """Return how many samples at `rate` are nearest to so many at `source_rate`.

    Examples:
        >>> num_resampled(44_101, 44_100, 16_000)
        16000
    """
    return (2 * num_samples * rate + source_rate) // (2 * source_rate)


def source_piece(start: int, stop: int, num_samples: int, source_rate: int, rate: int) -> Piece:
    """Return what the samples `start` to `stop` of the result need of a source.

    Args:
        start: First sample of the result.
        stop: The sample of the result after the last.
        num_samples: Samples of the whole source.
        source_rate: Of the source.
        rate: Of the result.

    Examples:
        >>> source_piece(100_000, 110_000, 2_000_000, 44_100, 16_000)
        Piece(start=266805, stop=312008, offset=3200)
        >>> source_piece(100, 200, 300, 16_000, 16_000)
        Piece(start=100, stop=200, offset=0)
    """
    if source_rate == rate:
        return Piece(start, min(stop, num_samples), 0)
    margin = int(MARGIN_S * source_rate)
    divisor = gcd(source_rate, rate)
    source_step, step = source_rate // divisor, rate // divisor
    num_steps = max(0, start * source_rate // rate - margin) // source_step
    last = -(-stop * source_rate // rate) + margin
    return Piece(num_steps * source_step, min(last, num_samples), start - num_steps * step)


def _resampled(
    stream: soxr.ResampleStream | None, samples: NDArray[np.float32], last: bool
) -> NDArray[np.float32]:
    """Return the next samples [T, C] of a result, as far as they are known.

    Together they are what all samples at once would give.

    Args:
        stream: What resamples this source. None: the result has the source's own rate.
        samples: The next samples of the source, [T, C].
        last: Whether no others follow.
    """
    if stream is None:
        return samples
    return np.asarray(stream.resample_chunk(np.ascontiguousarray(samples), last=last))


# -- log-mel features, as Whisper, Qwen2-Audio and the Qwen omni models take them ------------------
#
# A worker makes them right after decoding (``AudioDecoder(features=...)``). Or the device makes
# them of a batch's samples:
#
#     mel = features(batch["audio"], batch["audio_length"])
#
# They are those of transformers' ``WhisperFeatureExtractor``, with its mel filters. Frames that
# hear nothing but the silence after a recording are all alike, and are not computed.

HOP = 160
"""Samples from one frame to the next: 10 ms."""
FFT_SIZE = 400
"""Samples that a frame hears: 25 ms."""
_HALF = FFT_SIZE // 2
_BLOCK_FRAMES = 128
"""Frames that a CPU works on at a time. They stay in its cache, and are too few for many threads:
the threads that decode share the cores already."""
_FLOOR = 1e-10
_RANGE = 8.0
"""Powers of ten that a recording's features span: what is weaker is lifted."""


@checked()
@dataclass(frozen=True, kw_only=True)
class WhisperFeatures:
    """Log-mel features: a callable from samples at 16 kHz to float32 [num_mels, num_frames].

    A frame hears 25 ms. Frames are 10 ms apart.

    Attributes:
        num_mels: Number of mel bands: 80, or 128 for Whisper large-v3, Qwen2-Audio and the Qwen
            omni models.
        padding: What follows a recording.
            "max": silence, up to `chunk_s`. Every result has ``chunk_s * 100`` frames, which the
            encoders of Whisper and Qwen2-Audio need.
            "valid": the same silence, but only frames that begin in the recording are kept, as
            Qwen2.5-Omni uses them.
            "longest": nothing. The edge is mirrored, as the extractor does for a single recording
            with ``padding="longest"``. Qwen3-Omni uses this.
        chunk_s: Longest recording in seconds, for "max" and "valid". A longer one is refused; to
            cut it, give ``AudioDecoder(duration_s=30)``.

    Raises:
        ConfigError: A setting has the wrong type or range.

    Examples:
        >>> import torch
        >>> features = WhisperFeatures(num_mels=80)
        >>> features(torch.zeros(48_000)).shape
        torch.Size([80, 3000])
        >>> features.num_frames(48_000)
        300
    """

    num_mels: PositiveInt = 80
    padding: Literal["max", "valid", "longest"] = "max"
    chunk_s: PositiveInt = 30

    @property
    def max_samples(self) -> int | None:
        """Most samples of a recording. None: no limit."""
        return None if self.padding == "longest" else self.chunk_s * SAMPLE_RATE

    def num_frames(self, num_samples: int) -> int:
        """Return how many frames are not padding, for a recording of so many samples."""
        return num_samples // HOP if self.padding == "longest" else -(-num_samples // HOP)

    def __call__(self, samples: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Make the features of one recording, or of a batch, on the device of its samples.

        Args:
            samples: float32 [T] or [N, T] at 16 kHz, -1 to 1. int16 is scaled to that.
            lengths: int64 [N]: the samples of each recording that are not padding. Only for a
                batch. None: all.

        Returns:
            float32 [num_mels, F], or [N, num_mels, F]. F is ``chunk_s * 100`` for "max", else that
            of the longest recording. A result does not depend on the rest of its batch; what is
            after its own frames is silence for "max" and 0 else.

        Raises:
            ConfigError: The samples have another shape, or a recording is longer than `chunk_s`.
        """
        if samples.dtype == torch.int16:
            samples = samples * 2.0**-15
        if samples.ndim == 1:
            return self._one(samples.float())
        if samples.ndim != 2:
            raise ConfigError(f"samples of shape {tuple(samples.shape)}: give [T] or [N, T]")
        counts = [samples.shape[1]] * len(samples) if lengths is None else lengths.tolist()
        rows = [self._one(row[:count].float()) for row, count in zip(samples, counts, strict=True)]
        num_frames = max((row.shape[1] for row in rows), default=0)
        batch = samples.new_zeros((len(rows), self.num_mels, num_frames), dtype=torch.float32)
        for target, row in zip(batch, rows, strict=True):
            target[:, : row.shape[1]] = row
        return batch

    def _one(self, samples: torch.Tensor) -> torch.Tensor:
        num_samples = len(samples)
        limit = self.max_samples
        if limit is not None and num_samples > limit:
            raise ConfigError(
                f"a recording of {num_samples / SAMPLE_RATE:g} s is longer than "
                f"chunk_s={self.chunk_s}: cut it, or give a larger chunk_s"
            )
        num_frames = self.num_frames(num_samples)
        num_results = self.chunk_s * SAMPLE_RATE // HOP if self.padding == "max" else num_frames
        if not num_results:
            return samples.new_zeros((self.num_mels, 0))
        if not num_samples:
            samples = samples.new_zeros(1)
        # Frame i hears the samples from 160 i - 200 on, so the last that hears one is this:
        num_heard = min(num_results, (num_samples + _HALF - 1) // HOP + 1)
        with torch.autocast(samples.device.type, enabled=False):  # bfloat16 is too coarse for this
            mel = self._log_mel(self._with_edges(samples, num_heard))
        floor = mel.max() - _RANGE
        mel = torch.maximum(mel, floor, out=mel).add_(4.0).div_(4.0)
        if num_heard == num_results:
            return mel
        silence = (torch.clamp(floor, min=-10.0) + 4.0) / 4.0
        result = silence.expand(self.num_mels, num_results).clone()
        result[:, :num_heard] = mel
        return result

    def _with_edges(self, samples: torch.Tensor, num_heard: int) -> torch.Tensor:
        """Return the samples that so many frames hear: mirrored at the start, and at the end."""
        num_samples = len(samples)
        num_padded = num_samples if self.padding == "longest" else self.chunk_s * SAMPLE_RATE
        stop = (num_heard - 1) * HOP + FFT_SIZE - _HALF
        before = torch.arange(-_HALF, 0, device=samples.device)
        behind = torch.arange(num_samples, max(num_samples, stop), device=samples.device)
        position = torch.cat((before, behind)).abs()
        position = torch.where(position >= num_padded, 2 * (num_padded - 1) - position, position)
        edges = samples[position.clamp(0, num_samples - 1)]
        edges = edges.masked_fill(position >= num_samples, 0.0)
        return torch.cat((edges[:_HALF], samples[:stop], edges[_HALF:]))

    def _log_mel(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the mel spectrum of each frame, [num_mels, num_frames]."""
        window, filters = _constants(self.num_mels, samples.device)
        frames = samples.unfold(0, FFT_SIZE, HOP)
        mel = samples.new_empty((self.num_mels, len(frames)))
        step = _BLOCK_FRAMES if samples.device.type == "cpu" else len(frames)
        for start in range(0, len(frames), step):
            spectrum = torch.fft.rfft(frames[start : start + step] * window)
            real, imaginary = torch.view_as_real(spectrum).square_().unbind(-1)
            power = samples.new_empty((_HALF + 1, len(spectrum)))  # the layout of the product
            torch.add(real.T, imaginary.T, out=power)
            mel[:, start : start + step] = filters @ power.to(filters.dtype)
        return mel.clamp_(min=_FLOOR).log10_()


@lru_cache(maxsize=16)
def _constants(num_mels: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the window, and the mel filters [num_mels, 201].

    On the CPU the filters are sparse: 98 of 100 are zeros. Such a product adds in one order, so its
    last bits depend neither on threads nor on the frames beside it. Elsewhere they are float64.
    Products of dense float32 are coarser after ``torch.set_float32_matmul_precision``.
    """
    from transformers.audio_utils import mel_filter_bank  # slow to import

    resolve_vector_math()
    bank = mel_filter_bank(
        num_frequency_bins=_HALF + 1,
        num_mel_filters=num_mels,
        min_frequency=0.0,
        max_frequency=SAMPLE_RATE / 2,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    filters = torch.from_numpy(bank.T.astype(np.float32, order="C"))
    filters = filters.to_sparse() if device.type == "cpu" else filters.double()
    window = torch.hann_window(FFT_SIZE, dtype=torch.float32, device="cpu")
    return window.to(device), filters.to(device)  # copies that are done, for use on every stream
