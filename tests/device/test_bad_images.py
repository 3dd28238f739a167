"""Pictures that the device refuses: decoded by the CPU after all, or bad without a substitute."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.device_images import (
    batches,
    broken_inside,
    libjpeg,
    make_pipeline,
    on_cpu,
    on_device,
    photograph,
    rows_of,
    strict,
)
from tests.helpers.pictures import JPEG, psnr


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("photographs"), [25, 23], photograph)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sample 7 looks whole, and is not."""

    def fields(number: int) -> dict[str, bytes]:
        return captioned(number) | ({"jpg": broken_inside()} if number == 7 else {})

    return write_corpus(tmp_path_factory.mktemp("faulty"), [16], fields)


def test_what_the_device_refuses_the_cpu_decodes(
    photographs: str, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        if any(len(file) % 2 for file in files):
            raise RuntimeError("Error while decoding JPEG images: 6")
        return libjpeg(files, device)

    expected = batches(make_pipeline(photographs, "cpu"))
    with caplog.at_level(logging.WARNING, "mmstream"):
        device_batches = batches(make_pipeline(photographs), decode_jpegs=picky)
    assert [record.message for record in caplog.records] == [
        "the GPU refused a JPEG; the CPU decodes it instead: Error while decoding JPEG images: 6"
    ]
    for one, other in zip(device_batches, expected):
        assert rows_of(one) == rows_of(other)
        assert min(map(psnr, one["image"], other["image"])) >= 50


def test_a_result_of_another_shape_is_not_believed() -> None:
    def grey(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        return [pixels[:1] for pixels in libjpeg(files, device)]

    assert torch.equal(on_device(JPEG, grey, size=40), on_cpu(JPEG, size=40))


def test_memory_that_runs_out_is_no_fault_of_the_pictures() -> None:
    def full(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError("Error while decoding JPEG images: CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        on_device(JPEG, full, size=40)


def test_what_no_decoder_takes_makes_its_row_invalid(faulty: str, tmp_path: Path) -> None:
    policy = mm.BadSamplePolicy(quarantine=str(tmp_path), max_fraction=1)
    pipeline = make_pipeline(faulty, rows=16, bad_samples=policy, shuffle=False, size=24)
    loader = mm.Loader(pipeline, world=mm.World(0, 1))
    (batch,) = mm.to_device(loader, "cpu", decode_jpegs=strict)
    assert batch["__valid__"].tolist() == [row != 7 for row in range(16)]
    assert not batch["image"][7].any()
    assert all(batch["image"][row].any() for row in range(16) if row != 7)
    (record,) = batch["__lineage__"].bad
    assert (record.row, record.index, record.substitute) == (7, 7, None)
    assert record.reason.startswith("shard-000000.tar[7] 000007.jpg: JPEG: ")
    assert (loader.stats.num_samples, loader.stats.num_bad) == (16, 1)
    (line,) = (tmp_path / "quarantine-rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["index"] == 7
    assert loader.state_dict()["epoch"] == 1


def test_damage_that_the_device_does_not_see_is_shown(faulty: str) -> None:
    (batch,) = batches(make_pipeline(faulty, rows=16, size=24))
    assert batch["__valid__"].all()
    assert batch["__lineage__"].bad == ()


def test_to_raise_at_bad_samples_is_to_raise_at_those_of_the_device(faulty: str) -> None:
    pipeline = make_pipeline(
        faulty, bad_samples=mm.BadSamplePolicy("raise"), shuffle=False, size=24
    )
    loader = mm.Loader(pipeline, world=mm.World(0, 1))
    with pytest.raises(mm.DecodeError, match=r"shard-000000\.tar\[7\] 000007\.jpg: JPEG"):
        list(mm.to_device(loader, "cpu", decode_jpegs=strict))
    assert loader.state_dict()["step"] == 0


def drop_odd(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__lineage__"].index != 7:
        raise mm.SampleError("not this one")
    return sample


def test_a_substitute_that_is_bad_too_leaves_its_row_invalid(faulty: str) -> None:
    policy = mm.BadSamplePolicy(quarantine=None, max_fraction=1, max_consecutive=0)
    pipeline = make_pipeline(
        faulty, bad_samples=policy, shuffle=False, size=24, transforms=(drop_odd,)
    )
    loader = mm.Loader(pipeline, world=mm.World(0, 1))
    for batch in mm.to_device(loader, "cpu", decode_jpegs=strict):
        assert not batch["__valid__"].any()
        assert all(record.substitute is None for record in batch["__lineage__"].bad)
    assert (loader.stats.num_samples, loader.stats.num_bad) == (16, 16)


def test_labels_of_a_row_that_became_invalid_are_masked(faulty: str) -> None:
    def tokens(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "input_ids": np.arange(3), "labels": np.arange(3)}

    pipeline = make_pipeline(faulty, shuffle=False, size=24, transforms=(tokens,))
    loader = mm.Loader(pipeline, world=mm.World(0, 1))
    first = next(iter(mm.to_device(loader, "cpu", decode_jpegs=strict)))
    assert first["labels"][7].tolist() == [-100] * 3
    assert first["labels"][6].tolist() == [0, 1, 2]


def test_a_picture_beyond_the_limits_is_bad_before_it_is_sent() -> None:
    for limits in ({"max_pixels": 100}, {"max_bytes": 100}):
        decoder = mm.ImageDecoder(size=8, device="cuda", **limits)
        with pytest.raises(mm.DecodeError, match="exceeds max_"):
            decode_sample({"__key__": "a", "jpg": JPEG}, mm.Decode(image=decoder))
