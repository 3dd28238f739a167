"""Checkpoints: whole or not at all, checked when read, in a local folder or an object store.

A checkpoint is one object, ``step-00000012.pt``: torch's zip of tensors and plain values, so that
``torch.load(path, weights_only=True)`` opens it anywhere and no code in it can run.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmstream.device.to_device import DeviceLoader
from mmstream.errors import StateError
from mmstream.storage import Store
from mmstream.train.config import TrainConfig
from mmstream.train.distributed import TrainProcess
from mmstream.train.step import Trained

__all__ = [
    "Checkpoint",
    "checkpoint_name",
    "list_checkpoints",
    "load_checkpoint",
    "load_newest",
    "resume_training",
    "save_checkpoint",
    "save_training",
]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """What is saved after an optimizer step.

    Attributes:
        num_steps: optimizer steps done.
        content: tensors and plain values in dicts and lists.
    """

    num_steps: int
    content: dict[str, Any]


def checkpoint_name(num_steps: int) -> str:
    """Return the name of the checkpoint after this many steps; names sort as steps do."""
    return f"step-{num_steps:08d}.pt"


def list_checkpoints(store: Store) -> list[int]:
    """Return the steps of all checkpoints in a store, good or damaged, in rising order."""
    return sorted(int(found[1]) for name in store.list() if (found := _NAME.fullmatch(name)))


def save_checkpoint(store: Store, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint, then remove all but the newest `keep` (1 or more).

    Those of later steps are removed too: a run that goes past them has found them damaged. So is
    what is half written in a local folder: a run has one writer, so that one was killed.

    Raises:
        StorageError: the storage failed after retries; no checkpoint was removed then.
    """
    folder = store.local_path("")
    if folder is not None:
        for path in Path(folder).glob(".step-*.pt.tmp"):  # each as large as a checkpoint
            path.unlink(missing_ok=True)
    buffer = io.BytesIO()
    torch.save(checkpoint.content, buffer)
    store.write(checkpoint_name(checkpoint.num_steps), buffer.getvalue())
    older = [step for step in list_checkpoints(store) if step < checkpoint.num_steps]
    later = [step for step in list_checkpoints(store) if step > checkpoint.num_steps]
    for step in [*older[: max(0, len(older) - keep + 1)], *later]:
        store.remove(checkpoint_name(step))


def load_checkpoint(store: Store, num_steps: int) -> Checkpoint:
    """Return one checkpoint, its tensors on the CPU.

    Raises:
        FileNotFoundError: there is none of this step.
        StateError: it is damaged.
        StorageError: the storage failed after retries.
    """
    name = checkpoint_name(num_steps)
    data = store.read(name)
    try:
        # torch does not look at the zip's checksums, so one flipped bit would go into the weights.
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
            # torch's reader leaves the memory of a "folder" as it was: one flipped attribute bit.
            odd = [item.filename for item in archive.infolist() if item.external_attr & 0x10]
            damaged = damaged or next(iter(odd), None)
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")  # noqa: TRY301
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        zlib.error,
    ) as error:
        raise StateError(f"{store.url_of(name)}: damaged checkpoint: {error}") from error
    return Checkpoint(num_steps, content)


def load_newest(store: Store) -> Checkpoint | None:
    """Return the newest good checkpoint, or None in a store without any.

    Damaged ones are passed over with a warning.

    Raises:
        StateError: there are checkpoints and all are damaged: starting anew would remove them.
        StorageError: the storage failed after retries.
    """
    steps = list_checkpoints(store)
    for step in reversed(steps):
        try:
            return load_checkpoint(store, step)
        except StateError as error:
            logger.warning("%s; trying the one before", error)
    if steps:
        raise StateError(f"{store.url}: all {len(steps)} checkpoints are damaged; move them away")
    return None


def save_training(
    store: Store,
    trained: Trained,
    num_steps: int,
    loader_state: dict[str, Any],
    config: TrainConfig,
    process: TrainProcess,
) -> None:
    """Save a run after an optimizer step, on rank 0."""
    if process.rank == 0:
        content = {**trained.state_dict(), "loader": json.dumps(loader_state)}
        save_checkpoint(store, Checkpoint(num_steps, content), keep=config.keep_checkpoints)


def resume_training(
    store: Store, trained: Trained, batches: DeviceLoader, process: TrainProcess
) -> int:
    """Load the newest good checkpoint into model and loader; return its steps, 0 without one.

    Rank 0 chooses and the others follow, so that no two ranks go on from different steps.

    Raises:
        StateError: all checkpoints are damaged, or the newest good one is of another run.
    """
    found = load_newest(store) if process.rank == 0 else None
    if process.world_size > 1:
        choice = torch.tensor(-1 if found is None else found.num_steps, device=process.device)
        dist.broadcast(choice, src=0)
        if process.rank != 0 and choice.item() >= 0:
            found = load_checkpoint(store, int(choice.item()))
    if found is None:
        return 0
    try:
        trained.load_state_dict(found.content)
    except (KeyError, RuntimeError, ValueError) as error:
        raise StateError(
            f"{store.url}: step {found.num_steps} is of another model: "
            f"{_difference(trained, found.content) or str(error).partition(chr(10))[0]}; give the "
            "settings that it was trained with (model=, image_size=, max_length=, tokenizer=, "
            "freeze=), or another folder (out=)"
        ) from error
    try:
        batches.load_state_dict(json.loads(found.content["loader"]))
    except StateError as error:
        raise StateError(f"{store.url}: step {found.num_steps}: {error}") from error
    if process.rank == 0:
        logger.info("going on from %s, step %d", store.url, found.num_steps)
    return found.num_steps


def _difference(trained: Trained, content: dict[str, Any]) -> str:
    """Say in a line in which weights a checkpoint differs from the model; nothing if in none."""
    ours, saved = trained.model.state_dict(), content.get("model", {})
    shapes = [name for name in ours if name in saved and ours[name].shape != saved[name].shape]
    parts = {
        "are missing in it": [name for name in ours if name not in saved],
        "are unknown here": [name for name in saved if name not in ours],
        "have another shape": shapes,
    }
    told = [f"{len(names):,} weights {what} ({names[0]}" for what, names in parts.items() if names]
    if shapes:
        was, now = (tuple(weights[shapes[0]].shape) for weights in (saved, ours))
        told[-1] += f": {was} there, {now} here"
    return "".join(f"{part}), " for part in told).removesuffix(", ")
