"""Megatron-Energon: the same tars after ``energon prepare``, with a task encoder for the work."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    WorkerConfig,
    batch_stack,
    get_loader,
    get_train_dataset,
    stateless,
)

from tools.bench.peers.runners.decoded import Settings, sample_work, serve
from tools.bench.peers.runners.tars import prepare_energon


@dataclass
class Encoded(Sample):  # type: ignore[misc]
    """A sample after the work on it."""

    image: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@dataclass
class EncodedBatch(Batch):  # type: ignore[misc]
    """A batch of encoded samples."""

    image: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """A dataset that does the work on each sample."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(encoded_sample_type=Encoded, raw_batch_type=EncodedBatch)
        self.work = sample_work(settings)
        uses_pillow = settings.work == "torchvision"
        self.decoder = SampleDecoder(image_decode="pilrgb") if uses_pillow else None

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: CaptioningSample) -> Encoded:
        """Decode image and text."""
        encoded: Encoded = Encoded.derive_from(sample, **self.work(sample.image, sample.caption))
        return encoded

    def batch(self, samples: list[Encoded]) -> EncodedBatch:
        """Stack the tensors; `from_samples` alone would leave them in lists."""
        names = ("image", "input_ids", "attention_mask")
        stacks = {
            name: batch_stack([getattr(sample, name) for sample in samples]) for name in names
        }
        batch: EncodedBatch = EncodedBatch.from_samples(samples, **stacks)
        return batch


def make(folder: str, settings: Settings) -> Any:
    """Return a new loader."""
    return get_loader(
        get_train_dataset(
            folder,
            batch_size=settings.batch_size,
            shuffle_buffer_size=settings.shuffle_buffer,
            max_samples_per_sequence=100,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=settings.num_workers),
            task_encoder=Encoder(settings),
        )
    )


if __name__ == "__main__":
    serve(prepare_energon, make, fields=attrgetter("image", "input_ids"))
