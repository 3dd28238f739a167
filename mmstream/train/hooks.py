"""Hooks: objects that the reference loop calls with the metrics of its steps, and three of them.

    loop.fit -> `HookCalls` -> the user's hooks, such as `TensorBoard`, `WandB` and `Prometheus`

Every rank calls its hooks. One that raises is not called again. The ranks learn of it with the sums
of the next step, so that all of them save the same step and end.

All three also go into a loop of one's own. For `TensorBoard` and `WandB` rank 0 writes: what the
ranks have in common is the same in the metrics of each. Only the hook that is used imports its
package.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.train.config import Logger
from mmstream.train.distributed import TrainProcess

logger = logging.getLogger(__name__)

METHODS = ("on_step", "on_validation", "on_checkpoint", "on_end")
"""What a hook may have; one is enough."""


def check_hooks(hooks: Any) -> list[Any]:
    """Return the hooks as a list.

    Raises:
        ConfigError: one has none of `METHODS`, or a misspelt one.
    """
    if not isinstance(hooks, Sequence):
        raise ConfigError(f"train: hooks={escaped(hooks)}: give a list of hooks")
    known = ", ".join(METHODS)
    for hook in hooks:
        if isinstance(hook, type):
            raise ConfigError(f"train: the hook {hook.__name__} is a class: give an object of it")
        named = [
            name
            for name in dir(hook)
            if name.startswith("on_") and callable(getattr(hook, name, None))
        ]
        unknown = [name for name in named if name not in METHODS]
        if unknown or not named:
            has = f"has {', '.join(unknown)}" if unknown else "has no method of a hook"
            raise ConfigError(f"train: the hook {_name(hook)} {has}; the loop calls {known}")
    return list(hooks)


def _name(hook: Any) -> str:
    return escaped(getattr(hook, "__name__", type(hook).__name__))  # a module has a name


class HookCalls:
    """Calls the hooks of a rank, and holds back what they raise until the run is saved.

    Args:
        hooks: as `mmstream.train.train` takes them.
        process: this rank.

    Raises:
        ConfigError: as of `check_hooks`.
    """

    def __init__(self, hooks: Any, process: TrainProcess) -> None:
        self._hooks = check_hooks(hooks)
        self._process = process
        self._has_any = bool(self._hooks)
        self._error: MMStreamError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a hook of this rank has raised."""
        return self._error is not None

    def measured(self, method: str, line: Mapping[str, Any]) -> None:
        """Call ``on_step`` or ``on_validation`` with a copy of a line of metrics."""
        ranks = {"rank": self._process.rank, "world_size": self._process.world_size}
        for hook in self._hooks:
            self._call(hook, method, line["num_steps"], {**line, **ranks})

    def saved(self, path: str) -> None:
        """Call ``on_checkpoint`` when rank 0 has written the checkpoint."""
        if self._has_any:
            self._process.wait_for_all()
        for hook in self._hooks:
            self._call(hook, "on_checkpoint", path)

    def end(self) -> None:
        """Call ``on_end``, then raise what a hook of any rank has raised. All call it together.

        Raises:
            MMStreamError: names the hook, and has its error as the cause.
        """
        for hook in self._hooks:
            self._call(hook, "on_end")
        if self._has_any and self._process.sum_over_ranks(self.has_failed).item():
            raise self._error or MMStreamError("a hook of another rank has failed; see its log")

    def _call(self, hook: Any, method: str, *arguments: Any) -> None:
        function = getattr(hook, method, None)
        if function is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            text = f"the hook {_name(hook)}.{method} raised {type(error).__name__}"
            logger.exception("%s; the run saves a checkpoint and ends", text)
            self._hooks = [other for other in self._hooks if other is not hook]
            if self._error is None:
                self._error = MMStreamError(f"train: {text}: {escaped(error)}; its steps are saved")
                self._error.__cause__ = error


# -- TensorBoard, Weights & Biases, Prometheus -----------------------------------------------------


def logger_hook(name: Logger, folder: str) -> Any:
    """Return the hook of a logger of ``TrainConfig(log=...)``.

    Raises:
        ConfigError: its package is missing.
    """
    if name == "prometheus":
        return Prometheus(folder)
    return TensorBoard(Path(folder, name)) if name == "tensorboard" else WandB(dir=folder)


class TensorBoard:
    """A hook that writes the numbers of each line of metrics for TensorBoard.

    Each call is in the file when it returns. After a resume, TensorBoard hides the steps that are
    done again.

    Args:
        folder: local folder of the event files, for ``tensorboard --logdir``. Nothing is written
            before the first call.

    Raises:
        ConfigError: the package tensorboard is missing.

    Examples:
        >>> from mmstream.train import TensorBoard, TrainConfig, train  # doctest: +SKIP
        >>> train(TrainConfig("shards/", "run/"), hooks=[TensorBoard("run/")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self._package = _imported("torch.utils.tensorboard", "tensorboard")
        self._folder = str(folder)
        self._writer: Any = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics.

        Args:
            step: optimizer steps since the first start.
            metrics: numbers by name; those of a dict, such as ``sources``, get both names. With a
                ``rank`` above 0, nothing is written.
        """
        if metrics.get("rank"):
            return
        if self._writer is None:
            self._writer = self._package.SummaryWriter(self._folder, purge_step=step)
        for name, value in numbers_of(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a validation pass, such as ``validation/loss``."""
        self.on_step(step, _of_validation(metrics))

    def on_end(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A hook that logs the numbers of each line of metrics to Weights & Biases (W&B).

    Args:
        init: arguments of ``wandb.init``, which is called with the first line of metrics. With an
            ``id`` and ``resume="allow"``, a resumed run goes on with the same curves. Steps that
            are done again after a crash are already there, and W&B leaves them out.

    Raises:
        ConfigError: the package wandb is missing.

    Examples:
        >>> from mmstream.train import TrainConfig, WandB, train  # doctest: +SKIP
        >>> wandb = WandB(project="captions", id="run-7", resume="allow")  # doctest: +SKIP
        >>> train(TrainConfig("shards/", "run/"), hooks=[wandb])  # doctest: +SKIP
    """

    def __init__(self, **init: Any) -> None:
        self._package = _imported("wandb", "wandb")
        self._init = init
        self._run: Any = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a line of metrics, as `TensorBoard.on_step` writes them."""
        if metrics.get("rank"):
            return
        if self._run is None:
            self._run = self._package.init(**self._init)
        self._run.log(numbers_of(metrics), step=step)

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a validation pass, such as ``validation/loss``."""
        self.on_step(step, _of_validation(metrics))

    def on_end(self) -> None:
        """Finish the run of W&B."""
        if self._run is not None:
            self._run.finish()


class Prometheus:
    """A hook that writes the newest numbers of this rank as a text file for Prometheus.

    The file is ``mmstream-rank{r}.prom``, for the textfile collector of the node exporter. It is
    replaced as a whole. Each number is a gauge: ``mmstream_wait_fraction{rank="0"} 0.02``, and
    ``mmstream_bad{rank="0",name="DecodeError"} 3`` where metrics have a dict. The format is that of
    https://prometheus.io/docs/instrumenting/exposition_formats/.

    Args:
        folder: local folder of the file.

    Examples:
        >>> from pathlib import Path
        >>> from mmstream.train import Prometheus
        >>> Prometheus(".").on_step(1, {"loss": 0.5, "bad": {"DecodeError": 3}})
        >>> print(Path("mmstream-rank0.prom").read_text(), end="")
        # TYPE mmstream_loss gauge
        mmstream_loss{rank="0"} 0.5
        # TYPE mmstream_bad gauge
        mmstream_bad{rank="0",name="DecodeError"} 3.0
        # TYPE mmstream_num_steps gauge
        mmstream_num_steps{rank="0"} 1.0
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._numbers: dict[str, float] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics, which has its ``rank``; without one it is 0."""
        new = tuple(f"{name}/" for name, value in metrics.items() if isinstance(value, Mapping))
        kept = {name: value for name, value in self._numbers.items() if not name.startswith(new)}
        self._numbers = kept | numbers_of({**metrics, "num_steps": step})
        rank = metrics.get("rank", 0)
        lines_of: dict[str, list[str]] = {}
        for name, value in self._numbers.items():
            metric, _, label = name.partition("/")
            metric = "mmstream_" + re.sub(r"\W", "_", metric, flags=re.ASCII)
            lines = lines_of.setdefault(metric, [f"# TYPE {metric} gauge\n"])
            labels = f'rank="{rank}"'
            if label:
                escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
                labels += f',name="{label.translate(escapes)}"'
            lines.append(f"{metric}{{{labels}}} {float(value)}\n")
        path = self._folder / f"mmstream-rank{rank}.prom"
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        text = "".join(line for lines in lines_of.values() for line in lines)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a validation pass, such as ``mmstream_validation{name="loss"}``."""
        self.on_step(step, _of_validation(metrics))


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics by name, without texts, lists and None.

    Examples:
        >>> numbers_of({"loss": 0.5, "fill": None, "sources": {"web": 12}})
        {'loss': 0.5, 'sources/web': 12}
    """
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        of_name = value if isinstance(value, Mapping) else None
        flat |= {name: value} if of_name is None else {f"{name}/{k}": v for k, v in of_name.items()}
    return {name: value for name, value in flat.items() if isinstance(value, (int, float))}


def _of_validation(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": metrics.get("rank", 0), "validation": metrics}


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"pip install {package}: it is not installed ({error})") from error
