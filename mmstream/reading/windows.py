"""Steps of object stores that this process reads itself: window by window, ahead of their use.

A window (shuffle buffer) is read as a whole, in merged ranges, because each range is a request. A
process that owns whole lanes reads megabytes at once and no byte twice. Only raw bytes are held,
and only until their step. By default all windows hold at most 2 to 8 GiB over all ranks. Windows of
different lanes end one after another, so about half of that is filled at a time.

The first step of a run, or after a resume, reads only its own samples. The rest of its windows
follows in the background.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmstream.order import AnyOrder, Window
from mmstream.order.cache import keep
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.held import HeldSamples
from mmstream.reading.packed_rows import PackedRows, seats_of
from mmstream.reading.step import Job, Outcome, later_job
from mmstream.types import IntArray

NUM_THREADS = 4
"""Windows that are read side by side."""

STEPS_AHEAD = 2
"""Steps of this process whose windows are read before they are asked for."""

WindowKey: TypeAlias = tuple[int, int]
"""(epoch, number of the window)."""

Delivery: TypeAlias = tuple[IntArray, HeldSamples]
"""Slots of a window's samples, rising, and the samples in that order. Slot = step * G + row. The
samples of a pack have one slot and follow one another."""


class WindowReads:
    """Reads whole windows in threads, some steps before they are needed.

    A window is usually held whole: it is read before its first step. At a start or a resume it is
    held in two deliveries, so that the first step need not wait for the whole window.
    """

    def __init__(self, order: AnyOrder, fetcher: Fetcher) -> None:
        self._order = order
        self._fetcher = fetcher
        self._deliveries: dict[WindowKey, list[Future[Delivery]]] = {}
        self._whole_windows: set[WindowKey] = set()
        self._windows_of_job: dict[Job, list[int]] = {}
        self._expected_job: Job | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mmstream-read")

    def take(self, job: Job) -> list[Outcome | None]:
        """Return the samples of a job, in the order of rows; None: it was not read.

        Raises:
            StorageError: storage failed after retries.
        """
        self._read_ahead(job)
        return self._take(job)

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(self, job: Job) -> None:
        """Start reading what this step and the next ones need; drop what no step needs any more."""
        self._drop_finished(job)
        numbers = self._windows(job)
        for number in numbers:  # not foreseen: the samples of this step come first
            if (job.epoch, number) not in self._deliveries:
                self._start_reading(job, number, this_step_only=True)
        for turn in range(1, STEPS_AHEAD + 1):
            self._foresee(later_job(job, turn, self._order.steps_per_epoch))
        for number in numbers:
            if (job.epoch, number) not in self._whole_windows:
                next_job = job._replace(step=job.step + job.stride)
                self._start_reading(next_job, number, this_step_only=False)

    def _windows(self, job: Job) -> list[int]:
        """Return the numbers of the windows that the rows of a job are drawn from."""
        numbers = self._windows_of_job.get(job)
        if numbers is None:
            window_of_row = self._order.windows(job.epoch, job.step, (job.start, job.stop))
            numbers = sorted(set(window_of_row.tolist()))
            keep(self._windows_of_job, job, numbers, most=2 * STEPS_AHEAD)
        return numbers

    def _foresee(self, job: Job) -> None:
        """Start reading what a later step needs.

        In a lane with a window in memory that is the whole next window, in other lanes this step's
        samples only.
        """
        running_lanes = {
            number % self._order.stride for epoch, number in self._deliveries if epoch == job.epoch
        }
        for number in self._windows(job):
            if (job.epoch, number) not in self._deliveries:
                is_new_lane = number % self._order.stride not in running_lanes
                self._start_reading(job, number, this_step_only=is_new_lane)

    def _start_reading(self, job: Job, number: int, *, this_step_only: bool) -> None:
        """Start reading what a window delivers to this process: at one step, or from it on."""
        key = (job.epoch, number)
        window = self._order.window(job.epoch, number)
        is_wanted = (window.row >= job.start) & (window.row < job.stop)
        steps_later = window.step - job.step
        if this_step_only:
            is_wanted &= steps_later == 0
        else:
            is_wanted &= (steps_later >= 0) & (steps_later % job.stride == 0)
            self._whole_windows.add(key)
        if is_wanted.any():
            delivery = self._pool.submit(self._deliver, window, is_wanted)
            self._deliveries.setdefault(key, []).append(delivery)

    def _deliver(self, window: Window, is_wanted: npt.NDArray[np.bool_]) -> Delivery:
        steps, rows, shards, indexes = (column[is_wanted] for column in window)
        slots = steps * self._order.global_batch_size + rows
        by_slot = np.argsort(slots, kind="stable")
        refs = np.column_stack((shards, indexes))[by_slot]
        return slots[by_slot], self._fetcher.fetch(refs)

    def _take(self, job: Job) -> list[Outcome | None]:
        """Take the samples of a step out of its windows; waits for those that are being read."""
        first_slot = job.step * self._order.global_batch_size + job.start
        num_rows = job.stop - job.start
        packed = PackedRows.of_step(self._order, job.epoch, job.step, (job.start, job.stop))
        num_samples = num_rows if packed is None else packed.num_samples
        outcomes: list[Outcome | None] = [None] * num_samples
        for number in self._windows(job):
            for delivery in self._deliveries.get((job.epoch, number), ()):
                slots, held = delivery.result()
                bounds = slots.searchsorted((first_slot, first_slot + num_rows))
                begin, end = bounds.tolist()
                if begin < end:
                    rows = slots[begin:end] - first_slot
                    seats = rows if packed is None else seats_of(rows, packed.first_seats)
                    for seat, outcome in zip(
                        seats.tolist(), held.take_all(begin, end), strict=True
                    ):
                        outcomes[seat] = outcome
        return outcomes

    def _drop_finished(self, job: Job) -> None:
        """Drop windows that deliver nothing more here. After a jump, drop all of them."""
        has_jumped = job != self._expected_job
        self._expected_job = later_job(job, 1, self._order.steps_per_epoch)
        for key in list(self._deliveries):
            is_over = (key[0], int(self._order.window(*key).step[-1])) < (job.epoch, job.step)
            if has_jumped or is_over:
                for delivery in self._deliveries.pop(key):
                    delivery.cancel()
                self._whole_windows.discard(key)
