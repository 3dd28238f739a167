"""Duplicates that are planted in a corpus: found, listed, dropped, and leaks between datasets."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting import duplicates as duplicates_module
from mmstream.converting.duplicates import (
    MAX_DISTANCE,
    equal_to_first,
    keep_first,
    match_with_first,
    near_pairs,
)
from mmstream.converting.sidecar import perceptual_hash
from mmstream.dataset.bad_list import BAD_NAME, read_listed, write_bad
from tests.helpers.convert_corpus import run, tree, write_rows
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded as saved

NUM_PHOTOS = 12


def encoded(path, **options):
    """Return a photograph encoded again, after it was resized to `side` if that is given."""
    side = options.pop("side", None)
    with Image.open(path) as image:
        picture = image.convert("RGB")
    if side:
        picture = picture.resize((side, side * picture.height // picture.width))
    buffer = io.BytesIO()
    picture.save(buffer, **{"format": "JPEG", **options})
    return buffer.getvalue()


@pytest.fixture
def corpus(tmp_path):
    """Write 12 photographs with captions, then what the tests know: 8 rows that are not new."""
    rows = []
    for i, path in enumerate(PHOTOS[:NUM_PHOTOS]):
        (tmp_path / f"{i}.jpg").write_bytes(path.read_bytes())
        rows.append({"id": f"r{i}", "image": f"{i}.jpg", "text": f"photo {i}"})
    (tmp_path / "again.jpg").write_bytes(encoded(PHOTOS[3], quality=50))
    (tmp_path / "small.png").write_bytes(encoded(PHOTOS[4], side=160, format="PNG"))
    rows += [
        {"image": "0.jpg", "text": "photo 0"},  # 12: the whole sample
        {"image": "1.jpg", "text": "another"},  # 13: the picture
        {"text": "photo 2"},  # 14: the text
        {"image": "again.jpg", "text": "less"},  # 15: looks like 3
        {"image": "small.png", "text": "small"},  # 16: looks like 4
        {"image": "0.jpg", "text": "photo 0"},  # 17: the whole sample, a third time
    ]
    return write_rows(tmp_path / "rows.jsonl", rows)


def pairs_by_row(report):
    """Return {kind: {row of the later sample: row of the first one}}, rows from 0."""
    pairs = {kind: {} for kind in report.num_pairs}
    for pair in report.pairs():
        pairs[pair.kind][int(pair.again.key) - 1] = int(pair.first.key) - 1
    return pairs


EXPECTED = {
    "media": {12: 0, 13: 1, 17: 0},
    "text": {12: 0, 14: 2, 17: 0},
    "pair": {12: 0, 17: 0},
    "near": {12: 0, 13: 1, 15: 3, 16: 4, 17: 0},
}


@pytest.mark.parametrize("options", [{}, {"near_duplicates": "report"}, {"sidecar": False}])
def test_all_planted_duplicates_are_found_and_no_others(corpus, tmp_path, options):
    run(corpus, tmp_path / "out", samples_per_shard=5, **options)
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), near=True, progress=False)
    assert pairs_by_row(report) == EXPECTED
    assert {pair.again_field for pair in report.pairs(["near"])} == {"jpg", "png"}


@pytest.mark.slow
def test_a_conversion_lists_pairs_and_leaves_whole_duplicates_out_of_epochs(corpus, tmp_path):
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        report = run(corpus, out, samples_per_shard=5, duplicates="drop", num_workers=workers)
        assert report.num_pairs == {"media": 3, "text": 3, "pair": 2}
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2")
    lines = [json.loads(line) for line in (out / "duplicates.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert lines[0] == {
        "kind": "media",
        "shard": "shard-000002.tar",
        "index": 2,
        "key": "000000013",
        "field": "jpg",
        "first": {"shard": "shard-000000.tar", "index": 0, "key": "000000001", "field": "jpg"},
    }
    assert mm.open_dataset(out).bad.tolist() == [[2, 2], [3, 2]]
    assert run(corpus, out, samples_per_shard=5, duplicates="drop").was_finished


def test_near_duplicates_are_dropped_by_their_pictures_alone(corpus, tmp_path):
    run(corpus, tmp_path / "out", near_duplicates="drop", samples_per_shard=50)
    assert mm.open_dataset(tmp_path / "out").bad[:, 1].tolist() == [12, 13, 15, 16, 17]


def test_duplicates_of_two_splits_are_leaks_and_the_first_split_keeps_them(
    corpus, tmp_path, caplog
):
    splits = {"train": 0.5, "val": 0.5}
    run(corpus, tmp_path / "out", splits=splits, duplicates="drop", near_duplicates="drop")
    assert "pairs of samples of two splits" in caplog.text
    train, val = (mm.open_dataset(tmp_path / "out" / name) for name in splits)
    assert len(train.bad) + len(val.bad) == 5
    assert (
        sum(mm.find_leaks(train, val, kinds=["media", "near"], progress=False).num_pairs.values())
        == 0
    )
    lines = (tmp_path / "out/val/duplicates.jsonl").read_text().splitlines()
    assert {json.loads(line)["dataset"] for line in lines} == {"val"}


def test_captions_of_one_row_are_no_duplicates_of_each_other(tmp_path):
    (tmp_path / "0.jpg").write_bytes(PHOTOS[0].read_bytes())
    rows = [{"image": "0.jpg", "captions": ["a", "b"]}, {"image": "0.jpg", "captions": ["c"]}]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out", captions="each")
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), near=True, progress=False)
    assert report.num_pairs == {"media": 1, "text": 0, "pair": 0, "near": 1}


def test_no_content_is_lost_where_kinds_are_joined(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.jpg").write_bytes(PHOTOS[i].read_bytes())
    rows = [
        {"image": f"{picture}.jpg", "text": text}
        for picture, text in [(0, "a"), (1, "a"), (1, "b"), (1, "b"), (0, "c"), (1, "a")]
    ]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), progress=False)
    assert [index for _, index in report.refs(["media", "text"])[""].tolist()] == [1, 3, 4, 5]
    assert [index for _, index in report.refs(["text"])[""].tolist()] == [1, 3, 5]


def test_a_sample_with_a_new_picture_stays(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(PHOTOS[i].read_bytes())
    pairs = [(0, 1), (1, 2), (1, 0)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image><image>same?"},
                {"role": "assistant", "content": f"{n}"},
            ],
            "images": [f"{i}.jpg" for i in pair],
        }
        for n, pair in enumerate(pairs)
    ]
    run(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), near=True, progress=False)
    assert report.num_pairs["media"] == 3
    assert report.refs(["media"])[""].tolist() == report.refs(["near"])[""].tolist() == [[0, 2]]
    assert [pair.again_field for pair in report.pairs(["media"])] == ["0.jpg", "0.jpg", "1.jpg"]


def test_a_known_bad_sample_is_no_original(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    write_bad(mm.open_dataset(tmp_path / "out"), [(0, 0)])
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), progress=False)
    assert pairs_by_row(report)["pair"] == {17: 12}


def test_duplicates_need_sidecars_and_known_words(corpus, tmp_path):
    for options, reason in (
        ({"duplicates": "report", "sidecar": False}, "needs the sidecars"),
        ({"near_duplicates": "yes"}, "give 'report', 'drop' or None"),
    ):
        with pytest.raises(mm.ConfigError, match=reason):
            run(corpus, tmp_path / "out", **options)
    run(corpus, tmp_path / "out")
    with pytest.raises(mm.ConfigError, match="must be among"):
        mm.find_duplicates(mm.open_dataset(tmp_path / "out"), kinds=["id"], progress=False)


def test_the_command_drops_and_verify_keeps_what_it_dropped(corpus, tmp_path, mmstream):
    out = tmp_path / "out"
    run(corpus, out, samples_per_shard=50)
    code, text, _ = mmstream("duplicates", out, "--drop", "pair", "--html", tmp_path / "page.html")
    assert code == 0
    assert "pair: 2 of 18 samples" in text
    assert "2 of 18 samples are left out of new runs" in text
    assert (tmp_path / "page.html").read_text().count("<img") == 15
    assert mm.open_dataset(out).bad.tolist() == [[0, 12], [0, 17]]
    before = (out / BAD_NAME).read_bytes()
    assert mmstream("duplicates", out, "--drop", "pair")[0] == 0
    assert (out / BAD_NAME).read_bytes() == before
    code, text, _ = mmstream("verify", out, "--write-bad")
    assert (code, "2 of them as duplicates" in text) == (0, True)
    assert (out / BAD_NAME).read_bytes() == before
    assert len(read_listed(mm.open_dataset(out), "duplicates")) == 2
    assert mmstream("duplicates", out, "--undo")[0] == 0
    assert not (out / BAD_NAME).exists()
    assert mmstream("duplicates", out, "--kind", "id")[0] == 2


def test_leakcheck_names_what_two_datasets_share(corpus, tmp_path, mmstream):
    run(corpus, tmp_path / "a", samples_per_shard=5)
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.jpg").write_bytes(PHOTOS[2].read_bytes())
    (other / "y.jpg").write_bytes(encoded(PHOTOS[5], quality=40, side=200))
    (other / "z.jpg").write_bytes(PHOTOS[NUM_PHOTOS].read_bytes())
    rows = [
        {"id": "new1", "image": "x.jpg", "text": "shared picture"},
        {"id": "new2", "image": "y.jpg", "text": "looks alike"},
        {"id": "r7", "image": "z.jpg", "text": "shared id"},
        {"id": "new4", "text": "photo 9"},
        {"id": "new5", "text": "all new"},
    ]
    run(write_rows(other / "rows.jsonl", rows), tmp_path / "b", sidecar=False)
    pairs = tmp_path / "pairs.jsonl"
    page = tmp_path / "page.html"
    code, text, _ = mmstream(
        "leakcheck", tmp_path / "a", tmp_path / "b", "--pairs", pairs, "--html", page
    )
    assert (code, "media: 1" in text) == (1, True)
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    shared = {(line["kind"], line["key"], line["first"]["key"]) for line in lines}
    assert shared == {
        ("media", "000000001", "000000003"),
        ("near", "000000001", "000000003"),
        ("near", "000000002", "000000006"),
        ("id", "000000003", "000000008"),
        ("text", "000000004", "000000010"),
    }
    assert page.read_text().count("<img") == 9
    assert mmstream("leakcheck", tmp_path / "a", tmp_path / "b", "--kind", "text,media")[0] == 1
    write_bad(mm.open_dataset(tmp_path / "b"), [(0, i) for i in range(4)])
    code, text, _ = mmstream("leakcheck", tmp_path / "a", tmp_path / "b")
    assert (code, text.splitlines()[-1]) == (0, f"ok: nothing of 5 samples is in {tmp_path / 'a'}")


def test_a_damaged_sidecar_is_not_used(corpus, tmp_path, caplog):
    run(corpus, tmp_path / "out", samples_per_shard=5)
    (tmp_path / "out/shard-000002.parquet").write_bytes(b"PAR1 damaged PAR1")
    report = mm.find_duplicates(mm.open_dataset(tmp_path / "out"), progress=False)
    assert {kind: pairs_by_row(report)[kind] for kind in report.num_pairs} == {
        kind: EXPECTED[kind] for kind in ("media", "text", "pair")
    }
    assert "the tar is read" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"quality": 30}, {"side": 120}, {"format": "PNG"}, {"format": "WEBP", "quality": 50}],
)
def test_a_changed_photograph_has_nearly_the_same_hash_and_others_have_not(change):
    hashes = [np.frombuffer(perceptual_hash(path.read_bytes()), np.uint8) for path in PHOTOS]
    for i, path in enumerate(PHOTOS[:8]):
        again = np.frombuffer(perceptual_hash(encoded(path, **change)), np.uint8)
        distances = [int(np.bitwise_count(again ^ other).sum()) for other in hashes]
        assert distances[i] <= 15
        assert min(distances[:i] + distances[i + 1 :]) > 60


@pytest.mark.parametrize(
    "data",
    [
        saved(Image.new("RGB", (64, 64), "white"), "PNG"),
        b"not a picture",
        PHOTOS[0].read_bytes()[:200],
    ],
    ids=["white", "no picture", "cut off"],
)
def test_pictures_without_content_have_no_hash(data):
    assert perceptual_hash(data) is None


# -- hashes that differ in few bits, and equal ones: compared with a search of all pairs


def flipped(hashes, num_bits, rng):
    """Return hashes with so many bits changed."""
    bits = np.unpackbits(hashes, axis=1)
    for row, count in zip(bits, num_bits):
        row[rng.permutation(256)[:count]] ^= 1
    return np.packbits(bits, axis=1)


def planted(count, rng):
    """Return random hashes. The last quarter are the first with 0 to 20 bits changed."""
    hashes = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    quarter = count // 4
    hashes[-quarter:] = flipped(hashes[:quarter], rng.integers(0, 21, quarter), rng)
    hashes[quarter : quarter + 30] = hashes[0]
    return hashes[rng.permutation(count)]


def distances(hashes):
    return np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(-1, dtype=np.int64)


@pytest.mark.parametrize("max_bucket", [duplicates_module.MAX_BUCKET, 1])
def test_every_pair_within_the_distance_is_found_and_no_other(monkeypatch, max_bucket):
    monkeypatch.setattr(duplicates_module, "MAX_BUCKET", max_bucket)
    hashes = planted(600, np.random.default_rng(0))
    pairs = near_pairs(hashes)
    bits = distances(hashes)
    assert pairs.representative.tolist() == [int(np.flatnonzero(row == 0)[0]) for row in bits]
    different = np.unique(pairs.representative)
    expected = {
        (int(a), int(b))
        for a in different
        for b in different[different > a]
        if bits[a, b] <= MAX_DISTANCE
    }
    found = list(zip(pairs.first.tolist(), pairs.second.tolist()))
    assert set(found) == expected
    assert len(found) == len(expected) > 90
    assert pairs.distance.tolist() == [bits[a, b] for a, b in found]


def test_each_later_hash_is_matched_with_the_first_kept_one():
    rng = np.random.default_rng(1)
    hashes = planted(400, rng)  # and chains, whose ends are not near to each other
    hashes = np.concatenate([hashes, flipped(hashes[-100:], rng.integers(5, 15, 100), rng)])
    bits = distances(hashes)
    kept, expected = [], {}
    for number in range(len(hashes)):
        if leaders := [leader for leader in kept if bits[leader, number] <= MAX_DISTANCE]:
            expected[number] = leaders[0]
        else:
            kept.append(number)
    matches = keep_first(near_pairs(hashes))
    assert dict(zip(matches.again.tolist(), matches.first.tolist())) == expected
    assert matches.distance.tolist() == [bits[a, b] for b, a in expected.items()]


def test_later_hashes_are_matched_with_the_nearest_of_the_first_ones():
    rng = np.random.default_rng(2)
    hashes = planted(500, rng)
    bits = distances(hashes)[:300, 300:]
    matches = match_with_first(near_pairs(hashes), 300)
    expected = {
        300 + number: int(column.min())
        for number, column in enumerate(bits.T)
        if column.min() <= MAX_DISTANCE
    }
    assert dict(zip(matches.again.tolist(), matches.distance.tolist())) == expected
    assert len(expected) > 20
    assert (matches.first < 300).all()


def test_a_hash_that_comes_again_leaks_where_its_likeness_is_in_the_first_dataset():
    rng = np.random.default_rng(3)
    one = rng.integers(0, 256, (1, 32), dtype=np.uint8)
    other = flipped(one, [5], rng)
    matches = match_with_first(near_pairs(np.concatenate([one, other, other])), 1)
    assert (matches.first.tolist(), matches.again.tolist()) == ([0, 0], [1, 2])


def test_no_hashes_have_no_pairs():
    pairs = near_pairs(np.zeros((0, 32), np.uint8))
    assert pairs.first.size == keep_first(pairs).again.size == 0


@pytest.mark.parametrize("bucket", [duplicates_module.BUCKET, 7])
def test_equal_hashes_are_matched_with_the_first_in_any_number_of_buckets(monkeypatch, bucket):
    monkeypatch.setattr(duplicates_module, "BUCKET", bucket)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, (60, 2), dtype=np.uint64)
    values[1, 0] = values[2, 0]  # equal in 64 bits only
    values[3, 1] = values[4, 1]
    hashes = values[rng.integers(0, 60, 200)]
    first, again = equal_to_first(hashes)
    _, earliest, which = np.unique(hashes, axis=0, return_index=True, return_inverse=True)
    expected = earliest[which.ravel()]
    assert again.tolist() == np.flatnonzero(expected != np.arange(200)).tolist()
    assert first.tolist() == expected[again].tolist()
