"""Replay: what any past or future step of a run delivers, from its state and the manifest alone.

    state -> order -> rows of a step [-> keys, one tar header a sample]

No payload is read, so a step of a corpus of any size is told in milliseconds. What was shown in
the place of a bad sample is only in the training logs (`training_log.py`) and the quarantine file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mmstream.audit.read_keys import read_keys
from mmstream.dataset.source import ShardSource
from mmstream.errors import StateError
from mmstream.order import AnyOrder
from mmstream.storage import join_url, open_store, split_url

__all__ = ["PlannedRow", "parse_state", "read_state", "replay"]


class PlannedRow(NamedTuple):
    """One row of a step, as the order says."""

    epoch: int
    step: int
    row: int
    """Of the global batch."""
    shard: str
    index: int  # type: ignore[assignment]  # the field's name wins over tuple.index
    valid: bool
    """False for the padding of a last, partial step."""
    key: str | None
    """None where it was not asked for, or cannot be read."""


def replay(
    dataset: ShardSource,
    order: AnyOrder,
    epoch: int,
    steps: Iterable[int],
    rows: tuple[int, int] | None = None,
    *,
    keys: bool = False,
) -> Iterator[PlannedRow]:
    """Yield the rows of steps as planned, in the order of the global batch.

    Args:
        dataset: names the shards, and holds the keys.
        order: of the run, see `state.order_of_state`.
        epoch: any, past or future.
        steps: of that epoch.
        rows: [start, stop), a rank's (`mmstream.world.rows_of_rank`); None: all.
        keys: whether to read the samples' first headers for their keys.

    Raises:
        ConfigError: no such epoch or step.
        StorageError: storage failed after retries, with `keys`.
    """
    start, stop = (0, order.global_batch_size) if rows is None else rows
    for step in steps:
        columns = [column[start:stop].tolist() for column in order.refs(epoch, step)]
        refs = list(zip(columns[0], columns[1], strict=True))
        found = read_keys(dataset, refs) if keys else [None] * len(refs)
        for row, (shard, index), valid, key in zip(
            range(start, stop), refs, columns[2], found, strict=True
        ):
            yield PlannedRow(epoch, step, row, dataset.name_of(shard), index, valid, key)


def parse_state(text: str | bytes, source: str) -> dict[str, Any]:
    """Return a state from its JSON. Raises StateError, with the name of its source."""
    try:
        state = json.loads(text)
    except ValueError as error:
        raise StateError(f"{source}: not the JSON of a state: {error}") from None
    if not isinstance(state, dict):
        raise StateError(f"{source}: not a state of a Loader")
    return state


def read_state(source: str) -> dict[str, Any]:
    """Return the state of a Loader from where it was saved, local or ``s3://``.

    Args:
        source: a JSON file, a checkpoint of ``mmstream train``, or the folder that it trained to,
            of which the newest good checkpoint counts.

    Raises:
        StateError: no state there.
        FileNotFoundError, StorageError: as the storage.
    """
    folder, name = split_url(open_store(source).url)
    store = open_store(folder)
    if name.endswith(".pt"):
        return _of_checkpoint(folder, name)
    if not store.exists(name):
        return _of_newest(source)
    return parse_state(store.read(name), source)


def _of_checkpoint(folder: str, name: str) -> dict[str, Any]:
    from mmstream.train.checkpoint import checkpoint_name, load_checkpoint

    digits = "".join(filter(str.isdigit, name)) or "0"
    if checkpoint_name(int(digits)) != name:
        raise StateError(f"{name}: no checkpoint of `mmstream train`; they are step-NNNNNNNN.pt")
    return _loader_state(load_checkpoint(open_store(folder), int(digits)).content, name)


def _of_newest(source: str) -> dict[str, Any]:
    from mmstream.train.checkpoint import load_newest

    for url in (join_url(source, "checkpoints"), source):
        found = load_newest(open_store(url))
        if found is not None:
            return _loader_state(found.content, url)
    raise StateError(f"{source}: neither a state's JSON nor a folder with checkpoints")


def _loader_state(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    try:
        return parse_state(content["loader"], source)
    except (KeyError, TypeError):
        raise StateError(f"{source}: a checkpoint without a loader's state") from None
