"""Kill the processes that share a node cache again and again, and prove that no byte is wrong.

    python -m tools.prove.node_cache --seconds 60

Eight processes read samples of two datasets that take three times the room of the cache, and write
what they do not find. Half of the samples are found first, and read some time later. Each process
compares every sample that it is given with the truth. One after another
is killed with -9 at any moment and started again. Meanwhile cached files are changed, cut and
removed, and the room is measured. The exit code is 1 if a sample was wrong, if the cache took more
than its limit, or if nothing was found in it.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from functools import cache as cached
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from mmstream.storage.node_cache import CachedSamples, CacheFile, NodeCache, open_cache_dir

NUM_READERS = 8
FOLDERS = ("a" * 16, "b" * 16)
NUM_FILES = 40
"""Of each dataset."""
FILE_SAMPLES = 32
PAGE_BYTES = 4096
"""That a file system takes at once for a file."""
MAX_SAMPLE_BYTES = 30_000
LIMIT = 12 << 20
PAUSE_S = 0.1
"""Between two kills, on average."""
DAMAGE_SHARE = 0.3
"""Of the kills, before which a file is damaged."""
WAIT_SHARE = 0.05
"""Of the reads: a sample is read some time after it was found, as its step comes later."""
MAX_WAIT_S = 0.02
EPOCH_SHARE = 0.01
"""Of the reads of a process, after which an epoch begins."""


class Soak(NamedTuple):
    """What a soak has seen."""

    num_samples: int
    """Samples that were found in the cache and compared."""
    num_wrong: int
    num_kills: int
    num_damages: int
    most_bytes: int
    """That the cache took on the disk at any look."""
    num_ended: int
    """Readers that ended by themselves."""

    def fault(self, limit: int) -> str:
        """Return what was wrong; "" if nothing was."""
        if self.num_wrong or self.num_ended:
            return f"{self.num_wrong} wrong samples; {self.num_ended} readers failed"
        if self.most_bytes > limit:
            return f"{self.most_bytes} bytes were taken, {limit} are allowed"
        return "" if self.num_samples else "no sample was ever found"


def main() -> None:
    """Run the soak, and print what it has seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder, "cache"), options.seconds, options.seed)
    print(
        f"{result.num_samples:,} samples from the cache, {result.num_wrong} wrong; "
        f"{result.num_kills} kills, {result.num_damages} damaged files; at most "
        f"{result.most_bytes:,} of {LIMIT:,} bytes"
    )
    if fault := result.fault(LIMIT):
        sys.exit(fault)


def soak(cache_dir: Path, seconds: float, seed: int = 0) -> Soak:
    """Let readers run and kill them, for some seconds."""
    root, draw = open_cache_dir(str(cache_dir), LIMIT), random.Random(seed)
    processes = multiprocessing.get_context("fork")
    counts = processes.RawArray("q", 2)  # readers are killed, so they share no lock

    for folder in FOLDERS:  # once, before processes are forked
        for number in range(NUM_FILES):
            _shard(number, folder)

    def start() -> BaseProcess:
        reader = processes.Process(target=_read, args=(root, draw.randrange(1 << 30), counts))
        reader.start()
        return reader

    readers = [start() for _ in range(NUM_READERS)]
    num_kills = num_damages = most_bytes = num_ended = 0
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(2 * PAUSE_S * draw.random())
            most_bytes = max(most_bytes, _bytes_on_disk(root))
            if draw.random() < DAMAGE_SHARE:
                num_damages += _damage(root, draw)
            number = draw.randrange(NUM_READERS)
            num_ended += not readers[number].is_alive()
            readers[number].kill()
            readers[number].join()
            readers[number] = start()
            num_kills += 1
    finally:
        for reader in readers:
            reader.kill()
            reader.join()
    return Soak(counts[0], counts[1], num_kills, num_damages, most_bytes, num_ended)


def _read(root: str, seed: int, counts: Any) -> None:
    """Read ranges of files for ever; count the samples that were found, and the wrong ones."""
    draw = random.Random(seed)
    cache = NodeCache(root, dict.fromkeys(FOLDERS, 0), LIMIT)
    while True:
        file, all_samples, truth = _shard(draw.randrange(NUM_FILES), draw.choice(FOLDERS))
        first = draw.randrange(FILE_SAMPLES)
        span = slice(first, draw.randint(first + 1, FILE_SAMPLES))
        samples = CachedSamples(*(column[span] for column in all_samples))
        begin, stop = int(samples.start[0]), int(samples.stop[-1])
        data = bytearray(stop - begin)
        starts, stops = (samples.start - begin).tolist(), (samples.stop - begin).tolist()
        spans = list(zip(starts, stops, strict=True))
        is_there = np.zeros(len(spans), dtype=np.bool_)
        for number, location in cache.find(file, samples).items():
            if draw.random() < WAIT_SHARE:
                time.sleep(draw.random() * MAX_WAIT_S)
            i, j = spans[number]
            is_there[number] = cache.read(location, memoryview(data)[i:j])
        for (i, j), is_found in zip(spans, is_there.tolist(), strict=True):
            counts[0] += is_found
            counts[1] += is_found and data[i:j] != truth[begin + i : begin + j]
        if not is_there.all():
            cache.write(file, samples, memoryview(truth)[begin:stop], begin)
        if draw.random() < EPOCH_SHARE:
            cache.begin_epoch()


@cached
def _shard(number: int, folder: str) -> tuple[CacheFile, CachedSamples, bytes]:
    """Return a file, all samples that belong into it, and the bytes of its shard."""
    random_bytes = np.random.default_rng([number, int(folder, 16)])
    sizes = random_bytes.integers(1, MAX_SAMPLE_BYTES, FILE_SAMPLES)
    stops = np.cumsum(sizes)
    data = random_bytes.bytes(int(stops[-1]))
    starts = stops - sizes
    spans = zip(starts.tolist(), stops.tolist(), strict=True)
    checksums = np.array([crc32c(data[start:stop]) for start, stop in spans])
    file = CacheFile(folder, f"{number:02x}".ljust(40, "0"), FILE_SAMPLES, len(data))
    return file, CachedSamples(np.arange(FILE_SAMPLES), starts, stops, checksums), data


def _files(root: str) -> list[Path]:
    return [path for path in Path(root).rglob("*") if len(path.name) == 40]


def _bytes_on_disk(root: str) -> int:
    """Return what the cache takes. Readers take and give no room meanwhile.

    Else a file that is removed after it was seen would count together with one written for it.
    """
    num_bytes = 0
    with Path(root, "room").open("ab") as room:
        fcntl.flock(room, fcntl.LOCK_EX)
        for path in _files(root):
            try:
                num_bytes += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
    return num_bytes


def _damage(root: str, draw: random.Random) -> bool:
    """Change a file, zero a page of it, cut it, remove it, or put it in the place of another.

    Nothing is written where the disk holds no page yet: that room would be nobody's.
    """
    files = _files(root)
    if not files:
        return False
    path, kind = draw.choice(files), draw.randrange(6)
    try:
        size = path.stat().st_size
        if size == 0:  # it was cut before
            return False
        if kind == 0:
            os.truncate(path, draw.randrange(size))
        elif kind == 1:
            path.unlink()
        elif kind == 2:
            path.rename(draw.choice(files))
        else:
            with path.open("r+b") as file:
                start = draw.randrange(PAGE_BYTES if kind == 3 else size)
                if kind == 4:
                    start = start // PAGE_BYTES * PAGE_BYTES
                if os.lseek(file.fileno(), start, os.SEEK_DATA) != start:
                    return False
                num_bytes = PAGE_BYTES - start % PAGE_BYTES
                damage = bytes(num_bytes) if kind == 4 else draw.randbytes(draw.randint(1, 500))
                os.pwrite(file.fileno(), damage[:num_bytes], start)
    except OSError:  # the file is gone, or it has no data behind that byte
        return False
    return True


if __name__ == "__main__":
    main()
