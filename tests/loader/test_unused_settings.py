"""Settings that do nothing are said in the log, once and on the first rank."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.bad_corpus import make_pipeline, write_tiny
from tests.helpers.packed_texts import pack_pipeline, write_texts

ALONE = mm.World(0, 1)


def lines_of(
    caplog: pytest.LogCaptureFixture,
    pipeline: mm.Pipeline,
    world: mm.World = ALONE,
    **settings: Any,
) -> list[str]:
    """What the log says of settings when a loader is used twice."""
    caplog.set_level(logging.INFO)
    with closing(mm.Loader(pipeline, world=world, **settings)) as loader:
        for _ in range(2):
            next(iter(loader))
    return [line for line in caplog.messages if line.startswith("without effect")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("tiny"), [30])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"shuffle": False, "window": 5, "grid": (2, 2)},
            "grid, window, because shuffle=False keeps the order of the shards",
        ),
        (
            {"shuffle": False, "window": None, "window_bytes": 5},
            "window_bytes, because shuffle=False keeps the order of the shards",
        ),
        ({"cache_dir": "cache"}, "cache_dir, because all shards are on this machine"),
        (
            {"bad_samples": mm.BadSamplePolicy(action="raise", max_samples=3, max_fraction=0.5)},
            'max_fraction, max_samples, because action="raise" stops at the first bad sample',
        ),
        ({"bad_samples": mm.BadSamplePolicy(action="raise", quarantine=None)}, None),
        ({"shuffle": False, "window": None}, None),
        ({}, None),
    ],
)
def test_a_setting_of_a_pipeline_that_does_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, tiny: str, settings: dict[str, Any], words: str | None
) -> None:
    expected = [] if words is None else [f"without effect: {words}"]
    assert lines_of(caplog, make_pipeline(tiny, **settings)) == expected


def test_settings_of_workers_are_logged_where_there_are_none(
    caplog: pytest.LogCaptureFixture, tiny: str
) -> None:
    settings = {"prefetch_factor": 7, "multiprocessing_context": "spawn"}
    assert lines_of(caplog, make_pipeline(tiny), **settings) == [
        "without effect: prefetch_factor, multiprocessing_context, because num_workers=0"
    ]


def test_a_mixture_has_no_last_partial_step(caplog: pytest.LogCaptureFixture, tiny: str) -> None:
    mixture = mm.Mixture({"a": (mm.open_dataset(tiny), 1)}, epoch_steps=2)
    pipeline = mm.Pipeline(mixture, global_batch_size=4, drop_last=False)
    assert lines_of(caplog, pipeline) == [
        "without effect: drop_last=False, because no step of a mixture is partial"
    ]


def test_the_padding_of_texts_does_nothing_without_padding(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    dataset = mm.open_dataset(write_texts(tmp_path, [8]))
    decode = mm.Decode(text=mm.TextDecoder(byte_tokenizer(), padding="max_length"))
    padded = mm.Pipeline(dataset, global_batch_size=2, decode=decode)
    flat = mm.Pipeline(dataset, global_batch_size=2, decode=decode, batching=mm.Flat())
    assert lines_of(caplog, padded) == []
    assert lines_of(caplog, flat) == [
        'without effect: TextDecoder(padding="max_length"), because batching= pads no text'
    ]


def test_rows_of_unequal_ranks_are_not_dealt(
    caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_texts(tmp_path_factory.mktemp("texts"), [40])
    pipeline = pack_pipeline(folder)
    batching = mm.Pack(64, plan=pipeline.order.plan, cost=mm.Cost(tokens=1, squared_tokens=1))
    costly = mm.Pipeline(
        pipeline.dataset, global_batch_size=4, decode=pipeline.decode, batching=batching
    )
    uneven = {"rows_per_rank": [3, 1]}
    assert lines_of(caplog, costly, mm.World(0, 2), **uneven) == [
        "without effect: mm.Pack(cost=), because rows are dealt in equal shares only: "
        "global_batch_size 4 over 2 ranks, rows_per_rank=[3, 1]"
    ]
    caplog.clear()
    assert lines_of(caplog, costly, mm.World(1, 2), **uneven) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (mm.PackLimits(32), r"mm\.Pack\(64, limits=mm\.PackLimits\(32\)\): rows have one length"),
        ({"max_documents": 1}, r"limits=\{'max_documents': 1\}: give an mm\.PackLimits"),
    ],
)
def test_limits_of_another_length_are_refused(limits: Any, words: str) -> None:
    with pytest.raises(mm.ConfigError, match=words):
        mm.Pack(64, limits=limits)
    assert mm.Pack(64, limits=mm.PackLimits(64, max_documents=2)).max_tokens == 64
