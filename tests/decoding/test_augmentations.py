"""Augmentations of other libraries give the same pixels on every topology and after a resume."""

from __future__ import annotations

import io
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.families.family import import_torchvision
from tests.helpers.corpora import write_corpus

Sample = dict[str, Any]


# The libraries are imported in functions: that takes seconds, in each process that collects tests.
@cache
def torchvision_transform() -> Any:
    import_torchvision()
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(24, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandAugment(),
            v2.RandomErasing(),
        ]
    )


@cache
def albumentations_transform() -> Any:
    import albumentations

    return albumentations.Compose(
        [
            albumentations.HorizontalFlip(p=0.5),
            albumentations.RandomBrightnessContrast(p=0.8),
            albumentations.CoarseDropout(p=0.5),
        ]
    )


@cache
def open_clip_transform() -> Any:
    import_torchvision()
    import open_clip

    return open_clip.image_transform(24, is_train=True)


def with_torchvision(sample: Sample) -> Sample:
    return sample | {"torchvision": torchvision_transform()(sample["image"])}


def with_albumentations(sample: Sample) -> Sample:
    albumentations_transform().set_random_seed(int(mm.sample_rng(sample).integers(2**32)))
    pixels = np.ascontiguousarray(sample["image"].permute(1, 2, 0).numpy())
    return sample | {"albumentations": albumentations_transform()(image=pixels)["image"]}


def with_open_clip(data: bytes) -> torch.Tensor:
    result: torch.Tensor = open_clip_transform()(Image.open(io.BytesIO(data)))
    return result


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")

    def twice(number: int) -> dict[str, bytes]:
        buffer = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "JPEG")
        return {"jpg": buffer.getvalue(), "view.jpg": buffer.getvalue()}

    return write_corpus(folder, [10, 6], twice)


def make(corpus: str) -> mm.Pipeline:
    decode = mm.Decode({"jpg": mm.ImageDecoder(), "view.jpg": with_open_clip})
    return mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=8,
        decode=decode,
        transforms=(renamed, with_torchvision, with_albumentations),
    )


def renamed(sample: Sample) -> Sample:
    return {("image" if name == "jpg" else name): value for name, value in sample.items()}


def pixels_of(batches: Any) -> dict[tuple[int, str], list[bytes]]:
    names = ("torchvision", "albumentations", "view.jpg")
    return {
        (batch["__lineage__"].epoch, key): [batch[name][row].numpy().tobytes() for name in names]
        for batch in batches
        for row, key in enumerate(batch["__key__"])
    }


def pixels(corpus: str, **settings: Any) -> dict[tuple[int, str], list[bytes]]:
    with closing(mm.Loader(make(corpus), **settings)) as loader:
        return pixels_of(loader) | pixels_of(loader)


def test_threads_ranks_and_a_resume_change_no_pixel(corpus: str) -> None:
    expected = pixels(corpus, num_threads=1)
    for number in range(3):
        assert len({entry[number] for entry in expected.values()}) > 28  # some draw no change
    assert len(expected) == 32
    assert pixels(corpus, num_threads=4) == expected
    ranks = [pixels(corpus, world=mm.World(rank, 2)) for rank in range(2)]
    assert ranks[0] | ranks[1] == expected
    left = mm.Loader(make(corpus))
    first = pixels_of([next(iter(left))])
    loader = mm.Loader(make(corpus))
    loader.load_state_dict(left.state_dict())
    assert first | pixels_of(loader) | pixels_of(loader) == expected


@pytest.mark.slow
def test_workers_change_no_pixel(corpus: str) -> None:
    assert pixels(corpus, num_workers=1, num_threads=2) == pixels(corpus)
