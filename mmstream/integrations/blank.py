"""The blank medium of a batch that has nothing for a model's tower.

    arguments.model_arguments -> `add_blank`, `add_blank_video`, `add_blank_audio`

The vision tower of a model runs only where there are pictures or videos, the audio tower where
there is audio. Without any, its parameters have no gradient, and a rank that trains with DDP, FSDP
or ZeRO waits for them for ever. So one small picture, video or recording joins the batch. The
models here are causal: what stands behind a text does not change it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.image.tiles import LlavaNextTiles
from mmstream.decoding.text.media_lengths import llava_next_length
from mmstream.integrations.families import Pictures
from mmstream.integrations.mrope_positions import OMNI
from mmstream.integrations.packed_text import is_packed, with_padding_document
from mmstream.integrations.sound import Features, num_tokens_of
from mmstream.integrations.videos import Videos
from mmstream.types import IGNORED_LABEL

BLANK_AUDIO_FRAMES = 8
"""Feature frames that are audio in a blank recording. They take two tokens, or one of Qwen3-Omni.

Qwen2-Audio expands a text by itself, wrongly here, where no two audio tokens are neighbours.
"""


def add_blank(text: dict[str, Any], config: Any) -> tuple[dict[str, Any], Pictures]:
    """Return the text with the tokens of a blank picture at the end of a row, and the picture.

    The tokens stand in the row with most padding at its end, where they fit. Otherwise all rows
    become longer. They have an attention mask of 1 and no labels.

    Args:
        text: ``input_ids`` and, where there are any, ``attention_mask`` and ``labels``, [B, T].
        config: The config of a vision-language model.
    """
    tiles, num_tokens, size = _blank(config)
    tokens = [config.image_token_id] * num_tokens
    if config.model_type in OMNI:  # they look for the mark before a medium
        tokens = [config.vision_start_token_id, *tokens, config.vision_end_token_id]
    changed, row = _with_tokens(text, tokens)
    ids = changed["input_ids"]
    pictures = Pictures(
        tiles.to(ids.device),
        torch.full((len(tiles),), row, device=ids.device),
        len(ids),
        tiles_per_picture=torch.tensor([len(tiles)]),
        sizes=torch.tensor([size], device=ids.device),
    )
    return changed, pictures


def add_blank_video(text: dict[str, Any], config: Any) -> tuple[dict[str, Any], Videos]:
    """Return the text with the tokens of a blank video of one frame, as `add_blank` puts them.

    For LLaVA-OneVision.

    Args:
        text: As in `add_blank`.
        config: The config of a model that takes videos.
    """
    side = _side(config.vision_config.image_size)
    pooled = -(-(side // _side(config.vision_config.patch_size)) // 2)
    changed, _ = _with_tokens(text, [config.video_token_id] * (pooled**2 + 1))
    frames = torch.ones(1, 3, side, side, device=text["input_ids"].device)
    return changed, Videos([frames], torch.ones(1, dtype=torch.float64))


def add_blank_audio(text: dict[str, Any], config: Any) -> tuple[dict[str, Any], Features]:
    """Return the text with the tokens of a blank recording, as `add_blank` puts them.

    Args:
        text: As in `add_blank`.
        config: The config of a model that hears.
    """
    num_tokens = num_tokens_of(torch.tensor([BLANK_AUDIO_FRAMES]), config.model_type)
    tokens = [config.audio_token_id] * int(num_tokens)
    num_frames = 2 * config.audio_config.max_source_positions
    if config.model_type in OMNI:
        tokens = [config.audio_start_token_id, *tokens, config.audio_end_token_id]
        num_frames = BLANK_AUDIO_FRAMES  # their encoders take audio of any length
    changed, row = _with_tokens(text, tokens)
    device = text["input_ids"].device
    features = Features(
        torch.zeros(1, config.audio_config.num_mel_bins, num_frames, device=device),
        torch.tensor([BLANK_AUDIO_FRAMES], device=device),
        torch.tensor([row], device=device),
    )
    return changed, features


def _with_tokens(text: dict[str, Any], tokens: list[int]) -> tuple[dict[str, Any], int]:
    """Return the text with these tokens at the end of a row, and the number of the row.

    In a flat batch they are a document of their own.
    """
    if is_packed(text):
        return with_padding_document(text, tokens)
    num_tokens = len(tokens)
    ids = text["input_ids"]
    mask = text.get("attention_mask", torch.ones_like(ids))
    padding = mask.flip(1).cumsum(1).eq(0).sum(1)  # of each row, at its end
    row = int(padding.argmax())
    if int(padding[row]) < num_tokens:
        mask = _longer(mask, num_tokens, 0)
        ids = _longer(ids, num_tokens, 0)
    changed = {**text, "input_ids": ids.clone(), "attention_mask": mask.clone()}
    changed["input_ids"][row, -num_tokens:] = torch.tensor(tokens, device=ids.device)
    changed["attention_mask"][row, -num_tokens:] = 1
    if "labels" in text and text["labels"].shape != ids.shape:
        changed["labels"] = _longer(text["labels"], num_tokens, IGNORED_LABEL)
    return changed, row


def _longer(rows: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat((rows, rows.new_full((len(rows), count), fill)), dim=1)


def _blank(config: Any) -> tuple[Tensor, int, tuple[int, int]]:
    """Return the tiles of a small picture, [num_tiles, 3, H, W], its tokens, and its own size.

    Its pixels are 1: for Idefics, zeros are no picture.
    """
    family, vision = config.model_type, config.vision_config
    patch = _side(vision.patch_size)
    if hasattr(vision, "spatial_merge_size"):  # Qwen-VL: one token
        side = patch * vision.spatial_merge_size
        return torch.ones(1, 3, side, side), 1, (side, side)
    if family == "idefics2":  # the resampler makes the same number of vectors of any picture
        return torch.ones(1, 3, patch, patch), config.perceiver_config.resampler_n_latents, (1, 1)
    if family in ("idefics3", "smolvlm"):
        side = patch * config.scale_factor
        return torch.ones(1, 3, side, side), 1, (side, side)
    side = _side(vision.image_size)
    num_patches = (side // patch) ** 2
    if family == "internvl":
        num_tokens = int(num_patches * config.downsample_ratio**2)
        return torch.ones(1, 3, side, side), num_tokens, (side, side)
    if family == "llava_next":
        picture = (patch, side)  # a strip: most of its tiles is padding, which takes no tokens
        shapes = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
        shape = ImageShape.from_views(picture, LlavaNextTiles(shapes).views(picture, side))
        return (
            torch.ones(shape.num_tiles, 3, side, side),
            llava_next_length(patch)(shape),
            picture,
        )
    # Llava: CLIP's tower has a class token, which only "full" keeps.
    is_clip = vision.model_type == "clip_vision_model"
    has_class = is_clip and config.vision_feature_select_strategy == "full"
    return torch.ones(1, 3, side, side), num_patches + has_class, (side, side)


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)
