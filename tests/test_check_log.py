"""Training logs tell planned and shown lineage of every step, and are checked against the plan.

The logs of a run whose settings changed between two epochs are checked against the order of each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mmstream as mm
from mmstream.audit import Check, check_logs, log_files, orders_logged, read_lineage, steps_logged
from mmstream.dataset.bad_list import write_bad
from mmstream.errors import ConfigError, SkipSample
from mmstream.loader.device import to_device
from mmstream.ranks import World
from mmstream.train import TrainConfig
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import fit
from tests.helpers.audit_logs import write_logs
from tests.helpers.bad_corpus import make_pipeline, policy, write_faulty, write_tiny
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.packed_texts import fields_of, length_of, pack_pipeline, write_texts
from tests.helpers.tiny_model import TinyModel

COUNTS, BAD = [30, 1, 0, 40, 26], {0, 5, 6, 29, 30, 31, 58, 70, 96}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return write_faulty(tmp_path_factory.mktemp("faulty"), COUNTS, BAD)


def log_run(pipeline, folder, rows, num_steps=None, every=1):
    """Log two epochs, or some steps, of ranks with so many rows."""
    loaders = [
        mm.Loader(pipeline, world=World(rank, len(rows)), rows_per_rank=rows, num_threads=1)
        for rank in range(len(rows))
    ]
    num_steps = num_steps or 2 * pipeline.order.steps_per_epoch
    write_logs(loaders, folder, num_steps, every, has_order=False)


def checked(pipeline, folder) -> Check:
    logged = read_lineage(log_files([folder]))
    name_of = pipeline.dataset.name_of
    return check_logs(pipeline.order, logged, steps_logged(pipeline.order, logged), name_of=name_of)


@pytest.mark.parametrize(
    ("settings", "rows", "every"),
    [
        ({}, [12], 1),
        ({"drop_last": False}, [5, 4, 3], 1),
        ({"shuffle": False, "drop_last": False}, [6, 6], 3),
    ],
)
def test_a_run_with_substitutes_is_as_planned_on_every_topology(
    faulty, tmp_path, settings, rows, every
):
    pipeline = make_pipeline(faulty, **settings)
    log_run(pipeline, tmp_path, rows, every=every)
    outcome = checked(pipeline, tmp_path)
    assert outcome.holds
    assert (outcome.lost, outcome.repeated, outcome.unplanned, outcome.faults) == (0, 0, 0, [])
    assert outcome.num_steps == 2 * pipeline.order.steps_per_epoch
    assert outcome.num_samples == (2 * 97 if settings else 2 * 96)
    assert outcome.substituted >= 2 * len(BAD) - 2
    assert outcome.unfilled == 0


def drop_most(sample):
    if int(sample["__key__"]) % 4:
        raise SkipSample("three of four")
    return sample


def test_rows_that_show_nothing_are_null_and_a_filter_has_substitutes_of_the_order(
    faulty, corpus, tmp_path
):
    masked = make_pipeline(faulty, bad_samples=policy(action="mask"), drop_last=False)
    log_run(masked, tmp_path / "masked", [12])
    outcome = checked(masked, tmp_path / "masked")
    assert outcome.holds
    assert (outcome.substituted, outcome.unfilled) == (0, 2 * len(BAD))
    text = (tmp_path / "masked" / "metrics-rank0.jsonl").read_text()
    assert text.count(": null") == 2 * len(BAD)
    filtered = make_pipeline(corpus, transforms=(drop_most,))
    log_run(filtered, tmp_path / "filtered", [6, 6])
    outcome = checked(filtered, tmp_path / "filtered")
    assert outcome.holds
    assert outcome.substituted + outcome.unfilled > outcome.num_samples / 2


# -- histories with a fault -----------------------------------------------------------------------


def edited(folder: Path, change, rank=0) -> None:
    path = folder / f"metrics-rank{rank}.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines = change(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def swap(lines):
    one, other = (lines[step]["lineage"][0]["planned"] for step in (3, 4))
    one[0], other[0] = other[0], one[0]


def repeat(lines):
    lines[4]["lineage"][0]["planned"][0] = lines[3]["lineage"][0]["planned"][0]


def substitute(lines):
    lines[3]["lineage"][0]["shown"] = {"2": [3, 17]}


def stray(lines):
    entry = lines[3]["lineage"][0]
    lines[-1]["lineage"].append({**entry, "epoch": 1, "step": 8})


def shift(lines):
    lines[3]["lineage"][0]["start"] = 1


@pytest.mark.parametrize(
    ("change", "counts", "fault"),
    [
        (swap, (0, 0, 2), "epoch 0 step 3: row 0: planned shard-00000"),
        (repeat, (1, 1, 1), "epoch 0 step 4: row 0: planned shard-00000"),
        (lambda lines: lines[:3] + lines[4:], (12, 0, 1), "epoch 0 step 3: not in the logs"),
        (substitute, (0, 0, 1), "step 3: row 2: shard-000003.tar[17] is not a substitute of shar"),
        (stray, (0, 12, 1), "epoch 1 step 8: not in the plan"),
        (shift, (0, 0, 1), "epoch 0 step 3: rows 1 to 12 are logged of 0 to 11"),
    ],
)
def test_a_fault_is_found_and_told(corpus, tmp_path, change, counts, fault):
    pipeline = make_pipeline(corpus)
    log_run(pipeline, tmp_path, [12])
    edited(tmp_path, change)
    outcome = checked(pipeline, tmp_path)
    assert not outcome.holds
    assert (outcome.lost, outcome.repeated, outcome.unplanned) == counts
    assert fault in outcome.faults[0]


def test_the_logs_of_a_rank_that_are_missing_are_missed(corpus, tmp_path):
    pipeline = make_pipeline(corpus)
    log_run(pipeline, tmp_path, [6, 6])
    (tmp_path / "metrics-rank0.jsonl").unlink()
    outcome = checked(pipeline, tmp_path)
    assert (outcome.lost, outcome.repeated, outcome.unplanned) == (2 * 48, 0, 16)
    assert (
        "rows 6 to 11 are logged of 0 to 11: these must be the logs of all ranks"
        in outcome.faults[0]
    )
    assert len(outcome.faults) == 10


# -- crashes --------------------------------------------------------------------------------------


def test_steps_done_again_count_once_as_they_were_done_last(corpus, tmp_path):
    """Two ranks died after step 5 of a checkpoint at step 3; one rank does the rest."""
    pipeline = make_pipeline(corpus)
    log_run(pipeline, tmp_path / "two", [6, 6], num_steps=6)
    log_run(pipeline, tmp_path / "one", [12])
    paths = [tmp_path / "two/metrics-rank1.jsonl"]
    first, second = (tmp_path / f"{name}/metrics-rank0.jsonl" for name in ("two", "one"))
    rest = second.read_text().splitlines(keepends=True)[3:]
    second.write_text(first.read_text() + "".join(rest))  # as where the log is not cut
    logged = read_lineage([*paths, second])
    outcome = check_logs(pipeline.order, logged, steps_logged(pipeline.order, logged))
    assert outcome.holds
    assert outcome.num_steps == 16


def test_a_last_line_that_a_crash_has_torn_is_passed_over(corpus, tmp_path):
    pipeline = make_pipeline(corpus)
    log_run(pipeline, tmp_path, [12], num_steps=8)
    path = tmp_path / "metrics-rank0.jsonl"
    path.write_text(path.read_text()[:-40])
    outcome = checked(pipeline, tmp_path)
    assert outcome.holds
    assert outcome.num_steps == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"epoch": 0}\nx\n', "metrics-rank0.jsonl: step None has no lineage: train with --log-k"),
        ('x\n{"epoch": 0}\n', "metrics-rank0.jsonl:1: not a line of metrics"),
        ("[1]\n", "metrics-rank0.jsonl:1: not a line of metrics"),
        ('{"epoch": 0, "rank": 0, "world_size": 1, "lineage": [{}]}\n', "has no lineage"),
    ],
)
def test_what_is_no_log_with_lineage_is_refused(tmp_path, text, reason):
    (tmp_path / "metrics-rank0.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lineage(log_files([tmp_path]))
    assert reason in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no metrics-rank"):
        log_files([tmp_path / "empty"])


# -- training writes it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"accumulate": 3}, {"log_every": 3, "checkpoint_every": 5}]
)
def test_no_step_is_without_lineage_however_seldom_lines_are_written(tmp_path, changes):
    settings = {"epochs": 2, "global_batch_size": 4, "log_keys": True, **changes}
    config = TrainConfig(url="made-up", out=str(tmp_path), **settings)
    loader = FakeLoader(num_steps=7, num_rows=4)
    batches = to_device(loader, "cpu", normalize=mm.Normalize((0.5,) * 3, (0.5,) * 3))
    fit(config, TinyModel(), batches, TrainProcess(torch.device("cpu")))
    lines = [
        json.loads(text) for text in (tmp_path / "metrics-rank0.jsonl").read_text().splitlines()
    ]
    steps = [(entry["epoch"], entry["step"]) for line in lines for entry in line["lineage"]]
    assert sorted(steps) == [(epoch, step) for epoch in range(2) for step in range(7)]
    keys = [key for line in lines for key in line["keys"]]
    assert sorted(keys) == sorted(f"{e}-{s}-{r}" for e, s in steps for r in range(4))


def test_logs_of_packs_are_compared_sample_by_sample(tmp_path):
    """Packs are dealt to two ranks. Samples are left out, and rows show other packs."""

    def fields(number):
        is_bad = number % 4 == 0 or (length_of(number) > 30 and number % 3)
        return {"txt": b"\xff"} if is_bad else fields_of(number)

    corpus = write_texts(tmp_path / "texts", [40, 25], fields_of=fields)
    pipeline = pack_pipeline(corpus, bad_samples=policy())
    log_run(pipeline, tmp_path, [2, 2])
    outcome = checked(pipeline, tmp_path)
    assert outcome.holds, outcome.faults
    assert outcome.unfilled > 0

    def show_another_pack(lines):
        entry = next(line["lineage"][0] for line in lines if "substitutes" in line["lineage"][0])
        entry["substitutes"][next(iter(entry["substitutes"]))] = [[0, 1], [1, 24]]

    edited(tmp_path, show_another_pack)
    (fault,) = checked(pipeline, tmp_path).faults
    assert "is of no substitute of this pack" in fault


# -- settings that changed between two epochs -----------------------------------------------------


def loaders_of(
    pipeline: mm.Pipeline, state: dict | None = None, num_ranks: int = 1
) -> list[mm.Loader]:
    loaders = [
        mm.Loader(pipeline, world=World(rank, num_ranks), rows_per_rank="balanced",
                  on_change="finish_epoch")
        for rank in range(num_ranks)
    ]  # fmt: skip
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    return loaders


@pytest.fixture
def tiny(tmp_path):
    return write_tiny(tmp_path / "tiny", [30, 20, 14])


@pytest.fixture
def replayed(mmstream):
    """Run `mmstream replay --check`; return (exit code, stdout, stderr)."""

    def run(url, state, folder, *words) -> tuple[int, str, str]:
        path = folder / "state.json"
        path.write_text(json.dumps(state))
        return mmstream("replay", url, "--state", path, "--check", folder, *words)

    return run


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_finished_an_epoch_and_changed_is_checked_whole(
    tiny, tmp_path, replayed, num_ranks, every
):
    folder = tmp_path / "run"
    state = write_logs(loaders_of(make_pipeline(tiny)), folder, 7)  # of 5 an epoch
    now = make_pipeline(write_tiny(tiny, [30, 20, 14, 40]), global_batch_size=8, seed=9)
    last = write_logs(loaders_of(now, state, num_ranks), folder, 3 + 13 + 4, every)
    assert (last["epoch"], last["step"]) == (3, 4)
    for known in (state, last):
        code, out, err = replayed(tiny, known, folder)
        assert (code, err) == (0, "")
        assert out.startswith("ok: epoch 0 step 0 to epoch 3 step 3, 27 steps, 256 samples: 0 lost")
    if num_ranks == every == 1:
        edited(folder, lambda lines: lines[:5] + lines[6:])
        code, out, _ = replayed(tiny, last, folder)
        assert code == 1
        assert out.startswith("bad: epoch 1 step 0: not in the logs\n")
        assert " lost, 0 repeated, 1 steps unlike the plan" in out
        message = "error: these logs have no such step; choose other --epoch or --step\n"
        assert replayed(tiny, last, folder, "--epoch", 5) == (1, "", message)


def test_an_epoch_from_before_the_first_bad_list_is_checked_without_it(tiny, tmp_path, replayed):
    folder = tmp_path / "run"
    state = write_logs(loaders_of(make_pipeline(tiny)), folder, 7)
    write_bad(mm.open_dataset(tiny), [(0, 3), (1, 7), (1, 8), (2, 0)])
    last = write_logs(loaders_of(make_pipeline(tiny, drop_last=False), state), folder, 3 + 5)
    code, out, err = replayed(tiny, last, folder)
    assert (code, err) == (0, "")
    assert ", 15 steps, 180 samples: 0 lost, 0 repeated, 0 steps unlike the plan" in out


def test_an_epoch_whose_bad_list_is_gone_says_how_to_check_the_others(tiny, tmp_path, replayed):
    folder = tmp_path / "run"
    write_bad(mm.open_dataset(tiny), [(0, 3)])
    state = write_logs(loaders_of(make_pipeline(tiny)), folder, 5)
    write_bad(mm.open_dataset(tiny), [(0, 3), (1, 7)])
    last = write_logs(loaders_of(make_pipeline(tiny), state), folder, 6)
    code, out, err = replayed(tiny, last, folder)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "epoch 0: the known bad samples are not those of the state" in err
    assert "put back mmstream.bad.previous.json" in err
    assert err.endswith("--epoch N checks another alone\n")
    assert replayed(tiny, last, folder, "--epoch", 1)[0] == 0


def test_the_logs_of_another_run_do_not_pass_by_their_own_order(tiny, tmp_path):
    write_logs(loaders_of(make_pipeline(tiny, seed=1)), tmp_path, 10)
    logged = read_lineage(log_files([tmp_path]))
    pipeline = make_pipeline(tiny, seed=2)
    orders = orders_logged(pipeline.order, logged, pipeline.dataset)
    assert check_logs(orders, logged, steps_logged(orders, logged)).unplanned == 10
