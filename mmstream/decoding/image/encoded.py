"""Pictures that a GPU will decode: their files, and how to make the results, instead of pixels.

Place in the flow: with ``ImageDecoder(device="cuda")`` a worker reads a JPEG's header and draws the
crop and flip, exactly as it would for itself. Then it passes on the file and the plan:

    decode -> EncodedImage, one per picture -> batch -> EncodedImages, one per batch -> device

`gpu_eligible.py` says which files go this way. The CPU decodes all others here, and they travel as
pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.limits import Limits
from mmstream.decoding.image.plan import Plan, is_steep

__all__ = ["EncodedImage", "EncodedImages", "Jpeg", "encode_or_decode"]


@dataclass(frozen=True)
class EncodedImage:
    """A sample's picture on its way to the GPU. ``decode()`` shows it earlier, on the CPU."""

    data: bytes
    """The JPEG file."""
    plan: Plan
    """How the result is made of it."""
    field: str
    """Name of the sample's field, for messages."""
    decoder: ImageDecoder
    """The settings."""

    def decode(self) -> torch.Tensor:
        """Decode the picture on the CPU with the reference decoder.

        Returns:
            uint8 [3, H, W], a view of H, W, 3 memory.

        Raises:
            DecodeError: The bytes are not a whole image.
        """
        pixels = self.decoder.decode(self.data, plan=self.plan).pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def __repr__(self) -> str:
        height, width = self.plan.picture
        return f"<JPEG of {width}x{height}, {len(self.data):,} bytes, for mmstream.to_device>"


def encode_or_decode(
    data: bytes,
    field: str,
    decoder: ImageDecoder,
    rng: np.random.Generator | None,
    limits: Limits,
) -> EncodedImage | torch.Tensor:
    """Leave a picture to the GPU where the GPU can decode it, else decode it now.

    Returns:
        An `EncodedImage`, or uint8 [3, H, W].

    Raises:
        DecodeError: The bytes are not a whole image, or exceed a limit. For an `EncodedImage` only
            header and end were checked.
        ConfigError: `rng` is missing.
    """
    plan = decoder.plan(data, rng)
    if plan is not None and not is_steep(plan.view):
        height, width = plan.view.shape
        limits.check_memory(height * width * 3, *plan.picture)
        return EncodedImage(data, plan, field, decoder)
    return torch.from_numpy(decoder.decode(data, None, rng, plan, limits).pixels).permute(2, 0, 1)


class Jpeg(NamedTuple):
    """One file among those of a batch."""

    start: int
    """Offset of its first byte in `EncodedImages.data`."""
    stop: int
    """Offset after its last byte."""
    plan: Plan
    field: str


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """All pictures of a batch, some of which `mmstream.to_device` has the GPU decode.

    A sequence of `EncodedImage` and uint8 [3, H, W] tensors. A slice shares the memory.
    """

    data: torch.Tensor
    """uint8 [num_bytes], the files end to end."""
    entries: list[Jpeg | torch.Tensor]
    """One per picture: an encoded file, or the pixels of one that the CPU decoded."""
    decoder: ImageDecoder
    """The settings, the same for all."""

    @classmethod
    def join(cls, images: list[EncodedImage | torch.Tensor]) -> EncodedImages:
        """Put the pictures of a batch together. At least one of them must be encoded."""
        entries: list[Jpeg | torch.Tensor] = []
        files: list[bytes] = []
        num_bytes = 0
        decoder = None
        for image in images:
            if isinstance(image, torch.Tensor):
                entries.append(image)
                continue
            decoder = image.decoder
            start = num_bytes
            num_bytes += len(image.data)
            files.append(image.data)
            entries.append(Jpeg(start, num_bytes, image.plan, image.field))
        assert decoder is not None
        joined = bytearray().join(files)
        return cls(torch.frombuffer(joined, dtype=torch.uint8), entries, decoder)

    @property
    def shapes(self) -> list[Shape]:
        """(height, width) of each result."""
        return [
            entry.plan.view.shape if isinstance(entry, Jpeg) else (entry.shape[-2], entry.shape[-1])
            for entry in self.entries
        ]

    def file(self, jpeg: Jpeg) -> torch.Tensor:
        """Return the bytes of a file: uint8 [num_bytes], a view."""
        return self.data[jpeg.start : jpeg.stop]

    def encoded(self, jpeg: Jpeg) -> EncodedImage:
        """Return a picture by itself. Its file is copied."""
        return EncodedImage(self.file(jpeg).numpy().tobytes(), jpeg.plan, jpeg.field, self.decoder)

    def map(self, function: Callable[[Any], Any]) -> EncodedImages:
        """Apply a function to `data` and to each entry, to move the tensors among them."""
        return replace(self, data=function(self.data), entries=list(map(function, self.entries)))

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> EncodedImage | torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedImages: ...
    def __getitem__(self, index: int | slice) -> EncodedImage | torch.Tensor | EncodedImages:
        if isinstance(index, slice):
            return replace(self, entries=self.entries[index])
        entry = self.entries[index]
        return self.encoded(entry) if isinstance(entry, Jpeg) else entry

    def __iter__(self) -> Iterator[EncodedImage | torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        num_files = sum(isinstance(entry, Jpeg) for entry in self.entries)
        return f"<{num_files} JPEGs and {len(self) - num_files} pictures for mmstream.to_device>"
