"""Validation: the corpus in its own order, each sample once, on every topology, in every pass."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import mmstream as mm
from mmstream.train import TrainConfig, train
from mmstream.train.distributed import StopRequest
from mmstream.train.loop import prepare, validate
from mmstream.train.models import open_model, pipeline_of_model, validation_pipeline
from tests.helpers.bad_corpus import make_pipeline, policy, truncated_jpeg, write_faulty, write_tiny
from tests.helpers.chats import tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_loader import RaggedLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_model import PROCESS, TinyModel, train_tiny
from tests.helpers.topology import run

NORMALIZE = mm.Normalize((0.5,) * 3, (0.5,) * 3)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_a_pass_shows_each_sample_once_in_order_with_marked_padding(tmp_path_factory, data):
    counts = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=5).filter(any), "counts")
    rows = data.draw(st.integers(1, 16), "rows")
    corpus = write_tiny(tmp_path_factory.mktemp("pass"), counts)
    pipeline = make_pipeline(corpus, global_batch_size=rows, shuffle=False, drop_last=False)
    whole = run(pipeline).steps
    assert len(whole) == -(-sum(counts) // rows)
    for size in {1, min(2, rows), rows}:
        for num_workers in (1, 3):
            assert run(pipeline, size, num_workers).steps == whole
    valid = [key for step in whole for key, ok in zip(step.keys, step.valid, strict=True) if ok]
    assert valid == [f"{number:06d}" for number in range(sum(counts))]
    for step in whole:
        assert len(step.keys) == rows
        assert all(ok for ok in step.valid) or step is whole[-1]
    for epoch in (1, 2):  # its own order in every epoch
        again = run(pipeline, epoch=epoch).steps
        assert [step.keys for step in again] == [step.keys for step in whole]


def validation_of(corpus: str, num_workers: int = 0, **changes: Any) -> Any:
    pipeline = make_pipeline(
        corpus,
        decode=mm.Decode(
            image=mm.ImageDecoder(size=16), text=mm.TextDecoder(tokenizer(), max_length=16)
        ),
        shuffle=False,
        drop_last=False,
        **changes,
    )
    loader = mm.Loader(pipeline, num_workers=num_workers)
    return mm.to_device(loader, "cpu", normalize=NORMALIZE)


def one_pass(batches: Any, model: TinyModel, start: Any = None) -> dict[str, float]:
    config = TrainConfig(url="", out="")
    trained = prepare(config, model, PROCESS)
    start = batches.state_dict() if start is None else start
    result = validate(trained, batches, start, config, PROCESS, StopRequest())
    assert result is not None
    assert model.training
    return {name: result[name] for name in ("loss", "weight")}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_pass_begins_at_the_beginning_and_gives_the_same(corpus, num_workers):
    model = TinyModel()
    validation = validation_of(corpus, num_workers)
    start = validation.state_dict()
    with closing(validation.loader):
        first = one_pass(validation, model)
        for _ in range(2):
            assert one_pass(validation, model, start) == first
        next(iter(validation))  # a pass that a signal ended in its middle
        assert one_pass(validation, model, start) == first
        assert validation.stats.num_bad == 0


def test_a_masked_pass_is_the_mean_over_the_good_samples(tmp_path):
    bad = {0, 5, 6, 29, 30, 31, 58, 70, 96}
    counts, model = [30, 1, 0, 40, 26], TinyModel()
    corpus = write_faulty(tmp_path / "bad", counts, bad, truncated_jpeg)
    result = one_pass(validation_of(corpus, bad_samples=policy(action="mask")), model)
    total = weight = 0.0
    for batch in validation_of(corpus, global_batch_size=1, bad_samples=policy()):
        if not batch["__lineage__"].bad:
            loss, counted = model(batch)
            total, weight = total + loss.item(), weight + counted.item()
    assert result["weight"] == weight
    assert result["loss"] == pytest.approx(total / weight, rel=1e-5)


def test_validation_in_between_costs_the_training_stream_nothing(corpus, tmp_path):
    runs = []
    for validation in (None, validation_of(corpus)):
        loader = RaggedLoader(num_rows=6)
        out = tmp_path / f"{len(runs)}"
        result = train_tiny(out, loader, TinyModel(dropout=0.5), validation, checkpoint_every=2)
        names = ("keys", "loss", "grad_norm")
        runs.append([[line[name] for name in names] for line in metrics(out)])
    assert result.validation_loss is not None
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_the_training_loop_masks_what_is_bad_in_its_validation_set(tmp_path):
    bad = {0, 5, 6, 29, 30, 31, 58, 70, 96}
    corpus = write_faulty(tmp_path / "bad", [30, 1, 0, 40, 26], bad, truncated_jpeg)
    out = tmp_path / "run"
    config = TrainConfig(
        url=corpus, out=str(out), validation=corpus, max_steps=1, image_size=32, num_workers=0,
        device="cpu",
    )  # fmt: skip

    def pipeline(dataset: mm.Dataset) -> mm.Pipeline:
        made = pipeline_of_model(config, dataset, open_model(config, 16)[1])
        return replace(made, bad_samples=mm.BadSamplePolicy(max_fraction=1.0))  # substitutes

    train(config, pipeline=pipeline)
    (line,) = (out / "validation-rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["weight"] == 97 - len(bad)
    records = (out / "validation" / "quarantine-rank0.jsonl").read_text().splitlines()
    assert [json.loads(record)["substitute"] for record in records] == [None] * len(bad)


def test_training_keeps_lanes_where_asked_and_validation_is_not_shuffled(tmp_path):
    dataset = mm.open_dataset(write_corpus(tmp_path, [8]))
    pipeline = mm.Pipeline(dataset, global_batch_size=2, reshuffle="lanes")
    order = validation_pipeline(pipeline, dataset).order.identity()
    assert pipeline.order.identity()["reshuffle"] == "lanes"
    assert "reshuffle" not in order
    assert (order["shuffle"], order["drop_last"]) == (False, False)
