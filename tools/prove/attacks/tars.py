"""Attacks by the members, headers and names of tars."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mmstream as mm
from tests.helpers.corpora import jpeg
from tools.prove.attacks.attack import Attack, train

NUM_GOOD = 12
"""Good samples of a corpus that is attacked."""


def member(
    name: str | bytes, data: bytes = b"x", size: int | None = None, kind: str = "0"
) -> bytes:
    """Return one member of a tar: a header that says what it is told to, and the payload."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    header = bytearray(512)
    header[: min(100, len(raw))] = raw[:100]
    header[100:124] = b"0000644\x00" + b"0000000\x00" * 2
    header[124:136] = _octal(len(data) if size is None else size)
    header[136:148] = b"00000000000\x00"
    header[156:157] = kind.encode()
    header[257:265] = b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


def _octal(size: int) -> bytes:
    if 0 <= size < 8**11:
        return b"%011o\x00" % size
    return bytes([0x80 if size > 0 else 0xFF]) + (size % 256**11).to_bytes(11, "big")


def good_members(number: int) -> bytes:
    """Return the members of a good sample."""
    key = f"{number:06d}"
    return member(f"{key}.jpg", jpeg(number)) + member(f"{key}.txt", b"caption %d" % number)


def write_tar(path: Path, members: Sequence[bytes]) -> None:
    """Write a tar of members."""
    path.write_bytes(b"".join(members) + bytes(1024))


def _epoch(folder: Path, odd: Sequence[bytes], expected_bad: int | None) -> None:
    """Train on good samples, with odd members after the first one and at the end."""
    good = [good_members(number) for number in range(NUM_GOOD)]
    write_tar(folder / "shard-000000.tar", [good[0], *odd, *good[1:]])
    loader = train(folder)
    counted = sum(loader.stats.bad.values())
    assert loader.stats.num_steps >= 1, "no step"
    assert expected_bad is None or counted == expected_bad, f"{loader.stats.bad}"


def _opened(folder: Path, tar: bytes) -> None:
    (folder / "shard-000000.tar").write_bytes(tar)
    train(folder)


def _reserved(field: str) -> Callable[[Path], None]:
    """A sample with a good image and a field that mmstream uses itself."""
    key = "666666"
    odd = [member(f"{key}.jpg", jpeg(6)), member(f"{key}.{field}", b"stranger")]

    def run(folder: Path) -> None:
        _epoch(folder, odd, None)
        (folder / "shard-000000.tar").unlink()
        write_tar(
            folder / "shard-000000.tar",
            [
                member(f"{n:06d}.jpg", jpeg(n)) + member(f"{n:06d}.{field}", b"stranger") * (n % 2)
                for n in range(NUM_GOOD)
            ],
        )
        loader = train(folder)
        assert sum(loader.stats.bad.values()) == NUM_GOOD // 2, f"{loader.stats.bad}"

    return run


def _pax(records: dict[str, str]) -> bytes:
    info = tarfile.TarInfo("000777.txt")
    info.pax_headers = records
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO())
        tar_bytes = tar.offset
    return buffer.getvalue()[: -(-tar_bytes // 512) * 512]


def _many_small(folder: Path) -> None:
    """100,000 empty members of one sample, then good samples."""
    odd = [member(f"000000b.f{n}", b"") for n in range(100_000)]
    _epoch(folder, odd, None)


def _many_samples(folder: Path) -> None:
    write_tar(folder / "shard-000000.tar", [member(f"{n}.txt", b"") for n in range(200_000)])
    dataset = mm.open_dataset(folder)
    assert len(dataset) == 200_000


HUGE = 1 << 60
FIELDS = ("__source__", "__lineage__", "__valid__", "__key__", "__url__", "__anything__")

ATTACKS = (
    *(Attack(f"tar: a field {name}", _reserved(name)) for name in FIELDS),
    Attack(
        "tar: a key that is not UTF-8",
        partial(_epoch, odd=[member(b"\xff\xfe7.jpg", jpeg(7))], expected_bad=0),
    ),
    Attack(
        "tar: a key with newline and escape sequences",
        partial(_epoch, odd=[member("a\n\x1b[2Jb.jpg", b"no image")], expected_bad=None),
    ),
    Attack(
        "tar: a key that turns text around",
        partial(_epoch, odd=[member("a\u202eb.jpg", b"no image")], expected_bad=None),
    ),
    Attack(
        "tar: a key of 100 slashes and dots",
        partial(_epoch, odd=[member("../" * 33 + "x.jpg", b"no image")], expected_bad=None),
    ),
    Attack(
        "tar: a field twice",
        partial(_epoch, odd=[member("000099.jpg", jpeg(9)) * 2], expected_bad=None),
    ),
    *(
        Attack(
            f"tar: a member of type {kind!r}",
            partial(_epoch, odd=[member("000099.jpg", b"", kind=kind)], expected_bad=None),
        )
        for kind in "123456KLVx"
    ),
    Attack(
        "tar: a member that is larger than the tar",
        lambda folder: _opened(folder, good_members(1) + member("2.jpg", b"x", HUGE)),
        r"shard-000000\.tar",
    ),
    Attack(
        "tar: a member of negative size",
        lambda folder: _opened(folder, good_members(1) + member("2.jpg", b"x", -512)),
        r"shard-000000\.tar",
    ),
    Attack(
        "tar: a long name of a gigabyte",
        lambda folder: _opened(folder, member("n", b"n" * 512, 1 << 30, "L") + good_members(1)),
        r"shard-000000\.tar",
    ),
    Attack(
        "tar: extended headers of a gigabyte",
        lambda folder: _opened(folder, member("p", b"9 a=b\n", 1 << 30, "x") + good_members(1)),
        r"shard-000000\.tar",
    ),
    Attack(
        "tar: 100,000 extended headers in a row",
        lambda folder: _opened(folder, member("p", b"", kind="x") * 100_000 + good_members(1)),
        r"shard-000000\.tar",
    ),
    Attack(
        "tar: an extended header that renames to a reserved field",
        partial(_epoch, odd=[_pax({"path": "000777.__source__"})], expected_bad=None),
    ),
    Attack(
        "tar: an extended header with a size of its own",
        partial(_epoch, odd=[_pax({"size": "-1"})], expected_bad=None),
        r"shard-000000\.tar",
    ),
    Attack("tar: 100,000 members of one sample", _many_small),
    Attack("tar: 200,000 samples", _many_samples),
    Attack(
        "tar: cut in the middle of a header",
        lambda folder: _opened(folder, good_members(1) + good_members(2)[:300]),
        r"shard-000000\.tar",
    ),
    Attack("tar: text", lambda folder: _opened(folder, b"<html>" * 500), r"shard-000000\.tar"),
    Attack("tar: empty", lambda folder: _opened(folder, b""), r"."),
)
