"""Blocks of steps that are read together, when a run jumps back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import mmstream as mm
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from tests.helpers.corpora import write_corpus


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
