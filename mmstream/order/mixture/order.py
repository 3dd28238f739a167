"""The order of a mixture: which samples of which source make each step.

The first stage of the flow, in the place of `order/order.py` when a run reads several datasets. It
has the same methods as `Order`. A row of a step is found in three moves::

    (step, row) --`Draws`--> source, lane, lane draw --> source draw --source.py--> (shard, index)

Every source has separate epochs. An epoch of the mixture is only a number of steps. A *run step*
counts from the start of the run, over all epochs of the mixture.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mmstream.order.any_order import NEAR_ATTEMPTS, Refs, SampleRows, Window, cached
from mmstream.order.mixture.recipe import Recipe
from mmstream.order.mixture.schedule import Schedule, lane_phases
from mmstream.order.mixture.source import Source
from mmstream.order.permute import random_words
from mmstream.order.saved import SavedOrder
from mmstream.order.settings import require
from mmstream.types import IntArray

# -- (step, row) -> lane draw of a source, and back ------------------------------------------------
#
# Steps count from the beginning of the run here, over all epochs of the mixture. Step t takes the
# next G/Q positions of each of the Q lanes of group t mod P, as in `order/lanes.py`. Each position
# of a lane takes the source that the lane's schedule says. A phase lasts from one change of weights
# to the next. In a new phase every lane follows a new schedule and goes on counting its draws.
#
# `source.py` turns the draws into samples.
#
# Example: P=2, Q=2, G=4 and shares 3 and 2, so the schedule is 0 1 0 0 1. Each lane gives two rows
# to every second step. Without `rotate`, all lanes begin at position 0 of the schedule::
#
#     position of a lane     0  1   2  3   4  5
#     source                 0  1   0  0   1  0
#     lane draw              0  0   1  2   1  3
#     step of lanes 0 and 2  0  0   2  2   4  4
#     step of lanes 1 and 3  1  1   3  3   5  5

NEVER = 1 << 62
"""The step of a draw that is never made, because its source has no weight any more."""

MAX_DRIFT = 64
"""How many draws a lane may be ahead of another when weights change, besides two steps' rows."""

BLOCK_STEPS = 1024
"""Steps whose rotations are drawn together."""


@dataclass(frozen=True, eq=False)
class _Phase:
    """The steps from one change of weights to the next."""

    start: int
    """Its first step."""
    shares: tuple[int, ...]
    begins: IntArray
    """[P*Q] position of the schedule at which each lane begins the phase."""
    positions_before: IntArray
    """[P*Q] positions of each lane before the phase."""
    draws_before: IntArray
    """[P*Q, S] draws of each lane from each source before the phase."""
    errors: IntArray
    """[P*Q, S] these draws less their due, in 2^-20 of a sample. The due of a lane begins where its
    first schedule does, so lanes differ by less than one sample."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of the shares. A few are kept, since weights may change a thousand times."""
        return _schedule(self.shares)

    def schedule_positions(self, lanes: IntArray | slice, positions: IntArray) -> IntArray:
        """Return the positions of the schedule that positions of lanes stand for."""
        return positions - self.positions_before[lanes] + self.begins[lanes]


@lru_cache(64)
def _schedule(shares: tuple[int, ...]) -> Schedule:
    return Schedule.from_shares(shares)


class Draws:
    """All draws of a mixture, in closed form: any step costs the same.

    Args:
        shares: shares of the sources, by the step from which they hold. One key is step 0.
        global_batch_size: G.
        grid: (P, Q).
        seed: seed of the phases of lanes and of the rotations.
        rotate: whether the rows of a lane are rotated from step to step. Without it, a rank of few
            rows could see one source for ever, if shares and rows have a common period.
        live: those of the steps in `shares` whose shares were set during the run. There each lane
            begins where the schedule is about as far from its due as the lane is: the errors of
            many changes would add else.
        known: the first phases, where they were laid out before.

    Raises:
        ConfigError: weights change so often that lanes would drift apart.

    Examples:
        >>> draws = Draws({0: [3, 2]}, global_batch_size=4, grid=(2, 2), seed=0, rotate=False)
        >>> sources, lanes, lane_draws = draws.of_step(2)  # of the table above
        >>> sources.tolist(), lanes.tolist(), lane_draws.tolist()
        ([0, 0, 0, 0], [0, 0, 2, 2], [1, 2, 1, 2])
        >>> steps, rows = draws.locate(0, 2, np.array([0, 1, 2, 3]))  # source 0, lane 2
        >>> steps.tolist(), rows.tolist()
        ([0, 2, 2, 4], [2, 2, 3, 3])
        >>> draws.before(3).tolist()  # of lanes 0 to 3, from each source
        [[3, 1], [1, 1], [3, 1], [1, 1]]
    """

    def __init__(
        self,
        shares: Mapping[int, Sequence[int]],
        global_batch_size: int,
        grid: tuple[int, int],
        seed: int,
        *,
        rotate: bool,
        live: Collection[int] = (),
        known: Sequence[_Phase] = (),
    ) -> None:
        self.grid = grid
        self.rows_per_lane = global_batch_size // grid[1]
        self._seed = seed
        self._rotate = rotate
        self._rotation_blocks: dict[int, IntArray] = {}
        self.phases = list(known)
        num_lanes = grid[0] * grid[1]
        num_sources = len(next(iter(shares.values())))
        positions_before = np.zeros(num_lanes, np.int64)
        draws_before = errors = np.zeros((num_lanes, num_sources), np.int64)
        for number, (start, phase_shares) in enumerate(sorted(shares.items())[len(known) :]):
            number += len(known)
            if self.phases:
                positions_before = self._positions_before(start)
                draws_before = self.before(start)
                errors = self._errors(positions_before, draws_before)
            schedule = _schedule(tuple(phase_shares))
            begins = np.zeros(num_lanes, np.int64)
            if number and start in live:
                begins = schedule.positions_like(errors)
            elif rotate:
                begins = lane_phases(schedule, grid, self.rows_per_lane, seed, number)
            if not number:
                errors = schedule.deviations[begins]
            of_phase = start, tuple(phase_shares), begins
            self.phases.append(_Phase(*of_phase, positions_before, draws_before, errors))
            drift = int((draws_before.max(axis=0) - draws_before.min(axis=0)).max())
            require(
                drift <= MAX_DRIFT + 2 * self.rows_per_lane,
                f"changes: at step {start} some lanes are {drift} draws ahead of others; change "
                f"weights less often, at steps that {grid[0]} divides",
            )
        self._starts = np.array([phase.start for phase in self.phases])

    def of_step(self, step: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source, the lane and the lane draw of each row of a step, int64 [G] each."""
        num_groups, lanes_per_group = self.grid
        round_, group = divmod(step, num_groups)
        phase = self.phases[int(np.searchsorted(self._starts, step, side="right")) - 1]
        lanes = np.repeat(np.arange(lanes_per_group) * num_groups + group, self.rows_per_lane)
        rows_in_lane = np.tile(np.arange(self.rows_per_lane), lanes_per_group)
        offsets = (rows_in_lane - self._rotations(np.asarray([step]))) % self.rows_per_lane
        positions = phase.schedule_positions(lanes, round_ * self.rows_per_lane + offsets)
        sources = phase.schedule.source_at(positions)
        drawn_to_here = phase.schedule.draws_before(sources, positions)
        drawn_to_begin = phase.schedule.draws_before(sources, phase.begins[lanes])
        lane_draws = drawn_to_here - drawn_to_begin + phase.draws_before[lanes, sources]
        return sources, lanes, lane_draws

    def locate(self, source: int, lane: int, lane_draws: IntArray) -> tuple[IntArray, IntArray]:
        """Return the step and the row of draws of one lane from one source, int64 each.

        This is the inverse of `of_step`. The step is NEVER for a draw that is never made.
        """
        positions = np.full_like(lane_draws, -1)
        drawn_at_start = np.array([phase.draws_before[lane, source] for phase in self.phases])
        phase_numbers = np.searchsorted(drawn_at_start, lane_draws, side="right") - 1
        for number in np.unique(phase_numbers):
            phase = self.phases[number]
            if phase.shares[source]:
                in_phase = phase_numbers == number
                begin = phase.begins[lane]
                drawn_to_begin = phase.schedule.draws_before(source, begin)
                draws = lane_draws[in_phase] - phase.draws_before[lane, source] + drawn_to_begin
                schedule_positions = phase.schedule.position_of(source, draws)
                positions[in_phase] = schedule_positions - begin + phase.positions_before[lane]
        lane_of_group, group = divmod(lane, self.grid[0])
        rounds, offsets = np.divmod(positions, self.rows_per_lane)
        steps = rounds * self.grid[0] + group
        rows_in_lane = (offsets + self._rotations(steps)) % self.rows_per_lane
        rows = lane_of_group * self.rows_per_lane + rows_in_lane
        return np.where(positions < 0, NEVER, steps), rows

    def before(self, step: int) -> IntArray:
        """Return int64 [P*Q, S]: draws of each lane from each source before a step."""
        phase = [phase for phase in self.phases if phase.start <= step][-1]
        positions = phase.schedule_positions(slice(None), self._positions_before(step))[:, None]
        sources = np.arange(phase.schedule.shares.size)
        drawn_to_here = phase.schedule.draws_before(sources, positions)
        drawn_to_begin = phase.schedule.draws_before(sources, phase.begins[:, None])
        return drawn_to_here - drawn_to_begin + phase.draws_before

    def lanes_by_first_draw(self, source: int) -> IntArray:
        """Return int64 [P*Q]: the lanes in the order in which they first draw from a source."""
        phases = [phase for phase in self.phases if phase.shares[source]]
        if not phases:  # live weights took its weight before it began
            return np.arange(self.grid[0] * self.grid[1])
        schedule, begins = phases[0].schedule, phases[0].begins
        first_draws = schedule.draws_before(source, begins)
        positions = schedule.position_of(source, first_draws) - begins
        rounds, offsets = np.divmod(positions, self.rows_per_lane)
        lanes = np.arange(self.grid[0] * self.grid[1])
        steps = rounds * self.grid[0] + lanes % self.grid[0]
        return np.lexsort((lanes, offsets, steps))

    def _errors(self, positions: IntArray, draws: IntArray) -> IntArray:
        """Return int64 [P*Q, S]: the errors after the last phase, in 2^-20 of a sample."""
        phase = self.phases[-1]
        period = sum(phase.shares)
        due = (positions - phase.positions_before)[:, None] * np.array(phase.shares)
        errors: IntArray = phase.errors + (
            (((draws - phase.draws_before) * period - due) << 20) // period
        )
        return errors

    def _positions_before(self, step: int) -> IntArray:
        """Return int64 [P*Q]: positions of each lane before a step."""
        groups = np.arange(self.grid[0] * self.grid[1], dtype=np.int64) % self.grid[0]
        rounds = -(-(step - groups) // self.grid[0])
        return rounds * self.rows_per_lane

    def _rotations(self, steps: IntArray) -> IntArray:
        """Return int64 like `steps`: by how many rows the rows of a lane are rotated in a step."""
        rotations = np.zeros_like(steps)
        if not self._rotate:
            return rotations
        blocks = steps // BLOCK_STEPS
        for block in np.unique(blocks):
            in_block = blocks == block
            rotations[in_block] = self._rotation_block(int(block))[steps[in_block] % BLOCK_STEPS]
        return rotations

    def _rotation_block(self, block: int) -> IntArray:
        def draw() -> IntArray:
            draws = random_words(BLOCK_STEPS, self._seed, "rows", block)
            return (draws % np.uint64(self.rows_per_lane)).astype(np.int64)

        return cached(self._rotation_blocks, block, 64, draw)


# -- the steps -------------------------------------------------------------------------------------

MAX_ROWS = 1 << 62
"""Rows of a whole run, at most. Larger numbers could overflow 64-bit integers."""


class _Step(NamedTuple):
    """The draws of one step. Each array has one entry per row."""

    source: IntArray
    """[G] position of the source in the recipe."""
    epoch: IntArray
    """[G] epoch of the source."""
    draw: IntArray
    """[G] source draw."""
    window: IntArray
    """[G] number of the window."""


class MixtureOrder(SampleRows):
    """The order of all epochs of a mixture, made from its recipe.

    Shards are numbered over all sources, end to end. A window belongs to one source: its number is
    local * S + source, for S sources. For a large source, `local` is the number that `Source` gives
    it. For a small source, the windows are the steps, and `local` is the run step.

    Attributes:
        recipe: everything the order depends on.
        steps_per_epoch: steps of every epoch of the mixture.
        num_samples: rows of such an epoch.
        global_batch_size: G, rows of a step over all ranks.
        seed: the seed of the mixture.
        grid: (P, Q), groups of lanes and lanes of a group.
        stride: S * P * Q. Windows of one lane and source have numbers that differ by multiples.

    Examples:
        >>> from mmstream.order import Corpus
        >>> corpora = {"web": Corpus(np.array([500])), "books": Corpus(np.array([80]))}
        >>> weights = {0: {"web": 3, "books": 1}}
        >>> order = MixtureOrder(
        ...     Recipe.from_weights(corpora, weights, epoch_steps=10, global_batch_size=4)
        ... )
        >>> [order.refs(epoch=0, step=step).shard.tolist() for step in range(3)]  # 1 is "books"
        [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    """

    drop_last = True  # no step is partial

    def __init__(self, recipe: Recipe, known: Sequence[_Phase] = ()) -> None:
        self.recipe = recipe
        self.global_batch_size = recipe.global_batch_size
        self.repeat = recipe.repeat
        self.seed = recipe.seed
        self.grid = recipe.grid
        self._draws = Draws(
            recipe.shares,
            recipe.global_batch_size,
            recipe.grid,
            recipe.seed,
            rotate=recipe.shuffle,
            live=recipe.live,
            known=known,
        )
        self._sources = [
            Source.lay_out(
                name,
                corpus,
                recipe.settings[name],
                recipe.seed,
                lanes_by_first_draw=self._draws.lanes_by_first_draw(source_number),
                rows_per_round=recipe.grid[0] * recipe.global_batch_size,
                num_groups=recipe.grid[0],
                interleave=recipe.interleave,
                shuffle=recipe.shuffle,
                reshuffle=recipe.reshuffle,
            )
            for source_number, (name, corpus) in enumerate(recipe.corpora.items())
        ]
        self._num_lanes = self.grid[0] * self.grid[1]
        self._lane_ordinals = np.stack([source.lane_ordinals() for source in self._sources])
        num_shards = [source.corpus.counts.size for source in self._sources]
        self._first_shards = np.cumsum([0, *num_shards])
        self.stride = len(self._sources) * self._num_lanes
        self._windows: dict[tuple[int, int], Window] = {}
        self._steps: dict[int, _Step] = {}
        self._earlier: dict[int, MixtureOrder] = {}
        self.steps_per_epoch = self._count_epoch_steps()
        self.num_samples = self.steps_per_epoch * self.global_batch_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_windows": {}, "_steps": {}, "_earlier": {}}

    def identity(self) -> dict[str, Any]:
        """Return everything the order depends on, in plain JSON types. States contain it."""
        return self.recipe.identity() | {"epoch_steps": self.steps_per_epoch}

    def with_saved_defaults(self, saved: SavedOrder) -> MixtureOrder:
        """Return this order with the settings that were left to defaults taken from a state.

        Sources have separate epochs, so that holds from the first step of a run on. Weights that
        were set during the run are those of the state. See `Order.with_saved_defaults`.
        """
        recipe = self.recipe
        if saved.has_begun and recipe.defaulted:
            recipe = recipe.with_saved_defaults(saved)
        recipe = recipe.with_live_of(saved)
        return self if recipe.identity() == self.recipe.identity() else MixtureOrder(recipe)

    def with_weights(self, run_step: int, weights: Mapping[str, float]) -> MixtureOrder:
        """Return this order with other weights from a step of the run on.

        Raises:
            ConfigError: impossible weights, or too many changes.
        """
        known = [phase for phase in self._draws.phases if phase.start < run_step]
        return MixtureOrder(self.recipe.with_weights(run_step, weights), known)

    def refs(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> Refs:
        """Return the samples of a step, all of them valid. See `Order.refs`."""
        of_step = self._step(self._run_step(epoch, step))
        sources, draws, numbers = (
            column[slice(*(rows or (None,)))]
            for column in (of_step.source, of_step.draw, of_step.window)
        )
        refs = Refs(np.empty_like(draws), np.empty_like(draws), np.ones(draws.size, np.bool_))
        for source_number in np.unique(sources).tolist():
            source = self._sources[source_number]
            of_source = np.flatnonzero(sources == source_number)
            windows = None if source.small else numbers[of_source] // len(self._sources)
            shards, indexes = source.locate(draws[of_source], windows)
            refs.shard[of_source] = shards + self._first_shards[source_number]
            refs.index[of_source] = indexes
        return refs

    def windows(self, epoch: int, step: int, rows: tuple[int, int] | None = None) -> IntArray:
        """Return int64 [G]: the number of the window of each row. See `Order.windows`."""
        return self._step(self._run_step(epoch, step)).window[slice(*(rows or (None,)))]

    def window(self, epoch: int, number: int) -> Window:
        """Return the samples of a window that this epoch of the mixture delivers.

        A window of a large source may begin in one epoch of the mixture and end in the next. See
        `Order.window`.
        """
        max_entries = 3 * self.stride + 64
        key = epoch, number
        return cached(self._windows, key, max_entries, lambda: self._new_window(*key))

    def _new_window(self, epoch: int, number: int) -> Window:
        local, source_number = divmod(number, len(self._sources))
        source = self._sources[source_number]
        if source.small:
            of_step = self._step(local)
            rows = np.flatnonzero(of_step.source == source_number)
            run_steps = np.full_like(rows, local)
            shards, indexes = source.locate(of_step.draw[rows])
        else:
            draws, shards, indexes = source.window(local)
            lane = int(source.lanes_by_first_draw[local % self._num_lanes])
            lane_draws = draws // self._num_lanes
            run_steps, rows = self._draws.locate(source_number, lane, lane_draws)
        steps = run_steps - epoch * self.steps_per_epoch
        in_epoch = (steps >= 0) & (steps < self.steps_per_epoch)
        shards = shards + self._first_shards[source_number]
        return Window(steps[in_epoch], rows[in_epoch], shards[in_epoch], indexes[in_epoch])

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> tuple[int, int]:
        """Return (shard, index) of the sample of the same source that replaces a bad sample.

        Attempts 0-7 choose from the row's own window, but not from the same step. Attempts 8-15
        choose from the whole epoch of the source, and so do all attempts if the window has no other
        step. The arguments are those of `Order.substitute`.
        """
        run_step = self._run_step(epoch, step)
        # A window reaches beyond a change, and steps before it were made when it was not known.
        num_known = bisect_right(self.recipe.live, run_step)
        if num_known < len(self.recipe.live):
            recipe = self.recipe.with_live(num_known)
            known = self._draws.phases[: len(recipe.shares)]
            order = cached(self._earlier, num_known, 2, lambda: MixtureOrder(recipe, known))
            return order.substitute(epoch, step, row, attempt)
        of_step = self._step(run_step)
        word = int(random_words(1, self.seed, epoch, "substitute", step, row, attempt)[0])
        if attempt < NEAR_ATTEMPTS:
            window = self.window(epoch, int(of_step.window[row]))
            candidates = np.flatnonzero(window.step != step)
            if candidates.size:
                chosen = candidates[word % candidates.size]
                return int(window.shard[chosen]), int(window.index[chosen])
        source_number = int(of_step.source[row])
        shard, index = self._sources[source_number].pick(int(of_step.epoch[row]), word)
        return int(self._first_shards[source_number]) + shard, index

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch) of a row's source, the key of the random transforms of the row."""
        of_step = self._step(self._run_step(epoch, step))
        return self._sources[int(of_step.source[row])].seed, int(of_step.epoch[row])

    def _run_step(self, epoch: int, step: int) -> int:
        """Return the run step of a step of an epoch; ConfigError if there is no such step."""
        require(epoch >= 0, f"epoch {epoch}: epochs count from 0")
        require(
            0 <= step < self.steps_per_epoch,
            f"step {step}: an epoch has steps 0 to {self.steps_per_epoch - 1}",
        )
        run_step = epoch * self.steps_per_epoch + step
        require(run_step * self.global_batch_size < MAX_ROWS, f"epoch {epoch}: beyond 2^62 rows")
        return run_step

    def _step(self, run_step: int) -> _Step:
        return cached(self._steps, run_step, 64, lambda: self._new_step(run_step))

    def _new_step(self, run_step: int) -> _Step:
        sources, lanes, lane_draws = self._draws.of_step(run_step)
        draws = lane_draws * self._num_lanes + self._lane_ordinals[sources, lanes]
        windows = np.empty_like(draws)
        for source_number in np.unique(sources):
            source = self._sources[source_number]
            rows = sources == source_number
            if source.small:  # all lanes draw in the order of steps and rows
                first_draw = int(self._draws.before(run_step)[:, source_number].sum())
                draws[rows] = first_draw + np.arange(int(rows.sum()))
                local: IntArray | int = run_step
            else:
                local = source.windows(draws[rows])
            windows[rows] = local * len(self._sources) + source_number
        sizes = np.array([source.size for source in self._sources])
        return _Step(sources, draws // sizes[sources], draws, windows)

    def _count_epoch_steps(self) -> int:
        epoch_steps = self.recipe.epoch_steps
        if isinstance(epoch_steps, int):
            return epoch_steps
        steps_of_sources = [self._steps_until_seen(n) for n in range(len(self._sources))]
        return min(steps_of_sources) if epoch_steps == "first" else max(steps_of_sources)

    def _steps_until_seen(self, source_number: int) -> int:
        """Return after how many steps each sample of a source has come at least once."""
        source = self._sources[source_number]
        lane_draws_per_epoch = -(
            -(source.size - self._lane_ordinals[source_number]) // self._num_lanes
        )

        def all_seen(steps: int) -> bool:
            lane_draws = self._draws.before(steps)[:, source_number]
            if source.small:
                return int(lane_draws.sum()) >= source.size
            return bool((lane_draws >= lane_draws_per_epoch).all())

        enough = 1
        while not all_seen(enough):
            enough *= 2
        return bisect_left(range(enough), True, lo=enough // 2 + 1, key=all_seen)
