"""CLIP and SigLIP: a tower for texts and one for pictures, whole or each alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmstream.errors import ConfigError
from mmstream.families.family import Family, Medium, Pictures
from mmstream.types import Batch


@dataclass(frozen=True)
class TwoTowers(Family):
    """Pairs of texts and pictures, or the inputs of one tower.

    Attributes:
        name: "clip" or "siglip". SigLIP was trained without an attention mask.
        is_whole: Whether the model has both towers.
    """

    takes: tuple[str, ...] = ("image",)
    takes_one_a_row: bool = True
    name: str = "clip"
    is_whole: bool = True

    def row_inputs(
        self, batch: Batch, media: dict[str, Medium], config: Any, label_field: str
    ) -> dict[str, Any]:
        """Return texts and pictures. Rows that are not valid are left out: all are compared."""
        inputs: dict[str, Any] = {}
        if hasattr(batch.get("input_ids"), "shape"):
            inputs["input_ids"] = batch["input_ids"]
            if self.name != "siglip":
                inputs["attention_mask"] = batch["attention_mask"]
        pictures = media.get("image")
        if isinstance(pictures, Pictures):
            inputs["pixel_values"] = pictures.one_a_row(batch, self.name)
        if not inputs:
            raise ConfigError(
                f"model_inputs: {self.name} takes pictures and texts, the batch has neither"
            )
        valid = batch.get("__valid__")
        if valid is not None and not valid.all():
            inputs = {name: value[valid.to(value.device)] for name, value in inputs.items()}
        has_both = "input_ids" in inputs and "pixel_values" in inputs
        return {**inputs, "return_loss": True} if self.is_whole and has_both else inputs


FAMILIES: dict[str, Family] = {
    f"{name}{tower}": TwoTowers(name=name, is_whole=not tower)
    for name in ("clip", "siglip")
    for tower in ("", "_vision_model", "_text_model")
}
