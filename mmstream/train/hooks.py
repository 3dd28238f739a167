"""Code of the user in the reference loop: objects that are called with the metrics of its steps.

    loop.fit -> `HookCalls` -> the user's hooks; loggers.py has two of them

Every rank calls its hooks. One that raises is not called again. The ranks learn of it with the sums
of the next step, so that all of them save the same step and end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mmstream.errors import ConfigError, MMStreamError, escaped
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
