"""Hugging Face accelerate: prepare model and optimizer, and register the loader.

accelerate launch --cpu --num_processes 2 docs/frameworks/with_accelerate.py SHARDS OUT NUM_WORKERS
"""

import sys
from pathlib import Path

from accelerate import Accelerator
from shared import PROCESSOR, make_model, make_optimizer, make_pipeline

import mmstream as mm


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    accelerator.register_for_checkpointing(loader)  # do not prepare it: it finds its rank
    saved = sorted(Path(out).glob("step-*/done"))
    if saved:
        accelerator.load_state(saved[-1].parent)
    while loader.state_dict()["epoch"] < 2:
        for batch in mm.to_device(loader, accelerator.device):
            inputs = mm.model_inputs(batch, model, normalize=PROCESSOR)
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
            state = loader.state_dict()
            if state["step"] % 2 == 0:
                num_steps = state["epoch"] * len(loader) + state["step"]
                folder = Path(out) / f"step-{num_steps:08d}"
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
                (folder / "done").touch()  # save_state is not atomic: this marks it complete
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
