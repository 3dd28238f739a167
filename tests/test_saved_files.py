"""Files that 0.2 saved load in this version, and a run goes on exactly where it stopped.

They are as 0.2 wrote them. Do not write them again: a test that fails means that runs and datasets
of users cannot go on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from tests.helpers.paths import ROOT

SAVED = ROOT / "tests" / "golden" / "saved_by_0_2"
CASES: dict[str, dict[str, Any]] = {
    "shuffled": {"global_batch_size": 4, "seed": 3},
    "grid": {"global_batch_size": 6, "seed": 1, "grid": (2, 3), "window": 5},
    "lanes": {"global_batch_size": 4, "grid": (1, 2), "window": 8, "reshuffle": "lanes"},
    "rest": {"global_batch_size": 8, "shuffle": False, "drop_last": False},
    "mixture": {"global_batch_size": 4, "seed": 2},
}
"""Settings of the pipelines whose states were saved after three steps."""


def draws(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"draw": int(mm.sample_rng(sample).integers(1 << 31))}


def loader_of(name: str) -> mm.Loader:
    is_mixture = name == "mixture"
    data: Any = (
        mm.Mixture.open(SAVED / "mixture.json") if is_mixture else mm.open_dataset(SAVED / "a")
    )
    policy = mm.BadSamplePolicy(max_fraction=1.0, max_consecutive=0, quarantine=None)
    return mm.Loader(mm.Pipeline(data, transforms=(draws,), bad_samples=policy, **CASES[name]))


def delivered(loader: mm.Loader, num_steps: int) -> list[Any]:
    """Keys, draws and validity of the next steps, over epochs."""
    steps: list[Any] = []
    while len(steps) < num_steps:
        for batch in loader:
            steps.append([batch["__key__"], batch["draw"].tolist(), batch["__valid__"].tolist()])
            if len(steps) == num_steps:
                break
    return steps


@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_gives_the_batches_that_followed(name: str) -> None:
    loader = loader_of(name)
    state = json.loads((SAVED / "states" / f"{name}.json").read_text())
    expected = json.loads((SAVED / "expected" / f"{name}.json").read_text())
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert delivered(loader, len(expected)) == expected
    loader.close()


def test_saved_datasets_are_whole_and_are_converted_to_the_same_bytes(tmp_path: Path) -> None:
    dataset = mm.open_dataset(SAVED / "a")
    assert (len(dataset), len(dataset.bad)) == (30, 2)
    assert dataset.has_checksums
    shutil.copytree(SAVED / "rows", tmp_path / "rows")
    rows, settings = tmp_path / "rows" / "rows.jsonl", {"sidecar": False, "progress": False}
    mm.convert(rows, tmp_path / "a", samples_per_shard=8, num_workers=0, **settings)
    for path in SAVED.glob("a/shard-*"):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes(), path.name
    converted = mm.open_dataset(tmp_path / "a")
    for shard in range(dataset.num_shards):
        saved, now = (of.shards.indexes.part_columns(shard) for of in (dataset, converted))
        assert saved.offsets().tolist() == now.offsets().tolist()
        assert saved.checksums.tolist() == now.checksums.tolist()
