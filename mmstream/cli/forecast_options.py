"""The options of a planned run, ``mmstream info --plan G``, and their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click

from mmstream.cli.shared import AT_LEAST_0, AT_LEAST_1

__all__ = ["OPTIONS", "PlannedRun", "forecast_options"]

F = TypeVar("F", bound=Callable[..., None])

MORE_THAN_0 = click.FloatRange(min=0, min_open=True)

_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "--plan",
        {
            "type": AT_LEAST_1,
            "metavar": "G",
            "help": "Instead, say what a run with batches of G rows over all ranks asks of object "
            "storage. Without URL: over a corpus of --samples samples of --mean-bytes bytes.",
        },
    ),
    ("--ranks", {"type": AT_LEAST_1, "default": 1, "help": "Ranks of the run: its GPUs."}),
    ("--ranks-per-node", {"type": AT_LEAST_1, "default": 8, "help": "Ranks of a machine."}),
    ("--epochs", {"type": AT_LEAST_1, "default": 1, "help": "Epochs of the run."}),
    (
        "--mean-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Without URL: bytes of a sample in its tar, with headers and padding.",
        },
    ),
    (
        "--pack-plan",
        {
            "metavar": "NAME",
            "help": "Rows are packs of this plan: its name beside the index, or its folder or URL. "
            "Of a mixture: the name that the plans of all sources have.",
        },
    ),
    (
        "--weights-of",
        {
            "type": click.Choice(["samples", "tokens"]),
            "default": "samples",
            "help": "With packs of a mixture: what its weights are proportions of.",
        },
    ),
    (
        "--window-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Bytes of all windows together.  [default: 2 MiB a row, within 2 to 8 GiB]",
        },
    ),
    (
        "--pipeline",
        {
            "metavar": "MODULE:OBJECT",
            "help": "The pipeline of training. Some samples of 8 MiB or more are decoded, to see "
            "what its decoders read of them.  [default: all]",
        },
    ),
    (
        "--ranged-bytes",
        {
            "type": AT_LEAST_0,
            "help": "In place of --pipeline: bytes that a decoder reads of a sample of 8 MiB or "
            "more, beside its first 64 KiB.",
        },
    ),
    (
        "--ranged-requests",
        {"type": AT_LEAST_0, "help": "Requests in which it reads them. Goes with --ranged-bytes."},
    ),
    ("--samples-per-second", {"type": MORE_THAN_0, "help": "Speed of all ranks together."}),
    (
        "--request-price",
        {"type": click.FloatRange(min=0), "metavar": "PRICE", "help": "Price of 1,000 requests."},
    ),
    (
        "--egress-price",
        {
            "type": click.FloatRange(min=0),
            "metavar": "PRICE",
            "help": "Price of 1e9 bytes that leave the store.",
        },
    ),
    (
        "--memory-bytes",
        {
            "type": AT_LEAST_1,
            "help": "Memory of a machine: windows that take more than a quarter are not held.",
        },
    ),
    (
        "--cache-bytes",
        {"type": AT_LEAST_0, "help": "Node cache of each machine, for the epochs after the first."},
    ),
    (
        "--reshuffle",
        {
            "type": click.Choice(["global", "lanes"]),
            "help": "As mm.Pipeline(reshuffle=).  [default: lanes with --cache-bytes]",
        },
    ),
]

OPTIONS = [name for name, _ in _OPTIONS]
"""Names of the options."""


@dataclass(frozen=True)
class PlannedRun:
    """The options of a planned run."""

    plan: int
    """G."""
    ranks: int = 1
    ranks_per_node: int = 8
    epochs: int = 1
    mean_bytes: int | None = None
    pack_plan: str | None = None
    weights_of: Literal["samples", "tokens"] = "samples"
    window_bytes: int | None = None
    pipeline: str | None = None
    ranged_bytes: int | None = None
    ranged_requests: int | None = None
    samples_per_second: float | None = None
    request_price: float | None = None
    egress_price: float | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    reshuffle: str | None = None

    @property
    def ranks_of_node(self) -> int:
        """Ranks of the fullest machine."""
        return min(self.ranks, self.ranks_per_node)


def forecast_options(function: F) -> F:
    """Add the options of a planned run to a command."""
    for name, settings in reversed(_OPTIONS):
        shows_default = settings.get("default") is not None
        function = click.option(name, show_default=shows_default, **settings)(function)
    return function
