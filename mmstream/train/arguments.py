"""The keyword arguments of a Hugging Face model's forward pass, from a batch.

    inputs.py, check_packing.py -> `model_arguments`

Text is the same for all models: ids, mask and labels. What differs is asked of the model's family:
in which form it takes pictures, videos and audio, how many tokens they take, positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmstream._torchvision import import_torchvision
from mmstream.batching.media import mean_rate
from mmstream.batching.valid import valid_labels
from mmstream.device.normalize import Normalize, Normalizer
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.families.family import (
    KINDS,
    Family,
    Features,
    Medium,
    Pictures,
    Videos,
    check_count,
)
from mmstream.families.registry import origin_of, resolve
from mmstream.train.packed_text import (
    DOCUMENT_ARGUMENTS,
    check_quadratic,
    is_packed,
    packed_arguments,
    packed_text,
    with_padding_document,
)
from mmstream.types import IGNORED_LABEL, Batch
from mmstream.wrong_arguments import shown

_TEXT_FIELDS = ("input_ids", "attention_mask", "labels")


@dataclass(frozen=True)
class Request:
    """How a batch is to be read, as `model_inputs` takes it."""

    normalize: Any = None
    blank_image: bool = True
    label_field: str = "cls"
    image_field: str = "image"
    video_field: str = "video"
    audio_field: str = "audio"


def model_arguments(
    batch: Batch, model_or_family: Any, request: Request | None = None
) -> dict[str, Any]:
    """Return what `model_inputs` returns. The model is not run.

    Raises:
        ConfigError: As `model_inputs`. Or the family of another package has failed; the message
            names the package and its version.
    """
    model, config, family = resolve(model_or_family)
    try:
        arguments = _row_arguments if family.takes_one_a_row else _text_arguments
        is_default = isinstance(model_or_family, str)  # a default config has tokens of its own
        return arguments(batch, model, config, family, request or Request(), is_default)
    except MMStreamError:
        raise
    except Exception as error:
        origin = origin_of(str(config.model_type))
        if origin is None:
            raise
        raise ConfigError(
            f"model_inputs: the family {config.model_type} of {origin} has failed: "
            f"{type(error).__name__}: {escaped(error)}: report it to that package"
        ) from error


def _row_arguments(
    batch: Batch, model: Any, config: Any, family: Family, request: Request, is_default: bool
) -> dict[str, Any]:
    """Return the arguments of a model that takes one medium a row."""
    if is_packed(batch):
        raise ConfigError(
            f"model_inputs: {config.model_type} takes one sample a row: leave batching= out of "
            "the Pipeline"
        )
    media = _media_of(batch, model, config, family, request)
    if "audio" in family.takes:
        batch = {**batch, **_text_inputs(batch)}
        _settle_features(media, model, config, is_default)
    return family.row_inputs(batch, media, config, request.label_field)


def _text_arguments(
    batch: Batch, model: Any, config: Any, family: Family, request: Request, is_default: bool
) -> dict[str, Any]:
    """Return the arguments of a model of text, with any number of media in a row."""
    media = _media_of(batch, model, config, family, request)
    packed = is_packed(batch)
    text = packed_text(batch) if packed else _text_inputs(batch)
    sees = not media.keys().isdisjoint(("image", "video"))
    if request.blank_image:
        text = _with_blanks(text, media, config, family)
    _settle_features(media, model, config, is_default)
    ids = text["input_ids"]
    media_inputs = family.inputs(media, ids, config)
    for kind, medium in media.items() if not is_default else ():
        if (count := family.num_tokens(kind, medium, config)) is not None:
            check_count(ids, config, kind, count)
    config_type: Any = type(config)
    accepted = parameters_of(config_type)
    if packed:
        check_quadratic(batch, config)
        if accepted and "position_ids" not in accepted:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes no position_ids, by which models tell "
                "documents apart: leave batching= out, so that each row is one document"
            )
        positions = family.flat_positions(text, media_inputs, model, config, sees=sees)
        text = packed_arguments({**text, "position_ids": positions}, config)
    elif (positions := family.padded_positions(text, media_inputs, model, config)) is not None:
        text = {**text, "position_ids": positions}
    return {
        name: value
        for name, value in {**text, **media_inputs}.items()
        if not accepted or name in accepted | DOCUMENT_ARGUMENTS
    }


@lru_cache(maxsize=32)
def parameters_of(config_type: Any) -> frozenset[str]:
    """Return the arguments of the forward pass in the installed version; empty: not known."""
    import_torchvision()
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    for mapping in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        if config_type in mapping:
            return frozenset(inspect.signature(mapping[config_type].forward).parameters)
    return frozenset()


def _text_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return ids, mask and labels. The labels of invalid rows are -100."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ConfigError("model_inputs: the batch has no input_ids; give Decode a TextDecoder")
    text = {name: batch[name] for name in _TEXT_FIELDS if isinstance(batch.get(name), Tensor)}
    if "labels" in text and "__valid__" in batch:
        text["labels"] = valid_labels(batch)
    return text


# -- blank media -----------------------------------------------------------------------------------


def _with_blanks(
    text: dict[str, Any], media: dict[str, Medium], config: Any, family: Family
) -> dict[str, Any]:
    """Return the text with the tokens of a blank medium for each tower that has nothing to do.

    The models here are causal: what stands behind a text does not change it.

    Args:
        text: ``input_ids`` and, where there are any, ``attention_mask`` and ``labels``, [B, T].
        media: The media of the batch. The blank ones are added.
        config: The model's config.
        family: Says what is blank, and which tokens it takes.
    """
    towers = {"image": ("image", "video"), "audio": ("audio",)}
    for kind, kinds in towers.items():
        if kind in family.takes and media.keys().isdisjoint(kinds):
            blank = family.blank(kind, config)
            if blank is not None:
                text, row = _with_tokens(text, blank.tokens)
                medium = blank.medium.in_row(row, text["input_ids"])
                media["video" if isinstance(medium, Videos) else kind] = medium
    return text


def _with_tokens(text: dict[str, Any], tokens: list[int]) -> tuple[dict[str, Any], int]:
    """Return the text with these tokens at the end of a row, and the number of the row.

    It is the row with most padding at its end, where they fit. Otherwise all rows become longer.
    They have an attention mask of 1 and no labels. In a flat batch they are a document of their
    own.
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


# -- the media of a batch, normalised --------------------------------------------------------------


def _media_of(
    batch: Batch, model: Any, config: Any, family: Family, request: Request
) -> dict[str, Medium]:
    """Return the media of a batch by kind, without those that it has none of.

    Raises:
        ConfigError: The batch has media of a kind that the family does not take.
    """
    image, video, audio = request.image_field, request.video_field, request.audio_field
    media: dict[str, Medium] = {}
    change = pixel_changer(request.normalize, model, "image")
    pictures = pictures_of(batch, image, change)
    is_there = {
        "image": pictures is not None,
        "video": _has(batch, video, f"{video}_frames"),
        "audio": _has(batch, audio, f"{audio}_features", f"{audio}_row"),
    }
    for kind, name in KINDS.items():
        if is_there[kind] and kind not in family.takes:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes no {name}, and the batch has some: leave "
                "their decoder out of Decode, and give "
                'TextDecoder(undecoded_parts="drop") where texts speak of them'
            )
    if pictures is not None:
        media["image"] = pictures
    if _has(batch, video):
        change = pixel_changer(request.normalize, model, "video")
        media["video"] = _videos_of(batch, video, change)
    if _has(batch, audio, f"{audio}_features"):
        media["audio"] = _features_of(batch, audio, config)
    return media


def _has(batch: Batch, *fields: str) -> bool:
    values = [batch.get(field) for field in fields]
    return any(value is not None and len(value) > 0 for value in values)


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


def _videos_of(batch: Batch, field: str, change: Callable[[Tensor], Tensor]) -> Videos:
    """Return the videos of a batch, normalised.

    Raises:
        ConfigError: The batch has videos without ``video_frames``.
    """
    value = batch[field]
    numbers = batch.get(f"{field}_frames")
    if not isinstance(numbers, Tensor):
        raise ConfigError(
            f"model_inputs: the batch has {field!r} without {field}_frames: decode videos with "
            "Decode(video=mm.VideoDecoder(...))"
        )
    counts = numbers.tolist()
    videos = list(torch.split(value, counts)) if isinstance(value, Tensor) else list(value)
    requested_fps = batch.get(f"{field}_requested_fps")
    return Videos([change(video) for video in videos], _rates(batch, field, counts), requested_fps)


def _rates(batch: Batch, field: str, counts: list[int]) -> Tensor:
    """Return the frames per second of each video.

    Where the batch does not say it, it is the mean over the times of its frames.
    """
    rates = batch.get(f"{field}_fps")
    if isinstance(rates, Tensor):
        return rates.to("cpu", torch.float64)
    times = batch[f"{field}_pts_s"].to("cpu", torch.float64)
    means = [mean_rate(video.tolist()) for video in torch.split(times, counts)]
    return torch.tensor(means, dtype=torch.float64)


def _features_of(batch: Batch, field: str, config: Any) -> Features:
    """Return the features of a batch's recordings.

    Raises:
        ConfigError: The batch has samples of recordings in place of features, or features of
            several numbers of mel bands.
    """
    values = batch.get(f"{field}_features")
    if values is None:
        raise ConfigError(
            f"model_inputs: {config.model_type} takes features, and the batch has samples of "
            f"{field!r}: AudioDecoder.from_processor(processor), or AudioDecoder(features=)"
        )
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"model_inputs: {config.model_type} takes features of one number of mel bands, these "
            "differ"
        )
    return Features(values, batch[f"{field}_features_length"], batch[f"{field}_row"])


def _settle_features(media: dict[str, Medium], model: Any, config: Any, is_default: bool) -> None:
    """Check the mel bands of features, and bring them to the dtype of the model.

    Raises:
        ConfigError: The model takes another number of mel bands.
    """
    features = media.get("audio")
    if not isinstance(features, Features):
        return
    num_mels = features.values.shape[1]
    for owner in () if is_default else (config, getattr(config, "audio_config", None)):
        expected = getattr(owner, "num_mel_bins", None)
        if expected is not None and num_mels != expected:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes {expected} mel bands, the features have "
                f"{num_mels}: AudioDecoder(features=mm.families.whisper.WhisperFeatures("
                f"num_mels={expected}))"
            )
    media["audio"] = features.of_dtype(dtype_of(model))


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of a model's weights; float32 where there is no model."""
    dtype = getattr(model, "dtype", None)
    is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return dtype if isinstance(dtype, torch.dtype) and is_floating else torch.float32
