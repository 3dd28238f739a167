"""Bad samples never stop or unbalance a run, and are replaced alike on every topology."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmstream as mm
from mmstream import Decode, ImageDecoder, TextDecoder
from mmstream.dataset.dataset import Dataset
from mmstream.errors import (
    BadSampleLimitError,
    ConfigError,
    DecodeError,
    SampleError,
    ShardError,
    SkipSample,
    StorageError,
)
from mmstream.tar import scan
from tests.helpers.bad_corpus import (
    FAULTS,
    FAULTS_OF_TARS,
    bad_json,
    make_pipeline,
    offsets,
    patch,
    policy,
    truncated_jpeg,
    write_faulty,
    write_tiny,
)
from tests.helpers.chats import tokenizer
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.pictures import ODD
from tests.helpers.stores import watched_pipeline
from tests.helpers.topology import Step, assert_resumes_exactly, run

BAD = {0, 5, 6, 29, 30, 31, 58, 70, 96}


@pytest.fixture(scope="module")
def decoders() -> Decode:
    return Decode(image=ImageDecoder(size=16), text=TextDecoder(tokenizer(), max_length=16))


def refs_of(counts: list[int], numbers: set[int]) -> set[tuple[int, int]]:
    refs: set[tuple[int, int]] = set()
    first = 0
    for shard, count in enumerate(counts):
        refs |= {(shard, n - first) for n in numbers if first <= n < first + count}
        first += count
    return refs


def assert_epoch_is_whole(
    pipeline: mm.Pipeline, steps: list[Step], bad: set[tuple[int, int]]
) -> None:
    """Full batches; the plan is the order's; each readable sample once but for substitutes."""
    order, genuine = pipeline.order, Counter()
    for step in steps:
        refs = order.refs(step.epoch, step.step)
        planned = list(zip(refs.shard.tolist(), refs.index.tolist()))
        assert step.planned == planned
        assert len(step.keys) == len(step.shown) == pipeline.global_batch_size
        records = {record.row: record for record in step.bad}
        assert [r.row for r in step.bad] == sorted(records)
        for row, ref in enumerate(planned):
            record = records.get(row)
            assert (record is not None) == (ref in bad and bool(refs.valid[row]))
            if record is None:
                assert step.valid[row] == refs.valid[row]
                assert step.shown[row] == ref or ref in bad
                genuine[ref] += step.valid[row]
                continue
            assert (record.epoch, record.step) == (step.epoch, step.step)
            assert (record.shard, record.index) == (pipeline.dataset.name_of(ref[0]), ref[1])
            assert step.valid[row] == (record.substitute is not None)
            assert step.shown[row] not in bad
            if record.substitute is not None:
                shard, index = step.shown[row]
                assert record.substitute == (pipeline.dataset.name_of(shard), index)
                assert_substitute_is_near(pipeline, step, row, bad)
    planned = {ref for step in steps for ref in step.planned}
    assert genuine == Counter(planned - bad)


def assert_substitute_is_near(pipeline, step, row, bad) -> None:
    """The first good one of the order's attempts; of another step while the window has others."""
    order = pipeline.order
    attempts = [order.substitute(step.epoch, step.step, row, n) for n in range(16)]
    chosen = next(n for n, ref in enumerate(attempts) if ref not in bad)
    assert step.shown[row] == attempts[chosen]
    window = order.window(step.epoch, int(order.windows(step.epoch, step.step)[row]))
    elsewhere = window.step != step.step
    others = set(zip(window.shard[elsewhere].tolist(), window.index[elsewhere].tolist()))
    if others and chosen < 8:
        assert step.shown[row] in others


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_substituted_and_the_epoch_stays_whole(tmp_path, decoders, name, drop_last):
    counts = [30, 1, 0, 40, 26]
    corpus = write_faulty(tmp_path, counts, BAD, FAULTS[name])
    pipeline = make_pipeline(corpus, decode=decoders, drop_last=drop_last)
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, refs_of(counts, BAD))
    kinds = {record.kind for step in steps for record in step.bad}
    assert kinds == {"SampleError" if name in FAULTS_OF_TARS else "DecodeError"}
    for record in (record for step in steps for record in step.bad):
        assert record.reason.startswith(f"{record.shard}[{record.index}] ")


def test_a_damaged_tar_header_is_the_fault_of_one_sample(tmp_path):
    corpus = write_faulty(tmp_path, [20, 20], ())
    patch(corpus, 0, int(offsets(corpus, 0)[7]), b"\0garbage" * 8)
    patch(corpus, 1, int(offsets(corpus, 1)[3]) + 124, b"99999999999\0")  # no octal number
    pipeline = make_pipeline(corpus, global_batch_size=8)
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, {(0, 7), (1, 3)})
    assert all("tar header" in record.reason for step in steps for record in step.bad)


def test_every_odd_picture_is_shown_or_substituted(tmp_path):
    files = sorted(path for path in ODD.iterdir() if path.suffix[1:] in ("jpg", "webp", "gif"))
    decoder = ImageDecoder(size=16)
    refused = set()
    for number, path in enumerate(files):
        try:
            decoder(path.read_bytes())
        except DecodeError:
            refused.add(number)
    assert 3 < len(refused) < len(files) / 2
    counts = [len(files), 40]
    corpus = write_corpus(
        tmp_path,
        counts,
        lambda n: {files[n].suffix[1:]: files[n].read_bytes()} if n < len(files) else captioned(n),
    )
    pipeline = make_pipeline(
        corpus, global_batch_size=8, decode=Decode(image=decoder), drop_last=False
    )
    assert_epoch_is_whole(pipeline, run(pipeline).steps, refs_of(counts, refused))
    for batch in mm.Loader(pipeline):
        assert batch["image"].shape == (8, 3, 16, 16)


@given(data=st.data())
@settings(max_examples=25)
def test_any_bad_samples_get_the_same_substitutes_on_every_topology_and_after_a_resume(data):
    counts = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=4), "counts")
    total, rows = sum(counts), data.draw(st.sampled_from([2, 4, 6, 12]), "rows")
    drop_last = data.draw(st.booleans(), "drop_last")
    counts[-1] += max(0, rows + 4 - total)
    bad = data.draw(st.sets(st.integers(0, sum(counts) - 1), max_size=sum(counts) // 5), "bad")
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make_pipeline(
            write_tiny(folder, counts, bad),
            global_batch_size=rows,
            drop_last=drop_last,
            shuffle=data.draw(st.booleans(), "shuffle"),
            window=data.draw(st.integers(1, 30), "window"),
            seed=data.draw(st.integers(0, 9), "seed"),
            grid=data.draw(st.sampled_from([None, (1, 2), (2, 1), (2, 2)]), "grid"),
        )
        whole = run(pipeline).steps
        assert_epoch_is_whole(pipeline, whole, refs_of(counts, bad))
        for size in {1, 2, min(3, rows)}:
            for num_workers in (1, 2):
                assert run(pipeline, size, num_workers).steps == whole
        for step in range(1, len(whole)):
            size, num_workers = 1 + step % 2, 1 + step % 3
            rest = run(
                pipeline, size, num_workers, range(step, len(whole)), num_threads=1 + step % 2
            )
            assert rest.steps == whole[step:]


@pytest.mark.slow
def test_real_workers_make_the_same_substitutes_as_one_process(tmp_path, decoders):
    corpus = write_faulty(tmp_path, [30, 1, 0, 40, 26], BAD, truncated_jpeg)
    pipeline = make_pipeline(corpus, decode=decoders)
    assert assert_resumes_exactly(
        lambda: mm.Loader(pipeline, num_workers=2), images=True, fresh=False
    ) == assert_resumes_exactly(lambda: mm.Loader(pipeline), images=True)


class FlakyDataset(Dataset):
    """Refuses each sample the first time that it is parsed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.refused = set()

    def parse(self, data, shard, index, **options):
        if (shard, index) not in self.refused:
            self.refused.add((shard, index))
            raise SampleError("a flipped bit on the way")
        return super().parse(data, shard, index, **options)


def test_samples_that_are_refused_once_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "MIN_HEADERS", 1000)  # each sample is parsed by itself
    pipeline = make_pipeline(write_faulty(tmp_path, [30, 30], ()))
    calm = run(pipeline).steps
    flaky = FlakyDataset(pipeline.dataset.manifest, pipeline.dataset.store)
    assert run(replace(pipeline, dataset=flaky)).steps == calm
    assert len(flaky.refused) == 60


def test_ranges_that_come_wrong_once_change_nothing(tmp_path):
    pipeline = make_pipeline(write_faulty(tmp_path, [30, 30], ()))
    calm = run(pipeline).steps
    seen = set()

    def wrong_once(name, bounds, answer):
        if bounds is None or (name, bounds) in seen:
            return answer
        seen.add((name, bounds))
        return b"\1" * len(answer)

    assert run(watched_pipeline(pipeline, wrong_once)[0]).steps == calm
    assert len(seen) > 1


def test_a_storage_error_is_never_substituted(tmp_path):
    corpus = write_faulty(tmp_path, [30, 30], {3, 40})
    num_ranges = 0

    def on_fire(_name, bounds, answer):
        nonlocal num_ranges
        num_ranges += bounds is not None
        return answer if num_ranges <= 3 else StorageError("the bucket is on fire")

    pipeline, store = watched_pipeline(
        make_pipeline(corpus, bad_samples=policy(shards=True)), on_fire
    )
    loader = mm.Loader(pipeline)
    with pytest.raises(StorageError, match="on fire"):
        list(loader)
    state = loader.state_dict()
    store.change = None
    assert len(list(loader)) == len(loader) - state["step"]


def lose(corpus):
    Path(corpus, "shard-000001.tar").unlink()
    return {(1, index) for index in range(20)}, "no such shard"


def cut(corpus):
    path, position = Path(corpus, "shard-000001.tar"), int(offsets(corpus, 1)[11]) + 700
    path.write_bytes(path.read_bytes()[:position])
    return {(1, index) for index in range(11, 20)}, "truncated"


def garble_index(corpus):
    Path(corpus, "shard-000001.tar.idx").write_bytes(b"\xff" * 168)
    return {(1, index) for index in range(20)}, "mmstream index"


def shorten_index(corpus):
    path = Path(corpus, "shard-000001.tar.idx")
    path.write_bytes(path.read_bytes()[:-16])
    return {(1, index) for index in range(20)}, "manifest says 20"


def lose_index(corpus):
    Path(corpus, "shard-000001.tar.idx").unlink()
    return {(1, index) for index in range(20)}, "no index"


def stretch_index(corpus):
    path = Path(corpus, "shard-000001.tar.idx")
    path.write_bytes(path.read_bytes()[:-8] + (1 << 52).to_bytes(8, "little"))
    return {(1, index) for index in range(20)}, "truncated"


@pytest.mark.parametrize(
    "damage", [lose, cut, garble_index, shorten_index, lose_index, stretch_index]
)
def test_an_unreadable_shard_stops_the_run_unless_the_policy_skips_it(tmp_path, damage):
    corpus = write_faulty(tmp_path, [40, 20, 30], ())
    bad, reason = damage(corpus)
    pipeline = make_pipeline(corpus, global_batch_size=6)
    with pytest.raises(ShardError, match=rf"shard-000001\.tar.*{reason}"):
        list(mm.Loader(pipeline))
    pipeline = replace(pipeline, bad_samples=policy(shards=True))
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, bad)
    assert {record.kind for step in steps for record in step.bad} == {"ShardError"}
    assert all(reason in record.reason for step in steps for record in step.bad)
    assert run(pipeline, 2, 2).steps == steps


def only_even(sample):
    if sample["json"]["id"] % 2:
        raise mm.SkipSample("odd")
    return sample


class TooSmall(SkipSample):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} < {limit}")


def with_own_skip(sample):
    if sample["json"]["id"] % 2:
        raise TooSmall(sample["json"]["id"], 100)
    return sample


def samples_read_alone(dataset, store):
    """The samples that were the only range of a request."""
    refs = {
        (dataset.name_of(shard), int(start), int(stop)): (shard, index)
        for shard in range(dataset.num_shards)
        for index, (start, stop) in enumerate(pairwise(dataset.offsets(shard)))
    }
    alone = [request[0] for request in store.range_reads if len(request) == 1]
    return {refs[one] for one in alone if one in refs}


@pytest.mark.parametrize("keep", [only_even, with_own_skip])
def test_a_users_filter_is_substituted_counted_apart_and_not_read_twice(tmp_path, keep):
    corpus = write_faulty(tmp_path, [30, 31], {8})
    strict = policy(max_fraction=0.1, min_samples=1, max_consecutive=1)
    pipeline, store = watched_pipeline(
        make_pipeline(corpus, transforms=(keep,), bad_samples=strict)
    )
    loader = mm.Loader(pipeline, num_threads=1)
    batches = list(loader)
    read_alone = samples_read_alone(pipeline.dataset, store)
    assert_epoch_is_whole(
        pipeline, run(pipeline).steps, refs_of([30, 31], {8} | {n for n in range(61) if n % 2})
    )
    assert all(row["id"] % 2 == 0 for batch in batches for row in batch["json"])
    planned = [ref for batch in batches for ref in batch["__lineage__"].planned]
    num_odd = sum((30 * shard + index) % 2 for shard, index in planned)
    assert loader.stats.num_skipped == num_odd
    assert loader.stats.num_bad == loader.stats.bad["DecodeError"] <= 1
    assert loader.stats.bad["SkipSample"] == num_odd
    assert loader.stats.num_samples == 60
    attempts = [
        ref
        for b in batches
        for r in b["__lineage__"].bad
        for n in range(16)
        if (ref := pipeline.order.substitute(0, r.step, r.row, n))
    ]
    assert read_alone - {(0, 8)} <= set(attempts)


def planned_bad(sample):
    if sample["json"]["id"] in BAD:
        raise ValueError("too dark")
    return sample


def own_error(sample):
    if sample["json"]["id"] in BAD:
        raise StrangeError(1, 2)
    return sample


class StrangeError(SampleError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("too dark")


@pytest.mark.parametrize("transform", [planned_bad, own_error])
def test_a_transform_that_raises_makes_a_bad_sample_with_its_name(tmp_path, transform):
    counts = [30, 1, 0, 40, 26]
    pipeline = make_pipeline(write_faulty(tmp_path, counts, ()), transforms=(transform,))
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, refs_of(counts, BAD))
    for record in (record for step in steps for record in step.bad):
        assert record.kind == "SampleError"
        assert f"{transform.__name__}: " in record.reason
        assert record.reason.endswith("too dark")


@pytest.mark.parametrize(
    "error", [NameError, ImportError, AttributeError, AssertionError, MemoryError, ConfigError,
              StorageError, KeyboardInterrupt]
)  # fmt: skip
def test_a_bug_in_a_transform_stops_the_run_as_what_it_is(corpus, error):
    def broken(sample):
        raise error("a bug")

    loader = mm.Loader(make_pipeline(corpus, transforms=(broken,)))
    with pytest.raises(error, match="a bug"):
        list(loader)
    assert loader.state_dict()["step"] == 0


@pytest.mark.parametrize("value", [None, [1], "text", True])
def test_a_transform_that_returns_no_sample_is_told_how_to_leave_one_out(corpus, value):
    with pytest.raises(ConfigError, match=r"gives returned .*raise mm\.SkipSample"):
        list(mm.Loader(make_pipeline(corpus, transforms=(gives(value),))))


@pytest.mark.parametrize("key", [5, None, b"jpg", ("a", "b")])
def test_a_transform_whose_keys_are_no_strings_is_named(corpus, key):
    with pytest.raises(ConfigError, match=r"gives returned a sample with the key .*are strings"):
        list(mm.Loader(make_pipeline(corpus, transforms=(gives({key: 1}),))))


def gives(value):
    def gives(sample):
        return value

    return gives


def forgetful(sample):
    return {"json": sample["json"]}


def destructive(sample):
    for name in list(sample):
        del sample[name]
    return sample


@pytest.mark.parametrize("transform", [forgetful, destructive])
def test_lineage_survives_a_transform_that_drops_it(corpus, transform):
    plain = run(make_pipeline(corpus)).steps
    assert run(make_pipeline(corpus, transforms=(transform,))).steps == plain


def test_when_all_is_bad_the_run_stops_at_once_with_the_reason(tmp_path):
    pipeline = make_pipeline(write_faulty(tmp_path, [24], set(range(24))), global_batch_size=4)
    loader = mm.Loader(pipeline)
    with pytest.raises(
        BadSampleLimitError, match=r"no row has a good sample.*shard-000000\.tar.*JSON"
    ):
        next(iter(loader))
    assert loader.state_dict()["step"] == 0
    assert loader.pipeline.order.steps_per_epoch > 0


def test_rows_that_nothing_can_fill_are_invalid_and_counted(tmp_path):
    good = 17
    corpus = write_tiny(tmp_path, [60], set(range(60)) - {good})
    pipeline = make_pipeline(corpus, global_batch_size=60, window=8)
    (step,) = run(pipeline).steps
    empty = [record.row for record in step.bad if record.substitute is None]
    assert 0 < len(empty) < 59
    assert [row for row, ok in enumerate(step.valid) if not ok] == empty
    assert set(step.keys) == {f"{good:06d}"}
    assert set(step.shown) == {(0, good)}  # also of the invalid rows: what lies in the batch
    loader = mm.Loader(pipeline)
    (batch,) = loader
    assert loader.stats.num_samples == 60
    assert loader.stats.num_bad == 59
    assert batch["json"].tolist() == [good] * 60


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_bad_sample_of_the_padded_tail_is_counted_once(tmp_path, size):
    everything = set(range(26))
    pipeline = make_pipeline(write_tiny(tmp_path, [26], {7}), drop_last=False)
    tails = set()
    for seed in range(40):  # until the bad one lies in the tail, whose samples come 6 times each
        pipeline = replace(pipeline, seed=seed)
        tails = set(run(pipeline, steps=range(2, 3)).steps[0].planned)
        if (0, 7) in tails:
            break
    assert (0, 7) in tails
    ranks = [mm.Loader(pipeline, world=mm.World(rank, size)) for rank in range(size)]
    batches = [batch for loader in ranks for batch in loader]
    assert sum(loader.stats.num_bad for loader in ranks) == 1
    assert sum(loader.stats.num_samples for loader in ranks) == 26
    shown = [n for b in batches for n, ok in zip(b["json"].tolist(), b["__valid__"].tolist()) if ok]
    assert len(shown) == 26
    assert set(shown) == everything - {7}


def test_bad_samples_leave_no_trace_in_the_pixels_of_others(tmp_path):
    decode = Decode(image=ImageDecoder(size=16))
    clean = make_pipeline(write_faulty(tmp_path / "a", [60], ()), decode=decode)
    dirty = make_pipeline(write_faulty(tmp_path / "b", [60], BAD, truncated_jpeg), decode=decode)
    pixels = {
        key: image
        for batch in mm.Loader(clean)
        for key, image in zip(batch["__key__"], batch["image"])
    }
    for batch in mm.Loader(dirty, num_threads=3):
        for key, image in zip(batch["__key__"], batch["image"]):
            assert torch.equal(image, pixels[key])


def test_a_key_that_is_no_text_is_no_reason_to_stop(tmp_path):
    corpus = Path(write_faulty(tmp_path, [12], {4}, bad_json))
    name = b"000004.jpg"
    header = int(offsets(corpus, 0)[4])
    data = Path(corpus, "shard-000000.tar").read_bytes()
    assert data[header : header + 10] == name
    stop = int(offsets(corpus, 0)[5])
    for position in range(header, stop, 512):  # a key in Latin-1, with checksums to match
        block = bytearray(data[position : position + 512])
        if block[257:262] == b"ustar":
            block[:6] = b"caf\xe9-4"
            total = sum(block) - sum(block[148:156]) + 8 * 32
            block[148:156] = b"%06o\0 " % total
            patch(corpus, 0, position, bytes(block))
    quarantine = tmp_path / "bad"
    pipeline = make_pipeline(
        str(corpus), global_batch_size=4, bad_samples=policy(quarantine=str(quarantine))
    )
    assert_epoch_is_whole(pipeline, run(pipeline).steps, {(0, 4)})
    assert len(list(mm.Loader(pipeline))) == 3
    assert len((quarantine / "quarantine-rank0.jsonl").read_bytes().splitlines()) == 1


def rarely(sample):
    if int(sample["__key__"]) % 12:
        raise mm.SkipSample("not a twelfth")
    return sample


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_nothing_fills_are_the_same_on_every_topology(tmp_path, size):
    corpus = write_corpus(tmp_path, [50, 46])
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=4, transforms=(rarely,))
    alone = run(pipeline)
    assert any(not ok for step in alone.steps for ok in step.valid)
    assert run(pipeline, size).steps == alone.steps
