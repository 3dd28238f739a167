"""Rows of ranks: each row belongs to one rank, and impossible settings are refused."""

import pytest
from hypothesis import given, strategies as st

from mmstream import ranks
from mmstream.errors import ConfigError
from mmstream.ranks import World, resolve_world, rows_of_rank


@given(st.integers(1, 40), st.integers(1, 200))
def test_balanced_rows_cover_each_row_once_and_differ_by_one(size, rows):
    if rows < size:
        with pytest.raises(ConfigError):
            rows_of_rank(rows, World(0, size), "balanced")
        return
    cuts = [rows_of_rank(rows, World(rank, size), "balanced") for rank in range(size)]
    assert [i for a, b in cuts for i in range(a, b)] == list(range(rows))
    assert max(b - a for a, b in cuts) - min(b - a for a, b in cuts) <= 1


def test_a_list_gives_each_rank_its_rows():
    assert [rows_of_rank(8, World(r, 3), [4, 3, 1]) for r in range(3)] == [(0, 4), (4, 7), (7, 8)]


@pytest.mark.parametrize("rows", [None, [4, 3], [4, 3, 2], [8, 0, 0], "fair"])
def test_rows_that_do_not_fit_the_ranks_are_refused(rows):
    with pytest.raises(ConfigError):
        rows_of_rank(8, World(0, 3), rows)


def test_a_rank_outside_its_world_is_refused():
    with pytest.raises(ConfigError):
        World(2, 2)


def test_rank_and_world_size_of_the_environment_must_both_be_set(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert resolve_world(None) == World(0, 1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        resolve_world(None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_world(None) == World(1, 2)
    assert resolve_world(World(0, 4)) == World(0, 4)


@pytest.mark.parametrize(
    ("tasks", "warned"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "WORLD_SIZE=$SLURM_NTASKS"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "RANK=$SLURM_PROCID"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ""),  # a batch script runs once
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "RANK=$PMI_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_tasks_of_srun_and_mpirun_without_a_rank_are_warned_of_once(
    monkeypatch, caplog, tasks, warned
):
    ranks._warn_of_tasks_without_rank.cache_clear()
    for name in ("RANK", "WORLD_SIZE", *(n for pair in ranks._TASKS.items() for n in pair)):
        monkeypatch.delenv(name, raising=False)
    for name, value in tasks.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        resolve_world(None)
    assert [warned in record.message for record in caplog.records] == [True] * bool(warned)
