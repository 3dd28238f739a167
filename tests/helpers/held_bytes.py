"""How many bytes of samples a rank may hold, by its plan alone."""

from __future__ import annotations

import numpy as np

from mmstream.reading.plan import PlannedWindow, RankPlan

HELD_STEPS = 2
"""Steps whose ranges stay while the next one is taken: those of the main process."""


def most_held_bytes(plan: RankPlan, num_steps: int, ahead_bytes: int) -> int:
    """Return the bytes of all ranges that are held at the same time, at most.

    A range is held from its first use until the step of its last use is over. So a window that has
    ended is held beside the one that follows, for as long as its last step is.

    Args:
        plan: of the rank; nothing was planned yet.
        num_steps: that are taken.
        ahead_bytes: of ranges that are read before their first use, at most.
    """
    first_clock = plan.next_clock
    windows: dict[int, PlannedWindow] = {}
    for clock in range(first_clock, first_clock + num_steps):
        plan.plan_step()
        windows |= {id(window): window for window, _ in plan.steps[clock].spans}
    change = np.zeros(num_steps + 1, dtype=np.int64)
    for window in windows.values():
        for planned in window.ranges:
            last_use = int(window.clock[planned.samples.position].max())
            change[min(planned.first_use - first_clock, num_steps)] += planned.samples.num_bytes
            change[min(last_use + HELD_STEPS + 1 - first_clock, num_steps)] -= (
                planned.samples.num_bytes
            )
    return int(change.cumsum()[:-1].max()) + ahead_bytes
