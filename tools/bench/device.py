"""Images on their way to a GPU: ``python -m tools.bench.device [--quick]``.

Prints medians of interleaved rounds of three measurements:

    decode   JPEG of 500x375 to 224x224, images/s: by the CPU on one thread and on all cores, and
             by `to_device` with ``ImageDecoder(device="cuda")``
    copy     pinned memory to the device, GB/s
    loop     training steps of a ViT-S/16 from tars, decoded on the CPU and on the device:
             samples/s, and the share of time in which the GPU was idle

Without a GPU the benchmark prints one line and exits with 0. ``--device cpu`` runs all of it with
tiny sizes and libjpeg instead of nvJPEG. That shows that it runs, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import simplejpeg
import torch
from torch import nn

import mmstream as mm
from mmstream.decoding.image.encoded import EncodedImage, EncodedImages, encode_or_decode
from mmstream.device.nvjpeg import DecodeJpegs, DeviceDecoder, nvjpeg
from tools.bench.corpus import photographs, write_corpus

SIZE = 224
Backend: TypeAlias = Literal["cpu", "cuda"]
NORMALIZE = mm.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Sizes:
    """Amounts of data and work of a run."""

    files: int = 512
    batch: int = 128
    copy_mib: int = 512
    steps: int = 40
    width: int = 384
    depth: int = 12
    rounds: int = 5


TINY = Sizes(files=16, batch=8, copy_mib=8, steps=3, width=32, depth=1, rounds=2)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--quick", action="store_true", help="two rounds")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured (--device cpu runs tiny sizes on the CPU)")
        return
    device = torch.device(options.device)
    sizes = Sizes(rounds=2 if options.quick else 5) if device.type == "cuda" else TINY
    if device.type == "cpu":
        torch.set_num_threads(1)  # the decoders' threads are enough
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, {sizes.rounds} rounds")
    report("images/s", decode_ways(device, sizes), sizes.rounds)
    report("GB/s", {"copy from pinned memory": lambda: copy_rate(device, sizes)}, sizes.rounds)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), sizes.batch * sizes.steps, samples_per_shard=512)
        compare_loops(folder, device, sizes, options.num_workers)


def report(unit: str, ways: dict[str, Callable[[], float]], rounds: int) -> None:
    """Print the median of each way."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            if number:  # the first round warms up
                rates[name].append(value)
    for name, values in rates.items():
        print(f"{name:44} {statistics.median(values):10,.1f} {unit}")


def decode_ways(device: torch.device, sizes: Sizes) -> dict[str, Callable[[], float]]:
    """Return ways to decode the same files, as functions that return images/s."""
    photos = [photo.jpeg for photo in photographs()]
    files = [photos[number % len(photos)] for number in range(sizes.files)]
    on_cpu = mm.ImageDecoder(size=SIZE)
    on_gpu = mm.ImageDecoder(size=SIZE, device="cuda")

    def encode(file: bytes) -> EncodedImage | torch.Tensor:
        return encode_or_decode(file, "jpg", on_gpu, None, on_gpu.start_limits())

    encoded = list(map(encode, files))
    groups = [encoded[first : first + sizes.batch] for first in range(0, len(files), sizes.batch)]
    batches = [EncodedImages.join(group) for group in groups]
    decoder = DeviceDecoder(device, jpeg_decoder(device), None)
    cores = len(os.sched_getaffinity(0))

    def one_thread() -> float:
        return rate(len(files), device, lambda: [on_cpu(file) for file in files])

    def all_cores() -> float:
        with ThreadPoolExecutor(cores) as pool:
            return rate(len(files), device, lambda: list(pool.map(on_cpu, files)))

    def on_device() -> float:
        return rate(len(files), device, lambda: [decoder({"image": batch}) for batch in batches])

    return {
        "decode, CPU, one thread": one_thread,
        f"decode, CPU, {cores} threads": all_cores,
        f"decode, device, batches of {sizes.batch}": on_device,
        "header and plan alone, one thread": lambda: rate(
            len(files), device, lambda: list(map(encode, files))
        ),
    }


def copy_rate(device: torch.device, sizes: Sizes) -> float:
    """Copy host memory to the device once and return GB/s."""
    host = torch.empty(sizes.copy_mib * 2**20, dtype=torch.uint8)
    target = torch.empty_like(host, device=device)
    if device.type == "cuda":
        host = host.pin_memory()
    return rate(host.numel() / 1e9, device, lambda: target.copy_(host, non_blocking=True))


def rate(amount: float, device: torch.device, work: Callable[[], object]) -> float:
    """Return the amount per second of some work, including what the device does for it."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return amount / (time.perf_counter() - start)


def compare_loops(folder: str, device: torch.device, sizes: Sizes, num_workers: int) -> None:
    """Train a model with images decoded on the CPU and on the device, in turns, and print."""
    model = Vit(sizes.width, sizes.depth).to(device)
    rounds: dict[Backend, list[tuple[float, float]]] = {"cpu": [], "cuda": []}
    for number in range(sizes.rounds + 1):
        for backend, values in rounds.items():
            image = mm.ImageDecoder(size=SIZE, crop="random", flip=0.5, device=backend)
            pipeline = mm.Pipeline(
                mm.open_dataset(folder),
                global_batch_size=sizes.batch,
                decode=mm.Decode(image=image),
            )
            with closing(
                mm.Loader(pipeline, num_workers=num_workers, world=mm.World(0, 1))
            ) as loader:
                batches = mm.to_device(
                    loader,
                    device,
                    normalize=NORMALIZE,
                    dtype=torch.bfloat16,
                    decode_jpegs=jpeg_decoder(device),
                )
                next(iter(batches))  # the workers have started
                measured = train(model, batches, device)
            if number:  # the first round warms up
                values.append(measured)
    for backend, values in rounds.items():
        speed, idle = (statistics.median(column) for column in zip(*values, strict=True))
        title = f'loop, ImageDecoder(device="{backend}"), {num_workers} workers'
        print(f"{title:44} {speed:10,.1f} samples/s, device idle {idle:.0%}")


def train(
    model: Vit, batches: Iterable[dict[str, Any]], device: torch.device
) -> tuple[float, float]:
    """Return samples/s and the share of time between steps (on CUDA: of the GPU's time)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks: list[tuple[Mark, Mark]] = []
    num_samples = 0
    for batch in batches:
        begin = Mark(device)
        labels = torch.arange(len(batch["image"]), device=device) % 10
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch["image"]), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        marks.append((begin, Mark(device)))
        num_samples += len(labels) if len(marks) > 1 else 0  # time counts after the first step
    wait(device)
    total = marks[0][1].until(marks[-1][1])
    idle = sum(before[1].until(after[0]) for before, after in pairwise(marks))
    return num_samples / total, idle / total


class Mark:
    """A point in time, in the GPU's stream or in this process."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def until(self, other: Mark) -> float:
        """Return the seconds between two marks."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return float(self._event.elapsed_time(other._event)) / 1000


class Vit(nn.Module):
    """ViT-S/16 at its default width and depth."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros(1, (SIZE // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        tokens = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.layers(tokens).mean(1))
        return logits


def jpeg_decoder(device: torch.device) -> DecodeJpegs:
    """Return nvJPEG, or libjpeg on the CPU."""
    return nvjpeg if device.type == "cuda" else libjpeg


def libjpeg(files: list[torch.Tensor], _: torch.device) -> list[torch.Tensor]:
    """Decode JPEGs and return uint8 [3, height, width] tensors, as `nvjpeg` does."""
    images = [np.asarray(simplejpeg.decode_jpeg(file.numpy().tobytes())) for file in files]
    return [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
