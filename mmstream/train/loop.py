"""The training loop: read it from `run` down.

Every rank does the same steps on its rows of the same global batches. What is saved after an
optimizer step (weights, optimizer, the loader's state) is all that a run on another number of
ranks or workers needs to go on as if nothing had happened.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmstream.device import DeviceLoader, Normalize, to_device
from mmstream.errors import ConfigError, StateError
from mmstream.storage import Store, join_url, open_store
from mmstream.train.checkpoint import Checkpoint, load_checkpoint, load_newest, save_checkpoint
from mmstream.train.clip import ContrastiveClip, small_clip
from mmstream.train.config import TrainConfig, TrainResult
from mmstream.train.distributed import Place, leave_on_sigterm, process_group, share_threads
from mmstream.train.metrics import StepLog
from mmstream.train.tokenizer import open_tokenizer

__all__ = ["CLIP_NORMALIZE", "fit", "run"]

logger = logging.getLogger(__name__)

CLIP_NORMALIZE = Normalize(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
"""OpenAI CLIP's pixel statistics."""


def run(config: TrainConfig) -> TrainResult:
    """Open the data, join the other ranks and train: what `mmstream.train.train` calls."""
    with leave_on_sigterm(), process_group(config.device) as place:
        share_threads(config.num_workers)
        tokenizer = open_tokenizer(config.tokenizer)
        clip = small_clip(
            image_size=config.image_size,
            vocab_size=len(tokenizer),
            max_length=config.max_length,
            seed=config.seed,
        )
        with closing(_open_loader(config, tokenizer)) as loader:  # ends its workers
            batches = to_device(loader, place.device, normalize=CLIP_NORMALIZE)
            return fit(config, clip, batches, place)


def _open_loader(config: TrainConfig, tokenizer: Any) -> Any:
    import mmstream as mm

    pipeline = mm.Pipeline(
        mm.open_dataset(config.url),
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        decode=mm.Decode(
            image=mm.ImageDecoder(size=config.image_size),
            text=mm.TextDecoder(tokenizer, max_length=config.max_length, padding="longest"),
        ),
        on_bad=mm.SkipPolicy(quarantine=config.log_folder),
    )
    return mm.Loader(pipeline, num_workers=config.num_workers, rows_per_rank="balanced")


def fit(config: TrainConfig, clip: Any, batches: DeviceLoader, place: Place) -> TrainResult:
    """Train from the newest good checkpoint, or from the start, to the end of `config`.

    Args:
        config: settings; its `url` is not looked at.
        clip: a CLIPModel, the same on every rank.
        batches: this rank's rows, on its device.
        place: this process among the ranks.
    """
    num_rows = -(-config.global_batch_size // place.world_size)
    model = ContrastiveClip(clip, num_rows).to(place.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    store = open_store(join_url(config.out, "checkpoints"))
    num_steps = resumed_from = _resume(config, store, model, optimizer, batches, place)
    loss = None
    with StepLog(
        config.log_folder, rank=place.rank, world_size=place.world_size, num_steps=num_steps
    ) as log:
        parallel = _parallel(model, place)
        began = time.perf_counter()
        for batch in _all_epochs(batches, config, num_steps):
            arrived = time.perf_counter()
            loss = _step(parallel, optimizer, batch, place.device)
            num_steps += 1
            took = time.perf_counter() - began
            line = {
                "epoch": batch["__lineage__"].epoch,
                "step": batch["__lineage__"].step,
                "num_steps": num_steps,
                "loss": loss,
                "samples_per_s": round(config.global_batch_size / took, 1),
                "wait_fraction": round((arrived - began) / took, 3),
            }
            log.write(line | _samples(batch) if config.log_keys else line)
            state = batches.state_dict()
            last = state["epoch"] >= config.epochs or num_steps == config.max_steps
            if place.rank == 0 and (last or num_steps % config.checkpoint_every == 0):
                content = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": json.dumps(state),
                }
                save_checkpoint(store, Checkpoint(num_steps, content), keep=config.keep_checkpoints)
            began = time.perf_counter()
    return TrainResult(num_steps, resumed_from, loss, batches.state_dict())


def _all_epochs(
    batches: DeviceLoader, config: TrainConfig, num_steps: int
) -> Iterator[dict[str, Any]]:
    """Yield the batches that are left; the one after the last step is not even asked for."""
    limit = math.inf if config.max_steps is None else config.max_steps
    while batches.state_dict()["epoch"] < config.epochs and num_steps < limit:
        for batch in batches:
            yield batch
            num_steps += 1
            if num_steps == limit:
                return


def _samples(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what `log_keys` adds to a line: keys as shown and, where they differ, as planned."""
    keys, lineage = list(batch["__key__"]), batch["__lineage__"]
    if lineage.planned == lineage.shown:
        return {"keys": keys}
    return {"keys": keys, "planned": lineage.planned, "shown": lineage.shown}


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], device: torch.device
) -> float:
    """Do one optimizer step; return the loss of the global batch, the same on every rank."""
    if "image" not in batch or "image_row" in batch:
        raise ConfigError("train: CLIP takes exactly one image a sample; these have more or none")
    # bfloat16 where it is fast; it has float32's range, so no loss scaling is needed.
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(
            batch["image"], batch["input_ids"], batch["attention_mask"], batch["__valid__"]
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.item())


def _parallel(model: nn.Module, place: Place) -> nn.Module:
    """Wrap the model so that gradients are averaged over the ranks; alone it stays as it is."""
    if place.world_size == 1:
        return model
    device_ids = [place.device] if place.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)


def _resume(
    config: TrainConfig,
    store: Store,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DeviceLoader,
    place: Place,
) -> int:
    """Load the newest good checkpoint into all three; return its steps, 0 without one.

    Rank 0 chooses and the others follow, so that no two ranks go on from different steps.
    """
    found = load_newest(store) if place.rank == 0 else None
    if place.world_size > 1:
        choice = torch.tensor(-1 if found is None else found.num_steps, device=place.device)
        dist.broadcast(choice, src=0)
        if place.rank != 0 and choice.item() >= 0:
            found = load_checkpoint(store, int(choice.item()))
    if found is None:
        return 0
    try:
        model.load_state_dict(found.content["model"])
        optimizer.load_state_dict(found.content["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise StateError(
            f"{store.url}: step {found.num_steps} is of another model: {error}"
        ) from error
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = config.lr, config.weight_decay
    batches.load_state_dict(json.loads(found.content["loader"]))
    if place.rank == 0:
        logger.info("going on from %s, step %d", store.url, found.num_steps)
    return found.num_steps
