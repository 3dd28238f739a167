"""A picture that a GPU will decode: its bytes, and what is to become of them, in place of pixels.

Part of the decode stage. With ``ImageDecoder(device="cuda")`` a worker reads a JPEG's header, draws
the crop and flip that it would draw for itself, and passes on the file and the plan:

    decode -> EncodedImage, of a sample -> batch -> EncodedImages, of a batch -> `device.nvjpeg`

`gpu_eligible.py` says which files go this way. All others are decoded here, by the CPU, and travel
as pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.plan import Plan

__all__ = ["EncodedImage", "EncodedImages", "Jpeg", "encode_or_decode"]


@dataclass(frozen=True)
class EncodedImage:
    """A sample's picture on its way to the GPU; ``decode()`` shows it here and now."""

    data: bytes
    plan: Plan
    field: str
    """Of the sample: for messages."""
    decoder: ImageDecoder

    def decode(self) -> torch.Tensor:
        """Decode it on the CPU, as the reference decoder: uint8 [3, H, W].

        Raises:
            DecodeError: The bytes are no whole image.
        """
        pixels = self.decoder.decode(self.data, plan=self.plan).pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def __repr__(self) -> str:
        height, width = self.plan.picture
        return f"<JPEG of {width}x{height}, {len(self.data):,} bytes, for mmstream.to_device>"


def encode_or_decode(
    data: bytes, field: str, decoder: ImageDecoder, rng: np.random.Generator | None
) -> EncodedImage | torch.Tensor:
    """Leave a picture to the GPU where that can decode it, else decode it: uint8 [3, H, W].

    Raises:
        DecodeError: The bytes are no whole image, or exceed a limit, as far as that was looked at.
    """
    plan = decoder.plan(data, rng)
    if plan is not None and not plan.is_steep:
        return EncodedImage(data, plan, field, decoder)
    return torch.from_numpy(decoder.decode(data, None, rng, plan).pixels).permute(2, 0, 1)


class Jpeg(NamedTuple):
    """A file among those of a batch."""

    start: int
    stop: int
    plan: Plan
    field: str


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """All pictures of a batch, some of which a GPU is to decode: `mmstream.to_device` does.

    A sequence of `EncodedImage` and uint8 [3, H, W] tensors.
    """

    data: torch.Tensor
    """uint8 [num_bytes], the files end to end."""
    entries: list[Jpeg | torch.Tensor]
    decoder: ImageDecoder

    @classmethod
    def of(cls, images: list[EncodedImage | torch.Tensor]) -> EncodedImages:
        """Put pictures together, at least one of them encoded."""
        entries: list[Jpeg | torch.Tensor] = []
        files, size, decoder = [], 0, None
        for image in images:
            if isinstance(image, torch.Tensor):
                entries.append(image)
                continue
            decoder, start = image.decoder, size
            files.append(image.data)
            size += len(image.data)
            entries.append(Jpeg(start, size, image.plan, image.field))
        assert decoder is not None
        joined = bytearray().join(files)
        return cls(torch.frombuffer(joined, dtype=torch.uint8), entries, decoder)

    @property
    def shapes(self) -> list[Shape]:
        """(height, width) of each result."""
        return [
            one.plan.view.shape if isinstance(one, Jpeg) else (one.shape[-2], one.shape[-1])
            for one in self.entries
        ]

    def file(self, jpeg: Jpeg) -> torch.Tensor:
        """Return the bytes of a file, uint8, a view."""
        return self.data[jpeg.start : jpeg.stop]

    def encoded(self, jpeg: Jpeg) -> EncodedImage:
        """Return a picture by itself, its file copied."""
        return EncodedImage(self.file(jpeg).numpy().tobytes(), jpeg.plan, jpeg.field, self.decoder)

    def map(self, function: Callable[[Any], Any]) -> EncodedImages:
        """Apply a function to what may be a tensor."""
        return replace(self, data=function(self.data), entries=list(map(function, self.entries)))

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, place: int) -> EncodedImage | torch.Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> EncodedImages: ...
    def __getitem__(self, place: int | slice) -> EncodedImage | torch.Tensor | EncodedImages:
        if isinstance(place, slice):
            return replace(self, entries=self.entries[place])
        one = self.entries[place]
        return self.encoded(one) if isinstance(one, Jpeg) else one

    def __iter__(self) -> Iterator[EncodedImage | torch.Tensor]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        num_files = sum(isinstance(one, Jpeg) for one in self.entries)
        return f"<{num_files} JPEGs and {len(self) - num_files} pictures for mmstream.to_device>"
