"""Stands in for ray.train.torch: processes with a process group, started anew when one dies."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from ray.train import RunConfig, ScalingConfig

Train = Callable[[dict[str, Any]], None]


class TorchTrainer:
    def __init__(
        self,
        train_loop_per_worker: Train,
        *,
        train_loop_config: dict[str, Any],
        scaling_config: ScalingConfig,
        run_config: RunConfig,
    ) -> None:
        self._train = train_loop_per_worker
        self._settings = train_loop_config
        self._world_size = scaling_config.num_workers
        self._max_failures = run_config.failure_config.max_failures

    def fit(self) -> None:
        """Run all workers to their end; when one fails, end the others and start all again."""
        for attempt in range(1 + self._max_failures):
            if self._run_group():
                return
            print(f"attempt {attempt}: a worker failed", flush=True)  # noqa: T201
        raise RuntimeError("a worker failed more often than max_failures")

    def _run_group(self) -> bool:
        context = multiprocessing.get_context("fork")
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        workers = [
            context.Process(target=self._run_worker, args=(rank, port))
            for rank in range(self._world_size)
        ]
        for worker in workers:
            worker.start()
        running = {worker.sentinel: worker for worker in workers}
        while running:
            for sentinel in wait(list(running)):
                worker = running.pop(sentinel)
                worker.join()
                if worker.exitcode:
                    for other in running.values():
                        other.kill()
        return not any(worker.exitcode for worker in workers)

    def _run_worker(self, rank: int, port: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        dist.init_process_group("gloo")
        self._train(self._settings)
        dist.destroy_process_group()
