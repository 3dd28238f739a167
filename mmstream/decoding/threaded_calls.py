"""One function, called for many positions by several threads.

Place in the flow: the decode stage calls decoders and functions of the user through it. Helper
threads may begin while the calling thread does other things, and it helps them when it needs the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Generic, TypeVar

__all__ = ["ThreadedCalls"]

T = TypeVar("T")


class ThreadedCalls(Generic[T]):
    """Calls a function with the positions 0 to N - 1, each of them once.

    Each thread takes the next position, which is cheaper than one future per call.

    Args:
        function: what is called.
        sizes: N numbers that tell roughly how long each call takes.
    """

    def __init__(self, function: Callable[[int], T], sizes: Sequence[int]) -> None:
        self._function = function
        self._sizes = sizes
        self._positions: Iterator[int] = iter(range(len(sizes)))
        self._results: dict[int, T] = {}
        self._errors: list[tuple[bool, int, BaseException]] = []
        self._helpers: list[Future[None]] = []
        self._is_stopped = False

    def begin(self, pool: Executor, num_helpers: int) -> None:
        """Let threads of a pool begin, as soon as they have done what they were given before.

        The largest calls come first. So no thread is left with a large one when the others are
        done.
        """
        largest_first = sorted(self._positions, key=lambda position: -self._sizes[position])
        self._positions = iter(largest_first)
        self._helpers = [pool.submit(self._work) for _ in range(num_helpers)]

    def finish(self) -> list[T]:
        """Call the function for the positions that are left. Return the results, in order, once.

        Raises:
            BaseException: what the function raised for the first position that has an error.
        """
        self._work()
        # Helpers that have not begun are busy with other calls, and find nothing left here.
        wait([helper for helper in self._helpers if not helper.cancel()])
        del self._function  # they still wait in the queue of the pool, with the memory of a batch
        if self._errors:
            raise min(self._errors, key=lambda entry: entry[:2])[2]
        return [self._results.pop(position) for position in range(len(self._sizes))]

    def stop(self) -> None:
        """Begin no call any more: nobody needs the results."""
        self._is_stopped = True

    def _work(self) -> None:
        for position in self._positions:
            if self._is_stopped:
                return
            if self._errors and position > min(failed for _, failed, _ in self._errors):
                continue  # another position's error is raised
            try:
                self._results[position] = self._function(position)
            except BaseException as error:
                # Ctrl-C first
                self._errors.append((isinstance(error, Exception), position, error))
