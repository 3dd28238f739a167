"""How processes start, and what they take."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_folder_of_temporary_files_that_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    code = "from mmstream.processes import start_fork_server; start_fork_server([])"
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
from mmstream.processes import keep_freed_memory
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
