"""Samples by key and by the address that a log shows."""

from __future__ import annotations

import json

import pytest

import mmstream as mm
from mmstream.dataset.keys import parse_address
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.storage import open_store
from tests.helpers.convert_corpus import grouped, make_corpus
from tests.helpers.corpora import captioned, write_corpus, write_shard


def write_keys(folder, *shards):
    """Write a dataset of these keys, and return it."""
    infos = [
        write_shard(
            folder, f"{chr(97 + i)}.tar", [(key, captioned(n)) for n, key in enumerate(keys)]
        )
        for i, keys in enumerate(shards)
    ]
    open_store(folder).write(MANIFEST_NAME, Manifest(tuple(infos)).to_bytes())
    return mm.open_dataset(folder)


def convert_rows(folder, **options):
    rows = make_corpus(folder)
    mm.convert(rows, folder / "shards", num_workers=0, progress=False, **grouped(**options))


# -- by key -------------------------------------------------------------------------------------


def test_every_sample_of_foreign_tars_comes_by_its_key(tmp_path):
    keys = [["cat", "a/b", "é", "000000003"], [], ["x" * 300, "7", "c"]]
    dataset = write_keys(tmp_path, *keys)
    assert [dataset[key]["__key__"] for key in sum(keys, [])] == sum(keys, [])
    assert dataset["7"] == dataset[5]


def test_a_key_that_is_absent_says_so_and_an_address_says_what_to_use(tmp_path):
    dataset = write_keys(tmp_path, ["a", "b"])
    with pytest.raises(KeyError, match=r"no sample of .* has the key 'c'"):
        dataset["c"]
    with pytest.raises(KeyError, match=r"dataset.find takes shard\[index\]"):
        dataset["a.tar[1]"]
    with pytest.raises(KeyError, match="no sample"):
        write_keys(tmp_path / "empty", [])["a"]


def test_a_key_of_several_samples_names_them(tmp_path):
    dataset = write_keys(tmp_path, ["a", "b"], ["b", "c"], ["b", "d"], ["b"])
    with pytest.raises(KeyError) as error:
        dataset["b"]
    assert error.value.args[0] == (
        "4 samples have the key 'b': a.tar[1], b.tar[0], c.tar[0], ...; "
        "take one with dataset.find('a.tar[1]')"
    )
    assert dataset["d"]["__key__"] == "d"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"captions": "each"}, ""),
        ({"shuffle_seed": 3}, ""),
        ({"splits": {"x": 0.5, "y": 0.5}}, "x"),
    ],
)
def test_every_sample_of_a_conversion_comes_by_its_key(tmp_path, options, name):
    convert_rows(tmp_path, samples_per_shard=7, **options)
    dataset = mm.open_dataset(tmp_path / "shards" / name)
    for number, sample in enumerate(dataset):
        assert dataset[sample["__key__"]] == sample == dataset[number]
    for key in ("000000000", "999999999", "000000001-99", "x", ""):
        with pytest.raises(KeyError, match="no sample"):
            dataset[key]


def test_a_damaged_header_hides_its_own_key_only(tmp_path, caplog):
    dataset = write_keys(tmp_path, ["a", "b", "c"])
    path = tmp_path / "a.tar"
    data = bytearray(path.read_bytes())
    start = int(dataset.shards.offsets(0)[1])
    data[start : start + 512] = b"\xff" * 512
    path.write_bytes(data)
    dataset = mm.open_dataset(tmp_path)
    assert dataset["c"]["__key__"] == "c"
    assert "a.tar[1]: no key: not a tar header" in caplog.text
    with pytest.raises(KeyError):
        dataset["b"]


# -- by address ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "shard-000001.tar[2]",
        "shard-000001.tar[2] 000005.jpg: truncated [after 12 bytes]",
        "W [rank 0] shard-000001.tar[2] 000005.jpg: truncated",
        "bad: s3://bucket/corpus/shard-000001.tar[2] 000005: no file",
        "0 12 3 shard-000001.tar[2] 000005",
        "DecodeError('shard-000001.tar[2] 000005.jpg: x')",
        "substitute for shard-000001.tar[2], taken from shard-000000.tar[1]",
        json.dumps({"epoch": 0, "shard": "shard-000001.tar", "index": 2, "kind": "DecodeError"}),
        "[3] and [4] of other things, then shard-000001.tar[2]",
        "  shard-000001.tar[2]\n",
    ],
)
def test_a_line_of_a_log_leads_to_its_sample(tmp_path, line):
    dataset = mm.open_dataset(write_corpus(tmp_path, [3, 4]))
    assert dataset.find(line) == dataset[5]


def test_a_line_of_a_mixture_leads_to_the_source(tmp_path):
    datasets = {n: mm.open_dataset(write_corpus(tmp_path / n, [3, 4])) for n in ("a", "b")}
    mixture = mm.Mixture({name: (d, 1) for name, d in datasets.items()}, stop="all")
    sample = mixture.find("W [rank 1] b/shard-000001.tar[3] 000006.jpg: damaged")
    assert sample == datasets["b"][6] | {"__source__": "b"}
    with pytest.raises(mm.ConfigError, match=r"shard-000001.tar\[3\]: no such shard"):
        mixture.find("shard-000001.tar[3]")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("000005", "names no sample; write shard"),
        ("", "names no sample"),
        ("shard-000007.tar[1] x", "no such shard in this dataset; it has 2, such as shard-000000"),
        ("shard-000000.tar[3]", "it has 3 samples"),
        ("shard-000000.tar[99999999999999999999]", "names no sample"),
        ("xshard-000000.tar[1]", "no such shard"),
        ("x[1]" * 2_000, "no such shard"),
        ('{"shard": "shard-000000.tar", "index": -1}', "it has 3 samples"),
        ("W shard-000000.tar[2] 000009.jpg: x", "another dataset, where shard-000000.tar[2] is"),
        ("[7] INFO: shard-000000.tar[2] a/b: filter: x", "of another dataset"),
        (
            '{"shard": "shard-000000.tar", "index": 1, "reason": "", "stamp": "3-5120-"}',
            "of another dataset",
        ),
        ("shard-000000.tar[2] 000002.jpg: x (epoch 0 step 1 row 2 of s3://b/v)", "of s3://b/v, "),
        ("\x1b[2J[1]", "no such shard"),
    ],
)
def test_a_line_that_names_no_sample_says_why(tmp_path, line, reason):
    dataset = mm.open_dataset(write_corpus(tmp_path, [3, 4]))
    with pytest.raises(mm.ConfigError, match=r"find: ") as error:
        dataset.find(line)
    assert reason in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_names_with_spaces_folders_and_odd_characters_are_recognised():
    shards = {"a b.tar": 0, "train/x.tar": 1, "x.tar": 2, "e\x1b.tar": 3}
    for text, shard in (("W a b.tar[1]", 0), ("s3://c/train/x.tar[1]", 1), ("c/x.tar[1]", 2),
                        ("W e\\x1b.tar[1] k", 3)):  # fmt: skip
        assert parse_address(text, shards, [2] * 4) == (shard, 1)
