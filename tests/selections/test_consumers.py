"""What takes a dataset takes a view of one, and sees the chosen samples alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.dataset.bad_list import take_down
from mmstream.dataset.verify import verify
from mmstream.order.selection import Selection
from mmstream.reading.plan import epoch_reads, window_bytes
from mmstream.reading.range_cache import needs_of
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import captioned, equal_samples, write_corpus
from tests.helpers.packed_texts import MAX_TOKENS, length_of, write_texts

COUNTS = (7, 0, 31, 2, 18)
POLICY = mm.BadSamplePolicy(quarantine=None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("consumers") / "corpus", COUNTS, checksums=True)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return write_texts(tmp_path / "texts", [40, 0, 30, 50])


def keys(dataset: mm.Dataset) -> list[str]:
    return [sample["__key__"] for sample in dataset]


def keys_of_epoch(pipeline: mm.Pipeline, **options: Any) -> list[str]:
    loader = mm.Loader(pipeline, num_workers=0, **options)
    return [key for batch in loader for key in np.array(batch["__key__"])[batch["__valid__"]]]


# -- looking ---------------------------------------------------------------------------------------


def test_statistics_measure_chosen_samples_only(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    view = dataset[1::2]
    lengths = {
        sample["__key__"]: sum(len(v) for v in sample.values() if isinstance(v, bytes))
        for sample in dataset
    }
    stats = mm.statistics(view, 1000)
    assert (stats.num_samples, stats.num_measured) == (len(view), len(view))
    assert sorted(stats.values["sample bytes"]) == sorted(lengths[key] for key in keys(view))
    some, again = (mm.statistics(view, 5, seed=3).values["sample bytes"] for _ in range(2))
    assert len(some) == 5
    assert some.tolist() == again.tolist()
    mixture = mm.Mixture({"a": (view, 1), "b": (dataset[:1], 1)}, stop="all")
    assert mm.statistics(mixture, 1000).num_measured == len(mixture) == len(view) + 1


def test_a_view_is_shown_with_its_own_counts_and_bytes(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    view = dataset[:20]
    shown = mm.show(view)
    assert "20 chosen of 58 samples" in repr(shown)
    assert keys(dataset)[25] not in shown.html
    assert 0 < view.num_bytes < dataset.num_bytes == dataset.manifest.num_bytes
    assert view.num_bytes + dataset.without(view).num_bytes == pytest.approx(
        dataset.num_bytes, rel=0.05
    )
    mixture = mm.Mixture({"a": (view, 1), "b": (dataset[20:], 1)}, stop="all")
    assert "a (20 samples" in repr(mixture)


def test_verify_checks_all_stored_samples(corpus: str, tmp_path: Path) -> None:
    url = write_corpus(tmp_path / "c", [5, 5], checksums=True)
    view = mm.open_dataset(url)[:2]
    path = tmp_path / "c" / "shard-000001.tar"
    path.write_bytes(path.read_bytes().replace(b"caption 7", b"caption 8"))
    assert any("shard-000001" in problem.reason for problem in verify(view))
    assert not list(verify(mm.open_dataset(corpus)[:2]))


# -- what a run reads ------------------------------------------------------------------------------


def test_the_share_of_gaps_is_that_of_the_bits() -> None:
    rng = np.random.default_rng(0)
    for counts in ((8, 8, 16), (1, 0, 7, 9), (600, 3)):
        masks = [rng.random(count) < 0.6 for count in counts]
        has_some = [mask for mask in masks if mask.any()]
        firsts = sum(int((mask & ~np.append(False, mask[:-1])).sum()) for mask in has_some)
        num_chosen = sum(int(mask.sum()) for mask in has_some)
        expected = (firsts - len(has_some)) / max(1, num_chosen - len(has_some))
        selection = Selection.of_shards(masks, np.array(counts))
        assert selection.gap_share == pytest.approx(expected)
    assert Selection.of_all(np.array([8, 9])).gap_share == 0


def test_windows_and_estimates_count_chosen_bytes() -> None:
    dataset = equal_samples(200_000, 20_480)
    tenth = dataset.sample(0.1)
    assert tenth.num_bytes == pytest.approx(len(tenth) * 20_480, rel=0.01)
    for view in (tenth, dataset[:20_000]):
        order = view.plan_order(global_batch_size=256)
        reads = epoch_reads(view, order, [0, 256])
        assert reads is not None
        assert reads.num_bytes == pytest.approx(len(view) * 20_480, rel=0.02)
        assert window_bytes(view, order, 256) <= view.num_bytes * 1.01
    scattered, together = (
        epoch_reads(view, view.plan_order(global_batch_size=256), [0, 256])
        for view in (tenth, dataset[:20_000])
    )
    assert scattered is not None
    assert together is not None
    assert scattered.requests_per_gb > 8 * together.requests_per_gb


@pytest.mark.slow
@pytest.mark.s3
def test_requests_and_bytes_are_those_that_info_foresees(s3: str) -> None:
    """Of three epochs, in which the reader runs ahead of the last one: requests for each byte."""
    url = write_corpus(
        f"{s3}/views", [600] * 3, lambda n: {"bin": bytes([n % 251]) * (2000 + n * 37 % 2000)}
    )
    dataset = mm.open_dataset(url)
    for view in (dataset.sample(1 / 3), dataset[::2]):
        bounds = [view.shards.bounds(n, view.indexes_of(n)) for n in range(view.num_shards)]
        chosen_bytes = sum(int((of.stop - of.start).sum()) for of in bounds)
        pipeline = mm.Pipeline(view, global_batch_size=4, window_bytes=600_000)
        reads = epoch_reads(view, pipeline.order, [0, 4])
        assert reads is not None
        loader = mm.Loader(pipeline, num_workers=0)
        for _ in range(3):
            for _ in loader:
                pass
        transfers = loader.stats.transfers
        loader.close()
        num_epochs = transfers.num_bytes / chosen_bytes  # the gaps that are read among them
        assert num_epochs <= 1.3 * 4
        num_requests = transfers.num_requests / num_epochs
        assert num_requests == pytest.approx(reads.num_requests, rel=0.1)


def test_views_of_one_dataset_share_its_place_in_the_node_cache(s3_like: mm.Dataset) -> None:
    half, rest = s3_like.split(0.5)
    mixture = mm.Mixture({"half": (half, 1), "rest": (rest, 1)}, stop="all")
    order = mixture.plan_order(global_batch_size=2)
    (needed,) = needs_of(mixture, order, 1.0).values()
    assert needed == pytest.approx(s3_like.num_bytes, rel=0.05)
    (alone,) = needs_of(half, half.plan_order(global_batch_size=2), 1.0).values()
    assert alone == half.num_bytes


@pytest.fixture
def s3_like() -> mm.Dataset:
    dataset = equal_samples(1000, 10_240)
    dataset.has_checksums = True
    return dataset


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"zero_copy": True}, {"shuffle": False}])
def test_a_loader_shows_each_chosen_sample_once(corpus: str, options: dict[str, Any]) -> None:
    view = mm.open_dataset(corpus).sample(0.6)
    pipeline = mm.Pipeline(view, global_batch_size=4, drop_last=False, **options)
    assert sorted(keys_of_epoch(pipeline)) == keys(view)


def test_a_webdataset_pipeline_has_the_chosen_samples(corpus: str) -> None:
    view = mm.open_dataset(corpus)[::3]
    stream = mm.Pipeline(view, global_batch_size=4, drop_last=False).as_webdataset()
    assert sorted(sample["__key__"] for sample in stream) == keys(view)


def _draw(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"draw": float(mm.sample_rng(sample).random())}


def test_a_sample_has_the_same_draws_in_a_view_as_without_it(corpus: str) -> None:
    dataset = mm.open_dataset(corpus)
    draws = [
        {
            key: draw
            for batch in mm.Loader(
                mm.Pipeline(data, global_batch_size=2, transforms=(_draw,), drop_last=False),
                num_workers=0,
            )
            for key, draw in zip(batch["__key__"], batch["draw"].tolist(), strict=True)
        }
        for data in (dataset, dataset.sample(0.5))
    ]
    of_all, of_view = draws
    assert 0 < len(of_view) < len(of_all)
    assert of_view == {key: of_all[key] for key in of_view}


# -- mixtures --------------------------------------------------------------------------------------


def test_a_mixture_says_how_many_samples_its_sources_share(
    corpus: str, texts: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, others = mm.open_dataset(corpus), mm.open_dataset(texts)
    sources = {"all": (dataset, 1), "some": (dataset[:20], 1), "odd": (dataset[1::2], 1)}
    mixture = mm.Mixture({**sources, "other": (others, 1)}, stop="all")
    shared = [record.getMessage() for record in caplog.records]
    assert shared == [
        "Mixture: sources 'all' and 'some' share 20 samples",
        "Mixture: sources 'all' and 'odd' share 29 samples",
        "Mixture: sources 'some' and 'odd' share 10 samples",
    ]
    caplog.clear()
    mm.Pipeline(mixture, global_batch_size=2)
    first, rest = dataset.split(0.5)
    mm.Mixture({"first": (first, 1), "rest": (rest, 1)}, stop="all")
    assert not caplog.records


# -- what is written -------------------------------------------------------------------------------


def test_a_bake_of_a_view_has_the_steps_of_the_view(corpus: str, tmp_path: Path) -> None:
    dataset = mm.open_dataset(corpus)
    dataset.bad = np.array([(0, 1), (0, 2), (4, 17)])
    view = dataset.sample(0.6)
    settings: dict[str, Any] = {"global_batch_size": 4, "bad_samples": POLICY, "seed": 2}
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = mm.Pipeline(view, decode=decode, **settings)
    report = mm.bake(pipeline, tmp_path / "baked", progress=False)
    assert (report.num_samples, report.num_shards) == (len(view), len(COUNTS))
    baked = mm.open_dataset(tmp_path / "baked")
    assert len(baked) == len(view)
    assert baked.corpus.num_samples == view.corpus.num_samples
    assert not list(verify(baked))
    new = mm.Pipeline(baked, decode=mm.Decode.baked(), **settings)
    assert new.order.grid == pipeline.order.grid
    for first, again in zip(
        mm.Loader(pipeline, num_workers=0), mm.Loader(new, num_workers=0), strict=True
    ):
        assert first["__key__"] == again["__key__"]
        assert first["image"].equal(again["image"])
    part = mm.Pipeline(baked[10:], decode=mm.Decode.baked(), **settings)
    shown = {int(key) for key in keys_of_epoch(part)}
    assert shown <= {int(sample["__key__"]) for sample in view[10:]}
    assert mm.bake(pipeline, tmp_path / "baked", progress=False).was_finished
    other = mm.Pipeline(dataset[:40], decode=decode, **settings)
    with pytest.raises(mm.ConfigError, match=r"baked otherwise: source\.selection"):
        mm.bake(other, tmp_path / "baked", progress=False)


@pytest.mark.parametrize("seed", [None, 0])
def test_reshard_writes_the_chosen_samples_side_by_side(
    corpus: str, tmp_path: Path, seed: int | None
) -> None:
    dataset = mm.open_dataset(corpus)
    dataset.bad = np.array([(0, 1), (2, 3), (4, 17)])
    view = dataset[1::2]
    good = [key for key in keys(view) if int(key) not in (1, 10, 57)]
    assert mm.reshard(view, tmp_path / "new", shuffle_seed=seed, progress=False) is None
    new = mm.open_dataset(tmp_path / "new")
    assert (keys(new) if seed is None else sorted(keys(new))) == good
    assert seed is None or keys(new) != good
    assert not list(verify(new))
    by_key = {sample["__key__"]: sample for sample in dataset}
    for sample in new:
        assert sample["jpg"] == by_key[sample["__key__"]]["jpg"]
    mm.reshard(view, tmp_path / "new", shuffle_seed=seed, progress=False)
    with pytest.raises(mm.ConfigError, match="holds something else"):
        mm.reshard(dataset[:9], tmp_path / "new", shuffle_seed=seed, progress=False)
    with pytest.raises(mm.ConfigError, match="no samples to write"):
        mm.reshard(dataset[:0], tmp_path / "none", progress=False)


def test_keys_of_a_dataset_that_was_written_in_another_order_are_found(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {number}"}) for number in range(200)]
    rows.write_text("\n".join(lines) + "\n")
    mm.convert(rows, tmp_path / "shards", samples_per_shard=50, progress=False)
    source = mm.open_dataset(tmp_path / "shards")
    mm.reshard(source, tmp_path / "new", progress=False)
    new = mm.open_dataset(tmp_path / "new")
    assert keys(new) != keys(source)
    for key in keys(source)[::37]:
        assert new[key]["__key__"] == key


def test_duplicates_and_leaks_are_of_chosen_samples(tmp_path: Path) -> None:
    url = write_corpus(tmp_path / "c", [10, 0, 10], lambda n: captioned(n % 8))
    dataset = mm.open_dataset(url)
    assert mm.find_duplicates(dataset, progress=False).num_pairs["pair"] == 12
    assert mm.find_duplicates(dataset[:8], progress=False).num_pairs["pair"] == 0
    assert mm.find_duplicates(dataset[4:13], progress=False).num_pairs["pair"] == 1
    train, val = dataset[:6], dataset[6:]
    leaks = mm.find_leaks(train, val, kinds=["text", "media"], progress=False)
    assert leaks.num_pairs == {"media": 10, "text": 10}
    clean = mm.find_leaks(dataset[:8:2], dataset[1::2], kinds=["text", "media"], progress=False)
    assert clean.num_pairs == {"media": 0, "text": 0}
    pairs = list(leaks.pairs())
    assert {pair.first.dataset for pair in pairs} == {"a"}
    assert {int(pair.again.key) for pair in pairs} <= set(range(6, 20))
    both = mm.find_duplicates({"train": train, "val": val}, progress=False)
    assert both.across("pair").again.size == 10


# -- packs -----------------------------------------------------------------------------------------


def packs_of(dataset: mm.Dataset | mm.Mixture, **options: Any) -> mm.Pipeline:
    text = mm.TextDecoder(byte_tokenizer(), max_length=10 * MAX_TOKENS)
    return mm.Pipeline(
        dataset,
        global_batch_size=2,
        decode=mm.Decode(text=text),
        batching=mm.Pack(MAX_TOKENS, **options),
        bad_samples=POLICY,
    )


def test_a_plan_over_a_view_packs_its_samples_alone(texts: str) -> None:
    dataset = mm.open_dataset(texts)
    dataset.bad = np.array([(0, 3), (0, 4), (3, 7)])
    view = dataset.sample(0.5)
    measure = mm.plan(packs_of(view), measure_only=True, progress=False)
    is_measured = measure.column("num_tokens") >= 0
    assert np.flatnonzero(is_measured).tolist() == [int(key) for key in keys(view)]
    expected = [length_of(int(key)) + 2 for key in keys(view)]
    assert measure.column("num_tokens")[is_measured].tolist() == expected
    plan = mm.plan(packs_of(view), progress=False)
    pipeline = packs_of(view)
    assert pipeline.order.plan.digest == plan.digest
    good = sorted({int(key) for key in keys(view)} - {3, 4, 77})
    assert sorted(plan.members.tolist()) == good
    documents = [key for batch in mm.Loader(pipeline, num_workers=0) for key in batch["__key__"]]
    assert len(set(documents)) == len(documents) > 10
    assert {int(key) for key in documents} <= set(good)
    assert mm.plan(packs_of(view), progress=False).digest == plan.digest  # goes on, and has all


def test_a_plan_of_other_chosen_samples_is_refused(texts: str) -> None:
    dataset = mm.open_dataset(texts)
    half, rest = dataset.split(0.5)
    of_half = mm.plan(packs_of(half), name="half", progress=False)
    of_all = mm.plan(packs_of(dataset), name="all", progress=False)
    assert packs_of(half, plan="half").order.num_units == of_half.num_units
    for data, plan in ((rest, "half"), (dataset, "half"), (half, "all"), (half, of_all)):
        with pytest.raises(mm.ConfigError, match=r"other chosen samples.*run mm\.plan"):
            _ = packs_of(data, plan=plan).order
    with pytest.raises(mm.ConfigError, match=r"no plan .* with this view"):
        _ = packs_of(rest).order
    with pytest.raises(mm.ConfigError, match="plan of other settings"):
        mm.plan(packs_of(rest), name="half", progress=False)


def test_a_state_of_packs_needs_the_selection_of_its_plan(texts: str) -> None:
    dataset = mm.open_dataset(texts)
    half, rest = dataset.split(0.5)
    for view in (half, rest):
        mm.plan(packs_of(view), progress=False)
    loader = mm.Loader(packs_of(half), num_workers=0)
    states, batches = zip(
        *((loader.state_dict(), batch["__key__"]) for batch in loader), strict=True
    )
    again = mm.Loader(packs_of(half), num_workers=0)
    again.load_state_dict(state := states[3])
    tail = [batch["__key__"] for batch in again]
    assert tail == list(batches[-len(tail) :])
    with pytest.raises(mm.StateError, match="other packs"):
        mm.Loader(packs_of(rest), num_workers=0).load_state_dict(state)


def test_packs_of_a_view_are_written_as_a_whole_dataset(texts: str, tmp_path: Path) -> None:
    view = mm.open_dataset(texts).sample(0.5)
    before = mm.plan(packs_of(view), name="half", progress=False)
    plan = mm.reshard(view, tmp_path / "packs", plan="half", progress=False)
    new = mm.open_dataset(tmp_path / "packs")
    assert sorted(keys(new)) == sorted(f"{n:06d}" for n in before.members.tolist())
    assert packs_of(new, plan="half").order.plan.digest == plan.digest
    assert plan.members.tolist() == list(range(len(new)))


def test_a_mixture_of_views_is_packed(texts: str, caplog: pytest.LogCaptureFixture) -> None:
    half, rest = mm.open_dataset(texts).split(0.5)
    mixture = mm.Mixture({"half": (half, 1), "rest": (rest, 2)}, epoch_steps=6)
    with caplog.at_level(logging.INFO, "mmstream"):
        plans = mm.plan(packs_of(mixture, weights_of="samples"), progress=False)
    assert plans.keys() == {"half", "rest"}
    order = packs_of(mixture, weights_of="samples").order
    num_shards = half.num_shards
    shards = np.concatenate([order.refs(0, step).shard for step in range(6)])
    indexes = np.concatenate([order.refs(0, step).index for step in range(6)])
    for number, view in enumerate((half, rest)):
        is_own = shards // num_shards == number
        assert view.selection is not None
        assert view.selection.has(shards[is_own] % num_shards, indexes[is_own]).all()


def test_draws_are_refused_wherever_a_view_begins(tmp_path: Path) -> None:
    def longer(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"txt": sample["txt"] + b"y" * int(mm.sample_rng(sample).integers(20))}

    pipeline = mm.Pipeline(
        mm.open_dataset(write_texts(tmp_path / "long", [100]))[70:],
        global_batch_size=2,
        before=(longer,),
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=640)),
        batching=mm.Pack(MAX_TOKENS),
    )
    with pytest.raises(mm.ConfigError, match="depends on random draws"):
        mm.plan(pipeline, progress=False)


@pytest.mark.parametrize("are_taken_down", [False, True])
def test_nothing_is_planned_or_baked_of_no_samples(
    texts: str, tmp_path: Path, are_taken_down: bool
) -> None:
    data = mm.open_dataset(texts)[:0]
    if are_taken_down:
        data = mm.open_dataset(texts)
        take_down(data, data.refs(np.arange(len(data))), "all")
        data = mm.open_dataset(texts)
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), max_length=MAX_TOKENS))
    packed = mm.Pipeline(data, global_batch_size=2, decode=decode, batching=mm.Pack(MAX_TOKENS))
    with pytest.raises(mm.ConfigError, match=r"plan: <Dataset .* has no samples to measure"):
        mm.plan(packed)
    with pytest.raises(mm.ConfigError, match=r"bake: <Dataset .* has no samples to write"):
        mm.bake(packed, tmp_path / "baked")
    assert not (tmp_path / "baked").exists()
