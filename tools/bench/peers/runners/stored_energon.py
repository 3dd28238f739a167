"""Megatron-Energon: tars after ``energon prepare``, on S3 through its Multi-Storage Client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.energon import (
    CaptioningSample,
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_train_dataset,
)

from tools.bench.peers.runners.stored import Settings, Stamp, close_connections, serve, tar_name
from tools.bench.peers.runners.tars import index_energon

SHUFFLE_BUFFER = 1000
PROFILE = "bench"


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    """Leaves samples as their bytes, in lists."""

    decoder = None

    def batch(self, samples: list[CaptioningSample]) -> list[CaptioningSample]:
        """Collate nothing."""
        return samples


def prepare(corpus: str, folder: str, num_names: int) -> dict[str, str]:
    """Prepare the tars of the corpus, and name them again and again.

    ``energon prepare`` refuses samples with the same key. So it sees each tar once, and the names
    go into the files that tell a training run its shards.
    """
    tars = sorted(path.name for path in Path(corpus).glob("*.tar"))
    own_names = [tar_name(number) for number in range(len(tars))]
    for name, tar in zip(own_names, tars, strict=True):
        os.link(Path(corpus, tar), Path(folder, name))
    index_energon(folder)
    for name in own_names:
        Path(folder, name).unlink()
    info_path = Path(folder, ".nv-meta", ".info.json")
    info = json.loads(info_path.read_text())
    counts, names = info["shard_counts"], {}
    info["shard_counts"] = {}
    for number in range(num_names):
        name, same = tar_name(number), number % len(tars)
        info["shard_counts"][name] = counts[own_names[same]]
        names[name] = tars[same]
        names[f"{name}.idx"] = f"{own_names[same]}.idx"
    info_path.write_text(json.dumps(info))
    split_path = Path(folder, ".nv-meta", "split.yaml")
    before, after = (
        "shard-{" + f"{0:06d}..{number - 1:06d}" + "}.tar" for number in (len(tars), num_names)
    )
    text = split_path.read_text()
    if before not in text:
        raise RuntimeError(f"split.yaml does not name {before}")
    split_path.write_text(text.replace(before, after))
    return names


def make(settings: Settings) -> Iterator[Any]:
    """Yield lists of samples."""
    folder = settings.local
    if not folder:
        _configure_client(settings)
        folder = f"msc://{PROFILE}/{settings.prefix}"
    dataset = get_train_dataset(
        folder,
        batch_size=settings.batch_size,
        shuffle_buffer_size=SHUFFLE_BUFFER,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=settings.num_workers),
        task_encoder=Encoder(),
    )
    loader = get_loader(dataset)
    loader.worker_init_fn = _Both(Stamp(settings.scratch), loader.worker_init_fn)
    close_connections()
    return iter(loader)


class _Both:
    """Calls a stamp, and then what the loader itself calls as a worker begins."""

    def __init__(self, stamp: Stamp, own: Callable[[int], None] | None) -> None:
        self._stamp, self._own = stamp, own

    def __call__(self, number: int) -> None:
        self._stamp(number)
        if self._own is not None:
            self._own(number)


def _configure_client(settings: Settings) -> None:
    provider = {
        "type": "s3",
        "options": {
            "base_path": settings.bucket,
            "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            "region_name": os.environ["AWS_REGION"],
        },
    }
    profile: dict[str, Any] = {"storage_provider": provider}
    config: dict[str, Any] = {"profiles": {PROFILE: profile}}
    if line_size := dict(settings.arguments).get("cache_line_size"):
        profile["caching_enabled"] = True
        location = f"{settings.scratch}/cache"
        config["cache"] = {
            "size": "8G",
            "location": location,
            "cache_line_size": line_size,
            "check_source_version": False,
        }
    path = Path(settings.scratch, "msc_config.json")
    path.write_text(json.dumps(config))
    os.environ["MSC_CONFIG"] = str(path)


if __name__ == "__main__":
    serve(prepare, make)
