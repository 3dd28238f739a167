"""The profile of the loader measures the functions that a run really calls."""

from __future__ import annotations

import pytest

from tools.bench import profile_loader
from tools.bench.corpus import write_corpus


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    corpus = tmp_path_factory.mktemp("corpus")
    write_corpus(corpus, 256)
    return {name: profile_loader.run_process(name, str(corpus)) for name in ("0x1", "1x1")}


@pytest.mark.slow
def test_every_stage_takes_time(columns):
    for name, column in columns.items():
        for stage in profile_loader.STAGES:
            if name == "1x1" or not stage.startswith("IPC"):
                assert column[stage] > 0, (name, stage)


@pytest.mark.slow
def test_a_column_sums_to_cores_x_time(columns):
    for column in columns.values():
        stages = [column.get(stage, 0) for stage in profile_loader.STAGES]
        cpu = sum(stages) + column["Python between the stages"]
        assert cpu == pytest.approx(column["cpu"])
        assert cpu + column["waiting, or other programs"] == pytest.approx(column["whole"])
