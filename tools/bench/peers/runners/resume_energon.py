"""Megatron-Energon: the same tars after ``energon prepare``, with a savable loader."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from megatron.energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from tools.bench.peers.runners.resume import BATCH, NUM_WORKERS, SHUFFLE_BUFFER, decode_jpeg, serve
from tools.bench.peers.runners.tars import prepare_energon


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Decodes with the shared function instead of Energon's decoder."""

    decoder = None

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        """Decode the image."""
        sample.image = decode_jpeg(sample.image)
        return sample


def make(folder: str) -> Any:
    """Return a new loader."""
    return get_savable_loader(
        get_train_dataset(
            folder,
            batch_size=BATCH,
            shuffle_buffer_size=SHUFFLE_BUFFER,
            max_samples_per_sequence=100,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=NUM_WORKERS),
            task_encoder=Encoder(),
        )
    )


if __name__ == "__main__":
    serve(
        prepare_energon,
        make,
        SavableDataLoader.save_state_rank,
        SavableDataLoader.restore_state_rank,
        fields=attrgetter("image", "__key__"),
    )
