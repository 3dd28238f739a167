"""torch.distributed.checkpoint: the loader is one more Stateful of the application.

torchrun --nproc-per-node 2 docs/frameworks/with_dcp.py SHARDS OUT NUM_WORKERS
"""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import PROCESSOR, make_model, make_optimizer, make_pipeline
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import mmstream as mm


class Training:
    """Model and optimizer as one Stateful, as in torch's own tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    dist.init_process_group("gloo")
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    app = {"training": Training(model, optimizer), "loader": loader}
    saved = sorted(Path(out).glob("step-*/.metadata"))  # written last: marks it complete
    if saved:
        dcp.load(app, checkpoint_id=saved[-1].parent)
    while loader.state_dict()["epoch"] < 2:
        for batch in loader:
            model(**mm.model_inputs(batch, model, normalize=PROCESSOR)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = loader.state_dict()
            if state["step"] % 2 == 0:
                num_steps = state["epoch"] * len(loader) + state["step"]
                dcp.save(app, checkpoint_id=Path(out) / f"step-{num_steps:08d}")
    loader.close()
    del model, app  # a model that outlives its gloo group may deadlock at the end
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
