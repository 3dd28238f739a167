"""Erasing: what was taken down is overwritten everywhere, and all else stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.converting.erase import digests_of, erase, require_erasable
from mmstream.converting.sidecar import write_sidecars
from mmstream.dataset.bad_list import REMOVED_NAME, erased_keys, read_removed, take_down
from mmstream.dataset.index import build_index
from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.verify import verify
from mmstream.errors import StorageError, TakenDownError
from mmstream.storage import open_store
from mmstream.storage.memory import MemoryStore
from tests.converting.test_kill import dies_at, moments_of_death
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.convert_corpus import objects, run, tree, write_files, write_rows
from tests.helpers.corpora import jpeg, write_checksums, write_corpus
from tests.helpers.foreign_tars import make_tar, read_by_webdataset, special

GONE = (2, 5, 9)
"""Rows from 0 that are erased. Row 9 was rejected first, and is a sample of a retry."""

KEYS = [f"{row + 1:09d}" for row in GONE]
COPY = 5
"""Row 6 has the picture and the text of row 5."""


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, pictures, and all that a conversion of twelve rows can write."""
    folder = tmp_path_factory.mktemp("erase")
    rows = [
        {"id": f"person-{i}", "image": f"{i}.jpg", "text": f"caption of {i}", "lang": f"lang-{i}"}
        for i in range(12)
    ]
    rows[COPY + 1] |= {"image": f"{COPY}.jpg", "text": f"caption of {COPY}"}
    path = write_rows(folder / "rows.jsonl", rows)
    write_files(folder, {f"{i}.jpg": jpeg(i, (40 + i, 30)) for i in range(12) if i != 9})
    options = {"samples_per_shard": 4, "duplicates": "report", "near_duplicates": "report"}
    run(path, folder / "out", **options)
    write_files(folder, {"9.jpg": jpeg(9, (49, 30))})
    run(path, folder / "out", **options, retry_rejects=True)
    (folder / "out" / "shard-000000.tar.facts").write_bytes(b"of an earlier version")
    return folder


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    shutil.copytree(converted / "out", tmp_path / "out")
    return tmp_path / "out"


def erase_keys(url: Any, keys: Sequence[str] = KEYS, *, by_id: bool = False) -> list[Any]:
    """Erase samples as the command does."""
    dataset = mm.open_dataset(str(url), bad_list=False)
    column = "id" if by_id else "key"
    path = Path(os.environ["XDG_CACHE_HOME"], f"keys-{uuid.uuid4().hex}")
    path.write_text("\n".join(keys), "utf-8")
    from mmstream.dataset.select import having_keys

    view, _ = having_keys(
        dataset,
        str(path),
        column=column,
        erased=erased_keys(dataset.index_store, column),
        progress=False,
    )
    refs = view.refs(np.arange(len(view)))
    require_erasable(dataset, refs)
    take_down(dataset, refs, "request", digests_of(dataset, refs))
    return list(erase(dataset))


def whole_samples(folder: Path) -> dict[tuple[int, int], bytes]:
    dataset = mm.open_dataset(folder)
    refs = [(s, i) for s, count in enumerate(dataset.counts) for i in range(count)]
    return dict(zip(refs, dataset.shards.read_bytes(refs), strict=True))


def texts_of(path: Path) -> bytes:
    """Return the bytes of a file, and what they are when unpacked."""
    data = path.read_bytes()
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
        data += repr(rows).encode() + b"".join(row["text_xxh3"] or b"" for row in rows)
        media = [medium for row in rows for medium in row["media"] or ()]
        data += b"".join(m["xxh3"] + (m["perceptual_hash"] or b"") for m in media)
    return data


def test_nothing_of_an_erased_sample_is_left_and_all_others_are_as_they_were(
    converted: Path, folder: Path, mmstream: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    before = mm.open_dataset(folder)
    identity = before.corpus.identity()
    samples, infos = whole_samples(folder), before.manifest.shards
    sidecars = {p.name: pq.read_table(p).to_pylist() for p in folder.glob("*.parquet")}
    refs = [before.ref_of_key(key) for key in KEYS]
    needles = [key.encode() for key in KEYS]
    for row, ref in zip(GONE, refs, strict=True):
        needles.append(b"person-%d'" % row)
        if row != COPY:
            sample = before.shards.read(*ref)
            of_row = sidecars[before.name_of(ref[0]).replace(".tar", ".parquet")][ref[1]]
            needles += [sample["jpg"][-60:], sample["json"], sample["txt"], sample["txt"][:12]]
            needles += [of_row["sha256"].encode(), of_row["media"][0]["xxh3"]]
            needles += [of_row["text_xxh3"], of_row["media"][0]["perceptual_hash"]]
    texts = [texts_of(path) for path in folder.rglob("*") if path.is_file()]
    assert all(any(needle in text for text in texts) for needle in needles)

    keys = tmp_path / "keys.txt"
    keys.write_text("\n".join(KEYS))
    command = ("takedown", folder, "--keys-file", keys, "--reason", "request 17", "--erase")
    code, _, error = mmstream(*command)
    assert code == 2
    assert "pass --yes" in error
    assert not (folder / REMOVED_NAME).exists()
    code, out, _ = mmstream(*command, "--yes")
    assert code == 0
    assert "3 samples taken down: request 17" in out
    assert "node caches" in out
    for info in infos:
        digest = hashlib.sha256((folder / info.name).read_bytes()).hexdigest()
        is_changed = any(before.name_of(shard) == info.name for shard, _ in refs)
        assert (digest != info.sha256) == is_changed
        assert (info.sha256 in out, digest in out) == (is_changed, is_changed)

    for path in folder.rglob("*"):
        if path.is_file():
            assert not [needle for needle in needles if needle in texts_of(path)]
    after = mm.open_dataset(folder)
    assert len(after) == len(before)
    assert {k: v for k, v in after.corpus.identity().items() if k != "bad"} == {
        k: v for k, v in identity.items() if k != "bad"
    }
    for ref, data in whole_samples(folder).items():
        assert (data == samples[ref]) == (ref not in refs)
    for name, rows in sidecars.items():
        for old, new in zip(rows, pq.read_table(folder / name).to_pylist(), strict=True):
            if new["status"] == "erased":
                assert new["key"] == f"erased-{old['index']}"
            else:
                assert old == new or (old["key"] == KEYS[2] and new["key"] == "")
    assert not (folder / "shard-000000.tar.facts").exists()
    assert "000000010" not in (folder / "rejects.jsonl").read_text()
    assert mmstream("verify", folder, "--decode")[0] == 0
    assert mmstream("verify", folder, "--quick")[0] == 0
    with pytest.raises(TakenDownError):
        after[refs[0][1]]
    assert after.ref_of_key("000000001") == (0, 0)
    assert len({s["__key__"] for s in after}) == len(before) - 3

    everything = tree(folder)
    code, out, _ = mmstream(*command, "--yes")
    assert (code, "3 were taken down before" in out) == (0, True)
    assert "all of them were erased before" in out
    assert mmstream(*command[:-1])[0] == 0
    assert tree(folder) == everything


@pytest.mark.slow
def test_a_conversion_finds_its_erased_shards_whole_and_never_brings_samples_back(
    converted: Path, folder: Path
) -> None:
    options = {"samples_per_shard": 4, "duplicates": "report", "near_duplicates": "report"}
    erase_keys(folder)
    everything = tree(folder)
    report = run(converted / "rows.jsonl", folder, **options, check=True)
    assert (report.was_finished, report.num_repaired) == (True, 0)
    assert tree(folder) == everything
    (folder / "shard-000000.tar").unlink()
    with pytest.raises(mm.MMStreamError, match=r"samples were erased, which must not come back"):
        run(converted / "rows.jsonl", folder, **options)
    assert not (folder / "shard-000000.tar").exists()


def test_ids_of_rows_erase_their_samples_and_are_known_again(folder: Path) -> None:
    assert len(erase_keys(folder, ["person-2"], by_id=True)) == 1
    assert b"person-2" not in b"".join(texts_of(p) for p in folder.iterdir() if p.is_file())
    assert erase_keys(folder, ["person-2"], by_id=True) == []
    assert erase_keys(folder, [KEYS[0]]) == []
    erased = erased_keys(open_store(folder))
    assert [bool(erased(text)) for text in (KEYS[0], "person-2", KEYS[1])] == [True, False, False]
    with pytest.raises(mm.ConfigError, match="2 of 2 are of no sample"):
        erase_keys(folder, ["person-2", "000000099"])


def test_an_epoch_goes_on_as_after_a_takedown_that_erased_nothing(tmp_path: Path) -> None:
    def loader(url: Any) -> mm.Loader:
        return mm.Loader(
            mm.Pipeline(mm.open_dataset(url), global_batch_size=4, seed=3), num_workers=0
        )

    write_checksums(
        write_corpus(tmp_path / "a", (7, 31, 2), lambda n: {"json": b"%d" % n}, checksums=True)
    )
    run_before = loader(tmp_path / "a")
    batches = iter(run_before)
    for _ in range(3):
        next(batches)
    state = run_before.state_dict()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    keys = ["000003", "000011", "000020", "000038"]
    assert len(erase_keys(tmp_path / "a", keys)) == 3
    dataset = mm.open_dataset(tmp_path / "b")
    take_down(dataset, [dataset.ref_of_key(key) for key in keys], "request")
    shown = []
    for url in (tmp_path / "a", tmp_path / "b"):
        after = loader(url)
        after.load_state_dict(state)
        shown.append([key for _ in range(2) for batch in after for key in batch["__key__"]])
    assert shown[0] == shown[1]
    assert set(keys).isdisjoint(shown[0])
    assert list(verify(mm.open_dataset(tmp_path / "a"), progress=False)) == []


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_any_write_the_same_command_completes_it(folder: Path, tmp_path: Path) -> None:
    erase_two = partial(erase_keys, keys=KEYS[1:])
    shutil.copytree(folder, tmp_path / "whole")
    erase_two(tmp_path / "whole")
    expected = tree(tmp_path / "whole")

    def dies(moment: int) -> bool:
        shutil.copytree(folder, tmp_path / f"{moment}")
        return dies_at(moment, partial(erase_two, tmp_path / f"{moment}"))

    for moment in moments_of_death(dies, 2):  # each write has two
        out = tmp_path / f"{moment}"
        if (out / REMOVED_NAME).exists():
            dataset = mm.open_dataset(out)
            assert {s["__key__"] for s in dataset}.isdisjoint(KEYS[1:])
            problems = list(verify(dataset, progress=False))
            assert not [problem for problem in problems if len(problem.bad)]
            if read_removed(dataset.index_store).unfinished:
                assert "not erased to the end" in problems[0].reason
        erase_two(out)
        assert tree(out) == expected
    assert moment > 20


class FailingStore:
    """Lets the writes of stores in memory fail from one of them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left: float = float("inf")
        for name in ("write", "remove"):
            monkeypatch.setattr(MemoryStore, name, self.failing(getattr(MemoryStore, name)))

    def failing(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(store: MemoryStore, name: str, *data: bytes) -> None:
            if "lock" not in name:
                if self.num_left <= 0:
                    raise StorageError("no more writes")
                self.num_left -= 1
            real(store, name, *data)

        return call


@pytest.fixture
def memory() -> Iterator[str]:
    files = fsspec.filesystem("memory")
    yield f"memory://erase-{uuid.uuid4().hex}"
    files.store.clear()


def copy_to(folder: Path, url: str) -> str:
    for name, data in tree(folder).items():
        open_store(url).write(name, data)
    return url


def test_where_storage_fails_at_any_write_the_same_command_completes_it(
    folder: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    erase_keys(whole := copy_to(folder, f"{memory}/whole"))
    expected = objects(whole)
    failing, num_writes = FailingStore(monkeypatch), 0
    while True:
        failing.num_left = float("inf")
        url = copy_to(folder, f"{memory}/{num_writes}")
        failing.num_left = num_writes
        try:
            erase_keys(url)
        except StorageError:
            failing.num_left = float("inf")
            erase_keys(url)
            assert objects(url) == expected
            num_writes += 1
        else:
            break
    assert objects(url) == expected
    assert num_writes > 15


@pytest.mark.slow
@pytest.mark.s3
def test_shards_in_object_storage_are_written_anew(folder: Path, s3: str) -> None:
    url = copy_to(folder, f"{s3}/{uuid.uuid4().hex}")
    erase_keys(url)
    erase_keys(folder)
    assert objects(url) == objects(str(folder))
    assert list(verify(mm.open_dataset(url), progress=False)) == []
    assert list(verify(mm.open_dataset(url), quick=True, progress=False)) == []


# -- tars of other tools ---------------------------------------------------------------------------


names = st.text("ab0é/_-", min_size=1, max_size=30).map(
    lambda text: "/".join(word for word in text.split("/") if word) or "x"
)
long_names = st.tuples(names, st.integers(0, 300)).map(lambda n: n[0] + "z" * n[1])


@settings(max_examples=30)
@given(
    st.lists(st.one_of(names, long_names), min_size=2, max_size=6, unique=True),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.data(),
)
def test_any_tar_stays_a_tar_with_the_same_bytes_elsewhere(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    kind: int,
    data: st.DataObject,
) -> None:
    members: list[Any] = []
    for number, key in enumerate(keys):
        for field in data.draw(st.sampled_from([("jpg",), ("json", "seg.PNG"), ("cls", "txt")])):
            info = tarfile.TarInfo(f"{key}.{field}")
            if kind == tarfile.PAX_FORMAT:
                info.pax_headers = data.draw(
                    st.sampled_from([{}, {"comment": f"secret-{number}" * 200}])
                )
            info.uname = f"secret-{number}"
            size = data.draw(st.sampled_from([0, 1, 511, 512, 3000]))
            members.append((info, (b"payload-%d." % number * 400)[:size]))
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.tar").write_bytes(make_tar(members, format=kind))
    index_tars(folder, checksums=data.draw(st.booleans()), progress=False)
    before = whole_samples(folder)
    gone = data.draw(st.integers(0, len(keys) - 1))
    dataset = mm.open_dataset(folder)
    refs = [(0, gone)]
    require_erasable(dataset, refs)
    take_down(dataset, refs, "request", digests_of(dataset, refs))
    (shard,) = erase(dataset)
    content = (folder / "a.tar").read_bytes()
    assert shard.after == hashlib.sha256(content).hexdigest()
    assert b"payload-%d." % gone not in content
    assert b"secret-%d" % gone not in content
    with tarfile.open(folder / "a.tar") as tar:
        files = [(m.name, tar.extractfile(m).read()) for m in tar.getmembers()]  # type: ignore[union-attr]
    for (info, payload), (name, found) in zip(members, files, strict=True):
        is_gone = info.name.startswith(f"{keys[gone]}.")
        assert len(found) == len(payload)
        assert (name, found) == (info.name, payload) or is_gone
        assert name.startswith(f"erased-{gone}") == is_gone
    assert (build_index(dataset.store, "a.tar") == dataset.shards.offsets(0)).all()
    for ref, sample in whole_samples(folder).items():
        assert sample == before[ref] or ref == (0, gone)
    assert list(verify(mm.open_dataset(folder), progress=False)) == []


def test_folders_and_files_of_macs_links_and_reading_by_others(tmp_path: Path) -> None:
    members = [
        (special("alice/", tarfile.DIRTYPE), b""),
        ("alice/1.json", b'{"a": 1}'),
        (special("alice/1.txt", tarfile.SYMTYPE, "1.json"), b""),
        ("alice/._1.json", b"what a Mac knows"),
        ("bob/2.json", b'{"b": 1}'),
        ("bob/2.txt", b"text of bob"),
        (special("bob/9.txt", tarfile.LNKTYPE, "bob/2.txt"), b""),
    ]
    path = tmp_path / "x.tar"
    path.write_bytes(make_tar(members))
    index_tars(tmp_path, progress=False)
    dataset = mm.open_dataset(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(mm.ConfigError, match=r"x\.tar\[2\] bob/9\.txt is a link to a file that is"):
        erase_keys(tmp_path, ["bob/2"])
    assert tree(tmp_path) == before
    erase_keys(tmp_path, ["alice/1"])
    data = path.read_bytes()
    assert not [n for n in (b"alice/1", b"1.json", b"a Mac", b'"a"') if n in data]
    first, *others = read_by_webdataset(data)
    assert (dict(first)["__key__"], json.loads(dict(first)["json"])) == ("erased-0", {})
    assert [dict(sample)["__key__"] for sample in others] == ["bob/2"]
    assert len(dataset) == 3


def test_a_key_of_erased_samples_that_is_taken_gets_a_longer_one(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("erased-0.txt", b"2"), ("erased-0-.txt", b"3")]
    (tmp_path / "x.tar").write_bytes(make_tar(members))
    erase_keys(tmp_path, ["a"])
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames() == ["erased-0--.txt", "erased-0.txt", "erased-0-.txt"]
    assert len(mm.open_dataset(tmp_path)) == 3


def test_a_key_in_several_shards_is_erased_in_all_and_later_calls_add(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.tar").write_bytes(make_tar([("p.txt", b"x"), (f"{name}.txt", b"y")]))
    assert [shard.name for shard in erase_keys(tmp_path, ["p"])] == ["a.tar", "b.tar", "c.tar"]
    assert [(s.name, s.num_samples) for s in erase_keys(tmp_path, ["p", "b"])] == [("b.tar", 2)]
    dataset = mm.open_dataset(tmp_path)
    assert [sample["__key__"] for sample in dataset] == ["a", "c"]


def test_what_cannot_be_erased_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write_tiny(tmp_path / "tars", (3, 3)))
    index_tars(folder, output=tmp_path / "index", progress=False)
    before = tree(tmp_path)

    def refused(match: str, folder: Path = folder, **options: Any) -> None:
        dataset = mm.open_dataset(folder, **options)
        with pytest.raises((mm.ConfigError, mm.errors.ShardError), match=match):
            require_erasable(dataset, [(0, 1)])

    refused("of a dataset in its own folder", tmp_path / "index", allow_foreign_urls=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _mode: Path(path).suffix != ".tar")
        refused("cannot be written: run this as a user who may; nothing was changed")
    assert tree(tmp_path) == before
    path = folder / "shard-000000.tar"
    data = path.read_bytes()
    path.write_bytes(data[:1030] + b"\xff" + data[1031:])
    refused(r"shard-000000\.tar: not a tar header")
    path.write_bytes(data + bytes(512))
    refused("is not the tar that was indexed")


def test_tars_elsewhere_are_erased_by_the_index_and_links_stay_links(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    write_tiny(disk, (3, 3))
    for path in [*disk.glob("*.idx"), disk / "mmstream.json"]:
        path.unlink()
    tars = tmp_path / "tars"
    tars.mkdir()
    for path in disk.iterdir():
        path.chmod(0o640)
        (tars / path.name).symlink_to(path)
    index_tars(tars, output=tmp_path / "index", checksums=True, progress=False)
    dataset = mm.open_dataset(tmp_path / "index", allow_foreign_urls=True)
    write_sidecars(dataset, progress=False)
    require_erasable(dataset, [(1, 0)])
    take_down(dataset, [(1, 0)], "request", digests_of(dataset, [(1, 0)]))
    (shard,) = erase(dataset)
    link = tars / "shard-000001.tar"
    assert link.is_symlink()
    assert b"000003" not in link.read_bytes() + texts_of(tmp_path / "index/shard-000001.parquet")
    assert link.stat().st_mode & 0o777 == 0o640
    assert shard.before == dataset.manifest.shards[1].sha256
    dataset = mm.open_dataset(tmp_path / "index", allow_foreign_urls=True)
    assert list(verify(dataset, progress=False)) == []


def test_indexing_again_keeps_what_states_know_of_an_erased_tar(tmp_path: Path) -> None:
    folder = Path(write_tiny(tmp_path, (3, 3)))
    (folder / "mmstream.json").unlink()
    index_tars(folder, checksums=True, progress=False)
    old = Manifest.from_bytes((folder / "mmstream.json").read_bytes())
    erase_keys(folder, ["000001"])
    index_tars(folder, checksums=True, overwrite=True, progress=False)
    shutil.copy(folder / "shard-000001.tar", folder / "shard-000002.tar")
    index_tars(folder, checksums=True, progress=False)
    new = Manifest.from_bytes((folder / "mmstream.json").read_bytes())
    assert new.shards[:2] == old.shards
    assert list(new.erased) == ["shard-000000.tar"]
    assert list(verify(mm.open_dataset(folder), progress=False)) == []


def test_columns_that_are_written_anew_tell_nothing_of_erased_samples(folder: Path) -> None:
    erase_keys(folder)
    before = [pq.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))]
    write_sidecars(mm.open_dataset(str(folder)), overwrite=True)
    after = [pq.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))]
    erased = [row for table in before for row in table if row["status"] == "erased"]
    assert len(erased) == len(KEYS)
    assert [row for table in after for row in table if row["status"] == "erased"] == erased


def files_with(folder: Path, needle: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and needle in texts_of(path)]


def write_people(folder: Path, *, without: int | None = None, **texts: Any) -> Path:
    """Write four rows of people and their pictures, all but one."""
    files = {f"photo-{i}.jpg": jpeg(i, (40, 30)) for i in range(4) if i != without}
    write_files(folder, files)
    rows = [{"id": f"person-{i}", "image": f"photo-{i}.jpg", **texts} for i in range(4)]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("again", ["retry_rejects", "append"])
@pytest.mark.parametrize("captions", ["all", "each"])
def test_what_was_rejected_of_a_row_before_goes_with_its_samples(
    tmp_path: Path, again: str, captions: Any
) -> None:
    out, reading = tmp_path / "out", mm.RowReading(captions=captions)
    rows = write_people(tmp_path, without=2, captions=["a", "b"])
    run(rows, out, samples_per_shard=4, reading=reading)
    write_people(tmp_path, captions=["a", "b"])
    run(rows, out, samples_per_shard=4, reading=reading, **{again: True})
    num_rejects, num_known = len(read_lines(out / "rejects.jsonl")), {"append": 3}.get(again, 0)
    assert files_with(out, b"person-2'")
    erase_keys(out, ["person-2"], by_id=True)
    assert not files_with(out, b"person-2'")
    assert not files_with(out, b"photo-2")
    assert len(read_lines(out / "rejects.jsonl")) == num_rejects
    assert num_rejects == num_known + (again == "append")
    assert not [*verify(mm.open_dataset(out))]


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_no_caption_of_an_erased_row_comes_back(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{i}.jpg": jpeg(i, (40, 30)) for i in range(3)})
    rows = [{"image": f"{i}.jpg", "captions": [f"a{i}", f"b{i}"]} for i in range(3)]
    path, reading = write_rows(tmp_path / "rows.jsonl", rows), mm.RowReading(captions="each")
    run(path, tmp_path / "out", samples_per_shard=4, reading=reading)
    erase_keys(tmp_path / "out", ["000000002-0", "000000002-1"])
    report = run(path, tmp_path / "out", samples_per_shard=4, reading=reading, append=True)
    assert (report.num_samples, report.num_rejects) == (0, 3)


@pytest.mark.parametrize("is_erased_first", [False, True])
def test_an_append_keeps_no_id_of_rows_that_are_there(
    tmp_path: Path, is_erased_first: bool
) -> None:
    rows, out = write_people(tmp_path, text="a"), tmp_path / "out"
    run(rows, out, samples_per_shard=4)
    more = write_rows(
        tmp_path / "more.jsonl", [*read_lines(rows), {"id": "new", "image": "photo-3.jpg"}]
    )
    steps = [
        lambda: run(more, out, samples_per_shard=4, append=True),
        lambda: erase_keys(out, ["000000003"]),
    ]
    for step in reversed(steps) if is_erased_first else steps:
        step()
    assert len(mm.open_dataset(out)) == 5
    assert not files_with(out, b"person-2'")
    assert files_with(out, b"'new'")


def test_rejects_of_tars_are_not_taken_for_samples_whose_keys_are_their_numbers(
    tmp_path: Path,
) -> None:
    tar, out = tmp_path / "in.tar", tmp_path / "out"
    pictures = {"000000001": jpeg(0), "000000003": jpeg(1), "000000002": b"\xff\xd8broken"}
    tar.write_bytes(make_tar([(f"{key}.jpg", data) for key, data in pictures.items()]))
    options = {"samples_per_shard": 4, "media": mm.MediaOptions(max_image_side=20)}
    run(tar, out, **options)
    rejects = read_lines(out / "rejects.jsonl")
    assert [reject["key"] for reject in rejects] == ["000000003"]  # the number of its row
    erase_keys(out, ["000000003"])
    assert read_lines(out / "rejects.jsonl") == rejects
    run(tar, out, **options, retry_rejects=True)
    assert [sample["__key__"] for sample in mm.open_dataset(out)] == ["000000001"]


def test_no_retry_takes_another_row_for_a_reject_that_was_emptied(tmp_path: Path) -> None:
    rows, out = write_people(tmp_path, text="a"), tmp_path / "out"
    same = {"id": "person-2", "image": "missing.jpg"}
    rows = write_rows(tmp_path / "rows.jsonl", [*read_lines(rows), same])
    run(rows, out, samples_per_shard=5)
    erase_keys(out, ["000000003"])
    assert read_lines(out / "rejects.jsonl") == [{"file": "", "row": 0, "reason": ""}]
    write_files(tmp_path, {"missing.jpg": jpeg(5)})
    run(rows, out, samples_per_shard=5, retry_rejects=True)
    keys = [sample["__key__"] for sample in mm.open_dataset(out)]
    assert keys == ["000000001", "000000002", "000000004"]
