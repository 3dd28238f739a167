"""Images per second and CPU time of downloads: `mmstream convert` and img2dataset, side by side.

    python -m tools.bench.convert.download --img2dataset-python /path/to/python

One server on loopback gives the same JPEGs to both. It writes answers that were made before, so it
is no bottleneck. The runs alternate; the table has medians. img2dataset runs with as many threads
as mmstream has connections, one process as mmstream has one worker, and without resizing: both
store the bytes as they come, with sidecars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.helpers.paths import PHOTOS

RUN_IMG2DATASET = """
import json, sys
from img2dataset import download
if __name__ == "__main__":
    download(**json.loads(sys.argv[1]))
"""


class Run(NamedTuple):
    """One conversion of all URLs."""

    seconds: float
    cpu_s: float
    """Of the converter and its children, without the server."""


class _Answers(asyncio.Protocol):
    """Answers each request at once. A request is one packet here: it has no body."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head, self._rest = self._rest[:end], self._rest[end + 4 :]
            number = int(head[5 : head.index(b".jpg")])  # GET /123.jpg HTTP/1.1
            self._transport.write(self._answers[number % len(self._answers)])
            if b"\r\nconnection: close" in head.lower():
                self._transport.close()


def serve(photos: Sequence[bytes], port: Connection) -> None:
    """Serve ``/NUMBER.jpg`` until the process is ended. Send the port through a pipe."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
    answers = [head % len(photo) + photo for photo in photos]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Answers(answers), "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def timed(command: Sequence[str]) -> Run:
    """Run a command, and return its wall and CPU time."""
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return Run(time.perf_counter() - started, cpu_s)


def with_mmstream(rows: Path, out: Path, port: int, connections: int, workers: int) -> Run:
    """Convert the URLs by ``mmstream convert``."""
    command = [sys.executable, "-m", "mmstream", "convert", str(rows), str(out)]
    command += ["--num-workers", str(workers), "--allow-host", f"127.0.0.1:{port}"]
    command += [f"--num-connections={connections}", f"--num-connections-per-host={connections}"]
    return timed(command)


def with_img2dataset(python: str, rows: Path, out: Path, connections: int, workers: int) -> Run:
    """Convert the URLs by img2dataset: tars, sidecars, no resizing, no second encoding."""
    arguments = {
        "url_list": str(rows),
        "output_folder": str(out),
        "input_format": "jsonl",
        "url_col": "url",
        "caption_col": "text",
        "output_format": "webdataset",
        "processes_count": workers,
        "thread_count": connections // workers,
        "number_sample_per_shard": 5000,
        "resize_mode": "no",
        "skip_reencode": True,
        "enable_wandb": False,
    }
    return timed([python, "-c", RUN_IMG2DATASET, json.dumps(arguments)])


def num_images(out: Path) -> int:
    """Return the number of JPEGs in the tars of a folder."""
    tars = sorted(out.glob("*.tar"))
    lists = [subprocess.run(["tar", "tf", tar], check=True, capture_output=True) for tar in tars]
    return sum(names.stdout.count(b".jpg") for names in lists)


def main() -> None:
    """Run both systems in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--img2dataset-python", required=True, help="Python that has img2dataset")
    parser.add_argument("--num-images", type=int, default=5000)
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--num-connections", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    photos = [path.read_bytes() for path in PHOTOS]
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(photos, sender), daemon=True)
    server.start()
    port = receiver.recv()
    runs: dict[str, list[Run]] = {"mmstream": [], "img2dataset": []}
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder, "rows.jsonl"), Path(folder, "out")
        with rows.open("w") as file:
            for number in range(options.num_images):
                url = f"http://127.0.0.1:{port}/{number}.jpg"
                row = {"url": url, "text": f"photo {number}"}
                file.write(json.dumps(row) + "\n")
        limits = (options.num_connections, options.num_workers)
        for _ in range(options.num_runs):
            for system in runs:
                if system == "mmstream":
                    run = with_mmstream(rows, out, port, *limits)
                else:
                    run = with_img2dataset(options.img2dataset_python, rows, out, *limits)
                assert num_images(out) == options.num_images, f"{system}: images are missing"
                shutil.rmtree(out)
                runs[system].append(run)
                print(system, run, flush=True)
    server.terminate()
    mean_kb = statistics.fmean(map(len, photos)) / 1e3
    print(f"\n{options.num_images:,} images of {mean_kb:.0f} kB, {options.num_runs} runs\n")
    print("| system | images/s | CPU s per 1,000 images |\n|---|---|---|")
    for system, results in runs.items():
        rate = options.num_images / statistics.median(run.seconds for run in results)
        cpu_s = statistics.median(run.cpu_s for run in results) * 1000 / options.num_images
        print(f"| {system} | {rate:,.0f} | {cpu_s:.2f} |")


if __name__ == "__main__":
    main()
