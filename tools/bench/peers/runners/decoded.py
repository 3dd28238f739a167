"""What all runners of `tools.bench.loader` share: the commands, the clock and the work on a sample.

A runner is a script that runs in its loader's own environment. It imports what it needs, then calls
`serve`: so the interpreter's start and all imports lie before the clock starts.

    prepare CORPUS FOLDER      make from the tars what this loader reads
    run FOLDER SETTINGS        take batches: time to the first, then speed and CPU time

The work on a sample has two forms. "torchvision": Pillow, torchvision's transforms on it, the
tokenizer called on each text, float32 batches: what the documentation of each loader shows.
"mmstream": this project's decoders as the loader's map function, uint8 batches that are left to
the device to normalise: the best that is to be had with that loader, and what is between it and
this project is then the loader alone.
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
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

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
"""Not timed at the begin of a run: by then all workers are up and their queues full."""

MOST_S = 8.0
"""Timed at most: slow loaders need not go through all samples."""


@dataclass(frozen=True)
class Settings:
    """What a run is to do."""

    tokenizer: str
    """Folder of ``tokenizer.json``."""
    num_batches: int
    batch_size: int = 64
    work: Literal["torchvision", "mmstream"] = "mmstream"
    num_workers: int = 2
    num_threads: int | None = None
    """mmstream's own: decode threads in each process."""
    normalize: bool = False
    """mmstream's own: float32, normalised on the host by `to_device`."""
    scaled_decoding: bool = True
    """mmstream's own: no scaled decoding."""
    shuffle_buffer: int = 1000
    """Of loaders that ask for one."""


Prepared = dict[str, torch.Tensor]
"""A sample of ``image``, ``input_ids`` and ``attention_mask``."""


def sample_work(settings: Settings) -> Callable[[Any, Any], Prepared]:
    """Return the work on (a picture, a text): bytes each, or what a loader has made of them."""
    return _Torchvision(settings) if settings.work == "torchvision" else _Mmstream(settings)


def image_decoder(settings: Settings) -> ImageDecoder:
    """Return this project's decoder for the same geometry as torchvision's usual pair."""
    return ImageDecoder(
        size=SIZE, resize_size=RESIZE_SIZE, scaled_decoding=settings.scaled_decoding
    )


def text_decoder(settings: Settings) -> TextDecoder:
    """Return this project's decoder of texts."""
    return TextDecoder(fast_tokenizer(settings), max_length=MAX_LENGTH, padding="max_length")


def fast_tokenizer(settings: Settings) -> Any:
    """Return the tokenizer, as `transformers` has it."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(settings.tokenizer, "tokenizer.json")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


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

    def __call__(self, picture: Any, text: Any) -> Prepared:
        if isinstance(picture, bytes):
            picture = Image.open(io.BytesIO(picture))
        coded = self._tokenizer(
            text if isinstance(text, str) else text.decode(),
            max_length=MAX_LENGTH, padding="max_length", truncation=True, return_tensors="pt",
        )  # fmt: skip
        return {
            "image": self._transform(picture.convert("RGB")),
            "input_ids": coded["input_ids"][0],
            "attention_mask": coded["attention_mask"][0],
        }


class _Mmstream:
    def __init__(self, settings: Settings) -> None:
        self._image, self._text = image_decoder(settings), text_decoder(settings)

    def __call__(self, picture: Any, text: Any) -> Prepared:
        coded = self._text({"txt": text})
        padded = np.full((2, MAX_LENGTH), self._text.pad_token_id)
        num_tokens = len(coded["input_ids"])
        padded[0, :num_tokens] = coded["input_ids"]
        padded[1] = np.arange(MAX_LENGTH) < num_tokens
        return {
            "image": torch.from_numpy(self._image(picture)).permute(2, 0, 1),
            "input_ids": torch.from_numpy(padded[0]),
            "attention_mask": torch.from_numpy(padded[1]),
        }


def samples_of(corpus: str) -> Iterator[dict[str, Any]]:
    """Yield picture and text of each sample, for loaders with a format of their own."""
    for sample in open_dataset(corpus):
        yield {"jpg": bytes(sample["jpg"]), "txt": bytes(sample["txt"]).decode()}


def serve(
    prepare: Callable[[str, str], object],
    make: Callable[[str, Settings], Any],
    parts: Callable[[Any], tuple[Any, ...]] = itemgetter("image", "input_ids"),
) -> None:
    """Do what the command line asks, and print the findings as one line of JSON.

    Args:
        prepare: (corpus, folder) -> files of this loader's own.
        make: (folder, settings) -> a fresh iterable of batches.
        parts: batch -> (its pictures, its token ids).
    """
    command, folder, argument = sys.argv[1:]
    found: dict[str, float] = {}
    if command == "prepare":
        prepare(folder, argument)
    else:
        settings = Settings(**json.loads(argument))
        if settings.work == "torchvision":
            import_torchvision()
        found = _run(lambda: make(folder, settings), parts, settings)
    print(json.dumps(found), flush=True)


def _run(
    make: Callable[[], Any], parts: Callable[[Any], tuple[Any, ...]], settings: Settings
) -> dict[str, float]:
    """Take the batches; the first ones, while workers start and fill their queues, are not timed.

    Memory is looked at when the clock has stopped, while the workers still are at it.
    """
    started = time.perf_counter()
    loader = make()
    batches = islice(loader, settings.num_batches)
    _use(next(batches), parts, settings)
    first_batch_s, num_taken = time.perf_counter() - started, 1
    while _is_warming(time.perf_counter() - started, num_taken, settings):
        _use(next(batches), parts, settings)
        num_taken += 1
    started, started_cpu, num_warm = time.perf_counter(), cpu_seconds(os.getpid()), num_taken
    for batch in batches:
        _use(batch, parts, settings)
        num_taken += 1
        if time.perf_counter() - started > MOST_S:
            break
    seconds, cpu = time.perf_counter() - started, cpu_seconds(os.getpid()) - started_cpu
    if num_taken < settings.num_batches and seconds < MOST_S:
        sys.exit(f"{num_taken} batches instead of {settings.num_batches}")
    count = (num_taken - num_warm) * settings.batch_size
    return {
        "samples_per_s": count / seconds,
        "cpu_s_per_1000": cpu / count * 1000,
        "first_batch_s": first_batch_s,
        "peak_bytes": pss_bytes(os.getpid()),
    }


def _is_warming(seconds: float, num_taken: int, settings: Settings) -> bool:
    """Tell whether the clock still waits: at most for half of the batches."""
    enough = seconds > WARM_S and num_taken >= settings.num_batches // 8
    return not enough and num_taken < settings.num_batches // 2


def _use(batch: Any, parts: Callable[[Any], tuple[Any, ...]], settings: Settings) -> None:
    """Check that the work was done, and touch each page of the pictures, as a copy would."""
    images, ids = parts(batch)
    due = (settings.batch_size, 3, SIZE, SIZE), (settings.batch_size, MAX_LENGTH)
    found = tuple(images.shape), tuple(ids.shape)
    if found != due:
        sys.exit(f"not the same work: {found} instead of {due}")
    step = PAGE_BYTES // images.element_size()
    images.as_strided((images.numel() // step,), (step,)).sum()
