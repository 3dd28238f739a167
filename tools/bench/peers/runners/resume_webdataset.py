"""webdataset in torchdata's StatefulDataLoader, which replays an iterable that has no state.

Shuffled by `detshuffle`, webdataset's deterministic form: with plain `shuffle` a replay would bring
other samples than those that were seen.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import webdataset as wds
from torchdata.stateful_dataloader import StatefulDataLoader

from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, SHUFFLE_BUFFER, picture, serve
from tools.bench.peers.runners.tars import link_tars, tars_in


def make(folder: str) -> Any:
    """Return a fresh loader."""
    dataset = (
        wds.WebDataset(tars_in(folder), shardshuffle=100, detshuffle=True, seed=0)
        .compose(wds.detshuffle(SHUFFLE_BUFFER, seed=0))
        .to_tuple("jpg", "__key__")
        .map_tuple(picture)
        .batched(BATCH, partial=False)
    )
    return StatefulDataLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)


if __name__ == "__main__":
    serve(
        link_tars,
        make,
        StatefulDataLoader.state_dict,
        StatefulDataLoader.load_state_dict,
        parts=itemgetter(0, 1),
    )
