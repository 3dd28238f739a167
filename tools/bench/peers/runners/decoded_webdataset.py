"""webdataset: shards and samples shuffled, batches made in the workers, WebLoader."""

from __future__ import annotations

from typing import Any

import webdataset as wds

from tools.bench.peers.runners.decoded import Settings, sample_work, serve
from tools.bench.peers.runners.tars import link_tars, tars_in


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    work = sample_work(settings)

    def prepare_sample(sample: tuple[Any, Any]) -> tuple[Any, ...]:
        fields = work(*sample)
        return fields["image"], fields["input_ids"], fields["attention_mask"]

    dataset = wds.WebDataset(tars_in(folder), shardshuffle=100, seed=0)
    dataset = dataset.shuffle(settings.shuffle_buffer)
    if settings.work == "torchvision":
        dataset = dataset.decode("pil")
    dataset = dataset.to_tuple("jpg", "txt").map(prepare_sample)
    dataset = dataset.batched(settings.batch_size, partial=False)
    return wds.WebLoader(dataset, batch_size=None, num_workers=settings.num_workers)


if __name__ == "__main__":
    serve(link_tars, make, fields=lambda batch: (batch[0], batch[1]))
