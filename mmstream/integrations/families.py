"""How each family of vision-language models takes pictures.

    arguments.model_arguments -> a function of `VISION_LANGUAGE`

Each function gets the pictures of a batch and the model's config. It returns what the processor of
the family in `transformers` returns for pictures: the same names, shapes and order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.image.tiles import LlavaNextTiles
from mmstream.decoding.text.media_lengths import llava_onevision_length
from mmstream.errors import ConfigError
from mmstream.integrations.counts import check_count
from mmstream.integrations.mrope_positions import QWEN3_OMNI
from mmstream.integrations.videos import patch_lines

_ONE_SIZE = ("clip_vision_model", "siglip_vision_model")
"""Vision towers of Llava that take pictures of one size."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of a batch, normalised. There is at least one."""

    tiles: Tensor | list[Tensor]
    """Floating [num_tiles, 3, H, W], or a list of [3, H, W]. A picture without tiles is one."""
    rows: Tensor
    """int64 [num_tiles], the row of each tile, ascending."""
    num_rows: int
    tiles_per_picture: Tensor | None = None
    """int64 [num_pictures]. None: each picture is one tile."""
    sizes: Tensor | None = None
    """int64 [num_pictures, 2], height and width of the picture in its file."""
    samples: Tensor | None = None
    """int64 [num_tiles], which sample of the batch each tile is of, ascending. None: `rows`."""

    def stacked(self, family: str) -> Tensor:
        """Return the tiles as one tensor, contiguous.

        Raises:
            ConfigError: They differ in size.
        """
        if isinstance(self.tiles, Tensor):
            return self.tiles.contiguous()
        if len({tile.shape for tile in self.tiles}) > 1:
            raise ConfigError(
                f"model_inputs: {family} takes pictures of one size, these differ: "
                "give ImageDecoder a size"
            )
        return torch.stack(self.tiles)


def _plain(pictures: Pictures, config: Any) -> dict[str, Tensor]:
    """Llava and InternVL: [num_tiles, 3, S, S], those of all rows one after another."""
    tiles = pictures.stacked(config.model_type)
    if config.model_type == "llava" and config.vision_config.model_type in _ONE_SIZE:
        side = config.vision_config.image_size
        height, width = tiles.shape[-2:]
        if (height, width) != (side, side):
            raise ConfigError(
                f"model_inputs: llava takes pictures of {side}x{side} here, not {width}x{height}: "
                f"ImageDecoder(size={side})"
            )
    return {"pixel_values": tiles}


def _llava_next(pictures: Pictures, config: Any) -> dict[str, Tensor]:
    """Llava-NeXT: [num_pictures, most tiles, 3, S, S], filled with zeros, and the pictures' sizes.

    For example, pictures of 3 and 5 tiles give [2, 5, 3, S, S], and two tiles of the first are 0.
    """
    tiles = pictures.stacked(config.model_type)
    if pictures.tiles_per_picture is None or pictures.sizes is None:
        raise ConfigError(
            "model_inputs: llava_next takes tiles: "
            "ImageDecoder(size=336, tiles=mm.LlavaNextTiles())"
        )
    tiles_of_pictures = torch.split(tiles, pictures.tiles_per_picture.tolist())
    return {
        "pixel_values": pad_sequence(list(tiles_of_pictures), batch_first=True),
        "image_sizes": pictures.sizes,
    }


def _llava_onevision(pictures: Pictures, config: Any) -> dict[str, Tensor]:
    """LLaVA-OneVision: as Llava-NeXT, and how many pictures each sample has that has any.

    The model takes all tiles of a picture that is alone, and the first one of several.
    """
    if pictures.tiles_per_picture is None:
        raise ConfigError(
            "model_inputs: llava_onevision takes tiles: "
            "ImageDecoder(size=384, tiles=mm.LlavaOnevisionTiles())"
        )
    inputs = _llava_next(pictures, config)
    num_tiles = pictures.tiles_per_picture.cpu()
    owners = pictures.rows if pictures.samples is None else pictures.samples
    counts = torch.bincount(owners.cpu()[num_tiles.cumsum(0) - 1])
    counts = counts[counts > 0]
    if not (num_tiles > 1).equal((counts == 1).repeat_interleave(counts)):
        raise ConfigError(
            "model_inputs: llava_onevision takes several tiles of a picture that is alone in its "
            "row, and one of each of several: ImageDecoder(size=384, "
            "tiles=mm.LlavaOnevisionTiles())"
        )
    return {**inputs, "batch_num_images": counts.to(inputs["image_sizes"].device)}


def _patched(pictures: Pictures, config: Any) -> dict[str, Tensor]:
    """Qwen-VL: one line per patch, [num_patches, channels * frames * P * P], and the grids."""
    frames = [tile[None] for tile in pictures.tiles]
    lines, grids = patch_lines(frames, config, "pictures", "ImageDecoder")
    return {"pixel_values": lines, "image_grid_thw": grids}


def _by_row(pictures: Pictures, config: Any) -> dict[str, Tensor]:
    """Idefics: [B, most pictures of a row, 3, most H, most W], and which pixels are of a picture.

    The models take a picture that is all zeros for padding.
    """
    del config
    tiles = pictures.tiles
    height = max(tile.shape[-2] for tile in tiles)
    width = max(tile.shape[-1] for tile in tiles)
    rows = pictures.rows.tolist()
    most = max(rows.count(row) for row in set(rows))
    first = tiles[0]
    pixels = first.new_zeros(pictures.num_rows, most, first.shape[0], height, width)
    mask = torch.zeros(
        (pictures.num_rows, most, height, width), dtype=torch.int64, device=first.device
    )
    for index, (row, tile) in enumerate(zip(rows, tiles, strict=True)):
        position = index - rows.index(row)
        pixels[row, position, :, : tile.shape[-2], : tile.shape[-1]] = tile
        mask[row, position, : tile.shape[-2], : tile.shape[-1]] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


VISION_LANGUAGE: dict[str, Callable[[Pictures, Any], dict[str, Tensor]]] = {
    "llava": _plain,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _patched,
    "qwen2_5_vl": _patched,
    "qwen3_vl": _patched,
    "qwen2_5_omni_thinker": _patched,
    QWEN3_OMNI: _patched,
    "internvl": _plain,
    "idefics2": _by_row,
    "idefics3": _by_row,
    "smolvlm": _by_row,
}
"""The function that arranges the pictures, by the ``model_type`` of the family."""


def check_tokens(ids: Tensor, pictures: Pictures, config: Any) -> None:
    """Check that a text has as many image tokens as the model makes vectors of its pictures.

    Llava with a tower of one size, LLaVA-OneVision, InternVL and Qwen-VL are checked.

    Args:
        ids: int64 [B, T].
        pictures: Of the batch, with tiles that `VISION_LANGUAGE` has taken.
        config: The model's config.

    Raises:
        ConfigError: Says which ``image_length`` the model needs.
    """
    expected = _num_tokens(pictures, config)
    if expected is not None:
        check_count(ids, config, "image", "pictures", *expected)


def _num_tokens(pictures: Pictures, config: Any) -> tuple[int, str] | None:
    """Return how many tokens the pictures take, and the ``image_length`` that counts them."""
    family, vision = config.model_type, config.vision_config
    if family.startswith("qwen"):
        patch, merge = vision.patch_size, vision.spatial_merge_size
        areas = (tile.shape[-2] * tile.shape[-1] for tile in pictures.tiles)
        number = sum(area // (patch * merge) ** 2 for area in areas)
        return number, f"mm.qwen_vl_length(patch_size={patch}, merge_size={merge})"
    if family == "llava_onevision":
        return _num_onevision_tokens(pictures, config)
    if not (family == "internvl" or (family == "llava" and vision.model_type in _ONE_SIZE)):
        return None
    patches = [vision.patch_size] * 2 if isinstance(vision.patch_size, int) else vision.patch_size
    height, width = pictures.tiles[0].shape[-2:]
    length = (height // patches[0]) * (width // patches[1])
    if family == "internvl":
        length = int(length * config.downsample_ratio**2)
        return len(pictures.tiles) * length, f"mm.internvl_length({length})"
    # CLIP's tower has a class token. "default" takes all vectors but the first one.
    length += vision.model_type == "clip_vision_model"
    length -= config.vision_feature_select_strategy == "default"
    return len(pictures.tiles) * length, str(length)


def _num_onevision_tokens(pictures: Pictures, config: Any) -> tuple[int, str]:
    """Return what `_num_tokens` returns, for LLaVA-OneVision."""
    patch, side = config.vision_config.patch_size, config.vision_config.image_size
    max_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    tiles = LlavaNextTiles(tuple((int(h), int(w)) for h, w in config.image_grid_pinpoints))
    length = llava_onevision_length(patch, max_tiles)
    assert pictures.tiles_per_picture is not None  # `_llava_onevision` has refused everything else
    assert pictures.sizes is not None
    number = 0
    for num_tiles, (height, width) in zip(
        pictures.tiles_per_picture.tolist(), pictures.sizes.tolist(), strict=True
    ):
        picture = (height, width)
        shape = ImageShape(side, side, picture)
        if num_tiles > 1:
            shape = ImageShape.from_views(picture, tiles.views(picture, side))
        number += length(shape)
    return number, f"mm.llava_onevision_length(patch_size={patch}, max_tiles={max_tiles})"
