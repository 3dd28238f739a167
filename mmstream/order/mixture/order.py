"""The order of a mixture: which samples of which source make each step.

The first stage of the flow, in the place of `order/order.py` when a run reads several datasets. It
has the same methods as `Order`. A row of a step is found in three moves::

    (step, row) --`Draws`--> source, lane, lane draw --> source draw --source.py--> (shard, index)

Every source has separate epochs. An epoch of the mixture is only a number of steps. A *run step*
counts from the start of the run, over all epochs of the mixture.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from mmstream.errors import StateError
from mmstream.order.any_order import AnyOrder, Refs, Window, cached
from mmstream.order.corpus import Corpus, SavedOrder, check_identity, differing_keys, making
from mmstream.order.mixture.schedule import MAX_PERIOD, Draws, Phase, live_shares, whole_shares
from mmstream.order.mixture.source import Source, SourceSettings
from mmstream.order.settings import (
    MAX_ROWS,
    SINGLE_SAMPLE,
    ChosenSettings,
    Reshuffle,
    RowShape,
    checked_grid,
    integer,
    mixture_settings,
    positive,
    require,
)
from mmstream.settings import MAX_NUMBER
from mmstream.types import IntArray, SampleRef

MAX_RUN_ROWS = 1 << 62
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


class MixtureOrder(AnyOrder):
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

    def __init__(self, recipe: Recipe, known: Sequence[Phase] = ()) -> None:
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
        # The inverse of each permutation. The ordinal of a lane is also its first source draw.
        lanes_by_first_draw = [source.lanes_by_first_draw for source in self._sources]
        self._lane_ordinals = np.argsort(lanes_by_first_draw, axis=1)
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

    def substitute(self, epoch: int, step: int, row: int, attempt: int) -> SampleRef:
        """Return the sample of the same source that replaces a bad one. See `Order.substitute`.

        What is the whole epoch there is an epoch of the source here.
        """
        run_step = self._run_step(epoch, step)
        # A window reaches beyond a change, and steps before it were made when it was not known.
        num_known = bisect_right(self.recipe.live, run_step)
        if num_known < len(self.recipe.live):
            recipe = self.recipe.with_live(num_known)
            known = self._draws.phases[: len(recipe.shares)]
            order = cached(self._earlier, num_known, 2, lambda: MixtureOrder(recipe, known))
            return order.substitute(epoch, step, row, attempt)
        return super().substitute(epoch, step, row, attempt)

    def _far_substitute(self, epoch: int, step: int, row: int, word: int) -> SampleRef:
        of_step = self._step(self._run_step(epoch, step))
        source_number = int(of_step.source[row])
        shard, index = self._sources[source_number].pick(int(of_step.epoch[row]), word)
        return int(self._first_shards[source_number]) + shard, index

    def stream(self, epoch: int, step: int, row: int) -> tuple[int, int]:
        """Return (seed, epoch) of a row's source, the key of the random transforms of the row."""
        of_step = self._step(self._run_step(epoch, step))
        return self._sources[int(of_step.source[row])].seed, int(of_step.epoch[row])

    def _run_step(self, epoch: int, step: int) -> int:
        """Return the run step of a step of an epoch; ConfigError if there is no such step."""
        self.require_step(epoch, step)
        run_step = epoch * self.steps_per_epoch + step
        require(
            run_step * self.global_batch_size < MAX_RUN_ROWS, f"epoch {epoch}: beyond 2^62 rows"
        )
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


# -- the recipe of a mixture: its sources, their shares from step to step, and the settings --------
#
# `MixtureOrder` is made from a recipe alone. A saved state contains the whole recipe, so the order
# can be rebuilt from a state and the same datasets.

MIXTURE_VERSIONS: Mapping[Reshuffle, int] = {"global": 1, "lanes": 2}
"""Part of every saved state; a change of any rule of the order must raise it. See `Order`'s."""

LIVE_VERSION = 2
"""Added to the version of a recipe whose weights were set during the run."""

MAX_LIVE_CHANGES = 1000
"""Most changes of weights during a run: each is a line of every later state."""

MAX_LANES_OF_MIXTURE = 1 << 12
"""Most lanes of a grid, P * Q. The schedule of lanes takes memory for their square."""

Stop: TypeAlias = Literal["first", "all"]
"""When an epoch ends: when the first source, or the last ("all"), has been seen once."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that the order of a mixture depends on."""

    corpora: Mapping[str, Corpus]
    """The sources, by name."""
    settings: Mapping[str, SourceSettings]
    """Window and chunk size of each source, by name."""
    shares: Mapping[int, list[int]]
    """Shares of the sources, by the step of the run from which they hold. One key is 0."""
    epoch_steps: int | Stop
    """Steps of an epoch, or when an epoch ends."""
    global_batch_size: int
    """G, rows of a step over all ranks."""
    seed: int
    grid: tuple[int, int]
    """(P, Q): groups of lanes, and lanes of a group."""
    interleave: int
    """K, segments that a window of a source is drawn from."""
    shuffle: bool
    repeat: int = 1
    """Rows of a batch that each of G becomes. An identity counts those of the batch."""
    live: tuple[int, ...] = ()
    """Those of the steps in `shares` whose shares were set during the run, rising."""
    reshuffle: Reshuffle = "global"
    """With "lanes", each lane has the same samples in every epoch of a large source."""
    defaulted: tuple[str, ...] = ()
    """Those of grid, window, interleave, chunk and reshuffle that were left to defaults."""

    @classmethod
    def from_weights(
        cls,
        corpora: Mapping[str, Corpus],
        weights: Mapping[int, Mapping[str, float]],
        *,
        epoch_steps: int | Stop,
        global_batch_size: int,
        seed: int = 0,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        interleave: int | None = None,
        reshuffle: Reshuffle | None = None,
        has_cache: bool = False,
        repeat: int = 1,
        shuffle: bool = True,
        row_shape: RowShape = SINGLE_SAMPLE,
    ) -> Recipe:
        """Make a recipe, with defaults for what is not chosen.

        The defaults of a source do not depend on weights that hold later than its first ones. So
        later weights can still change during a run.

        Args:
            corpora: the sources, by name.
            weights: weight of each source, by the step of the run from which they hold. One key is
                step 0.
            epoch_steps: steps of an epoch, or when an epoch ends.
            global_batch_size: G, rows of a step over all ranks.
            seed: any integer.
            grid: (P, Q), groups of lanes and lanes of a group. Q must divide G. Default: derived
                from the sources that have a weight at step 0, and G, as the next settings are.
            window: M, samples of a lane that are permuted together, over all sources.
            window_bytes: B, bytes of all windows together, over all ranks, in place of `window`.
                Default: 2 MiB for each row of a batch, within 2 to 8 GiB.
            interleave: K, segments that a window of a source is drawn from.
            reshuffle: "global": each epoch of a source deals all its chunks afresh. "lanes": each
                lane has the same samples in every epoch, in another order. Small sources have no
                lanes. Default: "lanes" with `has_cache`, else "global".
            has_cache: whether nodes keep what they read. It only sets the default of `reshuffle`.
            repeat: rows that each sample takes; it divides `global_batch_size`.
            shuffle: False: each source in its own order.
            row_shape: what a row is on average, for the defaults: a sample, or a pack of several.

        Raises:
            ConfigError: impossible settings, or a source without samples or weight.
        """
        chosen = ChosenSettings.check(
            MAX_LANES_OF_MIXTURE,
            global_batch_size=global_batch_size,
            seed=seed,
            grid=grid,
            window=window,
            window_bytes=window_bytes,
            interleave=interleave,
            shuffle=shuffle,
            reshuffle=reshuffle,
            has_cache=has_cache,
            repeat=repeat,
        )
        rows = chosen.global_batch_size
        if not isinstance(epoch_steps, str):
            epoch_steps = positive("epoch_steps", epoch_steps)
        shares = _shares_by_step(corpora, weights)
        sizes = [(corpus.chosen_bytes, corpus.num_samples) for corpus in corpora.values()]
        of_windows: dict[str, Any] = {
            "window_bytes": chosen.window_bytes,
            "window": chosen.window,
            "row_shape": row_shape,
        }
        at_start = mixture_settings(shares[0], sizes, rows, grid=chosen.grid, **of_windows)
        grid = at_start.grid if chosen.shuffle else (1, 1)
        settings = {}
        for number, (name, corpus) in enumerate(corpora.items()):
            first = next(phase_shares for phase_shares in shares.values() if phase_shares[number])
            when_first_drawn = mixture_settings(first, sizes, rows, grid=grid, **of_windows)
            settings[name] = SourceSettings.default(
                corpus.num_samples,
                grid[0] * grid[1],
                grid[0] * rows,
                when_first_drawn.window * first[number] / sum(first),
                when_first_drawn.chunk,
            )
        return cls(
            corpora,
            settings,
            shares,
            epoch_steps,
            rows,
            chosen.seed,
            grid,
            chosen.interleave or at_start.interleave,
            chosen.shuffle,
            chosen.repeat,
            (),
            chosen.reshuffle,
            chosen.defaulted,
        )

    def with_saved_defaults(self, saved: SavedOrder) -> Recipe:
        """Return this recipe with the settings that were left to defaults taken from a state.

        Sources that the state does not know have their defaults beside the saved grid.

        Raises:
            ConfigError: impossible settings.
            KeyError, TypeError or AttributeError: `saved` is malformed.
        """
        saved_sources = {source["name"]: source for source in saved.keys["sources"]}
        recipe = Recipe.from_weights(
            self.corpora,
            {
                step: dict(zip(self.corpora, shares, strict=True))
                for step, shares in self.shares.items()
            },
            epoch_steps=self.epoch_steps,
            global_batch_size=self.global_batch_size * self.repeat,
            repeat=self.repeat,
            seed=self.seed,
            **{
                name: saved.keys[name] if name in self.defaulted else getattr(self, name)
                for name in ("grid", "interleave", "reshuffle")
            },
            shuffle=self.shuffle,
        )
        settings = {}
        for name, default in recipe.settings.items():
            in_state, given = saved_sources.get(name, {}), asdict(self.settings[name])
            chosen = {k: in_state.get(k) if k in self.defaulted else given[k] for k in given}
            known = {k: positive(k, value) for k, value in chosen.items() if value is not None}
            settings[name] = replace(default, **known)
        return replace(recipe, settings=settings)

    def with_weights(self, run_step: int, weights: Mapping[str, float]) -> Recipe:
        """Return this recipe with weights set during the run, in place of those from then on."""
        live = (*self.live[: bisect_left(self.live, run_step)], run_step)
        shares = {step: of_step for step, of_step in self.shares.items() if step < run_step}
        require(
            len(live) <= MAX_LIVE_CHANGES,
            f"weights were set {MAX_LIVE_CHANGES:,} times in this run, the most that a state holds",
        )
        shares[run_step] = live_shares([weights[name] for name in self.corpora])
        return replace(self, shares=shares, live=live)

    def with_live(self, num_live: int) -> Recipe:
        """Return this recipe with the first of its weights that were set during the run."""
        later = self.live[num_live:]
        shares = {step: of_step for step, of_step in self.shares.items() if step not in later}
        return replace(self, shares=shares, live=self.live[:num_live])

    def with_live_of(self, saved: SavedOrder) -> Recipe:
        """Return this recipe with the weights that were set during the run of a state."""
        lines = _live_shares_of(saved.keys, list(self.corpora))
        if not lines:
            return self
        kept = {step: shares for step, shares in self.shares.items() if step < min(lines)}
        return replace(self, shares=kept | lines, live=tuple(lines))

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any], corpora: Mapping[str, Corpus]) -> Recipe:
        """Return the recipe of a saved state.

        Args:
            identity: ``state["order"]``.
            corpora: the datasets, by name. Those that the state does not name come last, and are
                left out.

        Raises:
            StateError: `identity` is malformed or of another version, or a source of the state is
                missing, has changed, or is in another place.
        """
        with making("a mixture's order"):
            saved = SavedOrder.parse(identity)
            version = identity["version"]
            sources = identity["sources"]
            names = [source["name"] for source in sources]
            settings = {
                source["name"]: SourceSettings(
                    positive("window", source["window"]), positive("chunk", source["chunk"])
                )
                for source in sources
            }
            for source in sources:
                check_identity(source)
            shares = {
                integer("step", change["step"], MAX_NUMBER): _checked_shares(
                    change["shares"], names
                )
                for change in identity["weights"]
            }
            repeat = positive("repeat", saved.keys["repeat"])
            rows = positive("global_batch_size", identity["global_batch_size"], MAX_ROWS)
            require(rows % repeat == 0, f"global_batch_size {rows} with repeat {repeat}")
            rows //= repeat
            recipe = cls(
                corpora,
                settings,
                shares,
                positive("epoch_steps", identity["epoch_steps"]),
                rows,
                integer("seed", identity["seed"]),
                checked_grid(identity["grid"], rows, MAX_LANES_OF_MIXTURE, repeat),
                positive("interleave", identity["interleave"]),
                bool(identity["shuffle"]),
                repeat,
                tuple(_live_shares_of(identity, names)),
                saved.reshuffle,
            )
            require(min(shares) == 0, "no weights at step 0")
        if version != recipe.version:
            raise StateError(f"mixture version {version}, this mmstream has {recipe.version}")
        for source in sources:
            _require_same_source(source, corpora)
        if names != list(corpora)[: len(names)]:  # shards are numbered in this order
            raise StateError(
                f"the state's sources are {names}, and here {list(corpora)}: put them in the "
                "state's order, new ones at the end"
            )
        return replace(recipe, corpora={name: corpora[name] for name in names})

    @property
    def version(self) -> int:
        """The version of the rules of its order."""
        return MIXTURE_VERSIONS[self.reshuffle] + LIVE_VERSION * bool(self.live)

    def identity(self) -> dict[str, Any]:
        """Return the recipe in plain JSON types: part of a saved state."""
        sources = [
            {
                "name": name,
                **corpus.identity(),
                "window": self.settings[name].window,
                "chunk": self.settings[name].chunk,
            }
            for name, corpus in self.corpora.items()
        ]
        weights = [
            {
                "step": step,
                "shares": {
                    name: share for name, share in zip(self.corpora, shares, strict=True) if share
                },
                **({"live": True} if step in self.live else {}),
            }
            for step, shares in self.shares.items()
        ]
        return {
            "version": self.version,
            "sources": sources,
            "weights": weights,
            "epoch_steps": self.epoch_steps,
            "global_batch_size": self.global_batch_size * self.repeat,
            "seed": self.seed,
            "grid": list(self.grid),
            "interleave": self.interleave,
            "shuffle": self.shuffle,
            **({"reshuffle": "lanes"} if self.reshuffle == "lanes" else {}),
            **({"repeat": self.repeat} if self.repeat > 1 else {}),
        }


def _shares_by_step(
    corpora: Mapping[str, Corpus], weights: Mapping[int, Mapping[str, float]]
) -> dict[int, list[int]]:
    """Return the shares of all sources, by the step from which they hold.

    Raises:
        ConfigError: impossible weights, or a source without samples or weight.
    """
    shares = {
        step: whole_shares([weights_by_name[name] for name in corpora])
        for step, weights_by_name in sorted(weights.items())
    }
    for number, (name, corpus) in enumerate(corpora.items()):
        require(corpus.num_samples > 0, f"source {name!r} has no samples")
        has_weight = any(phase_shares[number] for phase_shares in shares.values())
        require(has_weight, f"source {name!r} has weight 0 all the time: leave it out")
    return shares


def _live_shares_of(identity: Mapping[str, Any], names: Sequence[str]) -> dict[int, list[int]]:
    """Return the shares of an identity that were set during its run, by their steps, rising.

    Raises:
        ConfigError: there are too many, or shares that are none.
        KeyError or TypeError: `identity` is malformed.
    """
    lines = {
        integer("step", change["step"], MAX_NUMBER): _checked_shares(change["shares"], names)
        for change in identity["weights"]
        if change.get("live")
    }
    require(len(lines) <= MAX_LIVE_CHANGES, f"weights were set {len(lines):,} times")
    return dict(sorted(lines.items()))


def _checked_shares(share_of_source: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Return the shares of a saved state, one per source.

    Raises:
        ConfigError: they are not whole numbers from 0, or no schedule has them.
    """
    shares = [integer("share", share_of_source.get(name, 0), MAX_PERIOD) for name in names]
    require(
        min(shares) >= 0 and 0 < sum(shares) <= MAX_PERIOD,
        f"shares {shares}: need a sum from 1 to {MAX_PERIOD:,}",
    )
    return shares


def _require_same_source(source: Mapping[str, Any], corpora: Mapping[str, Corpus]) -> None:
    """Refuse a source of a saved state that is absent now, or has other shards.

    Args:
        source: an entry of ``state["order"]["sources"]``.
        corpora: the present sources, by name.

    Raises:
        StateError: it is absent, or differs.
    """
    name = source["name"]
    if name not in corpora:
        raise StateError(f"source {name!r} of the state is missing: add it to the mixture")
    current = corpora[name].identity()
    saved = {key: source.get(key) for key in (*current, "selection")}
    differing = differing_keys(saved, current)
    if differing:
        was, now = ({key: side.get(key) for key in differing} for side in (saved, current))
        raise StateError(
            f"source {name!r} of the state has changed: it was {was} and is {now}: "
            "resume on the old dataset, or start over"
        )
