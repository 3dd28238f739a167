"""Mixtures, first part: what a mixture is. Sources, their shares from step to step, and settings.

All of it is part of a saved state, so an order can be made anew from a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mmstream.errors import StateError
from mmstream.order.checks import integer, require
from mmstream.order.corpus import Corpus
from mmstream.order.defaults import default_grid, mixture_window
from mmstream.order.mixture.schedule import whole_shares
from mmstream.order.mixture.source import SourceSettings

__all__ = ["Recipe", "Stop", "binding"]

MIXTURE_VERSION = 1
"""Part of every saved state; a change of any rule of the order must raise it."""

Stop: TypeAlias = Literal["first", "all"]
"""An epoch is the steps until the first, or the last, source has been seen once."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that the order of a mixture depends on."""

    corpora: Mapping[str, Corpus]
    settings: Mapping[str, SourceSettings]
    shares: Mapping[int, list[int]]
    """Of the sources, by the step of the run from which they hold; one is step 0."""
    epoch_steps: int | Stop
    global_batch_size: int
    seed: int
    grid: tuple[int, int]
    interleave: int
    shuffle: bool

    @classmethod
    def of(
        cls,
        corpora: Mapping[str, Corpus],
        weights: Mapping[int, Mapping[str, float]],
        *,
        epoch_steps: int | Stop,
        global_batch_size: int,
        seed: int = 0,
        grid: tuple[int, int] | None = None,
        window: int | None = None,
        interleave: int = 32,
        shuffle: bool = True,
    ) -> Recipe:
        """Choose what is not given. Nothing that is chosen looks at weights that lie ahead.

        Args:
            corpora: the sources, by name.
            weights: of each source, by the step of the run from which they hold; one is step 0.
            epoch_steps: steps of an epoch, or when it stops.
            global_batch_size: G, rows of a step over all ranks.
            seed: any integer.
            grid: (P, Q) lanes; Q divides G. By default a function of the sources and G.
            window: M, samples that are permuted together in a lane, over all sources.
            interleave: K, places that a source's windows are drawn from.
            shuffle: False: each source in its own order.

        Raises:
            ConfigError: impossible settings, or a source without samples or weight.
        """
        rows, seed = integer("global_batch_size", global_batch_size), integer("seed", seed)
        require(rows >= 1, f"global_batch_size {rows}: needs at least 1")
        if not isinstance(epoch_steps, str):
            epoch_steps = integer("epoch_steps", epoch_steps)
            require(epoch_steps >= 1, f"epoch_steps {epoch_steps}: needs at least 1")
        shares = {
            step: whole_shares([named[name] for name in corpora])
            for step, named in sorted(weights.items())
        }
        for number, (name, corpus) in enumerate(corpora.items()):
            require(corpus.num_samples > 0, f"source {name!r} has no samples")
            ever = any(now[number] for now in shares.values())
            require(ever, f"source {name!r} has weight 0 all the time: leave it out")
        begun = [corpus for corpus, share in zip(corpora.values(), shares[0], strict=True) if share]
        total = sum(corpus.num_samples for corpus in begun)
        grid = grid or default_grid(total, rows)
        grid = (int(grid[0]), int(grid[1])) if shuffle else (1, 1)
        require(
            min(grid) >= 1 and rows % grid[1] == 0,
            f"grid {grid}: P and Q must be positive, and Q divide global_batch_size {rows}",
        )
        interleave = integer("interleave", interleave)
        window = None if window is None else integer("window", window)
        require(
            min(1 if window is None else window, interleave) >= 1, "window, interleave: at least 1"
        )
        sizes = [(corpus.num_bytes, corpus.num_samples) for corpus in corpora.values()]
        settings = {}
        for number, (name, corpus) in enumerate(corpora.items()):
            now = next(now for now in shares.values() if now[number])  # when it begins
            part = (window or mixture_window(now, sizes, grid)) * now[number] / sum(now)
            size = corpus.num_samples
            settings[name] = SourceSettings.default(
                size, grid[0] * grid[1], grid[0] * rows, part, max(total, size)
            )
        return cls(corpora, settings, shares, epoch_steps, rows, seed, grid, interleave, shuffle)

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any], corpora: Mapping[str, Corpus]) -> Recipe:
        """Return the recipe of a saved state.

        Raises:
            StateError: the sources are not those of the state.
        """
        try:
            version, sources = identity["version"], identity["sources"]
            names = [source["name"] for source in sources]
            settings = {
                source["name"]: SourceSettings(source["window"], source["chunk"])
                for source in sources
            }
            shares = {
                change["step"]: [change["shares"].get(name, 0) for name in names]
                for change in identity["weights"]
            }
            given = {
                name: identity[name]
                for name in ("epoch_steps", "global_batch_size", "seed", "interleave", "shuffle")
            }
            grid = (int(identity["grid"][0]), int(identity["grid"][1]))
            fits = min(grid) >= 1 and given["global_batch_size"] % grid[1] == 0
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise StateError(f"not a mixture's order: {type(error).__name__}: {error}") from None
        if not fits:
            raise StateError(f"not a mixture's order: grid {grid}")
        if version != MIXTURE_VERSION:
            raise StateError(f"mixture version {version}, this mmstream has {MIXTURE_VERSION}")
        for source in sources:
            name = source["name"]
            found = corpora[name].identity() if name in corpora else None
            if found is None or any(found[key] != source.get(key) for key in found):
                raise StateError(f"source {name!r} of the state is {source}, and here {found}")
        named = {name: corpora[name] for name in names}
        return cls(named, settings, shares, grid=grid, **given)

    def identity(self) -> dict[str, Any]:
        """Return the recipe in plain JSON types: part of a saved state."""
        return {
            "version": MIXTURE_VERSION,
            "sources": [
                {"name": name, **corpus.identity(),
                 "window": self.settings[name].window, "chunk": self.settings[name].chunk}
                for name, corpus in self.corpora.items()
            ],
            "weights": [
                {"step": step, "shares": {
                    name: share for name, share in zip(self.corpora, shares, strict=True) if share
                }}
                for step, shares in self.shares.items()
            ],
            "epoch_steps": self.epoch_steps,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "grid": list(self.grid),
            "interleave": self.interleave,
            "shuffle": self.shuffle,
        }  # fmt: skip


def binding(identity: Mapping[str, Any], epoch: int, step: int) -> dict[str, Any]:
    """Return what of an identity a resume at (epoch, step) must find unchanged.

    That is all that the steps before it depended on. Weights that begin later may be declared anew,
    and sources that were never drawn from may come and go.
    """
    bound: dict[str, Any] = {"seed": identity.get("seed")}
    at = epoch * int(identity.get("epoch_steps", 0)) + step
    if not at:
        return bound
    weights = [change for change in identity["weights"] if change["step"] < at]
    drawn = {name for change in weights for name in change["shares"]}
    sources = [source for source in identity["sources"] if source["name"] in drawn]
    bound |= {k: value for k, value in identity.items() if k not in ("sources", "weights")}
    bound["sources"] = [source["name"] for source in sources]
    for source in sources:
        bound |= {f"source {source['name']} {k}": value for k, value in source.items()}
    bound |= {f"weights from step {change['step']}": change["shares"] for change in weights}
    return bound
