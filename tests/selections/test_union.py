"""Several folders as one dataset: what it shows, and that each folder keeps what is its own."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.bad_list import read_listed, take_down, write_bad
from mmstream.dataset.verify import verify
from mmstream.reading.range_cache import needs_of
from mmstream.storage import UnionStore, open_store
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.packed_texts import MAX_TOKENS, write_texts
from tests.helpers.topology import assert_resumes_exactly, collate_in_workers

Command = Callable[..., tuple[int, str, str]]

COUNTS = {"base": (7, 5), "week": (4, 9, 3)}
ROWS = [
    {"text": f"text {number}", "score": number / 10, **({"rare": True} if number > 38 else {})}
    for number in range(40)
]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [write_tiny(tmp_path / name, counts) for name, counts in COUNTS.items()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two conversions that no test writes to."""
    root = tmp_path_factory.mktemp("union")
    for name, rows in {"base": ROWS[:25], "week": ROWS[25:]}.items():
        mm.convert(rows, root / name, samples_per_shard=7, progress=False)
    return root


@pytest.fixture
def converted(written: Path, tmp_path: Path) -> list[str]:
    return [str(shutil.copytree(written / name, tmp_path / name)) for name in COUNTS]


def keys(data: mm.Dataset) -> list[str]:
    return [sample["__key__"] for sample in data]


def texts(data: mm.Dataset) -> list[str]:
    return [bytes(sample["txt"]).decode() for sample in data]


def loader(data: Any, **settings: Any) -> mm.Loader:
    return mm.Loader(mm.Pipeline(data, **{"global_batch_size": 4, "seed": 3} | settings))


# -- what it shows ---------------------------------------------------------------------------------


def test_a_union_has_the_samples_of_its_folders_in_their_order(folders: list[str]) -> None:
    union, alone = mm.open_dataset(folders), [mm.open_dataset(folder) for folder in folders]
    names = [union.name_of(shard) for shard in range(union.num_shards)]
    assert (names[0], names[2]) == ("base/shard-000000.tar", "week/shard-000000.tar")
    for field in ("__key__", "__url__", "json"):
        assert [s[field] for s in union] == [s[field] for data in alone for s in data]
    found = union.find("week/shard-000001.tar[3]")
    assert found["__key__"] == alone[1].find("shard-000001.tar[3]")["__key__"]
    assert found["__lineage__"][:2] == (3, 3)
    copied = pickle.loads(pickle.dumps(union))
    assert keys(copied[::3]) == keys(union[::3])
    assert list(verify(union, progress=False)) == []


@pytest.mark.parametrize("options", [{}, {"zero_copy": True}, {"reshuffle": "lanes"}])
def test_an_epoch_has_each_sample_once_and_resumes(
    folders: list[str], options: dict[str, Any]
) -> None:
    shown = [
        ref
        for batch in loader(mm.open_dataset(folders), **options)
        for ref in batch["__lineage__"].shown
    ]
    assert len(set(shown)) == len(shown) == 28
    assert_resumes_exactly(lambda: loader(mm.open_dataset(folders), **options))


def test_prefixes_stay_where_folders_are_added(folders: list[str], tmp_path: Path) -> None:
    more = write_tiny(tmp_path / "more" / "base", (6,))
    run = loader(mm.open_dataset(folders))
    state = [run.state_dict() for _ in run][1]
    for grown in ([*folders, more], folders):
        after = mm.Loader(
            mm.Pipeline(mm.open_dataset(grown), global_batch_size=4, seed=3),
            on_change="finish_epoch",
        )
        after.load_state_dict(state)
        assert sum(1 for _ in after) == 5
    names = [info.name for info in mm.open_dataset([*folders, more]).manifest.shards]
    assert names[-1] == "base-2/shard-000000.tar"
    with pytest.raises(mm.StateError, match="corpus"):
        loader(mm.open_dataset(folders[::-1])).load_state_dict(state)


@pytest.mark.parametrize("grown", [0, 1])
def test_only_the_last_folder_may_grow(folders: list[str], tmp_path: Path, grown: int) -> None:
    run = loader(mm.open_dataset(folders))
    state = [run.state_dict() for _ in run][1]
    shutil.rmtree(folders[grown])
    write_tiny(folders[grown], (*list(COUNTS.values())[grown], 8))
    pipeline = mm.Pipeline(mm.open_dataset(folders), global_batch_size=4, seed=3)
    after = mm.Loader(pipeline, on_change="finish_epoch")
    if grown == 0:
        with pytest.raises(mm.StateError, match="first 5 shards"):
            after.load_state_dict(state)
        return
    after.load_state_dict(state)
    assert sum(1 for _ in after) == 5
    assert sum(1 for _ in after) == 9


# -- what each folder keeps ------------------------------------------------------------------------


def test_each_folder_keeps_its_bad_list_and_takedowns(folders: list[str]) -> None:
    base, week = (mm.open_dataset(folder) for folder in folders)
    write_bad(base, [(1, 0)], np.array([[0, 1]]))
    take_down(base, [(0, 2)], "request 1")
    write_bad(week, [(2, 1)])
    take_down(week, [(1, 4), (0, 0)], "request 2")
    union = mm.open_dataset(folders, storage_kind="shared")
    assert union.bad.tolist() == [[0, 1], [0, 2], [1, 0], [2, 0], [3, 4], [4, 1]]
    assert read_listed(union, "bad").tolist() == [[1, 0], [4, 1]]
    assert read_listed(union, "duplicates").tolist() == [[0, 1]]
    assert union.num_left_out == (3, 3)
    with pytest.raises(mm.errors.TakenDownError, match=r"week/shard-000001.tar\[4\].*request 2"):
        union.find("week/shard-000001.tar[4]")
    assert len(mm.open_dataset(folders, bad_list=False).bad) == 3
    shown = {ref for batch in loader(union) for ref in batch["__lineage__"].shown}
    assert not shown & set(map(tuple, union.bad.tolist()))


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 1, 0)])
def test_states_go_on_whichever_folder_takes_samples_down(
    folders: list[str], order: tuple[int, ...]
) -> None:
    states = []
    for number, folder in enumerate(order):
        run = loader(mm.open_dataset(folders))
        states.append([run.state_dict() for _ in run][2])
        take_down(mm.open_dataset(folders[folder]), [(0, number)], f"request {number}")
    removed = set(mm.open_dataset(folders).removed)
    assert len(removed) == 3
    for state in states:
        run = loader(mm.open_dataset(folders))
        run.load_state_dict(state)
        shown = [ref for batch in run for ref in batch["__lineage__"].shown]
        assert len(shown) >= 8
        assert not removed & set(shown)


def test_columns_are_those_of_the_folder(converted: list[str]) -> None:
    union = mm.open_dataset(converted)
    assert texts(union.where("score >= 2.3 and score < 2.8", progress=False)) == [
        f"text {number}" for number in range(23, 28)
    ]
    rare = union.where("rare = true", progress=False)
    assert texts(rare) == ["text 39"]
    assert len(union.without(rare)) == 39
    assert union.explain("rare is null", progress=False).together.num_passed == 39
    with pytest.raises(mm.ConfigError, match="scroe: no such column; the nearest is"):
        union.where("scroe > 2", progress=False)
    assert union.shards.indexes.part_columns(4) is not None
    Path(converted[1], "shard-000000.parquet").unlink()
    with pytest.raises(mm.ConfigError, match=r"run `mmstream index \S+/week --columns`"):
        union.where("score > 2", progress=False)


def test_shares_are_those_of_each_folder_alone(converted: list[str]) -> None:
    union, alone = mm.open_dataset(converted), [mm.open_dataset(folder) for folder in converted]
    first, second = union.split(0.7, seed=5)
    assert texts(first) == [text for data in alone for text in texts(data.split(0.7, seed=5)[0])]
    assert sorted(texts(first) + texts(second)) == sorted(texts(union))
    by_score = union.sample(0.5, by="score")
    assert texts(by_score) == [t for data in alone for t in texts(data.sample(0.5, by="score"))]


def test_stored_selections_of_all_folders_are_one(
    converted: list[str], mmstream: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition = "score > 1.9 and score < 3"
    expected = [f"text {number}" for number in range(20, 30)]
    union, world = mm.open_dataset(converted), mm.World(0, 2)
    with pytest.raises(mm.ConfigError, match=r"select \S+/base .* && mmstream select \S+/week "):
        union.where(condition, world=world)
    for folder in converted:
        options = ["--where", condition, "--name", "middle"]
        assert mmstream("select", folder, *options)[0] == 0
        if folder == converted[0]:
            with pytest.raises(FileNotFoundError, match=r"select \S+/week --name middle --where"):
                union.select("middle")
    for view in (union.where(condition, world=world), union.select("middle")):
        assert texts(view) == expected
        assert view.selection is not None
        data = pickle.dumps(view.selection)
        assert pickle.loads(data).digest == view.selection.digest
        assert len(data) < 5000
    with pytest.raises(FileNotFoundError, match="no such selection"):
        union.select("other")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert texts(union[22:].select("middle")) == expected[2:]


# -- consumers -------------------------------------------------------------------------------------


def test_a_union_is_a_source_of_a_mixture(folders: list[str], tmp_path: Path) -> None:
    other = mm.open_dataset(write_tiny(tmp_path / "other", (9,)))
    sources = {"both": (mm.open_dataset(folders), 3), "other": (other, 1)}
    run = loader(mm.Mixture(sources, epoch_steps=12))
    shown = [
        ref
        for batch in run
        for ref, source in zip(batch["__lineage__"].shown, batch["__source__"], strict=True)
        if source == "both"
    ]
    assert len(set(shown[:28])) == 28


def test_a_union_is_statistics_baked_and_resharded(tmp_path: Path) -> None:
    folders = [
        write_corpus(tmp_path / name, counts, checksums=True) for name, counts in COUNTS.items()
    ]
    union = mm.open_dataset(folders)
    assert mm.statistics(union, 100).num_measured == 28
    assert "union://" in union._repr_html_()
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = mm.Pipeline(union, global_batch_size=4, decode=decode, seed=2)
    mm.bake(pipeline, tmp_path / "baked", progress=False)
    baked = mm.open_dataset(tmp_path / "baked")
    assert list(verify(baked, progress=False)) == []
    new = mm.Pipeline(baked, global_batch_size=4, decode=mm.Decode.baked(), seed=2)
    for a, b in zip(mm.Loader(pipeline), mm.Loader(new), strict=True):
        assert a["__lineage__"].planned == b["__lineage__"].planned
        assert a["image"].equal(b["image"])
    mm.reshard(union[::2], tmp_path / "half", shuffle_seed=None, progress=False)
    half = mm.open_dataset(tmp_path / "half")
    assert [s["json"] for s in half] == [s["json"] for s in union[::2]]
    with pytest.raises(mm.ConfigError, match=r"was baked.*bake the union"):
        mm.open_dataset([folders[0], tmp_path / "baked"])


def packs_of(dataset: mm.Dataset, **options: Any) -> mm.Pipeline:
    text = mm.TextDecoder(byte_tokenizer(), max_length=10 * MAX_TOKENS)
    return mm.Pipeline(
        dataset,
        global_batch_size=2,
        decode=mm.Decode(text=text),
        batching=mm.Pack(MAX_TOKENS, **options),
    )


def test_packs_of_a_union_have_a_plan_in_another_folder(tmp_path: Path) -> None:
    union = mm.open_dataset([write_texts(tmp_path / name, [20, 30]) for name in COUNTS])
    pipeline = packs_of(union)
    for call in (lambda: mm.plan(pipeline, progress=False), lambda: pipeline.order):
        with pytest.raises(mm.ConfigError, match=r"folder of its own.*mm\.plan\(.*mm\.Pack\("):
            call()
    plan = mm.plan(pipeline, folder=tmp_path / "plans", progress=False)
    assert sorted(plan.members.tolist()) == list(range(100))
    of_folder = packs_of(union, plan=plan.url)
    documents = [key for batch in mm.Loader(of_folder) for key in batch["__key__"]]
    assert len(documents) > 80


def test_a_problem_of_a_folder_has_its_command(converted: list[str]) -> None:
    Path(converted[1], "shard-000001.tar").unlink()
    union = mm.open_dataset(converted)
    (problem, *_) = verify(union, quick=True, progress=False)
    assert problem.shard == "week/shard-000001.tar"
    assert converted[1] in problem.reason
    with pytest.raises(mm.errors.ShardError, match=r"week/shard-000001.tar: no such shard"):
        union.find("week/shard-000001.tar[0]")


def test_a_shard_that_was_replaced_is_noticed(folders: list[str]) -> None:
    union = mm.open_dataset(folders)
    shard = Path(folders[1], "shard-000001.tar")
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data + bytes(1024))
    with pytest.raises(mm.errors.ShardError, match=r"week/shard-000001.tar: was replaced"):
        union.find("week/shard-000001.tar[0]")
    assert keys(union[:16])


# -- what cannot be --------------------------------------------------------------------------------


def test_folders_that_are_no_union_are_errors(folders: list[str], tmp_path: Path) -> None:
    base, week = folders
    with pytest.raises(mm.ConfigError, match="empty"):
        mm.open_dataset([])
    with pytest.raises(mm.ConfigError, match=r"/base/shard-000000.tar is a shard of .* once"):
        mm.open_dataset([base, week, f"{base}/"])
    with pytest.raises(mm.ConfigError, match=r"base is a folder, and other names .* are tars"):
        mm.open_dataset([f"{week}/shard-000000.tar", base])
    with pytest.raises(mm.errors.ManifestError, match="absent: no such folder"):
        mm.open_dataset([base, tmp_path / "absent"])
    with_checksums = write_corpus(tmp_path / "sums", [3], captioned, checksums=True)
    with pytest.raises(mm.ConfigError, match=r"base has no checksums .* --checksums"):
        mm.open_dataset([base, with_checksums])
    assert len(mm.open_dataset([base, with_checksums], checksums=False)) == 15


def test_a_folder_in_another_is_one_where_they_share_shards(tmp_path: Path) -> None:
    outer = write_tiny(tmp_path / "outer", (3,))
    inner = write_tiny(tmp_path / "outer" / "inner", (2,))
    assert len(mm.open_dataset([outer, inner])) == 5
    mm.open_dataset(outer)
    from mmstream.dataset.index_tars import index_tars

    index_tars(str(tmp_path / "outer" / "inner"), output=str(tmp_path / "copy"))
    with pytest.raises(mm.ConfigError, match="is a shard of"):
        mm.open_dataset([inner, tmp_path / "copy"], allow_foreign_urls=True)


def test_plain_tars_are_a_part_of_a_union(folders: list[str]) -> None:
    for path in Path(folders[1]).iterdir():
        if path.name == "mmstream.json" or path.name == "shard-000000.tar.idx":
            path.unlink()
    union = mm.open_dataset(folders)
    assert len(union) == 28
    assert keys(union)[12:] == keys(mm.open_dataset(folders[1]))
    assert len(list(loader(pickle.loads(pickle.dumps(union))))) == 7


def test_nothing_is_written_to_a_union(folders: list[str]) -> None:
    union = mm.open_dataset(folders)
    before = [sorted(path.name for path in Path(folder).iterdir()) for folder in folders]
    store = union.store
    assert isinstance(store, UnionStore)
    calls: list[Callable[[], object]] = [
        lambda: write_bad(union, [(0, 1)]),
        lambda: take_down(union, [(0, 1)], "request"),
        lambda: store.write("base/x", b""),
        lambda: store.write_if("x", b"", None),
        lambda: store.remove("base/shard-000000.tar"),
        lambda: store.create("base/x").__enter__(),
        lambda: open_store(store.url),
        lambda: mm.open_dataset(store.url),
    ]
    for call in calls:
        with pytest.raises(mm.ConfigError, match=r"is a union.*name one of its folders"):
            call()
    assert before == [sorted(path.name for path in Path(f).iterdir()) for f in folders]
    assert store.folders() == ["base", "week"]
    assert (store.list(), store.local_path(""), store.exists("week")) == ({}, None, False)
    (answer,) = store.read_ranges([("other/x", 0, 1)])
    assert isinstance(answer, FileNotFoundError)


# -- object storage --------------------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.slow
def test_folders_on_a_disk_and_on_s3_are_one(
    s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fields(number: int) -> dict[str, bytes]:
        return {"bin": bytes([number % 251]) * 3000}

    folders = [
        write_corpus(f"{s3}/base", (40, 30), fields, checksums=True),
        write_corpus(tmp_path / "disk", (20, 30), fields, checksums=True),
        write_corpus(f"{s3}/week", (30,), fields, checksums=True),
    ]
    take_down(mm.open_dataset(folders[2]), [(0, 3)], "request")
    union = mm.open_dataset(folders)
    assert keys(union) == [key for folder in folders for key in keys(mm.open_dataset(folder))]
    order = union.plan_order(global_batch_size=10)
    assert list(needs_of(union, order, 1.0).values()) == [union.num_bytes]
    for cache_dir, num_workers in ((None, 0), (str(tmp_path / "cache"), 0), (None, 1)):
        pipeline = mm.Pipeline(
            union,
            global_batch_size=10,
            drop_last=False,
            cache_dir=cache_dir,
            collate=collate_in_workers,
        )
        with caplog.at_level(logging.WARNING, "mmstream"):
            run = mm.Loader(pipeline, num_workers=num_workers)
            shown = [
                (ref, bytes(data)[0])
                for batch in run
                for ref, data, valid in zip(
                    batch["__lineage__"].shown,
                    batch["bin"],
                    batch["__valid__"].tolist(),
                    strict=True,
                )
                if valid
            ]
        assert len({ref for ref, _ in shown}) == len(shown) == 149
        for (shard, index), byte in shown:  # fields differ by their number in their folder
            own, local = union.own(shard)
            assert byte == (int(own.counts[:local].sum()) + index) % 251
    assert not caplog.records
