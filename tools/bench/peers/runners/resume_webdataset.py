"""webdataset in torchdata's StatefulDataLoader, which replays an iterable without a state.

The shuffle is `detshuffle`, webdataset's deterministic one. With plain `shuffle`, a replay would
deliver other samples.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import webdataset as wds
from torchdata.stateful_dataloader import StatefulDataLoader

from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, SHUFFLE_BUFFER, decode_jpeg, serve
from tools.bench.peers.runners.tars import link_tars, tars_in


def make(folder: str) -> Any:
    """Return a new loader."""
    dataset = (
        wds.WebDataset(tars_in(folder), shardshuffle=100, detshuffle=True, seed=0)
        .compose(wds.detshuffle(SHUFFLE_BUFFER, seed=0))
        .to_tuple("jpg", "__key__")
        .map_tuple(decode_jpeg)
        .batched(BATCH, partial=False)
    )
    return StatefulDataLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)


if __name__ == "__main__":
    serve(
        link_tars,
        make,
        StatefulDataLoader.state_dict,
        StatefulDataLoader.load_state_dict,
        fields=itemgetter(0, 1),
    )
