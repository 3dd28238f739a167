"""Normalise images on the device: uint8 pixels become the floating numbers that a model takes.

    to_device -> `Normalizer`

On CUDA the formula runs as it is written. On the CPU that would be slow, because it would go over
large new memory four times. So the CPU works in chunks that fit its cache, and writes the results
to memory that is used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch

from mmstream.decoding.batch_memory import BatchMemory
from mmstream.errors import ConfigError
from mmstream.settings import shown

CHUNK_NUMBERS = 2**15
"""Numbers per chunk on the CPU: 128 KiB as float32.

torch computes that many in one thread. With larger chunks it would use several threads, which would
wait for the cores of the decoding threads at each operation.
"""


GROUP_NUMBERS = 2**26
"""Numbers that a GPU normalises at a time: 256 MiB as float32, beside the result.

The frames of many videos are more than that.
"""


@dataclass(frozen=True, init=False)
class Normalize:
    """Normalisation of images: ``(x / 255 - mean) / std`` per channel, for uint8 pixels x.

    Args:
        mean: one number per channel, on the scale 0..1. A single number applies to all channels.
        std: as many numbers, each above 0, on the same scale.

    Raises:
        ConfigError: `mean` is empty, the lengths differ, a `std` is not above 0, or the numbers are
            on the scale 0..255.

    Examples:
        >>> to_plus_minus_one = mm.Normalize(mean=0.5, std=0.5)
        >>> imagenet = mm.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, mean: float | Iterable[float], std: float | Iterable[float]) -> None:
        object.__setattr__(self, "mean", _numbers("mean", mean))
        object.__setattr__(self, "std", _numbers("std", std))
        if not self.mean or len(self.mean) != len(self.std):
            raise ConfigError("Normalize: give one mean and one std per channel")
        if min(self.std) <= 0:
            raise ConfigError(f"Normalize: std must be above 0, not {min(self.std)}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if not all(abs(value) <= 1 for value in values):
                raise ConfigError(
                    f"Normalize: {name}={values} is not on the scale 0 to 1: divide mean and std "
                    "by 255"
                )


def _numbers(name: str, values: float | Iterable[float]) -> tuple[float, ...]:
    """Return the numbers of all channels, or the single one."""
    try:
        numbers = (values,) if isinstance(values, Real) else tuple(values)  # type: ignore[arg-type]
        if not any(isinstance(number, bool | str) for number in numbers):
            return tuple(float(number) for number in numbers)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"Normalize: {name}={shown(values)}: give a number, or one per channel")


class Normalizer:
    """Computes ``(x / 255 - mean) / std`` in float32, then rounds once to `dtype`.

    The result has the same bits on every device, with or without chunks: each operation of the
    formula is correctly rounded.

    Args:
        normalize: None: ``x / 255``, which scales to 0..1.
        dtype: floating type of the result.
        device: the device of the images.
        memory: memory for results on the CPU. None: memory of its own.
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
        # Division by a Python number would make CUDA multiply by the rounded 1/255, which gives
        # other bits than the CPU. Division by a tensor does not.
        self._scale = torch.tensor(255.0, dtype=torch.float32, device=device)
        self._mean = self._std = None
        if normalize is not None:
            self._mean = torch.tensor(normalize.mean, dtype=torch.float32, device=device)
            self._std = torch.tensor(normalize.std, dtype=torch.float32, device=device)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 images, [B, C, H, W] or [C, H, W].

        Returns:
            A new tensor of the same shape and memory format. On the CPU its memory is used again
            when the last view of it is gone.

        Raises:
            ConfigError: the number of means does not fit the channels.
        """
        if self._mean is not None and len(self._mean) not in (1, image.shape[-3]):
            raise ConfigError(
                f"Normalize: {len(self._mean)} means for images of {image.shape[-3]} channels"
            )
        pixels = image.movedim(-3, -1)
        if image.device.type == "cpu" and image.numel() and pixels.is_contiguous():
            return self._in_chunks(pixels).movedim(-1, -3)
        if image.ndim == 3 or image.numel() <= GROUP_NUMBERS:
            return self._at_once(image)
        result = torch.empty_like(image, dtype=self._dtype)
        num_images = max(1, GROUP_NUMBERS // image[0].numel())
        for start in range(0, len(image), num_images):
            group = image[start : start + num_images]
            result[start : start + num_images] = self._at_once(group)
        return result

    def _at_once(self, image: torch.Tensor) -> torch.Tensor:
        """Normalise images as the formula is written."""
        result = image.to(torch.float32).div_(self._scale)
        if self._mean is not None and self._std is not None:
            result.sub_(self._mean.view(-1, 1, 1)).div_(self._std.view(-1, 1, 1))
        return result.to(self._dtype)

    def _in_chunks(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise contiguous [..., W, C] images on the CPU, a few lines of pixels at a time."""
        memory = self._memory.take(pixels.numel() * self._dtype.itemsize)
        normalized = memory.view(self._dtype).view(pixels.shape)
        width, channels = pixels.shape[-2:]
        lines = pixels.view(-1, width * channels)
        results = normalized.view(-1, width * channels)
        mean = std = None
        if self._mean is not None and self._std is not None:  # repeated for each pixel of a line
            mean = self._mean.expand(channels).repeat(width)
            std = self._std.expand(channels).repeat(width)
        num_lines = max(1, CHUNK_NUMBERS // (width * channels))
        scratch = torch.empty(
            (min(num_lines, len(lines)), width * channels), dtype=torch.float32, device="cpu"
        )
        for start in range(0, len(lines), num_lines):
            chunk = lines[start : start + num_lines]
            result = results[start : start + num_lines]
            floats = result if self._dtype == torch.float32 else scratch[: len(chunk)]
            floats.copy_(chunk).div_(self._scale)
            if mean is not None and std is not None:
                floats.sub_(mean).div_(std)
            if floats is not result:
                result.copy_(floats)
        return normalized
