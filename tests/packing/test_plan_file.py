"""A plan and a measure in a folder: the same answers as in memory, from every store."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmstream.dataset.manifest import ShardInfo
from mmstream.errors import ConfigError, ManifestError, StateError
from mmstream.packing import plan_file
from mmstream.packing.array_files import ArrayInfo, open_array
from mmstream.packing.measure_file import Measure, measure_folder, open_measure, write_measure
from mmstream.packing.plan import PackPlan
from mmstream.packing.plan_file import open_plan, write_plan
from mmstream.packing.planner import plan_of_lengths
from mmstream.packing.settings import PackLimits
from mmstream.storage import open_store

COUNTS = [40, 0, 25, 60]
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
    for values, others in zip(plan.units(numbers), other.units(numbers), strict=True):
        np.testing.assert_array_equal(values, others)
    for values, others in zip(plan.sums(numbers), other.sums(numbers), strict=True):
        np.testing.assert_array_equal(values, others)
    assert plan.settings == other.settings
    assert plan.digest == other.digest
    assert plan.group_names == other.group_names
    assert plan.group_digests == other.group_digests
    np.testing.assert_array_equal(plan.group_bytes, other.group_bytes)
    np.testing.assert_array_equal(plan.counts, other.counts)


def test_a_written_plan_answers_as_in_memory(plan: PackPlan, tmp_path: Path) -> None:
    require_same(plan, write_plan(plan, str(tmp_path / "plan")))
    require_same(plan, pickle.loads(pickle.dumps(plan)))


def test_a_plan_of_a_folder_pickles_as_its_address(plan: PackPlan, tmp_path: Path) -> None:
    data = pickle.dumps(write_plan(plan, str(tmp_path / "plan")))
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
    assert len(list((cache / "mmstream" / "index").iterdir())) == 8  # 4 arrays with their locks
    require_same(plan, open_plan("memory://plans/remote"))


def test_a_damaged_array_is_refused(plan: PackPlan, tmp_path: Path) -> None:
    write_plan(plan, str(tmp_path))
    (path,) = tmp_path.glob("members.*")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ManifestError, match="sha256"):
        open_plan(str(tmp_path))


@pytest.mark.parametrize("kind", ["plan", "measure"])
def test_a_file_of_a_newer_version_is_refused(plan: PackPlan, tmp_path: Path, kind: str) -> None:
    if kind == "plan":
        write_plan(plan, str(tmp_path))
    else:
        write_measure(Measure(plan.shards, {"num_tokens": np.array(LENGTHS)}), str(tmp_path))
    file = tmp_path / f"{kind}.json"
    content = {"version": 2, "more": json.loads(file.read_bytes())}
    file.write_text(json.dumps(content))
    open_it = open_plan if kind == "plan" else open_measure
    with pytest.raises(ManifestError, match=r"format version 2, .* install a newer mmstream"):
        open_it(str(tmp_path))


def test_impossible_numbers_are_refused(plan: PackPlan, tmp_path: Path) -> None:
    swapped, late = plan.unit_rows.copy(), plan.unit_rows.copy()
    swapped[[1, 2]] = plan.unit_rows[[2, 1]]
    late[-1, 0] = plan.members.size
    wrong = [{"members": plan.members + 1}, {"unit_rows": swapped}, {"unit_rows": late}]
    for number, arrays in enumerate(wrong):
        with pytest.raises(ManifestError, match="do not fit each other"):
            write_plan(replace(plan, **arrays), str(tmp_path / str(number)))


@pytest.mark.parametrize("number", [1 << 63, -1])
def test_numbers_that_no_array_holds_are_refused(
    plan: PackPlan, tmp_path: Path, number: int
) -> None:
    write_plan(plan, str(tmp_path))
    path = tmp_path / "plan.json"
    file = json.loads(path.read_bytes())
    del file["crc32c"]  # as a person does who edits it
    for part, name in (
        (file["group_stops"], 0),
        (file["counts"], 0),
        (file["shards"][0], "num_samples"),
        (file["shards"][0], "num_bytes"),
    ):
        before, part[name] = part[name], number
        path.write_text(json.dumps(file))
        with pytest.raises(ManifestError):
            open_plan(str(tmp_path))
        part[name] = before


def test_first_members_are_compared_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "BLOCK_ROWS", 3)
    for number in range(1, 8):
        numbers = np.arange(8)
        assert plan_file._rises(numbers)
        numbers[number] = numbers[number - 1]
        assert not plan_file._rises(numbers)


def test_a_measure_is_read_as_it_was_written(tmp_path: Path) -> None:
    shards = (ShardInfo("a.tar", 2, 4096, "ab" * 32), ShardInfo("b.tar", 1, 2048))
    columns = {"num_tokens": np.array([5, -1, 7]), "width": np.array([640, 0, 320])}
    measure = Measure(shards, columns, {"tokenizer": "crc"}, {"probes": [1]})
    folder = measure_folder(str(tmp_path), "bytes")
    write_measure(measure, folder, [b'{"position": 1}'])
    opened = open_measure(folder)
    assert opened.shards == shards
    assert opened.settings == measure.settings
    assert opened.details == measure.details
    assert opened.digest == measure.digest
    assert {name: column.tolist() for name, column in opened.columns.items()} == {
        "num_tokens": [5, -1, 7],
        "width": [640, 0, 320],
    }
    assert (tmp_path / "mmstream.measure.bytes" / "unusable.jsonl").read_text()


def test_a_measure_without_a_column_says_which_it_has() -> None:
    measure = Measure((ShardInfo("a.tar", 1, 2048),), {"num_tokens": np.array([5])})
    with pytest.raises(ConfigError, match="height: the measure has no such column, but num_docu"):
        measure.column("height")


def test_numbers_that_rise_only_where_they_overflow_are_refused(
    plan: PackPlan, tmp_path: Path
) -> None:
    rows = plan.unit_rows.copy()
    rows[1:3, 0] = (1 << 62) + 5, -(1 << 62) - 9
    with pytest.raises(ManifestError, match="do not fit each other"):
        write_plan(replace(plan, unit_rows=rows), str(tmp_path / "plan"))


@pytest.mark.parametrize("shape", ["((", "(-2, -8)", f"({1 << 32}, {1 << 32})"])
def test_an_array_whose_header_is_no_shape_is_refused(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    data += bytes(128) * (shape == "(-2, -8)")
    sha256 = hashlib.sha256(data).hexdigest()
    info = ArrayInfo(f"units.{sha256[:12]}.npy", len(data), sha256)
    (tmp_path / info.name).write_bytes(data)
    with pytest.raises(ManifestError, match=r"is no file of numpy|is another array"):
        open_array(open_store(tmp_path), info, "<i8", 2)


def test_an_array_that_is_missing_is_an_error_that_says_what_to_do(
    plan: PackPlan, tmp_path: Path
) -> None:
    write_plan(plan, str(tmp_path / "plan"))
    next((tmp_path / "plan").glob("members.*.npy")).unlink()
    with pytest.raises(ManifestError, match=r"members\..*\.npy: is missing.*--overwrite"):
        open_plan(str(tmp_path / "plan"))
