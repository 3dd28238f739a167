"""The keyword arguments of a Hugging Face model's forward pass, from a batch.

    inputs.model_inputs, check_packing.py -> `model_arguments`

Text is the same for all models: ids, mask and labels. `families`, `videos` and `sound` have what
differs: in which form a model takes pictures, videos and audio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmstream.batching.valid import valid_labels
from mmstream.device.normalize import Normalize, Normalizer
from mmstream.errors import ConfigError
from mmstream.integrations.blank import add_blank, add_blank_audio, add_blank_video
from mmstream.integrations.counts import require_one_each
from mmstream.integrations.families import VISION_LANGUAGE, Pictures, check_tokens
from mmstream.integrations.model_kinds import (
    TWO_TOWERS,
    is_classifier,
    is_text_model,
    parameters_of,
    resolve_model,
)
from mmstream.integrations.mrope_positions import (
    check_positions_once,
    has_sound_in_videos,
    mrope_positions,
    needs_mrope,
    omni_positions,
    rule_of,
)
from mmstream.integrations.packed_text import (
    DOCUMENT_ARGUMENTS,
    check_quadratic,
    is_packed,
    packed_arguments,
    packed_text,
)
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
from mmstream.types import IGNORED_LABEL, Batch
from mmstream.wrong_arguments import shown

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


# -- one picture a row: classifiers, and CLIP and SigLIP ------------------------------------------


def classification_arguments(
    batch: Batch, family: str, pictures: Pictures | None, label_field: str
) -> dict[str, Any]:
    """Return the pictures of rows, and their class numbers where the batch has some.

    Args:
        batch: The batch.
        family: The ``model_type``, for messages.
        pictures: The batch's pictures.
        label_field: The field of class numbers where ``labels`` holds something else.
    """
    if pictures is None:
        raise ConfigError(f"model_inputs: {family} takes one picture a row, this batch has none")
    inputs: dict[str, Any] = {"pixel_values": _one_a_row(batch, family, pictures)}
    numbers = batch.get("labels")
    if not (isinstance(numbers, Tensor) and numbers.ndim == 1) and not _are_numbers(numbers):
        numbers = batch.get(label_field)
    if numbers is None:
        return inputs  # for inference
    valid = batch.get("__valid__")
    is_valid = [True] * len(numbers) if valid is None else valid.tolist()
    labels = [
        _class_number(batch, row, number, label_field) if is_valid[row] else IGNORED_LABEL
        for row, number in enumerate(numbers.tolist() if isinstance(numbers, Tensor) else numbers)
    ]
    inputs["labels"] = torch.tensor(labels, device=inputs["pixel_values"].device)
    return inputs


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _class_number(batch: Batch, row: int, value: Any, field: str) -> int:
    try:
        return int(value if isinstance(value, int | str) else bytes(value))
    except (TypeError, ValueError):
        key = batch["__key__"][row] if "__key__" in batch else f"row {row}"
        raise ConfigError(
            f"model_inputs: {key}.{field}: not a class number; map it in a transform, "
            "or give label_field="
        ) from None


def two_tower_arguments(
    batch: Batch, family: str, *, is_whole: bool, pictures: Pictures | None
) -> dict[str, Any]:
    """Return pairs of texts and pictures, or the inputs of one tower.

    Args:
        batch: The batch.
        family: "clip" or "siglip".
        is_whole: Whether the model has both towers.
        pictures: The batch's pictures.
    """
    inputs: dict[str, Any] = {}
    if isinstance(batch.get("input_ids"), Tensor):
        inputs["input_ids"] = batch["input_ids"]
        if family != "siglip":
            inputs["attention_mask"] = batch["attention_mask"]
    if pictures is not None:
        inputs["pixel_values"] = _one_a_row(batch, family, pictures)
    if not inputs:
        raise ConfigError(f"model_inputs: {family} takes pictures and texts, the batch has neither")
    valid = batch.get("__valid__")
    if valid is not None and not valid.all():
        inputs = {name: value[valid.to(value.device)] for name, value in inputs.items()}
    if is_whole and "input_ids" in inputs and "pixel_values" in inputs:
        inputs["return_loss"] = True
    return inputs


def _one_a_row(batch: Batch, family: str, pictures: Pictures) -> Tensor:
    """Return [B, 3, H, W], the one picture of each row."""
    counts = torch.bincount(pictures.rows, minlength=pictures.num_rows).tolist()
    require_one_each(batch, counts, family, "picture")
    return pictures.stacked(family)


# -- the pictures of a batch, normalised, as the functions of `families` get them -----------------


def pictures_of(
    batch: Batch, image_field: str, change: Callable[[Tensor], Tensor]
) -> Pictures | None:
    """Return the pictures of a batch, normalised; None if it has none."""
    images = batch.get(image_field)
    if image_field not in batch:
        _check_other_fields(batch, image_field)
    if images is None or len(images) == 0:
        return None
    num_rows = len(batch["__valid__"]) if "__valid__" in batch else None
    if isinstance(images, Tensor):
        tiles: Tensor | list[Tensor] = change(images)
    elif isinstance(images, list):
        tiles = [change(image) for image in images]
    else:
        raise ConfigError(
            f"model_inputs: {image_field!r} is a {type(images).__name__}: give a tensor, or a list "
            "of tensors"
        )
    rows = batch.get(f"{image_field}_row")
    if rows is None:
        rows = torch.arange(len(tiles), device=tiles[0].device)
    samples = batch.get(f"{image_field}_document")
    if is_packed(batch):
        num_rows = len(batch["input_ids"])  # 1 where all rows lie one behind the other
        rows = rows if num_rows > 1 else torch.zeros_like(rows)
    if num_rows is None:
        num_rows = len(batch["input_ids"]) if "input_ids" in batch else int(rows.max()) + 1
    return Pictures(
        tiles,
        rows,
        num_rows,
        tiles_per_picture=_joined(batch.get(f"{image_field}_tiles")),
        sizes=_joined(batch.get(f"{image_field}_size")),
        samples=samples,
    )


def _check_other_fields(batch: Batch, image_field: str) -> None:
    """Refuse a batch whose pictures stand in another field: the model would train without them."""
    others = [
        name
        for name, value in batch.items()
        if isinstance(value, Tensor)
        and value.ndim == 4
        and value.shape[1] == 3
        and f"{name}_frames" not in batch  # of videos
    ]
    if others or image_field != "image":
        where = " and ".join(map(repr, others)) or "no field"
        give = f", or pass image_field={others[0]!r}" if others else ""
        raise ConfigError(
            f"model_inputs: the batch has no {shown(image_field)}, and pictures in {where}: decode "
            f"them with Decode(image=){give}"
        )


def _joined(values: Any) -> Tensor | None:
    """Join what each row has of its pictures, such as [2, 1] and [3], to one tensor, [2, 1, 3]."""
    if values is None:
        return None
    parts = [torch.as_tensor(value) for value in values if value is not None]
    return torch.cat(parts) if parts else None


def pixel_changer(normalize: Any, model: Any, kind: str) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises uint8 pixels and leaves floating ones as they are.

    Args:
        normalize: As `model_inputs` takes it.
        model: The model, which has a dtype. None: float32.
        kind: "image" or "video": whose mean and deviation of a processor are taken.
    """
    dtype = dtype_of(model)

    def change(image: Tensor) -> Tensor:
        if image.is_floating_point():
            return image
        if image.dtype != torch.uint8:
            raise ConfigError(f"model_inputs: {kind}s are uint8 or floating, not {image.dtype}")
        settings = _settings_of(normalize, kind)
        if settings is None:
            raise ConfigError(
                "model_inputs: the pixels are uint8, not normalised: "
                "to_device(loader, device, normalize=mm.Normalize(processor.image_mean, "
                "processor.image_std)), or model_inputs(..., normalize=processor)"
            )
        return Normalizer(settings, dtype, image.device)(image)

    return change


def _settings_of(normalize: Any, kind: str) -> Normalize | None:
    if normalize is None or isinstance(normalize, Normalize):
        return normalize
    processor = getattr(normalize, "image_processor", normalize)
    processor = getattr(normalize, f"{kind}_processor", processor)
    if not hasattr(processor, "image_mean") or not hasattr(processor, "image_std"):
        raise ConfigError(
            f"model_inputs: normalize={type(normalize).__name__}: give an mm.Normalize, or a "
            "processor with image_mean and image_std"
        )
    return Normalize(processor.image_mean, processor.image_std)


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of a model's weights; float32 where there is no model."""
    dtype = getattr(model, "dtype", None)
    is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return dtype if isinstance(dtype, torch.dtype) and is_floating else torch.float32
