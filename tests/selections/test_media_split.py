"""Splits by media: no medium is in both parts, and appended samples move nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmstream as mm
from mmstream.converting.sidecar import write_sidecars
from mmstream.dataset.select import NEITHER, sides_of
from tests.helpers.bad_corpus import write_tiny
from tests.helpers.corpora import jpeg, write_corpus

Command = Callable[..., tuple[int, str, str]]

LISTS = st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=40)


def sides(media: list[list[int]], fraction: float = 0.5, seed: int = 0) -> list[int]:
    flat = np.array([medium for own in media for medium in own], dtype=np.uint64)
    draws = np.random.default_rng(seed).random(len(media))
    return sides_of(np.array([*map(len, media)], np.int64), flat, draws, fraction, seed).tolist()


@given(LISTS, st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 3), st.integers(0, 40))
def test_no_medium_is_in_both_parts_and_growth_moves_nothing(
    media: list[list[int]], fraction: float, seed: int, num_before: int
) -> None:
    result = sides(media, fraction, seed)
    of_side = [
        {m for own, s in zip(media, result, strict=True) if s == side for m in own}
        for side in (0, 1)
    ]
    assert not of_side[0] & of_side[1]
    for number, (own, side) in enumerate(zip(media, result, strict=True)):
        if side == NEITHER:  # only samples before it tell
            before = [
                {
                    m
                    for o, s in zip(media[:number], result[:number], strict=True)
                    if s == part
                    for m in o
                }
                for part in (0, 1)
            ]
            assert set(own) & before[0]
            assert set(own) & before[1]
    assert sides(media[:num_before], fraction, seed) == result[:num_before]


def test_shares_are_as_asked_and_of_the_seed_alone() -> None:
    media = [[number] for number in range(20_000)]
    hashes = np.random.default_rng(7).integers(0, 2**63, 20_000).tolist()
    for numbers in (hashes, hashes[::-1]):
        parts = sides([[n] for n in numbers], 0.9, seed=1)
        assert 17_800 < sum(parts) < 18_200
    assert sides([[n] for n in hashes], 0.9, 1) == parts[::-1]
    both = np.array(sides([[n] for n in hashes], 0.5, 1)) + sides([[n] for n in hashes], 0.5, 2)
    assert 4700 < (both == 2).sum() < 5300
    assert len({*map(tuple, [sides(media[:64], 0.5, seed) for seed in range(9)])}) == 9


# -- datasets --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two conversions of pictures with several captions; some rows have two pictures."""
    root = tmp_path_factory.mktemp("media")
    pictures = []
    for number in range(24):
        pictures.append(root / f"{number}.jpg")
        pictures[-1].write_bytes(jpeg(number))
    rows = [
        {"image": str(pictures[number % 20]), "text": f"text {number}", "n": number}
        for number in range(60)
    ]
    mm.convert(rows, root / "base", media_root=root, samples_per_shard=11, progress=False)
    more = [
        {"image": str(pictures[number % 24]), "text": f"more {number}", "n": 60 + number}
        for number in range(30)
    ]
    mm.convert(more, root / "week", media_root=root, samples_per_shard=11, progress=False)
    return root


@pytest.fixture
def folders(written: Path, tmp_path: Path) -> list[str]:
    return [str(shutil.copytree(written / name, tmp_path / name)) for name in ("base", "week")]


def numbers(data: mm.Dataset) -> list[int]:
    return [int(sample["json"].split(b'"n":')[1].strip(b" }")) for sample in data]


def test_parts_have_no_picture_in_common(folders: list[str]) -> None:
    dataset = mm.open_dataset(folders[0])
    train, val = dataset.split(0.7, seed=2, by_media=True)
    assert sorted(numbers(train) + numbers(val)) == list(range(60))
    assert len(val) % 3 == 0
    assert 0 < len(val) < 60
    assert not mm.find_leaks(train, val, progress=False).num_pairs.get("media")
    plain = dataset.split(0.7, seed=2)
    assert mm.find_leaks(*plain, progress=False).num_pairs["media"]
    # A view has the parts of the whole dataset.
    for part, whole in zip(
        dataset[10:40].split(0.7, seed=2, by_media=True), (train, val), strict=True
    ):
        assert numbers(part) == [number for number in numbers(whole) if 10 <= number < 40]


def test_a_folder_that_is_added_moves_no_sample(folders: list[str]) -> None:
    before = mm.open_dataset(folders[0]).split(0.7, seed=2, by_media=True)
    parts = mm.open_dataset(folders).split(0.7, seed=2, by_media=True)
    for old, new in zip(before, parts, strict=True):
        assert numbers(new)[: len(old)] == numbers(old)
    assert not mm.find_leaks(*parts, progress=False).num_pairs.get("media")


def test_parts_are_stored_for_several_ranks(
    folders: list[str], mmstream: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = mm.open_dataset(folders[0])
    expected = [numbers(part) for part in dataset.split(0.7, seed=2, by_media=True)]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mm.ConfigError, match=r"select \S+/base --sample 0.7 --by-media --seed 2`"):
        dataset.split(0.7, seed=2, by_media=True)
    alone = dataset.split(0.7, seed=2, by_media=True, world=mm.World())
    assert [numbers(part) for part in alone] == expected
    words = ["select", folders[0], "--sample", "0.7", "--by-media", "--seed", "2"]
    code, output, _ = mmstream(*words, "--name", "train")
    assert (code, output.count("of 60 samples chosen")) == (0, 2)
    assert mmstream("select", folders[1], *words[2:])[0] == 0  # parts of folders are not of both
    for sidecar in Path(folders[0]).glob("*.parquet"):
        sidecar.rename(sidecar.with_suffix(".away"))
    stored = dataset.split(0.7, seed=2, by_media=True)
    assert [numbers(part) for part in stored] == expected
    assert numbers(dataset.select("train")) == expected[0]
    assert numbers(dataset.select("train-rest")) == expected[1]
    with pytest.raises(mm.ConfigError, match="2 ranks"):
        dataset.split(0.7, seed=3, by_media=True)
    with pytest.raises(mm.ConfigError, match=r"read the columns of all shards: a process that"):
        mm.open_dataset(folders).split(0.7, seed=2, by_media=True)
    assert mmstream(*words, "--overwrite")[0] != 0  # it reads the columns again


def test_samples_of_both_parts_and_placeholders_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures = [jpeg(number) for number in range(40)]

    def write(name: str, rows: list[list[int]]) -> mm.Dataset:
        fields = [{f"{n}.jpg": pictures[m] for n, m in enumerate(row)} for row in rows]
        url = write_corpus(tmp_path / name, [len(rows)], lambda n: {**fields[n], "txt": b"a text"})
        write_sidecars(mm.open_dataset(url), progress=False)
        return mm.open_dataset(url)

    singles = [[number] for number in range(40)]
    pairs = write("pairs", [*singles, *([n, (7 * n + 1) % 40] for n in range(40))])
    train, val = pairs.split(0.5, by_media=True)
    num_neither = 80 - len(train) - len(val)
    assert num_neither > 5
    assert f"{num_neither} of 80 samples are in neither part" in caplog.text
    caplog.clear()
    same = write("same", [[0, number] for number in range(40)])
    with caplog.at_level(logging.WARNING, "mmstream"):
        sizes = {*map(len, same.split(0.5, by_media=True))}
    assert sizes == {0, 40}
    assert "not 0.5 of them, because many share media" in caplog.text


def test_what_has_no_hashes_or_no_media(tmp_path: Path) -> None:
    tars = mm.open_dataset(write_tiny(tmp_path / "tars", (7, 9)))
    with pytest.raises(mm.ConfigError, match=r"mmstream index \S+ --columns"):
        tars.split(0.5, by_media=True)
    with pytest.raises(mm.ConfigError, match="by='a' and by_media=True"):
        tars.split(0.5, by="a", by_media=True)
    write_sidecars(tars, progress=False)
    texts = [part.selection for part in tars.split(0.5, by_media=True)]
    plain = [part.selection for part in tars.split(0.5)]
    assert [s and s.digest for s in texts] == [s and s.digest for s in plain]
