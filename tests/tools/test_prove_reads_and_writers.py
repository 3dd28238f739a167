"""Short forms of tools.prove: wrong_reads, two_writers, node_cache; and what their judges see."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import mmstream as mm
from tests.helpers.paths import ROOT
from tools.prove import node_cache, two_writers, wrong_reads
from tools.prove.wrong_reads import Epoch, FlippingStore
from tools.s3_server import without_aws


@pytest.mark.slow
@pytest.mark.s3
def test_flipped_bits_change_no_batch_and_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["wrong_reads", "--workers", "2"])
    with patch.dict(os.environ, without_aws(os.environ), clear=True):
        assert wrong_reads.main() == 0
    assert capsys.readouterr().out.count("all batches are the same") == 2


def test_without_checksums_flipped_bits_change_batches(tmp_path: Path) -> None:
    folder = wrong_reads.write_corpus(tmp_path)
    expected = wrong_reads.read_epoch(mm.open_dataset(folder), 0)
    dataset = mm.open_dataset(folder, checksums=False)
    dataset.shards.store = FlippingStore(str(folder), 0.5)
    disturbed = wrong_reads.read_epoch(dataset, 0)
    assert "batches differ" in wrong_reads.fault_of(disturbed, expected)


def test_the_judge_of_wrong_reads_sees_what_is_wrong() -> None:
    expected = Epoch(["a", "b"], 0, 0)
    assert wrong_reads.fault_of(Epoch(["a", "b"], 3, 0), expected) == ""
    assert "1 of 2" in wrong_reads.fault_of(Epoch(["a", "c"], 3, 0), expected)
    assert "counted" in wrong_reads.fault_of(Epoch(["a", "b"], 0, 0), expected)
    assert "bad" in wrong_reads.fault_of(Epoch(["a", "b"], 3, 1), expected)


@pytest.mark.slow
def test_several_converters_in_one_folder_do_no_harm_and_other_bytes_are_a_fault(
    tmp_path: Path,
) -> None:
    rows = two_writers.write_rows(tmp_path, two_writers.NUM_ROWS, 16, (120, 90))
    expected = two_writers.undisturbed(rows, tmp_path / "alone") | {"planted.tar": "other"}
    fault = two_writers.fault_of_round(rows, tmp_path / "together", expected, random.Random(0))
    assert fault == "other bytes: planted.tar"


@pytest.mark.slow
def test_readers_of_a_node_cache_that_are_killed_never_get_a_wrong_byte() -> None:
    command = [sys.executable, "-m", "tools.prove.node_cache", "--seconds", "4"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_judge_of_the_node_cache_sees_what_is_wrong() -> None:
    good = node_cache.Soak(10, 0, 5, 2, 1000, 0)
    assert not good.fault(1000)
    assert "1001 bytes" in good._replace(most_bytes=1001).fault(1000)
    assert "1 wrong" in good._replace(num_wrong=1).fault(1000)
    assert "readers failed" in good._replace(num_ended=1).fault(1000)
    assert "ever found" in good._replace(num_samples=0).fault(1000)
