"""`tools/test.sh` says in one line what a machine lacks, and trusts no half-made environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import START_S
from tests.helpers.paths import ROOT

PYTHON = """#!/bin/sh
case "$*" in
"-m venv --clear"*)
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    echo "$VENV_SAYS" >&2
    test -z "$VENV_SAYS" ;;
*"pip"*)
    echo "$PIP_SAYS" >&2
    exit 1 ;;
*version_info*)
    exit "${TOO_OLD:-0}" ;;
esac
"""
"""Stands for Python: its venv and its pip fail with words of the real ones."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, and a folder of programs with a Python that can do nothing."""
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True)
    for name in ("env.sh", "test.sh"):
        shutil.copy(ROOT / "tools" / name, root / "tools")
    (root / "pyproject.toml").write_text("")
    (root / "requirements.lock").write_text("torch==2.14.1 \\\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        (programs / name).write_text(PYTHON)
        (programs / name).chmod(0o755)
    return root


def run_test_sh(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "TMPDIR": str(checkout.parent), **environment}
    command = ["bash", str(checkout / "tools" / "test.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        ({"TOO_OLD": "1"}, "install it (Debian: apt-get install python3.11 python3.11-venv)"),
        ({"VENV_SAYS": "ensurepip is not available"}, "apt-get install python3-venv"),
        ({"PIP_SAYS": "Failed to establish a new connection"}, "check the network, or set PIP_IN"),
        ({"PIP_SAYS": "OSError: [Errno 28] No space left on device"}, "need 3 GB together"),
        ({"PIP_SAYS": "ERROR: something else"}, "ERROR: something else"),
    ],
)
def test_what_is_missing_is_one_line_with_the_cure(checkout, environment, cure):
    for _ in range(2):  # the second call does not trust what the first has left
        done = run_test_sh(checkout, **environment)
        assert done.returncode in (1, 2)
        (line,) = done.stderr.splitlines()
        assert cure in line
        assert "run this command again" in line
        assert list(checkout.glob(".venv/.mmstream-*")) == []


def test_an_environment_that_could_not_be_renewed_is_made_anew(checkout):
    stamp = checkout / ".venv" / ".mmstream-dev"
    stamp.parent.mkdir()
    stamp.write_text("of an older lock file")
    (checkout / ".venv" / "left").write_text("half of an upgrade")
    assert run_test_sh(checkout, PIP_SAYS="ERROR").returncode == 1
    assert not stamp.exists()


def test_a_test_that_takes_long_is_marked_slow_or_fails(request, monkeypatch):
    monkeypatch.setattr(conftest, "MAX_STARTS", 0.01)

    def work() -> None:
        call = conftest.pytest_runtest_call(request.node)
        next(call)
        limit = conftest.MAX_STARTS * max(conftest.MIN_START_S, request.config.stash[START_S])
        end = time.process_time() + 2 * limit
        while time.process_time() < end:
            pass
        with pytest.raises(StopIteration):
            call.send(None)

    with pytest.raises(pytest.fail.Exception, match="of processor time, more than 0: mark it slow"):
        work()
    request.node.add_marker("slow")
    work()
