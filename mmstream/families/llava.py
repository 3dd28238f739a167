"""Llava 1.5, Llava-NeXT and LLaVA-OneVision: squares of one size. The last two cut tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmstream.decoding.image.geometry import (
    ImageShape,
    LlavaNextTiles as LlavaNextTiles,
    LlavaOnevisionTiles as LlavaOnevisionTiles,
)
from mmstream.decoding.media_shapes import VideoShape
from mmstream.decoding.text.placeholders import ImageLength, VideoLength
from mmstream.errors import ConfigError
from mmstream.families.family import (
    Blank,
    Family,
    Inputs,
    Pictures,
    TokenCount,
    Videos,
    require_size,
    side_of,
)
from mmstream.families.mistral3 import Mistral3
from mmstream.settings import PositiveInt, checked

# -- tokens of images and videos -------------------------------------------------------------------


@checked()
def next_image_length(patch_size: PositiveInt = 14) -> ImageLength:
    """Count the tokens of an image for Llava-NeXT.

    An image takes one token per patch of the whole picture as one tile. It takes one more per patch
    of its other tiles that is not padding, and one at the end of each row of these. The rule is
    ``LlavaNextProcessor._get_number_of_features`` of transformers, with the "default" features,
    which have no class token.

    Args:
        patch_size: Side of a patch in pixels.

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=336, tiles=LlavaNextTiles())``.

    Examples:
        >>> length = next_image_length()
        >>> shape = ImageShape(336, 336, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 24 x 24 patches, and 36 rows of 48 patches and a mark
        2340
    """
    return partial(_unpadded_patches, patch_size=patch_size)


@checked()
def onevision_image_length(patch_size: PositiveInt = 14, max_tiles: PositiveInt = 9) -> ImageLength:
    """Count the tokens of an image for LLaVA-OneVision.

    A picture that is alone in its sample takes tokens as for Llava-NeXT, see `next_image_length`.
    Where its tiles have many more patches than `max_tiles` whole ones, the model shrinks them. Each
    of several pictures takes one token per patch of its tile, and one at the end. The rule is that
    of transformers' ``LlavaOnevisionProcessor.replace_image_token``.

    Args:
        patch_size: Side of a patch in pixels.
        max_tiles: The number in the model's ``vision_aspect_ratio``, "anyres_max_9".

    Returns:
        A function for ``TextDecoder(image_length=)``. Use it with
        ``ImageDecoder(size=384, tiles=LlavaOnevisionTiles())``.

    Examples:
        >>> length = onevision_image_length()
        >>> shape = ImageShape(384, 384, picture=(480, 640), num_tiles=5, grid=(2, 2))
        >>> length(shape)  # 27 x 27 patches, and 40 rows of 54 patches and a mark
        2929
        >>> length(ImageShape(384, 384, picture=(480, 640)))  # beside another picture
        730
    """
    return partial(_shrunk_patches, patch_size=patch_size, max_tiles=max_tiles)


def _unpadded_patches(shape: ImageShape, patch_size: int) -> int:
    """Count patches and marks at the ends of rows, without a limit."""
    side = shape.height // patch_size
    rows, columns = _unpadded_grid(shape, side)
    return side * side + rows * (columns + 1)


def _shrunk_patches(shape: ImageShape, patch_size: int, max_tiles: int) -> int:
    """Count patches and marks at the ends of rows, of which the model keeps a limited number."""
    side = shape.height // patch_size
    if shape.num_tiles == 1:
        return side * side + 1
    rows, columns = _unpadded_grid(shape, side)
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return side * side + rows * (columns + 1)


def _unpadded_grid(shape: ImageShape, side: int) -> tuple[int, int]:
    """Return the rows and columns of patches that are not padding, of tiles of `side` patches.

    Example: a picture of 480x640 pixels in a grid of 2x2 tiles of 336 pixels, with patches of 14. A
    tile has 24x24 patches, the grid 48x48. The picture is as wide as the grid, and fills 36 of its
    48 rows: 480 * 48 / 640. So it takes 24 * 24 + 36 * (48 + 1) = 2340 tokens of Llava-NeXT.
    """
    rows, columns = (count * side for count in shape.grid)
    height, width = shape.picture
    # Both sides lose the same number of padding patches, rounded down: hence // 2 * 2. The order of
    # operations and the seven digits are those of the model: they decide where a half is rounded.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


@checked()
def onevision_video_length(patch_size: PositiveInt = 14) -> VideoLength:
    """Count the tokens of a video for LLaVA-OneVision.

    The patches of a frame are pooled two by two, and one token ends the video. The rule is that of
    transformers' ``LlavaOnevisionProcessor.replace_video_token``.

    Args:
        patch_size: Side of a patch of the vision tower in pixels.

    Returns:
        A function for ``TextDecoder(video_length=)``. Use it with
        ``VideoDecoder.from_processor(processor)``. It raises ConfigError for frames that are no
        squares.

    Examples:
        >>> length = onevision_video_length()
        >>> shape = VideoShape(
        ...     num_frames=8, height=384, width=384, picture=(270, 480), times_s=(0.0,) * 8,
        ...     fps=30.0, sampled_fps=2.0,
        ... )
        >>> length(shape)  # 8 frames of 14 x 14, and one
        1569
    """
    return partial(_pooled_patches, patch_size=patch_size)


def _pooled_patches(shape: VideoShape, patch_size: int) -> int:
    if shape.height != shape.width:
        raise ConfigError(
            f"video_length: frames of {shape.width}x{shape.height} are not squares: give "
            "VideoDecoder(size=384, resize=...), or VideoDecoder.from_processor(processor)"
        )
    return shape.num_frames * _pooled(shape.height, patch_size) + 1


# -- the families ----------------------------------------------------------------------------------

_CLIP = "clip_vision_model"


@dataclass(frozen=True)
class Llava(Family):
    """Llava 1.5: [num_pictures, 3, S, S], those of all rows one after another.

    With Pixtral's tower, pictures have sizes of their own, as for Mistral 3.
    """

    takes: tuple[str, ...] = ("image",)

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the pictures as one tensor. CLIP's tower and SigLIP's take one size."""
        if _is_pixtral(config):
            return _PIXTRAL.image_inputs(pictures, config)
        tiles = pictures.stacked(config.model_type)
        if _has_one_size(config):
            side = config.vision_config.image_size
            require_size(config.model_type, "pictures", tiles, side, f"ImageDecoder(size={side})")
        return {"pixel_values": tiles}

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the number of patches, where all pictures have one size."""
        if _is_pixtral(config):
            return _PIXTRAL.num_tokens(kind, medium, config)
        if not _has_one_size(config):
            return None
        length = _tokens_of_picture(config)
        return TokenCount(len(medium.tiles) * length, str(length))

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a picture of the tower's size."""
        if _is_pixtral(config):
            return _PIXTRAL.blank(kind, config)
        side = side_of(config.vision_config.image_size)
        return Blank.picture(config, _tokens_of_picture(config), side, side)


_PIXTRAL = Mistral3()


def _is_pixtral(config: Any) -> bool:
    return bool(config.vision_config.model_type == "pixtral")


def _has_one_size(config: Any) -> bool:
    return config.vision_config.model_type in (_CLIP, "siglip_vision_model")


def _tokens_of_picture(config: Any) -> int:
    """Return the tokens of a picture of the tower's size.

    CLIP's tower has a class token. "default" takes all vectors but the first one.
    """
    vision = config.vision_config
    length = (side_of(vision.image_size) // side_of(vision.patch_size)) ** 2
    length += vision.model_type == _CLIP
    strategy = getattr(config, "vision_feature_select_strategy", "full")  # PaliGemma has none
    return int(length - (strategy == "default"))


@dataclass(frozen=True)
class LlavaNext(Family):
    """Pictures in tiles: [num_pictures, most tiles, 3, S, S], filled with zeros, and their sizes.

    For example, pictures of 3 and 5 tiles give [2, 5, 3, S, S], and two tiles of the first are 0.

    Attributes:
        cure: The setting of an `ImageDecoder` that cuts such tiles, for messages.
    """

    takes: tuple[str, ...] = ("image",)
    cure: str = "ImageDecoder(size=336, tiles=mm.families.llava.LlavaNextTiles())"

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the tiles of each picture, and its height and width."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tiles = pictures.stacked(config.model_type)
        if pictures.tiles_per_picture is None or pictures.sizes is None:
            raise ConfigError(f"model_inputs: {config.model_type} takes tiles: {self.cure}")
        tiles_of_pictures = torch.split(tiles, pictures.tiles_per_picture.tolist())
        return {
            "pixel_values": pad_sequence(list(tiles_of_pictures), batch_first=True),
            "image_sizes": pictures.sizes,
        }

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a strip: most of its tiles is padding, which takes no tokens."""
        patch = side_of(config.vision_config.patch_size)
        side = side_of(config.vision_config.image_size)
        shape = _tiled((patch, side), side, config)
        tokens = [config.image_token_id] * _unpadded_patches(shape, patch)
        tiles = Pictures.blank(shape.num_tiles, 3, side, side, size=(patch, side))
        return Blank(tokens, tiles)


def _tiled(picture: tuple[int, int], side: int, config: Any) -> ImageShape:
    """Return the shape of a picture in the tiles that a model's config allows."""
    shapes = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
    return ImageShape.from_views(picture, LlavaNextTiles(shapes).views(picture, side))


@dataclass(frozen=True)
class LlavaOnevision(LlavaNext):
    """Pictures as of Llava-NeXT, and videos of one number of frames.

    The model takes all tiles of a picture that is alone in its sample, and one of each of several.
    """

    takes: tuple[str, ...] = ("image", "video")
    cure: str = "ImageDecoder(size=384, tiles=mm.families.llava.LlavaOnevisionTiles())"

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return tiles and sizes, and how many pictures each sample has that has any."""
        inputs = super().image_inputs(pictures, config)
        assert pictures.tiles_per_picture is not None  # or it was refused
        num_tiles = pictures.tiles_per_picture.cpu()
        owners = pictures.rows if pictures.samples is None else pictures.samples
        counts = owners.cpu()[num_tiles.cumsum(0) - 1].bincount()
        counts = counts[counts > 0]
        if not (num_tiles > 1).equal((counts == 1).repeat_interleave(counts)):
            raise ConfigError(
                "model_inputs: llava_onevision takes several tiles of a picture that is alone in "
                f"its row, and one of each of several: {self.cure}"
            )
        return {**inputs, "batch_num_images": counts.to(inputs["image_sizes"].device)}

    def video_inputs(self, videos: Videos, config: Any) -> Inputs:
        """Return [num_videos, F, 3, S, S]."""
        import torch

        side = config.vision_config.image_size
        cure = f'VideoDecoder(size=({side}, {side}), resize="exact")'
        require_size(config.model_type, "frames", videos.frames[0], side, cure)
        if len({frames.shape for frames in videos.frames}) > 1:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes videos of one number of frames, these "
                "differ: VideoDecoder(num_frames=8)"
            )
        return {"pixel_values_videos": torch.stack(videos.frames)}

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return the patches of frames, pooled two by two, or those of tiles without padding."""
        patch, side = config.vision_config.patch_size, config.vision_config.image_size
        if kind == "video":
            number = sum(len(frames) * _pooled(side, patch) + 1 for frames in medium.frames)
            setting = f"mm.families.llava.onevision_video_length(patch_size={patch})"
            return TokenCount(number, setting)
        max_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        length = partial(_shrunk_patches, patch_size=patch, max_tiles=max_tiles)
        counts, pictures = medium.tiles_per_picture.tolist(), map(tuple, medium.sizes.tolist())
        number = sum(
            length(_tiled(picture, side, config) if count > 1 else ImageShape(side, side, picture))
            for count, picture in zip(counts, pictures, strict=True)
        )
        name = "mm.families.llava.onevision_image_length"
        return TokenCount(number, f"{name}(patch_size={patch}, max_tiles={max_tiles})")

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a video of one frame, which takes fewer tokens than a picture."""
        import torch

        side = side_of(config.vision_config.image_size)
        num_tokens = _pooled(side, side_of(config.vision_config.patch_size)) + 1
        frames = torch.ones(1, 3, side, side)
        videos = Videos([frames], torch.ones(1, dtype=torch.float64))
        return Blank([config.video_token_id] * num_tokens, videos)


def _pooled(side: int, patch_size: int) -> int:
    """Return the tokens of a frame, whose patches are pooled two by two."""
    return int((-(-(side // patch_size) // 2)) ** 2)


FAMILIES: dict[str, Family] = {
    "llava": Llava(),
    "llava_next": LlavaNext(),
    "llava_onevision": LlavaOnevision(),
}
