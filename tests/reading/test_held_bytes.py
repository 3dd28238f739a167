"""What a rank holds of samples, on few ranks and on many: no more than by its plan, and gaps."""

from __future__ import annotations

import pytest

from mmstream.reading.server import SampleMemory
from tests.helpers.held_bytes import most_held_bytes
from tests.helpers.simulated_rank import corpus_order, corpus_plan, simulate_rank
from tests.helpers.virtual_time import in_virtual_time

ROWS = 256
WINDOW_BYTES, AHEAD_BYTES = 1 << 30, 256 << 20
"""Of all ranks together."""


class CountedMemory(SampleMemory):
    """Counts the bytes of the pieces, and those with the gaps between them."""

    most_taken = most_used = 0

    def take(self, num_bytes: int) -> memoryview:
        piece = super().take(num_bytes)
        free = sum(size for size, _ in self._sizes)
        self.most_taken = max(self.most_taken, self.num_bytes - free)
        self.most_used = max(self.most_used, self._num_used)
        return piece


@pytest.mark.parametrize(
    ("num_ranks", "rank", "num_steps"), [(1, 0, 20), (8, 7, 150), (64, 40, 400)]
)
@in_virtual_time
async def test_a_rank_holds_its_plan_and_gaps_of_a_quarter_at_most(
    num_ranks: int, rank: int, num_steps: int
) -> None:
    order = corpus_order(ROWS, window_bytes=WINDOW_BYTES)
    num_rows, ahead_bytes = ROWS // num_ranks, AHEAD_BYTES // num_ranks
    rows = rank * num_rows, (rank + 1) * num_rows
    memory = CountedMemory(4 << 30)
    await simulate_rank(
        order,
        num_steps=num_steps,
        rows=rows,
        num_workers=1,
        memory=memory,
        horizon_bytes=ahead_bytes,
    )
    memory.close()
    bound = most_held_bytes(corpus_plan(order, rows), num_steps + 2, ahead_bytes)
    assert 0.8 * bound < memory.most_taken <= 1.001 * bound  # each piece ends with a block of 512
    assert memory.most_used <= 1.25 * bound
    # The bound is about the rank's part of the windows, and what is ahead.
    assert bound < 2 * (WINDOW_BYTES + AHEAD_BYTES) / num_ranks
