"""Decode JPEGs on the GPU: the encoded images of a batch become pixels on the device.

    to_device -> `DeviceDecoder` -> `nvjpeg`

    EncodedImages -> decode -> rotate upright, crop, resize, flip -> uint8, as the CPU's decoder

A JPEG that nvJPEG refuses is decoded on the CPU. If the CPU refuses it too, the sample is bad. It
cannot be substituted any more, because the batch is made: its row becomes invalid and its image
black.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from mmstream.dataset.source import ShardSource
from mmstream.decoding.image.encoded import EncodedImages, Jpeg
from mmstream.decoding.image.orientation import upright_tensor
from mmstream.decoding.image.plan import Plan
from mmstream.device.bad_rows import BadMedium, mark_bad
from mmstream.device.render import render
from mmstream.errors import ConfigError, DecodeError
from mmstream.types import Batch

__all__ = ["DecodeJpegs", "DeviceDecoder", "nvjpeg"]

logger = logging.getLogger(__name__)

DecodeJpegs: TypeAlias = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""Decodes files, each uint8 [num_bytes] on the host, to RGB images on the device.

An image is uint8 [3, H, W] as stored: the EXIF orientation is not applied. Raises RuntimeError if a
file cannot be decoded.
"""

GROUP_PIXELS = 2**27
"""Pixels that are decoded at a time: 384 MiB of images at their full size."""


class DeviceDecoder:
    """Decodes the encoded images of batches on a device.

    Args:
        device: the device of the pixels.
        decode_jpegs: `nvjpeg`, or a function that does the same.
        source: the dataset, which names the shards in the records of bad samples. None: they are
            named by their number.
    """

    def __init__(
        self, device: torch.device, decode_jpegs: DecodeJpegs, source: ShardSource | None
    ) -> None:
        self._device, self._decode_jpegs, self._source = device, decode_jpegs, source
        self._num_refused = 0

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with ``image`` decoded, on the device.

        ``image`` is uint8 [num_images, 3, H, W], channels_last, or a list of [3, H, W] if the
        images differ in size. The rows of images that cannot be decoded are invalid.

        Raises:
            ConfigError: this torchvision has no nvJPEG.
        """
        images, errors = self._decode(batch["image"])
        decoded = {**batch, "image": images}
        image_rows = batch.get("image_row")
        mark_bad(
            decoded,
            [
                BadMedium(index if image_rows is None else int(image_rows[index]), field, error)
                for index, (field, error) in errors.items()
            ],
            self._source,
        )
        return decoded

    def _decode(
        self, images: EncodedImages
    ) -> tuple[torch.Tensor | list[torch.Tensor], dict[int, tuple[str, DecodeError]]]:
        """Return the decoded images, and the field and error of each that cannot be decoded.

        The errors are by index of the image. Such an image is black.
        """
        shapes = images.shapes
        errors: dict[int, tuple[str, DecodeError]] = {}
        stacked = self._empty(len(shapes), 3, *shapes[0]) if len(set(shapes)) == 1 else None
        outputs = [self._empty(3, *shape) for shape in shapes] if stacked is None else list(stacked)
        fill = torch.tensor(images.decoder.fill, dtype=torch.float32, device=self._device)
        for index, entry in enumerate(images.entries):
            if isinstance(entry, torch.Tensor):  # it was decoded on the CPU
                outputs[index].copy_(entry.to(self._device))
        for group in _groups(images.entries):
            decoded = self._try([images.file(jpeg) for _, jpeg in group])
            for (index, jpeg), pixels in zip(group, decoded, strict=True):
                if pixels is not None and pixels.shape == (3, *jpeg.plan.stored):
                    _render(outputs[index], pixels, jpeg.plan, images.decoder.interpolation, fill)
                    continue
                try:
                    pixels_of_cpu = images.encoded(jpeg).decode()
                    outputs[index].copy_(pixels_of_cpu.to(self._device))
                except DecodeError as error:
                    outputs[index].zero_()
                    errors[index] = (jpeg.field, error)
        for floats in outputs if stacked is None else [stacked]:
            floats.round_().clamp_(0, 255)
        if stacked is None:
            return [output.to(torch.uint8) for output in outputs], errors
        return stacked.to(torch.uint8, memory_format=torch.channels_last), errors

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _try(self, files: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode files, each alone if they cannot be decoded together; None for a refused file."""
        try:
            return list(self._decode_jpegs(files, self._device))
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            if len(files) > 1:
                return [self._try([file])[0] for file in files]
            self._num_refused += 1
            level = logging.WARNING if self._num_refused == 1 else logging.DEBUG
            logger.log(level, "the GPU refused a JPEG; the CPU decodes it instead: %s", error)
            return [None]


def nvjpeg(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode JPEGs with torchvision's nvJPEG (see `DecodeJpegs`).

    Raises:
        RuntimeError: one of the files cannot be decoded.
        ConfigError: this torchvision has no nvJPEG.
    """
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from torchvision.io import ImageReadMode, decode_jpeg

    # nvJPEG writes on its own stream, into memory that this stream may still read: so wait first.
    # It also ignores the current device of this thread.
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        try:
            decoded: list[torch.Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        except RuntimeError as error:
            if "not compiled" in str(error) or "image extension" in str(error):
                raise ConfigError(
                    f'this torchvision has no nvJPEG ({error}); use ImageDecoder(device="cpu")'
                ) from error
            raise
    return decoded


def _groups(entries: list[Any]) -> Iterator[list[tuple[int, Jpeg]]]:
    """Yield the JPEGs with their indices, in groups of at most `GROUP_PIXELS` pixels.

    A JPEG that is larger than that is a group of its own.
    """
    group: list[tuple[int, Jpeg]] = []
    num_pixels = 0
    for index, entry in enumerate(entries):
        if not isinstance(entry, Jpeg):
            continue
        height, width = entry.plan.stored
        if group and num_pixels + height * width > GROUP_PIXELS:
            yield group
            group = []
            num_pixels = 0
        group.append((index, entry))
        num_pixels += height * width
    if group:
        yield group


def _render(
    output: torch.Tensor, pixels: torch.Tensor, plan: Plan, interpolation: str, fill: torch.Tensor
) -> None:
    """Write an image into `output`, float32 [3, H, W].

    Args:
        output: where the image goes.
        pixels: uint8 [3, H, W], as stored in the file.
        plan: orientation, crop, size and flip.
        interpolation: "bilinear" or "bicubic".
        fill: colour of padding, float32 [3], 0 to 255.
    """
    upright = upright_tensor(pixels[None], plan.orientation)
    render(output[None], upright, plan.view, interpolation, fill)
