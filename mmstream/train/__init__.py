"""Stage 7 of 7: the reference training loop, the end of the data's way.

    device -> train

Read `loop` first: it goes through all others. `step` is one optimizer step (precision,
accumulation, scaling, clipping), `schedule` the learning rate, `models`, `clip`, `vlm` and
`tokenizer` what is trained, `distributed` who trains it, `checkpoint`, `metrics` and `meter` what
stays on disk, `validation`, `summary` and `tracing` what a run tells about itself. Written to be
read and copied, not to be configured: a trainer of your own needs only `mmstream.to_device` and the
two lines that save and load its state.
"""

from __future__ import annotations

from mmstream.train.config import TrainConfig, TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]


def train(config: TrainConfig) -> TrainResult:
    """Train a model on a dataset, or go on where the newest good checkpoint stands.

    Run it in one process, or in each of several under ``torchrun``. torch and transformers are
    imported here, not with this module.

    Returns:
        Steps, last loss and the state of the loader, the same on every rank.

    Raises:
        ConfigError: the settings cannot work, before anything is read.
        StateError: a checkpoint is there that these settings cannot go on from.
        MMStreamError: the loss is not finite.
        KeyboardInterrupt: after Ctrl-C, saved as of the last optimizer step; a second Ctrl-C, a
            second later or more, leaves at once. After SIGTERM (a scheduler's) it saves likewise,
            on all ranks the same step, and returns, with `TrainResult.stopped_by`.
        SystemExit: 143 after SIGTERM before the first step, or a second one.
    """
    from mmstream.train.loop import run

    return run(config)
