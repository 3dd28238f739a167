"""`ImageDecoder`: the bytes of an image become uint8 RGB pixels of the shape that a model wants.

Place in the flow: `decoding.field` calls it for every image field of a sample. One image takes
these steps:

    header -> `geometry` plans the result
           -> `media.image` decodes the file, a JPEG no larger than the plan needs
           -> `resize` writes the result, into the row of the batch where there is one

Pixels stay uint8 on the CPU. Normalization belongs to the device.

All formats follow the same rules:

- The EXIF orientation is applied, or XMP's where there is no EXIF.
- Grey is repeated. CMYK and palettes become RGB. Colour profiles are ignored.
- Transparent pictures are laid on white.
- 16-bit channels keep their high byte.
- The first frame of an animation is taken.
- Damaged and truncated pictures are refused. `media.image` lists what that means for JPEG. The
  picture data of a PNG must match its checksums. For other formats, Pillow's libraries decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.geometry import (
    ImageShape,
    InternVLTiles,
    LlavaNextTiles,
    LlavaOnevisionTiles,
    PanAndScanTiles,
    PixtralTile,
    Plan,
    SquareTile,
    TileRule,
    View,
    budgeted_shape,
    covering_shape,
    fitting_shape,
    random_box,
    scaled_view,
    shrink_factor,
    whole_view,
)
from mmstream.decoding.image.resize import has_lanczos, render, render_bytes
from mmstream.errors import ConfigError, DecodeError
from mmstream.media.image import (
    JPEG_START,
    JpegHeader,
    check_jpeg,
    decode_bytes,
    decode_jpeg,
    decode_mask,
    header_shape,
    readable_header,
)
from mmstream.media.limits import (
    MAX_MEMORY,
    MAX_PIXELS,
    TIMEOUT_S,
    Limits,
    out_of_memory_refused,
)
from mmstream.media.types import Shape
from mmstream.settings import (
    Fraction,
    Level,
    PositiveFloat,
    PositiveInt,
    arguments_gone,
    checked,
    refuse_broken,
    refuse_overridden,
    shown,
)

IGNORED_CLASS = 255
"""The class number around a mask that is smaller than its result."""

MAX_BYTES = 256 * 2**20

Resize = Literal["shortest", "exact", "letterbox", "max_pixels", "native"]

SETTINGS_ADVICE = {
    "size": "give a side in pixels, or (height, width)",
    "scale": "give (low, high), above zero and in order",
    "ratio": "give (low, high), above zero and in order",
    "pixel_budget": "give (low, high), above zero and in order",
    "flip": "give a probability, such as flip=0.5",
    "fill": "give (red, green, blue), or one number for a mask, 0 to 255",
    "resize_size": "give pixels, together with size",
}
"""What to write in place of wrong settings that images and videos share."""


class Decoded(NamedTuple):
    """The result of one image, and the size of the picture it was made of."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3], of a mask [H, W], or with tiles [num_tiles, side, side, 3]."""
    picture: Shape
    """(height, width) of the upright picture in its file."""
    view: View
    """How the result is made of the picture; with tiles, the first of them."""


class PicturePlan(NamedTuple):
    """How one file is decoded, worked out from its header before any pixel is decoded."""

    picture: Shape
    """(height, width) of the upright picture."""
    views: list[View]
    """How the results are made of the picture, with crop and flip drawn."""
    factor: int
    """How many times smaller the file is decoded."""
    jpeg: JpegHeader | None
    """What was read and checked of a JPEG. None: limits are checked later."""
    scaled: list[View]
    """`views` of the smaller picture."""


@checked(
    {
        **SETTINGS_ADVICE,
        **arguments_gone("ImageDecoder"),
        "size": 'give a side in pixels, (height, width) or "bucket"',
        "tiles": "give a rule, such as mm.families.llava.LlavaNextTiles()",
    }
)
@dataclass(frozen=True, kw_only=True)
class ImageDecoder:
    """Decode one image: a callable from bytes to a uint8 array.

    It holds settings and no state: it can be pickled, and called from many threads at once. JPEG,
    the common case, is decoded and resized without the GIL.

    Attributes:
        size: Side of the square result in pixels, or its (height, width). "bucket": that of the
            step's bucket, with ``Pipeline(batching=mm.Buckets("aspect", edges=...))``; the batch
            then also has ``image_size`` and ``image_crop`` (docs: buckets). None: the size is the
            picture's own, or "max_pixels" decides.
        resize: How the picture is brought to `size`.
            "shortest": it is scaled, up or down, until it just covers `size`, and is then cropped.
            "exact": it is stretched to `size`.
            "letterbox": it is scaled to fit into `size`, and the rest is filled.
            "max_pixels": it keeps its size as nearly as `multiple_of` and `pixel_budget` allow;
            goes without `size`.
            "native": it keeps its size; goes without `size`.
            None: "shortest" with a size, else "native".
        crop: How "shortest" crops. "center": the centre. "random": a random part of the picture is
            scaled to `size`, by the rule of torchvision's ``RandomResizedCrop``. None: no crop, so
            `size` is the length of the shorter side.
        crop_rounding: Which pixel is the centre where the margin is odd: "even" as torchvision,
            "down" as transformers. The two are one pixel apart.
        resize_size: Length in pixels that the shorter side is scaled to before the centre crop. It
            is at least the larger side of `size`. ``size=224, resize_size=256`` is torchvision's
            usual pair. None: the picture just covers `size`.
        scale: Range of a random crop's share of the picture's area, above 0 and up to 1.
        ratio: Range of a random crop's width / height.
        flip: Probability, 0 to 1, that a result is mirrored left to right.
        multiple_of: Both sides of a "max_pixels" result are multiples of it, in pixels: the model's
            patch size x merge size.
        pixel_budget: (fewest, most) pixels of a "max_pixels" result.
        tiles: Cut each picture into several squares of side `size`:
            ``mm.families.llava.LlavaNextTiles()``, ``mm.families.llava.LlavaOnevisionTiles()``,
            ``mm.families.internvl.InternVLTiles()`` or another ``mm.families.TileRule``. None: one
            result per picture.
        interpolation: "bilinear", "bicubic" or "lanczos", all antialiased. "lanczos" needs torch
            2.12. Or "nearest", which mixes no pixels: torchvision's rule for masks.
        mask: Whether the picture holds class numbers, not colours: the grey level, or the number of
            the palette entry, of each pixel as it is stored. The result is uint8 [H, W]. It is
            always resized by "nearest". A picture with colours, a JPEG, or one with more than 8
            bits is refused.
        fill: RGB, each 0 to 255, around a picture that is smaller than its result. Around a mask:
            one number; the default is then 255, which many losses ignore.
        scaled_decoding: Whether a JPEG that becomes at most half as large is decoded at 1/2, 1/4 or
            1/8 of its size, never smaller than needed. A large photograph takes a fraction of the
            time. Its pixels differ by 36 to 49 dB PSNR (docs/images.md). False: every JPEG is
            decoded at full size, which gives torchvision's pixels.
        max_pixels: Limit on height x width. It is checked from the header, before any pixel is
            decoded. It also limits what resizing makes of a very long picture. The default is
            128 Mi pixels, 384 MiB as RGB. No side may exceed 65,535 pixels.
        max_bytes: Limit on the size of the encoded image. The default is 256 MiB.
        max_memory: Limit on the bytes that decoding needs at its peak, besides the file. It is
            worked out from the header, before any pixel is decoded. It holds for a sample: the
            results of its earlier images count. The default is 640 MiB: enough for a baseline JPEG
            of `max_pixels`, or a PNG of 96 megapixels (docs/decoder-safety.md).
        timeout_s: Seconds of processor time that decoding the images of one sample may take, all
            together. A sample that takes longer is bad, and has an `mmstream.errors.TimeoutError`.
            One call of a C library cannot be interrupted, so the limits above keep such calls
            short. None: no limit.

    Raises:
        ConfigError: A setting has the wrong type or range, or does not go with another. The message
            names the setting and says what to give.

    Examples:
        >>> evaluation = ImageDecoder(size=224, resize_size=256)
        >>> evaluation.output_shape
        (224, 224)
        >>> training = ImageDecoder(size=224, crop="random", flip=0.5)
        >>> qwen2_vl = ImageDecoder(resize="max_pixels", multiple_of=28)
        >>> qwen2_vl.shape_of((480, 640))[:2]
        (476, 644)
        >>> llava_next = ImageDecoder(size=336, tiles=LlavaNextTiles())
        >>> llava_next.shape_of((480, 640)).num_tiles
        5
    """

    size: PositiveInt | tuple[PositiveInt, PositiveInt] | Literal["bucket"] | None = None
    resize: Resize | None = None
    crop: Literal["center", "random"] | None = "center"
    crop_rounding: Literal["even", "down"] = "even"
    resize_size: PositiveInt | None = None
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    flip: Fraction = 0.0
    multiple_of: PositiveInt = 28
    pixel_budget: tuple[PositiveInt, PositiveInt] = (56 * 56, 28 * 28 * 1280)
    tiles: TileRule | None = None
    interpolation: Literal["bilinear", "bicubic", "lanczos", "nearest"] = "bilinear"
    mask: bool = False
    fill: tuple[Level, Level, Level] | Level = (0, 0, 0)
    scaled_decoding: bool = True
    max_pixels: PositiveInt = MAX_PIXELS
    max_bytes: PositiveInt = MAX_BYTES
    max_memory: PositiveInt = MAX_MEMORY
    timeout_s: PositiveFloat | None = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.mask and self.fill == (0, 0, 0):
            object.__setattr__(self, "fill", IGNORED_CLASS)
        refuse_overridden(self, ImageDecoder, "pixels")
        _check_settings(self)

    @classmethod
    def from_processor(cls, processor: Any, **settings: Any) -> ImageDecoder:
        """Take over the settings of a Hugging Face processor.

        Args:
            processor: An image processor, or a processor that holds an ``image_processor``. Known
                are those of CLIP, DINOv2 (``BitImageProcessor``), SigLIP, ViT, Llava, Llava-NeXT,
                LLaVA-OneVision, Qwen2-VL and its successors, InternVL (``GotOcr2ImageProcessor``),
                GLM-4V, Gemma 3 and Pixtral. Give the whole processor of Mistral 3, as its patches
                are larger than those of its image processor.
            **settings: Settings of the decoder that replace the processor's.

        Returns:
            A decoder that makes the same pixels, except for `scaled_decoding`. It does not
            normalize: give ``processor.image_mean`` and ``processor.image_std`` to `Normalize`.

        Raises:
            ConfigError: The processor is not known, or does something that this decoder cannot do;
                the message says what.
        """
        own = settings_of(processor)
        try:
            return cls(**{**own, **settings})
        except ConfigError as error:
            kept = [f"{name}={value!r}" for name, value in own.items() if name not in settings]
            raise ConfigError(f"{error}; from the processor: {', '.join(kept)}") from None

    @property
    def output_shape(self) -> Shape | None:
        """(height, width) of every result, or None where it differs from image to image."""
        if self.size is None or self.size == "bucket" or self.tiles is not None:
            return None
        if self.crop is None and self.resize in ("shortest", None):
            return None
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def of_sample(self, num_pictures: int) -> ImageDecoder:
        """Return the decoder of the pictures of a sample that has so many.

        It is this one, except for several pictures where their tiles have another rule.
        """
        several = self.tiles.of_several() if self.tiles and num_pictures > 1 else None
        return self if several is None else replace(self, tiles=several[0], fill=several[1])

    @property
    def is_random(self) -> bool:
        """Whether results depend on a random generator."""
        return self.crop == "random" or self.flip > 0

    def __call__(
        self,
        data: bytes | memoryview,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
    ) -> NDArray[np.uint8]:
        """Decode one image.

        Args:
            data: The encoded file: JPEG, PNG, WebP, BMP, GIF or AVIF.
            out: Where to write the result: uint8 [height, width, 3], of a mask [height, width],
                C-contiguous. Only where `output_shape` is fixed. After a DecodeError its content is
                undefined.
            rng: The generator for random crops and flips, which need one. In a pipeline it is the
                sample's own, ``mm.sample_rng(sample, "image")``.

        Returns:
            uint8 [H, W, 3], RGB, C-contiguous, writable. It is ``out`` where that was given. A mask
            is uint8 [H, W]. With `tiles`: uint8 [num_tiles, size, size, 3].

        Raises:
            DecodeError: The bytes are not a whole image, or exceed a limit. The reason is one line.
            TimeoutError: Decoding takes longer than `timeout_s`.
            ConfigError: ``out`` cannot hold the result, or ``rng`` is missing.
        """
        return self.decode(data, out, rng).pixels

    def decode(
        self,
        data: bytes | memoryview,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
        plan: Plan | None = None,
        limits: Limits | None = None,
    ) -> Decoded:
        """Decode one image as a call does. The outcome also says how large the picture was.

        Args:
            data: The encoded file.
            out: As in a call.
            rng: As in a call. Not used with a plan.
            plan: The plan of another picture of the same size. None: the result is planned now.
            limits: What `start_limits` returned for this sample. None: they start now.

        Raises:
            DecodeError: As in a call. Or the machine has not enough memory for this image. Or the
                picture has another size than that of `plan`.
            ConfigError: As in a call.
        """
        if out is not None:
            self._check_out(out, plan)
        limits = limits or self.start_limits()
        picture = self.plan_picture(data, rng, limits, plan)
        return self.decode_planned(data, picture, out, rng, limits)

    @out_of_memory_refused("image")
    def plan_picture(
        self,
        data: bytes | memoryview,
        rng: np.random.Generator | None = None,
        limits: Limits | None = None,
        geometry: Plan | None = None,
    ) -> PicturePlan | None:
        """Work out from the header of an image how it is decoded. `decode_planned` does it then.

        Args:
            data: The encoded file.
            rng: As in a call. Not used with a geometry.
            limits: As in `decode`.
            geometry: The plan of another picture of the same size. Then only the file's own size
                may be left to decoding.

        Returns:
            The plan of a JPEG, with crop and flip drawn. None: the picture is planned after it is
            decoded, as that of other formats.

        Raises:
            DecodeError: The image exceeds a limit.
            ConfigError: ``rng`` is missing.
        """
        limits = limits or self.start_limits()
        if len(data) > self.max_bytes:
            raise DecodeError(f"image of {len(data)} bytes exceeds max_bytes={self.max_bytes}")
        if geometry is None and self.is_random and rng is None:
            raise ConfigError('rng: a random crop or flip needs mm.sample_rng(sample, "image")')
        header = readable_header(data) if data[:2] == JPEG_START else None
        if geometry is not None:
            if header is not None:
                _check_same_size(header.picture, geometry.picture)
            picture, views = geometry.picture, [geometry.view]
        elif header is not None:
            picture = header.picture
            limits.check_picture(*picture)
            views = self.views(picture, rng, limits)
        else:
            return None
        is_cmyk = header is not None and header.is_cmyk
        factor = 1
        if self.scaled_decoding and self._filter != "nearest" and not is_cmyk:
            factor = shrink_factor(views, picture)
        if header is None or self.mask:
            return PicturePlan(picture, views, factor, None, views)
        check_jpeg(data, header, factor, limits)
        scaled = self._scaled(views, picture, factor, limits)
        return PicturePlan(picture, views, factor, header, scaled)

    @out_of_memory_refused("image")
    def decode_planned(
        self,
        data: bytes | memoryview,
        plan: PicturePlan | None,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
        limits: Limits | None = None,
    ) -> Decoded:
        """Decode one image as `decode` does, after `plan_picture`.

        Args:
            data: The encoded file.
            plan: What `plan_picture` returned for this file.
            out: As in a call. It fits the result.
            rng: What `plan_picture` was given.
            limits: As in `decode`.

        Raises:
            DecodeError: As in `decode`.
        """
        limits = limits or self.start_limits()
        check_shape = partial(self._check_result, limits) if plan is None else None
        if self.mask:
            pixels, factor = decode_mask(data, limits, check_shape), 1
        elif plan is None:
            pixels, factor = decode_bytes(data, limits, 1, check_shape)
        elif plan.jpeg is not None:
            pixels, factor = decode_jpeg(data, limits, plan.factor, plan.jpeg)
        else:
            pixels, factor = decode_bytes(data, limits, plan.factor)
        limits.deadline.check()
        if plan is None:
            picture = (pixels.shape[0], pixels.shape[1])
            views = self.views(picture, rng, limits)
            plan = PicturePlan(picture, views, factor, None, views)
        elif plan.jpeg is None and factor == 1:
            _check_same_size((pixels.shape[0], pixels.shape[1]), plan.picture)
        scaled = plan.scaled
        if plan.jpeg is None or factor != plan.factor:
            scaled = self._scaled(plan.views, plan.picture, factor, limits)
        out = out[:, :, None] if self.mask and out is not None else out
        results = [render(pixels, view, self._filter, self.fill, out) for view in scaled]
        if self.tiles is None:
            pixels = results[0][:, :, 0] if self.mask else results[0]
            return Decoded(pixels, plan.picture, plan.views[0])
        tiles = [result if result.ndim == 4 else result[None] for result in results]
        return Decoded(np.concatenate(tiles), plan.picture, plan.views[0])

    def _scaled(self, views: list[View], picture: Shape, factor: int, limits: Limits) -> list[View]:
        """Return the views of a picture that is decoded smaller, and check what they need."""
        small = picture
        if factor > 1:
            small = (-(-picture[0] // factor), -(-picture[1] // factor))
            views = [scaled_view(view, picture, factor) for view in views]
        for view in views:
            limits.check_memory(render_bytes(view, small), *picture)
        return views

    def prepared_shape(self, data: bytes | memoryview) -> ImageShape | None:
        """Tell from an image's header alone which shape its result will have.

        Returns:
            The shape of the result, if decoding succeeds. This method does not judge the file. None
            where only decoding can tell: the header is odd, or decoding will refuse it.
        """
        if len(data) > self.max_bytes:
            return None
        try:
            picture = header_shape(data, self.start_limits())
            return None if picture is None else self.shape_of(picture)
        except DecodeError:
            return None

    def shape_of(self, picture: Shape) -> ImageShape:
        """Return the shape of the result of an upright picture of this (height, width).

        Raises:
            DecodeError: The picture exceeds a limit.
        """
        if self.output_shape:
            return ImageShape(*self.output_shape, picture)
        limits = self.start_limits()
        limits.check_picture(*picture)
        return ImageShape.from_views(picture, self.views(picture, None, limits))

    def start_limits(self) -> Limits:
        """Return the limits of decoding the images of one sample. Their time starts now."""
        return Limits.start(self.max_pixels, self.max_memory, self.timeout_s)

    @property
    def _filter(self) -> str:
        """The interpolation: class numbers are never mixed."""
        return "nearest" if self.mask else self.interpolation

    def _check_out(self, out: NDArray[np.uint8], plan: Plan | None) -> None:
        """Refuse memory that cannot hold the result."""
        shape = self.output_shape if plan is None else plan.view.shape
        wanted = None if shape is None else shape if self.mask else (*shape, 3)
        if out.shape != wanted or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ConfigError(f"out: {out.dtype} {out.shape} cannot hold a result of {shape}")

    def _check_result(self, limits: Limits, height: int, width: int) -> None:
        """Refuse a picture whose result exceeds a limit, whichever way it is turned upright.

        The orientation may stand after the pixels of a PNG, so the final plan is made after them.
        """
        if self.crop == "random":
            return  # a box of the picture is resized to `size`, so no result is larger
        try:
            self.views((height, width), None, limits)
        except DecodeError as error:
            try:
                self.views((width, height), None, limits)
            except DecodeError:
                raise error from None

    def views(self, picture: Shape, rng: np.random.Generator | None, limits: Limits) -> list[View]:
        """Plan the results of a picture of this shape. Random crops and flips are drawn here."""
        if self.size == "bucket":
            raise ConfigError(
                'ImageDecoder(size="bucket"): the size is that of a step; it is for '
                'Pipeline(batching=mm.Buckets("aspect", edges=...)), so give a size here'
            )
        if self.tiles is not None:
            assert isinstance(self.size, int)  # _check_settings has refused everything else
            views = self.tiles.views(picture, self.size)
        elif self.crop == "random" and rng is not None and self.output_shape:
            size = self.output_shape
            views = [View(random_box(picture, self.scale, self.ratio, rng), size, size, (0, 0))]
        else:
            views = [self._whole_view(picture)]
        if rng is not None and self.flip > 0 and rng.random() < self.flip:
            views = [view._replace(flip=True) for view in views]
        for view in views:
            limits.check_pixels(*view.resized)
        return views

    def _whole_view(self, picture: Shape) -> View:
        """Plan the result of a picture without tiles and without a random crop."""
        size = self.output_shape
        if self.resize == "max_pixels":
            resized = budgeted_shape(picture, self.multiple_of, *self.pixel_budget)
            return whole_view(picture, resized)
        if size is None and isinstance(self.size, int):  # the shorter side, without a crop
            return whole_view(picture, covering_shape(picture, (self.size, self.size), None))
        if size is None:
            return whole_view(picture, picture)
        if self.resize == "exact":
            return whole_view(picture, size)
        if self.resize == "letterbox":
            return whole_view(picture, fitting_shape(picture, size), size)
        resized = covering_shape(picture, size, self.resize_size)
        return whole_view(picture, resized, size, self.crop_rounding)


def _check_same_size(picture: Shape, planned: Shape) -> None:
    """Refuse a picture of another size than that whose geometry it shares."""
    if picture != planned:
        (height, width), (planned_height, planned_width) = picture, planned
        raise DecodeError(
            f"it has {width}x{height} pixels, and the picture whose geometry it shares has "
            f"{planned_width}x{planned_height}"
        )


def _check_settings(decoder: ImageDecoder) -> None:
    """Refuse settings out of range, and those that do not go with each other."""
    size, resize, crop, mask = decoder.size, decoder.resize, decoder.crop, decoder.mask
    interpolation, resize_size = decoder.interpolation, decoder.resize_size
    is_shortest, largest = resize in ("shortest", None), max(decoder.output_shape or (0,))
    levels = "one number" if mask else "(red, green, blue)"
    for name, most in (("scale", 1.0), ("ratio", math.inf), ("pixel_budget", math.inf)):
        low, high = getattr(decoder, name)
        is_default = (low, high) == getattr(ImageDecoder, name)
        refuse_broken(
            (not low <= high <= most, f"{name}={(low, high)}: {SETTINGS_ADVICE[name]}"),
            (
                name != "pixel_budget" and crop != "random" and not is_default,
                f'{name}={(low, high)}: goes with crop="random" only',
            ),
        )
    refuse_broken(
        (isinstance(decoder.fill, int) != mask, f"fill={decoder.fill!r}: give {levels}, 0 to 255"),
        (
            size is None and (resize in ("shortest", "exact", "letterbox") or crop == "random"),
            f"resize={resize!r}, crop={crop!r}: give a size too",
        ),
        (
            size is not None and resize in ("max_pixels", "native"),
            f'resize={resize!r} goes without size; or give resize="shortest"',
        ),
        (
            crop == "random" and not is_shortest,
            f'crop="random" does not go with resize={resize!r}',
        ),
        (
            crop is None and isinstance(size, tuple | str) and is_shortest,
            f"size={size!r}: without a crop give one number, the shorter side",
        ),
        (
            interpolation == "lanczos" and not has_lanczos(),
            'interpolation="lanczos" needs torch 2.12: take "bicubic"',
        ),
        (
            mask and interpolation in ("bicubic", "lanczos"),
            f'mask=True: class numbers are not mixed; leave out interpolation="{interpolation}"',
        ),
        (mask and decoder.tiles, "mask=True does not go with tiles"),
        (
            decoder.tiles
            and (not isinstance(size, int) or resize or crop == "random" or decoder.flip),
            f"size={size!r}, resize={resize!r}, crop={crop!r}, flip={decoder.flip!r}: tiles need "
            "one number as size, and go without resize, random crop and flip",
        ),
        (
            resize_size and not largest,
            f"resize_size={resize_size}: {SETTINGS_ADVICE['resize_size']}; not with tiles",
        ),
        (
            resize_size and (crop != "center" or not is_shortest),
            f"resize_size={resize_size} goes with a centre crop only",
        ),
        (
            resize_size and resize_size < largest,
            f"resize_size={resize_size} is below size={size}",
        ),
    )
    if decoder.tiles is not None and isinstance(size, int):
        decoder.tiles.check(size)


# -- settings of Hugging Face image processors -----------------------------------------------------
#
# Normalization is left out: it belongs to the device (`mm.Normalize`). A processor that does
# something else than the decoder can run as a transform instead; ``docs/images.md`` shows how.

_KNOWN = (
    *("Bit", "CLIP", "Gemma3", "Glm46V", "Glm4v", "GotOcr2", "Llava", "LlavaNext"),
    *("LlavaOnevision", "Pixtral", "Qwen2VL", "Siglip", "ViT"),
)
"""Names of classes up to ``ImageProcessor``. The tests compare each with the decoder."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an `ImageDecoder` that makes the same pixels.

    Four kinds of processors are known:

    - SigLIP, ViT and Gemma 3 stretch a picture to a size.
    - CLIP, DINOv2 (``Bit``) and Llava scale the shorter side; some then crop. With ``do_pad``,
      Llava first pads a picture to a square.
    - Qwen2-VL, its successors and GLM-4V keep the size within a pixel budget.
    - Llava-NeXT, LLaVA-OneVision, InternVL (``GotOcr2``), Gemma 3 with pan and scan, and Pixtral
      have rules of tiles.

    Other classes are refused, because settings of the same names may mean something else there.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    whole = processor
    processor = getattr(processor, "image_processor", processor)
    name = type(processor).__name__
    if name.partition("ImageProcessor")[0] not in _KNOWN:
        raise ConfigError(f"{name}: not one of {', '.join(_KNOWN)}; run it as a transform")
    interpolation = interpolation_of(processor, {2: "bilinear", 3: "bicubic"})
    return {"interpolation": interpolation, **_geometry(processor, name, whole)}


def interpolation_of(processor: Any, interpolations: Mapping[int, str]) -> str:
    """Return the interpolation of a processor that resizes.

    Args:
        processor: Of images or videos.
        interpolations: Their names by Pillow's numbers.

    Raises:
        ConfigError: It does not resize, or by another one.
    """
    name = type(processor).__name__
    if getattr(processor, "do_resize", None) is not True:
        raise ConfigError(f"{name}.do_resize={shown(processor.do_resize)}: not resized")
    resample: Any = getattr(processor, "resample", None)
    resample = getattr(resample, "value", resample)
    if resample not in interpolations:
        *others, last = (
            f"{number} ({filter_name})" for number, filter_name in interpolations.items()
        )
        raise ConfigError(f"{name}.resample={shown(resample)}: only {', '.join(others)} and {last}")
    return interpolations[resample]


def _geometry(processor: Any, name: str, whole: Any) -> dict[str, Any]:
    """Return the settings that say how large results are and what is cut."""
    size = _plain_size(processor, "size")
    crop = _plain_size(processor, "crop_size")
    unknown = ConfigError(f"{name}.size={size}, crop_size={crop}: no rule of the image decoder")
    if hasattr(processor, "merge_size"):
        if size.keys() != {"shortest_edge", "longest_edge"}:
            raise unknown
        # For these processors, the two "edges" are numbers of pixels. GLM's count a picture twice.
        count = processor.temporal_patch_size if name.startswith("Glm4") else 1
        return {
            "resize": "max_pixels",
            "multiple_of": processor.patch_size * processor.merge_size,
            "pixel_budget": (size["shortest_edge"] // count, size["longest_edge"] // count),
        }
    tiles = _tiles(processor, name, whole)
    if tiles is not None:
        sides = {*size.values(), *crop.values()}
        if len(sides) != 1:
            raise unknown
        return {"size": sides.pop(), "tiles": tiles}
    is_cropped = getattr(processor, "do_center_crop", None)
    if getattr(processor, "do_pad", None):
        side = size.get("shortest_edge")
        if not name.startswith("LlavaImage") or side is None:
            raise ConfigError(f'{name}.do_pad: pads before it resizes; resize="letterbox" is near')
        if is_cropped and crop != {"height": side, "width": side}:
            raise unknown
        return {"size": side, "tiles": SquareTile(), "fill": _background(processor)}
    if size.keys() == {"shortest_edge"}:
        return _shortest(size["shortest_edge"], crop if is_cropped else None, unknown)
    if size.keys() != {"height", "width"} or (is_cropped and crop != size):
        raise unknown
    return {"size": (size["height"], size["width"]), "resize": "exact"}


def _tiles(processor: Any, name: str, whole: Any) -> TileRule | None:
    pinpoints = getattr(processor, "image_grid_pinpoints", None)
    if pinpoints:
        shapes = tuple((int(height), int(width)) for height, width in pinpoints)
        if not name.startswith("LlavaOnevision"):
            return LlavaNextTiles(shapes)
        return LlavaOnevisionTiles(shapes, background=_background(processor))
    if getattr(processor, "crop_to_patches", False):
        return InternVLTiles(processor.min_patches, processor.max_patches)
    # A processor of Gemma 3 has settings that replace those of its image processor.
    settings = {**vars(processor), **getattr(whole, "images_kwargs", {})}
    if settings.get("do_pan_and_scan"):
        names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        return PanAndScanTiles(*(settings[f"pan_and_scan_{name}"] for name in names))
    if name.startswith("Pixtral"):
        # Mistral 3's image processor does not know how many patches its model merges.
        side = whole.patch_size
        side = side if isinstance(side, int) else side["height"]
        return PixtralTile(side * getattr(whole, "spatial_merge_size", 1))
    return None


def _background(processor: Any) -> tuple[int, int, int]:
    """Return the colour of what is padded: the mean of the processor's normalization."""
    red, green, blue = (int(255 * mean) for mean in processor.image_mean)
    return red, green, blue


def _shortest(side: int, crop: dict[str, int] | None, unknown: ConfigError) -> dict[str, Any]:
    """Return the settings for a shorter side of this length, with or without a centre crop."""
    if crop is None:
        return {"size": side, "crop": None}
    if crop.keys() != {"height", "width"} or side < max(crop.values()):
        raise unknown
    shape = (crop["height"], crop["width"])
    return {"size": shape, "resize_size": side, "crop_rounding": "down"}


def _plain_size(processor: Any, name: str) -> dict[str, int]:
    """Return a size setting as a dict, without the sides that are None."""
    value = getattr(processor, name, None) or {}
    return {key: side for key, side in dict(value).items() if side is not None}
