"""Hooks of the reference loop, and those for TensorBoard, W&B and Prometheus."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import mmstream as mm
from mmstream.train import Prometheus, TensorBoard, TrainConfig, WandB, loop, train
from mmstream.train.checkpoint import checkpoint_name
from mmstream.train.metrics import logger_hook
from tests.helpers.fake_loader import RaggedLoader
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_model import HALF, TinyModel, config_of, train_tiny

Command = Callable[..., tuple[int, str, str]]


class Noting:
    """Notes its calls, and raises at one of them."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[Any] = []
        self.lines: list[dict[str, Any]] = []
        self.fails_at = fails_at

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fails_at == call[0]:
            raise KeyError("of the user")

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.lines.append(dict(metrics))
        metrics.clear()
        self._note("step", step)

    def on_validation(self, step: int, metrics: dict[str, Any]) -> None:
        self._note("validation", step, sorted(metrics))

    def on_checkpoint(self, path: str) -> None:
        self._note("checkpoint", Path(path).name, Path(path).exists())

    def on_end(self) -> None:
        self._note("end")


def saved(num_steps: int) -> tuple[Any, ...]:
    return "checkpoint", checkpoint_name(num_steps), True


def test_hooks_get_each_line_each_checkpoint_and_the_end_and_go_on_after_a_resume(
    tmp_path: Path,
) -> None:
    first, second, rest = Noting(), Noting(), Noting()
    train_tiny(tmp_path, hooks=[first, second], max_steps=4)
    steps = [("step", step) for step in range(9)]
    assert first.calls == [*steps[1:4], saved(3), steps[4], saved(4), ("end",)]
    assert (second.calls, second.lines) == (first.calls, first.lines)
    train_tiny(tmp_path, hooks=[rest])
    assert rest.calls == [*steps[5:7], saved(6), *steps[7:], saved(8), ("end",)]
    assert json.loads(json.dumps(first.lines + rest.lines)) == metrics(tmp_path)
    done = Noting()
    train_tiny(tmp_path, hooks=[done])
    assert done.calls == [("end",)]


def test_hooks_get_the_line_of_each_validation_and_follow_log_every(tmp_path: Path) -> None:
    hook = Noting()
    validation = mm.to_device(RaggedLoader(num_rows=3), "cpu", normalize=HALF)
    train_tiny(tmp_path, hooks=[hook], validation=validation, log_every=2, epochs=1)
    names = ["loss", "num_steps", "rank", "seconds", "weight", "world_size"]
    measured = [("validation", step, names) for step in (3, 4)]
    lines = [("step", step) for step in (2, 3, 4)]
    after = [lines[0], lines[1], saved(3), measured[0], lines[2], saved(4), measured[1]]
    assert hook.calls == [*after, ("end",)]


@pytest.mark.parametrize(
    ("method", "num_steps"), [("step", 1), ("validation", 3), ("checkpoint", 3), ("end", 8)]
)
def test_what_a_hook_raises_ends_the_run_after_a_checkpoint_and_names_the_hook(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, num_steps: int
) -> None:
    failing, other = Noting(method), Noting()
    validation = mm.to_device(RaggedLoader(num_rows=3), "cpu", normalize=HALF)
    reason = f"the hook Noting.on_{method} raised KeyError"
    with pytest.raises(mm.MMStreamError, match=reason) as caught:
        train_tiny(tmp_path, hooks=[failing, other], validation=validation)
    assert isinstance(caught.value.__cause__, KeyError)
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.getMessage().startswith(reason)
    assert "in _note" in caplog.text
    assert failing.calls[-1][0] == method
    assert other.calls[-1] == ("end",)
    assert Path(tmp_path, "checkpoints", checkpoint_name(num_steps)).exists()
    assert train_tiny(tmp_path).resumed_from == num_steps


def test_on_end_comes_after_a_signal_and_a_loss_that_is_not_finite_is_still_logged(
    tmp_path: Path,
) -> None:
    class Stops(Noting):
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            super().on_step(step, metrics)
            os.kill(os.getpid(), signal.SIGTERM)

    hook = Stops()
    assert train_tiny(tmp_path / "stopped", hooks=[hook]).stopped_by == "SIGTERM"
    assert hook.calls == [("step", 1), saved(1), ("end",)]

    model, hook = TinyModel(), Noting()
    model.head.weight.data.fill_(math.nan)
    with pytest.raises(mm.MMStreamError, match="the loss of step 1 is nan"):
        train_tiny(tmp_path / "nan", model=model, hooks=[hook])
    assert [math.isnan(line["loss"]) for line in hook.lines] == [True]


@pytest.mark.parametrize(
    ("hooks", "reason"),
    [
        ([object()], r"hook object has no method of a hook; the loop calls on_step, on_validation"),
        ([SimpleNamespace(on_setp=print)], r"SimpleNamespace has on_setp; the loop calls on_step"),
        ([Noting], r"hook Noting is a class: give an object"),
        (["tensorboard"], r"hook str has no method of a hook"),
        (Noting(), r"hooks.*: give a list"),
    ],
)
def test_what_is_no_hook_is_refused_before_the_data_are_opened(
    tmp_path: Path, hooks: Any, reason: str
) -> None:
    for run in (train, lambda config, hooks: loop.run(config, None, None, hooks)):
        with pytest.raises(mm.ConfigError, match=f"{reason}|hooks="):
            run(config_of(tmp_path), hooks=hooks)
    with pytest.raises(mm.ConfigError, match=reason):
        train_tiny(tmp_path, hooks=hooks)
    assert not list(tmp_path.iterdir())


def test_a_module_and_an_object_with_other_attributes_are_hooks(tmp_path: Path) -> None:
    steps: list[int] = []
    hook = SimpleNamespace(on_step=lambda step, metrics: steps.append(step), on_gpu=False)
    train_tiny(tmp_path, hooks=[hook], epochs=1)
    assert steps == [1, 2, 3, 4]


class FakeWriter:
    """Stands for the writer of TensorBoard and for the run of W&B."""

    opened: ClassVar[list[FakeWriter]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.arguments = (*args, settings)
        self.values: dict[int, dict[str, float]] = {}
        self.ended = False
        self.opened.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.setdefault(step, {})[name] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.values.setdefault(step, {}).update(values)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.ended = True

    finish = close


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    board, wandb = SimpleNamespace(SummaryWriter=FakeWriter), SimpleNamespace(init=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(FakeWriter, "opened", [])
    return FakeWriter.opened


def test_tensorboard_and_wandb_get_the_numbers_of_all_lines(
    tmp_path: Path, opened: list[FakeWriter]
) -> None:
    hooks = [TensorBoard(tmp_path / "board"), WandB(project="captions", resume="allow")]
    train_tiny(tmp_path, hooks=hooks, max_steps=5)
    board, run = opened
    assert board.arguments == (str(tmp_path / "board"), {"purge_step": 1})
    assert run.arguments == ({"project": "captions", "resume": "allow"},)
    for writer in opened:
        assert writer.ended
        assert [writer.values[step]["loss"] for step in range(1, 6)] == [
            line["loss"] for line in metrics(tmp_path)
        ]
    train_tiny(tmp_path, hooks=[TensorBoard("board")])
    assert opened[2].arguments == ("board", {"purge_step": 6})


def test_loggers_write_validation_and_only_on_rank_0(opened: list[FakeWriter]) -> None:
    for hook in (TensorBoard("board"), WandB()):
        hook.on_step(1, {"loss": 2.0, "rank": 1})
        hook.on_validation(1, {"loss": 2.0, "rank": 1})
        hook.on_end()
        assert not opened
        hook.on_step(1, {"loss": 2.0})
        hook.on_validation(1, {"loss": 3.0, "rank": 0})
        values = opened.pop().values[1]
        assert (values["loss"], values["validation/loss"]) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("hook", "module", "package"),
    [
        (lambda: TensorBoard("board"), "torch.utils.tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, hook: Any, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(mm.ConfigError, match=f"^pip install {package}: it is not installed"):
        hook()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    train_tiny(tmp_path, hooks=[TensorBoard(tmp_path / "board")], max_steps=5)
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = importlib.import_module(name).EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("loss")]
    assert written == [
        (line["num_steps"], pytest.approx(line["loss"])) for line in metrics(tmp_path)
    ]


# -- loggers of the command ------------------------------------------------------------------------


def test_prometheus_gets_the_numbers_of_each_rank(tmp_path: Path) -> None:
    train_tiny(tmp_path, hooks=[Prometheus(tmp_path)], max_steps=5)
    numbers = prometheus_numbers(tmp_path / "mmstream-rank0.prom")
    last = metrics(tmp_path)[-1]
    for name in ("loss", "num_steps", "wait_p99_s", "read_s", "num_bytes", "wait_fraction"):
        assert numbers[f'mmstream_{name}{{rank="0"}}'] == last[name]
    hook = Prometheus(tmp_path)
    hook.on_step(1, {"rank": 1, "sources": {'a "b"\n': 3}, "loss": float("nan"), "key": "text"})
    hook.on_validation(2, {"rank": 1, "loss": 0.5})
    hook.on_step(3, {"rank": 1, "sources": {'a "b"\n': 3}, "bad": {"DecodeError": 1}})
    hook.on_step(4, {"rank": 1, "sources": {'a "b"\n': 3}, "bad": {"TimeoutError": 1}})
    numbers = prometheus_numbers(tmp_path / "mmstream-rank1.prom")
    assert numbers['mmstream_sources{rank="1",name="a \\"b\\"\\n"}'] == 3
    assert numbers['mmstream_validation{rank="1",name="loss"}'] == 0.5
    assert math.isnan(numbers['mmstream_loss{rank="1"}'])
    assert [name for name in numbers if "_bad" in name] == [
        'mmstream_bad{rank="1",name="TimeoutError"}'
    ]
    assert not list(tmp_path.glob("*.tmp"))


def prometheus_numbers(path: Path) -> dict[str, float]:
    """Return the numbers of a file in Prometheus' text format, each after the type of its name."""
    numbers, typed = {}, set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"# TYPE ([a-z0-9_]+) gauge", line):
            assert match[1] not in typed
            typed.add(match[1])
        else:
            name, value = line.rsplit(" ", 1)
            assert name.partition("{")[0] in typed
            numbers[name] = float(value)
    return numbers


def test_the_command_has_loggers_and_the_board_shows_what_they_write(
    corpus: str, tmp_path: Path, mmstream: Command
) -> None:
    words = ["train", corpus, "--out", tmp_path, "--max-steps", "2", "--num-workers", "0"]
    assert mmstream(*words, "--log", "prometheus")[0] == 0
    written = (tmp_path / "mmstream-rank0.prom").read_text()
    board = json.loads(Path("docs/assets/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for text in expressions for name in re.findall(r"mmstream_\w+", text)}
    assert len(names) > 10
    assert {name for name in names if f"# TYPE {name} gauge" not in written} <= {"mmstream_bad"}


def test_loggers_write_below_the_log_folder(tmp_path: Path, opened: list[FakeWriter]) -> None:
    for name in ("tensorboard", "wandb"):
        logger_hook(name, str(tmp_path)).on_step(1, {"loss": 0.5})
    board, run = opened
    assert board.arguments[0] == str(tmp_path / "tensorboard")
    assert run.arguments == ({"dir": str(tmp_path)},)


def test_a_logger_that_is_unknown_or_has_no_folder_is_one_line(
    tmp_path: Path, mmstream: Command
) -> None:
    with pytest.raises(mm.ConfigError, match="log needs a local log_dir when out is remote"):
        TrainConfig("shards/", "s3://bucket/run", log=("prometheus",))
    code, _, text = mmstream("train", "shards/", "--out", tmp_path, "--log", "prometheus,board")
    assert (code, "board: give tensorboard, wandb, prometheus" in text) == (2, True)
