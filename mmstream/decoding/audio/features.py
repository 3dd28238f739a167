"""Log-mel features as Whisper, Qwen2-Audio and the Qwen omni models take them.

Place in the flow: a worker makes them right after decoding (``AudioDecoder(features=...)``). Or the
device makes them of a batch's samples:

    mel = features(batch["audio"], batch["audio_length"])

They are those of transformers' ``WhisperFeatureExtractor``, with its mel filters. Frames that hear
nothing but the silence after a recording are all alike, and are not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from mmstream.decoding.threaded_calls import resolve_vector_math
from mmstream.errors import ConfigError
from mmstream.settings import PositiveInt, checked

SAMPLE_RATE = 16_000
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
