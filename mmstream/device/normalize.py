"""Part of the device stage: uint8 pictures become the floating numbers that a model takes.

On the CPU memory is what this costs: four passes over numbers of four bytes, in memory that the
system must make first, take several times as long as one pass that stays in the cache, in memory
that is used again. On CUDA the same expression runs as it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.errors import ConfigError

__all__ = ["Normalize", "Normalizer"]

CHUNK_NUMBERS = 2**15
"""Of a picture batch at a time: 128 KiB as float32, and as many as torch leaves to one thread. More
at a time would meet the threads that decode, and wait for them at each operation."""


@dataclass(frozen=True)
class Normalize:
    """Normalisation of uint8 images: (x / 255 - mean) / std, one mean and std (> 0) a channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if not self.mean or len(self.mean) != len(self.std):
            raise ConfigError("Normalize: give one mean and one std a channel")
        if min(self.std) <= 0:
            raise ConfigError(f"Normalize: std must be above 0, not {min(self.std)}")


class Normalizer:
    """Makes pictures floating: (x / 255 - mean) / std in float32, then rounded to `dtype` once.

    The bits are the same on every device and on either way: each step is the formula's own,
    correctly rounded.

    Args:
        normalize: None only scales to 0..1.
        dtype: of the result.
        device: where the pictures lie.
        memory: for results on the CPU.
    """

    def __init__(
        self,
        normalize: Normalize | None,
        dtype: torch.dtype,
        device: torch.device,
        memory: BatchMemory | None = None,
    ) -> None:
        self._dtype = dtype
        self._memory = memory or BatchMemory()
        # Dividing by a tensor, not by a Python number, keeps CUDA from multiplying by the rounded
        # 1/255: the pixels are the same bits as on the CPU.
        self._scale = torch.tensor(255.0, dtype=torch.float32, device=device)
        self._mean = self._std = None
        if normalize is not None:
            self._mean = torch.tensor(normalize.mean, dtype=torch.float32, device=device)
            self._std = torch.tensor(normalize.std, dtype=torch.float32, device=device)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 pictures, [B, C, H, W] or one [C, H, W], in the layout they come in.

        Returns:
            A new tensor; on the CPU in memory that comes back when the last view of it is gone.
        """
        if self._mean is not None and len(self._mean) not in (1, image.shape[-3]):
            raise ConfigError(
                f"Normalize: {len(self._mean)} means for images of {image.shape[-3]} channels"
            )
        pixels = image.movedim(-3, -1)
        if image.device.type == "cpu" and image.numel() and pixels.is_contiguous():
            return self._in_chunks(pixels).movedim(-1, -3)
        result = image.to(torch.float32).div_(self._scale)
        if self._mean is not None and self._std is not None:
            result.sub_(self._mean.view(-1, 1, 1)).div_(self._std.view(-1, 1, 1))
        return result.to(self._dtype)

    def _in_chunks(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise [..., W, C] pictures without gaps, each part while the cache holds it."""
        memory = self._memory.take(pixels.numel() * self._dtype.itemsize)
        made = memory.view(self._dtype).view(pixels.shape)
        width, channels = pixels.shape[-2:]
        lines, results = pixels.view(-1, width * channels), made.view(-1, width * channels)
        mean, std = (
            None if one is None else one.expand(channels).repeat(width)
            for one in (self._mean, self._std)
        )
        num_lines = max(1, CHUNK_NUMBERS // (width * channels))
        scratch = torch.empty(
            (min(num_lines, len(lines)), width * channels), dtype=torch.float32, device="cpu"
        )
        for start in range(0, len(lines), num_lines):
            chunk, result = lines[start : start + num_lines], results[start : start + num_lines]
            floats = result if self._dtype == torch.float32 else scratch[: len(chunk)]
            floats.copy_(chunk).div_(self._scale)
            if mean is not None and std is not None:
                floats.sub_(mean).div_(std)
            if floats is not result:
                result.copy_(floats)
        return made
