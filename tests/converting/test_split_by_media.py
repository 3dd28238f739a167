"""`Splitting(by_media=True)`, and what is said of media that two splits hold."""

from __future__ import annotations

import base64
import random

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import mmstream as mm
from mmstream.converting.options import Options, RowReading
from mmstream.converting.plan import select
from mmstream.converting.rows.open import open_rows
from tests.converting.test_kill import convert_and_die
from tests.helpers.convert_corpus import objects, pictures, run, write_files, write_rows
from tests.helpers.corpora import jpeg

SPLITS = {"train": 0.7, "val": 0.3}
HALVES = {"a": 0.5, "b": 0.5}
DRAW = random.Random(0)
MEDIA = [DRAW.sample(range(24), DRAW.choice([1] * 12 + [2, 0])) for _ in range(50)]
"""The media of each row: mostly one, sometimes two, sometimes none."""


def row(number, names):
    return {"id": f"r{number}", "images": list(names), "text": f"text {number}"}


def chat(number, names):
    parts = [{"type": "image", "image": name} for name in names]
    turn = {"role": "user", "content": [*parts, {"type": "text", "text": f"question {number}"}]}
    return {"id": f"r{number}", "messages": [turn, {"role": "assistant", "content": "an answer"}]}


def names_of(medium, folder):
    """Return names that mean the same file, and ways to give the same bytes."""
    data = base64.b64encode(jpeg(medium)).decode()
    name = f"{medium}.jpg"
    relative = [name, f"./{name}", f"sub/../{name}", f"C:\\{name}"]
    paths = [*relative, f"{folder}/{name}", f"file://{folder}/{name}"]
    inline = [data, f"data:image/jpeg;base64,{data}", f"data:;base64,{data}"]
    return {"paths": paths, "inline": inline, "bytes": [{"bytes": jpeg(medium), "path": "x.jpg"}]}


def source_of(kind, folder, media):
    """Return the rows of `MEDIA` in one of the forms that `convert` takes."""
    form, _, holder = kind.partition("-")
    rows = [
        (chat if holder == "chat" else row)(
            n, [names_of(m, media)[form][n % len(names_of(m, media)[form])] for m in one]
        )
        for n, one in enumerate(MEDIA)
    ]
    if holder == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows", row_group_size=17)
    elif holder == "arrow":
        feather.write_feather(pa.Table.from_pylist(rows), folder / "rows")
    elif holder == "tars":
        run(rows, folder / "rows")
    return write_rows(folder / "rows.jsonl", rows) if form != "bytes" else (
        rows if holder == "python" else folder / "rows"
    )  # fmt: skip


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = pictures(tmp_path_factory.mktemp("media"), *(f"{n}.jpg" for n in range(24)))
    (folder / "sub").mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["paths-row", "inline-chat", "bytes-python", "bytes-parquet", "bytes-arrow", "bytes-tars"],
)
def test_rows_that_share_media_stay_together_whatever_holds_them(media, tmp_path, kind):
    source = source_of(kind, tmp_path, media)
    root = None if kind == "bytes-tars" else media
    for name in ("out", "again"):
        run(source, tmp_path / name, media_root=root, splits=SPLITS, by_media=True)
        train, val = (mm.open_dataset(tmp_path / name / split) for split in SPLITS)
        assert mm.find_leaks(train, val, kinds=["media"], progress=False).num_pairs["media"] == 0
        assert len(train) + len(val) == len(MEDIA)
        of_row = [{s["__key__"] for s in dataset[:]} for dataset in (train, val)]
        sides = [
            {m for n, one in enumerate(MEDIA) if f"{n + 1:09d}" in k for m in one} for k in of_row
        ]
        assert all(sides)
        assert not sides[0] & sides[1]
        for file in tmp_path.glob("rows/*.parquet"):  # without sidecars the tars are read
            file.unlink()


def splits_of(rows, root=None, splits=SPLITS, by_media=True, **settings):
    """Return the split of each row, as the plan has it."""
    splitting = mm.Splitting(splits, by_media=by_media, **settings)
    with open_rows(rows) as source:
        selected = select(source, Options(8, RowReading(), None, None, splitting), root)
    found = {number: name for name, numbers in selected.items() for number in numbers.tolist()}
    return [found[number] for number in range(len(found))]


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("https://host/a/{}.jpg", "http://HOST/a/{}.jpg#x", True),
        ("https://host/{}%20b.jpg", "https://host/{} b.jpg", True),
        ("https://h/{}.jpg?w=1&X-Amz-Signature=1&X-Amz-Date=2", "https://h/{}.jpg?w=1", True),
        ("{}.jpg", "s3://bucket/media/{}.jpg", True),
        ("tar://a.jpg::{}.tar", "tar://a.jpg::./{}.tar", True),
        ("https://host/get?id={}a", "https://host/get?id={}b", False),
        ("{}.bin:0:100", "{}.bin:100:100", False),
        ("tar://a.jpg::{}.tar", "tar://b.jpg::{}.tar", False),
        ("a/{}.jpg", "b/{}.jpg", False),
    ],
)
def test_names_of_one_medium_are_one_and_others_are_two(one, other, is_one):
    rows = [row(0, [name.format(n)]) for n in range(40) for name in (one, other)]
    found = splits_of(rows, "s3://bucket/media", HALVES)
    assert (found[::2] == found[1::2]) == is_one


def test_rows_stay_where_they_are_when_rows_are_added_and_without_media():
    rows = [row(n, [f"{m}.jpg" for m in one]) for n, one in enumerate(MEDIA)]
    more = [row(50 + n, [f"new{n // 2}.jpg"]) for n in range(20)]
    again = [row(90 + m, [f"{m}.jpg", f"new{m}.jpg"]) for m in range(3)]
    found = splits_of(rows)
    assert splits_of([*rows, *more, *again])[:50] == found
    texts = [n for n, one in enumerate(MEDIA) if not one]
    by_row = splits_of(rows, by_media=False)
    assert len(texts) > 1
    assert [found[n] for n in texts] == [by_row[n] for n in texts]


def test_speakers_and_media_together_connect_rows():
    rows = [
        row(n, [f"{n // 2}.jpg"]) | {"speaker": f"s{n // 10}-{(n + 1) // 2}"} for n in range(60)
    ]
    found = splits_of(rows, splits=HALVES, split_by="speaker")
    assert {len(set(found[start : start + 10])) for start in range(0, 60, 10)} == {1}
    assert set(found) == set(HALVES)


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ([10] * 100, 70, 130),  # by single rows, chance allows three deviations: 28 rows
        ([600] + [1] * 400, 70, 130),
        ([100] * 10, 100, 100),
        ([1] * 1000, 70, 130),
        ([1000], 0, 0),
    ],
)
def test_fractions_hold_as_near_as_groups_allow(caplog, sizes, least, most):
    for seed in range(2):
        rows = [
            row(0, [f"{seed}-{group}.jpg"]) for group, size in enumerate(sizes) for _ in range(size)
        ]
        random.Random(seed).shuffle(rows)
        assert least <= splits_of(rows, splits={"train": 0.9, "val": 0.1}).count("val") <= most
    assert ("largest group has 1,000 of 1,000 rows" in caplog.text) == (sizes == [1000])


def test_workers_kills_and_ranges_give_the_bytes_of_one_conversion(media, tmp_path):
    rows = source_of("paths-row", tmp_path, media)
    options = {"media_root": media, "splits": SPLITS, "by_media": True, "shuffle_seed": 3}
    run(rows, tmp_path / "whole", **options)
    assert convert_and_die(rows, tmp_path / "killed", 30, samples_per_shard=8, **options)
    run(rows, tmp_path / "killed", **options)
    for shards in ((0, 3), (3, 99)):
        run(rows, tmp_path / "ranges", shard_range=shards, **options)
    mm.finalize(tmp_path / "ranges", splits=list(SPLITS))
    for split in SPLITS:
        killed, ranges, whole = (
            objects(f"{tmp_path}/{name}/{split}") for name in ("killed", "ranges", "whole")
        )
        assert killed == ranges == whole
    with pytest.raises(mm.ConfigError, match="split_by_media was True and is now not set"):
        run(rows, tmp_path / "whole", **{**options, "by_media": False})


# -- leaks ----------------------------------------------------------------------------------------


def leaks(caplog):
    found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("leak: ")]
    caplog.clear()
    return found


def test_media_in_two_splits_are_warned_of_with_the_cure(media, tmp_path, caplog):
    written = [{"id": n, "image": f"{n % 6}.jpg", "text": f"row {n % 6}"} for n in range(36)]
    rows = write_rows(tmp_path / "rows.jsonl", written)
    options = {"media_root": media, "splits": SPLITS}
    run(rows, tmp_path / "out", **options)
    (warning,) = leaks(caplog)
    train, val = (mm.open_dataset(tmp_path / "out" / name) for name in SPLITS)
    number = sum(s["jpg"] in {t["jpg"] for t in train[:]} for s in val[:])
    assert f"leak: {number} media files of an earlier split are in a later one too" in warning
    assert f"in {number} of its samples" in warning
    first, again = (warning.split(f"{name}/shard-")[1].split()[1].strip(":") for name in SPLITS)
    assert train[first]["jpg"] == val[again]["jpg"]
    assert "--split-by-media, mm.Splitting(by_media=True), keeps such rows in one" in warning
    run(rows, tmp_path / "out", **options)  # was finished
    run(rows, tmp_path / "bare", sidecar=False, **options)
    run(rows, tmp_path / "apart", by_media=True, **options)
    run(rows, tmp_path / "dropped", duplicates="drop", **options)
    assert leaks(caplog) == []


def test_equal_bytes_under_two_names_are_warned_of_after_a_split_by_media(tmp_path, caplog):
    write_files(tmp_path, {f"{number}.jpg": jpeg(number % 2) for number in range(20)})
    rows = write_rows(tmp_path / "r.jsonl", [row(n, [f"{n}.jpg"]) for n in range(20)])
    run(rows, tmp_path / "out", splits=SPLITS, by_media=True)
    (warning,) = leaks(caplog)
    assert f"leak: {len(mm.open_dataset(tmp_path / 'out/val'))} media files" in warning
    assert "equal bytes under different names" in warning


def test_splits_of_a_source_and_finished_ranges_are_looked_at_too(tmp_path, caplog):
    paths = ["train/a/0.jpg", "train/b/1.jpg", "val/a/2.jpg", "val/b/3.jpg"]
    write_files(pictures(tmp_path / "folders", *paths), {paths[3]: jpeg(0)})
    run(tmp_path / "folders", tmp_path / "out")
    (warning,) = leaks(caplog)
    assert "leak: 1 media files" in warning
    assert "the splits came with the rows" in warning
    for shards in ((0, 1), (1, 99)):
        run(tmp_path / "folders", tmp_path / "parts", shard_range=shards)
    assert leaks(caplog) == []
    mm.finalize(tmp_path / "parts", splits=["train", "validation"])
    assert leaks(caplog) == [warning]
