"""A plan and a measure in a folder: the same answers as in memory, from every store."""

from __future__ import annotations

import json
import operator
import os
import pickle
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ManifestError, StateError
from mmstream.packing import plan as plan_module
from mmstream.packing.plan import PackLimits, PackPlan, open_plan, write_plan
from mmstream.packing.planner import (
    Measure,
    measure_folder,
    measure_of_shards,
    plan_of_lengths,
    read_lengths,
    write_measure,
)
from mmstream.storage import open_store

COUNTS = [40, 0, 25, 60]
NUMBERS = ["group_stops 0", "counts 0", "shards 0 num_samples", "shards 0 num_bytes"]
"""Where plan.json has numbers."""

LENGTHS = [(7 * number) % 41 + 1 for number in range(125)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan() -> PackPlan:
    return plan_of_lengths(COUNTS, LENGTHS, PackLimits(64))


def require_same(plan: PackPlan, other: PackPlan) -> None:
    numbers = np.arange(plan.num_units)[::-1]
    arrays, others = (
        [*each.units(numbers), *each.sums(numbers), each.group_bytes, each.counts]
        for each in (plan, other)
    )
    for values, other_values in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(values, other_values)
    for name in ("settings", "digest", "group_names", "group_digests"):
        assert getattr(plan, name) == getattr(other, name)


def test_a_written_plan_answers_as_in_memory_and_pickles_as_its_address(
    plan: PackPlan, tmp_path: Path
) -> None:
    require_same(plan, pickle.loads(pickle.dumps(plan)))
    written = write_plan(plan, str(tmp_path / "plan"))
    require_same(plan, written)
    data = pickle.dumps(written)
    assert len(data) < 1000
    require_same(plan, pickle.loads(data))


def test_a_replaced_plan_is_not_taken_for_the_old_one(plan: PackPlan, tmp_path: Path) -> None:
    folder = str(tmp_path / "plan")
    data = pickle.dumps(write_plan(plan, folder))
    write_plan(plan_of_lengths(COUNTS, LENGTHS, PackLimits(50)), folder)
    with pytest.raises(StateError, match="was replaced"):
        pickle.loads(data)


def test_equal_plans_give_equal_files(plan: PackPlan, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_plan(plan, str(tmp_path / name))
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_a_remote_plan_is_read_from_the_cache_of_the_machine(plan: PackPlan, cache: Path) -> None:
    require_same(plan, write_plan(plan, "memory://plans/remote"))
    assert len(list((cache / "mmstream" / "index").iterdir())) == 2  # the arrays and their lock
    require_same(plan, open_plan("memory://plans/remote"))


def test_a_damaged_array_is_refused_and_one_of_another_size_is_not_read(
    plan: PackPlan, tmp_path: Path
) -> None:
    write_plan(plan, str(tmp_path))
    (path,) = tmp_path.glob("arrays.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ManifestError, match="sha256"):
        open_plan(str(tmp_path))
    os.truncate(path, 1 << 40)  # holes
    with pytest.raises(ManifestError, match=r"arrays.* 1099511627776 bytes, and plan.json says"):
        open_plan(str(tmp_path))


def test_files_of_other_versions_are_refused_with_the_cure(plan: PackPlan, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent: no plan; run `mmstream plan` first"):
        open_plan(str(tmp_path / "absent"))
    write_plan(plan, str(tmp_path))
    file = tmp_path / "plan.json"
    newer = json.loads(file.read_bytes()) | {"version": 3}
    older = json.loads(file.read_bytes()) | {"version": 1, "arrays": {}}
    del newer["crc32c"], older["crc32c"], older["sha256"]
    for content, reason in (
        (newer, "format version 3, .* install a newer mmstream"),
        (older, "run `mmstream plan` with --overwrite"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ManifestError, match=reason):
            open_plan(str(tmp_path))


@pytest.mark.parametrize("block_rows", [3, plan_module.BLOCK_ROWS])
def test_impossible_numbers_are_refused(
    plan: PackPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(plan_module, "BLOCK_ROWS", block_rows)
    write_plan(plan, str(tmp_path / "right"))
    swapped, late, overflowing = (plan.unit_rows.copy() for _ in range(3))
    swapped[[1, 2]] = plan.unit_rows[[2, 1]]
    late[-1, 0] = plan.members.size
    overflowing[1:3, 0] = (1 << 62) + 5, -(1 << 62) - 9  # they rise only where they overflow
    wrong = [{"unit_rows": rows} for rows in (swapped, late, overflowing)]
    repeated = plan.members.copy()
    repeated[:20] = repeated[20]
    wrong += [{"members": plan.members + 1}, {"members": repeated}]
    for number, arrays in enumerate(wrong):
        with pytest.raises(ManifestError, match="do not fit each other"):
            write_plan(replace(plan, **arrays), str(tmp_path / str(number)))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        *((path, number) for path in NUMBERS for number in (1 << 63, -1)),
        ("settings document_multiple_of", 0),
        ("settings max_tokens", -1),
        ("settings max_images", "4"),
        ("settings overlong", "cut"),
        ("settings speed", 1),
    ],
)
def test_numbers_that_no_array_holds_and_settings_that_no_plan_has_are_refused(
    plan: PackPlan, tmp_path: Path, path: str, wrong: Any
) -> None:
    write_plan(plan, str(tmp_path))
    file = json.loads((tmp_path / "plan.json").read_bytes())
    del file["crc32c"]  # as a person does who edits it
    *outer, name = (int(word) if word.isdigit() else word for word in path.split())
    reduce(operator.getitem, outer, file)[name] = wrong
    (tmp_path / "plan.json").write_text(json.dumps(file))
    with pytest.raises(ManifestError, match=str(name) if "settings" in path else r"plan\.json"):
        open_plan(str(tmp_path))


def test_lengths_are_read_as_they_were_written(tmp_path: Path) -> None:
    shards = (ShardInfo("a.tar", 2, 4096, "ab" * 32), ShardInfo("b.tar", 1, 2048))
    columns = {"num_tokens": np.array([5, -1, 7]), "num_images": np.array([1, 0, 2])}
    settings = {"tokenizer": "crc"}
    write_measure(Measure(shards, columns, settings), str(tmp_path))
    store = open_store(measure_folder(str(tmp_path), settings))
    first, second, absent = read_lengths(store, [*shards, ShardInfo("c.tar", 1, 2048)])
    assert absent is None
    assert first is not None
    assert second is not None
    opened = measure_of_shards(shards, [first, second], settings)
    assert opened.column("num_tokens").tolist() == [5, -1, 7]
    assert opened.column("num_images").tolist() == [1, 0, 2]
    assert opened.column("num_documents").tolist() == [1, 1, 1]
    assert read_lengths(store, [replace(shards[1], num_samples=2)]) == [None]
