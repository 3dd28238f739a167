"""GLM-4V, GLM-4.6V: pictures as Qwen-VL takes them. Positions are by the model's own rule."""

from __future__ import annotations

from dataclasses import dataclass

from mmstream.families.qwen_vl import QwenVL


@dataclass(frozen=True)
class GlmV(QwenVL):
    """Pictures as lines of patches. Videos are refused: their tokens are those of pictures."""

    takes: tuple[str, ...] = ("image",)


FAMILIES: dict[str, GlmV] = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GlmV())
