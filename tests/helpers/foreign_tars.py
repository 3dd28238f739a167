"""Tars as others write them, and how `webdataset` and mmstream read them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

from webdataset import tariterators

from mmstream.dataset.index import build_index
from mmstream.storage import RemoteStore
from mmstream.tar.samples import LinkError, iter_members, links_of, parse_sample
from tests.helpers.paths import DATA

FOREIGN = DATA / "foreign"
"""Real tars of webdataset's own test data."""


class CountingStore:
    """A store that holds one tar, is read like a remote one, and counts what is read."""

    access = RemoteStore.access

    def __init__(self, data: bytes) -> None:
        self.data, self.num_bytes, self.num_reads = data, 0, 0

    def size(self, name: str) -> int:
        return len(self.data)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(self.data)
        self.num_bytes += stop - start
        self.num_reads += 1
        return self.data[start:stop]


def field_list(sample):
    """A sample as a list of (field, value): without its URL and lineage, in its order."""
    return [(name, sample[name]) for name in sample if name not in ("__url__", "__lineage__")]


def read_by_mmstream(data: bytes):
    """What mmstream reads: each sample out of its own range of bytes."""
    offsets = build_index(CountingStore(data), "x.tar")
    links = links_of(iter_members(lambda start, stop: data[start:stop], len(data)))

    def parse(first: int, end: int):
        def linked(field: str, start: int) -> bytes:
            if first + start not in links:
                raise LinkError(f"{field}: is a link to nothing")
            return data[slice(*links[first + start])]

        return parse_sample(data[first:end], "x.tar", linked=linked)

    return [field_list(parse(start, stop)) for start, stop in pairwise(offsets.tolist())]


def read_by_webdataset(data: bytes):
    """What webdataset reads."""
    sources = [{"url": "x.tar", "stream": io.BytesIO(data)}]
    samples = tariterators.group_by_keys(tariterators.tar_file_expander(sources))
    return [field_list(sample) for sample in samples]


def make_tar(members, format=tarfile.PAX_FORMAT, **settings) -> bytes:
    """A tar by the stdlib; members are (name, bytes), or TarInfo for anything but a file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, **settings) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tar(path: Path, members) -> None:
    """Write what `make_tar` makes, into a folder that may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make_tar(members))


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A folder, a link or a device."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def gnu_tar(folder: Path, *names: str, options: tuple[str, ...] = ()) -> bytes:
    """A tar of files in a folder by GNU tar."""
    command = ["tar", "--create", "--file=-", "--sort=name", *options, *names]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
