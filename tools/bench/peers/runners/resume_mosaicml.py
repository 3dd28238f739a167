"""MosaicML Streaming: its MDS shards, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, decode_jpeg, samples_of, serve

import_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Images(StreamingDataset):  # type: ignore[misc]
    """A dataset that decodes with the shared function."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the decoded image and its key."""
        sample = super().__getitem__(index)
        return {"image": decode_jpeg(sample["jpg"]), "key": sample["key"]}


def make(folder: str) -> Any:
    """Return a new loader."""
    dataset = Images(local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=NUM_WORKERS)


def prepare(corpus: str, folder: str) -> None:
    """Write MDS shards of the default size."""
    with MDSWriter(out=folder, columns={"key": "str", "jpg": "bytes"}) as out:
        for sample in samples_of(corpus):
            out.write(sample)


if __name__ == "__main__":
    clean_stale_shared_memory()  # of earlier runs, as its documentation advises
    serve(prepare, make, StreamingDataLoader.state_dict, StreamingDataLoader.load_state_dict)
