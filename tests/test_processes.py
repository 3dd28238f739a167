"""How processes start and what they take, and what this machine has for its ranks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mmstream.processes.machine import (
    cpu_limit,
    cpu_seconds,
    memory_bytes,
    num_cores,
    num_local_ranks,
)
from mmstream.processes.workers import installed_entry_points


def test_a_folder_of_temporary_files_that_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    code = "from mmstream.processes.workers import start_fork_server; start_fork_server([])"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    last_line = ended.stderr.splitlines()[-1]
    assert last_line.startswith("mmstream.errors.ConfigError: TMPDIR: ")
    assert "such as /tmp" in last_line


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems are not changed")
def test_memory_of_dropped_bytes_is_used_again_without_new_pages() -> None:
    program = """
import resource, sys
from mmstream.processes.workers import keep_freed_memory
for number in range(12):
    if number < 4:
        keep_freed_memory()  # each epoch of a loader calls it
    else:
        batch = None
        batch = [number.to_bytes(1, "big") * 200_000 for number in range(32)]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    words = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    faults = [int(word) for word in words]
    assert faults[3] - faults[0] < 300  # the memory of a call has 7,900 pages
    assert faults[-1] - faults[5] < 300  # a batch has 1,600 pages


# -- what the machine has for its ranks -----------------------------------------------------------


GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limit"),
    [
        ("0::/slurm/job_7/step_0\n", "sys/fs/cgroup/slurm/job_7/memory.max"),
        ("0::/docker/abc\n", "sys/fs/cgroup/memory.max"),
        ("5:cpu:/x\n9:memory,hugetlb:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes"),
    ],
)
def test_the_smallest_limit_of_all_control_groups_counts(
    tmp_path: Path, groups: str, limit: str
) -> None:
    files = {"proc/self/cgroup": groups, "sys/fs/cgroup/slurm/memory.max": "max\n"}
    root = write(tmp_path, files)
    assert memory_bytes(root) > GIB // 8
    write(tmp_path, {limit: f"{GIB // 8}\n"})
    assert memory_bytes(root) == GIB // 8


def test_without_control_groups_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    assert 1 << 28 < memory_bytes() <= memory_bytes(tmp_path) < 1 << 50


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/slurm/job_7\n", {"sys/fs/cgroup/slurm/cpu.max": "50000 100000\n"}),
        ("0::/docker/abc\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}),
        (
            "9:memory:/x\n5:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "10000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "20000\n",
            },
        ),
    ],
)
def test_a_container_may_have_a_part_of_a_core(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    unlimited = {"sys/fs/cgroup/slurm/job_7/cpu.max": "max 100000\n"}
    root = write(tmp_path, {"proc/self/cgroup": groups, **unlimited})
    assert cpu_limit(root) == num_cores()
    assert cpu_limit(write(tmp_path, files)) == 0.5
    assert cpu_limit(tmp_path / "absent") == num_cores()


def test_cpu_time_of_processes_grows_and_that_of_ended_ones_is_zero() -> None:
    before = cpu_seconds([os.getpid()])
    while cpu_seconds([os.getpid()]) <= before:
        sum(range(10_000))
    assert cpu_seconds([1 << 30]) == 0.0


@pytest.mark.parametrize(("text", "expected"), [(None, 1), ("", 1), ("x", 1), ("0", 1), ("8", 8)])
def test_ranks_of_this_machine_are_counted_by_the_launcher(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert num_local_ranks() == expected


def test_the_first_of_two_copies_of_a_package_has_its_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, names in ((1, ["old", "both"]), (2, ["both"])):
        info = tmp_path / str(version) / f"a_plug-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: a-plug\nVersion: {version}\n")
        lines = [f"{name} = plug:V{version}" for name in names]
        (info / "entry_points.txt").write_text("\n".join(["[a.group]", *lines]))
        monkeypatch.syspath_prepend(info.parent)
    found = installed_entry_points("a.group")
    assert [(entry.name, entry.value) for entry in found] == [("both", "plug:V2")]
