"""What a saved state says of its order: the identity, as `AnyOrder.identity` writes it.

    state["order"]  --`SavedOrder.parse`-->  keys  -->  `state.resume`, `Order.from_saved`, ...

An identity leaves out some keys where they have their defaults, and has other names for the dataset
where rows are packs. Both are known here alone. Values are checked where an order is made of them,
so a state of another version can be read as far as it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmstream.errors import ConfigError, StateError
from mmstream.order.corpus import CONTENT_KEYS
from mmstream.order.settings import Reshuffle, checked_reshuffle

DATASET = "dataset"
"""Where an order runs over packs, ``corpus`` and so on are about groups and packs. Its identity has
``dataset corpus`` and so on for the dataset."""

_DEFAULTS: Mapping[str, Any] = {"reshuffle": "global", "repeat": 1}
"""Values of keys that an identity has only where they are others."""

_CORPUS_KEYS = ("corpus", "num_shards", "bad", "selection", *CONTENT_KEYS)


@dataclass(frozen=True)
class SavedOrder:
    """The order of a state, and where the state stands in it.

    Examples:
        >>> saved = SavedOrder.parse({"corpus": "groups", "plan": "p", "dataset corpus": "shards"})
        >>> saved.corpus, saved.dataset
        ({'corpus': 'groups'}, {'corpus': 'shards'})
        >>> saved.keys["repeat"]
        1
    """

    keys: dict[str, Any]
    """All keys of the identity, and the defaults of those that it leaves out."""
    corpus: dict[str, Any]
    """What it says of the corpus of the order. With packs, a group is a shard there."""
    dataset: dict[str, Any]
    """What it says of the dataset. Without packs that is `corpus`; a mixture has neither."""
    epoch: int
    step: int

    @classmethod
    def parse(cls, identity: Mapping[str, Any], epoch: int = 0, step: int = 0) -> SavedOrder:
        """Read an identity: ``state["order"]``, or what `AnyOrder.identity` returns."""
        prefix = f"{DATASET} " if "plan" in identity else ""
        corpus, dataset = (
            {key: identity[before + key] for key in _CORPUS_KEYS if before + key in identity}
            for before in ("", prefix)
        )
        return cls({**_DEFAULTS, **identity}, corpus, dataset, epoch, step)

    @property
    def is_mixture(self) -> bool:
        """Whether it is of several datasets."""
        return "sources" in self.keys

    @property
    def has_begun(self) -> bool:
        """Whether rows before its step decide the next ones: sources do not end with epochs."""
        return self.step > 0 or (self.epoch > 0 and self.is_mixture)

    @property
    def reshuffle(self) -> Reshuffle:
        """How epochs are reshuffled. Raises ConfigError: in no way that this version knows."""
        return checked_reshuffle(self.keys["reshuffle"], shuffle=True, has_cache=False)

    def binding(self) -> dict[str, Any]:
        """Return the keys that must be unchanged at a resume.

        In the middle of an epoch those are all. At the start of an epoch it is the dataset and the
        seed, so a run may begin to pack there, or have another plan. In a mixture it is what the
        steps before depended on: weights that begin later may change, and sources that no step has
        drawn from may be added or removed. Compare it by `corpus.differing_keys`.

        Raises:
            KeyError, TypeError or ValueError: the identity is malformed.
        """
        if not self.has_begun:
            bound = {k: v for k, v in self.dataset.items() if k not in ("bad", "selection")}
            return bound | {k: v for k, v in self.keys.items() if k == "seed"}
        if not self.is_mixture:
            return self.keys
        run_step = self.epoch * int(self.keys["epoch_steps"]) + self.step
        begun = [change for change in self.keys["weights"] if change["step"] < run_step]
        drawn_names = {name for change in begun for name in change["shares"]}
        sources = [source for source in self.keys["sources"] if source["name"] in drawn_names]
        bound = {key: value for key, value in self.keys.items() if key != "weights"}
        bound["sources"] = [source["name"] for source in sources]
        for source in sources:
            bound |= {f"source {source['name']} {k}": value for k, value in source.items()}
        return bound | {f"weights from step {change['step']}": change["shares"] for change in begun}


@contextmanager
def making(what: str) -> Iterator[None]:
    """Make an order of an identity. What does not fit it raises a StateError of one line."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        reason = error if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise StateError(f"not {what}: {reason}") from None
