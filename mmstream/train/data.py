"""The data of a run: its dataset, how samples become batches, and the loader.

loop.run, preview.py -> `open_loader` -> mmstream.Loader
"""

from __future__ import annotations

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
from mmstream.packing.cost import Cost
from mmstream.pipeline import Pipeline
from mmstream.train.config import TrainConfig
from mmstream.world import World

__all__ = ["cost_of", "open_loader", "open_train_data"]


def open_train_data(
    config: TrainConfig, url: str, *, is_validation: bool = False
) -> Dataset | Mixture:
    """Open a dataset, or for training the file of a mixture too."""
    open_it = open_dataset if is_validation else open_data
    data = open_it(url, allow_foreign_urls=config.allow_foreign_urls)
    for dataset in datasets_of(data):
        if baked_content(dataset) is not None:
            raise ConfigError(
                f"{escaped(dataset.store.url)}: was written by `mmstream bake`, and train decodes "
                "by itself: give it the source of the bake, or read the bake in a loop of your own "
                "with mm.Decode.baked()"
            )
    return data


def open_loader(
    config: TrainConfig,
    data: Dataset | Mixture,
    decode: Any,
    *,
    log: str = "",
    world: World | None = None,
    cost: Cost | None = None,
    **pipeline_settings: Any,
) -> Loader:
    """Return a loader of the training data, or of validation data.

    Args:
        config: settings. With ``out=""``, bad samples are not recorded.
        data: as `open_train_data` opened it.
        decode: the decoders.
        log: subfolder for the records of bad samples; it also marks validation data.
        world: which rank it is. None: that of this process.
        cost: what a row of packs costs the model. None: rows are not dealt by cost.
        pipeline_settings: further arguments of `Pipeline`.
    """
    # A substitute would count a validation sample twice, so its row is left out instead.
    action = "mask" if log and config.bad_samples == "substitute" else config.bad_samples
    folder = config.log_folder
    pipeline = Pipeline(
        data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        reshuffle=None if log else config.reshuffle,  # validation is not shuffled
        cache_dir=config.cache_dir,
        max_cache_bytes=config.max_cache_bytes,
        decode=decode,
        batching=_batching(config, cost, is_validation=bool(log)),
        bad_samples=BadSamplePolicy(
            action=action,
            max_fraction=config.max_bad_fraction,
            shards=config.substitute_bad_shards,
            quarantine=str(Path(folder, log)) if folder else None,
        ),
        **pipeline_settings,
    )
    return Loader(
        pipeline,
        num_workers=config.num_workers,
        rows_per_rank=config.rows_per_rank or "balanced",
        world=world,
        on_change=config.on_change,
    )


def cost_of(model: Any) -> Cost | None:
    """Return what rows of packs cost a model, from its config; None: it takes no packs."""
    vlm = getattr(model, "vlm", None)
    return None if vlm is None else Cost.from_config(vlm.config)


def _batching(config: TrainConfig, cost: Cost | None, *, is_validation: bool) -> Flat | Pack | None:
    """Return how the samples of a rank become its batch; None: padded rows.

    Validation data needs no plan: its loss is the same with one sample a row.
    """
    if config.pack is not None and not is_validation:
        return Pack(config.pack, plan=config.plan, weights_of=config.weights_of, cost=cost)
    return Flat() if config.is_flat else None
