"""Read the state of a loader from where it was saved: a JSON file, a checkpoint or a folder.

``mmstream replay --state`` -> `read_state`
"""

from __future__ import annotations

from typing import Any

from mmstream.errors import StateError
from mmstream.state import parse_state
from mmstream.storage import join_url, open_store, split_url

MAX_STATE_BYTES = 64 << 20
"""Largest JSON file of a state."""


def read_state(source: str) -> dict[str, Any]:
    """Return a loader's state from where it was saved, locally or at ``s3://``.

    Args:
        source: a JSON file, a checkpoint of ``mmstream train``, or the ``out`` folder of a run. A
            folder gives the state of its newest good checkpoint.

    Raises:
        StateError: there is no loader's state at `source`.
        FileNotFoundError: there is no such checkpoint.
        StorageError: the storage failed after retries.
    """
    folder, name = split_url(open_store(source).url)
    store = open_store(folder)
    if not name.endswith(".pt") and store.exists(name):
        return parse_state(store.read(name, max_bytes=MAX_STATE_BYTES), source)
    # These import torch.
    from mmstream.train.checkpoint import NAME, load_checkpoint, load_newest, loader_state

    if name.endswith(".pt"):
        match = NAME.fullmatch(name)
        if match is None:
            raise StateError(
                f"{name}: not a checkpoint of `mmstream train`, which are named step-NNNNNNNN.pt"
            )
        return loader_state(load_checkpoint(store, int(match[1])).content, name)
    for url in (join_url(source, "checkpoints"), source):
        checkpoint = load_newest(open_store(url))
        if checkpoint is not None:
            return loader_state(checkpoint.content, url)
    raise StateError(f"{source}: neither a state's JSON nor a folder with checkpoints")
