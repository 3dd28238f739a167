"""Hugging Face Trainer: the loader's state is saved in the checkpoint's trainer_state.json.

torchrun --nproc-per-node 2 docs/frameworks/with_transformers.py SHARDS OUT NUM_WORKERS
"""

import sys
from pathlib import Path

from shared import Model, make_pipeline
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import mmstream as mm


class LoaderState(TrainerCallback, ExportableState):
    """Saves a loader's state with the Trainer's own."""

    def __init__(self, loader: mm.Loader) -> None:
        self.loader = loader

    def state(self):
        return {"args": {}, "attributes": {"loader": self.loader.state_dict()}}

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:  # resumed: `state` comes from the checkpoint
            saved = state.stateful_callbacks["LoaderState"]["attributes"]
            self.loader.load_state_dict(saved["loader"])


class StreamTrainer(Trainer):
    """Trains on a loader as it is: not prepared, not sharded, no batch skipped."""

    def __init__(self, *args, loader: mm.Loader, **settings) -> None:
        super().__init__(*args, **settings)
        self.loader = loader
        self.add_callback(LoaderState(loader))

    def get_train_dataloader(self):
        if len(self.loader) % self.args.gradient_accumulation_steps:
            raise ValueError("gradient_accumulation_steps must divide the steps of an epoch")
        return self.loader

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs)


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    settings = TrainingArguments(
        output_dir=out,
        num_train_epochs=2,
        ignore_data_skip=True,  # the loader starts at the right step
        save_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = StreamTrainer(Model(), settings, loader=loader)
    saved = Path(out).glob("checkpoint-*/trainer_state.json")  # written last: marks it complete
    newest = max(saved, key=lambda file: int(file.parent.name[11:]), default=None)
    trainer.train(resume_from_checkpoint=newest and str(newest.parent))
    loader.close()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
