"""Pillow's warnings of odd metadata are kept off the screen: a TIFF may cause one a tag."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType


class _Unwarned:
    """A context manager for any number of threads at once.

    `warnings.catch_warnings` is for one thread. With two threads, the filters could stay off for
    good. So the first one to enter changes the filters of the process, and the last
    one to leave restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._num_inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._filters.__exit__(None, None, None)


unwarned = _Unwarned()
