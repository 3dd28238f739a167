"""Takedowns: what was taken down is never shown again, and every state goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.dataset.bad_list import REMOVED_NAME, take_down
from mmstream.dataset.index_tars import index_tars
from mmstream.storage import write_lock
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.corpora import write_corpus

COUNTS = (7, 31, 2, 40)
NUM_SAMPLES = sum(COUNTS)
ROWS = 4


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_tiny(tmp_path / "corpus", COUNTS)


def loader(data: Any, **settings: Any) -> mm.Loader:
    settings = {"global_batch_size": ROWS, "seed": 3} | settings
    return mm.Loader(mm.Pipeline(data, **settings), num_workers=0)


def shown(batches: Iterator[dict[str, Any]], num_batches: int) -> list[list[str]]:
    return [list(batch["__key__"]) for _, batch in zip(range(num_batches), batches, strict=False)]


def valid_keys(run: mm.Loader) -> list[str]:
    """Return the keys of an epoch, without padding."""
    return [
        key
        for batch in run
        for key, is_valid in zip(batch["__key__"], batch["__valid__"].tolist(), strict=True)
        if is_valid
    ]


def keys_of(corpus: str, refs: list[tuple[int, int]]) -> set[str]:
    dataset = mm.open_dataset(corpus)
    return {dataset.shards.read(*ref)["__key__"] for ref in refs}


REFS = [(1, 3), (1, 4), (3, 39), (0, 0), (3, 17)]


def test_a_new_run_never_shows_what_was_taken_down(corpus: str) -> None:
    assert take_down(mm.open_dataset(corpus), REFS, "request 17") == len(REFS)
    assert take_down(mm.open_dataset(corpus), [REFS[0], (2, 1)], "request 18") == 1
    dataset = mm.open_dataset(corpus)
    assert len(dataset) == NUM_SAMPLES
    assert [(t.reason, len(t.refs)) for t in dataset.takedowns] == [
        ("request 17", len(REFS)),
        ("request 18", 1),
    ]
    with pytest.raises(
        mm.errors.SkipSample, match=r"shard-000000\.tar\[0\] was taken down: request 17"
    ):
        dataset[0]
    removed = keys_of(corpus, [*REFS, (2, 1)])
    assert len({sample["__key__"] for sample in dataset}) == NUM_SAMPLES - len(removed)
    assert f"{NUM_SAMPLES} samples, {len(removed)} taken down" in repr(dataset)
    assert "2 chosen of 80 samples, 1 taken down" in repr(dataset[:2])
    run = loader(dataset, drop_last=False)
    for _epoch in range(2):
        keys = valid_keys(run)
        assert len(keys) == len(set(keys)) == NUM_SAMPLES - len(removed)
        assert removed.isdisjoint(keys)


@pytest.mark.parametrize(
    "settings",
    [{}, {"reshuffle": "lanes"}, {"window_bytes": 9000}, {"shuffle": False}, {"drop_last": False}],
)
def test_an_epoch_goes_on_where_it_was_without_what_was_taken_down(
    corpus: str, settings: dict[str, Any]
) -> None:
    before = loader(mm.open_dataset(corpus), **settings)
    batches = iter(before)
    shown(batches, 3)
    state = before.state_dict()
    planned, refs = [], []
    for _, batch in zip(range(4), batches, strict=False):
        planned += batch["__key__"]
        refs += batch["__lineage__"].planned
    first, second = refs[1::4], refs[2::7] + REFS
    take_down(mm.open_dataset(corpus), first, "first")
    take_down(mm.open_dataset(corpus), second, "second")
    removed = keys_of(corpus, [*first, *second])

    after = loader(mm.open_dataset(corpus), **settings)
    after.load_state_dict(state)
    batches = iter(after)
    for row, new in zip(planned, sum(shown(batches, 4), []), strict=True):
        assert new == row if row not in removed else new not in removed
    later = after.state_dict()
    rest = [key for batch in batches for key in batch["__key__"]]
    assert removed.isdisjoint(rest)
    again = loader(mm.open_dataset(corpus), **settings)
    again.load_state_dict(later)
    assert [key for batch in again for key in batch["__key__"]] == rest

    next_epoch = valid_keys(after)
    assert len(set(next_epoch)) == len(next_epoch)
    assert removed.isdisjoint(next_epoch)


def test_a_mixture_goes_on_and_other_samples_take_the_rows(corpus: str, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", (9, 9))

    def mixture() -> mm.Mixture:
        return mm.Mixture(
            {"a": (mm.open_dataset(corpus), 2), "b": (mm.open_dataset(other), 1)}, epoch_steps=30
        )

    run = loader(mixture())
    shown(iter(run), 5)
    state = run.state_dict()
    take_down(mm.open_dataset(corpus), REFS, "request")
    after = loader(mixture())
    after.load_state_dict(state)
    shown_refs = [
        (source, tuple(ref))
        for _ in range(2)
        for batch in after
        for source, ref in zip(batch["__source__"], batch["__lineage__"].shown, strict=True)
    ]
    assert len(shown_refs) == ROWS * 55
    assert not {("a", ref) for ref in REFS} & set(shown_refs)


def test_a_damaged_or_foreign_file_opens_nothing(corpus: str, tmp_path: Path) -> None:
    take_down(mm.open_dataset(corpus), REFS, "request")
    path = Path(corpus, REMOVED_NAME)
    good = path.read_bytes()
    for damaged in (good[:-20], good.replace(b"17", b"18"), b"", b"[]", b'{"version": 2}'):
        path.write_bytes(damaged)
        with pytest.raises(mm.errors.ManifestError, match=REMOVED_NAME):
            mm.open_dataset(corpus, bad_list=False)
    path.unlink()
    path.mkdir()
    with pytest.raises(mm.errors.ManifestError, match=REMOVED_NAME):
        mm.open_dataset(corpus)
    path.rmdir()
    other = write_tiny(tmp_path / "other", (7, 3))
    Path(other, REMOVED_NAME).write_bytes(good)
    with pytest.raises(mm.errors.ManifestError, match=rf"{REMOVED_NAME}.*bring back an intact"):
        mm.open_dataset(other)


def test_a_sample_that_was_taken_down_has_no_duplicates(tmp_path: Path) -> None:
    url = write_corpus(
        tmp_path / "c", [3, 3], lambda n: {"txt": b"same" if n in (1, 4) else b"%d" % n}
    )
    assert mm.find_duplicates(mm.open_dataset(url), progress=False).num_pairs["text"] == 1
    take_down(mm.open_dataset(url), [(0, 1)], "request")
    assert mm.find_duplicates(mm.open_dataset(url), progress=False).num_pairs["text"] == 0


def test_without_a_bad_list_what_was_taken_down_stays_down(corpus: str) -> None:
    take_down(mm.open_dataset(corpus), REFS, "request")
    for dataset in (
        mm.open_dataset(corpus, bad_list=False),
        mm.open_dataset([str(path) for path in sorted(Path(corpus).glob("*.tar"))]),
    ):
        assert sorted(map(tuple, dataset.bad.tolist())) == sorted(REFS)


# -- the command -----------------------------------------------------------------------------------


def keys_file(tmp_path: Path, *keys: str) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text("\n".join(keys) + "\n", "utf-8")
    return path


def test_a_key_of_no_sample_ends_the_command_before_anything_is_written(
    mmstream, corpus: str, tmp_path: Path
) -> None:
    arguments = ("takedown", corpus, "--reason", "r", "--keys-file")
    keys = keys_file(tmp_path, "000003", "nobody", "000004.jpg")
    code, _, error = mmstream(*arguments, keys)
    assert code == 2
    assert re.search(r"keys: 2 of 3 are of no sample of .*: '000004.jpg', 'nobody'; give", error)
    assert not Path(corpus, REMOVED_NAME).exists()
    code, out, error = mmstream(*arguments, keys, "--allow-unknown")
    assert (code, out) == (0, "1 sample taken down: r\n")
    assert "2 lines of" in error
    for content in (b"", b"\xff\n"):
        keys.write_bytes(content)
        assert mmstream(*arguments, keys)[0] in (1, 2)
    assert mmstream(*arguments, tmp_path / "absent.txt")[0] == 1
    assert mmstream("takedown", corpus, "--keys-file", keys, "--reason", " ")[0] == 2


def test_ids_of_rows_take_down_all_their_samples(mmstream, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": "p{n % 5}", "text": "text {n}"}}\n' for n in range(20)))
    mm.convert(rows, tmp_path / "shards", progress=False)
    keys = keys_file(tmp_path, "p3")
    arguments = ("takedown", tmp_path / "shards", "--keys-file", keys, "--reason", "r", "--by-id")
    assert mmstream(*arguments)[1] == "4 samples taken down: r\n"
    run = loader(mm.open_dataset(tmp_path / "shards"), drop_last=False)
    assert len(valid_keys(run)) == 16
    with pytest.raises(mm.ConfigError, match="samples were taken down here"):
        mm.convert(rows, tmp_path / "shards", progress=False, rerun=mm.Rerun(overwrite=True))


def test_two_takedowns_at_once_do_not_lose_one(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_lock, "HEARTBEAT_S", 0.05)
    dataset = mm.open_dataset(corpus)
    lock = write_lock.write_lock(dataset.index_store, "takedown")
    with lock, pytest.raises(write_lock.LockedError):
        take_down(dataset, REFS, "request")
    assert not Path(corpus, REMOVED_NAME).exists()


def test_a_tar_of_which_samples_were_taken_down_is_not_replaced(tmp_path: Path) -> None:
    folder = Path(write_tiny(tmp_path / "c", (5, 5)))
    take_down(mm.open_dataset(folder), [(0, 1)], "request")
    other = Path(write_tiny(tmp_path / "other", (9,)), "shard-000000.tar")
    (folder / "shard-000000.tar").write_bytes(other.read_bytes())
    for overwrite in (False, True):
        with pytest.raises(mm.ConfigError, match=r"shard-000000\.tar were taken down"):
            index_tars(folder, overwrite=overwrite, progress=False)


def test_tars_of_several_folders_do_not_show_what_one_of_them_took_down(tmp_path: Path) -> None:
    folders = [write_tiny(tmp_path / name, (5,)) for name in "ab"]
    tars = [f"{folder}/shard-000000.tar" for folder in folders]
    assert len(mm.open_dataset(tars)) == 10
    take_down(mm.open_dataset(folders[0]), [(0, 1)], "request")
    with pytest.raises(mm.ConfigError, match="samples were taken down in"):
        mm.open_dataset(tars)


def test_a_line_of_keys_ends_only_at_a_line_feed(tmp_path: Path) -> None:
    from mmstream.dataset.select import having_keys

    mm.convert([{"text": "a"}, {"text": "b"}], str(tmp_path / "out"), progress=False)
    dataset = mm.open_dataset(tmp_path / "out")
    first, second = (sample["__key__"] for sample in dataset)
    file = tmp_path / "keys.txt"
    file.write_bytes(f"\ufeff{first}\r\n{second}\u2028{second}\n".encode())
    view, unknown = having_keys(dataset, str(file), allow_unknown=True, progress=False)
    assert [sample["__key__"] for sample in view] == [first]
    assert unknown == {f"{second}\u2028{second}"}
