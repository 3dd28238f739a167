"""`Pipeline(repeat=n)`: each sample in n rows of one step, read and transformed once."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Sized
from importlib.metadata import distribution
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import Sampler

import mmstream as mm
from mmstream.audit import check_logs, log_files, read_lineage, steps_logged
from mmstream.order import Order
from mmstream.ranks import World, rows_of_rank
from tests.helpers.audit_logs import write_logs
from tests.helpers.bad_corpus import make_pipeline, write_faulty, write_tiny
from tests.helpers.corpora import write_corpus
from tests.helpers.topology import assert_resumes_exactly, described, joined, run

N = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), [30, 20, 14])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return write_faulty(tmp_path_factory.mktemp("faulty"), [30, 20, 14], {0, 5, 31, 58})


def repeated(corpus, groups=4, **given):
    return make_pipeline(corpus, global_batch_size=groups * N, repeat=N, **given)


def times_n(values):
    return list(chain.from_iterable([value] * N for value in values))


@pytest.mark.parametrize("settings", [{}, {"drop_last": False}, {"shuffle": False}])
def test_a_step_shows_each_sample_of_the_plain_step_n_times_in_a_row(tiny, settings):
    plain, groups = (
        run(pipeline).steps
        for pipeline in (
            make_pipeline(tiny, global_batch_size=4, **settings),
            repeated(tiny, **settings),
        )
    )
    for one, many in zip(plain, groups, strict=True):
        assert many.keys == times_n(one.keys)
        assert many.valid == times_n(one.valid)
        assert many.planned == one.planned
    seen = [ref for step in groups for ref in step.planned]
    assert len(seen) == len(groups) * 4
    assert len(set(seen)) == min(64, len(seen))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_say_their_number_among_those_of_their_sample(tiny, num_workers):
    loader = mm.Loader(repeated(tiny), num_workers=num_workers)
    assert len(loader) == 64 // 4
    for batch in loader:
        assert batch["__repeat__"].tolist() == list(range(N)) * 4
        assert batch["json"].tolist() == times_n(batch["json"][::N].tolist())
        assert len(batch["__valid__"]) == 4 * N
    loader.close()
    assert loader.stats.num_samples == 64


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_ranks_have_whole_groups_and_the_groups_of_a_plain_order(
    counts, groups, repeat, size, drop_last
):
    groups = max(groups, size)
    if sum(counts) < groups and drop_last:
        return
    given = {"seed": 2, "drop_last": drop_last}
    plain = Order.from_counts(counts, global_batch_size=groups, **given)
    order = Order.from_corpus(
        plain.corpus, global_batch_size=groups * repeat, repeat=repeat, **given
    )
    parts = [
        rows_of_rank(order.global_batch_size, World(rank, size), "balanced", order.repeat)
        for rank in range(size)
    ]
    for step in range(order.steps_per_epoch):
        rows = np.concatenate([order.refs(1, step, part).index for part in parts])
        assert rows.tolist() == plain.refs(1, step).index.tolist()
    saved = json.loads(json.dumps(order.identity()))
    assert saved["global_batch_size"] == groups * repeat
    assert Order.from_saved(saved, plain.corpus).identity() == order.identity()


@pytest.mark.parametrize("size", [2, 3])
def test_global_batches_are_the_same_on_any_ranks_and_workers(faulty, size):
    pipeline = repeated(faulty, drop_last=False)
    one = run(pipeline).steps
    assert run(pipeline, size, num_workers=2).steps == one


@pytest.mark.slow
def test_a_resume_at_every_step_equals_the_rest(faulty):
    assert_resumes_exactly(lambda: mm.Loader(repeated(faulty, drop_last=False)))


def test_a_sample_is_transformed_once_and_its_rows_are_independent(tiny):
    calls = []

    def add(sample):
        calls.append(sample["__key__"])
        frozen = torch.arange(8.0)[2:4]  # a view of a larger memory
        return sample | {
            "tensor": frozen,
            "array": np.arange(3),
            "nested": {"list": [torch.zeros(1), {"deep": [1]}], "pair": (np.zeros(1), "text")},
        }

    def scribble(samples):
        for number, sample in enumerate(samples):
            assert sample["tensor"].tolist() == [2.0, 3.0]
            assert sample["array"].tolist() == [0, 1, 2]
            assert sample["nested"]["list"][0].item() == sample["nested"]["pair"][0].item() == 0
            assert sample["nested"]["list"][1] == {"deep": [1]}
            assert sample["tensor"].untyped_storage().nbytes() <= 32
            sample["tensor"] += number
            sample["array"] += number
            sample["nested"]["list"][0] += 1
            sample["nested"]["list"][1]["deep"].append(2)
            sample["nested"]["pair"][0][:] = 1
        return {"number": torch.tensor([sample["__repeat__"] for sample in samples])}

    loader = mm.Loader(repeated(tiny, transforms=(add,), collate=scribble), num_threads=1)
    batch = next(iter(loader))
    assert batch["number"].tolist() == batch["__repeat__"].tolist()
    assert calls[:4] == batch["__key__"][::N]


def test_lists_of_a_batch_share_nothing(tiny):
    row = next(iter(mm.Loader(repeated(tiny, transforms=(with_own_list,)))))["own"]
    row[0].append(1)
    assert row[1] == row[2] == []


def test_what_cannot_be_copied_is_named(tiny):
    def add(sample):
        return sample | {"lock": threading.Lock()}

    loader = mm.Loader(repeated(tiny, transforms=(add,), collate=lambda samples: {}))
    with pytest.raises(mm.ConfigError, match=r"shard-.*\.tar\[\d+\] \d+\.lock: repeat= copies"):
        next(iter(loader))


def with_own_list(sample):
    return sample | {"own": []}


def test_pictures_and_texts_are_those_of_the_plain_batch(tmp_path):
    dataset = mm.open_dataset(write_corpus(tmp_path / "corpus", [8, 6]))
    decode = mm.Decode(image=mm.ImageDecoder(size=16, crop="random"))
    plain, many = (
        next(
            iter(mm.Loader(mm.Pipeline(dataset, global_batch_size=4 * n, repeat=n, decode=decode)))
        )
        for n in (1, N)
    )
    assert torch.equal(many["image"], plain["image"].repeat_interleave(N, dim=0))
    assert many["txt"] == times_n(plain["txt"])
    many["image"][0] = 0
    assert not torch.equal(many["image"][0], many["image"][1])


@pytest.mark.parametrize("action", ["substitute", "mask"])
def test_a_bad_sample_counts_once_and_its_substitute_fills_the_group(faulty, action):
    policy = mm.BadSamplePolicy(action=action, max_fraction=1.0, max_consecutive=0, quarantine=None)
    loader = mm.Loader(repeated(faulty, bad_samples=policy))
    masked = 0
    for batch in loader:
        for group in batch["__valid__"].view(-1, N):
            assert len(set(group.tolist())) == 1
            masked += not group[0]
        for group in range(4):
            assert len(set(batch["__key__"][group * N : group * N + N])) == 1
    assert loader.stats.num_bad == 4
    assert masked == (4 if action == "mask" else 0)


def test_split_rows_cuts_between_groups_only(tiny):
    batch = next(iter(mm.Loader(repeated(tiny))))
    parts = mm.split_rows(batch, 3)
    assert [len(part["__valid__"]) for part in parts] == [N, N, 2 * N]
    assert [len(part["__lineage__"].planned) for part in parts] == [1, 1, 2]
    assert [part["__lineage__"].start for part in parts] == [0, 1, 2]
    for part in parts:
        assert part["__repeat__"][0] == 0
        assert part["__repeat__"][-1] == N - 1
    assert sum((part["__key__"] for part in parts), []) == batch["__key__"]
    assert len(mm.split_rows(batch, 100)) == 4
    assert [len(half["__valid__"]) for half in mm.split_rows(parts[2], 2)] == [N, N]


def test_a_mixture_counts_groups(tiny, faulty):
    datasets = {"a": mm.open_dataset(tiny), "b": mm.open_dataset(faulty)}
    mixture = mm.Mixture({"a": (datasets["a"], 3), "b": (datasets["b"], 1)}, epoch_steps=16)
    plain, many = (
        mm.Pipeline(mixture, global_batch_size=4 * n, repeat=n, window=8) for n in (1, N)
    )
    assert many.order.identity() == {
        **plain.order.identity(),
        "global_batch_size": 4 * N,
        "repeat": N,
    }
    loader = mm.Loader(many)
    sources = list(chain.from_iterable(batch["__source__"] for batch in loader))
    assert sources.count("a") == 3 * sources.count("b") == 16 * 3 * N
    state = json.loads(json.dumps(loader.state_dict()))
    unset = mm.Pipeline(mixture, global_batch_size=4 * N, repeat=N)  # the window of the state
    again = mm.Loader(unset)
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(mm.StateError, match="repeat was 3 and is 1"):
        mm.Loader(plain).load_state_dict(state)


def test_repeat_is_part_of_the_state(tiny):
    plain = make_pipeline(tiny, global_batch_size=4 * N)
    many = repeated(tiny)
    assert "repeat" not in plain.order.identity()
    twice = make_pipeline(tiny, global_batch_size=4, repeat=2)
    assert twice.order.identity()["repeat"] == 2
    loader = mm.Loader(many)
    rest = [described(batch) for batch in loader][2:]
    loader = mm.Loader(many)
    for _, _batch in zip(range(2), loader, strict=False):
        state = json.loads(json.dumps(loader.state_dict()))
    with pytest.raises(mm.StateError, match=r"repeat was 3 and is 1.*finish_epoch"):
        mm.Loader(plain).load_state_dict(state)
    parts = []
    for rank in range(2):
        given = {"rows_per_rank": [7, 5], "world": World(rank, 2)}  # of the present setting
        other = mm.Loader(plain, on_change="finish_epoch", **given)
        other.load_state_dict(state)
        parts.append([described(batch) for batch in other])
        assert len(next(iter(other))["__key__"]) == (7, 5)[rank]
    assert [joined(step) for step in zip(*parts, strict=True)] == rest


def test_an_epoch_with_repeat_is_not_finished_without_padding(tiny):
    loader = mm.Loader(repeated(tiny))
    next(iter(loader))
    flat = make_pipeline(tiny, global_batch_size=4 * N, batching=mm.Flat(), transforms=(dict,))
    with pytest.raises(mm.StateError, match=r"planned with repeat=3.*until the epoch has ended"):
        mm.Loader(flat, on_change="finish_epoch").load_state_dict(loader.state_dict())


@pytest.mark.parametrize("rows", [[4 * N], [2 * N, N, N]])
def test_logs_fit_the_plan(faulty, tmp_path, rows):
    pipeline = repeated(faulty, drop_last=False)
    loaders = [
        mm.Loader(pipeline, world=World(rank, len(rows)), rows_per_rank=rows)
        for rank in range(len(rows))
    ]
    write_logs(loaders, tmp_path / "logs", 2 * len(loaders[0]))
    logged = read_lineage(log_files([tmp_path / "logs"]))
    check = check_logs(
        pipeline.order,
        logged,
        steps_logged(pipeline.order, logged),
        name_of=pipeline.dataset.name_of,
    )
    assert check.holds
    assert check.num_samples == 2 * 64
    lines = (tmp_path / "logs" / "metrics-rank0.jsonl").read_text().splitlines()
    assert len(json.loads(lines[0])["keys"]) == rows[0] // N


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"repeat": 5}, "global_batch_size 12 is not a multiple of repeat 5.*give 10 or 15"),
        ({"repeat": 13}, "give 13$"),
        ({"repeat": 0}, "repeat=0: give a whole number from 1 up"),
        ({"repeat": 3, "grid": (1, 3)}, "Q must divide global_batch_size 12 / repeat 3"),
        ({"repeat": 3, "batching": mm.Flat()}, "repeat=3 with batching=.*leave out one"),
        ({"global_batch_size": 650, "repeat": 10}, "64 samples do not fill one step of "
         "global_batch_size 650 / repeat 10"),
        ({"num_generations": 3}, "write repeat="),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(tiny, given, words):
    with pytest.raises((mm.ConfigError, TypeError), match=words):
        make_pipeline(tiny, **given)


@pytest.mark.parametrize(
    ("size", "shares", "words"),
    [
        (
            3,
            None,
            "global_batch_size 12 is not a multiple of 3 ranks with repeat=3: .*size 9 or 18",
        ),
        (5, "balanced", "too small for 5 ranks with repeat=3: each rank needs at least 3 rows"),
        (2, [8, 4], r"rows_per_rank \[8, 4\]: pass 2 multiples of repeat=3"),
    ],
)
def test_ranks_with_parts_of_groups_are_refused(tiny, size, shares, words):
    with pytest.raises(mm.ConfigError, match=words):
        mm.Loader(repeated(tiny), world=World(0, size), rows_per_rank=shares)


def test_rows_are_those_of_the_sampler_of_trl(tiny):
    source = distribution("trl").locate_file("trl/trainer/utils.py").read_text()
    (found,) = (node for node in ast.parse(source).body if is_repeat_sampler(node))
    names = {"torch": torch, "Sampler": Sampler, "Sized": Sized}
    exec(compile(ast.Module([found], []), "trl", "exec"), names)  # without all that trl imports
    keys = [sample["__key__"] for sample in mm.open_dataset(tiny)]
    sampler = names["RepeatSampler"](keys, mini_repeat_count=N, batch_size=5, shuffle=False)
    loader = mm.Loader(repeated(tiny, groups=5, shuffle=False))
    delivered = chain.from_iterable(batch["__key__"] for batch in loader)
    assert list(delivered) == [keys[number] for number in sampler]


def is_repeat_sampler(node):
    return isinstance(node, ast.ClassDef) and node.name == "RepeatSampler"


def test_take_shows_each_sample_once(tiny):
    pipeline = repeated(tiny)
    assert len({sample["__key__"] for sample in pipeline.take(8)}) == 8
    assert "12 rows, 3 of each sample" in repr(pipeline)
