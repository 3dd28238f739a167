"""The loop alone: what it saves, writes and goes on from."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mmstream as mm
from mmstream.decoding.bad_samples import Stats
from mmstream.train import TrainConfig, loop, train
from mmstream.train.distributed import TrainProcess, leave_on_sigterm, process_group
from mmstream.train.loop import fit
from mmstream.train.metrics import Meter, StepLog
from mmstream.train.models import ContrastiveClip, small_clip
from mmstream.train.tokenizer import byte_tokenizer, open_tokenizer
from tests.helpers.fake_loader import FakeLoader, RaggedLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_model import HALF, PROCESS, TinyModel, config_of, train_tiny


def tiny_clip(vocab_size: int = 64) -> ContrastiveClip:
    clip = small_clip(image_size=32, vocab_size=vocab_size, max_length=8, seed=0)
    return ContrastiveClip(clip, 4)


def test_a_run_ends_with_its_epochs_and_a_checkpoint(tmp_path: Path) -> None:
    result = train_tiny(tmp_path)
    lines = metrics(tmp_path)
    assert (result.num_steps, result.resumed_from) == (8, 0)
    assert result.state == {"epoch": 2, "step": 0}
    assert [(line["epoch"], line["step"]) for line in lines] == [
        (epoch, step) for epoch in range(2) for step in range(4)
    ]
    assert result.final_loss == lines[-1]["loss"]
    assert lines[5]["keys"] == [f"1-1-{row}" for row in range(6)]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006.pt", "step-00000008.pt"]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "num_steps"),
    [(None, None, 4), (None, 9, 9), (2, 9, 8), (2, 5, 5)],
)
def test_max_steps_ends_a_run_alone_and_otherwise_whichever_comes_first(
    tmp_path: Path, epochs: int | None, max_steps: int | None, num_steps: int
) -> None:
    result = train_tiny(tmp_path, epochs=epochs, max_steps=max_steps)
    assert result.num_steps == num_steps
    assert result.state == {"epoch": num_steps // 4, "step": num_steps % 4}


def test_an_out_that_is_remote_has_no_metrics_and_one_that_cannot_be_written_no_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for log_dir in (None, str(tmp_path / "logs")):
        train_tiny(f"memory://{tmp_path.name}", log_dir=log_dir, log_keys=False)
    assert caplog.text.count("no metrics are written") == 1
    with pytest.raises(mm.ConfigError, match=r"https:// can only be read"):
        train_tiny("https://host.invalid/run", log_dir=str(tmp_path / "others"))
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_stopped_anywhere_and_resumed_gives_the_undisturbed_losses(
    tmp_path: Path, stop: int
) -> None:
    """With dropout: what it draws depends on the seed and the step alone."""

    def losses(name: str, resumed_from: int = 0, **settings: Any) -> list[tuple[Any, ...]]:
        result = train_tiny(tmp_path / name, model=TinyModel(dropout=0.5), **settings)
        assert (result.resumed_from, result.num_steps) == (resumed_from, 8)
        return [(line["keys"], line["loss"]) for line in metrics(tmp_path / name)]

    whole = losses("whole")
    loader = RaggedLoader(num_rows=6)
    train_tiny(tmp_path / "parts", loader, TinyModel(dropout=0.5), max_steps=stop)
    assert loader.state_dict() == {"epoch": stop // 4, "step": stop % 4}
    torch.manual_seed(12345)
    assert losses("parts", stop) == whole
    assert losses("other", seed=1) != whole


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train_tiny(tmp_path, FakeLoader(), tiny_clip(), max_steps=3)
    for model, reason in (
        (tiny_clip(65), r".*size mismatch for clip\.text"),
        (TinyModel(), r".*Missing key\(s\) in state_dict: \"embed\.weight\""),
    ):
        with pytest.raises(mm.StateError, match=f"step 3 is of another model: {reason}") as caught:
            train_tiny(tmp_path, FakeLoader(), model)
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
    with pytest.raises(mm.ConfigError, match="exactly one image per sample"):
        train_tiny(tmp_path, RaggedLoader(), tiny_clip())


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


NEEDS_CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=NEEDS_CUDA)]
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

    config = TrainConfig(url=corpus, out=str(tmp_path), num_workers=0, device="cpu")
    monkeypatch.setattr(loop, "fit", fail)
    with pytest.raises(mm.MMStreamError, match=r"^another rank has ended, or did not answer in"):
        train(config)
    monkeypatch.setattr(loop, "is_of_lost_rank", lambda _: False)
    with pytest.raises(type(error)):
        train(config)


# -- the lines of metrics --------------------------------------------------------------------------


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
        meter.start()
    assert line()["wait_fraction"] == 0.4
    step(0.5, 0.0, 0.5)
    assert line()["samples_per_s"] == 4.0


def test_a_line_every_so_many_steps_covers_all_of_them(tmp_path: Path) -> None:
    result = train_tiny(tmp_path, checkpoint_every=99, log_every=3)
    lines = metrics(tmp_path)
    assert [line["num_steps"] for line in lines] == [3, 6, 8]
    assert [len(line["keys"]) for line in lines] == [18, 18, 12]
    assert result.final_loss == lines[-1]["loss"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_lines_say_memory(tmp_path: Path) -> None:
    process = TrainProcess(torch.device("cuda", torch.cuda.current_device()))
    batches = mm.to_device(FakeLoader(num_steps=6, num_rows=16), "cuda", normalize=HALF)
    settings = config_of(tmp_path, lr=3e-4)
    clip = small_clip(image_size=32, vocab_size=64, max_length=8, seed=0)
    fit(settings, ContrastiveClip(clip, 16), batches, process)
    step_lines = metrics(tmp_path)
    assert all(line["memory_bytes"] > 1e6 for line in step_lines)
    assert step_lines[-1]["loss"] < step_lines[0]["loss"]
