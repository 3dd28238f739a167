"""What becomes of a bad sample's row: substituted, masked, or the end of the run."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mmstream as mm
from mmstream.errors import BadSampleLimitError, DecodeError, ShardError
from tests.helpers.bad_corpus import (
    FAULTS,
    FAULTS_OF_TARS,
    make_pipeline,
    policy,
    write_faulty,
    write_tiny,
)
from tests.helpers.chats import tokenizer
from tests.helpers.topology import assert_resumes_exactly, described, run

COUNTS = [30, 1, 0, 40, 26]
BAD = {0, 5, 6, 29, 30, 31, 58, 70, 96}
DECODE = mm.Decode(image=mm.ImageDecoder(size=16), text=mm.TextDecoder(tokenizer(), max_length=16))


def without_odd(sample):
    if int(sample["__key__"]) % 2:
        raise mm.SkipSample("odd")
    return sample


# -- mask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("name", ["truncated_jpeg", "field_twice"])
def test_a_masked_row_keeps_the_batchs_shape_and_no_sample_counts_twice(tmp_path, name, drop_last):
    corpus = write_faulty(tmp_path, COUNTS, BAD, FAULTS[name])
    pipeline = make_pipeline(
        corpus, decode=DECODE, drop_last=drop_last, bad_samples=policy(action="mask")
    )
    counted = []
    for batch in mm.Loader(pipeline):
        assert batch["image"].shape == (12, 3, 16, 16)
        masked = {record.row: record for record in batch["__lineage__"].bad}
        for row, (key, ok) in enumerate(zip(batch["__key__"], batch["__valid__"].tolist())):
            assert not (ok and row in masked)
            counted += [int(key)] * ok
        for record in masked.values():
            assert record.substitute is None
            assert record.kind == ("SampleError" if name in FAULTS_OF_TARS else "DecodeError")
    assert len(counted) == len(set(counted))
    assert not set(counted) & BAD
    if not drop_last:
        assert set(counted) == set(range(97)) - BAD


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_masked_row_shows_what_a_substitute_would_be(tmp_path, drop_last):
    corpus = write_faulty(tmp_path, COUNTS, BAD)
    pipeline = make_pipeline(corpus, drop_last=drop_last)
    masking = replace(pipeline, bad_samples=policy(action="mask"))
    for one, other in zip(run(pipeline).steps, run(masking).steps, strict=True):
        assert (one.planned, one.shown, one.keys) == (other.planned, other.shown, other.keys)
        rows = {record.row for record in other.bad}
        assert other.valid == [ok and row not in rows for row, ok in enumerate(one.valid)]


@pytest.mark.slow
def test_masked_batches_are_the_same_on_every_topology_and_after_a_resume(tmp_path):
    pipeline = make_pipeline(write_faulty(tmp_path, COUNTS, BAD), bad_samples=policy(action="mask"))
    whole = run(pipeline).steps
    for size, num_workers in ((2, 1), (3, 2), (4, 3)):
        assert run(pipeline, size, num_workers, num_threads=2).steps == whole
    assert assert_resumes_exactly(lambda: mm.Loader(pipeline, num_threads=2))[: len(whole)] == whole


def test_a_step_of_nothing_but_bad_samples_is_masked_whole_and_the_run_goes_on(tmp_path):
    corpus = write_tiny(tmp_path, [48], set(range(12, 24)))
    pipeline = make_pipeline(corpus, shuffle=False, bad_samples=policy(action="mask"))
    loader = mm.Loader(pipeline)
    assert [int(batch["__valid__"].sum()) for batch in loader] == [12, 0, 12, 12]
    assert (loader.stats.num_samples, loader.stats.num_bad) == (48, 12)


def test_labels_of_invalid_rows_are_ignored_by_losses_that_know_only_them(tmp_path):
    corpus = write_faulty(tmp_path, [26], {3, 4})
    pipeline = make_pipeline(
        corpus, decode=DECODE, drop_last=False, bad_samples=policy(action="mask")
    )
    num_invalid = 0
    for batch in mm.Loader(pipeline):
        valid = batch["__valid__"]
        assert (batch["labels"][~valid] == -100).all()
        assert (batch["labels"][valid] != -100).any(dim=1).all()
        num_invalid += int((~valid).sum())
    assert num_invalid == 2 + 10


@pytest.mark.parametrize("shape", [(12,), (12, 5)])
def test_labels_that_are_not_of_tokens_are_left_alone(tmp_path, shape):
    def collate(samples):
        return {"labels": torch.ones(shape), "input_ids": torch.ones((12, 3))}

    pipeline = make_pipeline(
        write_tiny(tmp_path, [24], {3, 4}), collate=collate, bad_samples=policy(action="mask")
    )
    for batch in mm.Loader(pipeline):
        assert (batch["labels"] == 1).all()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_first_bad_sample_stops_the_run_before_its_batch(tmp_path, num_workers, ahead):
    corpus = write_tiny(tmp_path, [48], {30, 33})
    pipeline = make_pipeline(corpus, shuffle=False, bad_samples=policy(action="raise"))
    with closing(mm.Loader(pipeline, num_workers=num_workers)) as loader:
        stage = mm.to_device(loader, "cpu") if ahead else loader
        seen = []
        with pytest.raises(DecodeError) as caught:  # noqa: PT012
            for batch in stage:
                seen += batch["__lineage__"].shown
        state = json.loads(json.dumps(stage.state_dict()))
    assert str(caught.value).startswith("shard-000000.tar[30] 000030.json: ")
    assert "\n" not in str(caught.value)
    assert seen == [(0, index) for index in range(24)]
    assert (state["epoch"], state["step"]) == (0, 2)
    other = mm.Loader(replace(pipeline, bad_samples=policy()))
    other.load_state_dict(state)
    calm = run(replace(pipeline, bad_samples=policy())).steps
    assert [described(batch) for batch in other] == calm[2:]


@pytest.mark.parametrize("shards", [True, False])
def test_an_unreadable_shard_is_raised_as_what_it_is(tmp_path, shards):
    corpus = write_tiny(tmp_path, [40, 20])
    Path(corpus, "shard-000001.tar").unlink()
    pipeline = make_pipeline(corpus, bad_samples=policy(action="raise", shards=shards))
    with pytest.raises(
        ShardError,
        match=r"^shard-000001\.tar: no such shard in .*; fetch it again; new runs .*--write-bad`$",
    ):
        list(mm.Loader(pipeline))


@pytest.mark.parametrize(
    ("action", "transforms"), [("mask", ()), ("raise", ()), ("raise", (without_odd,))]
)
def test_without_bad_samples_all_actions_are_one_and_a_filter_finds_none(
    tmp_path, action, transforms
):
    corpus = write_tiny(tmp_path, [30, 31])
    pipeline = make_pipeline(corpus, transforms=transforms, drop_last=False)
    other = replace(pipeline, bad_samples=policy(action=action))
    assert run(other).steps == run(pipeline).steps


@pytest.mark.parametrize(("most", "step"), [(3, 2), (0, 0), (8, 8), (None, 8)])
@pytest.mark.parametrize("action", ["substitute", "mask"])
def test_max_samples_is_an_absolute_limit(tmp_path, most, step, action):
    """Of nine, the last one lies after the last full step."""
    corpus = write_faulty(tmp_path, COUNTS, BAD)
    limits = policy(action=action, max_samples=most)
    loader = mm.Loader(make_pipeline(corpus, shuffle=False, bad_samples=limits))
    message = rf"samples are bad \(max_samples={most}\)"
    with pytest.raises(BadSampleLimitError, match=message) if step < 8 else nullcontext():
        list(loader)
    assert loader.stats.num_steps == step
    assert step < 8 or loader.stats.num_bad == 8


def test_a_transform_cannot_say_where_a_sample_comes_from(tmp_path):
    def claim(sample):
        own = {"__source__": "mine"} if int(sample["__key__"]) % 2 else {}
        return {**sample, **own, "__key__": "k", "__lineage__": None}

    corpus = write_faulty(tmp_path, COUNTS, set())
    with_claims = mm.Loader(make_pipeline(corpus, transforms=(claim,)))
    for batch, plain in zip(with_claims, mm.Loader(make_pipeline(corpus)), strict=True):
        assert "__source__" not in batch
        assert batch["__key__"] == plain["__key__"]
