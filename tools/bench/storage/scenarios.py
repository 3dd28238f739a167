"""The links and the faults under which `tools.bench.storage` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.helpers.http_fault_proxy import Faults
from tools.bench.storage.rows import Kind

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True)
class Scenario:
    """What the proxy does during a run."""

    title: str
    faults: Faults
    away_s: float = 0.0
    """The server goes away for so long, `AWAY_AFTER_S` after all workers are up."""
    paced: bool = False
    """The consumer takes samples at half of the rate that its row has without a pace."""
    kinds: tuple[Kind, ...] = ("mmstream", "client", "peer")
    """The rows that are measured."""


def _link(latency_ms: float, mb_per_s: float) -> Faults:
    return Faults(latency_s=latency_ms / 1000, bytes_per_s=mb_per_s * 1e6)


NEAR = _link(50, 40)
OURS: tuple[Kind, ...] = ("mmstream",)

SCENARIOS = {
    "direct": Scenario("no latency", Faults()),
    "50/40": Scenario("50 ms to the first byte, 40 MB/s a connection", NEAR),
    "50/10": Scenario("50 ms to the first byte, 10 MB/s a connection", _link(50, 10)),
    "200/40": Scenario("200 ms to the first byte, 40 MB/s a connection", _link(200, 40)),
    "200/10": Scenario("200 ms to the first byte, 10 MB/s a connection", _link(200, 10)),
    "tail": Scenario("50/40, 2 % of the GETs 20 times slower", replace(NEAR, tail=0.02)),
    "faults": Scenario(
        "50/40, 5 % of the GETs fail: 2 % reset, 1.5 % truncated, 1.5 % answered by 503",
        replace(NEAR, reset=0.02, truncate=0.015, busy=0.015, retry_after_s=1),
        kinds=("mmstream", "client"),
    ),
    "mute": Scenario(
        "50/40, 0.5 % of the GETs are never answered", replace(NEAR, mute=0.005), kinds=OURS
    ),
    "stall": Scenario(
        "50/40, 0.5 % of the answers stop in the middle, 0.5 % go on with 10 bytes a second",
        replace(NEAR, stall=0.005, dribble=0.005),
        kinds=OURS,
    ),
    "paced": Scenario("50/40, batches taken at half of the speed", NEAR, paced=True, kinds=OURS),
    "away": Scenario("50/40, the server is away in mid-run", NEAR, away_s=10.0, kinds=OURS),
}
"""By the name on the command line."""
