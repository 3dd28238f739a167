"""The reference loop under Ray Train.

    python docs/ray_train.py SHARDS OUT NUM_WORKERS

NUM_WORKERS is a number, or a range such as 4:8. With a range, a run that loses nodes continues on
the others. Ray starts the processes and torch.distributed, and the loop uses both. Needs the extra
"ray".
"""

import sys


def train_on_this_worker(settings: dict) -> None:
    """Run the loop; called in each of Ray's worker processes."""
    import ray.train

    from mmstream.train import TrainConfig, train

    # When Ray restarts the group, the loop continues from the newest checkpoint in `out`.
    result = train(TrainConfig(**settings))
    ray.train.report({"num_steps": result.num_steps, "loss": result.final_loss})  # Ray's own log


def main() -> None:
    """Start the workers and wait for them."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    shards, out, num_workers = sys.argv[1:]
    least, _, most = num_workers.partition(":")
    ray.init()
    trainer = TorchTrainer(
        train_on_this_worker,
        train_loop_config={
            "url": shards,  # an absolute path or s3://: Ray's workers have other folders
            "out": out,  # all nodes must see it, and SHARDS
            "epochs": 1,
            "global_batch_size": 16,
            "num_workers": 1,  # loader processes in each of Ray's workers
            "log_keys": True,  # for `mmstream replay --check`
        },
        scaling_config=ScalingConfig(
            num_workers=(int(least), int(most)) if most else int(least),
            use_gpu="GPU" in ray.cluster_resources(),  # of the nodes, not of this process
        ),
        run_config=RunConfig(
            storage_path=f"{out}/ray",  # all nodes must see this too
            failure_config=FailureConfig(max_failures=3),  # each loss of a worker counts
        ),
    )
    trainer.fit()  # raises after max_failures; checkpoints and metrics are in `out`


if __name__ == "__main__":
    main()
