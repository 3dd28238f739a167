"""Hugging Face Trainer: the loader's state is saved in the checkpoint's trainer_state.json.

torchrun --nproc-per-node 2 docs/frameworks/with_transformers.py SHARDS OUT NUM_WORKERS
"""

import sys

from shared import PROCESSOR, make_model, make_pipeline
from transformers import TrainingArguments

import mmstream as mm
from mmstream.train import LoaderTrainer


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    settings = TrainingArguments(
        output_dir=out,
        num_train_epochs=2,
        save_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = LoaderTrainer(
        make_model(), settings, train_dataset=loader, processing_class=PROCESSOR
    )
    trainer.train(resume_from_checkpoint="auto")
    loader.close()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
