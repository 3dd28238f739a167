"""Megatron-Energon: the same tars after ``energon prepare``; the state of a savable loader."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from common import BATCH, NUM_WORKERS, SHUFFLE_BUFFER, link_tars, picture, serve
from megatron.energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Decodes with the same function as all; energon's own decoder is switched off."""

    decoder = None

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        """Decode the picture."""
        sample.image = picture(sample.image)
        return sample


def make(folder: str) -> Any:
    """Return a fresh loader."""
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


def prepare(corpus: str, folder: str) -> None:
    """Index the tars with energon's command."""
    link_tars(corpus, folder)
    tool = str(Path(sys.executable).parent / "energon")
    options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CaptioningSample"
    fields = '{"image": "jpg", "caption": "txt"}'
    command = [tool, "prepare", *options.split(), "--field-map", fields, folder]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    serve(
        prepare,
        make,
        SavableDataLoader.save_state_rank,
        SavableDataLoader.restore_state_rank,
        parts=attrgetter("image", "__key__"),
    )
