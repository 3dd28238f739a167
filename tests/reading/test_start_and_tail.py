"""How soon batches come, and how many requests they take, from a store in virtual time."""

from __future__ import annotations

import random
from itertools import count

import pytest

from mmstream.storage.store import RequestError
from tests.helpers.fake_ranges import Answer, Sent
from tests.helpers.simulated_rank import SimulatedRun, corpus_order, simulate_rank
from tests.helpers.virtual_time import in_virtual_time

SLOW = Answer(latency_s=1.0, rate=2e6)
"""Twenty times slower than others."""
FAR = Answer(latency_s=0.2, rate=10e6)


@pytest.fixture(scope="module")
def usual() -> SimulatedRun:
    """Return a run of 200 batches from a store without faults."""
    runs = []

    @in_virtual_time
    async def simulate() -> None:
        runs.append(await simulate_rank(corpus_order(), num_steps=200))

    simulate()
    return runs[0]


def test_100_batches_come_within_3_seconds_at_50_ms(usual: SimulatedRun) -> None:
    assert usual.arrivals[0] < 0.2
    assert usual.arrivals[9] < 0.4
    assert usual.arrivals[99] < 3.0  # 1.9 GB were needed by then, at 800 MB/s


@in_virtual_time
async def test_100_batches_come_within_9_seconds_at_200_ms() -> None:
    run = await simulate_rank(corpus_order(), num_steps=100, answer=lambda sent: FAR)
    assert run.arrivals[0] < 0.5
    assert run.arrivals[99] < 5.0  # 5.5 if each step up is measured for two round trips


@pytest.mark.slow
@pytest.mark.parametrize(("num_new", "start_s"), [(0, 0.0), (128, 1.0)])
@in_virtual_time
async def test_a_tail_of_two_in_a_hundred_costs_little_also_where_new_connections_take_long(
    num_new: int, start_s: float, usual: SimulatedRun
) -> None:
    slow, num_sent = random.Random(1), count()

    def answer(sent: Sent) -> Answer:
        usual = Answer(latency_s=0.5) if next(num_sent) < num_new else Answer()
        return SLOW if slow.random() < 0.02 else usual

    run = await simulate_rank(corpus_order(), num_steps=200, answer=answer)
    assert run.arrivals[9] < usual.arrivals[9] + 0.6 + start_s
    assert run.arrivals[99] < 1.25 * usual.arrivals[99] + start_s
    assert run.rate(100, 199) > 0.85 * usual.rate(100, 199)
    assert run.counts.num_retries < 0.05 * run.counts.num_requests + 8


@in_virtual_time
async def test_requests_that_fail_cost_little(usual: SimulatedRun) -> None:
    random.seed(1)  # pauses are drawn
    draw = random.Random(1)
    refused = RequestError("503", is_throttled=True, retry_after_s=1)

    def answer(sent: Sent) -> Answer:
        value, num_bytes = draw.random(), draw.randrange(sent.stop - sent.start)
        if value < 0.02:
            return Answer(breaks_after=num_bytes)
        if value < 0.035:
            return Answer(ends_after=num_bytes)
        return Answer(error=refused) if value < 0.05 else Answer()

    run = await simulate_rank(corpus_order(), num_steps=150, answer=answer)
    assert run.rate(50, 149) > 0.85 * usual.rate(50, 149)
    assert max(run.waits[50:]) < 0.5
    assert run.limit >= 64
