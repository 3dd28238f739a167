"""Files that 0.2 saved load in this version, and a run goes on exactly where it stopped.

``python -m tests.test_saved_files`` wrote them. Do not write them anew: a test that fails means
that runs and datasets of users cannot go on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import write_bad
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
        mm.open_mixture(SAVED / "mixture.json") if is_mixture else mm.open_dataset(SAVED / "a")
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
    convert(tmp_path / "rows", tmp_path / "a")
    for path in [*SAVED.glob("a/shard-*"), *SAVED.glob("a/mmstream.index.*")]:
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes(), path.name


def convert(rows: Path, dest: Path) -> None:
    mm.convert(
        rows / "rows.jsonl", dest, samples_per_shard=8, num_workers=0, sidecar=False, progress=False
    )


def save() -> None:
    """Write all files."""
    SAVED.mkdir()
    for name in ("rows", "states", "expected"):
        (SAVED / name).mkdir()
    rows = [{"text": f"text {number} " + "word " * (number % 5)} for number in range(30)]
    (SAVED / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("a", "b"):
        convert(SAVED / "rows", SAVED / name)
    write_bad(mm.open_dataset(SAVED / "a"), [(1, 2), (1, 5)])
    sources = {"a": {"url": "a", "weight": 3}, "b": {"url": "b", "weight": 1}}
    (SAVED / "mixture.json").write_text(json.dumps({"sources": sources, "epoch_steps": 9}) + "\n")
    for name in CASES:
        loader = loader_of(name)
        delivered(loader, 3)
        state = loader.state_dict()
        (SAVED / "states" / f"{name}.json").write_text(json.dumps(state, indent=1) + "\n")
        fresh = loader_of(name)
        steps = delivered(fresh, 16)[3:]
        text = ",\n".join(json.dumps(step) for step in steps)
        (SAVED / "expected" / f"{name}.json").write_text(f"[{text}]\n")


if __name__ == "__main__":
    save()
