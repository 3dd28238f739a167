"""Random runs keep the promises, and their judge sees each promise that is broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import mmstream as mm
from tools.prove.random_runs import trial as random_trial
from tools.prove.random_runs.oracle import Facts, judge, judge_rest
from tools.prove.random_runs.rows import Record, Row

NUM_TRIALS = 8
SEED_OF_ROWS, SEED_OF_MIXTURE, SEED_OF_PACKS = 54, 4, 47
"""Of trials of these kinds. That of rows has bad samples, which are substituted."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_TRIALS))
def test_a_random_run_keeps_the_promises(tmp_path: Path, seed: int) -> None:
    trial = random_trial.run_trial(tmp_path, seed, remote=0, workers=0)
    assert trial.counts["judged steps"] > 0


# -- a judge that is able to fail -----------------------------------------------------------------

Steps = dict[tuple[int, int], dict[int, Row]]


def judged(folder: Path, seed: int, **changes: object) -> tuple[Facts, Steps]:
    """The facts and the steps of a trial of this kind."""
    draw, choose = random.Random(seed), random.Random(f"views {seed}")
    trial = random_trial.Trial(seed, choose=choose)
    data = random_trial._draw_data(trial, folder, draw)
    pipeline = data.pipeline({"global_batch_size": 4, "seed": 1, **changes})
    shard_of = {name: number for number, name in enumerate(data.shard_names())}
    steps = random_trial._read(trial, pipeline, shard_of)
    assert steps is not None
    return data.facts(trial, pipeline), steps


@pytest.fixture(scope="module")
def rows_of_samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, Steps]:
    return judged(tmp_path_factory.mktemp("rows"), SEED_OF_ROWS, drop_last=False)


def with_row(steps: Steps, change: Callable[[Row], Row], of: Callable[[Row], bool]) -> Steps:
    """The steps with the first row that is so changed."""
    for key, rows in steps.items():
        for number, row in rows.items():
            if of(row):
                return {**steps, key: {**rows, number: change(row)}}
    raise AssertionError("no such row")


def is_good(row: Row) -> bool:
    return row.valid and not row.records


def is_bad(row: Row) -> bool:
    return bool(row.records)


def other(row: Row) -> Row:
    return row._replace(contents=(row.contents[0]._replace(text="other"),))


FAULTS: dict[str, tuple[Callable[[Row], Row], Callable[[Row], bool]]] = {
    "text other": (other, is_good),
    "number -1": (
        lambda row: row._replace(contents=(row.contents[0]._replace(number=-1),)),
        is_good,
    ),
    "a good sample is not valid": (
        lambda row: row._replace(valid=False, records=(Record((0, 0), "DecodeError", None),)),
        is_good,
    ),
    "not enough values": (lambda row: row._replace(records=()), is_bad),
    "is recorded as Odd": (
        lambda row: row._replace(records=(row.records[0]._replace(kind="Odd"),)),
        is_bad,
    ),
    "another substitute|a substitute of an invalid row": (
        lambda row: row._replace(records=(row.records[0]._replace(substitute=(0, 0)),)),
        is_bad,
    ),
}


@pytest.mark.parametrize("words", FAULTS)
def test_the_judge_sees_a_wrong_row(rows_of_samples: tuple[Facts, Steps], words: str) -> None:
    facts, steps = rows_of_samples
    judge(facts, steps)
    with pytest.raises((AssertionError, ValueError), match=words):
        judge(facts, with_row(steps, *FAULTS[words]))


def test_the_judge_sees_a_sample_that_comes_twice_and_one_that_is_lost(
    rows_of_samples: tuple[Facts, Steps],
) -> None:
    facts, steps = rows_of_samples
    good = [row for row in steps[0, 0].values() if is_good(row)]
    with pytest.raises(AssertionError, match="planned twice"):
        judge(facts, with_row(steps, lambda _: good[0], lambda row: row == good[1]))
    more = {**facts.samples, (99, 0): next(iter(facts.samples.values()))}
    with pytest.raises(AssertionError, match="rows of steps"):
        judge(replace(facts, samples=more, chosen=facts.chosen | {(99, 0)}), steps)
    with pytest.raises(AssertionError, match="is not chosen"):
        judge(replace(facts, chosen=facts.chosen - {good[0].planned[0]}), steps)
    with pytest.raises(AssertionError, match="is on the bad list"):
        judge(replace(facts, listed=frozenset({good[0].planned[0]})), steps)


def test_the_judge_sees_a_takedown_that_does_nothing_or_too_much(
    rows_of_samples: tuple[Facts, Steps],
) -> None:
    facts, steps = rows_of_samples
    judge_rest(facts, steps, steps)
    one, other_one = (row for row in list(steps[0, 0].values())[:2] if is_good(row))
    taken = replace(facts, removed=frozenset(one.shown))
    with pytest.raises(AssertionError, match="shows"):
        judge_rest(taken, steps, steps)
    with pytest.raises(AssertionError, match="has changed"):
        judge_rest(facts, with_row(steps, other, is_good), steps)
    with pytest.raises(AssertionError, match="plans"):
        judge_rest(facts, with_row(steps, lambda _: other_one, lambda row: row == one), steps)


def test_the_judge_sees_a_lane_that_gives_a_sample_away(tmp_path: Path) -> None:
    facts, steps = judged(tmp_path, SEED_OF_ROWS, reshuffle="global", grid=(1, 4))
    with pytest.raises(AssertionError, match="has changed its lane"):
        judge(replace(facts, keeps_lanes=True), steps)


def test_the_judge_sees_a_wrong_proportion(tmp_path: Path) -> None:
    facts, steps = judged(tmp_path, SEED_OF_MIXTURE, grid=(1, 1))
    judge(facts, steps)
    names = list(facts.weights[0])
    wrong = {0: dict.fromkeys(names, 1) | {names[0]: 1000}}
    with pytest.raises(AssertionError, match="from its share"):
        judge(replace(facts, weights=wrong), steps)


def test_the_judge_sees_a_source_without_weight(tmp_path: Path) -> None:
    facts, steps = judged(tmp_path, SEED_OF_MIXTURE, grid=(1, 1))
    weights = {step: dict.fromkeys(shares, 0) | {"a": 1} for step, shares in facts.weights.items()}
    with pytest.raises(AssertionError, match="has no weight"):
        judge(replace(facts, weights=weights), steps)


def test_the_judge_sees_a_row_that_is_too_long_and_a_pack_that_changes(tmp_path: Path) -> None:
    facts, steps = judged(tmp_path, SEED_OF_PACKS, drop_last=False)
    judge(facts, steps)
    with pytest.raises(AssertionError, match="tokens"):
        judge(replace(facts, max_tokens=facts.max_tokens // 4), steps)
    full = next(row for row in steps[0, 0].values() if len(row.planned) > 1)
    cut = full._replace(planned=full.planned[:-1], shown=full.shown[:-1])
    cut = cut._replace(contents=full.contents[:-1])
    with pytest.raises(AssertionError, match="a pack has changed"):
        judge(facts, with_row(steps, lambda _: cut, lambda row: row == full))


def test_a_failure_says_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise mm.errors.ShardError("a shard")

    monkeypatch.setattr(random_trial, "judge", broken)
    with pytest.raises(AssertionError, match=r"seed 3: ShardError: a shard\n"):
        random_trial.run_trial(tmp_path, 3, remote=0, workers=0)
