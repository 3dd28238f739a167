"""The reference loop under Ray Train.

    python docs/ray_train.py SHARDS OUT NUM_WORKERS

Ray starts the processes and torch.distributed, and the loop uses both. Needs the extra "ray".
"""

import sys

import torch


def train_on_this_worker(settings: dict) -> None:
    """Run the loop; called in each of Ray's worker processes."""
    import ray.train

    from mmstream.train import TrainConfig, train

    # When Ray restarts a failed group, the loop continues from the newest checkpoint in `out`.
    result = train(TrainConfig(**settings))
    ray.train.report({"num_steps": result.num_steps, "loss": result.final_loss})  # Ray's own log


def main() -> None:
    """Start the workers and wait for them."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    shards, out, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    trainer = TorchTrainer(
        train_on_this_worker,
        train_loop_config={
            "url": shards,  # an absolute path or s3://: Ray's workers have other folders
            "out": out,
            "epochs": 1,
            "global_batch_size": 16,
            "num_workers": 1,  # loader processes in each of Ray's workers
            "progress": False,
        },
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()  # raises after max_failures; checkpoints and metrics are in `out`


if __name__ == "__main__":
    main()
