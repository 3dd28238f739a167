"""Reads that come wrong by a bit: noticed, read again, counted, and no batch changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.dataset.shard_indexes import MAX_INDEX_READS
from mmstream.dataset.shards import MAX_SAMPLE_READS
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.process import needs_reader_process
from tests.helpers.bad_corpus import make_pipeline, offsets, patch
from tests.helpers.corpora import write_corpus
from tests.helpers.stores import BitFlips, watched, watched_pipeline
from tests.helpers.topology import collate_in_workers, described

COUNTS = [30, 1, 0, 40, 26]
DECODED = {"decode": mm.Decode(image=mm.ImageDecoder(size=16))}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", COUNTS, checksums=True)


def damage(folder: str, shard: int, index: int) -> None:
    """Change a byte of a sample's payload for good."""
    patch(folder, shard, int(offsets(folder, shard)[index]) + 700, b"\xa5")


def epoch(loader: mm.Loader) -> Iterator[tuple[Any, Any]]:
    """Of each batch, what it shows, and its pixels or bytes."""
    for batch in loader:
        shown = batch["image"] if "image" in batch else [bytes(data) for data in batch["jpg"]]
        yield described(batch), shown
    loader.close()


def assert_same(batches: list[Any], others: list[Any]) -> None:
    assert [step for step, _ in batches] == [step for step, _ in others]
    for (_, pixels), (_, other) in zip(batches, others, strict=True):
        assert torch.equal(pixels, other) if torch.is_tensor(pixels) else pixels == other


def assert_flips_change_nothing(
    pipeline: mm.Pipeline, log: Path, num_workers: int = 0, **store: Any
) -> None:
    """Without gaps between the samples of a range, each flip hits a sample, or an index."""
    calm = list(epoch(mm.Loader(pipeline)))
    flips = BitFlips(log)
    flipped, _ = watched_pipeline(pipeline, flips, max_gap_bytes=0, **store)
    loader = mm.Loader(flipped, num_workers=num_workers)
    assert_same(list(epoch(loader)), calm)
    assert not loader.stats.bad
    names = [name.rpartition(".")[2] for name, _, _ in flips.flips]
    num_samples, num_indexes = names.count("tar"), len(names) - names.count("tar")
    assert num_samples > 3
    # An index and its checksums are one read, in which both may be flipped.
    least = num_samples + (num_indexes + 1) // 2
    reads_ahead = needs_reader_process(flipped.dataset) or "concurrent" in store
    if num_workers or reads_ahead:
        least = 1  # what was read for the next epoch counts with its batches
    assert least <= loader.stats.num_wrong_reads <= num_samples + num_indexes


VIEWS = {"zero_copy": True}


@pytest.mark.parametrize(
    ("settings", "num_workers", "access"),
    [
        *((settings, workers, {}) for settings in ({}, DECODED) for workers in (0, 2)),
        pytest.param(VIEWS, 0, {}, id="views of ranges"),
        pytest.param(VIEWS, 0, {"concurrent": True}, id="of remote ones"),
    ],
)
def test_one_flipped_bit_in_a_fifth_of_reads_changes_no_batch_and_is_counted(
    folder, tmp_path, settings, num_workers, access
):
    pipeline = make_pipeline(folder, **settings)
    assert_flips_change_nothing(pipeline, tmp_path / "flips", num_workers, **access)


@pytest.mark.slow
@pytest.mark.s3
def test_flipped_bits_change_nothing_on_a_real_server(s3, tmp_path):
    folder = write_corpus(f"{s3}/{tmp_path.name}", COUNTS, checksums=True)
    pipeline = make_pipeline(folder, collate=collate_in_workers, **DECODED)
    assert_flips_change_nothing(pipeline, tmp_path / "flips", num_workers=2)


def test_every_source_of_a_mixture_is_checked(tmp_path):
    a, b = (
        mm.open_dataset(write_corpus(tmp_path / name, [20, 30], checksums=name == "a"))
        for name in ("a", "b")
    )
    flips = BitFlips(tmp_path / "flips")

    def batches(first: mm.Dataset) -> list[Any]:
        mixture = mm.Mixture({"a": (first, 1), "b": (b, 1)}, stop="first")
        return list(epoch(mm.Loader(mm.Pipeline(mixture, global_batch_size=8, window=16))))

    assert_same(batches(watched(a, flips, max_gap_bytes=0)), batches(a))
    assert len(flips.flips) > 3


@pytest.mark.parametrize("seed", range(2))
def test_a_flip_anywhere_in_a_sample_is_noticed_once_and_elsewhere_never(folder, tmp_path, seed):
    """Header, padding and payload; bytes between two samples of a range belong to neither."""
    dataset = mm.open_dataset(folder)
    for shard in range(len(COUNTS)):
        dataset.shards.indexes.columns(shard)
    wanted = np.random.default_rng(seed).permutation(40)[:20]
    flips = BitFlips(tmp_path / "flips", rate=1.0)
    flipped = watched(dataset, lambda name, *read: flips(name, *read) if is_tar(name) else read[1])
    fetcher = Fetcher(flipped)
    held = fetcher.fetch([(3, index) for index in wanted])
    bounds = offsets(folder, 3)
    hit = {
        int(np.searchsorted(bounds, start + bit // 8, side="right")) - 1
        for _, (start, _), bit in flips.flips
    } & set(wanted.tolist())
    outcomes = {index: held.take(position) for position, index in enumerate(wanted.tolist())}
    wrong = {index for index, outcome in outcomes.items() if not isinstance(outcome, dict)}
    assert wrong == hit
    assert fetcher.counts.pop()["num_wrong_reads"] == len(hit)
    for index in wrong:
        assert isinstance(outcomes[index], mm.errors.ChecksumError)
        assert str(outcomes[index]) == f"shard-000003.tar[{index}] bytes unlike their checksum"


def is_tar(name: str) -> bool:
    return name.endswith(".tar")


def test_a_damaged_sample_is_a_bad_sample_and_the_rest_of_the_epoch_is_untouched(folder):
    pipeline = make_pipeline(folder, **DECODED)
    calm = list(epoch(mm.Loader(pipeline)))
    damage(folder, 3, 8)
    loader = mm.Loader(make_pipeline(folder, **DECODED))
    batches = list(epoch(loader))
    assert loader.stats.bad == {"ChecksumError": 1}
    assert loader.stats.num_wrong_reads == MAX_SAMPLE_READS
    (bad,) = [bad for step, _ in batches for bad in step.bad]
    changed = 0
    for (step, pixels), (calm_step, calm_pixels) in zip(batches, calm, strict=True):
        for row, ref in enumerate(calm_step.shown):
            if ref == (3, 8):
                changed += 1
            else:
                assert step.shown[row] == ref
                assert torch.equal(pixels[row], calm_pixels[row])
    assert changed == 1
    assert "shard-000003.tar[8] bytes unlike their checksum" in str(bad)


def test_random_access_reads_again_and_then_raises(folder, tmp_path):
    dataset = mm.open_dataset(folder)
    flipped = watched(dataset, BitFlips(tmp_path / "flips"))
    assert [flipped[n] for n in range(len(flipped))] == list(dataset)
    assert len(BitFlips(tmp_path / "flips").flips) > 3
    damage(folder, 0, 4)
    start = int(offsets(folder, 0)[4])
    flipped = watched(mm.open_dataset(folder))
    with pytest.raises(mm.errors.ChecksumError, match=r"^shard-000000\.tar\[4\] "):
        flipped[4]
    assert len([one for one in flipped.store.ranges if one[1] == start]) == MAX_SAMPLE_READS


def test_the_stream_for_webdataset_reads_again_too(folder, tmp_path):
    pipeline = make_pipeline(folder)
    flipped, _ = watched_pipeline(pipeline, BitFlips(tmp_path / "flips"))
    assert list(flipped.as_webdataset()) == list(pipeline.as_webdataset())
    damage(folder, 3, 8)
    with pytest.raises(mm.errors.ChecksumError, match=r"shard-000003\.tar\[8\]"):
        list(make_pipeline(folder).as_webdataset())


@pytest.mark.parametrize("content", [None, b"", b"\0" * 164, b"\0" * 4000])
def test_checksums_that_are_lost_or_damaged_are_read_again_and_then_an_error(folder, content):
    path = Path(folder, "shard-000003.tar.crc32c")
    assert path.stat().st_size == 164
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    dataset = watched(mm.open_dataset(folder))
    with pytest.raises(
        mm.errors.ShardError, match=r"shard-000003\.tar.*mmstream index --checksums"
    ):
        dataset.shards.offsets(3)
    requests = [one for one in dataset.store.range_reads if one[0][0] == "shard-000003.tar.idx"]
    assert len(requests) == MAX_INDEX_READS
    with pytest.raises(mm.errors.ShardError, match=r"shard-000003\.tar"):
        list(mm.Loader(make_pipeline(folder)))


def test_of_an_index_larger_than_memory_no_more_is_read_than_an_index_has(folder):
    right = mm.open_dataset(folder).shards.offsets(3)
    with Path(folder, "shard-000003.tar.idx").open("r+b") as file:
        file.truncate(1 << 40)
    assert (
        mm.open_dataset(folder).shards.offsets(3).tolist() == right.tolist()
    )  # the checksums fit it
    dataset = watched(mm.open_dataset(folder, checksums=False))
    with pytest.raises(
        mm.errors.ShardError, match=r"shard-000003\.tar\.idx: 1099511627776 bytes, but"
    ):
        dataset.shards.offsets(3)
    assert set(dataset.store.ranges) == {("shard-000003.tar.idx", 0, 328)}


def test_a_manifest_with_more_samples_than_bytes_is_refused_before_memory_is_taken(folder):
    dataset = mm.open_dataset(folder)
    shards = [replace(info, num_samples=1 << 45) for info in dataset.manifest.shards]
    dataset = watched(mm.Dataset(replace(dataset.manifest, shards=tuple(shards)), dataset.store))
    with pytest.raises(mm.errors.ShardError, match="cannot hold"):
        dataset.shards.offsets(0)
    assert dataset.store.ranges == []


def test_three_damaged_samples_of_a_shard_are_one_warning_that_names_it(folder, caplog):
    for shard, index in [(3, 3), (3, 9), (3, 12), (3, 20), (0, 2)]:
        damage(folder, shard, index)
    caplog.set_level(logging.WARNING)
    loader = mm.Loader(make_pipeline(folder))
    for _ in range(2):
        list(loader)
    assert loader.stats.bad == {"ChecksumError": 10}
    (warning,) = [text for text in caplog.messages if "3 samples of" in text]
    assert warning.startswith(
        "3 samples of shard-000003.tar have other bytes than their checksums say: the shard was "
        "replaced or is damaged; run `mmstream verify"
    )
