"""Megatron-Energon: the same tars after ``energon prepare``, a task encoder that does the work."""

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
    """A batch of them."""

    image: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Does the work on each sample."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(encoded_sample_type=Encoded, raw_batch_type=EncodedBatch)
        self.work = sample_work(settings)
        # Its own decoder makes Pillow's pictures of bytes, or is left out.
        torchvision = settings.work == "torchvision"
        self.decoder = SampleDecoder(image_decode="pilrgb") if torchvision else None

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: CaptioningSample) -> Encoded:
        """Decode picture and text."""
        done = self.work(sample.image, sample.caption)
        encoded: Encoded = Encoded.derive_from(sample, **done)
        return encoded

    def batch(self, samples: list[Encoded]) -> EncodedBatch:
        """Stack the tensors, which `from_samples` by itself would leave in lists."""
        names = ("image", "input_ids", "attention_mask")
        stacks = {name: batch_stack([getattr(one, name) for one in samples]) for name in names}
        batch: EncodedBatch = EncodedBatch.from_samples(samples, **stacks)
        return batch


def make(folder: str, settings: Settings) -> Any:
    """Return a fresh loader."""
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
    serve(prepare_energon, make, parts=attrgetter("image", "input_ids"))
