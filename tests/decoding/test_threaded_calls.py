"""Calls by several threads: each position once, the largest first, the first error."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmstream.decoding.threaded_calls import ThreadedCalls

SIZES = [3, 1, 4, 1, 5, 9, 2, 6]
LARGEST_FIRST = [5, 7, 4, 2, 0, 6, 1, 3]


def test_a_helper_begins_with_the_largest_while_nobody_waits() -> None:
    called: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        calls = ThreadedCalls(lambda position: called.append(position) or -position, SIZES)
        calls.begin(pool, 1)
        pool.shutdown()
        assert called == LARGEST_FIRST
        assert calls.finish() == [-position for position in range(len(SIZES))]


@pytest.fixture
def busy() -> Iterator[ThreadPoolExecutor]:
    """A pool whose only thread does something else until the test is over."""
    is_done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(is_done.wait)
        yield pool
        is_done.set()


def test_the_calling_thread_does_not_wait_for_a_helper_that_is_busy_elsewhere(
    busy: ThreadPoolExecutor,
) -> None:
    calls = ThreadedCalls(str, SIZES)
    calls.begin(busy, 1)
    assert calls.finish() == [str(position) for position in range(len(SIZES))]


def test_calls_that_are_finished_hold_nothing_in_the_queue_of_a_pool(
    busy: ThreadPoolExecutor,
) -> None:
    class Memory:
        pass

    def use(_position: int, memory: Memory = Memory()) -> Memory:  # noqa: B008
        return memory

    calls = ThreadedCalls(use, SIZES)
    calls.begin(busy, 1)
    memory = weakref.ref(calls.finish()[0])
    del use, calls
    assert memory() is None


def test_nothing_begins_after_a_stop() -> None:
    called: list[int] = []

    def call(position: int) -> None:
        called.append(position)
        if len(called) == 2:
            calls.stop()

    calls = ThreadedCalls(call, SIZES)
    with ThreadPoolExecutor(1) as pool:
        calls.begin(pool, 1)
    assert called == LARGEST_FIRST[:2]


def test_an_interrupt_comes_before_other_errors() -> None:
    errors = {0: ValueError(0), 2: KeyboardInterrupt()}

    def call(position: int) -> None:
        if position in errors:
            raise errors[position]

    with ThreadPoolExecutor(1) as pool:
        calls = ThreadedCalls(call, [2, 1, 3])
        calls.begin(pool, 0)
        with pytest.raises(KeyboardInterrupt):
            calls.finish()
