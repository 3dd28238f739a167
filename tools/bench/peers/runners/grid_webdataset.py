"""webdataset in `tools.bench.compare_grid`.

The variable GRID_VARIANT has one of three values. "stock": shards are split by node and by worker,
as in the documentation. "no check": the same with ``empty_check=False``, so that workers without a
shard raise no error. "resampled": an endless random sequence of shards, cut to the same number of
steps by ``with_epoch``.

`ignore_and_continue` drops bad samples. `warn_and_continue` does the same, but sleeps half a second
for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset as wds

from tools.bench.peers.runners.grid import GLOBAL_BATCH, Cell, Delivered, serve


def key_of(sample: dict[str, Any]) -> str:
    """Return the key of a decoded sample."""
    return str(sample["__key__"])


def batches(corpus: str, cell: Cell) -> Iterator[Delivered]:
    """Yield the batches of this rank in one epoch."""
    variant = os.environ.get("GRID_VARIANT", "stock")
    tars = sorted(str(path) for path in Path(corpus).glob("*.tar"))
    rows = GLOBAL_BATCH // cell.world_size
    dataset = (
        wds.WebDataset(
            tars,
            resampled=variant == "resampled",
            shardshuffle=False if variant == "resampled" else 100,
            nodesplitter=wds.split_by_node,
            workersplitter=wds.split_by_worker,
            detshuffle=True,
            seed=0,
            empty_check=variant == "stock",
            handler=wds.ignore_and_continue,
        )
        .compose(wds.detshuffle(100, seed=0))
        .decode("pil", handler=wds.ignore_and_continue)
        .map(key_of, handler=wds.ignore_and_continue)
        .batched(rows, collation_fn=list)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=cell.num_workers)
    if variant == "resampled":
        loader = loader.with_epoch(int(os.environ["GRID_SAMPLES"]) // GLOBAL_BATCH)
    for keys in loader:
        yield Delivered(list(keys))


if __name__ == "__main__":
    serve(batches)
