"""MosaicML Streaming: its MDS shards, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.decoded import Prepared, Settings, sample_work, samples_of, serve

import_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Captioned(StreamingDataset):  # type: ignore[misc]
    """A dataset that does the work on each sample."""

    def __init__(self, folder: str, settings: Settings) -> None:
        super().__init__(local=folder, shuffle=True, shuffle_seed=0, batch_size=settings.batch_size)
        self.work = sample_work(settings)

    def __getitem__(self, index: int) -> Prepared:
        """Return a decoded sample."""
        sample = super().__getitem__(index)
        return self.work(sample["jpg"], sample["txt"])


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    return StreamingDataLoader(
        Captioned(folder, settings),
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
    )


def prepare(corpus: str, folder: str) -> None:
    """Write MDS shards of the default size."""
    with MDSWriter(out=folder, columns={"jpg": "bytes", "txt": "str"}) as out:
        for sample in samples_of(corpus):
            out.write(sample)


if __name__ == "__main__":
    clean_stale_shared_memory()  # of earlier runs, as its documentation advises
    serve(prepare, make)
