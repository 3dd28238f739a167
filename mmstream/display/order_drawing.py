"""The order of an epoch as pictures: chunks, lanes and windows, steps, ranks.

Each picture is for small corpora: every sample is drawn. The x axis is the epoch's list: all chunks
in the order of this epoch, one behind the other. Lanes are equal parts of that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmstream.display.drawing import COLOURS, Drawing, drawing_of, new_figure
from mmstream.order import Order
from mmstream.types import IntArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_chunks", "draw_ranks", "draw_steps"]


@dataclass(frozen=True)
class _Epoch:
    """Epoch 0 of an order. The arrays have one entry per sample."""

    shard: IntArray
    """Shard of each slot of the epoch's list. The rest is by delivery: step by step, row by row."""
    index: IntArray
    slot: IntArray
    step: IntArray
    row: IntArray
    window: IntArray
    """Number of the sample's window in its lane."""
    num_lanes: int

    @property
    def lane_size(self) -> float:
        return len(self.shard) / self.num_lanes


def draw_chunks(counts: Sequence[int], order: Order, *, moved: Sequence[int] = ()) -> Drawing:
    """Draw how an epoch shuffles the chunks of a corpus.

    Args:
        counts: samples of each shard.
        order: the order of this corpus.
        moved: chunks of shard 0 that get an arrow, by their numbers.

    Returns:
        The corpus above, the epoch's list below, and the lanes under it.
    """
    epoch, chunk = _epoch(counts, order), order.identity()["chunk"]
    num_samples = len(epoch.shard)
    figure = new_figure(11, 3.1)
    axes = figure.add_subplot()
    in_corpus = np.concatenate([np.arange(count) for count in counts])
    _strip(axes, 2, np.repeat(np.arange(len(counts)), counts), in_corpus % chunk == 0)
    _strip(axes, 0.7, epoch.shard, epoch.index % chunk == 0)
    ends = np.cumsum(counts)
    for number, (end, count) in enumerate(zip(ends, counts, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        axes.text(end - count / 2, 2.72, f"shard {number}", ha="center", color=colour)
    for number in moved:
        slot = int(np.flatnonzero((epoch.shard == 0) & (epoch.index == number * chunk))[0])
        axes.annotate(
            "",
            (slot + chunk / 2, 1.32),
            (number * chunk + chunk / 2, 1.98),
            arrowprops={"arrowstyle": "->", "color": "black"},
        )
    for lane in range(epoch.num_lanes):
        start, stop = lane * epoch.lane_size, (lane + 1) * epoch.lane_size
        axes.plot([start + 1, stop - 1], [0.55, 0.55], color="black", linewidth=2)
        axes.text((start + stop) / 2, 0.18, f"lane {lane}", ha="center")
    axes.text(-6, 2.3, "the corpus", ha="right", va="center")
    axes.text(-6, 1.0, "epoch 0", ha="right", va="center")
    axes.set(xlim=(-0.13 * num_samples, num_samples), ylim=(0, 3.1))
    axes.axis("off")
    where = " inside its lanes" if order.reshuffle == "lanes" else ""
    text = f"Each epoch shuffles the chunks of {chunk} neighbours in a new way{where}"
    return drawing_of(figure, text)


def draw_steps(counts: Sequence[int], order: Order, *, steps: Sequence[int] = ()) -> Drawing:
    """Draw an epoch: each sample is a dot, each step a line of dots, and windows end in orange.

    Args:
        counts: samples of each shard.
        order: the order of this corpus.
        steps: steps that are drawn in colour.
    """
    epoch = _epoch(counts, order)
    figure = new_figure(11, 6.4)
    axes = figure.add_subplot()
    _lanes(axes, epoch, "lane ")
    axes.scatter(epoch.slot, epoch.step, s=10, color="0.3")
    for lane in range(epoch.num_lanes):
        in_lane = epoch.slot // epoch.lane_size == lane
        start, stop = lane * epoch.lane_size + 1, (lane + 1) * epoch.lane_size - 1
        for window in range(1, epoch.window[in_lane].max() + 1):
            end = epoch.step[in_lane & (epoch.window == window)].min() - 0.5
            axes.hlines(end, start, stop, color="tab:orange", linewidth=2)
    axes.plot([], [], color="tab:orange", linewidth=2, label="a window ends, the next begins")
    for step, colour in zip(steps, ("tab:red", "tab:blue", "tab:green"), strict=False):
        in_step = epoch.step == step
        label = f"step {step}: the {in_step.sum()} samples of a global batch"
        axes.axhline(step, color=colour, linewidth=0.8, linestyle="--")
        axes.scatter(epoch.slot[in_step], epoch.step[in_step], 46, colour, zorder=3, label=label)
    axes.set_ylabel("step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    return drawing_of(figure, "One epoch: every sample is one dot, every step one line")


def draw_ranks(
    counts: Sequence[int], order: Order, *, world_sizes: Sequence[int] = (1, 2, 4)
) -> Drawing:
    """Draw which rank reads what, for several numbers of ranks side by side.

    Args:
        counts: samples of each shard.
        order: the order of this corpus.
        world_sizes: numbers of ranks, each a divisor of the global batch size.
    """
    epoch, num_rows = _epoch(counts, order), order.global_batch_size
    figure = new_figure(11, 4.6)
    panels = figure.subplots(1, len(world_sizes), sharey=True, squeeze=False)[0]
    for axes, world_size in zip(panels, world_sizes, strict=True):
        _lanes(axes, epoch)
        rank_of = epoch.row * world_size // num_rows
        for rank in range(world_size):
            rows = f"{rank * num_rows // world_size} to {(rank + 1) * num_rows // world_size - 1}"
            axes.scatter(
                epoch.slot[rank_of == rank],
                epoch.step[rank_of == rank],
                s=5,
                color=COLOURS[rank % len(COLOURS)],
                label=f"rank {rank}: rows {rows}",
            )
        axes.set(xlabel="lane", title=f"{world_size} rank{'s' if world_size > 1 else ''}")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=min(2, world_size),
            frameon=False,
            fontsize=8,
            markerscale=3,
        )
    panels[0].set_ylabel("step")
    named = ", ".join(str(size) for size in world_sizes[:-1])
    return drawing_of(figure, f"The same dots on {named} and {world_sizes[-1]} ranks")


def _epoch(counts: Sequence[int], order: Order) -> _Epoch:
    """Return the list of epoch 0, and what each step delivers of it."""
    shards, indexes = order.listed(0)
    first = np.concatenate([[0], np.cumsum(counts)])
    slot_of = np.empty(sum(counts), dtype=np.int64)
    slot_of[first[shards] + indexes] = np.arange(sum(counts))
    num_lanes = order.grid[0] * order.grid[1]
    slots, steps, rows, windows = [], [], [], []
    for step in range(order.steps_per_epoch):
        refs = order.refs(0, step)
        slots.append(slot_of[first[refs.shard] + refs.index])
        steps.append(np.full(len(refs.shard), step))
        rows.append(np.arange(len(refs.shard)))
        windows.append(order.windows(0, step) // num_lanes)
    return _Epoch(
        shard=shards,
        index=indexes,
        slot=np.concatenate(slots),
        step=np.concatenate(steps),
        row=np.concatenate(rows),
        window=np.concatenate(windows),
        num_lanes=num_lanes,
    )


def _strip(axes: Axes, y: float, shard: IntArray, is_start: np.ndarray) -> None:
    """Draw samples as one bar, coloured by shard, with a thin line where a chunk starts."""
    colours = [COLOURS[number % len(COLOURS)] for number in shard]
    axes.bar(np.arange(len(shard)), 0.6, bottom=y, width=1.0, align="edge", color=colours)
    axes.vlines(np.flatnonzero(is_start), y, y + 0.6, color="white", linewidth=1.2)


def _lanes(axes: Axes, epoch: _Epoch, name: str = "") -> None:
    """Draw every other lane in grey, and name all. The first step is at the top."""
    size = epoch.lane_size
    for lane in range(0, epoch.num_lanes, 2):
        axes.axvspan(lane * size, (lane + 1) * size, color="0.5", alpha=0.08, linewidth=0)
    names = [f"{name}{lane}" for lane in range(epoch.num_lanes)]
    axes.set_xticks(np.arange(epoch.num_lanes) * size + size / 2, names)
    last_step = int(epoch.step.max())
    axes.set(xlim=(0, len(epoch.shard)), ylim=(last_step + 0.6, -1), xlabel="place in the list")
