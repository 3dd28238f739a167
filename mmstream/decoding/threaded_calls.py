"""One function, called for many positions by several threads.

Place in the flow: the decode stage calls decoders and functions of the user through it. Helper
threads may begin while the calling thread does other things, and it helps them when it needs the
results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from functools import cache
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def calls_ahead(
    function: Callable[[U], T], items: Iterator[tuple[U, bool]], pool: Executor, num_ahead: int
) -> Iterator[T]:
    """Yield the results for all items in order, while threads of a pool work ahead.

    The calling thread takes an item that no other thread has begun when its result is due. While a
    thread of the pool is still at the due item, it takes later ones.

    Example: two threads, items 0 to 4, each call takes as long. The caller does 0 while the pool
    does 1. Then the pool has begun 2, so the caller does 3 meanwhile, and both are done together.

    Args:
        function: What is called.
        items: Its arguments, and whether a call is worth handing to a thread. The calling thread
            asks for them, in order.
        pool: The threads.
        num_ahead: Most items that are begun before their turn. Their results are held.
    """
    calls: deque[tuple[list[U], Future[T] | None]] = deque()

    def take(held: list[U]) -> T:
        # A call that was cancelled waits in the queue of the pool, and must not hold its item.
        return function(held.pop())

    try:
        while True:
            for item, is_large in islice(items, 1 + num_ahead - len(calls)):
                held = [item]
                calls.append((held, pool.submit(take, held) if is_large else None))
                del item
            if not calls:
                return
            held, call = calls[0]
            if call is None or call.cancel():
                result = take(held)
            else:
                _call_later_ones(take, calls)
                result = call.result()
            calls.popleft()
            yield result
            del result, call
    finally:
        wait([call for _, call in calls if call is not None and not call.cancel()])


def _call_later_ones(
    take: Callable[[list[U]], T], calls: deque[tuple[list[U], Future[T] | None]]
) -> None:
    """Do calls that no thread has begun, while another thread is at the first one."""
    for number, (held, call) in enumerate(list(calls)):
        first = calls[0][1]
        if first is None or first.done():
            return
        if call is not None and call.cancel():
            done: Future[T] = Future()
            try:
                done.set_result(take(held))
            except Exception as error:  # raised when its turn comes
                done.set_exception(error)
            calls[number] = held, done


class ThreadedCalls(Generic[T]):
    """Calls a function with the positions 0 to N - 1, each of them once.

    Each thread takes the next position, which is cheaper than one future per call.

    Args:
        function: what is called.
        sizes: N numbers that tell roughly how long each call takes.

    Attributes:
        is_awaited: whether the calling thread waits for the results.
    """

    def __init__(self, function: Callable[[int], T], sizes: Sequence[int]) -> None:
        self._function = function
        self._sizes = sizes
        self._positions: Iterator[int] = iter(range(len(sizes)))
        self._results: dict[int, T] = {}
        self._errors: list[tuple[bool, int, BaseException]] = []
        self._helpers: list[Future[None]] = []
        self._is_stopped = False
        self.is_awaited = False

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
        self.is_awaited = True
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


# -- the first results of torch on a CPU, in a process that computes in threads --------------------
#
# torch computes `exp`, `log`, `sin` and the like with a library, oneMKL. It chooses the code of
# such a function in the first call. Versions up to 2024.2 choose wrongly where that call comes from
# two threads at once: one of them silently gets a result with errors of 1e-4. A mel window
# that was computed so and kept would spoil all features of a process. See
# https://github.com/pytorch/pytorch/issues/188792.
#
# The remedy is a first call from one thread. Whatever starts threads that compute, or computes what
# it keeps, calls `resolve_vector_math` before.

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "tanh"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "sqrt"),
    *("erf", "erfc", "erfinv"),
)
"""Those that torch may compute with oneMKL."""


@cache
def resolve_vector_math() -> None:
    """Let oneMKL choose the code of its functions now. It takes about a millisecond, once."""
    import torch

    for dtype in (torch.float32, torch.float64):
        values = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(values)
