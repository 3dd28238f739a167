"""Bad samples never stop or unbalance a run, and are replaced alike on every topology."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream import Decode, ImageDecoder, TextDecoder
from mmstream.errors import (
    BadSampleLimitError,
    ConfigError,
    SampleError,
    ShardError,
    SkipSample,
    StorageError,
)
from tests.helpers.bad_corpus import (
    FAULTS,
    FAULTS_OF_TARS,
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
from tests.helpers.stores import watched_pipeline
from tests.helpers.topology import Step, assert_resumes_exactly, run

SOURCES = {"main": 40, "rare": 3}

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


@pytest.mark.parametrize(
    ("name", "drop_last"), [*((name, False) for name in FAULTS), ("truncated_jpeg", True)]
)
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


@given(data=st.data())
@settings(max_examples=15)
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
        for size, num_workers in ((1, 2), (2, 1), (min(3, rows), 2)):
            assert run(pipeline, size, num_workers).steps == whole
        for step in range(1, len(whole), 1 + len(whole) // 4):
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


@pytest.mark.parametrize(
    ("suffix", "change", "first", "reason"),
    [
        ("", None, 0, "no such shard"),
        ("", lambda data: data[: data.index(b"000051.") + 700], 11, "truncated"),
        (".idx", None, 0, "no index"),
        (".idx", lambda data: b"\xff" * 168, 0, "mmstream index"),
        (".idx", lambda data: data[:-16], 0, "manifest says 20"),
        (".idx", lambda data: data[:-8] + (1 << 52).to_bytes(8, "little"), 0, "truncated"),
    ],
)
def test_an_unreadable_shard_stops_the_run_unless_the_policy_skips_it(
    tmp_path, suffix, change, first, reason
):
    corpus = write_faulty(tmp_path, [40, 20, 30], ())
    path, bad = tmp_path / f"shard-000001.tar{suffix}", {(1, index) for index in range(first, 20)}
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    pipeline = make_pipeline(corpus, global_batch_size=6)
    with pytest.raises(ShardError, match=rf"shard-000001\.tar.*{reason}"):
        list(mm.Loader(pipeline))
    pipeline = replace(pipeline, bad_samples=policy(shards=True))
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, bad)
    assert {record.kind for step in steps for record in step.bad} == {"ShardError"}
    assert all(reason in record.reason for step in steps for record in step.bad)
    assert run(pipeline, 2, 2).steps == steps


class TooSmall(SkipSample):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} < {limit}")


def samples_read_alone(dataset, store):
    """The samples that were the only range of a request."""
    refs = {
        (dataset.name_of(shard), int(start), int(stop)): (shard, index)
        for shard in range(dataset.num_shards)
        for index, (start, stop) in enumerate(pairwise(dataset.shards.offsets(shard)))
    }
    alone = [request[0] for request in store.range_reads if len(request) == 1]
    return {refs[one] for one in alone if one in refs}


@pytest.mark.parametrize("skip", [SkipSample("odd"), TooSmall(1, 100)], ids=["plain", "own"])
def test_a_users_filter_is_substituted_counted_apart_and_not_read_twice(tmp_path, skip):
    def keep(sample):
        if sample["json"]["id"] % 2:
            raise skip
        return sample

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


class StrangeError(SampleError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("too dark")


@pytest.mark.parametrize("error", [ValueError("too dark"), StrangeError(1, 2)], ids=["any", "own"])
def test_a_transform_that_raises_makes_a_bad_sample_with_its_name(tmp_path, error):
    def picky(sample):
        if sample["json"]["id"] in BAD:
            raise error
        return sample

    counts = [30, 1, 0, 40, 26]
    pipeline = make_pipeline(write_faulty(tmp_path, counts, ()), transforms=(picky,))
    steps = run(pipeline).steps
    assert_epoch_is_whole(pipeline, steps, refs_of(counts, BAD))
    for record in (record for step in steps for record in step.bad):
        assert record.kind == "SampleError"
        assert "picky: " in record.reason
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, r"raise mm\.SkipSample") for value in (None, [1], "text", True)),
        *(({key: 1}, "key .*are strings") for key in (5, None, b"jpg", ("a", "b"))),
    ],
)
def test_a_transform_that_returns_no_sample_is_told_what_one_is(corpus, value, message):
    def gives(sample):
        return value

    with pytest.raises(ConfigError, match=f"gives returned .*{message}"):
        list(mm.Loader(make_pipeline(corpus, transforms=(gives,))))


def test_when_all_is_bad_the_run_stops_at_once_with_the_reason(tmp_path):
    pipeline = make_pipeline(write_faulty(tmp_path, [24], set(range(24))), global_batch_size=4)
    loader = mm.Loader(pipeline)
    with pytest.raises(
        BadSampleLimitError, match=r"no row has a good sample.*shard-000000\.tar.*JSON"
    ):
        next(iter(loader))
    assert loader.state_dict()["step"] == 0
    assert loader.pipeline.order.steps_per_epoch > 0


@pytest.mark.slow
def test_rows_that_nothing_can_fill_are_invalid_and_counted(tmp_path):
    good = 17
    corpus = write_tiny(tmp_path, [24], set(range(24)) - {good})
    pipeline = make_pipeline(corpus, global_batch_size=24, window=8)
    (step,) = run(pipeline).steps
    empty = [record.row for record in step.bad if record.substitute is None]
    assert 0 < len(empty) < 23
    assert [row for row, ok in enumerate(step.valid) if not ok] == empty
    assert set(step.keys) == {f"{good:06d}"}
    assert set(step.shown) == {(0, good)}  # also of the invalid rows: what lies in the batch
    loader = mm.Loader(pipeline)
    (batch,) = loader
    assert loader.stats.num_samples == 24
    assert loader.stats.num_bad == 23
    assert batch["json"].tolist() == [good] * 24
    assert run(pipeline, 2).steps == [step]  # ranks without a good row show that of another


@pytest.mark.parametrize(
    ("num_left_out", "action", "words"),
    [
        (4, "substitute", None),
        (5, "substitute", "left out 5 of 100 samples that were read: the others come 1.1 times"),
        (60, "substitute", "left out 60 of 100 samples that were read: the others come 2.5 times"),
        (60, "mask", "left out 60 of 100 samples that were read; leave them out before training"),
    ],
)
def test_a_filter_that_leaves_out_much_is_warned_of_once(
    tmp_path, caplog, num_left_out, action, words
):
    def few(sample):
        if sample["json"] < num_left_out:
            raise SkipSample("few")
        return sample

    settings = {"global_batch_size": 10, "bad_samples": policy(action=action)}
    loader = mm.Loader(make_pipeline(write_tiny(tmp_path, [100]), before=(few,), **settings))
    for _ in range(2):
        list(loader)
    warnings = [message for message in caplog.messages if message.startswith("filters")]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


class LeaveOut:
    """A filter of a whole source."""

    def __call__(self, sample):
        if sample["__source__"] == "rare":
            raise SkipSample("rare")
        return sample | {"draw": torch.rand(())}


@pytest.mark.slow
@pytest.mark.parametrize("action", ["substitute", "mask"])
@pytest.mark.parametrize("batching", [None, mm.Flat()])
def test_a_filter_of_a_whole_source_stops_no_rank(tmp_path, batching, action):
    folders = {name: write_corpus(tmp_path / name, [n], captioned) for name, n in SOURCES.items()}
    sources = {name: (mm.open_dataset(folder), 0.5) for name, folder in folders.items()}
    pipeline = mm.Pipeline(
        mm.Mixture(sources, epoch_steps=3),
        global_batch_size=4,
        decode=Decode(text=TextDecoder(tokenizer(), max_length=16)),
        transforms=(LeaveOut(),),
        batching=batching,
        bad_samples=policy(action=action),
    )
    whole = run(pipeline).steps
    assert not all(valid for step in whole for valid in step.valid)
    for size in (3, 4):
        assert run(pipeline, size).steps == whole
    one, *_ = mm.Loader(pipeline, world=mm.World(0, 1))
    four = [next(iter(mm.Loader(pipeline, world=mm.World(rank, 4)))) for rank in range(4)]
    assert torch.equal(torch.cat([batch["draw"] for batch in four]), one["draw"])


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
