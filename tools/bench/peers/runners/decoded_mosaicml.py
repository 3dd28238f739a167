"""MosaicML Streaming: its own MDS shards, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.decoded import Prepared, Settings, sample_work, samples_of, serve

import_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


class Captioned(StreamingDataset):  # type: ignore[misc]
    """Does the work on each sample."""

    def __init__(self, folder: str, settings: Settings) -> None:
        super().__init__(local=folder, shuffle=True, shuffle_seed=0, batch_size=settings.batch_size)
        self.work = sample_work(settings)

    def __getitem__(self, at: int) -> Prepared:
        """Return a decoded sample."""
        sample = super().__getitem__(at)
        return self.work(sample["jpg"], sample["txt"])


def make(folder: str, settings: Settings) -> Any:
    """Return a fresh loader."""
    return StreamingDataLoader(
        Captioned(folder, settings),
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
    )


def prepare(corpus: str, folder: str) -> None:
    """Write MDS shards of its default size."""
    with MDSWriter(out=folder, columns={"jpg": "bytes", "txt": "str"}) as out:
        for sample in samples_of(corpus):
            out.write(sample)


if __name__ == "__main__":
    clean_stale_shared_memory()  # what the run before left behind, as its documentation advises
    serve(prepare, make)
