"""A dataset rewritten in the order of its packs: the same bytes, one range a pack, resumable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.converting import reshard as module
from mmstream.dataset.bad_list import take_down, write_bad
from mmstream.packing.plan import PackPlan, open_plan, plan_folder, write_plan
from mmstream.packing.planner import (
    Measure,
    make_plan,
    measure_folder,
    measure_of_shards,
    read_lengths,
    write_measure,
)
from mmstream.storage import open_store
from tests.helpers.convert_corpus import tree
from tests.helpers.corpora import write_corpus

COUNTS = [40, 25, 55]
LIMITS = mm.PackLimits(64, where="num_tokens > 4")
SETTINGS = {"tokenizer": "t"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    write_corpus(folder, COUNTS)
    dataset = mm.open_dataset(folder)
    lengths = np.random.default_rng(0).integers(3, 30, len(dataset))
    lengths[7] = -1
    columns = {"num_tokens": lengths, "num_images": lengths % 3}
    measure = Measure(dataset.manifest.shards, columns, SETTINGS)
    write_measure(measure, str(folder))
    write_plan(make_plan(measure, LIMITS), plan_folder(str(folder), "64"))
    return folder


def measure_of(folder: Path) -> Measure:
    """Return the lengths that lie in the folder of a dataset."""
    shards = mm.open_dataset(folder).manifest.shards
    lengths = read_lengths(open_store(measure_folder(str(folder), SETTINGS)), shards)
    return measure_of_shards(shards, [each for each in lengths if each is not None], SETTINGS)


def contents(dataset: mm.Dataset) -> dict[str, bytes]:
    """Return the bytes of all samples by their keys."""
    return {
        dataset.read(shard, index)["__key__"]: dataset.shards.read_bytes([(shard, index)])[0]
        for shard in range(dataset.num_shards)
        for index in range(int(dataset.counts[shard]))
    }


@pytest.mark.parametrize("seed", [0, None])
def test_each_pack_is_one_range_and_each_sample_has_its_bytes(
    corpus: Path, tmp_path: Path, seed: int | None
) -> None:
    source, before = mm.open_dataset(corpus), open_plan(str(corpus / "mmstream.plan.64"))
    plan = mm.reshard(
        corpus, tmp_path / "packs", plan="64", shuffle_seed=seed, samples_per_shard=30
    )
    dataset = mm.open_dataset(tmp_path / "packs")
    samples, expected = contents(dataset), contents(source)
    assert len(samples) == before.members.size < len(source)
    assert samples == {key: expected[key] for key in samples}
    assert plan.members.tolist() == list(range(len(dataset)))
    assert plan.spread == 1
    units = plan.units(np.arange(plan.num_units))
    first_shards = units.shard[np.cumsum(units.counts) - units.counts]
    assert np.array_equal(units.shard, np.repeat(first_shards, units.counts))  # a pack in a shard
    assert dataset.has_checksums
    assert (dataset.counts >= 1).all()
    assert len(dataset.counts) > 2
    np.testing.assert_array_equal(dataset.counts, [shard.num_samples for shard in plan.shards])
    assert not list(mm.open_dataset(tmp_path / "packs").store.list().keys() & {"reports"})


def test_without_a_shuffle_the_packs_are_those_of_the_plan(corpus: Path, tmp_path: Path) -> None:
    source, before = mm.open_dataset(corpus), open_plan(str(corpus / "mmstream.plan.64"))
    plan = mm.reshard(corpus, tmp_path / "packs", plan="64", shuffle_seed=None)
    dataset = mm.open_dataset(tmp_path / "packs")

    def keys(plan: PackPlan, dataset: mm.Dataset) -> list[list[str]]:
        units = plan.units(np.arange(plan.num_units))
        refs = zip(units.shard.tolist(), units.index.tolist(), strict=True)
        names = np.array([dataset.read(*ref)["__key__"] for ref in refs])
        return [part.tolist() for part in np.split(names, np.cumsum(units.counts)[:-1])]

    assert keys(plan, dataset) == keys(before, source)
    units = np.arange(plan.num_units)
    np.testing.assert_equal(plan.sums(units), before.sums(units))


def test_the_lengths_travel_along(corpus: Path, tmp_path: Path) -> None:
    plan = mm.reshard(corpus, tmp_path / "packs", plan="64")
    dataset = mm.open_dataset(tmp_path / "packs")
    moved, old = measure_of(tmp_path / "packs"), measure_of(corpus)
    assert plan.lengths == SETTINGS
    lengths = dict(zip(contents(mm.open_dataset(corpus)), old.column("num_tokens"), strict=True))
    assert [lengths[key] for key in contents(dataset)] == moved.column("num_tokens").tolist()
    # So planning goes on from the plan of the new dataset.
    again = make_plan(moved, LIMITS, previous=plan)
    assert again.group_digests == plan.group_digests


def test_a_killed_call_goes_on_and_gives_the_same_files(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    mm.reshard(corpus, whole, plan="64", samples_per_shard=30)
    write_shard, written = module._write_shard, list[str]()

    def fail_at_the_third(job: module._Job) -> object:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(job.name)
        return write_shard(job)

    monkeypatch.setattr(module, "_write_shard", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        mm.reshard(corpus, killed, plan="64", samples_per_shard=30)
    with pytest.raises(mm.errors.ManifestError, match="the same `mmstream reshard` again"):
        mm.open_dataset(killed)
    first = (killed / written[0]).stat().st_mtime_ns
    (killed / f".{written[0]}.1-a.tmp").touch()  # a kill leaves such files
    monkeypatch.setattr(module, "_write_shard", write_shard)
    with pytest.raises(mm.ConfigError, match="holds something else"):
        mm.reshard(corpus, killed, plan="64", samples_per_shard=40)
    mm.reshard(corpus, killed, plan="64", samples_per_shard=30)
    assert (killed / written[0]).stat().st_mtime_ns == first
    assert tree(killed) == tree(whole)


def test_a_finished_call_is_not_made_again(corpus: Path, tmp_path: Path) -> None:
    dest = tmp_path / "packs"
    plan = mm.reshard(corpus, dest, plan="64")
    before = {path: path.stat().st_mtime_ns for path in dest.iterdir()}
    assert mm.reshard(corpus, dest, plan="64").group_digests == plan.group_digests
    assert before == {path: path.stat().st_mtime_ns for path in dest.iterdir()}
    with pytest.raises(mm.ConfigError, match="holds something else"):
        mm.reshard(corpus, dest, plan="64", shuffle_seed=1)


@pytest.mark.parametrize("seed", [0, None])
def test_bad_samples_and_those_taken_down_stay_behind(
    corpus: Path, tmp_path: Path, seed: int | None
) -> None:
    source, plan = mm.open_dataset(corpus), open_plan(str(corpus / "mmstream.plan.64"))
    units = plan.units(np.arange(3))
    refs = list(zip(units.shard.tolist(), units.index.tolist(), strict=True))
    keys = {source.read(*ref)["__key__"] for ref in refs}
    write_bad(source, refs[:1])
    take_down(source, refs[1:], "request 17")
    packs = mm.reshard(corpus, tmp_path / "packs", plan="64", shuffle_seed=seed)
    written = contents(mm.open_dataset(tmp_path / "packs"))
    assert keys.isdisjoint(written)
    assert packs.members.tolist() == list(range(len(written)))
    if seed is None:
        assert len(written) == plan.members.size - len(refs)
        assert packs.num_units == plan.num_units - 3


def test_folders_of_a_union_may_have_the_same_keys(tmp_path: Path) -> None:
    for name in ("a", "b"):
        mm.convert([{"text": name}], tmp_path / name, progress=False)
    union = mm.open_dataset([tmp_path / "a", tmp_path / "b"])
    mm.reshard(union, tmp_path / "new", progress=False)
    dataset = mm.open_dataset(tmp_path / "new")
    texts = {sample["__key__"]: sample["txt"] for sample in (dataset[0], dataset[1])}
    assert texts == {"1-000000001": b"a", "2-000000001": b"b"}


def test_other_processes_do_not_have_the_memory_of_this_one(corpus: Path) -> None:
    with pytest.raises(mm.ConfigError, match="only this process has its memory://"):
        mm.reshard(corpus, "memory://reshard", num_workers=2)


def test_a_plan_without_its_lengths_is_refused(corpus: Path, tmp_path: Path) -> None:
    (measure,) = corpus.glob("mmstream.measure.*")
    next(measure.iterdir()).unlink()
    with pytest.raises(FileNotFoundError, match="are not there; run `mmstream plan` again"):
        mm.reshard(corpus, tmp_path / "packs", plan="64")
    with pytest.raises(FileNotFoundError, match="run `mmstream plan` first"):
        mm.reshard(corpus, tmp_path / "packs", plan="absent")
