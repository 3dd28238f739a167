"""Logs of a run whose settings changed between two epochs are checked against the order of each."""

from __future__ import annotations

import json

import pytest

import mmstream as mm
from mmstream.audit.check_log import check_logs, orders_logged, steps_logged
from mmstream.audit.training_log import log_files, read_lineage
from mmstream.dataset.bad_list import write_bad
from mmstream.world import World
from tests.helpers.audit_logs import write_logs
from tests.helpers.bad_corpus import make_pipeline, write_tiny


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
def corpus(tmp_path):
    return write_tiny(tmp_path / "corpus", [30, 20, 14])


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
    corpus, tmp_path, replayed, num_ranks, every
):
    folder = tmp_path / "run"
    state = write_logs(loaders_of(make_pipeline(corpus)), folder, 7)  # of 5 an epoch
    now = make_pipeline(write_tiny(corpus, [30, 20, 14, 40]), global_batch_size=8, seed=9)
    last = write_logs(loaders_of(now, state, num_ranks), folder, 3 + 13 + 4, every)
    assert (last["epoch"], last["step"]) == (3, 4)
    for known in (state, last):
        code, out, err = replayed(corpus, known, folder)
        assert (code, err) == (0, "")
        assert out.startswith("ok: epoch 0 step 0 to epoch 3 step 3, 27 steps, 256 samples: 0 lost")


def test_a_run_that_another_version_began_is_checked_whole(corpus, tmp_path, replayed):
    folder = tmp_path / "run"
    dataset = mm.open_dataset(corpus)
    old = mm.Pipeline(dataset, global_batch_size=8, grid=(2, 2), window=9)
    now = mm.Pipeline(dataset, global_batch_size=8)
    state = write_logs(loaders_of(old), folder, 10)  # of 8 an epoch
    loaders = loaders_of(now, state, num_ranks=2)
    last = write_logs(loaders, folder, 6 + 8 + 3)
    assert last["order"] == now.order.identity() != state["order"]
    for known in (state, last):
        code, out, err = replayed(corpus, known, folder)
        assert (code, err) == (0, "")
        assert out.startswith("ok: epoch 0 step 0 to epoch 3 step 2, 27 steps, 216 samples: 0 lost")


def test_a_step_that_is_missing_on_either_side_of_the_change_is_missed(corpus, tmp_path, replayed):
    folder = tmp_path / "run"
    state = write_logs(loaders_of(make_pipeline(corpus)), folder, 7)
    last = write_logs(loaders_of(make_pipeline(corpus, seed=9), state), folder, 3 + 5)
    path = folder / "metrics-rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for gone in (2, 11):
        path.write_text("".join(lines[:gone] + lines[gone + 1 :]))
        code, out, _ = replayed(corpus, last, folder)
        assert code == 1
        assert f"bad: epoch {gone // 5} step {gone % 5}: not in the logs\n" in out


def test_an_epoch_from_before_the_first_bad_list_is_checked_without_it(corpus, tmp_path, replayed):
    folder = tmp_path / "run"
    state = write_logs(loaders_of(make_pipeline(corpus)), folder, 7)
    write_bad(mm.open_dataset(corpus), [(0, 3), (1, 7), (1, 8), (2, 0)])
    last = write_logs(loaders_of(make_pipeline(corpus, drop_last=False), state), folder, 3 + 5)
    code, out, err = replayed(corpus, last, folder)
    assert (code, err) == (0, "")
    assert ", 15 steps, 180 samples: 0 lost, 0 repeated, 0 steps unlike the plan" in out


def test_an_epoch_whose_bad_list_is_gone_says_how_to_check_the_others(corpus, tmp_path, replayed):
    folder = tmp_path / "run"
    write_bad(mm.open_dataset(corpus), [(0, 3)])
    state = write_logs(loaders_of(make_pipeline(corpus)), folder, 5)
    write_bad(mm.open_dataset(corpus), [(0, 3), (1, 7)])
    last = write_logs(loaders_of(make_pipeline(corpus), state), folder, 6)
    code, out, err = replayed(corpus, last, folder)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "epoch 0: the known bad samples are not those of the state" in err
    assert "put back mmstream.bad.previous.json" in err
    assert err.endswith("--epoch N checks another alone\n")
    assert replayed(corpus, last, folder, "--epoch", 1)[0] == 0


def test_the_logs_of_another_run_do_not_pass_by_their_own_order(corpus, tmp_path):
    write_logs(loaders_of(make_pipeline(corpus, seed=1)), tmp_path, 10)
    logged = read_lineage(log_files([tmp_path]))
    pipeline = make_pipeline(corpus, seed=2)
    orders = orders_logged(pipeline.order, logged, pipeline.dataset)
    assert check_logs(orders, logged, steps_logged(orders, logged)).unplanned == 10
