"""Everything that mmstream knows of families of models: one module a family.

registry.py    `of`: which family a model is of, also of other packages
family.py      `Family`, the base of all, and what they exchange with model_inputs
qwen_vl.py     Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5; GLM-4V, GLM-4.6V
qwen_omni.py   Qwen2.5-Omni and Qwen3-Omni
qwen_audio.py  Qwen2-Audio
llava.py       Llava 1.5, Llava-NeXT, LLaVA-OneVision
gemma3.py      Gemma 3, PaliGemma
mistral3.py    Mistral 3, and Llava with Pixtral's tower
internvl.py    InternVL
idefics.py     Idefics2, Idefics3, SmolVLM
whisper.py     Whisper
clip.py        CLIP, SigLIP
classifier.py  image classification

A module has the tokens of each medium, for `mm.TextDecoder`, its tiles and positions, and how
`mm.model_inputs` arranges a batch for the model.
"""

from __future__ import annotations

from mmstream.decoding.image.geometry import TileRule, View, whole_view
from mmstream.families import (
    clip,
    gemma3,
    idefics,
    internvl,
    llava,
    mistral3,
    qwen_audio,
    qwen_omni,
    qwen_vl,
    whisper,
)
from mmstream.families.family import Blank, Family, Features, Pictures, TokenCount, Videos
from mmstream.families.registry import of

__all__ = [
    "Blank",
    "Family",
    "Features",
    "Pictures",
    "TileRule",
    "TokenCount",
    "Videos",
    "View",
    "clip",
    "gemma3",
    "idefics",
    "internvl",
    "llava",
    "mistral3",
    "of",
    "qwen_audio",
    "qwen_omni",
    "qwen_vl",
    "whisper",
    "whole_view",
]
