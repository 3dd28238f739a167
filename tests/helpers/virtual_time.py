"""An event loop whose clock jumps to the next timer, so that minutes of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

LIMIT_S = 1e5
"""Virtual seconds after which a test hangs."""


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Waits for nobody: where the loop would sleep, its clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("all tasks wait, and no timer will wake them")
        self.now += max(timeout, 0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Do at once what a thread would do. It takes no time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine. Sleeps and time-outs in it take the time that they say, for free.

    Everything must happen in the loop: nothing waits for the network. What would run in a thread
    of an executor runs in the loop.
    """

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def run_limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(run_limited())

    return run
