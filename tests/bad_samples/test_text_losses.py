"""Texts that lose something on their way: counted exactly, and said once, not once per sample."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.world import World
from tests.helpers.corpora import write_corpus

NUM_SAMPLES = 24


@pytest.fixture
def dataset(tmp_path: Path) -> mm.Dataset:
    """Every third text has 60 bytes, and so 62 tokens."""
    write_corpus(tmp_path, [NUM_SAMPLES], lambda n: {"txt": b"a" * (60 if n % 3 == 0 else 5)})
    return mm.open_dataset(tmp_path)


def loader(dataset: mm.Dataset, transforms: tuple[Any, ...] = (), **options: Any) -> mm.Loader:
    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=4,
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=16)),
        transforms=transforms,
        bad_samples=mm.BadSamplePolicy(quarantine=None),
        drop_last=False,
    )
    return mm.Loader(pipeline, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_cut_texts_are_counted_and_warned_of_once(
    dataset: mm.Dataset, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    running = loader(dataset, num_workers=num_workers)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for batch in running:
                assert "__text_loss__" not in batch
    running.close()
    assert running.stats.num_cut_texts == 2 * NUM_SAMPLES // 3
    assert running.stats.num_bad == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert messages[0].startswith("shard-000000.tar[")
    assert ".txt: text of 62 tokens cut to max_length=16; others are only counted" in messages[0]
    assert messages[1:] == [
        f"after epoch {epoch}, since the loader was made: {cut} samples had their text cut at "
        "max_length"
        for epoch, cut in ((0, "8 of 24"), (1, "16 of 48"))
    ]


def test_the_ranks_count_their_own_rows(dataset: mm.Dataset) -> None:
    counts = []
    for rank in range(2):
        running = loader(dataset, world=World(rank, 2))
        list(running)
        counts.append(running.stats.num_cut_texts)
    assert sum(counts) == NUM_SAMPLES // 3


def test_texts_that_fit_are_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_corpus(tmp_path, [8], lambda n: {"txt": b"a" * 14})
    running = loader(mm.open_dataset(tmp_path))
    list(running)
    assert running.stats.num_cut_texts == 0
    assert not caplog.records


def test_padding_rows_and_masked_rows_are_not_counted(tmp_path: Path) -> None:
    write_corpus(tmp_path, [5], lambda n: {"txt": b"a" * 60})
    running = loader(mm.open_dataset(tmp_path))
    assert sum(int(batch["__valid__"].sum()) for batch in running) == 5
    assert running.stats.num_cut_texts == 5


def test_a_transform_can_neither_hide_nor_change_what_was_lost(dataset: mm.Dataset) -> None:
    def rebuild(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": sample["input_ids"], "__text_loss__": None}

    running = loader(dataset, (rebuild,))
    list(running)
    assert running.stats.num_cut_texts == NUM_SAMPLES // 3
