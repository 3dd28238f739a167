"""The loop alone: what it saves, writes and goes on from."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mmstream as mm
from mmstream.decoding.bad_samples import Stats
from mmstream.train import TrainConfig, TrainResult, loop, train
from mmstream.train.clip import ContrastiveClip, small_clip
from mmstream.train.distributed import TrainProcess, leave_on_sigterm, process_group
from mmstream.train.loop import fit
from mmstream.train.metrics import Meter, StepLog
from mmstream.train.tokenizer import byte_tokenizer, open_tokenizer
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.ragged_loader import RaggedLoader
from tests.helpers.tiny_model import TinyModel

HALF = mm.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PROCESS = TrainProcess(torch.device("cpu"))


def config(out: Path, **changes: Any) -> TrainConfig:
    settings = {"epochs": 2, "global_batch_size": 4, "checkpoint_every": 3, "log_keys": True}
    return TrainConfig(url="made-up", out=str(out), **{**settings, **changes})


def fit_here(config: TrainConfig, hidden_vocab: int = 64) -> tuple[TrainResult, FakeLoader]:
    loader = FakeLoader(num_steps=4, num_rows=4)
    clip = small_clip(image_size=32, vocab_size=hidden_vocab, max_length=8, seed=0)
    return fit(
        config, ContrastiveClip(clip, 4), mm.to_device(loader, "cpu", normalize=HALF), PROCESS
    ), loader


def test_a_run_ends_with_its_epochs_and_a_checkpoint(tmp_path: Path) -> None:
    result, _ = fit_here(config(tmp_path))
    assert (result.num_steps, result.resumed_from) == (8, 0)
    assert result.state == {"epoch": 2, "step": 0}
    assert [(line["epoch"], line["step"]) for line in metrics(tmp_path)] == [
        (epoch, step) for epoch in range(2) for step in range(4)
    ]
    assert result.final_loss == metrics(tmp_path)[-1]["loss"]
    assert metrics(tmp_path)[5]["keys"] == ["1-1-0", "1-1-1", "1-1-2", "1-1-3"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006.pt", "step-00000008.pt"]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "num_steps"),
    [(None, None, 4), (None, 9, 9), (None, 2, 2), (2, 9, 8), (2, 5, 5)],
)
def test_max_steps_ends_a_run_alone_and_otherwise_whichever_comes_first(
    tmp_path: Path, epochs: int | None, max_steps: int | None, num_steps: int
) -> None:
    result, _ = fit_here(config(tmp_path, epochs=epochs, max_steps=max_steps))
    assert result.num_steps == num_steps
    assert result.state == {"epoch": num_steps // 4, "step": num_steps % 4}


@pytest.mark.parametrize("has_log_dir", [False, True])
def test_a_run_without_a_folder_for_metrics_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_log_dir: bool
) -> None:
    log_dir = str(tmp_path) if has_log_dir else None
    out = f"memory://{tmp_path.name}"
    fit_here(dataclasses.replace(config(tmp_path), out=out, log_dir=log_dir, log_keys=False))
    assert caplog.text.count("no metrics are written") == (not has_log_dir)


def test_an_out_that_cannot_be_written_ends_a_run_before_its_first_step(tmp_path: Path) -> None:
    settings = config(tmp_path, log_dir=str(tmp_path))
    with pytest.raises(mm.ConfigError, match=r"https:// can only be read"):
        fit_here(dataclasses.replace(settings, out="https://host.invalid/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_stopped_anywhere_and_resumed_gives_the_undisturbed_losses(
    tmp_path: Path, stop: int
) -> None:
    fit_here(config(tmp_path / "whole"))
    first, loader = fit_here(config(tmp_path / "parts", max_steps=stop))
    assert first.num_steps == stop
    assert loader.state_dict() == {"epoch": stop // 4, "step": stop % 4}
    second, _ = fit_here(config(tmp_path / "parts"))
    assert (second.resumed_from, second.num_steps) == (stop, 8)
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [line["keys"] for line in parts] == [line["keys"] for line in whole]
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit_here(config(tmp_path, max_steps=3))
    batches = mm.to_device(FakeLoader(), "cpu", normalize=HALF)
    for run, reason in (
        (lambda: fit_here(config(tmp_path), hidden_vocab=65), r".*size mismatch for clip\.text"),
        (lambda: fit(config(tmp_path), TinyModel(), batches, PROCESS),
         r".*Missing key\(s\) in state_dict: \"embed\.weight\""),
    ):  # fmt: skip
        with pytest.raises(mm.StateError, match=f"step 3 is of another model: {reason}") as caught:
            run()
        assert "\n" not in str(caught.value)
        assert "the settings that it was trained with (model=, image_size=," in str(caught.value)


def test_undone_and_torn_lines_are_cut_from_the_metrics(tmp_path: Path) -> None:
    line = {"epoch": 0, "step": 0, "loss": 1.0, "samples_per_s": 9.0, "wait_fraction": 0.5}
    two, one = TrainProcess(PROCESS.device, 0, 2), PROCESS
    log = StepLog(str(tmp_path), two, 0)
    for step in range(1, 6):
        log.write({**line, "num_steps": step})
        log.write_validation({"num_steps": step, "loss": 1.0})
    own_file, other = tmp_path / "metrics-rank0.jsonl", tmp_path / "metrics-rank1.jsonl"
    other.write_bytes(own_file.read_bytes())
    with own_file.open("a") as file:
        file.write('{"epoch": 0, "num_st')
    StepLog(str(tmp_path), two, 3)
    assert [line["num_steps"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert len(other.read_text().splitlines()) == 5  # rank 1's own business
    assert len((tmp_path / "validation-rank0.jsonl").read_text().splitlines()) == 3
    StepLog(str(tmp_path), one, 3)  # there is no rank 1 now
    assert other.read_text() == own_file.read_text()


def test_rows_without_exactly_one_image_are_refused_in_words(tmp_path: Path) -> None:
    class Several(FakeLoader):
        def batch(self, epoch: int, step: int) -> dict[str, Any]:
            return {**super().batch(epoch, step), "image_row": torch.zeros(4, dtype=torch.int64)}

    clip = small_clip(image_size=32, vocab_size=64, max_length=8, seed=0)
    with pytest.raises(mm.ConfigError, match="exactly one image per sample"):
        fit(
            config(tmp_path),
            ContrastiveClip(clip, 4),
            mm.to_device(Several(), "cpu", normalize=HALF),
            PROCESS,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs=0: give a whole number from 1 up"),
        ({"max_steps": 0}, "max_steps=0: give a whole number from 1 up"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: give a whole number from 1 up"),
        ({"image_size": 100}, "a multiple of 16"),
        ({"out": "s3://bucket/run", "log_keys": True}, "needs a local log_dir when out is remote"),
        ({"log_dir": "s3://bucket/logs"}, "must be a local folder"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        dataclasses.replace(TrainConfig(url="data", out="run"), **changes)


@pytest.fixture
def own_sigterm() -> Iterator[None]:
    """Take back SIGTERM: Ray, in an earlier test of this process, may have a handler for it."""
    others = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, others)


@pytest.mark.usefixtures("own_sigterm")
def test_sigterm_leaves_through_the_finally_blocks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    left = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            left.append("not at all")
        finally:
            left.append("in order")

    with pytest.raises(SystemExit) as caught, leave_on_sigterm():
        work()
    assert caught.value.code == 143
    assert left == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        pytest.param(
            "cuda",
            "nccl",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_a_process_group_adds_on_its_device_and_is_left_at_the_end(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (group | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    with process_group(device) as process:
        assert torch.distributed.get_backend() == backend
        one = torch.ones((), device=process.device)
        torch.distributed.all_reduce(one)
        sums = process.sum_over_ranks(2, 0.5, one)
        assert (sums.tolist(), sums.dtype, sums.device) == ([2, 0.5, 1], torch.float64, one.device)
        process.check_consistency({"seed": "1"})
    assert not torch.distributed.is_initialized()


def test_the_byte_tokenizer_gives_every_text_back(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text = "A café, naïve\n\t 熊 🐻 <b>"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 259
    assert (ids[0], ids[-1], len(ids)) == (257, 258, len(text.encode()) + 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    cut = tokenizer(text, truncation=True, max_length=6)["input_ids"]
    assert cut == [*ids[:5], 258]
    assert tokenizer("a")["input_ids"] == [257, 64, 258]
    tokenizer.save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path))(text)["input_ids"] == ids


LOST = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:49883: Connection reset by peer"


@pytest.mark.parametrize("error", [RuntimeError(LOST), dist.DistBackendError("NCCL error")])
def test_a_rank_that_is_lost_is_one_line_on_the_others(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "fit", fail)
    with pytest.raises(
        mm.MMStreamError, match=r"^another rank has ended, or did not answer in time;"
    ):
        train(TrainConfig(url=corpus, out=str(tmp_path), num_workers=0, device="cpu"))
    monkeypatch.setattr(loop, "is_of_lost_rank", lambda _: False)
    with pytest.raises(type(error)):
        train(TrainConfig(url=corpus, out=str(tmp_path), num_workers=0, device="cpu"))


# -- the lines of metrics --------------------------------------------------------------------------


def fit_tiny(out: Path, loader: FakeLoader | None = None, **changes: Any) -> TrainResult:
    settings = TrainConfig(url="made-up", out=str(out), **{"precision": "fp32", **changes})
    batches = mm.to_device(loader or RaggedLoader(num_steps=6, num_rows=8), "cpu", normalize=HALF)
    return fit(settings, TinyModel(), batches, PROCESS)


def test_waiting_is_told_from_moving_and_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stats = [100.0], Stats()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    batches = mm.to_device(FakeLoader(), "cpu")
    batches.loader.stats = stats
    meter = Meter(batches, PROCESS)
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
    fit_tiny(tmp_path, max_steps=3)
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
    result = fit_tiny(tmp_path, log_every=4, epochs=2)
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
    fit_tiny(tmp_path / "counted", loader)
    lines = metrics(tmp_path / "counted")
    assert [line["num_bad"] for line in lines] == [2, 4, 6]
    expected = {
        "bad": {"DecodeError": 6, "SkipSample": 9}, "num_skipped": 9, "num_wrong_reads": 15,
        "num_cut_texts": 30, "cut_text_fraction": 0.25, "num_dropped_parts": 9,
        "cache_hit_fraction": 0.75,
    }  # fmt: skip
    assert lines[-1] | expected == lines[-1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cuda_lines_say_memory_and_idle_time(tmp_path: Path, precision: str) -> None:
    settings = TrainConfig(url="made-up", out=str(tmp_path), precision=precision, epochs=2)
    batches = mm.to_device(FakeLoader(num_steps=6, num_rows=16), "cuda", normalize=HALF)
    clip = ContrastiveClip(small_clip(image_size=32, vocab_size=64, max_length=8, seed=0), 16)
    fit(settings, clip, batches, TrainProcess(torch.device("cuda", torch.cuda.current_device())))
    step_lines = metrics(tmp_path)
    assert all(0 <= line["idle_fraction"] <= 1 for line in step_lines[1:])
    assert all(line["memory_bytes"] > 1e6 for line in step_lines)
    assert step_lines[-1]["loss"] < step_lines[0]["loss"]
