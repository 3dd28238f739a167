"""What a run tells: its lines, its charts, its trace, and where its time went."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mmstream.bad_samples.stats import Stats
from mmstream.device.to_device import Normalize, to_device
from mmstream.train import TrainConfig, TrainResult
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import fit
from mmstream.train.metrics import StepLog
from mmstream.train.summary import Clock, Times, bottleneck, summarize
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.ragged_loader import RaggedLoader
from tests.helpers.tiny_model import TinyModel

HALF = Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def fit_here(out: Path, loader: FakeLoader | None = None, **changes: Any) -> TrainResult:
    config = TrainConfig(url="made-up", out=str(out), **{"precision": "fp32", **changes})
    batches = to_device(loader or RaggedLoader(num_steps=6, num_rows=8), "cpu", normalize=HALF)
    return fit(config, TinyModel(), batches, TrainProcess(torch.device("cpu")))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (Times(wait_s=6.0, transfer_s=0.1, compute_s=4.0), "data"),
        (Times(wait_s=0.1, transfer_s=4.0, compute_s=6.0), "host-to-device"),
        (Times(wait_s=3.4, transfer_s=0.1, compute_s=6.5), "data"),
        (Times(wait_s=3.2, transfer_s=0.1, compute_s=6.7), "compute"),
        (Times(wait_s=0.2, transfer_s=0.2, compute_s=9.6), "compute"),
        (Times(wait_s=2.0, transfer_s=1.9, compute_s=0.5), "data"),
        (Times(wait_s=0.1, transfer_s=0.1, compute_s=9.8, idle_s=4.0), "host-to-device"),
        (Times(wait_s=4.0, transfer_s=0.1, compute_s=5.9, idle_s=4.1), "data"),
        (Times(), "compute"),
    ],
)
def test_the_summary_names_the_bottleneck(times: Times, expected: str) -> None:
    assert bottleneck(times) == expected
    text = "\n".join(summarize(times, 10, 160.0, cuda=True))
    assert f"Bottleneck: {expected}: " in text
    assert "device idle" in text
    assert "device idle" not in "".join(summarize(times, 10, 160.0, cuda=False))


def test_what_is_no_bottleneck_but_worth_a_tenth_is_told_too() -> None:
    text = "\n".join(
        summarize(Times(wait_s=1.2, transfer_s=0.2, compute_s=8.6), 10, 160.0, cuda=False)
    )
    assert "Bottleneck: compute: " in text
    assert text.index("Bottleneck: ") < text.index("Worth 12% of the time: data: training waits")
    text = "\n".join(
        summarize(Times(wait_s=0.9, transfer_s=0.2, compute_s=8.9), 10, 160.0, cuda=False)
    )
    assert "Worth" not in text
    text = "\n".join(
        summarize(Times(wait_s=4.0, transfer_s=0.2, compute_s=5.8), 10, 160.0, cuda=False)
    )
    assert "Worth" not in text


def test_the_clock_tells_waiting_from_moving_and_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stats = [100.0], Stats()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"), stats)

    def step(wait: float, transfer: float, compute: float) -> None:
        stats.wait_s += wait
        now[0] += wait + transfer
        clock.arrived()
        now[0] += compute
        clock.done()
        now[0] += 50.0  # saving
        clock.start(paused=True)

    step(3.0, 2.0, 1.0)
    step(1.0, 0.5, 2.0)
    assert clock.lap() == Times(wait_s=4.0, transfer_s=2.5, compute_s=3.0)
    step(0.5, 0.0, 0.5)
    assert clock.lap() == Times(wait_s=0.5, transfer_s=0.0, compute_s=0.5)


def test_a_line_says_all_that_was_measured(tmp_path: Path) -> None:
    result = fit_here(tmp_path, max_steps=3)
    for line in metrics(tmp_path):
        assert line.keys() == {
            "epoch", "step", "num_steps", "loss", "lr", "grad_norm", "samples_per_s",
            "tokens_per_s", "padding_fraction", "wait_fraction", "num_bad", "num_skipped", "bad",
            "num_cut_texts", "num_dropped_parts", "cut_text_fraction", "num_wrong_reads", "rank",
            "world_size",
        }  # fmt: skip
    first = RaggedLoader(num_steps=6, num_rows=8).batch(0, 0)
    tokens = int((first["attention_mask"] * first["__valid__"][:, None]).sum())
    line = metrics(tmp_path)[0]
    assert line["padding_fraction"] == round(1 - tokens / 32, 4)
    per_second = line["samples_per_s"] / int(first["__valid__"].sum())
    assert line["tokens_per_s"] == pytest.approx(tokens * per_second, rel=0.01)
    assert result.summary is not None
    assert "2 steps in" in result.summary  # the first one starts workers and is left out


def test_a_line_every_so_many_steps_covers_all_of_them(tmp_path: Path) -> None:
    result = fit_here(tmp_path, log_every=4, epochs=2)
    step_lines = metrics(tmp_path)
    assert [line["num_steps"] for line in step_lines] == [4, 8, 12]
    assert result.final_loss == step_lines[-1]["loss"]
    assert result.summary is not None
    assert "8 steps in" in result.summary


def test_bad_samples_are_counted_in_the_metrics(tmp_path: Path) -> None:
    class Bad(FakeLoader):
        def mark_delivered(self, batch: dict[str, Any]) -> None:
            super().mark_delivered(batch)
            self.stats.bad.update({"DecodeError": 2, "SkipSample": 3})

    loader = Bad(num_steps=3)
    loader.stats = type("Counts", (dict,), {"bad": Counter(), "num_wrong_reads": 5})(samples=0)
    fit_here(tmp_path, loader)
    step_lines = metrics(tmp_path)
    assert [line["num_wrong_reads"] for line in step_lines] == [5, 5, 5]
    assert [line["num_bad"] for line in step_lines] == [2, 4, 6]
    assert [line["num_skipped"] for line in step_lines] == [3, 6, 9]
    assert step_lines[-1]["bad"] == {"DecodeError": 6, "SkipSample": 9}


def test_the_share_that_came_from_the_node_cache_is_in_metrics_and_summary(tmp_path: Path) -> None:
    class Cached(FakeLoader):
        def mark_delivered(self, batch: dict[str, Any]) -> None:
            super().mark_delivered(batch)
            for name, number in (("num_bytes", 10), ("num_cached_bytes", 10)):
                setattr(self.stats, name, getattr(self.stats, name) + number)
            self.stats.num_cache_hit_bytes += 30

    loader = Cached(num_steps=3)
    counts = {"num_bytes": 0, "num_cached_bytes": 0, "num_cache_hit_bytes": 0}
    loader.stats = type("Counts", (dict,), counts)(samples=0)
    result = fit_here(tmp_path, loader)
    assert [line["cache_hit_fraction"] for line in metrics(tmp_path)] == [0.75, 0.75, 0.75]
    assert result.summary is not None
    assert "75.0% of the bytes came from the node cache" in result.summary


def test_a_trace_of_the_wanted_steps_is_written(tmp_path: Path) -> None:
    fit_here(tmp_path, profile=2, max_steps=5)
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "aten::embedding" in names


def test_tensorboard_gets_the_numbers_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charted: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            charted.append((folder, 0, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            charted.append((name, value, step))

        def close(self) -> None:
            charted.append(("closed", 0, 0))

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    fit_here(tmp_path, max_steps=2)
    assert charted[0] == (str(tmp_path / "tensorboard"), 0, 1)
    assert charted[-1] == ("closed", 0, 0)
    step_lines = {(name, step): value for name, value, step in charted[1:-1]}
    for line in metrics(tmp_path):
        assert step_lines["train/loss", line["num_steps"]] == line["loss"]
        assert step_lines["train/lr", line["num_steps"]] == line["lr"]


def test_without_tensorboard_a_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    fit_here(tmp_path, max_steps=1)
    assert not (tmp_path / "tensorboard").exists()


def test_the_progress_bar_is_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_here(tmp_path / "piped", max_steps=2)
    assert "step" not in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    fit_here(tmp_path / "shown", max_steps=2)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "waiting for data" in shown
    fit_here(tmp_path / "unwanted", max_steps=2, progress=False)
    assert "2/2" not in capsys.readouterr().err


def test_a_resumed_run_cuts_the_validation_passes_it_undoes(tmp_path: Path) -> None:
    with StepLog(str(tmp_path), rank=0, world_size=1, num_steps=0) as log:
        for num_steps in (2, 4):
            log.write_validation({"num_steps": num_steps, "loss": 1.0, "weight": 8.0})
    with StepLog(str(tmp_path), rank=0, world_size=1, num_steps=3):
        pass
    text = (tmp_path / "validation-rank0.jsonl").read_text()
    assert [json.loads(line)["num_steps"] for line in text.splitlines()] == [2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cuda_lines_say_memory_and_idle_time(tmp_path: Path, precision: str) -> None:
    from mmstream.train.clip import ContrastiveClip, small_clip

    config = TrainConfig(url="made-up", out=str(tmp_path), precision=precision, epochs=2)
    batches = to_device(FakeLoader(num_steps=6, num_rows=16), "cuda", normalize=HALF)
    clip = ContrastiveClip(small_clip(image_size=32, vocab_size=64, max_length=8, seed=0), 16)
    fit(config, clip, batches, TrainProcess(torch.device("cuda", torch.cuda.current_device())))
    step_lines = metrics(tmp_path)
    assert all(0 <= line["idle_fraction"] <= 1 for line in step_lines[1:])
    assert all(line["memory_bytes"] > 1e6 for line in step_lines)
    assert step_lines[-1]["loss"] < step_lines[0]["loss"]


def test_the_share_of_cut_texts_is_in_each_line_and_in_the_summary(tmp_path: Path) -> None:
    class Counts(dict[str, int]):
        num_samples, num_cut_texts, num_dropped_parts = 40, 10, 3

    loader = FakeLoader()
    loader.stats = Counts(samples=0)
    result = fit_here(tmp_path / "cut", loader, max_steps=2)
    line = metrics(tmp_path / "cut")[-1]
    assert (line["num_cut_texts"], line["cut_text_fraction"]) == (10, 0.25)
    assert line["num_dropped_parts"] == 3
    assert result.summary is not None
    assert "max_length cut the texts of 25.0% of the samples" in result.summary.splitlines()
    whole = fit_here(tmp_path / "whole", FakeLoader(), max_steps=2)
    assert whole.summary is not None
    assert "max_length" not in whole.summary
