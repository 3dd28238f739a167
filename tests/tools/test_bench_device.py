"""The benchmark of the device stage runs without a GPU, and says what it then is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.bench import device as bench_device
from tools.bench.corpus import write_corpus


def test_without_a_gpu_it_says_so_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["device.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_device.main()
    assert capsys.readouterr().out.count("\n") == 1


def test_both_decoders_feed_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = bench_device.Sizes(files=4, batch=2, copy_mib=1, steps=3, width=16, depth=1, rounds=1)
    device = torch.device("cpu")
    assert all(way() > 0 for way in bench_device.decode_ways(device, sizes).values())
    assert bench_device.copy_rate(device, sizes) > 0
    write_corpus(tmp_path, 6)
    bench_device.compare_loops(str(tmp_path), device, sizes, num_workers=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].split("=")[1] for line in lines] == ['"cpu")', '"cuda")']
