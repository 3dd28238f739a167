"""Who may write into a destination: one conversion, or several that write other ranges of shards.

    plan -> LOCKS -> jobs

A conversion of all shards holds ``.mmstream.lock`` in the destination. One of the shards [a, b)
holds ``reports/shards-A-B.lock``. Both kinds exclude each other: each puts its own lock there
first, and then looks for those of the other kind. So at least one of two sees the other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mmstream.converting.report import REPORTS
from mmstream.storage import Store, open_store
from mmstream.storage.store import map_requests
from mmstream.storage.write_lock import LockedError, WriteLock, require_unlocked, write_lock

RANGE_COMMAND = "convert --shard-range"
MARKER_LOCK = "marker.lock"
MARKER_WAIT_S = 120.0

_RANGE_LOCK = re.compile(r"shards-(\d+)-(\d+)\.lock")


def lock_all(store: Store, command: str, locks: ExitStack) -> WriteLock:
    """Lock a destination for one writer, against ranges of shards, too.

    Locks of dead ranges are taken over, and removed when `locks` are closed.

    Raises:
        LockedError: Another process writes there.
    """
    lock = locks.enter_context(write_lock(store, command))
    reports = open_store(store.url_of(REPORTS))
    names = [name for name in reports.list() if _RANGE_LOCK.fullmatch(name) or name == MARKER_LOCK]
    # Side by side: each dead holder on another machine is watched for a minute.
    map_requests(
        reports, lambda name: locks.enter_context(write_lock(reports, command, name)), names
    )
    return lock


def lock_shards(store: Store, shards: range, locks: ExitStack) -> WriteLock:
    """Lock a range of shards, which is not empty.

    Raises:
        LockedError: Another process writes all shards, or some of these.
    """
    reports = open_store(store.url_of(REPORTS))
    own_name = f"shards-{shards.start:06d}-{shards.stop:06d}.lock"
    lock = locks.enter_context(write_lock(reports, RANGE_COMMAND, own_name))
    require_unlocked(store)
    for name in reports.list():
        match = _RANGE_LOCK.fullmatch(name)
        if match and name != own_name:
            start, stop = int(match[1]), int(match[2])
            if start < shards.stop and shards.start < stop:
                require_unlocked(reports, name)
    return lock


@contextmanager
def marker_lock(store: Store) -> Iterator[None]:
    """Hold the lock on the marker for the block. Ranges that start together wait for each other."""
    reports = open_store(store.url_of(REPORTS))
    deadline = time.monotonic() + MARKER_WAIT_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(write_lock(reports, RANGE_COMMAND, MARKER_LOCK))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield
