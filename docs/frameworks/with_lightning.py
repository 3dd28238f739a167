"""Lightning: it saves and loads the state of the loader.

torchrun --nproc-per-node 2 docs/frameworks/with_lightning.py SHARDS OUT NUM_WORKERS
"""

import os
import sys
from pathlib import Path

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from shared import PROCESSOR, make_model, make_optimizer, make_pipeline

import mmstream as mm
from mmstream.train import LightningLoaderState


class Captions(lightning.LightningModule):
    """A model and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        return self.model(**mm.model_inputs(batch, self.model, normalize=PROCESSOR)).loss

    def configure_optimizers(self):
        return make_optimizer(self)


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    trainer = lightning.Trainer(
        max_epochs=2,
        use_distributed_sampler=False,  # the loader finds its rank
        callbacks=[
            LightningLoaderState(),
            ModelCheckpoint(out, filename="{step:08d}", every_n_train_steps=2, save_top_k=-1),
        ],
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        logger=False,
        enable_progress_bar=False,
    )
    saved = sorted(Path(out).glob("*.ckpt"))
    trainer.fit(Captions(), loader, ckpt_path=saved[-1] if saved else None)
    loader.close()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
