"""Compares clients of S3 for the reads of training: many ranges of objects at the same time.

    python -m tools.bench.clients

It starts a real S3 server on loopback (SeaweedFS) and puts 512 MiB of random bytes there. Each
client reads them in ranges, each range into a buffer of its own. Every measurement is a process of
its own, with warm connections; rounds are interleaved. The table has the medians of MB/s and of CPU
seconds per GB of the client's process. Server and client share the machine, so MB/s are lower than
either could do alone; CPU seconds hardly depend on that.

A second table has what clients do in trouble, before a small server of its own: a request that is
given up, an answer that breaks off, and a fork.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from tools.bench.peers.environments import peer_python, process_variables
from tools.s3_server import s3_server

MIB = 1024 * 1024
NUM_OBJECTS, OBJECT_BYTES = 4, 128 * MIB
BROKEN_BYTES = 2 * MIB
LIMIT_S = 10.0
"""After which a client in trouble counts as hanging."""

Range: TypeAlias = tuple[str, int, int]
ReadAll: TypeAlias = Callable[[Sequence[Range]], int]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 4, 8], help="of a range")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total", type=int, default=384, help="MiB of a measurement")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *arguments = options.child
        print(json.dumps(CHILDREN[what](*arguments)), flush=True)
        os._exit(0)  # some clients hang at the end
    print_speed(options)
    print()
    print_trouble(options.clients)


# -- the tables ----------------------------------------------------------------------------------


def print_speed(options: argparse.Namespace) -> None:
    """Measure, and print MB/s and CPU seconds per GB."""
    cells = [(mib, many) for mib in options.mib for many in options.in_flight]
    results: dict[Any, list[Any]] = defaultdict(list)
    with s3_server() as server:
        variables = process_variables() | server.env
        os.environ.update(server.env)
        fill(server.bucket)
        runs = [(cell, client) for cell in cells for client in options.clients]
        for number in range(options.rounds):
            for cell, client in runs if number % 2 else reversed(runs):
                arguments = ["speed", client, *map(str, cell), str(options.total)]
                results[cell, client].append(child(arguments, variables))
    titles = [f"{mib} MiB, {many} in flight" for mib, many in cells]
    print("MB/s and CPU s/GB, medians of", options.rounds, "interleaved rounds\n")
    print("| client |", " | ".join(titles), "|")
    print("|---|" + "---|" * len(cells))
    for client in options.clients:
        row = []
        for cell in cells:
            runs_of_cell = [run for run in results[cell, client] if run]
            medians = [statistics.median(values) for values in zip(*runs_of_cell, strict=True)]
            row.append("{:,.0f}, {:.2f}".format(*medians) if medians else "failed")
        print(f"| {client} |", " | ".join(row), "|")


def print_trouble(clients: Sequence[str]) -> None:
    """Print what clients do in trouble."""
    print("| client | given up | breaks off in the middle | fork after a read |")
    print("|---|---|---|---|")
    for client in clients:
        row = []
        for what in ("give_up", "broken", "fork"):
            with trouble_server() as (endpoint, server):
                own = {
                    "AWS_ENDPOINT_URL": endpoint,
                    "AWS_ACCESS_KEY_ID": "key",
                    "AWS_SECRET_ACCESS_KEY": "secret",
                    "AWS_REGION": "us-east-1",
                    "AWS_DEFAULT_REGION": "us-east-1",
                    "MMSTREAM_S3_BUCKET": "bucket",
                }
                answer = child([what, client], process_variables() | own)
                if isinstance(answer, float):
                    waited_s = server.closed_at - answer
                    answer = "closed at once" if waited_s < 1 else "closed with the process"
            row.append(answer or "failed")
        print(f"| {client} |", " | ".join(row), "|", flush=True)


def child(arguments: Sequence[str], variables: dict[str, str]) -> Any:
    """Run one measurement in a process of its own. None: it failed, or took too long."""
    command = [str(peer_python("clients")), "-m", "tools.bench.clients", "--child", *arguments]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, check=False, timeout=60
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return None


def fill(bucket: str) -> None:
    """Write the objects that are read."""
    from botocore.session import Session

    client = Session().create_client("s3")
    data = os.urandom(OBJECT_BYTES)
    for number in range(NUM_OBJECTS):
        client.put_object(Bucket=bucket, Key=f"object-{number}", Body=data)


# -- what a process does -------------------------------------------------------------------------


def measure_speed(client: str, mib: str, in_flight: str, total: str) -> tuple[float, float]:
    """Return MB/s and CPU seconds per GB."""
    length, many = int(mib) * MIB, int(in_flight)
    per_object = OBJECT_BYTES // length
    numbers = [i * 7919 % (NUM_OBJECTS * per_object) for i in range(int(total) * MIB // length)]
    ranges = [
        (f"object-{i // per_object}", i % per_object * length, (i % per_object + 1) * length)
        for i in numbers
    ]
    read_all = CLIENTS[client](many)
    read_all(ranges[: 2 * many])  # connections, imports
    cpu_s, start = cpu_seconds(), time.perf_counter()
    num_bytes = read_all(ranges)
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_s
    if num_bytes != len(ranges) * length:
        raise RuntimeError(f"{client}: {num_bytes} bytes came")
    return num_bytes / 1e6 / seconds, cpu_s / (num_bytes / 1e9)


def cpu_seconds() -> float:
    """Return the CPU time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_give_up(client: str) -> str | float:
    """Cancel a read whose answer stalls, and return when."""
    if client in ("boto3", "s3torchconnector"):
        return "a thread cannot be cancelled"

    read_all = CLIENTS[client](1)
    read_all([("whole", 0, 1000)])

    def give_up() -> None:
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=give_up, daemon=True).start()
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        read_all([("stall", 0, BROKEN_BYTES)])
    given_up = time.time()
    time.sleep(2.0)  # the process lives on: only the client can close the connection
    return given_up


def measure_broken(client: str) -> str:
    """Read an object whose first answer breaks off in the middle."""
    read_all = CLIENTS[client](1)
    read_all([("whole", 0, 1000)])
    start = time.monotonic()
    try:
        num_bytes = read_all([("break", 0, BROKEN_BYTES)])
    except Exception as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.1f} s"
    return "goes on" if num_bytes == BROKEN_BYTES else "ends short, without an error"


def measure_fork(client: str) -> str:
    """Read, fork, and read with a new client in the child."""
    CLIENTS[client](1)([("whole", 0, 1000)])
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            CLIENTS[client](1)([("whole", 0, 1000)])
            os.write(writing, b"x")
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], LIMIT_S)
    os.kill(pid, signal.SIGKILL)
    return "works" if ready and os.read(reading, 1) else "hangs or fails"


CHILDREN: dict[str, Callable[..., Any]] = {
    "speed": measure_speed,
    "give_up": measure_give_up,
    "broken": measure_broken,
    "fork": measure_fork,
}


# -- clients: each gives a function that reads ranges and returns how many bytes came ------------


def in_one_loop(read: Callable[..., Awaitable[int]], in_flight: int) -> ReadAll:
    """Read ranges side by side in an event loop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def read_all(ranges: Sequence[Range]) -> int:
        remaining, total = iter(ranges), 0

        async def take() -> None:
            nonlocal total
            for one in remaining:
                num_bytes = await read(*one)
                total += num_bytes

        await asyncio.gather(*(take() for _ in range(in_flight)))
        return total

    def run(ranges: Sequence[Range]) -> int:
        task = loop.create_task(read_all(ranges))
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
            raise

    return run


def in_threads(read: Callable[[str, int, int], int], in_flight: int) -> ReadAll:
    """Read ranges side by side in threads."""
    threads = ThreadPoolExecutor(in_flight)
    return lambda ranges: sum(threads.map(lambda one: read(*one), ranges))


def bucket() -> str:
    """Return the bucket that is read."""
    return os.environ["MMSTREAM_S3_BUCKET"]


def mmstream(in_flight: int) -> ReadAll:
    """Our own client, into memory that is given."""
    from mmstream.storage import open_store
    from mmstream.storage.range_client import range_client

    client = None

    async def read(name: str, start: int, stop: int) -> int:
        nonlocal client
        client = client or range_client(open_store(f"s3://{bucket()}"))
        data, total = bytearray(stop - start), 0
        stream = await client.open(name, start, stop, memoryview(data))
        try:
            async for piece in stream:
                total += len(piece)
        finally:
            await stream.close()
        return total

    return in_one_loop(read, in_flight)


def obstore(in_flight: int) -> ReadAll:
    """The stream of obstore, in pieces of 1 MiB."""
    return obstore_client(in_flight, in_pieces=True)


def obstore_whole(in_flight: int) -> ReadAll:
    """Obstore, each answer at once: nothing of it is left when it breaks."""
    return obstore_client(in_flight, in_pieces=False)


def obstore_client(in_flight: int, *, in_pieces: bool) -> ReadAll:
    """Read with obstore."""
    import obstore as library
    from obstore.store import S3Store

    store = S3Store(
        bucket(),
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        client_options={"allow_http": True, "timeout": "1h"},
        retry_config={"max_retries": 0},
    )

    async def read(name: str, start: int, stop: int) -> int:
        answer = await library.get_async(store, name, options={"range": (start, stop)})
        data, total = bytearray(stop - start), 0
        if not in_pieces:
            whole = memoryview(await answer.bytes_async())
            data[: len(whole)] = whole
            return len(whole)
        async for piece in answer.stream(min_chunk_size=MIB):
            data[total : total + len(piece)] = piece
            total += len(piece)
        return total

    return in_one_loop(read, in_flight)


def aiohttp(in_flight: int) -> ReadAll:
    """The library under s3fs, with signatures of our own."""
    import aiohttp as library

    from mmstream.storage.s3_signature import S3Signer

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    key, secret = (os.environ[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    signer = S3Signer(key, secret, None, "us-east-1")
    session = None

    async def read(name: str, start: int, stop: int) -> int:
        nonlocal session
        session = session or library.ClientSession(connector=library.TCPConnector(limit=0))
        url = f"{endpoint}/{bucket()}/{name}"
        headers = signer.headers("GET", url, {"range": f"bytes={start}-{stop - 1}"}, time.time())
        data, total = bytearray(stop - start), 0
        async with session.get(url, headers=headers) as answer:
            while piece := await answer.content.readany():
                data[total : total + len(piece)] = piece
                total += len(piece)
        return total

    return in_one_loop(read, in_flight)


def s3fs(in_flight: int) -> ReadAll:
    """The requests of s3fs, as mmstream 0.1 sent them."""
    import fsspec

    client = None

    async def read(name: str, start: int, stop: int) -> int:
        nonlocal client
        client = client or fsspec.filesystem(
            "s3",
            asynchronous=True,
            skip_instance_cache=True,
            config_kwargs={"max_pool_connections": in_flight, "retries": {"max_attempts": 0}},
        )
        answer = await client._call_s3(
            "get_object", Bucket=bucket(), Key=name, Range=f"bytes={start}-{stop - 1}"
        )
        async with answer["Body"] as body:
            whole = await body.read()
        data = bytearray(stop - start)
        data[: len(whole)] = whole
        return len(whole)

    return in_one_loop(read, in_flight)


def boto3(in_flight: int) -> ReadAll:
    """boto3 in threads."""
    import boto3 as library
    from botocore.config import Config

    config = Config(max_pool_connections=in_flight, retries={"max_attempts": 0})
    client = library.client("s3", config=config)

    def read(name: str, start: int, stop: int) -> int:
        answer = client.get_object(Bucket=bucket(), Key=name, Range=f"bytes={start}-{stop - 1}")
        data, total = bytearray(stop - start), 0
        while piece := answer["Body"].read(MIB):
            data[total : total + len(piece)] = piece
            total += len(piece)
        return total

    return in_threads(read, in_flight)


def s3torchconnector(in_flight: int) -> ReadAll:
    """The client of s3torchconnector (mountpoint-s3) in threads."""
    from s3torchconnector._s3client import S3Client, S3ClientConfig

    client = S3Client(
        "us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True, max_attempts=1),
    )

    def read(name: str, start: int, stop: int) -> int:
        data, total = bytearray(stop - start), 0
        for piece in client._get_object_stream(bucket(), name, start, stop):
            data[total : total + len(piece)] = piece
            total += len(piece)
        return total

    return in_threads(read, in_flight)


CLIENTS: dict[str, Callable[[int], ReadAll]] = {
    function.__name__: function
    for function in (mmstream, obstore, obstore_whole, aiohttp, s3fs, boto3, s3torchconnector)
}


# -- a server in trouble ---------------------------------------------------------------------------


@contextmanager
def trouble_server() -> Iterator[tuple[str, TroubleServer]]:
    """Serve objects by their names: one that breaks off at first, one that stalls, and whole ones.

    Yields:
        Its URL, and the server.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    server = TroubleServer()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        listener.close()


class TroubleServer:
    """Answers requests of ranges, without a look at their signatures.

    Attributes:
        closed_at: When a client closed the connection of an answer that stalls.
    """

    def __init__(self) -> None:
        self.closed_at = math.inf
        self._broke = threading.Event()

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it ends."""
        with suppress(OSError), connection, connection.makefile("rb") as requests:
            while line := requests.readline():
                headers = {}
                while (header := requests.readline().strip()) not in (b"", b"\r\n"):
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                method, target, _ = line.decode().split()
                self._answer(connection, method, target.rpartition("/")[2], headers)

    def _answer(
        self, connection: socket.socket, method: str, name: str, headers: dict[str, str]
    ) -> None:
        byte_range = headers.get("range", f"bytes=0-{BROKEN_BYTES - 1}")
        start, _, last = byte_range.removeprefix("bytes=").partition("-")
        length = int(last) - int(start) + 1
        lines = ["HTTP/1.1 206 Partial Content", f"Content-Length: {length}", 'ETag: "e"']
        lines += [f"Content-Range: bytes {start}-{last}/{BROKEN_BYTES}", "Accept-Ranges: bytes"]
        lines += ["Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT", "Content-Type: x/y"]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        if method == "HEAD":
            return
        if name.startswith("stall"):
            connection.sendall(bytes(length // 2))
            with suppress(OSError):
                connection.recv(1)  # returns as the connection is closed
            self.closed_at = time.time()
        elif name.startswith("break") and not self._broke.is_set():
            self._broke.set()
            connection.sendall(bytes(length // 2))
            connection.shutdown(socket.SHUT_RDWR)
        else:
            connection.sendall(bytes(length))


if __name__ == "__main__":
    main()
