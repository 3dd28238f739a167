"""MosaicML Streaming: its own MDS shards, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, picture, samples_of, serve

import_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Pictures(StreamingDataset):  # type: ignore[misc]
    """Decodes with the same function as all."""

    def __getitem__(self, at: int) -> dict[str, Any]:
        """Return the decoded picture and its key."""
        sample = super().__getitem__(at)
        return {"image": picture(sample["jpg"]), "key": sample["key"]}


def make(folder: str) -> Any:
    """Return a fresh loader."""
    dataset = Pictures(local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=NUM_WORKERS)


def prepare(corpus: str, folder: str) -> None:
    """Write MDS shards of its default size."""
    with MDSWriter(out=folder, columns={"key": "str", "jpg": "bytes"}) as out:
        for sample in samples_of(corpus):
            out.write(sample)


if __name__ == "__main__":
    clean_stale_shared_memory()  # what the run before left behind, as its documentation advises
    serve(prepare, make, StreamingDataLoader.state_dict, StreamingDataLoader.load_state_dict)
