"""The arguments of models that take one picture a row: classifiers, and CLIP and SigLIP.

arguments.model_arguments -> `classification_arguments`, `two_tower_arguments`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmstream.errors import ConfigError
from mmstream.integrations.families import Pictures
from mmstream.integrations.one_each import require_one_each
from mmstream.types import IGNORED_LABEL, Batch


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
