"""LitData: its optimized chunks, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

from mmstream._torchvision import import_torchvision
from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, decode_jpeg, samples_of, serve

import_torchvision()

from litdata import StreamingDataLoader, StreamingDataset, optimize  # noqa: E402


class Images(StreamingDataset):  # type: ignore[misc]
    """A dataset that decodes with the shared function."""

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return the decoded image and its key."""
        sample = super().__getitem__(index)
        return {"image": decode_jpeg(bytes(sample["jpg"])), "key": sample["key"]}


def make(folder: str) -> Any:
    """Return a new loader."""
    dataset = Images(folder, shuffle=True, drop_last=True, seed=0)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=NUM_WORKERS)


def prepare(corpus: str, folder: str) -> None:
    """Write chunks of the size in its documentation."""
    optimize(fn=samples_of, inputs=[corpus], output_dir=folder, chunk_bytes="64MB", num_workers=1)


if __name__ == "__main__":
    serve(prepare, make, StreamingDataLoader.state_dict, StreamingDataLoader.load_state_dict)
