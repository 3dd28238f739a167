"""mmstream in `tools.bench.compare_grid`."""

from __future__ import annotations

from collections.abc import Iterator

from mmstream import BadSamplePolicy, Decode, ImageDecoder, Loader, Pipeline, open_dataset
from tools.bench.peers.runners.grid import GLOBAL_BATCH, Cell, Delivered, serve


def batches(corpus: str, cell: Cell) -> Iterator[Delivered]:
    """Yield the batches of this rank in one epoch."""
    pipeline = Pipeline(
        open_dataset(corpus),
        global_batch_size=GLOBAL_BATCH,
        decode=Decode(image=ImageDecoder(size=8)),
        drop_last=False,
        bad_samples=BadSamplePolicy(max_fraction=1.0, max_consecutive=0, quarantine=None),
    )
    # fork, as in the other loaders, because a grid starts thousands of workers.
    loader = Loader(
        pipeline,
        num_workers=cell.num_workers,
        rows_per_rank="balanced",
        multiprocessing_context="fork",
    )
    for batch in loader:
        lineage = batch["__lineage__"]
        replaced = {record.row - lineage.start for record in lineage.bad}
        rows = enumerate(zip(batch["__key__"], batch["__valid__"].tolist(), strict=True))
        yield Delivered(
            [key for row, (key, valid) in rows if valid and row not in replaced],
            [f"{record.shard}[{record.index}]" for record in lineage.bad],
        )
    loader.close()


if __name__ == "__main__":
    serve(batches)
