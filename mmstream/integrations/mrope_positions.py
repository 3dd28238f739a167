"""Positions of Qwen-VL and its kin for flat batches, by the rule of the model itself.

    arguments.model_arguments -> `needs_mrope` -> `check_positions_once`, `mrope_positions`

These models turn attention by three positions of a token: time, height and width. In a flat batch
they need a fourth row before those, the positions in the text, by which they tell documents apart.
With three rows, documents see each other. With one row, pictures are read as lines of text.

The Qwen omni models have a rule of their own, `omni_positions`, where the sound of videos stands
between their frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from mmstream._torchvision import import_torchvision
from mmstream.decoding.text.media_lengths import (
    OMNI_CHUNK_S,
    OMNI_POSITIONS_PER_S,
    QWEN3_OMNI_POSITIONS_PER_S,
)
from mmstream.errors import ConfigError

QWEN3_OMNI = "qwen3_omni_moe_thinker"
OMNI = ("qwen2_5_omni_thinker", QWEN3_OMNI)
"""The families whose videos may have their sound between their frames."""

_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *OMNI)

_ARGUMENTS = {
    "second_per_grid_ts": "second_per_grid_ts",
    "second_per_grids": "video_second_per_grid",
    "image_grid_thw": "image_grid_thw",
    "video_grid_thw": "video_grid_thw",
}
"""Arguments of the models' rules, and the fields of the inputs that they are."""

_checked: WeakSet[Any] = WeakSet()
"""Models whose positions were compared with their own rule. It holds no model."""


def needs_mrope(config: Any) -> bool:
    """Tell whether a model has positions of several dimensions."""
    if config.model_type in _FAMILIES:  # their default configs do not say so
        return True
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return "mrope_section" in parameters


def mrope_positions(
    text: dict[str, Any], media_inputs: dict[str, Tensor], model: Any, config: Any
) -> Tensor:
    """Return the positions of a flat batch, int64 [4, B, T]: of text, time, height and width.

    Each document is counted from 0, as the model counts one that stands alone. They are float32
    where the rule gives parts of positions.

    Args:
        text: Of `packed_text`.
        media_inputs: The pictures, videos and audio as the model takes them.
        model: The model; None where only its config is known.
        config: The model's config.

    Raises:
        ConfigError: ``position_ids`` have three rows, or the model has no rule.
    """
    positions: Tensor = text["position_ids"]
    if positions.ndim == 3 and len(positions) == 4:
        return positions
    if positions.ndim == 3:
        raise ConfigError(
            f"model_inputs: position_ids have {len(positions)} rows; {config.model_type} tells "
            "documents apart by four: text, time, height and width; or give one, [1, T]"
        )
    if not media_inputs:
        return positions.expand(4, *positions.shape)
    return _by_rule(text, positions, media_inputs, model, config)


def check_positions_once(
    text: dict[str, Any], media_inputs: dict[str, Tensor], model: Any, config: Any
) -> None:
    """Compare the four rows of positions of a flat batch with the model's own rule, once a model.

    A rule that was made from another config of the same family would else give wrong places or
    times in silence.

    Args:
        text: Of `packed_text`.
        media_inputs: The pictures and videos as the model takes them, which are not blank ones.
        model: The model; None where only its config is known: nothing is compared.
        config: The model's config.

    Raises:
        ConfigError: A document with media has other positions.
    """
    positions: Tensor = text["position_ids"]
    if model is None or model in _checked or positions.ndim != 3 or len(positions) != 4:
        return
    expected = _by_rule(text, positions[0], media_inputs, model, config)
    documents = text["document_ids"]
    has_media = torch.isin(documents, documents[media_inputs["mm_token_type_ids"] > 0])
    if not torch.equal(positions[:, has_media], expected[:, has_media]):
        raise ConfigError(
            f"model_inputs: the positions of the batch are not those of this {config.model_type}: "
            "give mm.Flat(positions=mm.QwenVLPositions.from_config(model.config)), or leave "
            "positions= out"
        )
    _checked.add(model)


def _by_rule(
    text: dict[str, Any],
    positions: Tensor,
    media_inputs: dict[str, Tensor],
    model: Any,
    config: Any,
) -> Tensor:
    """Return the positions of a flat batch with media, by the rule of the model."""
    ids, boundaries = text["input_ids"].flatten(), text["cu_seq_lens_q"].long()
    lengths = boundaries.diff()
    counted = torch.arange(int(lengths.max()), device=ids.device)
    mask = counted < lengths[:, None]  # one document a row, padded
    padded_ids = ids.new_zeros(mask.shape)
    padded_ids[mask] = ids
    rule = rule_of(model, config)
    arguments: dict[str, Any] = {"input_ids": padded_ids, "attention_mask": mask.long()}
    parameters = inspect.signature(rule).parameters
    for name, field in _ARGUMENTS.items():
        if name in parameters and field in media_inputs:
            arguments[name] = media_inputs[field]
    if "mm_token_type_ids" in parameters:
        kinds = padded_ids.new_zeros(mask.shape)
        kinds[mask] = media_inputs["mm_token_type_ids"].flatten()
        arguments["mm_token_type_ids"] = kinds
    if "audio_seqlens" in parameters and "feature_attention_mask" in media_inputs:
        arguments["audio_seqlens"] = media_inputs["feature_attention_mask"].sum(-1)
    with_sound = has_sound_in_videos(padded_ids, config)
    if with_sound.any():
        padded = omni_positions(rule, padded_ids, mask.long(), with_sound, media_inputs, config)
    else:
        padded = rule(**arguments)[0]
    rows = padded[:, mask].view(3, *positions.shape)
    if not rows.equal(rows.round()):  # Qwen3-Omni counts parts of positions
        return torch.cat((positions[None].to(rows.dtype), rows))
    return torch.cat((positions[None], rows.to(positions.dtype)))


def rule_of(model: Any, config: Any) -> Any:
    """Return the method with the rule: of the model, or of its class with the config.

    Raises:
        ConfigError: There is none.
    """
    for module in model.modules() if model is not None else ():
        if hasattr(module, "get_rope_index"):
            return module.get_rope_index
    import_torchvision()
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        kind: Any = mapping.get(type(config), None)
        if hasattr(kind, "get_rope_index"):
            shell = kind.__new__(kind)  # without weights: the rule reads the config only
            merge = config.vision_config.spatial_merge_size
            shell.__dict__.update(config=config, spatial_merge_size=merge)
            return shell.get_rope_index
    raise ConfigError(
        f"model_inputs: {config.model_type} has no get_rope_index: give the model itself, or "
        "positions of four rows by mm.Flat(positions=)"
    )


# -- with the sound of videos between their frames ------------------------------------------------
#
# The model's own rule is told once for a whole batch whether videos have their sound between their
# frames. A silent video would then get the positions of text, without a word. So the rule is called
# for each row here.

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
