"""Choosing samples by a condition, and selections that are stored: in Python and by commands."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import mmstream as mm
from mmstream.dataset import select as module
from mmstream.errors import ManifestError
from mmstream.order.selection import Selection
from mmstream.storage import open_store
from tests.helpers.bad_corpus import write_tiny

ROWS = [
    {
        "text": f"text {number}",
        "lang": ("zh", "en", None)[number % 3],
        "score": number / 10,
        **({"rare": True} if number == 41 else {}),
    }
    for number in range(60)
]
ZH = "lang = 'zh' and score > 2"
CHOSEN = [n for n, row in enumerate(ROWS) if row["lang"] == "zh" and row["score"] > 2]

Command = Callable[..., tuple[int, str, str]]


def write(dest: str, rows: list[dict[str, Any]] = ROWS) -> str:
    mm.convert(rows, dest, samples_per_shard=7, progress=False)
    return dest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset that no test writes to."""
    return write(str(tmp_path_factory.mktemp("select") / "corpus"))


@pytest.fixture
def corpus(written: str, tmp_path: Path) -> str:
    """A copy that a test may write to."""
    return str(shutil.copytree(written, tmp_path / "corpus"))


@pytest.fixture
def stored(corpus: str, mmstream: Command) -> str:
    """A copy with a stored selection."""
    assert mmstream("select", corpus, "--where", ZH, "--name", "zh")[0] == 0
    return corpus


def numbers(dataset: mm.Dataset) -> list[int]:
    return [int(bytes(sample["txt"]).split()[1]) for sample in dataset]


def where(dataset: mm.Dataset, condition: Any, **settings: Any) -> mm.Dataset:
    return dataset.where(condition, progress=False, **settings)


def stored_files(corpus: str, kind: str = "") -> list[str]:
    return sorted(name for name in open_store(corpus).list() if f"mmstream.select.{kind}" in name)


# -- conditions and functions ----------------------------------------------------------------------


def test_where_shows_the_samples_that_fulfil_a_condition(written: str) -> None:
    dataset = mm.open_dataset(written)
    view = where(dataset, ZH)
    assert numbers(view) == CHOSEN
    assert numbers(dataset.without(view)) == [n for n in range(60) if n not in CHOSEN]
    assert numbers(where(dataset[:30], ZH)) == [n for n in CHOSEN if n < 30]
    assert numbers(where(view, "score < 4")) == [n for n in CHOSEN if n < 40]
    assert numbers(where(dataset, "json.rare")) == [41]
    assert numbers(where(dataset[50:], "score = 5.5 or json.score = 5.6")) == [55, 56]
    assert numbers(where(dataset, "1 = 1 and score > 5.7")) == [58, 59]  # it may name no column


def test_what_is_null_is_not_chosen_and_is_counted(
    written: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = mm.open_dataset(written)
    assert numbers(where(dataset, "lang != 'zh'")) == list(range(1, 60, 3))
    assert "lang != 'zh': 20 of 60 samples are left out" in caplog.text
    caplog.clear()
    assert len(where(dataset, "lang is null or lang = 'en'")) == 40
    assert not caplog.records


def test_explain_counts_what_each_clause_leaves(written: str) -> None:
    dataset = mm.open_dataset(written)
    explanation = dataset.explain(ZH, progress=False)
    assert [clause[1:] for clause in explanation.clauses] == [(20, 20, 20), (39, 21, 0)]
    num_null = sum(row["lang"] is None and row["score"] > 2 for row in ROWS)
    assert explanation.together[1:] == (len(CHOSEN), 60 - len(CHOSEN) - num_null, num_null)
    lines = repr(explanation).splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["pass", "fail", "NULL"],
        ["20", "20", "20", "lang", "==", "'zh'"],
    ]
    assert lines[-1].endswith("all together")
    assert dataset[:6].explain(ZH, progress=False).clauses[0][1:] == (2, 2, 2)
    assert dataset.explain("score > 100", progress=False).together.num_passed == 0


def test_a_condition_that_nothing_fulfils_says_what_each_clause_leaves(written: str) -> None:
    dataset = mm.open_dataset(written)
    with pytest.raises(mm.ConfigError, match=r"none of 60 samples.*score > 100 leaves 0; .* 20;"):
        where(dataset, "score > 100 and lang = 'en'")
    with pytest.raises(mm.ConfigError, match=r"none of 9 samples"):
        where(dataset[:9], "score > 2")
    with pytest.raises(
        mm.ConfigError, match=r"scroe: no such column; the nearest is (json.)?score"
    ):
        where(dataset[40:], "scroe > 2")


def test_a_condition_that_all_samples_fulfil_is_stored(corpus: str, mmstream: Command) -> None:
    options = ["--where", "score >= 0", "--name", "all"]
    code, output, _ = mmstream("select", corpus, *options)
    assert (code, output.splitlines()[0]) == (0, "60 of 60 samples chosen, 100.0%")
    assert len(mm.open_dataset(corpus).select("all")) == 60


def test_info_lists_columns_and_stored_selections(
    stored: str, mmstream: Command, tmp_path: Path
) -> None:
    code, output, _ = mmstream("info", stored, "--columns")
    lines = [line.split() for line in output.splitlines()]
    assert code == 0
    assert ["json.score", "decimal", "number", "0%", "0.0"] in lines
    assert ["json.lang", "text", "29%", "zh"] in lines
    assert ["width", "whole", "number", "100%"] in lines
    last = f"selection zh: {len(CHOSEN)} of 60 samples, --where "
    assert output.splitlines()[-1].startswith(last)
    assert mmstream("info", stored, "--columns", "--json")[0] == 2
    tars = write_tiny(tmp_path / "tars", (3,))
    assert "index" in mmstream("info", tars, "--columns")[2]


def test_a_function_chooses_by_a_table_of_columns(written: str) -> None:
    dataset = mm.open_dataset(written)

    def is_even(table: pa.Table) -> np.ndarray[Any, Any]:
        return np.array([round(10 * score) % 2 == 0 for score in table["score"].to_pylist()])

    assert numbers(where(dataset, is_even, columns=["score"])) == list(range(0, 60, 2))
    by_arrow = where(dataset, lambda table: pc.equal(table["lang"], "zh"), columns=["lang"])
    assert numbers(by_arrow) == list(range(0, 60, 3))
    wrong = {
        "of double": lambda table: table["score"],
        "returned 1 of bool": lambda _: [True],
        "returned None": lambda _: None,
    }
    for said, result in wrong.items():
        with pytest.raises(mm.ConfigError, match=f"{said}.*return true or false for each row"):
            where(dataset, result, columns=["score"])
    with pytest.raises(mm.ConfigError, match="name the columns"):
        where(dataset, is_even)
    with pytest.raises(mm.ConfigError, match="names its columns itself"):
        where(dataset, ZH, columns=["score"])
    with pytest.raises(mm.ConfigError, match="condition=7: write it as"):
        where(dataset, 7)


def test_samples_of_one_value_lie_on_one_side_of_a_split(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", **({"speaker": n % 23} if n % 5 else {})} for n in range(300)]
    dataset = mm.open_dataset(write(str(tmp_path / "corpus"), rows))
    for seed in range(3):
        train, val = dataset.split(0.7, seed, by="json.speaker")
        assert sorted(numbers(train) + numbers(val)) == list(range(300))
        speakers = [{n % 23 for n in numbers(part) if n % 5} for part in (train, val)]
        assert speakers[0].isdisjoint(speakers[1])
        assert all(speakers)
        alone = [n for n in numbers(train) if n % 5 == 0]
        assert alone == [n for n in numbers(dataset.split(0.7, seed)[0]) if n % 5 == 0]
    with pytest.raises(mm.ConfigError, match=r"json\.speaker"):
        dataset.sample(0.5, by="speakr")


def test_a_value_is_the_same_as_a_whole_number_and_as_a_float(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {n}", "speaker": n % 20 if n < 100 else n % 20 * 1.0} for n in range(200)
    ]
    rows[199]["speaker"] = 7.5  # so all of its shard are floats
    dataset = mm.open_dataset(write(str(tmp_path / "corpus"), rows))
    train, val = dataset.split(0.7, by="json.speaker")
    speakers = [{rows[n]["speaker"] for n in numbers(part)} for part in (train, val)]
    assert speakers[0].isdisjoint(speakers[1])
    assert all(speakers)


# -- stored ----------------------------------------------------------------------------------------


def test_several_ranks_need_a_stored_selection_and_are_told_the_command(
    corpus: str, mmstream: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = mm.open_dataset(corpus)
    assert numbers(where(dataset, ZH, world=mm.World())) == CHOSEN
    with pytest.raises(mm.ConfigError, match="2 ranks would each read") as refused:
        where(dataset, ZH)
    _run(mmstream, str(refused.value), len(CHOSEN))
    with monkeypatch.context() as patch:
        patch.setattr("mmstream.dataset.columns.read_columns", None)  # nothing reads them again
        assert numbers(where(dataset, ZH)) == CHOSEN
    with pytest.raises(mm.ConfigError, match=r'use dataset\.select\("NAME"\)') as refused:
        where(dataset, of_parity, columns=["score"])
    _run(mmstream, str(refused.value), 30)
    assert numbers(dataset.select("NAME")) == list(range(1, 60, 2))


def _run(mmstream: Command, message: str, num_chosen: int) -> None:
    """Run the command that a message names."""
    code, out, err = mmstream(*shlex.split(re.findall("`(.*)`", message)[0])[1:])
    assert code == 0, out + err
    assert out.startswith(f"{num_chosen} of 60 samples chosen")


def of_parity(table: pa.Table) -> list[bool]:
    return [round(10 * score) % 2 == 1 for score in table["score"].to_pylist()]


def test_a_condition_in_other_words_finds_what_is_stored(
    corpus: str, mmstream: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mmstream("select", corpus, "--where", ZH)[0] == 0
    dataset = mm.open_dataset(corpus)
    monkeypatch.setattr("mmstream.dataset.columns.read_columns", None)
    assert numbers(where(dataset, 'lang=="zh" AND (score>2)')) == CHOSEN
    assert numbers(where(dataset[30:], ZH)) == [n for n in CHOSEN if n >= 30]
    with pytest.raises(mm.ConfigError, match=r"13 samples of the dataset, and none of the 9"):
        where(dataset[:9], ZH)
    with pytest.raises(TypeError):
        where(dataset, "lang = 'zh' and score > 3")


def test_columns_that_are_written_again_end_what_was_stored_for_conditions(
    stored: str, mmstream: Command
) -> None:
    assert len(stored_files(stored, "where.")) == 1
    assert mmstream("index", stored, "--columns", "--overwrite")[0] == 0
    assert stored_files(stored, "where.") == []
    assert numbers(mm.open_dataset(stored).select("zh")) == CHOSEN
    assert numbers(where(mm.open_dataset(stored), ZH)) == CHOSEN


def test_a_stored_selection_is_mapped_and_not_sent_to_workers(stored: str) -> None:
    view = mm.open_dataset(stored).select("zh")
    assert numbers(view) == CHOSEN
    assert view.selection is not None
    assert not view.selection.bits.flags.owndata
    sent = pickle.dumps(view)
    assert view.selection.bits.tobytes() not in sent
    again = pickle.loads(sent)
    assert numbers(again) == CHOSEN
    assert again.selection.digest == view.selection.digest
    assert numbers(view[2:]) == CHOSEN[2:]
    assert numbers(mm.open_dataset(stored)[:30].select("zh")) == [n for n in CHOSEN if n < 30]
    with closing(mm.Loader(mm.Pipeline(view, global_batch_size=1), num_workers=1)) as loader:
        seen = [batch["__key__"][0] for batch in loader]
    assert sorted(seen) == [sample["__key__"] for sample in view]


@pytest.mark.s3
def test_a_selection_in_object_storage_is_copied_once_to_this_machine(
    s3: str, mmstream: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = write(f"{s3}/stored")
    code, out, err = mmstream("select", corpus, "--where", ZH, "--name", "zh")
    assert code == 0, out + err
    view = mm.open_dataset(corpus).select("zh")
    assert view.selection is not None
    copied = tmp_path / "cache/mmstream/index" / view.selection.digest
    store, name = open_store(corpus), f"mmstream.select.{view.selection.digest}"
    assert copied.read_bytes() == store.read(name)
    store.remove(name)
    assert numbers(mm.open_dataset(corpus).select("zh")) == CHOSEN  # from the copy
    assert numbers(pickle.loads(pickle.dumps(view))) == CHOSEN
    copied.unlink()
    with pytest.raises(ManifestError, match=r"is missing, and .*select.name.zh.json leads to it"):
        mm.open_dataset(corpus).select("zh")
    for torn in (b"", b"x" * 5, b"x" * 200):
        store.write(name, torn)
        with pytest.raises(ManifestError, match="mmstream select"):
            mm.open_dataset(corpus).select("zh")
    assert mmstream("select", corpus, "--where", ZH, "--name", "zh")[0] != 0
    assert mmstream("select", corpus, "--where", ZH, "--name", "zh", "--overwrite")[0] == 0
    assert numbers(mm.open_dataset(corpus).select("zh")) == CHOSEN


def test_names_that_are_taken_unknown_or_impossible_are_refused(
    corpus: str, mmstream: Command
) -> None:
    assert mmstream("select", corpus, "--where", ZH, "--name", "zh")[0] == 0
    assert mmstream("select", corpus, "--where", ZH, "--name", "zh")[0] == 0  # the same set
    code, _, err = mmstream("select", corpus, "--sample", 0.5, "--name", "zh")
    half = len(mm.open_dataset(corpus).sample(0.5))
    assert code == 2
    assert f"is taken by 13 of 60 samples (--where {shlex.quote(ZH)})" in err
    assert f"these are {half} others of 60: give another name, or --overwrite" in err
    assert mmstream("select", corpus, "--sample", 0.5, "--name", "zh", "--overwrite")[0] == 0
    dataset = mm.open_dataset(corpus)
    assert len(dataset.select("zh")) == half
    assert numbers(where(dataset, ZH)) == CHOSEN
    with pytest.raises(FileNotFoundError, match=r"no such selection; `mmstream select .*--name en"):
        dataset.select("en")
    for name in ("a/b", "", "..", "x" * 101, "a\n"):
        with pytest.raises(mm.ConfigError, match="name"):
            dataset.select(name)
        assert mmstream("select", corpus, "--where", ZH, "--name", name)[0] == 2
    with pytest.raises(mm.ConfigError, match="name=7"):
        dataset.select(7)  # type: ignore[arg-type]


def test_seeds_limits_and_keys_are_stored_under_a_name(
    corpus: str, mmstream: Command, tmp_path: Path
) -> None:
    dataset = mm.open_dataset(corpus)
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{dataset[number]['__key__']}\n" for number in (7, 3, 50)))
    assert mmstream("select", corpus, "--keys-file", keys, "--name", "few")[0] == 0
    assert numbers(dataset.select("few")) == [3, 7, 50]
    options = ["--sample", 0.5, "--seed", 3, "--limit", 25, "--name", "some"]
    assert mmstream("select", corpus, *options)[0] == 0
    assert numbers(dataset.select("some")) == numbers(dataset.sample(0.5, seed=3)[:25])
    assert mmstream("select", corpus, "--select", "some", "--where", ZH, "--name", "both")[0] == 0
    assert set(numbers(dataset.select("both"))) == set(CHOSEN) & set(
        numbers(dataset.select("some"))
    )
    assert stored_files(corpus, "where") == []
    for options in ([], ["--limit", 3], ["--name", "x"]):
        assert mmstream("select", corpus, *options)[0] == 2


def test_keys_of_no_sample_are_counted_and_named(
    corpus: str, mmstream: Command, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("000000003\nabsent\n000000099\n\n")
    code, _, err = mmstream("info", corpus, "--keys-file", keys)
    assert code == 2
    assert "2 of 3 are of no sample of" in err
    assert "'000000099', 'absent'" in err
    foreign = write_tiny(tmp_path / "foreign", (5, 3))  # without sidecars: keys are in the tars
    keys.write_text(f"{mm.open_dataset(foreign)[6]['__key__']}\n")
    code, out, _ = mmstream("info", foreign, "--keys-file", keys)
    assert (code, "1 chosen of 8 samples" in out) == (0, True)
    keys.write_text("")
    assert mmstream("info", foreign, "--keys-file", keys)[0] == 2


# -- damaged, forged, of others --------------------------------------------------------------------


def name_of_set(corpus: str) -> Path:
    (name,) = (n for n in stored_files(corpus) if not n.endswith(".json"))
    return Path(corpus, name)


def test_a_torn_or_changed_set_is_refused(stored: str, mmstream: Command) -> None:
    path, dataset = name_of_set(stored), mm.open_dataset(stored)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[-64] ^= 16
    for content in (whole[:-1], b"", whole + b"\0", bytes(changed), bytes(len(whole))):
        path.write_bytes(content)
        for choose in (lambda: dataset.select("zh"), lambda: where(dataset, ZH)):
            with pytest.raises(ManifestError, match=rf"{path.name}.*mmstream select.*--overwrite"):
                choose()
    path.unlink()
    with pytest.raises(ManifestError, match=r"is missing, and .*name.zh.json leads to it"):
        dataset.select("zh")
    assert mmstream("select", stored, "--where", ZH, "--name", "zh", "--overwrite")[0] == 0
    assert path.read_bytes() == whole
    assert numbers(dataset.select("zh")) == CHOSEN


def test_a_forged_set_with_bits_of_no_sample_is_refused(stored: str) -> None:
    """Its name is the digest of its content, as a stranger can make it."""
    path = name_of_set(stored)
    pointer = Path(stored, "mmstream.select.name.zh.json")
    for place in (72, -1):  # the byte of the first shard, 7 samples, and one of the padding
        content = bytearray(path.read_bytes())
        content[place] |= 1
        digest = hashlib.sha256(content).hexdigest()[:32]
        Path(stored, f"mmstream.select.{digest}").write_bytes(content)
        record = json.loads(pointer.read_text()) | {"digest": digest}
        record.pop("crc32c", None)
        pointer.write_text(json.dumps(record))
        with pytest.raises(ManifestError, match=f"{digest}: its bytes are not those"):
            mm.open_dataset(stored).select("zh")


def test_a_damaged_pointer_is_refused(stored: str, mmstream: Command) -> None:
    dataset = mm.open_dataset(stored)
    select_zh = partial(dataset.select, "zh")
    pointers = [Path(stored, n) for n in stored_files(stored) if n.endswith(".json")]
    assert len(pointers) == 2
    for pointer in pointers:
        whole = pointer.read_bytes()
        forged = re.sub(
            rb',"crc32c.*\n', b"", whole.replace(b'"num_shards": 9', b'"num_shards": -9')
        )
        later = whole.replace(b'"version": 1', b'"version": 2')
        for content in (b"", whole[:50], whole.replace(b"13", b"14"), forged, later, b"[1]"):
            pointer.write_bytes(content)
            choose = partial(where, dataset, ZH) if ".where." in pointer.name else select_zh
            with pytest.raises(ManifestError, match=pointer.name):
                choose()
        pointer.write_bytes(whole)
    pointers[0].write_bytes(b"{")
    assert mmstream("select", stored, "--where", ZH, "--name", "zh")[0] == 1
    assert mmstream("select", stored, "--where", ZH, "--name", "zh", "--overwrite")[0] == 0


def test_a_selection_of_another_or_an_older_corpus_is_refused_with_both_counts(
    stored: str, mmstream: Command, tmp_path: Path
) -> None:
    files = stored_files(stored)
    other = write(str(tmp_path / "other"), ROWS[:50])
    fewer = write(str(tmp_path / "fewer"), ROWS[:49])
    more = write(str(tmp_path / "more"), ROWS + ROWS[:3])
    for dest, said in (
        (other, r"60 samples in 9 shards, .* 50 in 8: it is of another corpus"),
        (fewer, r"60 samples in 9 shards, .* 49 in 7: it is of another corpus"),
        (more, r"60 samples in 9 shards, .* 63 in 9: it is of another corpus"),
    ):
        for name in files:
            shutil.copy(Path(stored, name), dest)
        with pytest.raises(ManifestError, match=f"zh.json.*{said}.*--overwrite"):
            mm.open_dataset(dest).select("zh")
    old = write_tiny(tmp_path / "old", (5, 8))
    assert mmstream("select", old, "--limit", 6, "--name", "six")[0] == 0
    grown = write_tiny(tmp_path / "grown", (5, 8, 3))
    for name in stored_files(old):
        shutil.copy(Path(old, name), grown)
    said = r"13 samples in 2 shards, .* 16 in 3: shards were appended since"
    with pytest.raises(ManifestError, match=said):
        mm.open_dataset(grown).select("six")


# -- states ----------------------------------------------------------------------------------------


def test_an_epoch_of_a_stored_selection_can_be_finished_and_replayed(
    corpus: str, mmstream: Command, tmp_path: Path
) -> None:
    dataset = mm.open_dataset(corpus)

    def loader(view: mm.Dataset, **settings: Any) -> mm.Loader:
        return mm.Loader(mm.Pipeline(view, global_batch_size=2), num_workers=0, **settings)

    begun = loader(where(dataset, ZH))
    steps = [list(batch["__key__"]) for batch in begun]
    again = iter(loader(where(dataset, ZH)))
    run = loader(where(dataset, ZH))
    next(iter(run))
    state = run.state_dict()
    del again
    for data in (dataset, dataset[:30]):
        with pytest.raises(mm.StateError, match="store them with `mmstream select`"):
            loader(data, on_change="finish_epoch").load_state_dict(state)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    code, _, err = mmstream("replay", corpus, "--state", file, "--step", "0:6", "--keys")
    assert (code, "`mmstream select`" in err) == (1, True)
    assert mmstream("select", corpus, "--where", ZH)[0] == 0
    later = loader(dataset[:30], on_change="finish_epoch")
    later.load_state_dict(state)
    assert [list(batch["__key__"]) for batch in later] == steps[1:]
    assert len(list(later)) == 15  # the next epoch has the samples of the present view
    code, out, err = mmstream("replay", corpus, "--state", file, "--step", "0:6", "--keys")
    assert code == 0, err
    assert [line.split()[-1] for line in out.splitlines()] == [
        key for step in steps for key in step
    ]
    name_of_set(corpus).write_bytes(b"torn")
    with pytest.raises(ManifestError, match="is damaged"):
        loader(dataset[:30], on_change="finish_epoch").load_state_dict(state)


def test_a_stored_selection_finishes_its_epoch_after_shards_were_appended(
    tmp_path: Path, mmstream: Command
) -> None:
    old = write_tiny(tmp_path / "old", (9, 8))
    assert mmstream("select", old, "--sample", 0.7, "--name", "some")[0] == 0
    view = mm.open_dataset(old).select("some")
    order = mm.Pipeline(view, global_batch_size=2).order
    grown = write_tiny(tmp_path / "grown", (9, 8, 5))
    for name in stored_files(old):
        shutil.copy(Path(old, name), grown)
    again = mm.open_dataset(grown).order_from_identity(order.identity())
    for step in range(order.steps_per_epoch):
        assert all(map(np.array_equal, order.refs(0, step), again.refs(0, step)))
    damaged = order.identity()
    for selection in ({"digest": "../../x"}, {"digest": 3}, "x", {}):
        with pytest.raises(mm.StateError):
            mm.open_dataset(grown).order_from_identity(damaged | {"selection": selection})


# -- the options of other commands -----------------------------------------------------------------


def test_commands_take_the_options_that_choose(
    stored: str, mmstream: Command, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("000000003\n000000004\n")
    for options, count in (
        (["--where", ZH], 13),
        (["--select", "zh"], 13),
        (["--select", "zh", "--limit", 5], 5),
        (["--keys-file", keys], 2),
        (["--sample", 0.5], len(mm.open_dataset(stored).sample(0.5))),
    ):
        code, out, err = mmstream("info", stored, *options)
        assert (code, f"{count} chosen of 60 samples" in out) == (0, True), err
    about = json.loads(mmstream("info", stored, "--select", "zh", "--json")[1])
    assert (about["num_samples"], about["num_stored_samples"]) == (13, 60)
    code, out, _ = mmstream("show", stored, "--select", "zh", "--where", "score > 5.5")
    assert (code, "1 sample of 1" in out) == (0, True)
    for options in (["--sample", 0], ["--where", "score >"], ["--limit", 0], ["--sample", 2]):
        assert mmstream("info", stored, *options)[0] == 2


def test_a_training_run_chooses_as_its_settings_say(
    corpus: str, mmstream: Command, tmp_path: Path
) -> None:
    def choice(**settings: Any) -> dict[str, Any]:
        return mm.train.TrainConfig(url=corpus, out=str(tmp_path), **settings).choice

    view = module.chosen(mm.open_dataset(corpus), **choice(where=ZH, limit=4))
    assert numbers(view) == CHOSEN[:4]
    assert module.chosen(view, **choice()) is view
    with pytest.raises(mm.ConfigError, match="sample"):
        choice(sample=2)
    code, _, err = mmstream("train", corpus, "--out", tmp_path / "run", "--select", "absent")
    assert (code, "no such selection" in err) == (1, True)


def test_a_mixture_file_has_no_such_options(corpus: str, mmstream: Command, tmp_path: Path) -> None:
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps({"sources": {"a": {"url": corpus, "weight": 1}}, "stop": "all"}))
    for command in ("info", "show", "bench"):
        code, _, err = mmstream(command, file, "--where", ZH)
        assert (code, "a mixture has a choice for each source" in err) == (2, True)
    assert mmstream("info", file)[0] == 0


def test_replay_plans_what_a_run_has_chosen(corpus: str, tmp_path: Path, mmstream: Command) -> None:
    view = mm.open_dataset(corpus).where(ZH)
    loader = mm.Loader(mm.Pipeline(view, global_batch_size=2))
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    rc, out, _ = mmstream("replay", corpus, "--state", state, "--where", ZH, "--keys", "--json")
    assert rc == 0
    keys = [json.loads(line)["key"] for line in out.splitlines()]
    assert keys == next(iter(loader))["__key__"]


# -- large -----------------------------------------------------------------------------------------


def test_the_bits_of_no_sample_are_found_for_any_counts() -> None:
    for counts in ([7], [8], [0, 3, 0], [512], [505, 8], [0], [1] * 70):
        array = np.array(counts)
        whole = Selection.of_all(array)
        assert whole.is_whole
        ends = whole.starts[1:]
        spare = [8 * whole.starts[-1], 8 * len(whole.bits) - 1]
        spare += [8 * end - 1 for end, count in zip(ends, counts, strict=True) if count % 8]
        for place in spare:
            bits = whole.bits.copy()
            bits[place // 8] |= 128 >> place % 8
            assert not Selection(array, bits).is_whole


def test_a_condition_alone_imports_nothing(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmstream: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_a_stranger.py").write_text("open('ran', 'w')")
    assert mmstream("select", corpus, "--where", "of_a_stranger:f")[0] != 0
    assert not (tmp_path / "ran").exists()


def test_overwriting_takes_no_stored_condition_away(corpus: str, mmstream: Command) -> None:
    assert mmstream("select", corpus, "--where", ZH)[0] == 0
    assert mmstream("select", corpus, "--where", ZH, "--name", "a/b", "--overwrite")[0] != 0
    rest = ("--limit", "3", "--name", "few", "--overwrite")
    assert mmstream("select", corpus, "--where", ZH, *rest)[0] == 0
    assert len(mm.open_dataset(corpus).where(ZH, world=mm.World(0, 2))) == len(CHOSEN)
