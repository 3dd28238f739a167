"""Blocks of local files: how many steps are read together."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.reading import reader as reader_module
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from tests.helpers.corpora import write_corpus


@pytest.mark.parametrize(
    ("zero_copy", "expected"), [(False, [1, 2, 2, 2, 2, 2, 1]), (True, [1, 4, 4, 3])]
)
def test_a_block_has_as_many_steps_as_its_bytes_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_copy: bool, expected: list[int]
) -> None:
    """A sample has 1,024 bytes, a step 8,192. Views take no memory, so their blocks are longer."""
    dataset = mm.open_dataset(write_corpus(tmp_path, [48, 48], lambda _: {"bin": b"x"}))
    order = mm.Pipeline(dataset, global_batch_size=8).order
    monkeypatch.setattr(reader_module, "READ_BYTES", 2 * 8 * 1024)
    monkeypatch.setattr(reader_module, "MAPPED_BYTES", 4 * 8 * 1024)
    num_steps = []
    fetch = Fetcher.fetch

    def counted(fetcher: Fetcher, refs: Any, **options: Any) -> Any:
        num_steps.append(len(refs) // 8)
        return fetch(fetcher, refs, **options)

    monkeypatch.setattr(Fetcher, "fetch", counted)
    with closing(Reader(dataset, order, zero_copy=zero_copy)) as reader:
        for step in range(order.steps_per_epoch):
            reader.step(Job(0, step, 0, 8))
    assert [count for count in num_steps if count] == expected


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_step_can_be_taken_again_after_a_jump_back(tmp_path: Path, zero_copy: bool) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [20, 20]))
    order = dataset.plan_order(global_batch_size=4)
    with closing(Reader(dataset, order, zero_copy=zero_copy)) as reader:
        jobs = [Job(0, step, 0, 4) for step in (0, 1, 2, 3, 2, 3, 4, 1)]
        outcomes = [reader.step(job).outcomes for job in jobs]
    assert all(isinstance(sample, dict) for step in outcomes for sample in step)
    keys = [[sample["__key__"] for sample in step] for step in outcomes]
    assert keys[2] == keys[4] != keys[3] == keys[5]
    assert keys[1] == keys[7]
