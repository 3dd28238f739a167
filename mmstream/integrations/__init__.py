"""Batches into the models and trainers of other libraries. Each module needs its library only.

    loader or device -> `model_inputs` -> forward(**inputs)

inputs.py      `model_inputs`: the keyword arguments of a model's forward, from a batch
arguments.py   makes them
one_picture.py    those of models that take one picture a row
one_each.py    refuses rows with another number than one
model_kinds.py    what transformers says of a model
pictures.py    the pictures of a batch, normalised
packed_text.py  the text of flat batches: what keeps documents apart
mrope_positions.py  positions of Qwen-VL in flat batches
omni_positions.py   positions of Qwen2.5-Omni with the sound of videos between their frames
check_packing.py  whether a model keeps documents apart, measured
first_use.py      the same in short, at the first flat batch of a model
one_document.py   a flat batch with one document, or with others' content changed
resolve.py     the model and its config, of what a user gives
flash_attention.py, flex.py, torchtitan.py, megatron.py
               flat batches for models of your own
families.py    how each family of models takes pictures
videos.py      how each family takes videos
sound.py       how each family takes audio
patches.py     pictures and videos in the patches of Qwen-VL
token_counts.py  whether a text has as many tokens as its media take
blank.py       the blank picture, video or recording of a batch without any
summed_loss.py the loss of tokens, added up
lightning.py   `LightningLoaderState`: the state of a loader in checkpoints of Lightning
preferences.py `preference_inputs`: chosen and rejected answers, for TRL
trainer.py     `LoaderTrainer`: the Trainer of transformers, on a loader

A name is imported when it is first used: only `LoaderTrainer` needs transformers' Trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmstream.integrations.check_packing import PackingCheck as PackingCheck
    from mmstream.integrations.check_packing import check_packing as check_packing
    from mmstream.integrations.flash_attention import (
        flash_attention_arguments as flash_attention_arguments,
    )
    from mmstream.integrations.flex import flex_block_mask as flex_block_mask
    from mmstream.integrations.inputs import model_inputs as model_inputs
    from mmstream.integrations.lightning import LightningLoaderState as LightningLoaderState
    from mmstream.integrations.megatron import megatron_packing as megatron_packing
    from mmstream.integrations.preferences import preference_inputs as preference_inputs
    from mmstream.integrations.torchtitan import torchtitan_batch as torchtitan_batch
    from mmstream.integrations.trainer import LoaderState as LoaderState
    from mmstream.integrations.trainer import LoaderTrainer as LoaderTrainer
    from mmstream.integrations.trainer import LoaderTrainerMixin as LoaderTrainerMixin

_MODULE_OF = {
    "LightningLoaderState": "lightning",
    "LoaderState": "trainer",
    "LoaderTrainer": "trainer",
    "LoaderTrainerMixin": "trainer",
    "PackingCheck": "check_packing",
    "check_packing": "check_packing",
    "flash_attention_arguments": "flash_attention",
    "flex_block_mask": "flex",
    "megatron_packing": "megatron",
    "model_inputs": "inputs",
    "preference_inputs": "preferences",
    "torchtitan_batch": "torchtitan",
}

__all__ = [
    "LightningLoaderState",
    "LoaderState",
    "LoaderTrainer",
    "LoaderTrainerMixin",
    "PackingCheck",
    "check_packing",
    "flash_attention_arguments",
    "flex_block_mask",
    "megatron_packing",
    "model_inputs",
    "preference_inputs",
    "torchtitan_batch",
]


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mmstream.integrations' has no attribute {name!r}")
        value = getattr(import_module(f"mmstream.integrations.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
