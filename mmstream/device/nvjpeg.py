"""Part of the device stage: pictures that came as files become the batch's pixels on the device.

    EncodedImages -> nvJPEG -> each turned upright, cut, resized, mirrored and laid on its place
                  -> uint8, the tensor that the CPU's decoder would give

What nvJPEG refuses, the reference decoder on the CPU judges again. What that refuses too has no
substitute any more, as its place in the batch is given: the row is invalid, its picture black, and
the sample counts as bad.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from mmstream.bad_samples.quarantine import BadSample, shard_stamp
from mmstream.batching.collate import mask_labels
from mmstream.dataset.source import ShardSource
from mmstream.decoding.image.encoded import EncodedImages, Jpeg
from mmstream.decoding.image.orientation import upright_tensor
from mmstream.decoding.image.plan import Plan
from mmstream.errors import ConfigError, DecodeError, where
from mmstream.reading.step import BatchLineage
from mmstream.types import Batch

__all__ = ["DecodeJpegs", "DeviceDecoder", "nvjpeg"]

logger = logging.getLogger(__name__)

DecodeJpegs: TypeAlias = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]
"""From files, uint8 [num_bytes] on the host, to uint8 [3, H, W] on the device, as stored: EXIF is
not looked at. RuntimeError where one of them cannot be decoded."""

GROUP_PIXELS = 2**27
"""Decoded at a time: 384 MiB of full-size pictures."""


class DeviceDecoder:
    """Decodes the pictures of batches.

    Args:
        device: where.
        decode_jpegs: `nvjpeg`, or what does the same.
        source: names the shards in the records of bad samples.
    """

    def __init__(
        self, device: torch.device, decode_jpegs: DecodeJpegs, source: ShardSource | None
    ) -> None:
        self._device, self._decode_jpegs, self._source = device, decode_jpegs, source
        self._num_refused = 0

    def __call__(self, host: Batch) -> Batch:
        """Return the batch with pixels, uint8 on the device, in the place of files.

        Raises:
            ConfigError: torchvision cannot decode here.
        """
        pixels, bad = self._pixels(host["image"])
        made = {**host, "image": pixels}
        if bad:
            self._without(made, bad)
        return made

    def _pixels(
        self, images: EncodedImages
    ) -> tuple[torch.Tensor | list[torch.Tensor], dict[int, str]]:
        """Return uint8 [B, 3, H, W], channels_last, or a list; and why some of it is black."""
        shapes, bad = images.shapes, dict[int, str]()
        whole = self._empty(len(shapes), 3, *shapes[0]) if len(set(shapes)) == 1 else None
        places = [self._empty(3, *shape) for shape in shapes] if whole is None else list(whole)
        fill = torch.tensor(images.decoder.fill, dtype=torch.float32, device=self._device)
        for number, one in enumerate(images.entries):
            if isinstance(one, torch.Tensor):
                places[number].copy_(one.to(self._device))
        for group in _groups(images.entries):
            decoded = self._try([images.file(jpeg) for _, jpeg in group])
            for (number, jpeg), pixels in zip(group, decoded, strict=True):
                if pixels is not None and pixels.shape == (3, *jpeg.plan.stored):
                    _lay(places[number], pixels, jpeg.plan, images.decoder.interpolation, fill)
                    continue
                try:
                    by_cpu = images.encoded(jpeg).decode()
                    places[number].copy_(by_cpu.to(self._device))
                except DecodeError as error:
                    places[number].zero_()
                    bad[number] = f"{jpeg.field}: {error}"
        for part in places if whole is None else [whole]:
            part.round_().clamp_(0, 255)
        if whole is None:
            return [place.to(torch.uint8) for place in places], bad
        return whole.to(torch.uint8, memory_format=torch.channels_last), bad

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _try(self, files: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode files, each alone where not all can be; None is what is refused then, too."""
        try:
            return list(self._decode_jpegs(files, self._device))
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            if len(files) > 1:
                return [self._try([file])[0] for file in files]
            self._num_refused += 1
            level = logging.WARNING if self._num_refused == 1 else logging.DEBUG
            logger.log(level, "the GPU refused a JPEG, which the CPU decodes now: %s", error)
            return [None]

    def _without(self, made: Batch, bad: dict[int, str]) -> None:
        """Mark the rows of bad pictures invalid, and put down why."""
        lineage: BatchLineage = made["__lineage__"]
        valid, rows = made["__valid__"].clone(), made.get("image_row")
        records = {record.row: record for record in lineage.bad}
        for number, reason in bad.items():
            place = number if rows is None else int(rows[number])
            row = lineage.start + place
            if not valid[place]:
                continue  # padding, or another of its pictures is bad
            valid[place] = False
            if row in records:  # it was a substitute, and counts no more
                records[row] = replace(records[row], substitute=None)
                continue
            (shard, index), key = lineage.planned[place], made["__key__"][place]
            name, stamp = self._describe(shard)
            records[row] = BadSample(
                lineage.epoch,
                lineage.step,
                row,
                name,
                index,
                DecodeError.__name__,
                f"{where(name, index)} {key}.{reason}",
                None,
                stamp,
            )
        made["__valid__"] = valid
        made["__lineage__"] = replace(
            lineage, valid=valid.tolist(), bad=tuple(records[row] for row in sorted(records))
        )
        mask_labels(made)

    def _describe(self, shard: int) -> tuple[str, str | None]:
        """Return the name and the stamp of a shard; a loader of another kind has neither."""
        if self._source is None:
            return f"shard {shard}", None
        location = self._source.locate(shard)
        info = location.dataset.manifest.shards[location.shard]
        return self._source.name_of(shard), shard_stamp(info)


def nvjpeg(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode JPEGs by torchvision's nvJPEG.

    Raises:
        RuntimeError: One of them cannot be decoded.
        ConfigError: This torchvision has no nvJPEG.
    """
    from mmstream._torchvision import import_torchvision

    import_torchvision()
    from torchvision.io import ImageReadMode, decode_jpeg

    # It writes on a stream of its own into memory that was last read on this one, and does not wait
    # for that. Nor does it look at which device is this thread's.
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        try:
            decoded: list[torch.Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        except RuntimeError as error:
            if "not compiled" in str(error) or "image extension" in str(error):
                raise ConfigError(
                    f'no nvJPEG here ({error}): ImageDecoder(device="cpu")'
                ) from error
            raise
    return decoded


def _groups(entries: list[Any]) -> Iterator[list[tuple[int, Jpeg]]]:
    """Yield the files, with their places, as many at a time as memory is meant for."""
    group: list[tuple[int, Jpeg]] = []
    num_pixels = 0
    for number, one in enumerate(entries):
        if not isinstance(one, Jpeg):
            continue
        height, width = one.plan.stored
        if group and num_pixels + height * width > GROUP_PIXELS:
            yield group
            group, num_pixels = [], 0
        group.append((number, one))
        num_pixels += height * width
    if group:
        yield group


def _lay(
    place: torch.Tensor, pixels: torch.Tensor, plan: Plan, interpolation: str, fill: torch.Tensor
) -> None:
    """Do what `decoding.image.resize.render` does, in float32, into float32 [3, H, W]."""
    view = plan.view
    top, left, height, width = view.box
    image = upright_tensor(pixels[None], plan.orientation)
    image = image[:, :, top : top + height, left : left + width].to(torch.float32)
    if view.resized != (height, width):
        image = F.interpolate(
            image, view.resized, mode=interpolation, align_corners=False, antialias=True
        )
    (top, left), (height, width) = view.offset, view.shape
    image = image[0, :, max(0, -top) :, max(0, -left) :][:, :height, :width]
    if view.flip:
        image = image.flip(2)
    if image.shape != place.shape:
        place.copy_(fill[:, None, None].expand_as(place))
        place = place[:, max(0, top) :, max(0, left) :][:, : image.shape[1], : image.shape[2]]
    place.copy_(image)
