"""Another selection begins where an epoch does, also where shards were appended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import mmstream as mm
from tests.helpers.bad_corpus import write_tiny

COUNTS = (7, 5, 18)


def loader(view: mm.Dataset) -> mm.Loader:
    pipeline = mm.Pipeline(view, global_batch_size=4)
    return mm.Loader(pipeline, world=mm.World(0, 1), on_change="finish_epoch")


@pytest.mark.parametrize("num_chosen", [5, None])
def test_another_selection_begins_with_an_epoch_of_a_grown_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_chosen: int | None
) -> None:
    old = mm.open_dataset(write_tiny(tmp_path / "old", COUNTS))
    new = mm.open_dataset(write_tiny(tmp_path / "new", (*COUNTS, 9)))
    run = loader(old[::2])
    states = [run.state_dict() for _ in run]
    with caplog.at_level(logging.INFO, "mmstream"):
        grown = loader(new if num_chosen is None else new[:num_chosen])
        grown.load_state_dict(states[-1])
    assert "before, 15 chosen took part" in caplog.text
    assert grown.state_dict()["order"]["num_shards"] == 4
    assert len(list(grown)) == (39 if num_chosen is None else num_chosen) // 4
    with pytest.raises(mm.StateError, match="the chosen samples are not those of the state"):
        loader(new[1::2]).load_state_dict(states[0])
