"""mmstream: the tars as they are; the state is the loader's ``state_dict``.

The variable BENCH_CONTEXT chooses how workers start. "forkserver" is the default, and each run
imports torch once more for it. With "fork", as in the peers, workers inherit the imports.
"""

from __future__ import annotations

import os
from operator import itemgetter

from mmstream import Decode, Loader, Pipeline, open_dataset
from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, decoder, serve
from tools.bench.peers.runners.tars import link_tars


def make(folder: str) -> Loader:
    """Return a fresh loader, which shuffles by default."""
    pipeline = Pipeline(open_dataset(folder), global_batch_size=BATCH, decode=Decode(image=decoder))
    context = os.environ.get("BENCH_CONTEXT", "forkserver")
    return Loader(pipeline, num_workers=NUM_WORKERS, multiprocessing_context=context)  # type: ignore[arg-type]


def prepare(corpus: str, folder: str) -> None:
    """Link the tars and write an index and a manifest, as a conversion does."""
    from mmstream.dataset.index_tars import index_tars

    link_tars(corpus, folder)
    index_tars(folder, progress=False)


if __name__ == "__main__":
    serve(
        prepare,
        make,
        Loader.state_dict,
        Loader.load_state_dict,
        fields=itemgetter("image", "__key__"),
    )
