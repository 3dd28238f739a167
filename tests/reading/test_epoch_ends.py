"""Where one epoch follows another: no batch is waited for, and no more memory is taken."""

from __future__ import annotations

import pytest

from mmstream.reading.rank_reader import HORIZON_BYTES
from tests.helpers.fake_ranges import Answer
from tests.helpers.held_bytes import most_held_bytes
from tests.helpers.simulated_rank import corpus_order, corpus_plan, simulate_rank
from tests.helpers.virtual_time import in_virtual_time
from tests.reading.test_held_bytes import CountedMemory

ROWS = 64
NEAR = Answer(latency_s=0.05, rate=40e6)
FAR = Answer(latency_s=0.2, rate=10e6)


@pytest.mark.parametrize("samples_per_s", [1000, 2000, 4000])
@pytest.mark.parametrize("answer", [NEAR, FAR], ids=["near", "far"])
@in_virtual_time
async def test_a_loop_with_a_pace_hardly_waits_where_an_epoch_begins(
    answer: Answer, samples_per_s: int
) -> None:
    order = corpus_order(ROWS, num_shards=60)
    num_steps = order.steps_per_epoch
    run = await simulate_rank(
        order,
        num_steps=3 * num_steps,
        answer=lambda sent: answer,
        step_s=ROWS / samples_per_s,
    )
    for epoch in (1, 2):
        begin = run.waits[epoch * num_steps :][:12]
        assert max(begin) < 0.2  # up to 0.8 with the horizon alone


@in_virtual_time
async def test_the_next_epoch_takes_the_memory_that_windows_had() -> None:
    order = corpus_order(ROWS, num_shards=60)
    num_steps = order.steps_per_epoch
    memory = CountedMemory(8 << 30)
    await simulate_rank(
        order,
        num_steps=3 * num_steps,
        step_s=ROWS / 4000,
        num_workers=1,
        memory=memory,
    )
    memory.close()
    plan = corpus_plan(order, (0, ROWS))
    assert memory.most_taken <= 1.001 * most_held_bytes(plan, 3 * num_steps, HORIZON_BYTES)
