"""The steps of a run on packs, trained unpacked: the same samples, one a row, with padding.

The samples of a step are read anew by what its lineage says. So nothing of the packed batch goes
into the unpacked one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch

import mmstream as mm
from mmstream.dataset.source import read_sample
from mmstream.decoding.sample import decode_sample
from mmstream.loader.device import Normalizer
from mmstream.train import TrainConfig
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import micro_batches_of, prepare, seed_step, train_step
from mmstream.train.models import open_model
from mmstream.types import Batch

PROCESS = TrainProcess(torch.device("cpu"))


class Step(NamedTuple):
    """An optimizer step on padded rows, and what the packed batch gives with the same weights."""

    packs: list[list[str]]
    """The keys of the samples of each pack."""
    loss: float
    grad_norm: float
    packed_loss: float
    least_cosine: float
    """Between the two gradients: the least of all parameters."""
    num_images: int
    fill: float


def train_unpacked(config: TrainConfig, pipeline: mm.Pipeline) -> Iterator[Step]:
    """Train on one rank and yield its steps, of packs of `pipeline`."""
    model, _ = open_model(config, 1)
    decode: Any = pipeline.decode
    normalize = Normalizer(model.normalize, torch.float32, torch.device("cpu"))
    dataset: Any = pipeline.dataset
    max_tokens = pipeline.batching.max_tokens  # type: ignore[union-attr]
    pad = decode.text.tokenizer.pad_token_id
    trained = prepare(config, model, PROCESS)
    with closing(mm.Loader(pipeline, world=mm.World(0, 1))) as loader:
        for number, batch in zip(range(config.max_steps or 0), loader, strict=False):
            batch["image"] = [normalize(image) for image in batch["image"]]
            packed_loss, packed = gradients(model, micro_batches_of(batch, 1, model))
            refs = batch["__lineage__"].shown
            samples = [decode_sample(read_sample(dataset, *ref), decode) for ref in refs]
            padded = mm.collate(samples, pad_token_id=pad)
            padded["image"] = [normalize(image) for image in padded["image"]]
            padded["__valid__"] = torch.ones(len(samples), dtype=torch.bool)
            seed_step(config.seed, number, 0)
            weight = model.weight_of(padded)
            loss, norm = train_step(trained, [padded], weight, config.lr, config, PROCESS)
            cosines = [
                torch.nn.functional.cosine_similarity(
                    parameter.grad.flatten().double(), packed[name].flatten().double(), dim=0
                ).item()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None and parameter.grad.norm() > 1e-7
            ]
            packs: list[list[str]] = [[] for _ in batch["__valid__"]]
            for row, sample in zip(batch["__lineage__"].rows, samples, strict=True):
                packs[row].append(sample["__key__"])
            yield Step(
                packs,
                loss.item(),
                norm.item(),
                packed_loss,
                min(cosines),
                len(batch["image"]),
                batch["num_tokens"] / (len(packs) * max_tokens),
            )


def are_packs_of(packs: list[list[str]], keys_of_ranks: list[list[str]]) -> bool:
    """Tell whether ranks had these packs and nothing else, whichever rank had which of them.

    The samples of a pack are neighbours in what its rank has logged.
    """
    num_keys = sum(map(len, keys_of_ranks))
    texts = [f" {' '.join(keys)} " for keys in keys_of_ranks]
    return num_keys == sum(map(len, packs)) and all(
        any(f" {' '.join(pack)} " in text for text in texts) for pack in packs
    )


def gradients(model: Any, parts: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a batch in parts and its gradient, and leave the model as it was."""
    model.zero_grad()
    weight = sum(model.weight_of(part) for part in parts)
    total = 0.0
    for part in parts:
        loss = model(part)[0] / weight
        loss.backward()
        total += loss.item()
    own = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return total, own
