"""The rows of `tools.bench.compare`: each runs in a process of its own, with any checkout.

    python -m tools.bench.compare_rows ROW DATA OWN SECONDS

DATA holds the corpora, OWN what this checkout has made of them. So a row uses what users use, and
no module of mmstream by its name. The output is one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import mmstream as mm

Sample = dict[str, Any]
Figures = dict[str, float]
"""``value`` in the unit of the row, and ``cpu_ms`` of all processes for each sample."""

SIZE = 224
WARM_BATCHES = 3
"""Batches that are not measured: workers and files are cold then."""


# -- what is measured -----------------------------------------------------------------------------


def speed(pipeline: mm.Pipeline, seconds: float, **settings: Any) -> Figures:
    """Return the samples a second, and their CPU time, once workers and files are warm."""
    with closing(mm.Loader(pipeline, **settings)) as loader:
        batches = endless(loader)
        for _ in range(WARM_BATCHES):
            next(batches)
        count, cpu_s, began = 0, tree_cpu_s(), time.perf_counter()
        while time.perf_counter() < began + seconds or count == 0:
            count += len(next(batches)["__key__"])
        duration_s = time.perf_counter() - began
        return {"value": count / duration_s, "cpu_ms": 1000 * (tree_cpu_s() - cpu_s) / count}


def endless(loader: mm.Loader) -> Iterator[dict[str, Any]]:
    """Yield the batches of epoch after epoch."""
    while True:
        yield from loader


def tree_cpu_s() -> float:
    """Return the CPU time of this process and its descendants."""
    total = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def pipeline_of(
    source: Path | str, decode: mm.Decode | None = None, rows: int = 64, **settings: Any
) -> mm.Pipeline:
    """Return a pipeline over a corpus of DATA, or of a bucket."""
    dataset = mm.open_dataset(source)
    return mm.Pipeline(dataset, global_batch_size=rows, decode=decode, **settings)


def captioned(data: Path, size: int | None = SIZE) -> mm.Decode:
    """Return decoders of pictures and captions."""
    from transformers import PreTrainedTokenizerFast

    file = str(data / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>", eos_token="<eos>")
    text = mm.TextDecoder(tokenizer, max_length=128)
    return mm.Decode(image=mm.ImageDecoder(size=size), text=text)


# -- the rows -------------------------------------------------------------------------------------


def decoded(data: Path, _own: Path, seconds: float, corpus: str, **settings: Any) -> Figures:
    """Decode photographs and captions."""
    rows = {"photos": 64, "4mp": 16}[corpus]
    pipeline = pipeline_of(data / corpus, captioned(data), rows)
    return speed(pipeline, seconds, num_workers=2, **settings)


def raw(data: Path, _own: Path, seconds: float, is_remote: bool) -> Figures:
    """Read samples without decoding any."""
    if not is_remote:
        return speed(pipeline_of(data / "photos"), seconds)
    return speed(pipeline_of(f"{os.environ['BENCH_URL']}/photos"), seconds)


def first_batch(data: Path, _own: Path, _seconds: float) -> Figures:
    """Wait for the first batch of two workers, from the opening of the data on."""
    decode = captioned(data)
    began = time.perf_counter()
    loader = mm.Loader(pipeline_of(data / "photos", decode), num_workers=2)
    next(iter(loader))
    value = time.perf_counter() - began
    loader.close()
    return {"value": value, "cpu_ms": 0.0}


def convert(data: Path, own: Path, _seconds: float) -> Figures:
    """Convert rows and their pictures in this process."""
    num_bytes = sum(path.stat().st_size for path in (data / "media").iterdir())
    out = own / f"converted-{os.getpid()}"
    began, cpu_s = time.perf_counter(), tree_cpu_s()
    report = mm.convert(
        data / "rows.jsonl", out, media_root=data / "media", num_workers=1, progress=False
    )
    value = num_bytes / 1e6 / (time.perf_counter() - began)
    cpu_ms = 1000 * (tree_cpu_s() - cpu_s) / report.num_samples
    shutil.rmtree(out)
    return {"value": value, "cpu_ms": cpu_ms}


def shrinking(data: Path, _own: Path, seconds: float) -> Figures:
    """Decode pictures of 12 megapixels in their own size; a transform makes them small."""
    decode = mm.Decode(image=mm.ImageDecoder())
    pipeline = pipeline_of(data / "12mp", decode, 16, transforms=(shrunk,))
    return speed(pipeline, seconds, num_threads=2)


def shrunk(sample: Sample) -> Sample:
    """Take every tenth pixel."""
    return {**sample, "image": sample["image"][:, ::10, ::10].contiguous()}


def filtered(data: Path, _own: Path, seconds: float) -> Figures:
    """Decode photographs, half of which a transform leaves out."""
    pipeline = pipeline_of(data / "photos", captioned(data), transforms=(only_even,))
    return speed(pipeline, seconds, num_workers=2)


def only_even(sample: Sample) -> Sample:
    """Leave out samples of an odd number."""
    if int(sample["__key__"]) % 2:
        raise mm.SkipSample("odd")
    return sample


def numpy_transform(data: Path, _own: Path, seconds: float, **settings: Any) -> Figures:
    """Decode photographs, and work on their pixels in numpy."""
    pipeline = pipeline_of(data / "photos", captioned(data), transforms=(smoothed,))
    return speed(pipeline, seconds, **settings)


def smoothed(sample: Sample) -> Sample:
    """Mix each pixel with its neighbours, twice."""
    pixels = sample["image"].numpy().astype(np.float32)
    for axis in (1, 2):
        pixels = (pixels + np.roll(pixels, 1, axis) + np.roll(pixels, -1, axis)) / 3
    return {**sample, "image": torch.from_numpy(pixels.astype(np.uint8))}


def ranged_videos(_data: Path, _own: Path, seconds: float) -> Figures:
    """Decode eight frames of videos of 9 MB, of which a small part is read."""
    decode = mm.Decode(video=mm.VideoDecoder(num_frames=8, size=SIZE))
    pipeline = pipeline_of(f"{os.environ['BENCH_URL']}/videos", decode, rows=8)
    return speed(pipeline, seconds, num_workers=2)


def uncounted_audio(data: Path, _own: Path, seconds: float) -> Figures:
    """Decode recordings beside captions that do not count them."""
    decode = mm.Decode(audio=mm.AudioDecoder(), text=captioned(data).text)
    return speed(pipeline_of(data / "audio", decode, rows=16), seconds, num_threads=2)


def baked(data: Path, own: Path, seconds: float) -> Figures:
    """Read what this checkout has decoded before."""
    mm.bake(pipeline_of(data / "photos", captioned(data)), own / "baked", progress=False)
    return speed(pipeline_of(own / "baked", mm.Decode.baked()), seconds)


def before(data: Path, _own: Path, seconds: float) -> Figures:
    """Decode photographs without workers, with a function before it."""
    pipeline = pipeline_of(data / "photos", captioned(data), before=(shouted,))
    return speed(pipeline, seconds, num_threads=2)


def shouted(sample: Sample) -> Sample:
    """Change the caption."""
    return {**sample, "txt": sample["txt"].upper()}


ROWS: dict[str, tuple[str, Callable[[Path, Path, float], Figures]]] = {
    "decoded, 0.2 MP": ("samples/s", partial(decoded, corpus="photos")),
    "decoded, 4 MP": ("samples/s", partial(decoded, corpus="4mp")),
    "raw, local": ("samples/s", partial(raw, is_remote=False)),
    "raw, S3 direct": ("samples/s", partial(raw, is_remote=True)),
    "raw, S3 50/40": ("samples/s", partial(raw, is_remote=True)),
    "first batch, 2 workers": ("s", first_batch),
    "convert": ("MB/s", convert),
    "12 MP, a transform shrinks them": ("samples/s", shrinking),
    "50 % filter in transforms": ("samples/s", filtered),
    "numpy transform, 1 thread": ("samples/s", partial(numpy_transform, num_threads=1)),
    "numpy transform, 2 threads": ("samples/s", partial(numpy_transform, num_threads=2)),
    "numpy transform, 4 threads": ("samples/s", partial(numpy_transform, num_threads=4)),
    "numpy transform, 2 workers": ("samples/s", partial(numpy_transform, num_workers=2)),
    "ranged videos, S3 50/40": ("samples/s", ranged_videos),
    "audio that no text counts": ("samples/s", uncounted_audio),
    "baked": ("samples/s", baked),
    "before, no workers": ("samples/s", before),
}
"""Unit and function by name. A row with "50/40" has 50 ms to the first byte, and 40 MB/s."""


if __name__ == "__main__":
    name, corpora, of_checkout, measured_s = sys.argv[1:]
    figures = ROWS[name][1](Path(corpora), Path(of_checkout), float(measured_s))
    print(json.dumps(figures))
