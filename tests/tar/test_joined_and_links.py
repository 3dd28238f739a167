"""Tars that were joined, and links in tars: every sample is read, or is refused by name."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.index import build_index, encode_index
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.keys import read_keys
from mmstream.dataset.verify import verify
from mmstream.packing.plan import PackLimits, plan_folder, write_plan
from mmstream.packing.planner import Measure, make_plan, write_measure
from mmstream.storage import open_store
from tests.helpers.corpora import write_corpus
from tests.helpers.foreign_tars import field_list, make_tar, read_by_webdataset, special
from tests.reading.test_large_samples import EightFrames, pipeline_of, video

END = bytes(1024)
A = make_tar([("a.txt", b"1"), ("a.jpg", b"2"), ("b.txt", b"3")])
B = make_tar([("b.txt", b"4"), ("c.txt", b"5")])
SAME_KEYS = make_tar([("b.txt", b"6"), ("a.txt", b"7")])
GLOBAL = make_tar([("g.txt", b"8")], pax_headers={"comment": "x" * 600})
LONG = make_tar([("n" * 240 + ".txt", b"9")])
JUNK = b"no header of a tar" * 100


def parts_of(*tars: bytes) -> tuple[bytes, list[bytes]]:
    return b"".join(tars), list(tars)


JOINED = [
    parts_of(A, B),
    parts_of(A, SAME_KEYS, A),
    parts_of(A, GLOBAL, GLOBAL, B),
    parts_of(LONG, LONG),
    parts_of(A, make_tar([]), bytes(2 << 20), B),
    (A.rstrip(b"\0").ljust(3072, b"\0") + bytes(512) + B, [A, B]),  # a lone block of zeros
    (END + A, [A]),
    (A + bytes(100), [A]),
]


@pytest.mark.parametrize(("data", "parts"), JOINED)
@pytest.mark.parametrize("place", ["local", "remote"])
def test_joined_tars_have_the_samples_of_all(
    tmp_path: Path, request: pytest.FixtureRequest, data: bytes, parts: list[bytes], place: str
) -> None:
    expected = [sample for part in parts if any(part) for sample in read_by_webdataset(part)]
    url = f"memory://{request.node.name}" if place == "remote" else str(tmp_path)
    open_store(url).write("x.tar", data)
    if place == "local":
        assert list(map(field_list, mm.open_dataset(url))) == expected
    index_tars(url, checksums=True, progress=False)
    dataset = mm.open_dataset(url)
    assert list(map(field_list, dataset)) == expected
    assert [p.reason for p in verify(dataset, progress=False) if p.bad] == []


IN_PIECES = make_tar([(f"{i}.{field}", b"x" * 600) for field in ("jpg", "txt") for i in range(3)])
OFFSETS = range(0, 7 * 1536, 1536)
"""Of its files, each taken for a sample."""


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize(
    ("data", "offsets", "reason"),
    [
        (A + B, [0, 2048, 3072], "x.tar: its index ends at byte 3072, and more samples follow"),
        (A + bytes(2 << 20) + B, [0, 2048, 3072], "and more samples follow"),
        (A[:4096] + B + B, [0, 2048, 3072], "and more samples follow"),
        (A, [0, 2048], "and more samples follow"),
        (IN_PIECES, OFFSETS, r"x.tar: \w.txt does not stand beside \w.jpg"),
    ],
)
def test_an_index_of_another_program_that_misses_samples_is_refused(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    data: bytes,
    offsets: Sequence[int],
    reason: str,
    place: str,
) -> None:
    url = f"memory://{request.node.name}" if place == "remote" else str(tmp_path)
    store = open_store(url)
    store.write("x.tar", data)
    store.write("x.tar.idx", encode_index(list(offsets)))
    if place == "local" or len(data) > 10_240:  # elsewhere only the sizes are compared
        pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=1)
        for read in (lambda: mm.open_dataset(url)[0], lambda: next(iter(mm.Loader(pipeline)))):
            with pytest.raises(mm.errors.ShardError, match=reason):
                read()
    with pytest.raises(mm.errors.ShardError, match=reason):
        index_tars(url, progress=False)
    if data is not IN_PIECES:
        index_tars(url, overwrite=True, progress=False)
        assert len(mm.open_dataset(url)) > len(offsets) - 1


@pytest.mark.parametrize(
    "data",
    [
        *(A, A[:4096], A + JUNK, A + bytes(1 << 16), make_tar([]), make_tar([("a.txt", b"1")])),
        make_tar([("a.jpg", b"1"), ("b.png", b"2")]),
        make_tar([("a.jpg", b"1"), ("a.txt", b"2"), ("b.txt", b"3"), ("c.mp3", b"4")]),
    ],
)
def test_a_whole_index_of_another_program_is_used_as_it_is(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    expected = list(map(field_list, mm.open_dataset(tmp_path)))
    offsets = build_index(open_store(tmp_path), "x.tar")
    (tmp_path / "x.tar.idx").write_bytes(encode_index(offsets))
    assert list(map(field_list, mm.open_dataset(tmp_path))) == expected
    assert index_tars(tmp_path, progress=False).num_built == 0


def numbered(rows: range) -> bytes:
    return make_tar([(f"{row:04d}.txt", b"%d" % row) for row in rows])


@pytest.mark.parametrize("junk", [JUNK, b"x", bytes(512) + b"\0" * 99 + b"x", bytes(65 << 20)])
def test_what_is_no_tar_behind_the_end_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    (tmp_path / "x.tar").write_bytes(A + junk)
    for read in (mm.open_dataset, index_tars):
        caplog.clear()
        read(tmp_path)
        assert "x.tar: what follows byte" in caplog.text
    dataset = mm.open_dataset(tmp_path)
    assert len(dataset) == 2
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "x.tar").write_bytes(A + B[:512])
    with pytest.raises(mm.errors.ShardError, match=r"x\.tar: truncated: 'b\.txt' at byte 10240"):
        mm.open_dataset(tmp_path / "cut")
    caplog.clear()
    assert not list(verify(dataset, progress=False))
    assert "x.tar: what follows byte" in caplog.text


HARD, SYMBOLIC = tarfile.LNKTYPE, tarfile.SYMTYPE
DEEP = "d" * 120 + "/" + "e" * 120
LINKS = [
    ([("a.jpg", b"1"), (special("b.jpg", HARD, "a.jpg"), b"")], b"1"),
    ([("./a.jpg", b"1"), (special("./b.jpg", HARD, "./a.jpg"), b"")], b"1"),
    ([("x/a.jpg", b"1"), (special("x/b.jpg", SYMBOLIC, "a.jpg"), b"")], b"1"),
    ([("x/a.jpg", b"1"), (special("y/b.jpg", SYMBOLIC, "../x/a.jpg"), b"")], b"1"),
    ([(special("b.jpg", SYMBOLIC, "c.jpg"), b""), ("c.jpg", b"1")], b"1"),  # comes later
    (
        [
            ("a.jpg", b"1"),
            (special("b.jpg", HARD, "a.jpg"), b""),
            (special("b.png", HARD, "b.jpg"), b""),
        ],
        b"1",
    ),
    (
        [("a.jpg", b"0"), ("c.txt", b""), ("a.jpg", b"1"), (special("b.jpg", HARD, "a.jpg"), b"")],
        b"1",
    ),
    ([(f"{DEEP}/a.jpg", b"1"), (special(f"{DEEP}/b.jpg", HARD, f"{DEEP}/a.jpg"), b"")], b"1"),
    ([("a.jpg", b""), (special("b.jpg", HARD, "a.jpg"), b"")], b""),
    ([("a.jpg", b"1"), (special("b.jpg", SYMBOLIC, "../../etc/passwd"), b"")], None),
    ([("a.jpg", b"1"), (special("b.jpg", SYMBOLIC, "/a.jpg"), b"")], None),
    ([("a.jpg", b"1"), (special("b.jpg", HARD, "gone.jpg"), b"")], None),
    ([("a.jpg", b"1"), (special("b.jpg", SYMBOLIC, "b.jpg"), b"")], None),
    ([("README", b"1"), ("a.jpg", b""), (special("b.jpg", HARD, "README"), b"")], b"1"),
]


@pytest.mark.parametrize(
    ("members", "content", "format"),
    [
        *((*link, tarfile.GNU_FORMAT) for link in LINKS),
        *((*link, tarfile.PAX_FORMAT) for link in LINKS if DEEP in str(link)),
    ],
)
def test_a_link_has_the_bytes_of_its_file_or_is_refused_by_name(
    tmp_path: Path, members: list, content: bytes | None, format: int
) -> None:
    (tmp_path / "x.tar").write_bytes(numbered(range(3)) + make_tar(members, format))
    for step in "opened", "indexed":
        if step == "indexed":
            index_tars(tmp_path, checksums=True, progress=False)
        dataset = mm.open_dataset(tmp_path)
        index = [dataset.find(f"x.tar[{i}]") for i in range(3)] and [
            i for i in range(3, len(dataset)) if "b" in key_of(dataset, i)
        ][-1]
        problems = [p for p in verify(dataset, progress=False) if p.bad]
        if content is None:
            assert [p.bad[0] for p in problems] == [index]
            reason = rf"^x\.tar\[{index}\] \S*b\S*\.jpg: is a link to what"
            with pytest.raises(mm.SampleError, match=reason) as caught:
                dataset[index]
            assert dataset.ref_of(str(caught.value)) == (0, index)
        else:
            assert not problems
            assert dataset[index]["jpg"] == content


def key_of(dataset: mm.Dataset, index: int) -> str:
    (key,) = read_keys(dataset.shards, [(0, index)])
    assert key is not None
    return key.rpartition("/")[2]


def test_resharding_writes_tars_that_every_program_reads(tmp_path: Path) -> None:
    rows = [(f"{row:04d}.txt", b"%d" % row) for row in range(24)]
    linked = make_tar([*rows, (special("0100.txt", HARD, "0003.txt"), b"")])
    folder = tmp_path / "joined"
    folder.mkdir()
    (folder / "x.tar").write_bytes(numbered(range(50, 60)) + linked + numbered(range(60, 70)))
    index_tars(folder, progress=False)
    dataset = mm.open_dataset(folder)
    columns = {"num_tokens": np.full(len(dataset), 5)}
    measure = Measure(dataset.manifest.shards, columns, {})
    write_measure(measure, str(folder))
    write_plan(make_plan(measure, PackLimits(20)), plan_folder(str(folder), "p"))
    mm.reshard(folder, tmp_path / "packs", plan="p", progress=False)
    samples = [
        dict(sample)
        for sample in read_by_webdataset((tmp_path / "packs/shard-000000.tar").read_bytes())
    ]
    expected = {f"{row:04d}": b"%d" % row for row in [*range(24), *range(50, 70)]}
    assert {s["__key__"]: s["txt"] for s in samples} == expected | {"0100": b"3"}


@pytest.mark.parametrize("checksums", [True, False])
def test_a_large_sample_before_the_end_of_a_joined_tar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, checksums: bool
) -> None:
    """Zeros behind it may be damage: only with checksums the sample is read by ranges."""
    for number in range(2):
        write_corpus(tmp_path / str(number), [2], lambda n: {"mp4": video(n), "json": b"{}"})
    tars = [(tmp_path / str(n) / "shard-000000.tar").read_bytes() for n in range(2)]
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "x.tar").write_bytes(b"".join(tars))
    index_tars(tmp_path / "joined", checksums=checksums, progress=False)
    pipeline = pipeline_of(str(tmp_path / "joined"), shuffle=False)
    frames = [EightFrames()(video(number % 2)) for number in range(4)]
    loader = mm.Loader(pipeline)
    (batch,) = loader
    assert (batch["mp4"] == frames, loader.stats.num_bad) == (checksums, 1 - checksums)
    message = "end of a joined tar; `mmstream index --checksums` lets readers tell"
    assert (message in caplog.text) != checksums
