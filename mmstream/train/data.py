"""The data of a run: its dataset, the pipeline that makes batches of it, and the loader.

loop.run -> `open_train_data` -> `pipeline_for` or `pipeline_of_model` -> `open_loader`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.batching.batching import Flat, Pack
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.dataset.mixture_file import open_data
from mmstream.dataset.open import open_dataset
from mmstream.dataset.source import datasets_of
from mmstream.decoding.stored import baked_content
from mmstream.errors import ConfigError, escaped
from mmstream.loader.loader import Loader
from mmstream.pipeline import Pipeline
from mmstream.train.config import TrainConfig


def open_train_data(
    config: TrainConfig, url: str, *, is_validation: bool = False
) -> Dataset | Mixture:
    """Open a dataset, or for training the file of a mixture too."""
    open_it = open_dataset if is_validation else open_data
    return open_it(url, allow_foreign_urls=config.allow_foreign_urls)


def pipeline_for(
    pipeline: Pipeline | Callable[[Any], Pipeline], data: Dataset | Mixture, folder: str | None
) -> Pipeline:
    """Return the user's pipeline with the data of the run.

    Args:
        pipeline: A pipeline, whose data are replaced, or a function from data to a pipeline.
        data: Of the run.
        folder: Gets the records of bad samples, unless the pipeline names another folder.
    """
    made = pipeline(data) if callable(pipeline) else pipeline
    if not isinstance(made, Pipeline):
        raise ConfigError(f"train: pipeline= gave {type(made).__name__}, and no mm.Pipeline")
    policy = made.bad_samples
    if policy.quarantine == BadSamplePolicy.quarantine:
        policy = replace(policy, quarantine=folder)
    return replace(made, dataset=data, bad_samples=policy)


def pipeline_of_model(config: TrainConfig, data: Dataset | Mixture, decode: Any) -> Pipeline:
    """Return the pipeline that a model of `mmstream.train.models` needs: its decoders, shuffled."""
    for dataset in datasets_of(data):
        if baked_content(dataset) is not None:
            raise ConfigError(
                f"{escaped(dataset.store.url)}: was written by `mmstream bake`, and the model's "
                "own pipeline decodes: give it the source of the bake, or pipeline= with "
                "mm.Decode.baked()"
            )
    return Pipeline(
        data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        decode=decode,
        bad_samples=BadSamplePolicy(quarantine=config.log_folder),
    )


def validation_pipeline(pipeline: Pipeline, data: Dataset | Mixture) -> Pipeline:
    """Return the pipeline of the validation data: each sample once, in their order.

    A substitute would count a sample twice, so the row of a bad one is left out instead. There is
    no plan of packs: the loss is the same with one sample a row.
    """
    policy = pipeline.bad_samples
    action = "mask" if policy.action == "substitute" else policy.action
    folder = policy.quarantine and str(Path(policy.quarantine, "validation"))
    return replace(
        pipeline,
        dataset=data,
        shuffle=False,
        drop_last=False,
        reshuffle=None,
        batching=Flat() if isinstance(pipeline.batching, Pack) else pipeline.batching,
        bad_samples=replace(policy, action=action, quarantine=folder),
    )


def open_loader(config: TrainConfig, pipeline: Pipeline) -> Loader:
    """Return the loader of this rank."""
    return Loader(
        pipeline,
        num_workers=config.num_workers,
        rows_per_rank=config.rows_per_rank or "balanced",
        on_change=config.on_change,
    )
