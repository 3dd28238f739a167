"""torchdata: a StatefulDataLoader around the loader, for code that insists on one.

torchrun --nproc-per-node 2 docs/frameworks/with_torchdata.py SHARDS OUT NUM_WORKERS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from shared import PROCESSOR, make_model, make_optimizer, make_pipeline
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

import mmstream as mm


def train(shards: str, out: str, num_workers: int = 0) -> None:
    """Train for two epochs; continue from the newest checkpoint if there is one."""
    dist.init_process_group("gloo")
    loader = mm.Loader(make_pipeline(shards), num_workers=num_workers)
    batches = StatefulDataLoader(loader, batch_size=None, num_workers=0)  # the loader has workers
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    newest, epoch = Path(out) / "newest.pt", 0
    if newest.exists():
        saved = torch.load(newest)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(saved["batches"])
        epoch = saved["batches"]["dataset_state"]["epoch"]
    for _ in range(epoch, 2):
        for batch in batches:
            model(**mm.model_inputs(batch, model, normalize=PROCESSOR)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (
                loader.state_dict()["step"] % 2 == 0 and dist.get_rank() == 0
            ):  # one serves all ranks
                states = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "batches": batches.state_dict(),
                }
                newest.parent.mkdir(exist_ok=True)
                torch.save(states, newest.with_suffix(".part"))
                newest.with_suffix(".part").replace(newest)
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
