"""The list of bad samples: who writes it, who reads it, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mmstream as mm
from mmstream import Decode, ImageDecoder
from mmstream.cli import cli
from mmstream.dataset.bad_list import (
    BAD_NAME,
    PREVIOUS_NAME,
    write_bad,
)
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.keys import shard_stamp, stamps_agree
from mmstream.dataset.manifest import MANIFEST_NAME, ShardInfo
from mmstream.dataset.verify import bad_samples, verify
from mmstream.decoding.bad_samples import quarantined_refs
from mmstream.decoding.sample import decode_sample
from mmstream.errors import ConfigError, DecodeError, ManifestError
from mmstream.storage import open_store, write_lock
from tests.helpers.bad_corpus import FAULTS, offsets, patch, write_faulty, write_tiny
from tests.helpers.convert_corpus import make_corpus, run
from tests.helpers.corpora import write_corpus, write_shard

COUNTS = [8, 1, 0, 6]


@pytest.fixture
def dataset(tmp_path) -> mm.Dataset:
    """15 samples in the folder of the test."""
    return mm.open_dataset(write_tiny(tmp_path, COUNTS))


def list_bad(folder, text) -> None:
    content = {"version": 1, "bad": text} if isinstance(text, dict) else text
    data = content if isinstance(content, str) else json.dumps(content)
    Path(folder, BAD_NAME).write_text(data)


def verified(folder, *options) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["verify", str(folder), *map(str, options)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def known(folder) -> list[list[int]]:
    return mm.open_dataset(folder).bad.tolist()


# -- the list -----------------------------------------------------------------------------------


def test_what_is_written_is_read_sorted_and_once_however_it_came(dataset, tmp_path):
    refs = [(3, 5), (0, 7), (3, 0), (0, 2), (3, 5), (1, 0)]
    for given in (refs, np.array(refs[::-1], dtype=np.int64)):
        write_bad(dataset, given)
        text = re.sub('"[0-9a-f]{8}"', '"SEAL"', (tmp_path / BAD_NAME).read_text())
        assert text == (
            '{\n  "version": 1,\n  "bad": {\n'
            '    "shard-000000.tar": [2,7],\n'
            '    "shard-000001.tar": "all",\n'
            '    "shard-000003.tar": [0,5]\n  }\n  ,"crc32c": "SEAL"\n}\n'
        )
    again = mm.open_dataset(tmp_path)
    assert again.bad.tolist() == [[0, 2], [0, 7], [1, 0], [3, 0], [3, 5]]
    assert again.bad.dtype == np.int64
    assert len(again) == len(list(again)) == 15  # random access knows all samples
    assert dataset.bad.shape == (0, 2)  # as it was opened
    assert mm.open_dataset(tmp_path, bad_list=False).bad.size == 0


def test_a_list_of_nothing_is_none(dataset, tmp_path):
    write_bad(dataset, [])
    assert not (tmp_path / BAD_NAME).exists()
    write_bad(dataset, [(0, 0)])
    write_bad(dataset, np.zeros((0, 2), dtype=np.int64))
    assert not (tmp_path / BAD_NAME).exists()


def test_a_list_that_changes_stays_as_the_one_before(dataset, tmp_path):
    previous, texts = tmp_path / PREVIOUS_NAME, []
    for refs in ([(0, 1)], [(0, 1)], [(0, 2)], []):
        write_bad(dataset, refs)
        texts.append((tmp_path / BAD_NAME).read_bytes() if refs else None)
        if texts[0] == texts[-1]:
            assert not previous.exists()
    assert previous.read_bytes() == texts[2]
    (tmp_path / BAD_NAME).write_bytes(texts[0])  # as a run mid-epoch may need it
    assert known(tmp_path) == [[0, 1]]


def test_a_new_list_in_place_of_a_damaged_one_says_what_is_lost(dataset, tmp_path, caplog):
    write_bad(dataset, [(0, 1)], duplicates=np.array([[0, 2]]))
    path = tmp_path / BAD_NAME
    damaged = path.read_bytes().replace(b"[2]", b"[0]")
    path.write_bytes(damaged)
    write_bad(dataset, [(0, 1)])
    assert "Duplicates that it named take part again" in caplog.text
    assert (tmp_path / PREVIOUS_NAME).read_bytes() == damaged


@pytest.mark.parametrize("ref", [(4, 0), (0, 8), (2, 0), (0, -1), (-1, 0)])
def test_a_sample_that_is_not_there_is_not_listed(dataset, tmp_path, ref):
    with pytest.raises(ConfigError, match="is not in <Dataset"):
        write_bad(dataset, [(0, 0), ref])
    assert not (tmp_path / BAD_NAME).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"shard-000009.tar": [0]}, "shard-000009.tar is not a shard of this dataset"),
        ({"shard-000009.tar": "all"}, "shard-000009.tar is not a shard of this dataset"),
        ({"shard-000000.tar": [0, 8]}, r"shard-000000.tar\[8\]: it has 8 samples"),
        ({"shard-000000.tar": [-1]}, r"shard-000000.tar\[-1\]: it has 8 samples"),
        ({"shard-000002.tar": [0]}, r"shard-000002.tar\[0\]: it has 0 samples"),
        ({"shard-000000.tar": [1 << 70]}, "it has 8 samples|out of range"),
        ({"shard-000000.tar": "some"}, "some"),
        ({"shard-000000.tar": [1.5]}, "int"),
        ({"shard-000000.tar": ["1"]}, "int"),
        ({"shard-000000.tar": None}, "null"),
        ({"version": 1, "bad": {}, "good": {}}, "good"),
        ({"version": 1}, "bad"),
        ({"bad": {}}, "version"),
        ("[]", "array"),
        ("", "truncated"),
        ('{"version": 1, "bad": {"\xff', "truncated|UTF-8|utf-8"),
    ],
)
@pytest.mark.usefixtures("dataset")
def test_a_list_that_does_not_fit_is_refused_and_says_what_to_do(tmp_path, text, reason):
    whole = isinstance(text, dict) and {"version", "bad"} & set(text)
    list_bad(tmp_path, json.dumps(text) if whole else text)
    with pytest.raises(ManifestError, match=reason) as caught:
        mm.open_dataset(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / BAD_NAME))
    assert "verify --write-bad" in message
    assert "\n" not in message
    assert len(mm.open_dataset(tmp_path, bad_list=False)) == 15
    assert verified(tmp_path, "--write-bad")[0] == 0  # makes a new one, here: none
    assert not (tmp_path / BAD_NAME).exists()


@pytest.mark.usefixtures("dataset")
def test_a_list_of_a_newer_version_is_refused(tmp_path):
    list_bad(tmp_path, '{"version": 3, "bad": [], "more": 1}')
    with pytest.raises(ManifestError, match=r"format version 3, .* install a newer mmstream"):
        mm.open_dataset(tmp_path)


# -- every way to open --------------------------------------------------------------------------


def test_each_way_to_open_the_tars_heeds_the_list_of_their_root(tmp_path):
    write_tiny(tmp_path, [8, 3, 6])
    (tmp_path / MANIFEST_NAME).unlink()
    write_bad(mm.open_dataset(tmp_path), [(0, 1), (1, 0), (2, 5)])
    tars = sorted(str(path) for path in tmp_path.glob("*.tar"))
    assert known(tmp_path) == [[0, 1], [1, 0], [2, 5]]
    assert known(tars[::-1]) == [[0, 5], [1, 0], [2, 1]]
    assert known(tars[1:]) == [[0, 0], [1, 5]]
    assert known(tars[2]) == [[0, 5]]
    assert known(f"{tmp_path}/shard-{{000000..000001}}.tar") == [[0, 1], [1, 0]]
    assert mm.open_dataset(tars, bad_list=False).bad.size == 0


def test_a_root_above_the_tars_has_its_own_list(tmp_path):
    for folder in ("a", "b"):
        write_tiny(tmp_path / folder, [4])
    tars = [tmp_path / folder / "shard-000000.tar" for folder in ("a", "b")]
    assert known(tars) == []
    write_bad(mm.open_dataset(tars), [(1, 3)])
    assert (tmp_path / BAD_NAME).is_file()
    assert known(tars) == [[1, 3]]
    assert known(tmp_path / "b") == []


def test_a_list_made_of_some_tars_keeps_what_it_said_of_the_others(tmp_path):
    write_tiny(tmp_path, [8, 3, 6])
    write_bad(mm.open_dataset(tmp_path), [(0, 1), (1, 0), (2, 5)])
    write_bad(mm.open_dataset(tmp_path / "shard-000001.tar"), [(0, 2)])
    assert known(tmp_path) == [[0, 1], [1, 2], [2, 5]]
    write_bad(mm.open_dataset(tmp_path / "shard-000001.tar"), [])
    assert known(tmp_path) == [[0, 1], [2, 5]]


def test_indexes_elsewhere_have_the_list_beside_them(tmp_path):
    write_tiny(tmp_path / "tars", [4, 4])
    index_tars(tmp_path / "tars", output=tmp_path / "indexes", progress=False)
    indexes = tmp_path / "indexes"
    write_bad(mm.open_dataset(indexes, allow_foreign_urls=True), [(1, 1)])
    assert not (tmp_path / "tars" / BAD_NAME).exists()
    assert mm.open_dataset(indexes, allow_foreign_urls=True).bad.tolist() == [[1, 1]]


# -- verify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["truncated_jpeg", "bad_json", "field_twice"])
def test_verify_lists_what_a_decoder_refuses(tmp_path, name):
    write_faulty(tmp_path, COUNTS, {1, 8, 14}, FAULTS[name])
    code, output = verified(tmp_path, "--decode", "--write-bad")
    assert code == 1
    assert "3 of 15 samples are left out of every epoch" in output.splitlines()
    assert known(tmp_path) == [[0, 1], [1, 0], [3, 5]]
    assert json.loads((tmp_path / BAD_NAME).read_bytes())["bad"]["shard-000001.tar"] == "all"


def test_verify_leaves_out_another_tar_of_as_many_samples(tmp_path):
    folder = write_corpus(tmp_path / "corpus", [4, 4], checksums=True)
    other = write_corpus(
        tmp_path / "other", [4], lambda number: {"txt": b"caption" * 999}, checksums=True
    )
    shard = Path(folder, "shard-000001.tar")
    shard.write_bytes(Path(other, "shard-000000.tar").read_bytes())
    code, output = verified(folder, "--write-bad")
    assert code == 1
    assert "another tar lies there, and no run reads it right; convert or fetch it" in output
    assert known(folder) == [[1, number] for number in range(4)]
    loader = mm.Loader(mm.Pipeline(mm.open_dataset(folder), global_batch_size=4))
    assert len(list(loader)) == 1


@pytest.mark.slow
def test_a_list_is_not_written_while_another_process_writes_there(tmp_path, monkeypatch):
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    write_tiny(tmp_path, [5])
    with write_lock.write_lock(open_store(tmp_path), "index"):
        result = CliRunner().invoke(cli, ["verify", str(tmp_path), "--write-bad"])
        assert "another index (pid" in str(result.exception)
        assert verified(tmp_path)[0] == 0
    assert verified(tmp_path, "--write-bad")[0] == 0


def test_verify_makes_the_list_anew_and_removes_one_that_is_no_longer_true(tmp_path):
    write_faulty(tmp_path, COUNTS, {1}, FAULTS["truncated_jpeg"])
    write_bad(mm.open_dataset(tmp_path), [(3, 2)])
    assert verified(tmp_path, "--decode")[0] == 1
    assert known(tmp_path) == [[3, 2]]
    assert verified(tmp_path, "--decode", "--write-bad")[0] == 1
    assert known(tmp_path) == [[0, 1]]  # the other one was good
    first = (tmp_path / BAD_NAME).read_bytes()
    assert verified(tmp_path, "--decode", "--write-bad")[0] == 1
    assert (tmp_path / BAD_NAME).read_bytes() == first
    write_corpus(tmp_path, [1, 8])
    with pytest.raises(ManifestError, match="it has 1 samples"):
        mm.open_dataset(tmp_path)
    code, output = verified(tmp_path, "--decode", "--write-bad")
    assert code == 0, output
    assert not (tmp_path / BAD_NAME).exists()
    assert known(tmp_path) == []


def cut(tar) -> None:
    os.truncate(tar, int(offsets(tar.parent, 1)[5]) + 700)


def garble_index(tar) -> None:
    tar.with_name(f"{tar.name}.idx").write_bytes(b"\xff" * 80)


def break_header(tar) -> None:
    patch(tar.parent, 1, int(offsets(tar.parent, 1)[3]), b"garbage" * 9)


@pytest.mark.parametrize(
    ("damage", "has_index", "lost"),
    [
        (Path.unlink, True, [*range(9)]),
        (cut, True, [5, 6, 7, 8]),
        (cut, False, [*range(9)]),
        (Path.exists, False, []),  # nothing else: `mmstream index` brings the index back
        (garble_index, True, []),
        (break_header, True, [3]),
    ],
)
def test_verify_lists_the_samples_that_a_damaged_shard_has_lost_and_only_those(
    tmp_path, damage, has_index, lost
):
    write_corpus(tmp_path, [4, 9, 5])
    damage(tmp_path / "shard-000001.tar")
    if not has_index:
        (tmp_path / "shard-000001.tar.idx").unlink()
    dataset = mm.open_dataset(tmp_path)
    listed = write_bad(dataset, bad_samples(dataset, verify(dataset, progress=False)))
    assert listed.tolist() == known(tmp_path) == [[1, index] for index in lost]
    if lost:
        bad = json.loads((tmp_path / BAD_NAME).read_bytes())["bad"]
        assert bad == {"shard-000001.tar": "all" if len(lost) == 9 else lost}


def test_a_checksum_that_differs_makes_no_sample_bad(tmp_path):
    run(make_corpus(tmp_path), tmp_path / "out")
    path = tmp_path / "out" / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    code, output = verified(tmp_path / "out", "--write-bad")
    assert code == 1
    assert "checksum differs" in output
    assert not (tmp_path / "out" / BAD_NAME).exists()


def test_a_sample_that_was_bad_only_once_is_not_listed(tmp_path):
    dataset, seen = mm.open_dataset(write_corpus(tmp_path, [6])), set()

    def decode(sample):
        if sample["__key__"] not in seen:
            seen.add(sample["__key__"])
            raise DecodeError("a flipped bit on the way")
        return decode_sample(sample, Decode(image=ImageDecoder(size=16)))

    assert list(verify(dataset, decode=decode, progress=False)) == []
    assert len(seen) == 6


# -- quarantine ---------------------------------------------------------------------------------


def refuses_some(sample):
    number = int(sample["__key__"])
    if number % 5 == 0:
        raise ValueError("too dark")
    if number % 7 == 0:
        raise mm.SkipSample("not wanted")
    return sample


def refusing(corpus, folder) -> mm.Pipeline:
    """A pipeline with a quarantine in this folder."""
    return mm.Pipeline(
        mm.open_dataset(corpus),
        global_batch_size=6,
        transforms=(refuses_some,),
        bad_samples=mm.BadSamplePolicy(max_fraction=1, quarantine=str(folder)),
    )


def test_what_transforms_refuse_gets_onto_the_list_without_reading_data(tmp_path):
    corpus = tmp_path / "corpus"
    pipeline = refusing(write_tiny(corpus, [20, 16]), tmp_path)
    for rank in range(2):
        list(mm.Loader(pipeline, world=mm.World(rank, 2)))
    write_bad(mm.open_dataset(corpus), [(0, 3)])
    for path in corpus.glob("*.tar"):
        os.truncate(path, 0)  # nobody looks
    files = sorted(tmp_path.glob("quarantine-rank*.jsonl"))
    assert len(files) == 2
    options = [word for file in files for word in ("--quarantine", file)]
    code, output = verified(corpus, *options)
    assert (code, output) == (
        0,
        "9 of 36 samples are left out of every epoch, 8 of them from now on\n",
    )
    numbers = {20 * shard + index for shard, index in known(corpus)}
    assert numbers == {3} | set(range(0, 36, 5))
    assert verified(corpus, *options)[1].endswith(" 0 of them from now on\n")


def test_verify_adds_a_quarantine_to_what_it_finds(tmp_path):
    write_tiny(tmp_path / "corpus", [8, 6], {3})
    line = {"shard": "shard-000001.tar", "index": 2, "kind": "SampleError"}
    (tmp_path / "q.jsonl").write_text(json.dumps(line) + "\n" + '{"torn": ')
    code, _ = verified(
        tmp_path / "corpus", "--decode", "--write-bad", "--quarantine", tmp_path / "q.jsonl"
    )
    assert code == 1
    assert known(tmp_path / "corpus") == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"shard": "other.tar", "index": 0, "kind": "DecodeError"}, r"other.tar\[0\] is not"),
        ({"shard": "shard-000000.tar", "index": 8, "kind": "ShardError"}, r"\[8\] is not a sample"),
        (
            {"shard": "shard-000000.tar", "index": "8", "kind": "ShardError"},
            "not a quarantine record",
        ),
        ({"loss": 3}, "not a quarantine record"),
    ],
)
def test_a_file_that_is_no_quarantine_of_this_dataset_is_refused(dataset, tmp_path, line, reason):
    good = {"shard": "shard-000000.tar", "index": 1, "kind": "DecodeError"}
    path = tmp_path / "q.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match=rf"q\.jsonl:2: .*{reason}"):
        quarantined_refs([path], dataset)


def test_a_checksum_tells_shards_of_one_size_apart_and_one_unknown_does_not_matter():
    stamp, other, unknown = (
        shard_stamp(ShardInfo("a.tar", 8, 10240, sums and sums * 32)) for sums in ("aa", "bb", None)
    )
    assert stamps_agree(stamp, stamp)
    assert stamps_agree(stamp, unknown)
    assert not stamps_agree(stamp, other)


def test_a_run_stamps_its_quarantine(tmp_path):
    corpus, other = write_tiny(tmp_path / "a", [20, 16]), write_tiny(tmp_path / "b", [20, 17])
    list(mm.Loader(refusing(corpus, tmp_path)))
    path = tmp_path / "quarantine-rank0.jsonl"
    assert len(quarantined_refs([path], mm.open_dataset(corpus))) == 8
    grown = write_tiny(tmp_path / "grown", [20, 16, 5])
    assert len(quarantined_refs([path], mm.open_dataset(grown))) == 8
    with pytest.raises(ConfigError, match="belongs to another dataset: its shard-000001"):
        quarantined_refs([path], mm.open_dataset(other))


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_quarantine_file_that_is_none_is_told_in_words(dataset, tmp_path, name):
    with pytest.raises(ConfigError, match=r"no such file; runs with|not a quarantine file: Is a"):
        quarantined_refs([tmp_path / name], dataset)


# -- info, conversion, index --------------------------------------------------------------------


def test_a_conversion_into_the_same_place_leaves_no_stale_list(tmp_path):
    rows, out = make_corpus(tmp_path), tmp_path / "out"
    run(rows, out)
    write_bad(mm.open_dataset(out), [(0, 1)])
    run(rows, out)  # the same, finished: nothing is done
    assert known(out) == [[0, 1]]
    write_bad(mm.open_dataset(out), [(0, 2)])
    assert (out / PREVIOUS_NAME).exists()
    run(rows, out, samples_per_shard=7, overwrite=True)
    assert not (out / BAD_NAME).exists()
    assert not (out / PREVIOUS_NAME).exists()
    assert known(out) == []


def test_a_tar_that_is_indexed_anew_leaves_the_list(tmp_path, caplog):
    for name in ("a", "b", "c"):
        write_shard(tmp_path, f"{name}.tar", [(f"{name}{n}", {"txt": b"x"}) for n in range(4)])
    index_tars(tmp_path, progress=False)
    write_bad(mm.open_dataset(tmp_path), [(0, 1), (1, 1), (2, 1)])
    index_tars(tmp_path, progress=False)
    assert known(tmp_path) == [[0, 1], [1, 1], [2, 1]]
    assert caplog.text == ""
    write_shard(tmp_path, "b.tar", [(f"new{n}", {"txt": b"x"}) for n in range(30)])
    (tmp_path / "c.tar").unlink()
    index_tars(tmp_path, progress=False)
    assert known(tmp_path) == [[0, 1]]
    assert "2 shards are gone or replaced" in caplog.text
    index_tars(tmp_path, overwrite=True, progress=False)
    assert not (tmp_path / BAD_NAME).exists()
