"""Image classification: every model that transformers calls ``ForImageClassification``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from mmstream.errors import ConfigError
from mmstream.families.family import Family, Inputs, Medium, Pictures
from mmstream.types import IGNORED_LABEL, Batch


@dataclass(frozen=True)
class Classifier(Family):
    """A picture a row, and its class."""

    takes: tuple[str, ...] = ("image",)
    takes_one_a_row: bool = True

    def row_inputs(
        self, batch: Batch, media: dict[str, Medium], config: Any, label_field: str
    ) -> Inputs:
        """Return the pictures of rows, and their class numbers where the batch has some.

        Args:
            batch: The batch.
            media: Its pictures.
            config: The model's config.
            label_field: The field of class numbers where ``labels`` holds something else.
        """
        import torch

        family, pictures = config.model_type, media.get("image")
        if not isinstance(pictures, Pictures):
            raise ConfigError(
                f"model_inputs: {family} takes one picture a row, this batch has none"
            )
        inputs = {"pixel_values": pictures.one_a_row(batch, family)}
        numbers = batch.get("labels")
        is_tensor = isinstance(numbers, torch.Tensor) and numbers.ndim == 1
        is_list = isinstance(numbers, list) and all(type(number) is int for number in numbers)
        if not is_tensor and not is_list:
            numbers = batch.get(label_field)
        if numbers is None:
            return inputs  # for inference
        valid = batch.get("__valid__")
        is_valid = [True] * len(numbers) if valid is None else valid.tolist()
        labels = [
            _class_number(batch, row, number, label_field) if is_valid[row] else IGNORED_LABEL
            for row, number in enumerate(
                numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers
            )
        ]
        inputs["labels"] = torch.tensor(labels, device=inputs["pixel_values"].device)
        return inputs


def _class_number(batch: Batch, row: int, value: Any, field: str) -> int:
    try:
        return int(value if isinstance(value, int | str) else bytes(value))
    except (TypeError, ValueError):
        key = batch["__key__"][row] if "__key__" in batch else f"row {row}"
        raise ConfigError(
            f"model_inputs: {key}.{field}: not a class number; map it in a transform, "
            "or give label_field="
        ) from None


def is_classifier(model: Any) -> bool:
    """Tell whether a model is one of image classification, by the names of its classes."""
    base = getattr(model, "get_base_model", None)  # of peft
    kinds: set[Any] = {*type(model).__mro__, *type(base() if callable(base) else model).__mro__}
    return any(
        kind.__name__.endswith("ForImageClassification")
        and "input_ids" not in inspect.signature(kind.forward).parameters
        for kind in kinds
    )
