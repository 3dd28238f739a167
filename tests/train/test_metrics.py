"""What a run tells: its lines of metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mmstream.bad_samples.limits import Stats
from mmstream.device.to_device import Normalize, to_device
from mmstream.train import TrainConfig, TrainResult
from mmstream.train.distributed import TrainProcess
from mmstream.train.loop import fit
from mmstream.train.metrics import Meter, StepLog
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.ragged_loader import RaggedLoader
from tests.helpers.tiny_model import TinyModel

HALF = Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def fit_here(out: Path, loader: FakeLoader | None = None, **changes: Any) -> TrainResult:
    config = TrainConfig(url="made-up", out=str(out), **{"precision": "fp32", **changes})
    batches = to_device(loader or RaggedLoader(num_steps=6, num_rows=8), "cpu", normalize=HALF)
    return fit(config, TinyModel(), batches, TrainProcess(torch.device("cpu")))


def test_waiting_is_told_from_moving_and_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stats = [100.0], Stats()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    meter = Meter(stats, TrainProcess(torch.device("cpu")))
    group = [FakeLoader().batch(0, 0)]

    def step(wait: float, transfer: float, compute: float) -> None:
        stats.wait_s += wait
        now[0] += wait + transfer
        meter.arrived(group)
        now[0] += compute
        meter.stepped()

    def line() -> dict[str, Any]:
        return meter.read(torch.ones(()), torch.ones(()), num_steps=1, lr=1.0)

    for seconds in ((3.0, 2.0, 1.0), (1.0, 0.5, 2.5)):
        step(*seconds)
        now[0] += 50.0  # saving
        meter.start(paused=True)
    assert line()["wait_fraction"] == 0.4
    step(0.5, 0.0, 0.5)
    assert line()["samples_per_s"] == 4.0


def test_a_line_says_all_that_was_measured(tmp_path: Path) -> None:
    fit_here(tmp_path, max_steps=3)
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


def test_a_line_every_so_many_steps_covers_all_of_them(tmp_path: Path) -> None:
    result = fit_here(tmp_path, log_every=4, epochs=2)
    step_lines = metrics(tmp_path)
    assert [line["num_steps"] for line in step_lines] == [4, 8, 12]
    assert result.final_loss == step_lines[-1]["loss"]


class Counted(FakeLoader):
    """Each batch adds the same numbers to what the loader has counted."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__(num_steps=3)
        self.numbers = numbers
        zeros = {name: type(number)() for name, number in numbers.items()}
        self.stats = type("Counts", (dict,), zeros)(samples=0)

    def mark_delivered(self, batch: dict[str, Any]) -> None:
        super().mark_delivered(batch)
        for name, number in self.numbers.items():
            setattr(self.stats, name, getattr(self.stats, name) + number)


def test_what_a_loader_counts_is_in_the_metrics(tmp_path: Path) -> None:
    loader = Counted(
        bad=Counter(DecodeError=2, SkipSample=3), num_wrong_reads=5,
        num_samples=40, num_cut_texts=10, num_dropped_parts=3,
        num_bytes=10, num_cached_bytes=10, num_cache_hit_bytes=30,
    )  # fmt: skip
    fit_here(tmp_path / "counted", loader)
    lines = metrics(tmp_path / "counted")
    assert [line["num_bad"] for line in lines] == [2, 4, 6]
    expected = {
        "bad": {"DecodeError": 6, "SkipSample": 9}, "num_skipped": 9, "num_wrong_reads": 15,
        "num_cut_texts": 30, "cut_text_fraction": 0.25, "num_dropped_parts": 9,
        "cache_hit_fraction": 0.75,
    }  # fmt: skip
    assert lines[-1] | expected == lines[-1]


def test_a_resumed_run_cuts_the_validation_passes_it_undoes(tmp_path: Path) -> None:
    log = StepLog(str(tmp_path), rank=0, world_size=1, num_steps=0)
    for num_steps in (2, 4):
        log.write_validation({"num_steps": num_steps, "loss": 1.0, "weight": 8.0})
    StepLog(str(tmp_path), rank=0, world_size=1, num_steps=3)
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
