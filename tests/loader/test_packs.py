"""Packs in a loader: dealt to the ranks by cost, and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mmstream as mm
from mmstream.loader.settings import rank_settings
from mmstream.types import Batch
from tests.helpers.packed_texts import pack_pipeline, write_texts

ATTENTION = mm.Cost(tokens=0, squared_tokens=1)
"""What differs most between packs of equally many tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_texts(tmp_path_factory.mktemp("packs"), [60, 60, 60, 60])


def pipeline(folder: str, rows: int = 8, **settings: Any) -> mm.Pipeline:
    plain = pack_pipeline(folder, rows)
    return replace(plain, batching=replace(plain.batching, **settings))


def batches(source: mm.Pipeline, world_size: int) -> list[list[Batch]]:
    """Return the batches of an epoch by step and rank."""
    of_ranks = []
    for rank in range(world_size):
        loader = mm.Loader(source, world=mm.World(rank, world_size))
        of_ranks.append(list(loader))
        loader.close()
    return [list(of_step) for of_step in zip(*of_ranks, strict=True)]


def rows_of(of_ranks: list[Batch]) -> dict[int, list[str]]:
    """Return the keys of each row of a step, by the row of the order."""
    rows: dict[int, list[str]] = {}
    for batch in of_ranks:
        lineage = batch["__lineage__"]
        for key, row in zip(batch["__key__"], lineage.rows, strict=True):
            rows.setdefault(lineage.order_row(row), []).append(key)
    return rows


def squares(batch: Batch) -> int:
    lengths = batch["cu_seq_lens_q"].diff()
    return int((lengths**2).sum())


def test_ranks_get_packs_of_about_the_same_cost_and_the_step_stays_the_same(folder: str) -> None:
    undealt = batches(pipeline(folder), 2)
    dealt = batches(pipeline(folder, cost=ATTENTION), 2)
    assert [rows_of(step) for step in undealt] == [rows_of(step) for step in dealt]
    assert [step[0]["__key__"] for step in undealt] != [step[0]["__key__"] for step in dealt]
    spread = [abs(squares(first) - squares(second)) for first, second in dealt]
    spread_undealt = [abs(squares(first) - squares(second)) for first, second in undealt]
    assert sum(spread) < sum(spread_undealt) / 2


@pytest.mark.parametrize("settings", [{"cost": ATTENTION}, {"cost": ATTENTION, "deal": "off"}])
def test_the_loader_counts_how_unequal_the_packs_of_the_ranks_are(
    folder: str, settings: Any
) -> None:
    source = pipeline(folder, **settings)
    steps = [[squares(batch) for batch in of_ranks] for of_ranks in batches(source, 2)]
    loader = mm.Loader(source, world=mm.World(1, 2))
    list(loader)
    assert loader.stats.num_modelled_steps == len(steps) > 0
    expected = sum(2 * max(costs) / sum(costs) for costs in steps) / len(steps)
    assert loader.stats.modelled_imbalance == pytest.approx(expected)
    assert expected > 1


def test_one_rank_is_not_compared_with_others(folder: str) -> None:
    loader = mm.Loader(pipeline(folder, cost=ATTENTION))
    next(iter(loader))
    assert (loader.stats.num_modelled_steps, loader.stats.modelled_imbalance) == (0, 0.0)


@pytest.mark.parametrize("settings", [{"cost": ATTENTION, "deal": "off"}, {"cost": None}])
def test_rows_stay_undealt_where_nobody_asks_for_it(folder: str, settings: Any) -> None:
    plain, other = batches(pipeline(folder), 2), batches(pipeline(folder, **settings), 2)
    assert [[b["__key__"] for b in step] for step in plain] == [
        [b["__key__"] for b in step] for step in other
    ]


@pytest.mark.parametrize("shares", ["balanced", [4, 4]])
def test_equal_shares_are_dealt_however_they_are_named(folder: str, shares: Any) -> None:
    source = pipeline(folder, cost=ATTENTION)
    loader = mm.Loader(source, world=mm.World(1, 2), rows_per_rank=shares)
    plain = mm.Loader(source, world=mm.World(1, 2))
    assert [batch["__key__"] for batch in loader] == [batch["__key__"] for batch in plain]
    assert loader.stats.modelled_imbalance == plain.stats.modelled_imbalance > 0


def test_unequal_shares_are_not_dealt(folder: str) -> None:
    source = pipeline(folder, cost=ATTENTION)
    loader = mm.Loader(source, world=mm.World(1, 3), rows_per_rank="balanced")
    for batch in loader:
        assert batch["__lineage__"].order_rows == [2, 3, 4]


def test_a_cost_that_differs_between_ranks_is_a_difference_of_settings(folder: str) -> None:
    settings = rank_settings(pipeline(folder, cost=ATTENTION), None)
    others = rank_settings(pipeline(folder, cost=mm.Cost(squared_tokens=2)), None)
    assert {name for name in settings if settings[name] != others[name]} == {"Pack.cost"}
    assert "Pack.plan" not in settings


def test_the_loader_counts_documents_tokens_and_fill(folder: str) -> None:
    source = pipeline(folder)
    loader = mm.Loader(source)
    delivered = list(loader)
    stats = loader.stats
    assert stats.num_documents == sum(len(batch["__key__"]) for batch in delivered)
    assert stats.num_tokens == sum(batch["num_tokens"] for batch in delivered)
    assert stats.num_label_tokens == stats.num_tokens - stats.num_documents
    assert stats.fill == stats.planned_fill == stats.num_tokens / (64 * 8 * len(delivered))


def test_padding_rows_of_packs_do_not_count_as_empty_ones(folder: str) -> None:
    loader = mm.Loader(replace(pipeline(folder), drop_last=False))
    *_, last = loader
    assert not last["__valid__"].all()
    assert loader.stats.num_documents == loader.stats.num_samples == 240
    assert loader.stats.fill == loader.stats.planned_fill > 0.8


def test_batches_without_padding_count_the_tokens_of_their_rows(folder: str) -> None:
    plain = mm.Loader(replace(pipeline(folder), batching=None))
    next(iter(plain))
    assert (plain.stats.num_documents, plain.stats.fill) == (0, 0.0)
    loader = mm.Loader(replace(pipeline(folder), batching=mm.Flat(pad_to_multiple_of=256)))
    batch = next(iter(loader))
    assert loader.stats.num_documents == 8
    assert loader.stats.fill == batch["num_tokens"] / batch["input_ids"].numel()
