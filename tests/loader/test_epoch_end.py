"""The first batches of an epoch are made before it is asked for; they are used or dropped."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import mmstream as mm
from mmstream.loader.batch_makers import Workers
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.states import edited
from tests.helpers.wait import wait_until

STEPS, PREFETCH_FACTOR = 6, 2


def note(file: Path, sample: dict[str, Any]) -> dict[str, Any]:
    """Write down the epoch and the step for which a sample is made."""
    with file.open("a") as log:
        log.write(f"{sample['__lineage__'].epoch} {sample['__lineage__'].step}\n")
    return sample


def steps_made(file: Path) -> set[tuple[int, int]]:
    words = map(str.split, file.read_text().splitlines())
    return {(int(epoch), int(step)) for epoch, step in words}


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def pipeline(tmp_path, log) -> mm.Pipeline:
    dataset = mm.open_dataset(write_tiny(tmp_path / "shards", [8 * STEPS]))
    return mm.Pipeline(dataset, global_batch_size=8, seed=1, transforms=(partial(note, log),))


def epochs(pipeline: mm.Pipeline, num_epochs: int) -> list[list[list[str]]]:
    loader = mm.Loader(pipeline)
    return [[batch["__key__"] for batch in loader] for _ in range(num_epochs)]


def loader_of(pipeline: mm.Pipeline, num_workers: int = 2) -> mm.Loader:
    return mm.Loader(
        pipeline,
        num_workers=num_workers,
        prefetch_factor=PREFETCH_FACTOR,
        multiprocessing_context="fork",
    )


def test_the_next_epoch_begins_between_epochs_and_no_more_than_is_prefetched(pipeline, log):
    expected = epochs(pipeline, 3)
    log.unlink()
    loader = loader_of(pipeline)
    for epoch in range(3):
        assert [batch["__key__"] for batch in loader] == expected[epoch]
        assert loader.state_dict()["epoch"] == epoch + 1
        assert loader.stats.num_steps == STEPS * (epoch + 1)
        ahead = {(epoch + 1, step) for step in range(2 * PREFETCH_FACTOR)}
        wait_until(lambda: ahead <= steps_made(log))  # noqa: B023  # called before the next epoch
        time.sleep(0.2)  # for a step too many
        assert {step for step in steps_made(log) if step[0] == epoch + 1} == ahead
    loader.close()


def test_a_batch_that_was_made_is_not_made_again(pipeline, log):
    loader = loader_of(pipeline, num_workers=1)
    for _ in range(3):
        for _ in loader:
            pass
    loader.close()
    rows = log.read_text().splitlines()
    assert max(Counter(rows).values()) == 8  # a line for each row


@pytest.mark.parametrize("position", [(0, 3), (1, 2), (2, 0)])
def test_what_was_made_is_dropped_where_a_state_leads_elsewhere(pipeline, position):
    expected = epochs(pipeline, 3)
    loader = loader_of(pipeline)
    state = loader.state_dict()
    assert len(list(loader)) == STEPS
    loader.load_state_dict(edited(state, epoch=position[0], step=position[1]))
    assert [batch["__key__"] for batch in loader] == expected[position[0]][position[1] :]
    loader.close()


def test_a_loop_that_is_left_early_goes_on_without_a_new_start(pipeline, monkeypatch):
    starts = Mock(side_effect=Workers._start, autospec=True)
    monkeypatch.setattr(Workers, "_start", lambda *args: starts(*args))
    loader = loader_of(pipeline)
    keys = []
    for _ in range(2 * STEPS):
        keys.append(next(iter(loader))["__key__"])
        loader.load_state_dict(loader.state_dict())
    loader.close()
    assert keys == sum(epochs(pipeline, 2), [])
    assert starts.call_count == 1
