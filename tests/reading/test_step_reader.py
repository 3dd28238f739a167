"""The steps of the reader process become samples: each in its row, and errors in theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.errors import SampleError, ShardError
from mmstream.reading.messages import StepHeader
from mmstream.reading.reader import StepReader
from mmstream.reading.step import Job
from mmstream.storage.transfer_counts import TransferCounts
from tests.helpers.foreign_tars import make_tar


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_has_the_samples_of_its_tars_and_errors_in_their_rows(
    tmp_path: Path, mixed: bool, zero_copy: bool
) -> None:
    plain = [(f"{n:03d}.{field}", b"%d" % n) for n in range(30) for field in ("jpg", "txt")]
    odd = [("é.jpg", b"5"), ("f.jpg", b"1"), ("f.JPG", b"twice"), ("g.__key__", b"ours")]
    data = make_tar(plain + odd)
    (tmp_path / "0.tar").write_bytes(data)
    dataset = mm.open_dataset(tmp_path)
    source = mm.Mixture({"a": (dataset, 1), "b": (dataset, 1)}, stop="first") if mixed else dataset
    offsets = dataset.shards.offsets(0)
    num_samples = offsets.size - 1
    stops = offsets[1:].copy()
    stops[4] = offsets[4]  # an error has no bytes
    header = StepHeader(
        np.full(num_samples, 1 if mixed else 0),
        np.arange(num_samples),
        np.ones(num_samples, np.bool_),
        offsets[:-1],
        stops,
        {4: ShardError("gone")},
        {},
        TransferCounts(),
        0,
    )

    class Connection:
        def ask(self, request: object) -> tuple[StepHeader, memoryview]:
            return header, memoryview(data)

    order = mm.Pipeline(source, global_batch_size=2).order
    reader = StepReader(source, order, Connection(), zero_copy=zero_copy)
    outcomes = reader.step(Job(0, 0, 0, num_samples)).outcomes
    for index, outcome in enumerate(outcomes):
        if not isinstance(outcome, dict):
            continue
        assert outcome.pop("__lineage__")[:2] == (0, index)
        assert outcome.pop("__source__", "") == ("b" if mixed else "")
        assert outcome == {
            name: value for name, value in dataset[index].items() if name != "__lineage__"
        }
    errors = [(row, type(o)) for row, o in enumerate(outcomes) if not isinstance(o, dict)]
    assert errors == [(4, ShardError), (31, SampleError), (32, SampleError)]
