"""TRL's SFTTrainer on packs: no padding, and the loss is the mean over all labels of a step.

torchrun --nproc-per-node 2 docs/frameworks/with_trl.py SHARDS OUT NUM_WORKERS
"""

import sys
from dataclasses import replace

from shared import PROCESSOR, TOKENIZER, make_model, make_pipeline
from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor
from trl import SFTConfig, SFTTrainer

import mmstream as mm
from mmstream.train import LoaderTrainerMixin


class PackTrainer(LoaderTrainerMixin, SFTTrainer):
    """All that TRL needs to train on an `mm.Loader`."""


def make_packs(shards: str) -> mm.Pipeline:
    """Return a pipeline of 6 packs per step, over all ranks, of up to 160 tokens each."""
    return replace(make_pipeline(shards), batching=mm.Pack(160), global_batch_size=6)


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    loader = mm.Loader(make_packs(shards), num_workers=num_workers)
    settings = SFTConfig(
        output_dir=out,
        num_train_epochs=2,
        save_steps=2,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    processor = Qwen2VLProcessor(PROCESSOR, TOKENIZER, Qwen2VLVideoProcessor())
    trainer = PackTrainer(make_model(), settings, train_dataset=loader, processing_class=processor)
    trainer.train(resume_from_checkpoint="auto")
    loader.close()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
