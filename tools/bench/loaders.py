"""The loaders that `tools.bench.decoded` compares, each in a process of its own.

    python -m tools.bench.loaders NAME FOLDER BATCH_SIZE MAX_BATCHES

All read the tars of a folder, shuffled. They decode images, resize the shorter side to 256, keep
the central 224x224, and make 128 tokens of each text. webdataset and Hugging Face datasets do what
their users write: Pillow, torchvision's transforms and the tokenizer on each text, in two workers.
NVIDIA DALI and SPDL have two threads of C++, and tokenize the texts of a batch in one call.

The output is one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mmstream.families.family import import_torchvision
from mmstream.processes.machine import cpu_seconds, pss_bytes

NUM_WORKERS, SHUFFLE_BUFFER = 2, 500
SIZE, RESIZE_SIZE, MAX_LENGTH = 224, 256, 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

WARM_S, MAX_S = 3.0, 6.0
"""Seconds that are not measured, while workers start; and seconds of a measurement."""

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Images and token ids."""


def mmstream(
    folder: str, batch_size: int, num_workers: int = NUM_WORKERS, num_threads: int | None = None
) -> Batches:
    """Yield the batches of mmstream, with its defaults."""
    import mmstream as mm

    image = mm.ImageDecoder(size=SIZE, resize_size=RESIZE_SIZE)
    text = mm.TextDecoder(tokenizer_in(folder), max_length=MAX_LENGTH, padding="max_length")
    decode = mm.Decode(image=image, text=text)
    pipeline = mm.Pipeline(mm.open_dataset(folder), global_batch_size=batch_size, decode=decode)
    for batch in mm.Loader(pipeline, num_workers=num_workers, num_threads=num_threads):
        yield batch["image"], batch["input_ids"]


def mmstream_threads(folder: str, batch_size: int) -> Batches:
    """Yield those of mmstream without workers."""
    return mmstream(folder, batch_size, num_workers=0, num_threads=2)


def webdataset(folder: str, batch_size: int) -> Batches:
    """Yield those of webdataset: shards and samples shuffled, batches made in the workers."""
    import webdataset as wds

    work = UsualWork(folder)
    dataset = wds.WebDataset(tars_in(folder), shardshuffle=100, seed=0).shuffle(SHUFFLE_BUFFER)
    dataset = dataset.decode("pil").to_tuple("jpg", "txt").map(lambda sample: work(*sample))
    dataset = dataset.batched(batch_size, partial=False)
    yield from wds.WebLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)


def datasets(folder: str, batch_size: int) -> Batches:
    """Yield those of Hugging Face's streaming reader of tars, in torch's DataLoader."""
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    work = UsualWork(folder)
    files = {"train": tars_in(folder)}
    dataset = load_dataset("webdataset", data_files=files, split="train", streaming=True)
    dataset = dataset.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    dataset = dataset.map(
        lambda sample: dict(zip("ab", work(sample["jpg"], sample["txt"]), strict=True)),
        remove_columns=["__key__", "__url__", "jpg", "txt"],
    )
    for batch in DataLoader(dataset, batch_size, num_workers=NUM_WORKERS, drop_last=True):
        yield batch["a"], batch["b"]


def dali(folder: str, batch_size: int) -> Batches:
    """Yield those of NVIDIA DALI on the CPU: its reader, decoder and resizer. They do not end."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def  # type: ignore[untyped-decorator]
    def photographs() -> tuple[Any, Any]:
        encoded, texts = fn.readers.webdataset(
            paths=tars_in(folder),
            ext=["jpg", "txt"],
            random_shuffle=True,
            initial_fill=SHUFFLE_BUFFER,
        )
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        images = fn.resize(images, resize_shorter=RESIZE_SIZE, interp_type=types.INTERP_LINEAR)
        return fn.crop(images, crop=(SIZE, SIZE)), texts

    settings = {"num_threads": NUM_WORKERS, "device_id": None, "seed": 0}
    pipeline = photographs(batch_size=batch_size, **settings)
    tokenizer = tokenizer_in(folder)
    while True:
        images, texts = pipeline.run()
        pixels = torch.from_numpy(images.as_array()).permute(0, 3, 1, 2)
        yield pixels, ids_of(tokenizer, [bytes(texts.at(row)) for row in range(batch_size)])


def spdl(folder: str, batch_size: int) -> Batches:
    """Yield those of SPDL: its reader of tars, its threads, and FFmpeg to decode and resize."""
    from spdl.io import get_video_filter_desc, load_image_batch, to_numpy
    from spdl.pipeline import PipelineBuilder

    tokenizer = tokenizer_in(folder)
    steps = get_video_filter_desc(
        scale_width=RESIZE_SIZE,
        scale_height=RESIZE_SIZE,
        scale_algo="bilinear",
        scale_mode="crop",
        crop_width=SIZE,
        crop_height=SIZE,
        pix_fmt="rgb24",
    )

    def work(samples: list[dict[str, bytes]]) -> tuple[torch.Tensor, torch.Tensor]:
        jpegs = [sample["jpg"] for sample in samples]
        images = load_image_batch(jpegs, width=None, height=None, filter_desc=steps)
        pixels = torch.from_numpy(to_numpy(images)).permute(0, 3, 1, 2)
        return pixels, ids_of(tokenizer, [sample["txt"] for sample in samples])

    torch.set_num_threads(1)
    pipeline = (
        PipelineBuilder()
        .add_source(shuffled_samples(tars_in(folder)))
        .aggregate(batch_size, drop_last=True)
        .pipe(work, concurrency=NUM_WORKERS)
        .add_sink(2)
        .build(num_threads=NUM_WORKERS + 1)  # one reads
    )
    with pipeline.auto_stop():
        yield from pipeline


def shuffled_samples(tars: list[str]) -> Iterator[dict[str, bytes]]:
    """Yield samples by SPDL's reader, which has no shuffle, through a buffer."""
    from spdl.io import iter_tarfile

    draw = random.Random(0)
    draw.shuffle(tars)
    held: list[dict[str, bytes]] = []
    for tar in tars:
        files = ((name[-3:], bytes(view)) for name, view in iter_tarfile(Path(tar).read_bytes()))
        for sample in zip(files, files, strict=True):
            held.append(dict(sample))
            if len(held) > SHUFFLE_BUFFER:
                yield held.pop(draw.randrange(len(held)))
    yield from held


LOADERS: dict[str, Callable[[str, int], Batches]] = {
    "mmstream": mmstream,
    "mmstream, 2 threads, no worker": mmstream_threads,
    "webdataset": webdataset,
    "HF datasets": datasets,
    "NVIDIA DALI": dali,
    "SPDL": spdl,
}


class UsualWork:
    """What users write: Pillow, torchvision's transforms, and the tokenizer on each text."""

    def __init__(self, folder: str) -> None:
        import_torchvision()
        from torchvision import transforms

        self._tokenizer = tokenizer_in(folder)
        self._transform = transforms.Compose(
            [
                transforms.Resize(RESIZE_SIZE),
                transforms.CenterCrop(SIZE),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __call__(self, image: Image.Image, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels as float32, and token ids."""
        return self._transform(image.convert("RGB")), ids_of(self._tokenizer, [text.encode()])[0]


def tars_in(folder: str) -> list[str]:
    """Return the sorted paths of a folder's tars."""
    return sorted(str(path) for path in Path(folder).glob("*.tar"))


def tokenizer_in(folder: str) -> Any:
    """Return the tokenizer that lies beside the tars."""
    file = str(Path(folder, "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>", eos_token="<eos>")


def ids_of(tokenizer: Any, texts: list[bytes]) -> torch.Tensor:
    """Tokenize texts in one call."""
    words = [text.decode() for text in texts]
    settings = {"max_length": MAX_LENGTH, "padding": "max_length", "truncation": True}
    ids: torch.Tensor = tokenizer(words, return_tensors="pt", **settings)["input_ids"]
    return ids


def measure(batches: Batches, batch_size: int, max_batches: int) -> dict[str, float]:
    """Take batches for some seconds or to the end, and return speed, CPU time and memory.

    The first ones are not measured, because workers start and fill their queues meanwhile.
    """
    started = time.perf_counter()
    first_s = began = began_cpu = 0.0
    num_warm = num_taken = 0
    for images, ids in islice(batches, max_batches):
        shapes = tuple(images.shape), tuple(ids.shape)
        if shapes != ((batch_size, 3, SIZE, SIZE), (batch_size, MAX_LENGTH)):
            sys.exit(f"batches have shapes {shapes}")
        images[:, 0].sum()  # touches the memory, as a copy to a device would
        num_taken += 1
        now = time.perf_counter()
        first_s = first_s or now - started
        if not num_warm and (now - started > WARM_S or num_taken >= max_batches // 3):
            num_warm, began, began_cpu = num_taken, now, cpu_seconds(family())
        if num_warm and now - began > MAX_S:
            break
    seconds, num_samples = time.perf_counter() - began, (num_taken - num_warm) * batch_size
    return {
        "samples_per_s": num_samples / seconds,
        "cpu_s_per_1000": (cpu_seconds(family()) - began_cpu) / num_samples * 1000,
        "first_batch_s": first_s,
        "peak_bytes": pss_bytes(family()),
    }


def family() -> list[int]:
    """Return the ids of this process and of all that it has started."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


if __name__ == "__main__":
    name, corpus, size, count = sys.argv[1:]
    loader = LOADERS[name](corpus, int(size))
    print(json.dumps(measure(loader, int(size), int(count))), flush=True)
    os._exit(0)  # some loaders wait for their workers
