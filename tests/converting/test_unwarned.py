"""Pillow's warnings are off while any thread works with a picture, and on again afterwards."""

from __future__ import annotations

import threading
import warnings

from mmstream.converting.unwarned import unwarned


def test_the_filters_are_back_when_the_last_of_several_threads_is_done():
    before = list(warnings.filters)
    entered, second_entered, first_left = (threading.Event() for _ in range(3))

    def first():
        with unwarned:
            entered.set()
            second_entered.wait(500)
        first_left.set()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(500)
    with unwarned:
        second_entered.set()
        first_left.wait(500)
        with warnings.catch_warnings(record=True) as seen:
            warnings.warn("odd metadata", stacklevel=1)
        assert seen == []
    thread.join()
    assert list(warnings.filters) == before
