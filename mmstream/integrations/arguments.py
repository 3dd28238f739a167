"""The keyword arguments of a Hugging Face model's forward pass, from a batch.

    inputs.model_inputs, check_packing.py -> `model_arguments`

Text is the same for all models: ids, mask and labels. `families`, `videos` and `sound` have what
differs: in which form a model takes pictures, videos and audio. Models that take one picture a row
are in `one_picture`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmstream.batching.valid import valid_labels
from mmstream.errors import ConfigError
from mmstream.integrations.blank import add_blank, add_blank_audio, add_blank_video
from mmstream.integrations.families import VISION_LANGUAGE, Pictures, check_tokens
from mmstream.integrations.model_kinds import (
    TWO_TOWERS,
    is_classifier,
    is_text_model,
    parameters_of,
)
from mmstream.integrations.mrope_positions import (
    check_positions_once,
    mrope_positions,
    needs_mrope,
    rule_of,
)
from mmstream.integrations.omni_positions import has_sound_in_videos, omni_positions
from mmstream.integrations.one_picture import (
    classification_arguments,
    two_tower_arguments,
)
from mmstream.integrations.packed_text import (
    DOCUMENT_ARGUMENTS,
    check_quadratic,
    is_packed,
    packed_arguments,
    packed_text,
)
from mmstream.integrations.pictures import dtype_of, pictures_of, pixel_changer
from mmstream.integrations.resolve import resolve_model
from mmstream.integrations.sound import (
    HEARING,
    Features,
    check_audio_tokens,
    check_mel_bands,
    features_of,
    heard,
    transcribed,
)
from mmstream.integrations.videos import SEEING, Videos, check_video_tokens, videos_of
from mmstream.types import Batch

_SPEECH = "whisper"
_TEXT_FIELDS = ("input_ids", "attention_mask", "labels")


def model_arguments(
    batch: Batch,
    model_or_family: Any,
    *,
    normalize: Any = None,
    blank_image: bool = True,
    label_field: str = "cls",
    image_field: str = "image",
    video_field: str = "video",
    audio_field: str = "audio",
) -> dict[str, Any]:
    """Return what `model_inputs` returns. The model is not run."""
    model, config = resolve_model(model_or_family)
    family = str(config.model_type)
    pictures = pictures_of(batch, image_field, pixel_changer(normalize, model, "image"))
    classifies = is_classifier(model, config)
    tower = family.removesuffix("_vision_model").removesuffix("_text_model")
    packed = is_packed(batch)
    takes_one = classifies or tower in TWO_TOWERS  # picture a row
    if packed and (takes_one or family == _SPEECH):
        raise ConfigError(
            f"model_inputs: {family} takes one sample a row: leave batching= out of the Pipeline"
        )
    if takes_one:
        _refuse_media(
            batch, family, {"videos": f"{video_field}_frames", "audio": f"{audio_field}_row"}
        )
        if classifies:
            return classification_arguments(batch, family, pictures, label_field)
        return two_tower_arguments(batch, tower, is_whole=tower == family, pictures=pictures)
    _check_family(config)
    text = packed_text(batch) if packed else _text_inputs(batch)
    videos = videos_of(batch, video_field, pixel_changer(normalize, model, "video"))
    media = _media(batch, family, pictures, videos, audio_field)
    sees = media.pictures is not None or media.videos is not None
    if blank_image:
        text, media = _with_blanks(text, config, media)
    is_default = isinstance(model_or_family, str)  # a default config has tokens of its own
    if media.features is not None:
        if not is_default:
            check_mel_bands(media.features, config)
        media = media._replace(features=media.features.of_dtype(dtype_of(model)))
    if family == _SPEECH:
        return transcribed(batch, text, media.features, config)
    media_inputs = _media_inputs(text["input_ids"], config, media)
    if not is_default:
        _check_all_tokens(text["input_ids"], config, media)
    if packed:
        check_quadratic(batch, config)
        text = _packed_inputs(text, media_inputs, model, config, sees=sees)
    else:
        text = _with_positions(text, media_inputs, model, config)
    config_type: Any = type(config)
    accepted = parameters_of(config_type)
    return {
        name: value
        for name, value in {**text, **media_inputs}.items()
        if not accepted or name in accepted | DOCUMENT_ARGUMENTS
    }


def _check_family(config: Any) -> None:
    """Refuse a family that is neither known nor a language model that takes text only."""
    families = dict.fromkeys([*VISION_LANGUAGE, *SEEING, *HEARING, _SPEECH])
    if config.model_type not in families and not is_text_model(config):
        known = ", ".join([*families, *TWO_TOWERS])
        raise ConfigError(
            f"model_inputs: {config.model_type!r} is not one of {known}, nor a model of text "
            "ForCausalLM, nor one ForImageClassification; compute its inputs from the batch "
            "yourself"
        )


def _packed_inputs(
    text: dict[str, Any], media_inputs: dict[str, Tensor], model: Any, config: Any, *, sees: bool
) -> dict[str, Any]:
    """Return the text of a flat batch as the model takes it.

    Args:
        text: Of `packed_text`, with blank media.
        media_inputs: As the model takes them.
        model: The model, if it is known.
        config: Its config.
        sees: Whether there are pictures or videos that are not blank.

    Raises:
        ConfigError: The model takes no positions, or has others than the batch.
    """
    config_type: Any = type(config)
    accepted = parameters_of(config_type)
    if accepted and "position_ids" not in accepted:
        raise ConfigError(
            f"model_inputs: {config.model_type} takes no position_ids, by which models tell "
            "documents apart: leave batching= out, so that each row is one document"
        )
    if needs_mrope(config):
        if sees:
            check_positions_once(text, media_inputs, model, config)
        positions = mrope_positions(text, media_inputs, model, config)
        text = {**text, "position_ids": positions}
    elif text["position_ids"].ndim == 3:
        text = {**text, "position_ids": text["position_ids"][0]}
    return packed_arguments(text, config)


def _with_positions(
    text: dict[str, Any], media_inputs: dict[str, Tensor], model: Any, config: Any
) -> dict[str, Any]:
    """Return the text, with its positions where the model itself would count them wrongly."""
    ids = text["input_ids"]
    with_sound = has_sound_in_videos(ids, config)
    if not with_sound.any():
        return text
    mask = text.get("attention_mask", torch.ones_like(ids))
    rule = rule_of(model, config)
    positions = omni_positions(rule, ids, mask, with_sound, media_inputs, config)
    return {**text, "position_ids": positions}


class _Media(NamedTuple):
    """The media of a batch, normalised; None where it has none of a kind."""

    pictures: Pictures | None
    videos: Videos | None
    features: Features | None


def _media(
    batch: Batch,
    family: str,
    pictures: Pictures | None,
    videos: Videos | None,
    audio_field: str,
) -> _Media:
    """Return the media of a batch.

    Raises:
        ConfigError: The batch has media of a kind that the family does not take.
    """
    takes_audio = family in (*HEARING, _SPEECH)
    features = features_of(batch, audio_field, family) if takes_audio else None
    kinds = (
        ("pictures", pictures is not None, family in VISION_LANGUAGE),
        ("videos", videos is not None, family in SEEING),
        ("audio", not takes_audio and _has_audio(batch, audio_field), takes_audio),
    )
    for kind, is_there, is_taken in kinds:
        if is_there and not is_taken:
            raise _not_taken(family, kind)
    if family == "smolvlm" and pictures is not None and videos is not None:
        raise ConfigError(
            "model_inputs: smolvlm takes pictures or videos in a batch, as its processor does: "
            "convert and train them apart"
        )
    return _Media(pictures, videos, features)


def _refuse_media(batch: Batch, family: str, companions: dict[str, str]) -> None:
    """Refuse a batch with media of a kind, by the field that says which row each belongs to."""
    for kind, companion in companions.items():
        if len(batch.get(companion, ())):
            raise _not_taken(family, kind)


def _not_taken(family: str, kind: str) -> ConfigError:
    return ConfigError(
        f"model_inputs: {family} takes no {kind}, and the batch has some: leave their decoder out "
        'of Decode, and give TextDecoder(undecoded_parts="drop") where texts speak of them'
    )


def _with_blanks(text: dict[str, Any], config: Any, media: _Media) -> tuple[dict[str, Any], _Media]:
    """Return the text and media with a blank medium for each tower that has nothing to do."""
    family = config.model_type
    if media.pictures is None and media.videos is None:
        if family == "llava_onevision":  # a video of one frame takes the fewest tokens
            text, videos = add_blank_video(text, config)
            media = media._replace(videos=videos)
        elif family in VISION_LANGUAGE:
            text, pictures = add_blank(text, config)
            media = media._replace(pictures=pictures)
    if media.features is None and family in HEARING:
        text, features = add_blank_audio(text, config)
        media = media._replace(features=features)
    return text, media


def _media_inputs(ids: Tensor, config: Any, media: _Media) -> dict[str, Tensor]:
    """Return the media in the form that the family takes."""
    family = config.model_type
    inputs: dict[str, Tensor] = {}
    if media.pictures is not None:
        inputs |= VISION_LANGUAGE[family](media.pictures, config)
    if media.videos is not None:
        inputs |= SEEING[family](media.videos, config)
    if media.features is not None:
        inputs |= heard(media.features, family)
    if inputs.keys() & {"image_grid_thw", "video_grid_thw"}:
        # Newer models of transformers are told which tokens are media, older ones look.
        kinds = (ids == config.image_token_id).long()
        inputs["mm_token_type_ids"] = kinds + 2 * (ids == config.video_token_id).long()
    return inputs


def _check_all_tokens(ids: Tensor, config: Any, media: _Media) -> None:
    """Check the number of tokens of each kind of media in the text."""
    if media.pictures is not None:
        check_tokens(ids, media.pictures, config)
    if media.videos is not None:
        check_video_tokens(ids, media.videos, config)
    if media.features is not None:
        check_audio_tokens(ids, media.features, config)


def _has_audio(batch: Batch, field: str) -> bool:
    """Tell whether a batch has recordings, or their features."""
    values = [batch.get(name) for name in (field, f"{field}_features")]
    return any(value is not None and len(value) > 0 for value in values)


def _text_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return ids, mask and labels. The labels of invalid rows are -100."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ConfigError("model_inputs: the batch has no input_ids; give Decode a TextDecoder")
    text = {name: batch[name] for name in _TEXT_FIELDS if isinstance(batch.get(name), Tensor)}
    if "labels" in text and "__valid__" in batch:
        text["labels"] = valid_labels(batch)
    return text
