"""Ranks of torchrun that share one import of torch and the loop: forks of one server.

torchrun starts PYTHON_EXEC in the place of Python. Here this is a small program, which has the
server fork a process with its arguments, environment, folder and streams. The program passes
signals on, and ends as that process does. Whoever kills the program kills the process, too.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "MMSTREAM_TESTS_WARM_RANKS"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def warm_ranks(folder: Path) -> Iterator[dict[str, str]]:
    """Start a server, and yield the variables with which torchrun has it fork its ranks.

    A rank is ``-m mmstream`` or a script. Others start as ever.
    """
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "$@"\n')
    program.chmod(0o755)
    address = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{address}")
        listening.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm_ranks", str(listening.fileno())],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            pass_fds=[listening.fileno()],
        )
    try:
        yield {"PYTHON_EXEC": str(program), ADDRESS: address}
    finally:
        server.kill()
        server.wait()


# -- in the program -------------------------------------------------------------------------------


def start_and_follow(words: list[str]) -> int:
    """Have the server fork a process, and return its exit code, or end by its signal."""
    is_script = words[0] == "-u" and words[1].endswith(".py")
    if not is_script and words[:3] != ["-u", "-m", "mmstream"]:
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{os.environ[ADDRESS]}")
        job = {"words": words[1:], "folder": str(Path.cwd()), "environment": dict(os.environ)}
        text = json.dumps(job).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(text)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        (code,) = json.loads(server.recv(100) or b"[1]")
    if code < 0:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# -- in the server --------------------------------------------------------------------------------


def serve(listening: socket.socket) -> NoReturn:
    """Import what a rank needs, and fork a process for each program that connects."""
    from tests.helpers.forked_ranks import fork, import_for_ranks

    import_for_ranks()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who follow a rank
    while True:
        program, _ = listening.accept()
        fork(partial(follow, listening, program))
        program.close()


def follow(listening: socket.socket, program: socket.socket) -> None:
    """Fork a rank, pass on what its program gets, and tell the program how it ended."""
    from tests.helpers.forked_ranks import fork

    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(program, 4, 3)
    job = json.loads(program.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    rank = fork(partial(be_rank, job, streams, program))
    end = os.pidfd_open(rank)
    while end not in (ready := select.select([end, program], [], [])[0]):
        assert program in ready
        number = program.recv(1)
        os.kill(rank, number[0] if number else signal.SIGKILL)
        if not number:  # the program was killed
            return
    _, status = os.waitpid(rank, 0)
    program.sendall(json.dumps([os.waitstatus_to_exitcode(status)]).encode())


def be_rank(job: dict[str, Any], streams: list[int], program: socket.socket) -> None:
    """Be a new process that runs ``mmstream`` or a script."""
    program.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["words"][0] != "-m":
        script = Path(job["words"][0]).absolute()  # workers import it, from wherever they start
        sys.argv = job["words"]
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.argv = job["words"][1:]
    from mmstream.cli import main

    main()


if __name__ == "__main__":
    if sys.flags.isolated:
        sys.exit(start_and_follow(sys.argv[1:]))
    serve(socket.socket(fileno=int(sys.argv[1])))
