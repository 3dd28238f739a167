"""Save a run and resume it: checkpoints in a local folder or an object store.

    loop.fit -> `resume_training` before the first step, `save_training` after some steps

A checkpoint is one file, such as ``step-00000012.pt``. It is written completely or not at all, and
verified when it is loaded. ``torch.load(path, weights_only=True)`` opens it anywhere. That runs no
code from the file.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmstream.errors import StateError, escaped
from mmstream.loader.device import DeviceLoader
from mmstream.state import parse_state
from mmstream.storage import RemoteStore, Store
from mmstream.storage.local import remove_temporaries
from mmstream.train.config import Precision
from mmstream.train.distributed import TrainProcess

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{8,})\.pt")
"""The file names of checkpoints, as `checkpoint_name` makes them."""

KEPT = 2
"""Checkpoints of a run that are kept. With two, it survives damage to the newest."""

_WRITE_TEST = ".write-test"
"""An object that tells whether checkpoints can be written. No listing shows it."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Attributes:
        num_steps: optimizer steps done since the first start.
        content: tensors and plain values, in dicts and lists.
    """

    num_steps: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """The training state besides the data: what a step changes and a checkpoint holds."""

    model: Any
    """The bare module: an `nn.Module` with the methods of `mmstream.train.models.Trainable`."""
    parallel: Any
    """The module to call in training: `model`, wrapped in DDP when there are several ranks."""
    optimizer: torch.optim.Optimizer
    precision: Precision

    def state_dict(self) -> dict[str, Any]:
        """Return the states of model and optimizer, for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def checkpoint_name(num_steps: int) -> str:
    """Return the file name of a checkpoint. Names sort in the order of steps, up to 99,999,999."""
    return f"step-{num_steps:08d}.pt"


def require_writable(store: Store) -> None:
    """Write and remove a small object, where the store is remote. A folder is not touched.

    Without the right to write, a run would lose all steps up to its first checkpoint.

    Raises:
        ConfigError: the store can only be read.
        FileNotFoundError: there is no such bucket.
        StorageError: the store refuses it, or failed after retries.
    """
    if isinstance(store, RemoteStore):
        store.write(_WRITE_TEST, b"mmstream")
        store.remove(_WRITE_TEST)


def list_checkpoints(store: Store) -> list[int]:
    """Return the steps of all checkpoints in a store, damaged ones included, in rising order."""
    matches = map(NAME.fullmatch, store.list())
    return sorted(int(match[1]) for match in matches if match is not None)


def save_checkpoint(store: Store, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint, then remove all but the newest `keep` (1 or more).

    Checkpoints of later steps are removed too: they are damaged, or this run would have resumed
    from them. Half-written files and parts of uploads are removed as well: a run has only one
    writer, so they belong to a killed one.

    Args:
        store: the folder or prefix of the checkpoints.
        checkpoint: what to write. It goes out while it is made, so it is not held a second time.
        keep: number of checkpoints to keep, this one included.

    Raises:
        StorageError: the storage failed after retries. Then no checkpoint was removed.
    """
    folder, names = store.local_path(""), r"step-\d+\.pt"
    if folder is not None:
        remove_temporaries(Path(folder), names)  # each as large as a checkpoint
    if isinstance(store, RemoteStore):
        store.remove_uploads(names)
    with store.create(checkpoint_name(checkpoint.num_steps)) as file:
        try:
            torch.save(checkpoint.content, file)
        except RuntimeError as error:
            # After a write that failed, torch complains of the position in the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    steps = list_checkpoints(store)
    older = [step for step in steps if step < checkpoint.num_steps]
    later = [step for step in steps if step > checkpoint.num_steps]
    for step in [*older[: max(0, len(older) - keep + 1)], *later]:
        store.remove(checkpoint_name(step))


def load_checkpoint(store: Store, num_steps: int) -> Checkpoint:
    """Load one checkpoint, with its tensors on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint of this step.
        StateError: the checkpoint is damaged.
        StorageError: the storage failed after retries.
    """
    name = checkpoint_name(num_steps)
    data = store.read(name)
    try:
        # torch does not verify the checksums of the zip: a flipped bit would change a weight.
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
            # One flipped bit marks a record as a folder. torch would leave its memory unset.
            folders = [item.filename for item in archive.infolist() if item.external_attr & 0x10]
            damaged = damaged or next(iter(folders), None)
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
    if not isinstance(content, dict):
        raise StateError(
            f"{store.url_of(name)}: damaged checkpoint: a {type(content).__name__}, not a dict"
        )
    return Checkpoint(num_steps, content)


def load_newest(store: Store) -> Checkpoint | None:
    """Load the newest good checkpoint; None when the store has no checkpoints.

    Each damaged checkpoint is skipped with a warning.

    Raises:
        StateError: all checkpoints are damaged. A run that started over would remove them.
        StorageError: the storage failed after retries.
    """
    steps = list_checkpoints(store)
    for step in reversed(steps):
        try:
            return load_checkpoint(store, step)
        except StateError as error:
            logger.warning("%s; trying the previous checkpoint", error)
    if steps:
        raise StateError(
            f"{store.url}: all {len(steps)} checkpoints are damaged; move them away to start over"
        )
    return None


def loader_state(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the loader's state that a checkpoint holds.

    Raises:
        StateError: it holds none. The message begins with `source`.
    """
    try:
        return parse_state(content["loader"], source)
    except (KeyError, TypeError):
        raise StateError(f"{source}: a checkpoint without a loader's state") from None


def save_training(
    store: Store,
    trained: Trained,
    num_steps: int,
    state: dict[str, Any],
    process: TrainProcess,
) -> None:
    """Save a run after an optimizer step. Only rank 0 writes."""
    if process.rank == 0:
        content = {**trained.state_dict(), "loader": json.dumps(state)}
        save_checkpoint(store, Checkpoint(num_steps, content), keep=KEPT)


def resume_training(
    store: Store, trained: Trained, batches: DeviceLoader, process: TrainProcess
) -> int:
    """Load the newest good checkpoint into model and loader.

    Rank 0 chooses the checkpoint for all ranks, so that all resume from the same step.

    Returns:
        The optimizer steps of that checkpoint; 0 when there is none.

    Raises:
        StateError: all checkpoints are damaged, or the newest good one belongs to another model or
            other data.
        ConfigError: on every rank, where only some of them can resume. Names them.
    """
    checkpoint = load_newest(store) if process.rank == 0 else None
    chosen = 0 if checkpoint is None else checkpoint.num_steps  # 0 on all other ranks
    num_steps = int(process.sum_over_ranks(chosen).item())
    if num_steps == 0:
        return 0
    try:
        _load(checkpoint or load_checkpoint(store, num_steps), store, trained, batches)
    except (StateError, OSError) as error:
        process.check_consistency({"resuming": f"refused ({error})"})
        raise
    process.check_consistency({"resuming": "possible"})
    if process.rank == 0:
        logger.info("resuming from %s, step %d", store.url, num_steps)
    return num_steps


def _load(checkpoint: Checkpoint, store: Store, trained: Trained, batches: DeviceLoader) -> None:
    """Load a checkpoint into model and loader.

    Raises:
        StateError: it belongs to another model or to other data.
    """
    try:
        trained.load_state_dict(checkpoint.content)
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = escaped(" ".join(str(error).split()), 300)
        raise StateError(
            f"{store.url}: step {checkpoint.num_steps} is of another model: {reason}; give the "
            "settings that it was trained with (model=, image_size=, max_length=), or another "
            "folder (out=)"
        ) from error
    try:
        state = loader_state(checkpoint.content, "its loader's state")
        batches.load_state_dict(state)
    except StateError as error:
        raise StateError(f"{store.url}: step {checkpoint.num_steps}: {error}") from error
