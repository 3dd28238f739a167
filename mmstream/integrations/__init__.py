"""Batches into the models and trainers of other libraries. Each module needs its library only.

    loader or device -> `model_inputs` -> forward(**inputs)

inputs.py      `model_inputs`: the keyword arguments of a model's forward, from a batch
arguments.py   makes them
model_kinds.py    what transformers says of a model
packed_text.py  the text of flat batches: what keeps documents apart
mrope_positions.py  positions of Qwen-VL and Qwen's omni models in flat batches
check_packing.py  whether a model keeps documents apart, measured
flat_batches.py   flat batches for models of your own
families.py    how each family of models takes pictures
videos.py      how each family takes videos, and the patches of Qwen-VL
sound.py       how each family takes audio
counts.py      whether a batch has as many tokens and media as a model takes
blank.py       the blank picture, video or recording of a batch without any
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
    from mmstream.integrations.flat_batches import (
        flash_attention_arguments as flash_attention_arguments,
    )
    from mmstream.integrations.flat_batches import flex_block_mask as flex_block_mask
    from mmstream.integrations.flat_batches import megatron_packing as megatron_packing
    from mmstream.integrations.flat_batches import torchtitan_batch as torchtitan_batch
    from mmstream.integrations.inputs import model_inputs as model_inputs
    from mmstream.integrations.lightning import LightningLoaderState as LightningLoaderState
    from mmstream.integrations.preferences import preference_inputs as preference_inputs
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
    "flash_attention_arguments": "flat_batches",
    "flex_block_mask": "flat_batches",
    "megatron_packing": "flat_batches",
    "model_inputs": "inputs",
    "preference_inputs": "preferences",
    "torchtitan_batch": "flat_batches",
}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mmstream.integrations' has no attribute {name!r}")
        value = getattr(import_module(f"mmstream.integrations.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
