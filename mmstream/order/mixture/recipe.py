"""The recipe of a mixture: its sources, their shares from step to step, and the settings.

`MixtureOrder` is made from a recipe alone. A saved state contains the whole recipe, so the order
can be rebuilt from a state and the same datasets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from mmstream.errors import StateError
from mmstream.order.corpus import Corpus, check_identity, differing_keys
from mmstream.order.mixture.schedule import MAX_PERIOD, live_shares, whole_shares
from mmstream.order.mixture.source import SourceSettings
from mmstream.order.saved import SavedOrder, making
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
