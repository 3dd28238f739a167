"""LitData: its optimized chunks, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.decoded import Prepared, Settings, sample_work, samples_of, serve

import_torchvision()

from litdata import StreamingDataLoader, StreamingDataset, optimize  # noqa: E402


class Captioned(StreamingDataset):  # type: ignore[misc]
    """A dataset that does the work on each sample."""

    def __init__(self, folder: str, settings: Settings) -> None:
        super().__init__(folder, shuffle=True, drop_last=True, seed=0)
        self.work = sample_work(settings)

    def __getitem__(self, index: Any) -> Prepared:
        """Return a decoded sample."""
        sample = super().__getitem__(index)
        return self.work(bytes(sample["jpg"]), sample["txt"])


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    return StreamingDataLoader(
        Captioned(folder, settings),
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
    )


def prepare(corpus: str, folder: str) -> None:
    """Write chunks of the size in its documentation."""
    optimize(fn=samples_of, inputs=[corpus], output_dir=folder, chunk_bytes="64MB", num_workers=1)


if __name__ == "__main__":
    serve(prepare, make)
