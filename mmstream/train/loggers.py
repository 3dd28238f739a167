"""TensorBoard and Weights & Biases, as hooks of `mmstream.train.train` or in a loop of one's own.

Rank 0 writes: what the ranks have in common is the same in the metrics of each. Only the hook that
is used imports its package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mmstream.errors import ConfigError


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
