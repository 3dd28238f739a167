"""Storage: the ranges that a reader process has asked for, requested by their deadlines.

The reader process of a rank says which ranges it needs and when. This module decides which of them
is requested next, how many at a time, and what follows a failure. `range_client` sends each request
once.

    submit -> heap by deadline -> a permit -> request -> bytes -> the range's future
                     ^                           |
                     +------- a pause <----------+ it failed or is late: the rest is requested again

A range whose request breaks, is refused, or brings nothing for twice the usual time goes on at the
byte that it had reached. Every response says which object it is from, so bytes of two objects are
never mixed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from statistics import median
from typing import NamedTuple

from mmstream.errors import StorageError
from mmstream.processes.machine import num_local_ranks
from mmstream.storage.range_client import RangeClient
from mmstream.storage.retry import Failures, health_of
from mmstream.storage.store import ObjectStat, ReplacedError, RequestError, require_known

# -- the numbers to go by --------------------------------------------------------------------------
#
# `mmstream.storage.retry` has those of waiting for a store that fails.

MAX_PREFIX_RATE = 5500
"""GET requests/s that a prefix of S3 answers at least. Under a steady load S3 splits prefixes."""


@dataclass(frozen=True)
class TransferLimits:
    """The numbers behind requests in flight and late requests, each with its reason."""

    # Requests in flight

    start_in_flight: int = 64
    """Of all ranks of a node together, as they start: 64 ranges of 4 MiB hide 200 ms at 1 GB/s."""
    min_start_in_flight: int = 8
    """Of a rank, as it starts: many ranks on a node still overlap their first requests."""
    min_in_flight: int = 4
    """Of a rank, whatever happens: fewer cannot show that a store is well again."""
    max_in_flight: int = 512
    """Of all ranks of a node together: more only fills the queues of the network and the store."""
    sent_at_once: int = 4
    """Requests that are sent before other things get their turn. Fresh memory for 4 MiB takes 1 to
    2 ms. Up to 64 at once held up the reply to a worker for 20 to 60 ms."""
    slowdown: float = 1.5
    """Factor of the least median time of requests above which their number is not doubled: twice
    as many requests that take this much longer bring a third more bytes/s."""
    min_connection_rate: float = 1e6
    """Median bytes/s of a request below which too many share the link: more only get late."""
    recovery_s: float = 10.0
    """Seconds before the number doubles again after failures halved it: stores recover slowly."""
    forgiven_share: float = 0.1
    """Share of requests that may time out or be refused before the number is halved: sending those
    again costs less than half of the connections."""
    forgiven_burst: int = 8
    """Requests that may fail so at once, after a time without any: an eighth of 64, and of more."""

    # Requests that take too long

    late_factor: float = 2.0
    """A request is late once it brings nothing for this multiple of the usual time: that to the
    first byte, or that of a piece. With 3, a loop was 16 % slower in a simulation where 2 % of the
    responses take 20 times as long, at 50 ms and 40 MB/s a connection."""
    min_late_s: float = 0.1
    """Least seconds until then: a busy machine reads a socket that much later. With 1 s and 2 % of
    the requests, the loop had a third of its speed."""
    late_share: float = 0.05
    """Share of requests that may be sent again because they are late, or before the end of a pause:
    where all requests are slow, this is the load that it adds."""
    late_burst: int = 8
    """Requests that may be sent again so at once, after a time without any."""
    stall_s: float = 5.0
    """Seconds without `least_bytes` after which a request is sent again in any case: a lost packet
    and a busy server take up to some seconds."""
    max_stall_s: float = 60.0
    """The largest of these time-outs. No server in use takes longer."""
    least_bytes: int = 64 << 10
    """Bytes that count as progress: below 13 kB/s a response stands still. A range that came so far
    is continued without a pause: the server does answer."""

    # Memory

    memory_s: float = 30.0
    """Seconds for which a range that a step waits for is refused memory, before that is an error. A
    worker gives memory back once it is done with its step: decoding one takes less."""

    # Measuring

    tick_s: float = 0.05
    """Seconds between two looks at the requests in flight: late ones are seen by half of it."""
    num_times: int = 128
    """Requests that ended of late and say what is usual: a few seconds of them."""
    min_times: int = 8
    """Requests that must have ended: fewer say too little."""
    piece_bytes: int = 1 << 20
    """Bytes that a client may hold back until it hands them over as one piece."""
    guessed_piece_s: float = 1.5
    """Seconds that a piece takes where all ranges so far were too short to have a rate."""
    min_rated_bytes: int = 256 << 10
    """Bytes of a request from which its rate is measured: shorter ones come in one packet train."""
    close_s: float = 5.0
    """Seconds that cancelled requests get to end at the close, and a response whose bytes have all
    come: closing a connection is quick."""


# -- what is counted -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Requests, bytes and troubles of a span of time.

    The counts of two spans can be added. ``num_bytes / busy_s`` is the mean rate in bytes/s.

    Examples:
        >>> from mmstream.storage.transfers import TransferCounts
        >>> total = TransferCounts(num_requests=3, num_bytes=300) + TransferCounts(num_requests=1)
        >>> total.num_requests, total.num_bytes
        (4, 300)
    """

    num_requests: int = 0
    """Requests for ranges of shards that were sent, repeated ones included."""
    num_index_requests: int = 0
    """Requests for indexes and their parts that were sent."""
    num_bytes: int = 0
    """Bytes that arrived."""
    num_retries: int = 0
    """Requests that were sent because an earlier one had failed, had stopped or was late."""
    num_stalls: int = 0
    """Requests that were given up because they were late or stood still."""
    num_throttled: int = 0
    """Answers that asked for fewer requests (429, 503)."""
    num_cache_hit_bytes: int = 0
    """Bytes of samples that came from the node cache, and not from storage."""
    num_cached_bytes: int = 0
    """Bytes of samples that were written into the node cache."""
    num_cache_dropped_bytes: int = 0
    """Bytes that were not, because the disk could not write them as fast as they arrived."""
    num_cache_damaged: int = 0
    """Files of the node cache with wrong bytes. They were removed, and read from storage."""
    busy_s: float = 0.0
    """Seconds in which at least one request was under way."""
    request_s: float = 0.0
    """Seconds that requests were under way, all of them together. ``request_s / busy_s`` is the
    mean number of requests in flight."""

    def __add__(self, other: TransferCounts) -> TransferCounts:
        # `astuple` copies deeply, which takes eight times as long.
        return TransferCounts(
            *(getattr(self, name) + getattr(other, name) for name in self.__slots__)
        )


class SharedCounts:
    """Counts by name, which several threads add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to some of them."""
        with self._lock:
            self._counts.update(counts)

    def pop(self) -> Counter[str]:
        """Return what was counted since the previous call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


# -- how long requests usually take ----------------------------------------------------------------


class RequestTimes:
    """First bytes and rates of the last requests of a process, and how many may be sent again.

    The time to the first byte and the rate after it are kept apart: the time of a whole request
    says nothing where ranges are 0.1 MB and 8 MB long.

    Args:
        limits: The numbers to go by.

    Attributes:
        first_byte_s: Median of the last requests.
        slowest_s: The longest time to a first byte.
        piece_s: Seconds that a piece takes after the one before, at the median rate.
    """

    def __init__(self, limits: TransferLimits) -> None:
        self._limits = limits
        self._first_bytes: deque[float] = deque(maxlen=limits.num_times)
        self._rates: deque[float] = deque(maxlen=limits.num_times)
        # Until something is known, a request is late when it stands still.
        self.first_byte_s = self.slowest_s = self.piece_s = limits.stall_s / limits.late_factor
        self._num_repeatable = float(limits.late_burst)

    def add(self, first_byte_s: float, rate: float | None) -> None:
        """Note a request that ended well.

        Args:
            first_byte_s: Seconds to its first byte.
            rate: Its bytes/s, or None for a request too short to tell.
        """
        self._first_bytes.append(first_byte_s)
        if rate is not None:
            self._rates.append(rate)
        limits = self._limits
        self._num_repeatable = min(limits.late_burst, self._num_repeatable + limits.late_share)

    def refresh(self) -> None:
        """Work out what is usual from the requests so far."""
        if len(self._first_bytes) >= self._limits.min_times:
            self.first_byte_s = median(self._first_bytes)
            self.slowest_s = max(self._first_bytes)
            self.piece_s = self._limits.guessed_piece_s
        if len(self._rates) >= self._limits.min_times:
            self.piece_s = self._limits.piece_bytes / median(self._rates)

    def may_repeat(self) -> bool:
        """Tell whether one more request may be sent again, and count it: only a share of them."""
        is_allowed = self._num_repeatable >= 1
        self._num_repeatable -= is_allowed
        return is_allowed


# -- how many requests are in flight ---------------------------------------------------------------
#
# It starts with a number that suits most links, and doubles it each round trip while ranges are
# queued and requests stay as quick as the quickest ones. This is the slow start of TCP. It halves
# the number where the store asks for it, and where requests share a link that is too slow for them.


class InFlight:
    """The number of requests that may be in flight.

    Times are those of the event loop.

    Args:
        limits: The numbers to go by.
        num_local_ranks: Ranks of this node. They share its link.

    Attributes:
        limit: The number now.
    """

    def __init__(self, limits: TransferLimits, num_local_ranks: int) -> None:
        self._limits = limits
        least = limits.min_start_in_flight
        self.limit = max(least, limits.start_in_flight // num_local_ranks)
        self._max = max(least, limits.max_in_flight // num_local_ranks)
        # Seconds of short requests (True), and seconds a byte of others, that were sent since the
        # last change. Then the least medians of each kind.
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._least: dict[bool, float] = {True: math.inf, False: math.inf}
        self._num_failed = 0.0
        self._changed_at = self._no_growth_before = -math.inf

    def ended(self, started: float, rate: float | None, now: float, *, is_queued: bool) -> None:
        """Note a request that ended well.

        Args:
            started: When it was sent.
            rate: Its bytes/s, or None for a request too short to tell.
            now: The time.
            is_queued: Whether ranges wait for a permit.
        """
        self._num_failed = max(0.0, self._num_failed - self._limits.forgiven_share)
        if started < self._changed_at:
            return
        is_short = rate is None
        times = self._times[is_short]
        times.append(now - started if rate is None else 1 / rate)
        if len(times) < self.limit / 2:
            return  # fewer say too little
        usual = median(times)
        times.clear()
        self._least[is_short] = least = min(self._least[is_short], usual)
        if not is_short and usual * self._limits.min_connection_rate > 1:
            self._change(self.limit // 2, now)
        elif (
            is_queued
            and now >= self._no_growth_before
            and usual <= self._limits.slowdown * least
            and (is_short or usual * self._limits.min_connection_rate < 1 / 2)
        ):
            self._change(2 * self.limit, now)

    def failed(self, started: float, now: float) -> None:
        """Note a request that was refused because of too many, or that was not answered.

        A few among many are not a sign of too many.
        """
        self._num_failed += 1
        most = max(self._limits.forgiven_burst, self.limit // 8)
        if self._num_failed > most and started >= self._changed_at:
            self._no_growth_before = now + self._limits.recovery_s
            self._change(self.limit // 2, now)

    def _change(self, limit: int, now: float) -> None:
        self.limit = min(self._max, max(self._limits.min_in_flight, limit))
        self._num_failed = 0.0
        self._changed_at = now
        self._times = {True: [], False: []}


# -- transfers -------------------------------------------------------------------------------------


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
        expected: For each client, the objects as they are expected, by name. An object that is not
            in it is entered as its first response says.
        limits: How many requests at a time, and when one counts as late.
        new_memory: (length of a range) -> where its bytes go. It raises a MemoryError where
            there is none.
    """

    def __init__(
        self,
        clients: Sequence[RangeClient],
        expected: Sequence[MutableMapping[str, ObjectStat]],
        limits: TransferLimits | None = None,
        new_memory: Callable[[int], memoryview] = own_memory,
    ) -> None:
        self._clients, self._expected = clients, expected
        self._health = [health_of(client.url_of("")) for client in clients]
        self._limits = limits or TransferLimits()
        self._new_memory = new_memory
        self._loop = asyncio.get_running_loop()
        self._serial = count()
        self._transfers: dict[asyncio.Future[memoryview], _Transfer] = {}
        self._queue: list[tuple[int, int, _Transfer]] = []  # a heap
        self._pausing: dict[_Transfer, asyncio.TimerHandle] = {}
        self._attempts: dict[_Attempt, None] = {}  # under way, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._memory_lacks_since: float | None = None  # while the first range in the queue waits
        self._needed: dict[int, tuple[int, float]] = {}  # deadlines that are waited for, since when
        self._in_flight = InFlight(self._limits, num_local_ranks())
        self._times = RequestTimes(self._limits)
        self._counts: Counter[str] = Counter()
        self._busy_s, self._busy_since, self._request_s = 0.0, 0.0, 0.0
        self._next_fill: asyncio.Handle | None = None
        self._next_tick: asyncio.TimerHandle | None = None

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
        transfer = self._transfers[future] = _Transfer(request, future, next(self._serial))
        self._enqueue(transfer)
        return future

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

        An outage of the store is not a lack of memory: the time starts over while ranges that are
        needed by this deadline have memory, and are waited for.

        Args:
            deadline: Of the range.
            since: What this said at the refusal before. None: it is the first one.
        """
        transfers = chain((attempt.transfer for attempt in self._attempts), self._pausing)
        if since is None or any(transfer.request.deadline <= deadline for transfer in transfers):
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
        # A store that is away is asked for few ranges again and again, and for no further ones.
        is_away = any(health.silent_since is not None for health in self._health)
        num_sent, num_kept = 0, len(self._pausing) if is_away else 0
        lacks_since, self._memory_lacks_since = self._memory_lacks_since, None
        while self._queue:
            deadline, _, transfer = self._queue[0]
            if transfer.future.done():
                heapq.heappop(self._queue)
                self._forget(transfer)
                continue
            num_held = len(self._attempts) + (num_kept if transfer.failures is None else 0)
            if num_held >= self._in_flight.limit:
                break
            if num_sent == self._limits.sent_at_once:  # workers ask for steps meanwhile
                self._wake()
                break
            try:
                self._send(transfer)
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

    # -- one request -----------------------------------------------------------------------------

    def _send(self, transfer: _Transfer) -> None:
        if not transfer.data:
            transfer.data = self._new_memory(transfer.size)
        now = self._loop.time()
        attempt = transfer.attempt = _Attempt(transfer, now)
        self._counts["num_requests"] += 1
        self._counts["num_retries"] += transfer.was_sent
        transfer.was_sent = True
        if not self._attempts:
            self._busy_since = now
        self._attempts[attempt] = None
        attempt.task = self._loop.create_task(self._receive(attempt))
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(self._tasks.discard)

    async def _receive(self, attempt: _Attempt) -> None:
        transfer = attempt.transfer
        client, name, start, stop, _ = transfer.request
        into = transfer.data[attempt.start :]
        try:
            stream = await self._clients[client].open(name, start + attempt.start, stop, into)
            end = None
            try:
                self._begin(attempt, stream.stat)
                # To the end, even if all bytes have come: the connection may serve again then.
                async for piece in stream:
                    self._take(attempt, piece)
                    if attempt not in self._attempts and end is None:
                        end = self._loop.call_later(self._limits.close_s, attempt.cancel)
            finally:
                if end is not None:
                    end.cancel()
                await stream.close()
            self._fail(attempt, RequestError(f"the response ended at byte {transfer.reached}"))
        except Exception as error:
            self._fail(attempt, error)

    def _begin(self, attempt: _Attempt, stat: ObjectStat | None) -> None:
        """Note that a response begins, and compare its object with the expected one."""
        client, name, _, stop, _ = attempt.transfer.request
        if stat is not None:
            url = self._clients[client].url_of(name)
            require_known(url, name, stat, self._expected[client])
            if stat.size < stop:
                raise StorageError(f"{url}: ends {stop - stat.size} bytes before {stop}")
        attempt.opened = attempt.marked = self._loop.time()

    def _take(self, attempt: _Attempt, piece: bytes | memoryview) -> None:
        """Put a piece where it belongs. The piece with the last byte ends the transfer."""
        if attempt not in self._attempts:
            return  # complete
        transfer, now = attempt.transfer, self._loop.time()
        begin, end = transfer.reached, transfer.reached + len(piece)
        if end > transfer.size:
            raise RequestError("more bytes came than were requested")
        if begin == attempt.start:
            self._health[transfer.request.client].answered(now)
        self._counts["num_bytes"] += len(piece)
        if not (isinstance(piece, memoryview) and piece.obj is transfer.data.obj):
            transfer.data[begin:end] = piece
        transfer.reached = end
        if end - attempt.marked_at >= self._limits.least_bytes:
            attempt.marked, attempt.marked_at = now, end
        if end == transfer.size:
            self._complete(attempt, now)

    def _complete(self, attempt: _Attempt, now: float) -> None:
        transfer, rate = attempt.transfer, None
        opened = attempt.opened or now
        num_bytes = transfer.size - attempt.start
        if num_bytes >= self._limits.min_rated_bytes:
            rate = num_bytes / max(now - opened, 1e-6)
        self._times.add(opened - attempt.started, rate)
        self._in_flight.ended(attempt.started, rate, now, is_queued=bool(self._queue))
        self._release(attempt)
        if not transfer.future.done():
            transfer.future.set_result(transfer.data)
        self._forget(transfer)

    # -- what follows a failure ------------------------------------------------------------------

    def _fail(self, attempt: _Attempt, error: Exception) -> None:
        """Request again what is missing, or end the transfer with an error that is final."""
        if attempt not in self._attempts:
            return  # given up, or complete
        now, transfer = self._loop.time(), attempt.transfer
        self._release(attempt)
        if isinstance(error, (FileNotFoundError, ReplacedError)):
            self._health[transfer.request.client].answered(now)
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

    def _retry(
        self, attempt: _Attempt, error: Exception, now: float, pause_s: float | None
    ) -> None:
        """Queue a transfer again, after a pause of its patience or of `pause_s`."""
        transfer = attempt.transfer
        if transfer.failures is None or self._has_moved(attempt):  # its time starts over
            client, name, _, _, _ = transfer.request
            url = self._clients[client].url_of(name)
            transfer.failures = Failures(url, self._health[client])
        try:
            patient_s = transfer.failures.add(error, attempt.marked, now)
        except Exception as final:  # whatever it is: a range that is lost would be waited for
            self._end(transfer, final)
            return
        self._pausing[transfer] = self._loop.call_later(
            patient_s if pause_s is None else min(pause_s, patient_s), self._enqueue, transfer
        )

    def _has_moved(self, attempt: _Attempt) -> bool:
        return attempt.transfer.reached - attempt.start >= self._limits.least_bytes

    def _end(self, transfer: _Transfer, error: Exception) -> None:
        if not transfer.future.done():
            transfer.future.set_exception(error)
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        """Drop what belongs to a transfer that has ended, or that nobody needs."""
        if (attempt := transfer.attempt) is not None:
            self._release(attempt)
            attempt.cancel()
        if (handle := self._pausing.pop(transfer, None)) is not None:
            handle.cancel()
        self._transfers.pop(transfer.future, None)

    def _release(self, attempt: _Attempt) -> None:
        """Give back the permit of a request."""
        del self._attempts[attempt]
        attempt.transfer.attempt = None
        now = self._loop.time()
        self._request_s += now - attempt.started
        if not self._attempts:
            self._busy_s += now - self._busy_since
        self._wake()

    # -- which requests are late -------------------------------------------------------------------

    def _tick(self) -> None:
        """Look at all requests under way, and at those that pause."""
        now = self._loop.time()
        self._next_tick = None
        self._times.refresh()
        for attempt in list(self._attempts):
            if attempt.transfer.future.done():
                self._forget(attempt.transfer)
            else:
                self._check(attempt, now)
        self._end_pauses()
        self._fill()

    def _check(self, attempt: _Attempt, now: float) -> None:
        """Send a request again that stands still, or that is late."""
        transfer, limits = attempt.transfer, self._limits
        late_s = max(limits.min_late_s, limits.late_factor * self._usual_s(attempt))
        late_s *= 2**transfer.num_given_up
        stall_s = min(limits.max_stall_s, max(limits.stall_s, late_s))
        silent_s = now - attempt.marked
        if silent_s < stall_s and (silent_s < late_s or not self._times.may_repeat()):
            return
        self._release(attempt)
        attempt.cancel()
        transfer.num_given_up += 1
        self._counts["num_stalls"] += 1
        if silent_s < stall_s:
            self._enqueue(transfer)
            return
        self._in_flight.failed(attempt.started, now)
        num_bytes = transfer.reached - attempt.start
        error = RequestError(f"no further byte after {num_bytes} in {silent_s:.1f} s")
        self._retry(attempt, error, now, 0.0)

    def _end_pauses(self) -> None:
        """Send a few ranges again before their pause ends, while the store answers others.

        A server that refuses one request in fifty has room for others. One that refuses many is
        asked for fewer: see `InFlight`.
        """
        for transfer, handle in list(self._pausing.items()):
            is_silent = self._health[transfer.request.client].silent_since is not None
            if not is_silent and self._times.may_repeat():
                handle.cancel()
                self._enqueue(transfer)

    def _usual_s(self, attempt: _Attempt) -> float:
        """Return how long the next piece of a request usually takes."""
        if not self._clients[attempt.transfer.request.client].streams:
            # Its first byte is seen with its last one, and ranges are of many lengths.
            return max(self._times.slowest_s, self._limits.stall_s / self._limits.late_factor)
        return self._times.first_byte_s if attempt.opened is None else self._times.piece_s


class _Transfer:
    """A range on its way: its bytes so far, and the request for the rest."""

    __slots__ = (
        "attempt",
        "data",
        "failures",
        "future",
        "num_given_up",
        "reached",
        "request",
        "serial",
        "size",
        "was_sent",
    )

    def __init__(
        self, request: RangeRequest, future: asyncio.Future[memoryview], serial: int
    ) -> None:
        self.request, self.future, self.serial = request, future, serial
        self.size = request.stop - request.start
        self.reached = 0  # bytes that have arrived, from the first on
        self.data = memoryview(b"")
        self.attempt: _Attempt | None = None
        self.failures: Failures | None = None
        self.num_given_up = 0
        self.was_sent = False


class _Attempt:
    """A request under way, from the byte that its transfer had reached."""

    __slots__ = ("marked", "marked_at", "opened", "start", "started", "task", "transfer")

    def __init__(self, transfer: _Transfer, started: float) -> None:
        self.transfer = transfer
        self.start = self.marked_at = transfer.reached
        self.started = self.marked = started
        self.opened: float | None = None
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        # A cancelled task keeps its frames, and these hold this object and its memory.
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
