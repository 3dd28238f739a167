"""What a training script tells torch, numpy and warnings does not change its batches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding import audio
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import Batch
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.media_files import audio_file, video_file


@contextmanager
def told(tell: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    """Tell torch something, and take it back at the end."""
    tell(value)
    try:
        yield
    finally:
        tell(before)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: told(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64": lambda: told(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: told(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "matmul precision": lambda: told(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": lambda: told(torch.use_deterministic_algorithms, True, False),
    "one thread": lambda: told(torch.set_num_threads, 1, torch.get_num_threads()),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "numpy raises": lambda: np.errstate(all="raise"),
    "warnings are errors": warnings_as_errors,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    def fields_of(number: int) -> dict[str, bytes]:
        return {
            "jpg": jpeg(number),
            "wav": audio_file("wav", seconds=0.1 + number / 10),
            "mp4": video_file("mp4"),
            "txt": b"a text",
            "json": json.dumps({"boxes": [[1, 2, 3, 4.5]]}).encode(),
        }

    return mm.open_dataset(write_corpus(tmp_path_factory.mktemp("all"), [2], fields_of))


def batches_of(dataset: mm.Dataset, batching: mm.Flat | None) -> list[Batch]:
    audio._constants.cache_clear()  # as in a new process
    decode = mm.Decode(
        {
            "jpg": mm.ImageDecoder(size=16, crop="random", flip=0.5),
            "boxes": mm.Boxes("json.boxes", format="xywh"),
        },
        same_geometry=("jpg", "boxes"),
        video=mm.VideoDecoder(num_frames=2, size=16),
        audio=mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures()),
        text=mm.TextDecoder(byte_tokenizer()),
    )
    pipeline = mm.Pipeline(dataset, global_batch_size=2, decode=decode, batching=batching)
    normalize = mm.Normalize((0.5,) * 3, (0.5,) * 3)
    return list(mm.to_device(mm.Loader(pipeline, num_workers=0), "cpu", normalize=normalize))


@pytest.fixture(scope="module", params=[None, mm.Flat()], ids=["padded", "flat"])
def expected(dataset: mm.Dataset, request: Any) -> tuple[mm.Flat | None, list[Batch]]:
    return request.param, batches_of(dataset, request.param)


@pytest.mark.parametrize("setting", SETTINGS)
def test_batches_are_the_same_under_any_setting(
    dataset: mm.Dataset, expected: tuple[mm.Flat | None, list[Batch]], setting: str
) -> None:
    batching, reference = expected
    with SETTINGS[setting]():
        batches = batches_of(dataset, batching)
    for batch, known in zip(batches, reference, strict=True):
        assert batch.keys() == known.keys()
        for name, value in known.items():
            if not isinstance(value, torch.Tensor):
                continue
            assert batch[name].dtype == value.dtype, name
            assert batch[name].equal(value), name
            assert not batch[name].is_inference(), name


def test_samples_without_a_loader_are_the_same_under_another_device(dataset: mm.Dataset) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8))
    pipeline = mm.Pipeline(dataset, global_batch_size=2, decode=decode)
    [known] = pipeline.take(1)
    with torch.device("meta"), torch.inference_mode():
        [sample] = pipeline.take(1)
    assert sample["image"].equal(known["image"])
    assert not sample["image"].is_inference()
