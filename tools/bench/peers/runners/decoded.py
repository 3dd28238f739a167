"""Shared by the runners of `tools.bench.loader`: commands, time measurement, work on a sample.

A runner is a program that runs in its loader's environment. It imports its modules and calls
`serve`. So the start of the interpreter and all imports come before the measured time.

    prepare CORPUS FOLDER      convert the tars to the files that this loader reads
    run FOLDER SETTINGS        take batches: time to the first batch, then speed and CPU time
    count FOLDER SETTINGS FILE take batches for ever, and write the number of samples to a file

The work on a sample has three forms. "torchvision" is what the documentation of each loader shows:
Pillow, torchvision's transforms, the tokenizer on each text, and float32 batches. "mmstream" uses
mmstream's decoders as the map function of the loader. Its batches are uint8, to be normalised on
the device. With it, the loaders alone make the difference. "native" is for loaders with a decoder
and a resizer of their own.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from mmap import mmap
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mmstream import ImageDecoder, TextDecoder, open_dataset
from mmstream._torchvision import import_torchvision
from tools.bench.process_tree import cpu_seconds, pss_bytes

SIZE, RESIZE_SIZE, MAX_LENGTH = 224, 256, 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PAGE_BYTES = 4096

WARM_S = 3.0
"""Not measured at the start of a run. After it, all workers run and their queues are full."""

MAX_S = 8.0
"""Longest measurement, so that slow loaders need not deliver all samples."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    tokenizer: str
    """Folder with ``tokenizer.json``."""
    num_batches: int
    batch_size: int = 64
    work: Literal["torchvision", "mmstream", "native"] = "mmstream"
    num_workers: int = 2
    num_threads: int | None = None
    """mmstream only: decode threads per process."""
    normalize: bool = False
    """mmstream and DALI only: float32, normalised on the host; by `to_device` or by DALI."""
    scaled_decoding: bool = True
    """mmstream only: argument of `ImageDecoder`."""
    has_text: bool = True
    """mmstream only. False: texts are left out, as the bare loops leave them out."""
    shuffle_buffer: int = 1000
    """Samples, for loaders that have a shuffle buffer."""


Prepared = dict[str, torch.Tensor]
"""``image``, ``input_ids`` and ``attention_mask`` of a sample."""


def sample_work(settings: Settings) -> Callable[[Any, Any], Prepared]:
    """Return a function of (image, text), each as bytes or as the loader has decoded them."""
    return _Torchvision(settings) if settings.work == "torchvision" else _Mmstream(settings)


def image_decoder(settings: Settings) -> ImageDecoder:
    """Return mmstream's decoder, with the geometry of torchvision's Resize and CenterCrop."""
    return ImageDecoder(
        size=SIZE, resize_size=RESIZE_SIZE, scaled_decoding=settings.scaled_decoding
    )


def text_decoder(settings: Settings) -> TextDecoder:
    """Return mmstream's decoder of texts."""
    return TextDecoder(fast_tokenizer(settings), max_length=MAX_LENGTH, padding="max_length")


def fast_tokenizer(settings: Settings) -> Any:
    """Return the tokenizer of `transformers`."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(settings.tokenizer, "tokenizer.json")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def tokens_of_batch(settings: Settings) -> Callable[[list[bytes]], Prepared]:
    """Return a function that tokenizes the texts of a batch in one call."""
    tokenizer = fast_tokenizer(settings)

    def tokenize(texts: list[bytes]) -> Prepared:
        tokens = tokenizer(
            [text.decode() for text in texts],
            max_length=MAX_LENGTH,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    return tokenize


class _Torchvision:
    def __init__(self, settings: Settings) -> None:
        from torchvision import transforms

        self._tokenizer = fast_tokenizer(settings)
        self._transform = transforms.Compose(
            [
                transforms.Resize(RESIZE_SIZE),
                transforms.CenterCrop(SIZE),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __call__(self, image: Any, text: Any) -> Prepared:
        if isinstance(image, bytes):
            image = Image.open(io.BytesIO(image))
        tokens = self._tokenizer(
            text if isinstance(text, str) else text.decode(),
            max_length=MAX_LENGTH,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        return {
            "image": self._transform(image.convert("RGB")),
            "input_ids": tokens["input_ids"][0],
            "attention_mask": tokens["attention_mask"][0],
        }


class _Mmstream:
    def __init__(self, settings: Settings) -> None:
        self._decode_image = image_decoder(settings)
        self._decode_text = text_decoder(settings)

    def __call__(self, image: Any, text: Any) -> Prepared:
        tokens = self._decode_text({"txt": text})["input_ids"]
        input_ids = np.full(MAX_LENGTH, self._decode_text.pad_token_id)
        input_ids[: len(tokens)] = tokens
        attention_mask = (np.arange(MAX_LENGTH) < len(tokens)).astype(input_ids.dtype)
        return {
            "image": torch.from_numpy(self._decode_image(image)).permute(2, 0, 1),
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
        }


def samples_of(corpus: str) -> Iterator[dict[str, Any]]:
    """Yield image and text of each sample, for loaders with their own file format."""
    for sample in open_dataset(corpus):
        yield {"jpg": bytes(sample["jpg"]), "txt": bytes(sample["txt"]).decode()}


def serve(
    prepare: Callable[[str, str], object],
    make: Callable[[str, Settings], Any],
    fields: Callable[[Any], tuple[Any, ...]] = itemgetter("image", "input_ids"),
) -> None:
    """Run the command of the command line and print the figures as one line of JSON.

    Args:
        prepare: (corpus, folder): write the files that this loader reads.
        make: (folder, settings) -> a new iterable of batches.
        fields: batch -> (images, token ids).
    """
    command, folder, argument, *files = sys.argv[1:]
    figures: dict[str, float] = {}
    if command == "prepare":
        prepare(folder, argument)
    else:
        settings = Settings(**json.loads(argument))
        if settings.work == "torchvision":
            import_torchvision()
        if command == "count":
            _count(lambda: make(folder, settings), fields, settings, files[0])
        figures = _run(lambda: make(folder, settings), fields, settings)
    print(json.dumps(figures), flush=True)


def _run(
    make: Callable[[], Any], fields: Callable[[Any], tuple[Any, ...]], settings: Settings
) -> dict[str, float]:
    """Take the batches and measure.

    The first batches are not measured, because workers start and fill their queues meanwhile.
    Memory is measured after the time, while the workers still run.
    """
    started = time.perf_counter()
    loader = make()
    batches = islice(loader, settings.num_batches)
    _use(next(batches), fields, settings)
    first_batch_s = time.perf_counter() - started
    num_taken = 1
    while _is_warming(time.perf_counter() - started, num_taken, settings):
        _use(next(batches), fields, settings)
        num_taken += 1
    started = time.perf_counter()
    started_cpu = cpu_seconds(os.getpid())
    num_warm = num_taken
    for batch in batches:
        _use(batch, fields, settings)
        num_taken += 1
        if time.perf_counter() - started > MAX_S:
            break
    seconds = time.perf_counter() - started
    cpu = cpu_seconds(os.getpid()) - started_cpu
    if num_taken < settings.num_batches and seconds < MAX_S:
        sys.exit(f"{num_taken} batches instead of {settings.num_batches}")
    num_samples = (num_taken - num_warm) * settings.batch_size
    return {
        "samples_per_s": num_samples / seconds,
        "cpu_s_per_1000": cpu / num_samples * 1000,
        "first_batch_s": first_batch_s,
        "peak_bytes": pss_bytes(os.getpid()),
    }


def _count(
    make: Callable[[], Any], fields: Callable[[Any], tuple[Any, ...]], settings: Settings, path: str
) -> NoReturn:
    """Take batches for ever. After each, write the number of samples to the 8 bytes of a file."""
    loader = make()
    num_samples = 0
    with Path(path).open("r+b") as file, mmap(file.fileno(), 8) as memory:
        while True:
            num_before = num_samples
            for batch in loader:
                _use(batch, fields, settings)
                num_samples += settings.batch_size
                memory[:] = num_samples.to_bytes(8, "little")
            if num_samples == num_before:  # a generator, which has one epoch
                loader = make()


def _is_warming(seconds: float, num_taken: int, settings: Settings) -> bool:
    """Return whether the measurement waits still, for half of the batches at most."""
    is_warm = seconds > WARM_S and num_taken >= settings.num_batches // 8
    return not is_warm and num_taken < settings.num_batches // 2


def _use(batch: Any, fields: Callable[[Any], tuple[Any, ...]], settings: Settings) -> None:
    """Check the shapes, and read each page of the images, as a copy would."""
    images, ids = fields(batch)
    expected = (settings.batch_size, 3, SIZE, SIZE), (settings.batch_size, MAX_LENGTH)
    shapes = tuple(images.shape), tuple(ids.shape)
    if shapes != expected:
        sys.exit(f"batches have shapes {shapes} instead of {expected}")
    step = PAGE_BYTES // images.element_size()
    images.as_strided((images.numel() // step,), (step,)).sum()
