"""What a loader says at its start: of rows."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest

import mmstream as mm
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
        ({"max_documents": 1}, r"limits=\{'max_documents': 1\}: give mm\.PackLimits"),
    ],
)
def test_limits_of_another_length_are_refused(limits: Any, words: str) -> None:
    with pytest.raises(mm.ConfigError, match=words):
        mm.Pack(64, limits=limits)
    assert mm.Pack(64, limits=mm.PackLimits(64, max_documents=2)).max_tokens == 64
