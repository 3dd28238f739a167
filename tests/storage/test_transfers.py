"""Ranges of a reader process: in which order they are requested, and what becomes of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import weakref
from dataclasses import replace
from itertools import count
from statistics import median

import numpy as np
import pytest

from mmstream.errors import StorageError
from mmstream.storage import ObjectStat, ReplacedError
from mmstream.storage.retry import health_of
from mmstream.storage.store import RequestError
from mmstream.storage.transfers import RangeRequest, TransferLimits, Transfers, own_memory
from tests.helpers.fake_ranges import Answer, FakeClient
from tests.helpers.virtual_time import in_virtual_time

DATA = random.Random(1).randbytes(64 << 10)
SIZE = 4 << 10

KILO = TransferLimits(
    piece_bytes=1 << 10, min_rated_bytes=256, least_bytes=64, min_connection_rate=1e3
)
"""Bytes count a thousandfold, so that tests copy less: 4 KiB stand for 4 MiB."""

REFUSED = ConnectionRefusedError(111, "refused")

urls = (f"fake://bucket{number}" for number in count())


class Store:
    """A fake store in virtual time, and the transfers from it."""

    def __init__(
        self,
        answer=lambda sent: Answer(rate=40e3),
        limits=KILO,
        new_memory=own_memory,
        **options,
    ) -> None:
        self.client = FakeClient({"a": DATA}, answer, next(urls), piece=1 << 10, **options)
        self.known: dict[str, ObjectStat] = {}
        self.transfers = Transfers([self.client], [self.known], limits, new_memory)
        self.started = self.now = asyncio.get_running_loop().time()

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.started

    def submit(self, start=0, stop=None, deadline=0, name="a"):
        stop = start + SIZE if stop is None else stop
        return self.transfers.submit(RangeRequest(0, name, start, stop, deadline))

    def submit_many(self, num_ranges, deadline=lambda i: i // 4):
        starts = [i * SIZE % len(DATA) for i in range(num_ranges)]
        return [self.submit(start, deadline=deadline(i)) for i, start in enumerate(starts)]

    async def read_many(self, num_ranges):
        """Read as a consumer does that waits for nothing else."""
        futures = self.submit_many(num_ranges)
        for i, future in enumerate(futures):
            start = i * SIZE % len(DATA)
            assert await future == DATA[start : start + SIZE]

    def pop_counts(self):
        return self.transfers.pop_counts()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_) -> None:
        await self.transfers.close()
        assert self.client.num_open == 0
        assert self.client.is_closed
        assert asyncio.all_tasks() == {asyncio.current_task()}


def answer_once(first, then=None):
    """Return what answers the first request in one way, and all others in another."""
    then = then or Answer(rate=40e3)
    numbers = count()
    return lambda sent: first if next(numbers) == 0 else then


def fixed(number, **changes):
    return TransferLimits(
        start_in_flight=number,
        min_start_in_flight=number,
        min_in_flight=1,
        max_in_flight=number,
        piece_bytes=1 << 10,
        least_bytes=64,
        **changes,
    )


# -- order and permits ---------------------------------------------------------------------------


@in_virtual_time
async def test_the_earliest_deadlines_are_requested_first_and_no_more_than_permits():
    for num_permits in (1, 4):
        async with Store(limits=fixed(num_permits)) as store:
            deadlines = [7, 3, 9, 3, 5, 0]
            futures = [store.submit(i, i + 1, deadline) for i, deadline in enumerate(deadlines)]
            await asyncio.gather(*futures)
            assert [sent.start for sent in store.client.sent] == [5, 1, 3, 4, 0, 2]
            assert store.client.max_open == num_permits


@pytest.mark.parametrize(("num_ranks", "in_flight"), [("1", 64), ("4", 16), ("64", 8), ("x", 64)])
@in_virtual_time
async def test_ranks_of_a_node_share_its_requests_in_flight(monkeypatch, num_ranks, in_flight):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    async with Store() as store:
        futures = store.submit_many(200, deadline=lambda i: 0)
        await asyncio.sleep(0.01)
        assert store.client.num_open == in_flight
        await asyncio.gather(*futures)


@in_virtual_time
async def test_cancelled_ranges_give_back_their_permits_and_connections():
    async with Store(limits=fixed(8)) as store:
        futures = store.submit_many(20, deadline=lambda i: 0)
        await asyncio.sleep(0.02)
        store.transfers.cancel(futures[:10])
        futures[10].cancel()  # without a word
        await asyncio.gather(*futures[11:])
        assert all(future.cancelled() for future in futures[:11])
        assert len(store.client.sent) <= 8 + 10
        futures = store.submit_many(20)
        await asyncio.sleep(0.07)
    assert all(future.cancelled() for future in futures[12:])  # by the close


@pytest.mark.parametrize("fault", [{"latency_s": math.inf}, {"stops_after": 1}])
@in_virtual_time
async def test_the_memory_of_a_range_that_is_given_up_comes_back_at_once(fault):
    pieces = []

    def new_memory(num_bytes):
        piece = np.empty(num_bytes, np.uint8)
        pieces.append(weakref.ref(piece))
        return memoryview(piece)

    gc.collect()
    gc.disable()
    try:
        async with Store(lambda sent: Answer(**fault), new_memory=new_memory) as store:
            future = store.submit()
            await asyncio.sleep(1)
            assert pieces[0]() is not None
            store.transfers.cancel([future])
            del future
            store.client.sent.clear()  # the fake keeps where bytes went
            await asyncio.sleep(1)
            assert pieces[0]() is None  # no garbage collector has run
    finally:
        gc.enable()


@in_virtual_time
async def test_an_answer_that_does_not_end_gives_its_connection_back():
    async with Store(lambda sent: Answer(stops_after=SIZE)) as store:
        assert await store.submit() == DATA[:SIZE]
        await asyncio.sleep(KILO.close_s + 1)
        assert store.client.num_open == 0


@in_virtual_time
async def test_requests_bytes_and_busy_seconds_are_counted_since_the_last_call():
    async with Store() as store:
        await asyncio.gather(*store.submit_many(10))
        await asyncio.sleep(100)
        counts = store.pop_counts()
        assert (counts.num_requests, counts.num_bytes) == (10, 10 * SIZE)
        assert counts.busy_s == pytest.approx(0.05 + SIZE / 40e3, abs=1e-6)
        assert counts.request_s == pytest.approx(10 * counts.busy_s, abs=1e-5)  # side by side
        assert store.pop_counts() == type(counts)()
        assert await store.submit(3, 3) == b""
        assert store.pop_counts().num_requests == 0
        assert (counts + counts).num_bytes == 20 * SIZE


# -- requests in flight, by measurement ----------------------------------------------------------


async def measured_rates(store, num_seconds):
    """Return the bytes/s of each second while the queue is never empty."""
    num_queued, rates = 0, []

    def submit(future=None):
        nonlocal num_queued
        num_queued -= future is not None
        while num_queued < 1000 and store.seconds < num_seconds:
            num_queued += 1
            store.submit(deadline=0).add_done_callback(submit)

    submit()
    for _ in range(num_seconds):
        await asyncio.sleep(1)
        rates.append(store.pop_counts().num_bytes)
    num_seconds = 0  # nothing more is submitted, also if this second ended a little early
    return rates


QUICK, FAR = Answer(rate=40e3), Answer(0.2, 10e3)


def refuses_a_few():
    refused = random.Random(6)
    error = RequestError("503", is_throttled=True)
    return lambda sent: Answer(0.05, 40e3, error if refused.random() < 0.05 else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "link_rate", "num_seconds", "in_flight", "least_rate"),
    [
        pytest.param(lambda _: QUICK, 1e6, 8, (64, 128), 0.9e6, id="more bring nothing"),
        pytest.param(lambda _: QUICK, 3e6, 8, (64, 512), 2.7e6, id="more bring more"),
        pytest.param(lambda _: FAR, math.inf, 2, (512, 512), 0, id="they stay quick"),
        pytest.param(lambda _: FAR, 1e6, 8, (64, 512), 0.9e6, id="far away"),
        pytest.param(lambda _: QUICK, 20e3, 40, (0, 32), 0, id="they share a slow link"),
        pytest.param(refuses_a_few(), math.inf, 3, (64, 512), 0, id="a few are refused"),
    ],
)
@in_virtual_time
async def test_requests_in_flight_are_as_many_as_bring_more_and_fill_the_link(
    answer, link_rate, num_seconds, in_flight, least_rate
):
    async with Store(answer, link_rate=link_rate) as store:
        rates = await measured_rates(store, num_seconds)
        assert in_flight[0] <= store.transfers._in_flight.limit <= in_flight[1]
        assert median(rates[5:] or rates) >= least_rate


@in_virtual_time
async def test_a_store_that_asks_for_fewer_requests_gets_half_of_them_once():
    error = RequestError("503", is_throttled=True, retry_after_s=7)
    until = 1000.3
    async with Store(
        lambda sent: Answer(0.05, 40e3, error if sent.time < until else None)
    ) as store:
        futures = store.submit_many(100, deadline=lambda i: 0)
        await asyncio.sleep(1)
        assert store.transfers._in_flight.limit == 32  # they were sent together: one sign, not 64
        counts = store.pop_counts()
        assert counts.num_throttled == counts.num_requests == 64
        await asyncio.gather(*futures)
        assert 7 < store.seconds < 12
        counts = store.pop_counts()
        assert counts.num_retries == 64


@pytest.mark.parametrize("retry_after_s", [0, 1])
@in_virtual_time
async def test_a_store_that_refuses_what_is_over_its_number_gets_about_that_many(retry_after_s):
    random.seed(1)  # pauses are drawn
    error = RequestError("503", is_throttled=True, retry_after_s=retry_after_s)
    async with Store(
        lambda sent: Answer(0.05, 40e3, error if store.client.num_open >= 16 else None)
    ) as store:
        rates = await measured_rates(store, 15)
        assert 8 <= store.transfers._in_flight.limit <= 24
        assert median(rates[5:]) >= 0.5 * 16 * SIZE / (0.05 + SIZE / 40e3)
        late = [sent for sent in store.client.sent if sent.time >= 1005]
        assert sum(sent.num_bytes == 0 for sent in late) < 0.1 * len(late)


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["breaks_after", "ends_after"])
@pytest.mark.parametrize("num_bytes", [0, 1, 1000, SIZE - 1])
@in_virtual_time
async def test_a_broken_answer_is_continued_at_its_byte(fault, num_bytes):
    async with Store(answer_once(Answer(rate=40e3, **{fault: num_bytes}))) as store:
        assert await store.submit(100) == DATA[100 : 100 + SIZE]
        bounds = [(sent.start, sent.stop) for sent in store.client.sent]
        assert bounds == [(100, 100 + SIZE), (100 + num_bytes, 100 + SIZE)]
        counts = store.pop_counts()
        assert (counts.num_requests, counts.num_retries, counts.num_bytes) == (2, 1, SIZE)


@in_virtual_time
async def test_a_server_away_for_a_minute_costs_a_minute():
    def answer(sent):
        is_away = 1000.5 <= sent.time < 1060.5
        return Answer(0.001, error=REFUSED) if is_away else Answer(rate=40e3)

    async with Store(answer) as store:
        await store.read_many(1000)
        assert 60 < store.seconds < 75  # single pauses last up to 10 s
        num_failed = sum(1000.5 <= sent.time < 1060.5 for sent in store.client.sent)
        assert num_failed < store.client.max_open * 25  # not the whole queue, again and again


@pytest.mark.parametrize("latency_s", [0.001, math.inf])
@in_virtual_time
async def test_a_server_that_stays_away_is_a_final_error(latency_s, caplog):
    def answer(sent):
        return Answer(latency_s, error=REFUSED) if store.seconds >= 1 else Answer(rate=40e3)

    async with Store(answer) as store:
        await store.submit()
        await asyncio.sleep(1)
        with caplog.at_level(logging.WARNING), pytest.raises(StorageError) as caught:
            await store.submit()
        assert 300 < store.seconds <= 362
        assert f"{store.client.url}/a: failed " in str(caught.value)
        assert " s (MMSTREAM_STORAGE_PATIENCE_S=300), last " in str(caught.value)
        assert 5 <= sum("it is tried again until" in text for text in caplog.messages) <= 12
        with pytest.raises(StorageError, match="failed once in "):  # the clock runs on
            await store.submit()


@in_virtual_time
async def test_a_store_that_never_answered_is_asked_five_times():
    async with Store(lambda sent: Answer(0.001, error=REFUSED)) as store:
        with pytest.raises(StorageError, match=r"failed 5 times in .* last ConnectionRefusedError"):
            await store.submit()
        assert len(store.client.sent) == 5


@in_virtual_time
async def test_a_range_that_alone_fails_has_the_same_patience():
    async with Store(
        lambda sent: Answer(0.01, 40e3, error=REFUSED if sent.start else None)
    ) as store:
        bad = store.submit(SIZE)
        while not bad.done():
            await store.submit(0)
            await asyncio.sleep(1)
        with pytest.raises(StorageError, match=r"failed \d+ times in 300\."):
            await bad


@in_virtual_time
async def test_a_range_whose_bytes_come_has_its_patience_from_the_last_one_on(monkeypatch):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "3")
    breaks_late = answer_once(Answer(rate=1e3, breaks_after=SIZE - 100), Answer(rate=1e3))
    async with Store(breaks_late) as store:
        assert await store.submit() == DATA[:SIZE]
        assert len(store.client.sent) == 2
        assert store.seconds > 3


V0, V1, SHORT = (ObjectStat(len(DATA), "v0"), ObjectStat(len(DATA), "v1"), ObjectStat(5, None))
CUT = ObjectStat(len(DATA) - 5, "v1")
BROKEN = {"rate": 40e3, "breaks_after": 1000}


@pytest.mark.parametrize(
    ("known", "answers", "kind", "error", "known_then"),
    [
        (None, [Answer(error=FileNotFoundError("no such a"))], FileNotFoundError, "no such", None),
        (None, [Answer(error=StorageError("no rights"))], StorageError, "no rights", None),
        (None, [Answer(error=TypeError("a bug"))], TypeError, "a bug", None),
        (None, [Answer(content=DATA[:-5])], StorageError, "/a: ends 5 bytes before 65536", CUT),
        (V0, [QUICK], ReplacedError, "its version was v0 and is v1", V0),
        (SHORT, [QUICK], ReplacedError, "its size was 5 bytes", SHORT),
        (None, [Answer(**BROKEN), Answer(version="v2")], ReplacedError, "was v1 and is v2", V1),
        (None, [Answer(**BROKEN), Answer(content=DATA + b"0")], ReplacedError, "was 65536", V1),
    ],
)
@in_virtual_time
async def test_a_final_error_is_passed_on_at_once_and_bytes_of_two_objects_are_never_mixed(
    known, answers, kind, error, known_then
):
    async with Store(answer_once(*answers)) as store:
        store.known |= {} if known is None else {"a": known}
        with pytest.raises(kind, match=error) as caught:
            await store.submit(len(DATA) - SIZE)
        assert type(caught.value) is kind
        assert len(store.client.sent) == len(answers)
        assert store.known.get("a") == known_then


# -- requests that take too long -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "stop", "continued_at"),
    [
        ({"latency_s": math.inf}, SIZE, 0),
        ({"stops_after": 100}, 200, 100),
        ({"rate": 10.0, "piece": 1}, SIZE, 50),
    ],
    ids=["mute", "stands still", "dribbles"],
)
@in_virtual_time
async def test_a_request_that_brings_nothing_is_sent_again_after_the_time_out(
    fault, stop, continued_at
):
    """Nothing says yet how long requests take here."""
    async with Store(answer_once(Answer(**({"rate": 40e3} | fault)))) as store:
        assert await store.submit(0, stop) == DATA[:stop]
        assert 5 <= store.seconds < 5.5
        first, second = (sent.start for sent in store.client.sent)
        assert first == 0
        assert second == pytest.approx(continued_at, abs=2)
        assert store.pop_counts().num_stalls == 1


@pytest.mark.parametrize("streams", [True, False])
@in_virtual_time
async def test_a_store_that_always_takes_fifteen_seconds_is_usable(streams):
    async with Store(lambda sent: Answer(15, 40e3), streams=streams) as store:
        await asyncio.gather(*store.submit_many(200, deadline=lambda i: 0))
        assert 0 < store.pop_counts().num_stalls <= 400
        await asyncio.gather(*store.submit_many(200, deadline=lambda i: 0))
        assert store.pop_counts().num_stalls == 0


DRIBBLE = Answer(rate=10.0, piece=1)
FAULTS = {"mute": Answer(math.inf), "stall": Answer(rate=40e3, stops_after=10), "dribble": DRIBBLE}


async def longest_wait(store, num_steps, num_bytes, num_ahead, rows=8):
    """Read steps as a rank does: ranges are asked for some steps ahead. Return the longest wait."""
    futures, waits = {}, []
    for clock in range(num_steps):
        for step in range(clock, min(num_steps, clock + num_ahead)):
            if step not in futures:
                starts = [(step * rows + i) * 97 % (len(DATA) - num_bytes) for i in range(rows)]
                futures[step] = [store.submit(i, i + num_bytes, step) for i in starts]
        before = store.seconds
        await asyncio.gather(*futures[clock])
        waits.append(store.seconds - before)
    return max(waits)


@pytest.mark.parametrize(
    ("share", "num_ahead", "late_share", "most_s"),
    [(0.01, 24, 0.05, 6), (0.01, 24, 0.0, 12), (0.05, 24, 0.05, 12), (0.05, 1, 0.05, 12)],
)
@pytest.mark.parametrize("num_bytes", [100, 3500], ids=["short", "long"])
@pytest.mark.parametrize("fault", FAULTS)
@in_virtual_time
async def test_no_step_waits_long_for_requests_that_bring_nothing(
    fault, share, num_bytes, num_ahead, late_share, most_s
):
    rng = random.Random(7)
    limits = replace(KILO, late_share=late_share, late_burst=8 if late_share else 0)
    async with Store(
        lambda sent: FAULTS[fault] if rng.random() < share else Answer(rate=40e3), limits
    ) as store:
        assert await longest_wait(store, 75, num_bytes, num_ahead) < most_s


class Pieces:
    """Memory for a few ranges. Whoever gives one back adds to `num_left`."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def take(self, num_bytes: int) -> memoryview:
        if not self.num_left:
            raise MemoryError("no room")
        self.num_left -= 1
        return memoryview(bytearray(num_bytes))


@in_virtual_time
async def test_ranges_wait_for_memory_and_only_one_that_a_step_waits_for_too_long_ends():
    pieces = Pieces(1)
    async with Store(new_memory=pieces.take) as store:
        futures = store.submit_many(4, deadline=lambda i: i)
        await futures[0]
        # A loop that validates a model takes no steps for minutes.
        await asyncio.sleep(600)
        assert not any(future.done() for future in futures[1:])
        started = store.seconds
        with store.transfers.needed(2), store.transfers.needed(2):
            for future in futures[1:3]:
                with pytest.raises(MemoryError, match=r"fake://bucket\d+/a bytes \d+-\d+: no room"):
                    await future
        assert store.seconds >= started + KILO.memory_s
        await asyncio.sleep(600)
        pieces.num_left = 1
        assert await futures[3] == DATA[3 * SIZE : 4 * SIZE]
        assert not store.transfers._transfers


@pytest.mark.parametrize("comes_back", [True, False])
@in_virtual_time
async def test_an_outage_is_no_lack_of_memory(comes_back):
    """Memory is refused during the outage already. The time counts from its end."""
    pieces = Pieces(2)
    is_away = False

    def answer(_sent):
        return Answer(0.001, error=REFUSED) if is_away else Answer(rate=40e3)

    async with Store(answer, new_memory=pieces.take) as store:
        await store.submit()  # the store has answered, so it is asked for longer
        is_away = True
        futures = store.submit_many(2, deadline=lambda _: 0)
        with store.transfers.needed(0):
            await asyncio.sleep(3 * KILO.memory_s)
            assert not any(future.done() for future in futures)
            is_away = False
            assert await futures[0] == DATA[:SIZE]
            answered = store.seconds
            await asyncio.sleep(KILO.memory_s - 1)
            pieces.num_left = int(comes_back)
            if comes_back:
                assert await futures[1] == DATA[SIZE : 2 * SIZE]
            else:
                with pytest.raises(MemoryError, match="no room"):
                    await futures[1]
                assert store.seconds >= answered + KILO.memory_s


async def warm_up(store, num_ranges=100):
    """Measure first bytes and rates, and earn what may be sent again."""
    await asyncio.gather(*store.submit_many(num_ranges, deadline=lambda i: 0))
    await asyncio.sleep(0.6)
    store.pop_counts()
    store.client.sent.clear()


@pytest.mark.parametrize(
    "fault",
    [{"latency_s": math.inf}, {"stops_after": 1000}, {"stops_after": 3900}, {"rate": 100.0}],
    ids=str,
)
@in_virtual_time
async def test_a_late_range_is_sent_again_from_its_byte(fault):
    async with Store() as store:
        await warm_up(store)
        store.client.answer = answer_once(Answer(**({"rate": 40e3} | fault)))
        start = store.seconds
        assert await store.submit(5) == DATA[5 : 5 + SIZE]
        assert store.seconds - start < 1
        counts = store.pop_counts()
        assert (counts.num_requests, counts.num_retries, counts.num_stalls) == (2, 1, 1)
        first, second = store.client.sent
        assert second.start == 5 + first.num_bytes
        assert first.is_closed


@pytest.mark.parametrize("is_away", [False, True])
@in_virtual_time
async def test_a_refused_range_pauses_unless_the_store_answers_others(is_away, monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda least, most: 1.0)  # the longest pause is longer
    refused = RequestError("503", is_throttled=True, retry_after_s=5)
    async with Store() as store:
        await warm_up(store)
        store.client.answer = answer_once(Answer(error=refused))
        start = store.seconds
        futures = [store.submit(5, deadline=0)]
        if not is_away:
            futures += [store.submit(i) for i in range(100, 110)]
        await asyncio.gather(*futures)
        assert store.pop_counts().num_retries == 1
        assert 5 <= store.seconds - start < 5.5 if is_away else store.seconds - start < 0.6


@pytest.mark.parametrize("error", [None, RequestError("503", retry_after_s=60)])
@in_virtual_time
async def test_ranges_are_sent_again_for_a_share_of_the_requests_only(error):
    slow = random.Random(4)
    limits = fixed(64, late_share=0.02, late_burst=4)

    def answer(sent):
        if slow.random() > 0.04:
            return Answer(rate=40e3)
        return Answer(1.5, 40e3) if error is None else Answer(error=error)

    async with Store(limits=limits) as store:
        await warm_up(store)
        store.client.answer = answer
        futures = store.submit_many(2000, deadline=lambda i: 0)
        await asyncio.sleep(10)
        counts = store.pop_counts()
        num_again = counts.num_requests - 2000
        assert 20 < num_again <= 4 + 0.02 * 2100
        store.transfers.cancel(futures)


# -- everything at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@in_virtual_time
async def test_any_mixture_of_faults_gives_the_right_bytes_or_a_final_error(seed):
    rng = random.Random(seed)
    random.seed(seed)
    share = rng.choice([0.05, 0.3, 0.8])
    replaced_at = rng.choice([math.inf, 1003.0])

    def answer(sent):
        version = "v2" if sent.time >= replaced_at else "v1"
        healthy = Answer(rng.uniform(0.01, 0.3), rng.uniform(5e3, 50e3), version=version)
        if rng.random() > share:
            return healthy
        return rng.choice(
            [
                Answer(math.inf),
                Answer(0.01, error=REFUSED),
                Answer(0.01, error=RequestError("503", is_throttled=True)),
                Answer(0.01, error=RequestError("503", is_throttled=True, retry_after_s=3)),
                Answer(0.05, rng.uniform(10, 1e4), version=version),
                Answer(0.05, 40e3, breaks_after=rng.randrange(SIZE), version=version),
                Answer(0.05, 40e3, ends_after=rng.randrange(SIZE), version=version),
                Answer(0.05, 40e3, stops_after=rng.randrange(SIZE), version=version),
            ]
        )

    async with Store(answer) as store:
        health_of(store.client.url).answered(store.started)
        bounds = []
        for _ in range(300):
            start = rng.randrange(len(DATA))
            bounds.append((start, min(len(DATA), start + rng.randrange(2 * SIZE))))
        futures = [store.submit(*bound, deadline=rng.randrange(30)) for bound in bounds]
        given_up = set(rng.sample(range(300), 20))
        for clock in range(30):
            await asyncio.sleep(rng.uniform(0, 0.2))
            if clock == 5:
                store.transfers.cancel([futures[i] for i in given_up])
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        for i, ((start, stop), outcome) in enumerate(zip(bounds, outcomes)):
            if isinstance(outcome, ReplacedError):
                assert replaced_at < math.inf
            elif isinstance(outcome, asyncio.CancelledError):
                assert i in given_up
            else:
                assert outcome == DATA[start:stop]
        assert not store.transfers._transfers
        assert not store.transfers._attempts
