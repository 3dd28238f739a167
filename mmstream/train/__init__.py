"""Stage 7 of 7: the reference training loop, the end of the data's way.

    device -> train

`tokenizer` and `clip` are what is trained, `distributed` who trains it, `checkpoint` and `metrics`
what stays on disk, `loop` the loop. Written to be read and copied, not to be configured: a trainer
of your own needs only `mmstream.to_device` and the two lines that save and load its state.
"""

from __future__ import annotations

from mmstream.train.config import TrainConfig, TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]


def train(config: TrainConfig) -> TrainResult:
    """Train a small CLIP on a dataset, or go on where the newest good checkpoint stands.

    Run it in one process, or in each of several under ``torchrun``. torch and transformers are
    imported here, not with this module.

    Returns:
        Steps, last loss and the state of the loader, the same on every rank.

    Raises:
        ConfigError: the settings cannot work, before anything is read.
        StateError: a checkpoint is there that these settings cannot go on from.
        SystemExit: 143 after SIGTERM.
    """
    from mmstream.train.loop import run

    return run(config)
