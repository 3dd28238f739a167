"""The reference training loop, the end of the flow: ... -> device -> train.

loop.py         start here: it calls all the others
step.py         one optimizer step: precision, accumulation, scaling, clipping
schedule.py     the learning rate and the optimizer
models.py       which model: clip.py, vlm.py (images: vision.py), tokenizer.py
distributed.py  ranks, their process group, signals that stop a run
checkpoint.py   saves and resumes;  saved_state.py: the loader's state, read back from a file
metrics.py      what stays on disk of each step;  meter.py: times and counts
validation.py   validation passes
summary.py      where the time went;  tracing.py: traces and deterministic runs
config.py       the settings

The loop is written to be read and copied, not to be configured. A trainer of your own needs only
`mmstream.to_device`, and the two lines that save and load the loader's state.
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
