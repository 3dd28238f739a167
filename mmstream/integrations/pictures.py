"""The pictures of a batch, normalised, as the functions of `families` get them.

arguments.model_arguments -> `pixel_changer` -> `pictures_of`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmstream.device.normalize import Normalize, Normalizer
from mmstream.errors import ConfigError
from mmstream.integrations.families import Pictures
from mmstream.integrations.packed_text import is_packed
from mmstream.types import Batch
from mmstream.wrong_arguments import shown


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
