"""The reference training loop, the end of the flow: ... -> device -> train.

It is written to be read and copied, in this order:

loop.py         start here: a run, its steps, the loss over all ranks
config.py       `TrainConfig` and `TrainResult`
checkpoint.py   saves a run and resumes it
metrics.py      measures the steps, writes the lines and calls the user's hooks; has hooks for
                TensorBoard, W&B and Prometheus
distributed.py  ranks, their process group, threads, signals that stop a run
models.py       which model, and the pipelines of training and validation; tokenizer.py: folders
                of transformers

A trainer of your own needs only `mmstream.to_device`, and the two lines that save and load the
loader's state. Models and trainers of other libraries get their batches here:

inputs.py       `mm.model_inputs`: the arguments of a model of transformers; `check_packing`:
                whether it keeps documents apart; flat batches for kernels, other trainers and TRL
trainer.py      `LoaderTrainer`: the Trainer of transformers, on a loader
lightning.py    `LightningLoaderState`: the state of a loader in checkpoints of Lightning

demo.py         ``mmstream demo``: from the rows in corpus/ to a trained model, a kill and a proof

These names are imported when they are first used: each needs the library that it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmstream.settings import checked
from mmstream.train.config import TrainConfig, TrainResult

if TYPE_CHECKING:
    from mmstream.train.inputs import (
        PackingCheck,
        check_packing,
        flash_attention_arguments,
        flex_block_mask,
        megatron_packing,
        preference_inputs,
        torchtitan_batch,
    )
    from mmstream.train.lightning import LightningLoaderState
    from mmstream.train.metrics import Prometheus, TensorBoard, WandB
    from mmstream.train.trainer import LoaderState, LoaderTrainer, LoaderTrainerMixin

__all__ = [
    "LightningLoaderState",
    "LoaderState",
    "LoaderTrainer",
    "LoaderTrainerMixin",
    "PackingCheck",
    "Prometheus",
    "TensorBoard",
    "TrainConfig",
    "TrainResult",
    "WandB",
    "check_packing",
    "flash_attention_arguments",
    "flex_block_mask",
    "megatron_packing",
    "preference_inputs",
    "torchtitan_batch",
    "train",
]

_MODULE_OF = {
    "LightningLoaderState": "lightning",
    "LoaderState": "trainer",
    "LoaderTrainer": "trainer",
    "LoaderTrainerMixin": "trainer",
    "PackingCheck": "inputs",
    "Prometheus": "metrics",
    "TensorBoard": "metrics",
    "WandB": "metrics",
    "check_packing": "inputs",
    "flash_attention_arguments": "inputs",
    "flex_block_mask": "inputs",
    "megatron_packing": "inputs",
    "preference_inputs": "inputs",
    "torchtitan_batch": "inputs",
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mmstream.train' has no attribute {name!r}")
        return getattr(import_module(f"mmstream.train.{_MODULE_OF[name]}"), name)


@checked({"config": "give mmstream.train.TrainConfig(...)"})
def train(
    config: TrainConfig, *, pipeline: Any = None, model: Any = None, hooks: Sequence[Any] = ()
) -> TrainResult:
    """Train a model on a dataset, or resume from the newest good checkpoint in ``config.out``.

    Call it in one process, or in each process that ``torchrun`` starts. torch and transformers are
    imported when it is called, not with this module.

    The weights are saved every ``config.checkpoint_every`` optimizer steps and after the last one.
    A later call with the same `out` continues there, also on another number of ranks or workers.

    Args:
        config: settings, the same in every process.
        pipeline: an `mm.Pipeline`, whose dataset becomes that of the run, or a function from the
            dataset to one. Its decoders fit the model, and its `global_batch_size` holds in place
            of the config's. None: what the model needs.
        model: an `nn.Module` with the methods of `mmstream.train.models.Trainable`, the same on
            every rank. It needs `pipeline`. None: ``config.model``.
        hooks: objects of the same classes on every rank, such as `mmstream.train.TensorBoard`, with
            any of these methods. Each rank calls them in the order of the list.

            - on_step(step, metrics): after each line of metrics. `step` counts optimizer steps
              since the first start. `metrics` is a dict, this rank's line.
            - on_validation(step, metrics): after each validation pass, with its line.
            - on_checkpoint(path): when a checkpoint is written, with its path or URL.
            - on_end(): when the run ends by itself, by a signal or by the error of a hook.

    Returns:
        Steps, last loss and state of the loader, the same on every rank. After SIGTERM, which a
        scheduler sends, every rank saves the same step and returns, with
        ``TrainResult.stopped_by`` set.

    Raises:
        ConfigError: the settings cannot work, the model cannot take the data, or a rank has other
            settings or another copy of the data than the others.
        StateError: these settings cannot continue from the checkpoint.
        BadSampleLimitError: too many bad samples.
        MMStreamError: the loss is not finite, or data or storage stop the run. Or a hook of any
            rank has raised an error, which is the cause of this one on its rank. The run is saved.
        KeyboardInterrupt: after Ctrl-C, when the last optimizer step is saved. A second Ctrl-C,
            more than a second later, leaves at once and saves nothing.
        SystemExit: with code 143, after SIGTERM before the first step or a second SIGTERM.

    Examples:
        >>> from mmstream.train import TrainConfig, train
        >>> result = train(TrainConfig(url="shards/", out="run/", max_steps=2))
        >>> result.num_steps
        2
    """
    from mmstream.train.loop import run

    return run(config, pipeline, model, hooks)
