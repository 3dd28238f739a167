"""What this machine has for its ranks: memory, cores, and how many ranks there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmstream.processes import (
    cpu_limit,
    cpu_seconds,
    memory_bytes,
    num_cores,
    num_local_ranks,
)

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
