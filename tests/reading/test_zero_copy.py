"""Raw samples as views of mapped or fetched ranges: the same samples, valid as long as held."""

from __future__ import annotations

import gc
import os
import tarfile
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmstream as mm
from mmstream.errors import ShardError
from mmstream.reading import fetcher as fetching
from mmstream.reading.reader import Reader
from mmstream.reading.step import Job
from mmstream.storage import local
from mmstream.tar.header import BLOCK, plain_file, read_member
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import watched


def steps_of(dataset, views, num_steps=None):
    """All samples of an epoch, step by step; errors as their text."""
    order = mm.Pipeline(dataset, global_batch_size=8, window=16).order
    jobs = (Job(0, step, 0, 8) for step in range(order.steps_per_epoch))
    with closing(Reader(dataset, order, zero_copy=views)) as reader:
        for step in map(reader.step, islice(jobs, num_steps)):
            yield [s if isinstance(s, dict) else (type(s), str(s)) for s in step.outcomes]


def payloads(samples):
    """The values of all fields, without key, URL and lineage."""
    return [v for sample in samples for k, v in sample.items() if k[:2] != "__"]


def num_open_files() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def maps_of(folder) -> int:
    """How many maps of files in a folder this process holds."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("instead", ["maps", "far away", "too many shards", "no maps"])
def test_views_are_the_same_samples_mapped_or_read(corpus, monkeypatch, instead):
    def refuse(*_, **__):
        raise OSError("too many open files")

    dataset = mm.open_dataset(corpus)
    expected = list(steps_of(dataset, False))
    if instead == "far away":
        dataset = watched(dataset, maps_files=False)
    elif instead == "too many shards":
        monkeypatch.setattr(fetching, "MAX_MAPS", 1)
    elif instead == "no maps":
        monkeypatch.setattr(local, "mmap", refuse)
    viewed = list(steps_of(dataset, True))
    assert viewed == expected
    assert {type(value) for step in expected for value in payloads(step)} == {bytes}
    assert {type(value) for step in viewed for value in payloads(step)} == {memoryview}
    assert all(value.readonly for step in viewed for value in payloads(step))


def test_a_view_stays_valid_after_all_else_is_gone_and_a_map_ends_with_its_last_view(tmp_path):
    dataset = mm.open_dataset(write_corpus(tmp_path, [40, 40]))
    expected = sum(steps_of(dataset, False), [])
    viewed = sum(steps_of(dataset, True), [])
    num_open = num_open_files()
    assert maps_of(tmp_path) > 0
    for path in tmp_path.iterdir():
        path.unlink()
    gc.collect()
    assert payloads(viewed) == payloads(expected)
    del viewed
    gc.collect()
    assert maps_of(tmp_path) == 0
    assert num_open_files() < num_open


def test_of_a_truncated_shard_the_samples_before_the_cut_are_good(tmp_path):
    folder = write_corpus(tmp_path, [40])
    dataset = mm.open_dataset(folder)
    expected = list(steps_of(dataset, False))
    os.truncate(tmp_path / "shard-000000.tar", int(dataset.shards.offsets(0)[20]))
    dataset = mm.open_dataset(folder)
    viewed = list(steps_of(dataset, True))
    assert viewed == list(steps_of(dataset, False))
    for before, after in zip(sum(expected, []), sum(viewed, []), strict=True):
        if before["__lineage__"].index < 20:
            assert after == before
        else:
            assert after[0] is ShardError
            assert "truncated" in after[1]


def test_a_pipeline_of_views_is_the_same_batches_with_nothing_parsed(corpus):
    dataset = mm.open_dataset(corpus)
    as_bytes = mm.Pipeline(dataset, global_batch_size=8)
    as_views = mm.Pipeline(dataset, global_batch_size=8, zero_copy=True)
    assert as_views.order.identity() == as_bytes.order.identity()
    for one, other in zip(mm.Loader(as_bytes), mm.Loader(as_views), strict=True):
        assert one["__key__"] == other["__key__"]
        assert one["jpg"] == other["jpg"]
        assert {type(value) for name in ("jpg", "json") for value in other[name]} == {memoryview}
    assert type(as_views.take(1)[0]["jpg"]) is memoryview


def test_views_refuse_decoders_and_workers(corpus):
    dataset = mm.open_dataset(corpus)
    with pytest.raises(mm.ConfigError, match="decoders take bytes"):
        mm.Pipeline(dataset, global_batch_size=8, zero_copy=True, decode=mm.Decode())
    pipeline = mm.Pipeline(dataset, global_batch_size=8, zero_copy=True)
    with pytest.raises(mm.ConfigError, match="num_workers=0"):
        next(iter(mm.Loader(pipeline, num_workers=1)))


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=110)


@given(names, st.integers(0, 8**11 - 1), st.sampled_from([b"0", b"\0", b"5", b"L"]),
       st.none() | st.tuples(st.integers(0, BLOCK - 1), st.integers(1, 255)))  # fmt: skip
def test_the_quick_look_at_a_header_says_what_the_thorough_one_says(name, size, kind, flip):
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")[-BLOCK:])
    if flip is not None:
        header[flip[0]] ^= flip[1]
    quick = plain_file(bytes(header), 0)
    if quick is not None:
        member = read_member(lambda start, stop: b"", bytes(header), 0, 1 << 40)
        assert (member.name, member.size, member.is_file) == (*quick, True)
        assert member.data_offset == BLOCK
    elif flip is None and kind == b"0" and len(name.encode()) <= 100:
        raise AssertionError("a plain header was not seen as one")
