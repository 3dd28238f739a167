"""Storage: the ranges that a reader process has asked for, requested by their deadlines.

The reader process of a rank says which ranges it needs and when. This module decides which of them
is requested next, how many at a time, and what follows a failure. `range_client` sends each request
once.

    submit -> heap by deadline -> a permit -> request -> bytes -> the range's future
                     ^                           |
                     +------- a pause <----------+ it failed: the rest is requested again

A range whose request breaks, stalls or is refused goes on at the byte that it had reached. A range
that is late and needed at once gets a second request beside the first, and takes the bytes that
come sooner. Every answer says which object it is from, so bytes of two objects are never mixed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import NamedTuple

from mmstream.errors import StorageError
from mmstream.machine import num_local_ranks
from mmstream.storage.allowance import Allowance
from mmstream.storage.in_flight import InFlight
from mmstream.storage.patience import Failures, patience_of
from mmstream.storage.range_client import RangeClient
from mmstream.storage.store import ObjectStat, ReplacedError, RequestError, require_known
from mmstream.storage.transfer_counts import TransferCounts
from mmstream.storage.transfer_limits import TransferLimits
from mmstream.storage.transfer_speeds import TransferSpeeds

__all__ = ["RangeRequest", "Transfers", "own_memory"]


def own_memory(num_bytes: int) -> memoryview:
    """Return memory of this process alone, for bytes that are to come."""
    return memoryview(bytearray(num_bytes))


class RangeRequest(NamedTuple):
    """Bytes [start, stop) of an object, and when they are needed."""

    client: int
    """Index of the client, and so of the store."""
    name: str
    start: int
    stop: int
    deadline: int
    """Clock at which the bytes are needed first: a step number, counted over epochs."""


class Transfers:
    """Requests ranges side by side, those with the earliest deadlines first.

    It lives in one event loop of one process, and is used from there. A range takes its memory when
    it is requested first. Where there is none, it waits until some comes back.

    Args:
        clients: One for each store. They are closed with this object.
        known: For each client, the objects as they are expected, by name. An object that is not in
            it is entered as its first answer says.
        limits: How many requests at a time, and when one counts as late.
        new_memory: (length of a range) -> where its bytes go. It raises a MemoryError where
            there is none.
    """

    def __init__(
        self,
        clients: Sequence[RangeClient],
        known: Sequence[MutableMapping[str, ObjectStat]],
        limits: TransferLimits | None = None,
        new_memory: Callable[[int], memoryview] = own_memory,
    ) -> None:
        self._clients, self._known = clients, known
        self._patience = [patience_of(client.url_of("")) for client in clients]
        self._limits = limits or TransferLimits()
        self._new_memory = new_memory
        self._loop = asyncio.get_running_loop()
        self._serial = count()
        self._transfers: dict[asyncio.Future[memoryview], _Transfer] = {}
        self._queue: list[tuple[int, int, _Transfer]] = []  # a heap
        self._pausing: dict[_Transfer, asyncio.TimerHandle] = {}
        self._attempts: dict[_Attempt, None] = {}  # under way, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_late = 0
        self._most_attempts = 0
        self._answered_at = [self._loop.time()] * len(clients)
        self._memory_lacks_since: float | None = None  # while the first range in the queue waits
        self._clock = 0
        self._is_clock_known = False
        self._needed: dict[int, tuple[int, float]] = {}  # deadlines that are waited for, since when
        self._clock_changed, self._step_s = math.nan, math.nan
        self._in_flight = InFlight(self._limits, num_local_ranks(), self._loop.time())
        self._speeds = TransferSpeeds(self._limits)
        self._hedges = Allowance(self._limits.hedged_share, self._limits.hedged_burst)
        self._hedged_bytes = Allowance(self._limits.hedged_share, self._limits.hedged_burst_bytes)
        self._counts: Counter[str] = Counter()
        self._busy_s, self._busy_since, self._request_s = 0.0, 0.0, 0.0
        self._next_fill: asyncio.Handle | None = None
        self._next_tick: asyncio.TimerHandle | None = None
        self._refresh_at = 0.0

    # -- what the reader asks for --------------------------------------------------------------

    def submit(self, request: RangeRequest) -> asyncio.Future[memoryview]:
        """Queue a range.

        Returns:
            What resolves to exactly ``stop - start`` bytes. Or it raises a FileNotFoundError, a
            ReplacedError, a ConfigError, a StorageError or a MemoryError: all are final.
        """
        future: asyncio.Future[memoryview] = self._loop.create_future()
        if request.stop <= request.start:
            future.set_result(memoryview(b""))
            return future
        if not self._is_clock_known:  # the first range that is asked for is needed first
            self._clock, self._is_clock_known = request.deadline, True
        transfer = self._transfers[future] = _Transfer(request, future, next(self._serial))
        self._enqueue(transfer)
        return future

    def advance(self, clock: int) -> None:
        """Say which deadline the consumer needs now. It tells what is urgent, and what is late."""
        if self._is_clock_known and clock == self._clock and not math.isnan(self._clock_changed):
            return
        now = self._loop.time()
        if clock > self._clock and not math.isnan(self._clock_changed):
            step_s = (now - self._clock_changed) / (clock - self._clock)
            is_first = math.isnan(self._step_s)
            self._step_s = step_s if is_first else 0.75 * self._step_s + 0.25 * step_s
        self._clock, self._is_clock_known, self._clock_changed = clock, True, now
        self._wake()

    @contextmanager
    def needed(self, clock: int) -> Iterator[None]:
        """Say that the consumer waits for what has this deadline, as long as the context lasts."""
        number = next(self._serial)
        self._needed[number] = clock, self._loop.time()
        try:
            yield
        finally:
            del self._needed[number]

    def lacks_since(self, deadline: int, since: float | None) -> float:
        """Return since when a range lacks memory, which was refused just now.

        An outage of the store is no lack of memory: the time begins anew while ranges that are
        needed by this deadline have memory, and are waited for.

        Args:
            deadline: Of the range.
            since: What this said at the refusal before. None: it is the first one.
        """
        transfers = chain((attempt.transfer for attempt in self._attempts), self._pausing)
        if since is None or any(each.request.deadline <= deadline for each in transfers):
            return self._loop.time()
        return since

    def lacks_memory(self, deadline: int, lacks_since: float) -> bool:
        """Tell whether a range has lacked memory for so long that none comes.

        Only the time counts in which the consumer waits for it as well.

        Args:
            deadline: Of the range.
            lacks_since: What `lacks_since` said, in seconds of the event loop's clock.
        """
        latest = self._loop.time() - self._limits.memory_s
        return any(
            deadline <= clock and max(waits_since, lacks_since) <= latest
            for clock, waits_since in self._needed.values()
        )

    def cancel(self, futures: Iterable[asyncio.Future[memoryview]]) -> None:
        """Give up ranges that nobody needs any more. Those that have arrived stay as they are."""
        for future in futures:
            future.cancel()
            if (transfer := self._transfers.get(future)) is not None:
                self._forget(transfer)

    def pop_counts(self) -> TransferCounts:
        """Return what happened since the previous call."""
        busy_s = self._busy_s
        if self._attempts:
            now = self._loop.time()
            busy_s, self._busy_since = busy_s + now - self._busy_since, now
        counts = TransferCounts(**self._counts, busy_s=busy_s, request_s=self._request_s)
        self._counts, self._busy_s, self._request_s = Counter(), 0.0, 0.0
        return counts

    async def close(self) -> None:
        """Give up all ranges, and close the clients. Nothing may be submitted any more."""
        self.cancel(list(self._transfers))
        self._queue.clear()
        for handle in (self._next_fill, self._next_tick, *self._tasks):
            if handle is not None:
                handle.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.close_s)
        for client in self._clients:
            await client.close()

    # -- which range is requested next ---------------------------------------------------------

    def _enqueue(self, transfer: _Transfer) -> None:
        self._pausing.pop(transfer, None)
        heapq.heappush(self._queue, (transfer.request.deadline, transfer.serial, transfer))
        self._wake()

    def _wake(self) -> None:
        """Use free permits, once all that happens now has happened."""
        if self._next_fill is None and self._queue:
            self._next_fill = self._loop.call_soon(self._fill)

    def _fill(self) -> None:
        self._next_fill = None
        now = self._loop.time()
        num_held, num_kept = self._num_held(), self._num_kept()
        num_sent = 0
        lacks_since, self._memory_lacks_since = self._memory_lacks_since, None
        while self._queue:
            deadline, _, transfer = self._queue[0]
            if transfer.future.done():
                heapq.heappop(self._queue)
                self._forget(transfer)
                continue
            permits = self._in_flight.limit
            if deadline >= self._clock + self._limits.urgent_steps:
                permits -= min(permits - 1, math.ceil(permits * self._limits.reserved_share))
            if num_held + (num_kept if transfer.failures is None else 0) >= permits:
                break
            if num_sent == self._limits.sent_at_once:  # workers ask for steps meanwhile
                self._wake()
                break
            try:
                num_held += self._send(transfer, now).num_permits
                num_sent += 1
            except MemoryError as error:
                lacks_since = self.lacks_since(deadline, lacks_since)
                if not self.lacks_memory(deadline, lacks_since):
                    self._memory_lacks_since = lacks_since
                    break  # some comes back once the consumer is done with a step
                client, name, start, stop, _ = transfer.request  # the other ranges go on
                url = self._clients[client].url_of(name)
                self._end(transfer, MemoryError(f"{url} bytes {start}-{stop}: {error}"))
            heapq.heappop(self._queue)
        if self._next_tick is None and (self._attempts or self._queue or self._pausing):
            self._next_tick = self._loop.call_later(self._limits.tick_s, self._tick)

    def _num_held(self) -> float:
        """Return how many permits are in use."""
        # What is late takes little bandwidth. It gives its permit back.
        num_permits = sum(attempt.num_permits for attempt in self._attempts)
        return num_permits - min(self._num_late, self._in_flight.limit // 8)

    def _num_kept(self) -> int:
        """Return how many permits are kept from ranges that never failed.

        A store that is away is asked for few ranges again and again, and for no further ones.
        """
        is_away = any(patience.silent_since is not None for patience in self._patience)
        return len(self._pausing) if is_away else 0

    # -- one request -----------------------------------------------------------------------------

    def _send(self, transfer: _Transfer, now: float, *, is_hedge: bool = False) -> _Attempt:
        if not transfer.data:
            transfer.data = self._new_memory(transfer.size)
        attempt = _Attempt(transfer, now, is_hedge)
        attempt.num_permits = self._limits.short_permits if self._is_short(attempt) else 1
        self._counts["num_requests"] += 1
        if is_hedge:
            self._counts["num_hedges"] += 1
        elif transfer.failures is not None:
            self._counts["num_retries"] += 1
        if not self._attempts:
            self._busy_since = now
        self._attempts[attempt] = None
        attempt.is_connecting = len(self._attempts) > self._most_attempts
        self._most_attempts = max(self._most_attempts, len(self._attempts))
        transfer.attempts.append(attempt)
        attempt.task = self._loop.create_task(self._receive(attempt))
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(self._tasks.discard)
        return attempt

    async def _receive(self, attempt: _Attempt) -> None:
        client, name, start, stop, _ = attempt.transfer.request
        try:
            stream = await self._clients[client].open(
                name, start + attempt.start, stop, attempt.into
            )
            end = None
            try:
                self._begin(attempt, stream.stat)
                # To the end, even if all bytes have come: the connection may serve again then.
                async for piece in stream:
                    self._take(attempt, piece)
                    if attempt.position == attempt.transfer.size and end is None:
                        end = self._loop.call_later(self._limits.close_s, attempt.cancel)
            finally:
                if end is not None:
                    end.cancel()
                await stream.close()
            self._fail(attempt, RequestError(f"the answer ended at byte {attempt.position}"))
        except Exception as error:
            self._fail(attempt, error)

    def _begin(self, attempt: _Attempt, stat: ObjectStat | None) -> None:
        """Note that an answer begins, and compare its object with the expected one."""
        if attempt not in self._attempts:
            return
        now = self._loop.time()
        client, name, _, stop, _ = attempt.transfer.request
        if stat is not None:
            url = self._clients[client].url_of(name)
            require_known(url, name, stat, self._known[client])
            if stat.size < stop:
                raise StorageError(f"{url}: ends {stop - stat.size} bytes before {stop}")
        attempt.opened = attempt.marked = attempt.touched = now
        self._num_late -= attempt.is_late
        attempt.is_late = False
        self._speeds.add_first_byte(now - attempt.started, now, is_connecting=attempt.is_connecting)

    def _take(self, attempt: _Attempt, piece: bytes | memoryview) -> None:
        """Put a piece where it belongs. The piece with the last byte ends the transfer."""
        transfer, begin = attempt.transfer, attempt.position
        end = begin + len(piece)
        if attempt not in self._attempts and attempt.position < transfer.size:
            return  # given up meanwhile
        if end > transfer.size:
            raise RequestError("more bytes came than were requested")
        now = self._loop.time()
        if begin == attempt.start:
            self._answered(transfer.request.client, now)
        self._counts["num_bytes"] += end - begin
        self._in_flight.received(end - begin)
        attempt.position, attempt.touched = end, now
        if self._is_short(attempt):
            attempt.marked = now
        if end > transfer.reached:  # if not, the other request was quicker
            is_there = isinstance(piece, memoryview) and piece.obj is transfer.data.obj
            if not is_there:
                num_known = transfer.reached - begin
                transfer.data[transfer.reached : end] = memoryview(piece)[num_known:]
            transfer.reached = end
        if end == transfer.size:
            self._complete(attempt, now)

    def _complete(self, attempt: _Attempt, now: float) -> None:
        transfer, rate = attempt.transfer, None
        if self._is_short(attempt):
            self._speeds.add_short_time(now - attempt.started, now)
        elif attempt.opened is not None:
            rate = (transfer.size - attempt.start) / max(now - attempt.opened, 1e-6)
            self._speeds.add_rate(rate, now)
        self._in_flight.ended(attempt.started, rate, now)
        self._hedges.earn(1)
        self._hedged_bytes.earn(transfer.size)
        if attempt.is_hedge:
            self._counts["num_hedges_won"] += 1
        self._release(attempt)
        if not transfer.future.done():
            transfer.future.set_result(transfer.data)
        self._forget(transfer)

    def _answered(self, client: int, now: float) -> None:
        """Note that bytes came of a store. Ranges that pause because it was away go on at once."""
        self._patience[client].answered(now)
        since, self._answered_at[client] = self._answered_at[client], now
        if now - since > self._limits.silent_s:
            for transfer, handle in list(self._pausing.items()):
                if transfer.request.client == client and not transfer.is_asked_to_wait:
                    handle.cancel()
                    self._enqueue(transfer)

    # -- what follows a failure ------------------------------------------------------------------

    def _fail(self, attempt: _Attempt, error: Exception) -> None:
        """Request again what is missing, or end the transfer with an error that is final."""
        if attempt not in self._attempts:
            return  # given up, or complete
        now, transfer = self._loop.time(), attempt.transfer
        self._release(attempt)
        if isinstance(error, (FileNotFoundError, ReplacedError)):
            self._answered(transfer.request.client, now)
        if isinstance(error, (FileNotFoundError, StorageError)) or not isinstance(error, OSError):
            self._end(transfer, error)
            return
        retry_after_s = 0.0
        if isinstance(error, RequestError):
            retry_after_s = error.retry_after_s
            if error.is_throttled:
                self._counts["num_throttled"] += 1
                self._in_flight.failed(attempt.started, now)
        self._retry(attempt, error, now, retry_after_s if self._has_moved(attempt) else None)

    def _give_up(self, attempt: _Attempt, reason: str, now: float) -> None:
        """End a request that brings nothing, and request again what is missing."""
        self._release(attempt)
        attempt.cancel()
        self._counts["num_stalls"] += 1
        self._in_flight.failed(attempt.started, now)
        self._retry(attempt, RequestError(reason), now, 0.0)

    def _retry(
        self, attempt: _Attempt, error: Exception, now: float, pause_s: float | None
    ) -> None:
        """Queue a transfer again, after a pause of its patience or of `pause_s`."""
        transfer = attempt.transfer
        if transfer.failures is None or self._has_moved(attempt):  # its time begins anew
            client, name, _, _, _ = transfer.request
            url = self._clients[client].url_of(name)
            transfer.failures = Failures(url, self._patience[client])
        try:
            patient_s = transfer.failures.add(error, attempt.touched, now)
        except Exception as final:  # whatever it is: a range that is lost would be waited for
            self._end(transfer, final)
            return
        if transfer.attempts:
            return  # the other request goes on
        transfer.is_asked_to_wait = isinstance(error, RequestError) and error.retry_after_s > 0
        self._pausing[transfer] = self._loop.call_later(
            patient_s if pause_s is None else min(pause_s, patient_s), self._enqueue, transfer
        )

    def _has_moved(self, attempt: _Attempt) -> bool:
        return attempt.position - attempt.start >= self._limits.min_progress_bytes

    def _end(self, transfer: _Transfer, error: Exception) -> None:
        if not transfer.future.done():
            transfer.future.set_exception(error)
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        """Drop what belongs to a transfer that has ended, or that nobody needs."""
        for attempt in list(transfer.attempts):
            self._release(attempt)
            attempt.cancel()
        if (handle := self._pausing.pop(transfer, None)) is not None:
            handle.cancel()
        self._transfers.pop(transfer.future, None)

    def _release(self, attempt: _Attempt) -> None:
        """Give back the permit of a request."""
        del self._attempts[attempt]
        attempt.transfer.attempts.remove(attempt)
        self._num_late -= attempt.is_late
        attempt.is_late = False
        now = self._loop.time()
        self._request_s += now - attempt.started
        if not self._attempts:
            self._busy_s += now - self._busy_since
        self._wake()

    # -- which requests are late -------------------------------------------------------------------

    def _tick(self) -> None:
        """Look at all requests under way."""
        now = self._loop.time()
        self._next_tick = None
        if now >= self._refresh_at or not self._speeds.is_hedging:  # the first steps are waited for
            self._refresh_at = now + self._limits.refresh_s
            self._speeds.refresh(now)
        self._in_flight.tick(now, is_queued=bool(self._queue))
        for attempt in list(self._attempts):
            if attempt not in self._attempts:
                continue
            if attempt.transfer.future.done():
                self._forget(attempt.transfer)
            elif attempt.opened is None or self._is_short(attempt):
                self._check_standstill(attempt, now)
            else:
                self._check_rate(attempt, attempt.opened, now)
        self._end_pauses()
        self._fill()

    def _end_pauses(self) -> None:
        """Send ranges again that the consumer needs before their pause ends.

        A server that refuses one request in fifty has room for others: this range takes the place
        of one that is needed later. A server that refuses many is asked for fewer: see `InFlight`.
        The allowance of hedges bounds it, also while a server is away.
        """
        for transfer, handle in list(self._pausing.items()):
            rest = transfer.size - transfer.reached
            if self._is_needed(transfer) and self._may_hedge(rest):
                self._spend_hedge(rest)
                handle.cancel()
                self._enqueue(transfer)

    def _is_short(self, attempt: _Attempt) -> bool:
        """Tell whether all bytes of a request should arrive about as soon as the first one."""
        return attempt.transfer.size - attempt.start < self._limits.min_rated_bytes

    def _check_standstill(self, attempt: _Attempt, now: float) -> None:
        transfer, waited_s = attempt.transfer, now - attempt.marked
        timeout_s = min(
            self._speeds.first_byte_timeout_s * 2**transfer.num_timeouts,
            self._limits.max_first_byte_s,
        )
        if not (self._clients[transfer.request.client].streams or self._is_short(attempt)):
            timeout_s = self._limits.max_first_byte_s  # its first byte is seen with its last one
        if waited_s >= timeout_s:
            transfer.num_timeouts += 1
            which = "first" if attempt.opened is None else "further"
            self._give_up(attempt, f"no {which} byte in {waited_s:.1f} s", now)
            return
        # A short answer that dribbles never stands still. Others like it say how long it may take.
        overdue_s = self._speeds.overdue_s(transfer.size - attempt.start)
        overdue_s = max(overdue_s, self._limits.least_speed_s)
        whole_s = now - attempt.started
        if attempt.opened is not None and whole_s >= overdue_s * 2**transfer.num_timeouts:
            transfer.num_timeouts += 1
            self._give_up(attempt, f"{attempt.position} bytes in {whole_s:.1f} s", now)
        else:
            self._set_late(attempt, waited_s > self._speeds.late_first_byte_s, now)

    def _check_rate(self, attempt: _Attempt, opened: float, now: float) -> None:
        seconds = now - attempt.marked
        if seconds >= self._limits.least_speed_s:
            rate = attempt.rate_now(now)
            others = [
                other.rate_now(now)
                for other in self._attempts
                if other is not attempt and other.opened is not None and now - other.marked >= 1
            ]
            if rate < self._speeds.least_rate(others, now) or seconds >= (
                self._limits.max_first_byte_s
            ):
                self._give_up(attempt, f"{rate:,.0f} bytes/s in the last {seconds:.0f} s", now)
                return
            if rate > 0:
                attempt.marked, attempt.marked_position = now, attempt.position
        seconds, num_bytes = now - opened, attempt.position - attempt.start
        rest = attempt.transfer.size - attempt.position
        num_bytes += self._limits.piece_bytes  # as many may be in the client
        is_slow = num_bytes < self._speeds.slow_rate * seconds
        # What stands still has brought less than a piece since the last one.
        still_s = (now - attempt.touched) * rest / min(rest, self._limits.piece_bytes)
        left_s = max(rest * seconds / num_bytes, still_s)
        late_s = self._limits.late_factor * self._speeds.usual_s(rest)
        self._set_late(attempt, is_slow and left_s > late_s, now)

    def _set_late(self, attempt: _Attempt, is_late: bool, now: float) -> None:
        """Note whether a request is late. A second one is sent if its range is needed soon."""
        transfer = attempt.transfer
        overdue_s = self._speeds.overdue_s(transfer.size - attempt.start)
        if overdue_s == math.inf:
            overdue_s = self._limits.least_speed_s
        is_late = is_late or now - attempt.started >= overdue_s
        self._num_late += is_late - attempt.is_late
        attempt.is_late = is_late
        if all(other.is_late for other in transfer.attempts):
            self._hedge(transfer, overdue_s, now)

    def _hedge(self, transfer: _Transfer, overdue_s: float, now: float) -> None:
        """Send one more request for a late range if it is needed soon.

        Hedges are few. A range that holds the consumer up is hedged all the same once its newest
        request is overdue.
        """
        rest = transfer.size - transfer.reached
        if not self._is_needed(transfer):
            return
        newest_s = now - transfer.attempts[-1].started
        is_overdue = newest_s >= overdue_s * 2**transfer.num_timeouts
        if len(transfer.attempts) >= self._limits.max_side_by_side:
            # All of them may dribble. Bytes that come, if slowly, are waited for.
            furthest = max(transfer.attempts, key=lambda other: other.position)
            left_s = furthest.seconds_left(now, self._limits.piece_bytes)
            if not is_overdue or left_s <= self._limits.max_first_byte_s:
                return
            transfer.num_timeouts += 1
            slowest = min(transfer.attempts, key=lambda other: other.position)
            self._give_up(slowest, f"no end after {now - slowest.started:.1f} s", now)
            is_allowed = True
        else:
            is_allowed = is_overdue and self._may_hedge_overdue()
        if transfer.future.done() or not (is_allowed or self._may_hedge(rest)):
            return
        try:
            data = self._new_memory(transfer.size)
        except MemoryError:
            return  # the late request is waited for
        if not is_allowed:
            self._spend_hedge(rest)
        transfer.move(data)
        self._send(transfer, now, is_hedge=True)

    def _is_needed(self, transfer: _Transfer) -> bool:
        """Tell whether the consumer needs a range within twice the time of a new request."""
        soon_s = self._limits.slack_factor * self._speeds.usual_s(transfer.size - transfer.reached)
        return self._slack_s(transfer.request.deadline) <= soon_s

    def _may_hedge(self, num_bytes: int) -> bool:
        """Tell whether a hedge of so many bytes is within the allowances."""
        return self._speeds.is_hedging and self._hedges.has(1) and self._hedged_bytes.has(num_bytes)

    def _spend_hedge(self, num_bytes: int) -> None:
        self._hedges.spend(1)
        self._hedged_bytes.spend(num_bytes)

    def _may_hedge_overdue(self) -> bool:
        """Tell whether a range that holds the consumer up may be hedged without an allowance."""
        # Hedges that are late themselves do not count: one that dribbles must not hold others up.
        num_hedges = sum(other.is_hedge and not other.is_late for other in self._attempts)
        return num_hedges < max(1, self._in_flight.limit * self._limits.overdue_share)

    def _slack_s(self, deadline: int) -> float:
        """Return the seconds until the consumer needs what has this deadline."""
        num_steps = deadline - self._clock
        if num_steps <= 0:
            return 0.0
        if math.isnan(self._step_s):  # nothing was consumed yet
            return 0.0 if num_steps < self._limits.urgent_steps else math.inf
        return num_steps * self._step_s


class _Transfer:
    """A range on its way: its bytes so far, and the requests for the rest."""

    __slots__ = (
        "attempts",
        "data",
        "failures",
        "future",
        "is_asked_to_wait",
        "num_timeouts",
        "reached",
        "request",
        "serial",
        "size",
    )

    def __init__(
        self, request: RangeRequest, future: asyncio.Future[memoryview], serial: int
    ) -> None:
        self.request, self.future, self.serial = request, future, serial
        self.size = request.stop - request.start
        self.reached = 0  # bytes that have arrived, from the first on
        self.data = memoryview(b"")
        self.attempts: list[_Attempt] = []
        self.failures: Failures | None = None
        self.num_timeouts = 0
        self.is_asked_to_wait = False

    def move(self, data: memoryview) -> None:
        """Go on in new memory. A client may write into the old one until its request has ended.

        What it writes there is copied once its answer has said of which object it is.
        """
        data[: self.reached] = self.data[: self.reached]
        self.data = data


class _Attempt:
    """A request under way, from the byte that its transfer had reached."""

    __slots__ = (
        "into",
        "is_connecting",
        "is_hedge",
        "is_late",
        "marked",
        "marked_position",
        "num_permits",
        "opened",
        "position",
        "start",
        "started",
        "task",
        "touched",
        "transfer",
    )

    def __init__(self, transfer: _Transfer, started: float, is_hedge: bool) -> None:
        self.transfer, self.started, self.is_hedge = transfer, started, is_hedge
        self.start = self.position = self.marked_position = transfer.reached
        # A hedge may be answered with another object. Its bytes are copied once that is excluded,
        # and so are those of the late request beside it: see `_Transfer.move`.
        self.into = None if is_hedge else transfer.data[self.start :]
        self.opened: float | None = None
        self.marked = self.touched = started
        self.is_late = False
        self.is_connecting = False  # more requests in flight than ever need a new connection
        self.num_permits = 1.0
        self.task: asyncio.Task[None] | None = None

    def rate_now(self, now: float) -> float:
        """Return the bytes/s since the mark."""
        return (self.position - self.marked_position) / max(now - self.marked, 1e-6)

    def seconds_left(self, now: float, piece_bytes: int) -> float:
        """Return when the last byte would arrive, at the bytes/s so far.

        Infinite: no piece came in twice the time that it should have taken.
        """
        rest = self.transfer.size - self.position
        if self.opened is None or self.position == self.start:
            return math.inf
        seconds_per_byte = (self.touched - self.opened) / (self.position - self.start)
        if now - self.touched > 2 * min(rest, piece_bytes) * seconds_per_byte:
            return math.inf
        return rest * seconds_per_byte

    def cancel(self) -> None:
        # A cancelled task keeps its frames, and these hold this object and its memory.
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
