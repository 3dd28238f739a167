"""A forked child of a loader's process leaves what belongs to the parent's threads alone."""

from __future__ import annotations

import gc
import multiprocessing
import threading

import pytest

from mmstream.loader.watchdog import StallLimits, Watchdog


class Nobody:
    """Makes no batches."""

    def describe(self, job):
        return ""

    def have_ended(self):
        return False

    def end(self):
        pass


def drop(watchdogs: list[Watchdog]) -> None:
    watchdogs.clear()
    gc.collect()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_watchdog_that_is_dropped_in_a_child_waits_for_no_lock_of_the_parent():
    watchdogs = [Watchdog(Nobody(), StallLimits(60, None))]
    held, release = threading.Event(), threading.Event()

    def hold(condition=watchdogs[0]._closed._cond):  # as the watchdog's thread does while it wakes
        with condition:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=drop, args=(watchdogs,))
    child.start()
    child.join(500)  # it ends at once; where it waits for the lock, it waits for ever
    is_done = child.exitcode == 0
    child.kill()
    release.set()
    thread.join()
    assert is_done
