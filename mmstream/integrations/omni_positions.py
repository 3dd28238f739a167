"""Positions of the Qwen omni models where the sound of videos stands between their frames.

    arguments.model_arguments, mrope_positions -> `has_sound_in_videos` -> `omni_positions`

The model's own rule is told once for a whole batch whether videos have their sound between their
frames. A silent video would then get the positions of text, without a word. So the rule is called
for each row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmstream.decoding.text.video_lengths import (
    OMNI_CHUNK_S,
    OMNI_POSITIONS_PER_S,
    QWEN3_OMNI_POSITIONS_PER_S,
)
from mmstream.errors import ConfigError

QWEN3_OMNI = "qwen3_omni_moe_thinker"
OMNI = ("qwen2_5_omni_thinker", QWEN3_OMNI)
"""The families whose videos may have their sound between their frames."""

_WRITTEN = {
    "qwen2_5_omni_thinker": (
        "mm.qwen_omni_video_length()",
        {"position_id_per_seconds": OMNI_POSITIONS_PER_S, "seconds_per_chunk": OMNI_CHUNK_S},
    ),
    QWEN3_OMNI: (
        "mm.qwen3_omni_video_length()",
        {"position_id_per_seconds": QWEN3_OMNI_POSITIONS_PER_S},
    ),
}
"""Who writes the text of such a video, and for which settings of the model."""


def has_sound_in_videos(ids: Tensor, config: Any) -> Tensor:
    """Tell which rows have a video with its sound between its frames.

    Args:
        ids: int64 [B, T].
        config: The model's config.

    Returns:
        bool [B]. False for other families.

    Raises:
        ConfigError: The model wants longer or shorter parts of a video before its sound.
    """
    if config.model_type not in OMNI:
        return torch.zeros(len(ids), dtype=torch.bool)
    is_there = _marked(ids, config, config.audio_start_token_id).any(1).cpu()
    writer, settings = _WRITTEN[config.model_type]
    for name, written in settings.items():
        if is_there.any() and getattr(config, name) != written:
            raise ConfigError(
                f"model_inputs: the config has {name}={getattr(config, name)}, and {writer} writes "
                f"for {written}: give a video_length= of your own, and the positions too"
            )
    return is_there


def omni_positions(
    rule: Any,
    ids: Tensor,
    mask: Tensor,
    with_sound: Tensor,
    media_inputs: Mapping[str, Tensor],
    config: Any,
) -> Tensor:
    """Return the positions of all rows by the model's rule, int64 [3, B, T].

    Args:
        rule: The model's ``get_rope_index``.
        ids: int64 [B, T].
        mask: int64 [B, T], 1 for tokens that are no padding.
        with_sound: bool [B], what `has_sound_in_videos` says of the rows.
        media_inputs: The media as the model takes them, those of the rows one after another.
        config: The model's config.
    """
    starts = {
        "image": _marked(ids, config, config.image_token_id),
        "video": _marked(ids, config, config.video_token_id)
        | _marked(ids, config, config.audio_start_token_id),
        "audio": ids == config.audio_start_token_id,
    }
    none = torch.zeros(0, 3, dtype=torch.int64)
    frames = media_inputs.get("feature_attention_mask")
    media = {
        "image_grid_thw": ("image", media_inputs.get("image_grid_thw", none)),
        "video_grid_thw": ("video", media_inputs.get("video_grid_thw", none)),
        "second_per_grids": ("video", media_inputs.get("video_second_per_grid", none)),
        "audio_seqlens": ("audio", none if frames is None else frames.sum(-1)),
    }
    counts = {kind: start.sum(1).tolist() for kind, start in starts.items()}
    pieces = {name: torch.split(value, counts[kind]) for name, (kind, value) in media.items()}
    rows = [
        rule(
            input_ids=ids[row : row + 1],
            attention_mask=mask[row : row + 1],
            use_audio_in_video=bool(with_sound[row]),
            **{name: values[row] for name, values in pieces.items()},
        )[0]
        for row in range(len(ids))
    ]
    return torch.cat(rows, dim=1)


def _marked(ids: Tensor, config: Any, token_id: int) -> Tensor:
    """Tell where a token stands behind the start of a picture or video, bool [B, T - 1]."""
    marked: Tensor = (ids[:, :-1] == config.vision_start_token_id) & (ids[:, 1:] == token_id)
    return marked
