"""The reference training loop, the end of the flow: ... -> device -> train.

It is written to be read and copied, in this order:

loop.py         start here: sets a run up, and loops over the steps
step.py         one optimizer step: precision, accumulation, loss scaling, clipping
run_length.py   where the run ends, and the batches of each optimizer step
schedule.py     the learning rate, frozen parameters, the optimizer
data.py         the loader of a run;  preview.py: one batch of it, without training
models.py       which model: clip.py, vlm.py (images: vision.py), chat.py (videos), speech.py;
                token_loss.py, tokenizer.py
                pretrained.py: opens folders of models and tokenizers
distributed.py  ranks, their process group, threads, signals that stop a run
checkpoint.py   saves a run and resumes it;  saved_state.py: reads only the loader's state
                state_json.py: the JSON of that state
meter.py        measures the steps;  summary.py: where the time went;  metrics.py: writes the files
validation.py   the loss on a second dataset
tracing.py      profiler traces and deterministic runs
config.py       `TrainConfig` and `TrainResult`

A trainer of your own needs only `mmstream.to_device`, and the two lines that save and load the
loader's state.
"""

from __future__ import annotations

from mmstream.train.config import TrainConfig, TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]


def train(config: TrainConfig) -> TrainResult:
    """Train a model on a dataset, or resume from the newest good checkpoint in ``config.out``.

    Call it in one process, or in each process that ``torchrun`` starts. torch and transformers are
    imported when it is called, not with this module.

    The weights are saved every ``config.checkpoint_every`` optimizer steps and after the last one.
    A later call with the same `out` continues there, also on another number of ranks or workers.

    Args:
        config: settings, the same in every process.

    Returns:
        Steps, last loss and state of the loader, the same on every rank. After SIGTERM, which a
        scheduler sends, every rank saves the same step and returns, with
        ``TrainResult.stopped_by`` set.

    Raises:
        ConfigError: the settings cannot work, the model cannot take the data, or a rank has other
            settings or another copy of the data than the others.
        StateError: these settings cannot continue from the checkpoint.
        BadSampleLimitError: too many bad samples.
        MMStreamError: the loss is not finite, or data or storage stop the run.
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

    return run(config)
