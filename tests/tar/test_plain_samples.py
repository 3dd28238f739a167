"""Samples of plain files, made by the compiled module: those of `parse_sample`, or none.

`test_scan.py` compares the two for tars of all kinds.
"""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.index import build_index
from mmstream.errors import SampleError, ShardError
from mmstream.reading.messages import StepHeader
from mmstream.reading.step import Job
from mmstream.reading.step_reader import StepReader
from mmstream.storage.transfer_counts import TransferCounts
from mmstream.tar import plain_samples as module
from mmstream.tar.header import BLOCK
from mmstream.tar.plain_samples import plain_samples
from tests.helpers.foreign_tars import CountingStore, make_tar
from tests.tar.test_scan import num_made

needs_module = pytest.mark.skipif(
    module._load_compiled() is None, reason="mmstream.tar._plain_samples is not built"
)


@needs_module
def test_plain_samples_are_all_made():
    fields = ["jpg", "0.png", "CLS", "json"]
    data = make_tar([(f"{n:03d}.{field}", bytes(n)) for n in range(20) for field in fields])
    offsets = build_index(CountingStore(data), "x.tar")
    assert num_made(data, offsets[:-1], offsets[1:]) == 20


@needs_module
@pytest.mark.parametrize("byte", [0, 3, 124, 130, 135, 148, 155, 156, 200, 345, 511])
@pytest.mark.parametrize("header", [10 * 2048, 10 * 2048 + 1024])
def test_a_sample_with_a_damaged_header_is_not_made(byte, header):
    data = bytearray(make_tar([(f"{n:03d}.{f}", b"x") for n in range(20) for f in ("a", "b")]))
    data[header + byte] ^= 0x55
    offsets = np.arange(0, 21 * 2048, 2048)
    samples = plain_samples(memoryview(data), offsets[:-1], offsets[1:], ["u"] * 20)
    assert [number for number, sample in enumerate(samples) if sample is None] == [10]


@needs_module
@pytest.mark.parametrize(
    "name",
    ["é.a", "x/000.a", "000", ".a", "000.", "._0.a", "0.__a__", "__a.b", "0.image_row", "n" * 99],
)
def test_a_name_with_a_meaning_of_its_own_is_left_to_the_careful_way(name):
    data = make_tar([(name, b"x")])
    assert num_made(data, np.array([0]), np.array([1024])) == 0


@needs_module
def test_a_file_never_goes_past_its_sample():
    data = make_tar([("0.a", bytes(2000))])
    starts, stops = np.zeros(5, np.int64), np.arange(0, 2560, BLOCK)
    assert num_made(data, starts, stops) == 0
    assert num_made(data, np.array([0]), np.array([2560])) == 1


@needs_module
def test_ranges_that_make_no_sense_are_left_to_the_careful_way():
    data = memoryview(make_tar([("0.a", b"x"), ("1.a", b"x")]))[:2048]
    starts = np.array([0, -1024, 1, 1024, 1024, 1024, 2048, 1 << 62])
    stops = np.array([1024, 0, 1024, 1024, 0, 2000, 3072, -(1 << 62)])
    samples = plain_samples(data, starts, stops, ["u"] * 8)
    assert [sample is not None for sample in samples] == [True] + 7 * [False]


@needs_module
def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="one entry per sample"):
        plain_samples(memoryview(b""), np.zeros(1, np.int64), np.zeros(2, np.int64), ["u"])


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_is_the_same_without_the_module(tmp_path, monkeypatch, caplog, mixed):
    plain = [(f"{n:03d}.{field}", b"%d" % n) for n in range(30) for field in ("jpg", "txt")]
    odd = [("é.jpg", b"5"), ("f.jpg", b"1"), ("f.JPG", b"twice"), ("g.__key__", b"ours")]
    data = make_tar(plain + odd)
    (tmp_path / "0.tar").write_bytes(data)
    dataset = mm.open_dataset(tmp_path)
    source = mm.Mixture({"a": (dataset, 1), "b": (dataset, 1)}, stop="first") if mixed else dataset
    offsets = dataset.offsets(0)
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
        def ask(self, request):
            return header, memoryview(data)

    def outcomes():
        reader = StepReader(source, mm.Pipeline(source, global_batch_size=2).order, Connection())
        taken = reader.step(Job(0, 0, 0, num_samples)).outcomes
        return [list(s.items()) if isinstance(s, dict) else (type(s), str(s)) for s in taken]

    expected = outcomes()
    monkeypatch.setitem(sys.modules, "mmstream.tar._plain_samples", None)
    module._load_compiled.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, "mmstream.tar"):
            assert outcomes() == expected
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
    finally:
        module._load_compiled.cache_clear()
    kinds = [outcome[0] for outcome in expected if isinstance(outcome, tuple)]
    assert kinds == [ShardError, SampleError, SampleError]
