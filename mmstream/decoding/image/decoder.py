"""Image bytes to uint8 RGB of the shape a model wants, straight into a row of the batch.

Part of the decode stage: header -> `geometry` (and `tiles`) plan the result -> `formats` decodes, a
JPEG no larger than the plan needs -> `resize` writes it. Pictures stay uint8 on the CPU;
normalisation belongs to the device.

What becomes of odd pictures: EXIF orientation (or XMP's, without EXIF) is applied for every format
that carries one; grey is repeated, CMYK and palettes become RGB, transparency is laid on white,
16-bit channels keep their high byte, colour profiles are ignored, of an animation the first frame
is taken. Damaged and truncated pictures are refused: JPEG by the list in `decoding.image.jpeg`,
PNG also by the checksums of its picture data, the others as their libraries in Pillow notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.checks import check_settings
from mmstream.decoding.image.formats import JPEG_START, decode_bytes, header_shape
from mmstream.decoding.image.geometry import (
    Shape,
    View,
    budgeted,
    covering,
    fitting,
    random_box,
    shrink_factor,
    shrunk,
    whole,
)
from mmstream.decoding.image.gpu_eligible import plain_jpeg
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.image.jpeg import jpeg_shape
from mmstream.decoding.image.pillow import check_pixels
from mmstream.decoding.image.plan import Plan
from mmstream.decoding.image.resize import render
from mmstream.decoding.image.tiles import InternVLTiles, LlavaNextTiles
from mmstream.errors import ConfigError, DecodeError

__all__ = ["ImageDecoder"]

MAX_PIXELS = 128 * 2**20
MAX_BYTES = 256 * 2**20

Resize = Literal["shortest", "exact", "letterbox", "max_pixels", "native"]


class Decoded(NamedTuple):
    """Results of one image, uint8 [H, W, 3] or tiles [N, side, side, 3], and its own shape."""

    pixels: NDArray[np.uint8]
    picture: Shape


@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Decode one image: a callable from bytes to a uint8 array.

    Holds settings and no state: it can be pickled, and called from many threads at once (JPEG, the
    common case, decodes and resizes outside the GIL).

        ImageDecoder(size=224, resize_size=256)            evaluation
        ImageDecoder(size=224, crop="random", flip=0.5)    training a classifier
        ImageDecoder(resize="max_pixels", multiple_of=28)  Qwen2-VL
        ImageDecoder(size=336, tiles=LlavaNextTiles())      Llava-NeXT

    Attributes:
        size: Side of the square result, or its (height, width). None keeps the native size.
        resize: "shortest": scale the picture, up or down, until it just covers `size`, and crop;
            "exact": stretch it to `size`; "letterbox": scale it to fit into `size`, and fill the
            rest; "max_pixels": keep its size as nearly as `multiple_of` and `pixel_budget` allow
            (without `size`); "native": leave it. None: "shortest" with a size, else "native".
        crop: Of "shortest": "center"; "random": a random part of the picture is scaled to `size`,
            as torchvision's ``RandomResizedCrop``; None: no crop, the shorter side is `size`.
        crop_rounding: Of a centre crop with an odd margin: "even" as torchvision, "down" as
            transformers; a pixel apart.
        resize_size: Scale the shorter side to this before the centre crop: ``size=224,
            resize_size=256`` is torchvision's usual pair. At least the larger side of `size`.
        scale: Range of a random crop's share of the area.
        ratio: Range of a random crop's width / height.
        flip: Probability that a result is mirrored left to right.
        multiple_of: Sides of a "max_pixels" result are multiples of it: patch x merge size.
        pixel_budget: (fewest, most) pixels of a "max_pixels" result.
        tiles: Several square results of side `size` an image: `LlavaNextTiles` or `InternVLTiles`.
        interpolation: "bilinear" or "bicubic", both antialiased.
        fill: RGB around a picture that is smaller than its result.
        scaled_decoding: A JPEG that becomes at most half as large is decoded at 1/2, 1/4 or 1/8,
            never smaller than needed. A large photograph takes a fraction of the time, at 36 to
            49 dB (docs/images.md). False decodes every JPEG at full size: torchvision's pixels.
        max_pixels: Limit on height x width, checked from the header before any pixel is decoded,
            and on the picture that resizing makes of a very long one. Default 128 Mi, 384 MiB as
            RGB.
        max_bytes: Limit on the encoded image. Default 256 MiB.
        device: "cuda": in a pipeline, JPEGs of which nothing is odd stay files until
            `mmstream.to_device` has them decoded by the GPU, at full size; all other pictures, and
            calls by hand, are decoded by the CPU. Not with `tiles`.

    Raises:
        ConfigError: A setting is of the wrong type or range, or does not go with another.
    """

    size: int | Shape | None = None
    resize: Resize | None = None
    crop: Literal["center", "random"] | None = "center"
    crop_rounding: Literal["even", "down"] = "even"
    resize_size: int | None = None
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0
    multiple_of: int = 28
    pixel_budget: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    tiles: LlavaNextTiles | InternVLTiles | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    fill: tuple[int, int, int] = (0, 0, 0)
    scaled_decoding: bool = True
    max_pixels: int = MAX_PIXELS
    max_bytes: int = MAX_BYTES
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def from_processor(cls, processor: Any, **settings: Any) -> ImageDecoder:
        """Take over the settings of a Hugging Face processor; see `decoding.image.processors`.

        Args:
            processor: Of images, or one that holds an ``image_processor``.
            **settings: Of the decoder, instead of the processor's.

        Raises:
            ConfigError: The processor does something that this decoder cannot do; says what.
        """
        from mmstream.decoding.image.processors import settings_of

        return cls(**{**settings_of(processor), **settings})

    @property
    def output_shape(self) -> Shape | None:
        """(height, width) of every result, or None where it differs from image to image."""
        if self.size is None or self.tiles is not None:
            return None
        if self.crop is None and self.resize in ("shortest", None):
            return None
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def is_random(self) -> bool:
        """Whether results depend on a random generator."""
        return self.crop == "random" or self.flip > 0

    def __call__(
        self,
        data: bytes,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
    ) -> NDArray[np.uint8]:
        """Decode one image.

        Args:
            data: The encoded file: JPEG, PNG, WebP, BMP, GIF or AVIF.
            out: uint8 [height, width, 3], C-contiguous, to receive the result; only where
                `output_shape` is fixed. After a DecodeError its content is undefined.
            rng: For random crops and flips, which need it: in a pipeline a sample's own,
                ``mm.sample_rng(sample, "image")``.

        Returns:
            uint8 [H, W, 3], RGB, C-contiguous, writable: ``out`` where it was given. With `tiles`
            [num_tiles, size, size, 3].

        Raises:
            DecodeError: The bytes are not a whole image, or exceed a limit; the reason in one line.
            ConfigError: ``out`` is not an array for this decoder's result, or `rng` is missing.
        """
        return self.decode(data, out, rng).pixels

    def decode(
        self,
        data: bytes,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
        plan: Plan | None = None,
    ) -> Decoded:
        """Decode one image as a call does, or by a plan; return its own (height, width) too."""
        shape = self.output_shape
        if out is not None and not (
            shape and out.shape == (*shape, 3) and out.dtype == np.uint8 and out.flags.c_contiguous
        ):
            raise ConfigError(f"out: {out.dtype} {out.shape} cannot hold a result of {shape}")
        if plan is None:
            self._check_rng(rng)
        if len(data) > self.max_bytes:
            raise DecodeError(f"image of {len(data)} bytes exceeds max_bytes={self.max_bytes}")
        planned = self._planned(data, rng) if plan is None else (plan.picture, [plan.view])
        factor = 1
        if planned is not None and self.scaled_decoding:
            factor = shrink_factor(planned[1], planned[0])
        pixels, factor = decode_bytes(data, self.max_pixels, factor)
        if planned is None:
            picture = (pixels.shape[0], pixels.shape[1])
            planned = picture, self._plan_views(picture, rng)
        picture, views = planned
        if factor > 1:
            views = [shrunk(view, picture, factor) for view in views]
        results = [render(pixels, v, self.interpolation, self.fill, out) for v in views]
        if self.tiles is None:
            return Decoded(results[0], picture)
        stacks = [result if result.ndim == 4 else result[None] for result in results]
        return Decoded(np.concatenate(stacks), picture)

    def plan(self, data: bytes, rng: np.random.Generator | None = None) -> Plan | None:
        """Plan the result of an image that is left to the GPU; None: it is for the CPU.

        Raises:
            DecodeError: It exceeds a limit.
        """
        self._check_rng(rng)
        if self.device == "cpu" or len(data) > self.max_bytes or not data.startswith(JPEG_START):
            return None
        header = plain_jpeg(data)
        if header is None:
            return None
        plan = Plan(*header, whole(header[0], header[0]))
        check_pixels(*plan.picture, self.max_pixels)
        return plan._replace(view=self._plan_views(plan.picture, rng)[0])

    def _check_rng(self, rng: np.random.Generator | None) -> None:
        if self.is_random and rng is None:
            raise ConfigError('rng: a random crop or flip needs mm.sample_rng(sample, "image")')

    def _planned(
        self, data: bytes, rng: np.random.Generator | None
    ) -> tuple[Shape, list[View]] | None:
        """Plan the results of a JPEG that may be decoded smaller; None: after decoding it."""
        if not self.scaled_decoding or self.resize == "native" or not data.startswith(JPEG_START):
            return None
        picture = jpeg_shape(data)
        if picture is None:
            return None
        check_pixels(*picture, self.max_pixels)
        return picture, self._plan_views(picture, rng)

    def prepared_shape(self, data: bytes) -> ImageShape | None:
        """Tell from an image's header alone what decoding it will make of it.

        Returns:
            What the result's shape will be if decoding succeeds, which this does not say. None
            where that takes decoding: an odd header, or one that decoding will refuse.
        """
        try:
            picture = header_shape(data) if len(data) <= self.max_bytes else None
            return None if picture is None else self.shape_of(picture)
        except DecodeError:
            return None

    def shape_of(self, picture: Shape) -> ImageShape:
        """Return what becomes of a picture of this (height, width), upright.

        Raises:
            DecodeError: It exceeds a limit.
        """
        if self.output_shape:
            return ImageShape(*self.output_shape, picture)
        check_pixels(*picture, self.max_pixels)
        return ImageShape.of(picture, self._plan_views(picture, None))

    def _plan_views(self, picture: Shape, rng: np.random.Generator | None) -> list[View]:
        """Plan the results of a picture of this shape, drawing what is random."""
        if self.tiles is not None:
            assert isinstance(self.size, int)  # as check_settings saw to
            views = self.tiles.views(picture, self.size)
        elif self.crop == "random" and rng is not None and self.output_shape:
            size = self.output_shape
            views = [View(random_box(picture, self.scale, self.ratio, rng), size, size, (0, 0))]
        else:
            views = [self._whole(picture)]
        if rng is not None and self.flip > 0 and rng.random() < self.flip:
            views = [view._replace(flip=True) for view in views]
        for view in views:
            check_pixels(*view.resized, self.max_pixels)
        return views

    def _whole(self, picture: Shape) -> View:
        size = self.output_shape
        if self.resize == "max_pixels":
            return whole(picture, budgeted(picture, self.multiple_of, *self.pixel_budget))
        if size is None and isinstance(self.size, int):  # the shorter side, without a crop
            return whole(picture, covering(picture, (self.size, self.size), None))
        if size is None:
            return whole(picture, picture)
        if self.resize == "exact":
            return whole(picture, size)
        if self.resize == "letterbox":
            return whole(picture, fitting(picture, size), size)
        return whole(picture, covering(picture, size, self.resize_size), size, self.crop_rounding)
