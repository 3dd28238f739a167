"""The input of an order: how many samples each shard has, and which of them are known to be bad.

A `Corpus` holds numbers and names only. `Dataset.corpus` makes one from a manifest and a bad list;
`Order` and `MixtureOrder` plan from it without reading any shard.

The identity of a corpus says what it is: names and counts, and the shards' sizes and checksums. The
order depends on the names and counts alone. Sizes and checksums tell a corpus from another one of
the same shape. `SavedOrder` is what a saved state says of its order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, product
from typing import Any

import numpy as np

from mmstream.errors import ConfigError, StateError, escaped
from mmstream.order.selection import Selection
from mmstream.order.settings import MAX_SETTING, Reshuffle, checked_reshuffle, integer, require
from mmstream.types import IntArray

CONTENT_KEYS = ("sizes", "sha256")
"""Keys of an identity that say what the shards hold. None: not known."""

MAX_TRIED = 10_000
"""Numbers of takedowns of several folders that are tried, to find those of a state."""

HASH_LENGTH = 32
"""Hexadecimal digits of the hashes in an identity: 128 bits."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The shards of a dataset, as numbers.

    All fields but `num_bytes` are the identity of a corpus. A saved state stores hashes of them,
    and a run that resumes in the middle of an epoch must have the same ones.

    Raises:
        ConfigError: a negative count or size, more or fewer names, sizes or checksums than counts,
            or a bad sample that is not in the corpus.

    Examples:
        >>> corpus = Corpus(np.array([5, 5, 5]), bad=np.array([(0, 1)]))
        >>> corpus.num_samples
        14
        >>> corpus.identity()["num_shards"]
        3
        >>> corpus.identity() == Corpus(corpus.counts).identity()  # the bad lists differ
        False
    """

    counts: IntArray
    """[num_shards] samples of each shard, including known bad ones."""
    names: Sequence[str] | None = None
    """Names of the shards, in the same order."""
    num_bytes: int | None = None
    """Size of all shards together, in bytes. It only sets the default window. None: the sum of
    `sizes`, if these are known."""
    bad: IntArray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """[num_bad, 2] (shard, index) of the samples that are never planned, sorted."""
    sizes: IntArray | None = None
    """[num_shards] size of each shard in bytes. None: not known."""
    checksums: Sequence[str | None] | None = None
    """sha256 of each shard, in hexadecimal. None: not known."""
    selection: Selection | None = None
    """The samples that take part. None: all."""
    takedown_of_bad: IntArray | None = None
    """[num_bad] the takedown, from 1, that each of `bad` came with. 0, and None: it was listed as
    bad. It is not part of the identity."""
    takedown_counts: tuple[int, ...] = ()
    """Takedowns of each folder of a union, and of a dataset's one folder. Those of one folder come
    in the order of their numbers; nobody knows the order of those of two."""

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts, dtype=np.int64).reshape(-1)
        require(not counts.size or int(counts.min()) >= 0, "a shard has a negative count")
        require(
            self.names is None or len(self.names) == counts.size,
            f"{len(self.names or ())} names for {counts.size} counts: give one name for each count",
        )
        if self.sizes is not None:
            sizes = np.asarray(self.sizes, dtype=np.int64).reshape(-1)
            require(not sizes.size or int(sizes.min()) >= 0, "a shard has a negative size")
            object.__setattr__(self, "sizes", sizes)
            if self.num_bytes is None:
                object.__setattr__(self, "num_bytes", int(sizes.sum()))
        for noun, values in (("sizes", self.sizes), ("checksums", self.checksums)):
            require(
                values is None or len(values) == counts.size,
                f"{len([] if values is None else values)} {noun} for {counts.size} counts: give "
                "one for each count",
            )
        bad = np.unique(np.asarray(self.bad, dtype=np.int64).reshape(-1, 2), axis=0)
        shards, indexes = bad.T
        inside = (shards >= 0) & (shards < counts.size) & (indexes >= 0)
        inside[inside] &= indexes[inside] < counts[shards[inside]]
        require(
            bool(inside.all()),
            f"the bad list has (shard, index) {bad[~inside][:1].tolist()}, which is not in the "
            "corpus: remove it from the list",
        )
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "bad", bad)

    @cached_property
    def chosen(self) -> Corpus:
        """The chosen samples alone, numbered in their shards: what an order counts.

        Example: of a shard of 5 samples, 1, 3 and 4 are chosen, and 0 and 3 are bad. Then it has 3
        samples here, and number 1 is bad.
        """
        if self.selection is None:
            return self
        shards, indexes = self.bad[self.selection.has(*self.bad.T)].T
        bad = np.stack([shards, self.selection.numbers(shards, indexes)], axis=1)
        return Corpus(self.selection.chosen_counts, bad=bad)

    @property
    def chosen_bytes(self) -> int | None:
        """Size of the chosen samples in bytes, by the share of each shard. None: not known."""
        if self.selection is None or self.num_bytes is None:
            return self.num_bytes
        weights = self.counts if self.sizes is None else self.sizes
        shares = self.selection.chosen_counts / np.maximum(self.counts, 1)
        return round(self.num_bytes * float((shares * weights).sum()) / max(1, int(weights.sum())))

    @cached_property
    def good_counts(self) -> IntArray:
        """[num_shards] samples of each shard that an order plans: the chosen ones that are good."""
        chosen = self.chosen
        return chosen.counts - np.bincount(chosen.bad[:, 0], minlength=chosen.counts.size)

    @property
    def num_samples(self) -> int:
        """Number of samples that an order plans."""
        return int(self.good_counts.sum())

    def first_shards(
        self, num_shards: int, *, keep_bad: bool = True, keep_selection: bool = True
    ) -> Corpus:
        """Return the first shards alone: the corpus as it was before others were appended.

        Args:
            num_shards: how many shards to keep.
            keep_bad: False: return them without a bad list.
            keep_selection: False: all of their samples take part.
        """
        is_kept = (self.bad[:, 0] < num_shards) & keep_bad
        selection, takedowns = self.selection, self.takedown_of_bad
        return Corpus(
            self.counts[:num_shards],
            None if self.names is None else self.names[:num_shards],
            None,
            self.bad[is_kept],
            None if self.sizes is None else self.sizes[:num_shards],
            None if self.checksums is None else self.checksums[:num_shards],
            selection.first_shards(num_shards) if selection and keep_selection else None,
            takedowns[is_kept] if takedowns is not None and keep_bad else None,
            self.takedown_counts,
        )

    @property
    def before_takedowns(self) -> Corpus:
        """The corpus as if nothing had been taken down."""
        return self._with_takedowns([0] * len(self.takedown_counts))

    def as_of(self, bad_hash: Any) -> Corpus:
        """Return the corpus as it was when an identity with this ``bad`` was saved.

        That is the corpus itself, unless samples were taken down since.
        """
        if self.takedown_of_bad is None or _hash_of_bad(self.bad) == bad_hash:
            return self
        # Example: of two folders with 2 takedowns and 1, these were there: 2 1, 2 0, 1 1, ..., 0 0.
        numbers = product(*(range(count, -1, -1) for count in self.takedown_counts))
        earlier = map(self._with_takedowns, islice(numbers, MAX_TRIED))
        return next((corpus for corpus in earlier if _hash_of_bad(corpus.bad) == bad_hash), self)

    def as_saved(self, saved: Mapping[str, Any]) -> Corpus:
        """Return the corpus as a state has it: its first shards, bad list, selection and takedowns.

        Args:
            saved: what an identity says of the corpus: see `SavedOrder`.

        Raises:
            StateError: they are others now.
            KeyError, ValueError: `saved` is malformed.
        """
        check_identity(saved)
        corpus = self.first_shards(
            integer("num_shards", saved["num_shards"]),
            keep_bad=saved["bad"] is not None,
            keep_selection="selection" in saved,
        ).as_of(saved["bad"])
        require_same_shards(saved, corpus.identity())
        return corpus

    def _with_takedowns(self, kept: Sequence[int]) -> Corpus:
        """Return the corpus after the first takedowns of each folder alone."""
        if self.takedown_of_bad is None:
            return self
        are_kept = zip(self.takedown_counts, kept, strict=True)
        is_kept = np.concatenate([[True], *(np.arange(count) < num for count, num in are_kept)])
        is_earlier = is_kept[self.takedown_of_bad]
        return replace(
            self, bad=self.bad[is_earlier], takedown_of_bad=self.takedown_of_bad[is_earlier]
        )

    def identity(self) -> dict[str, Any]:
        """Return what a saved state stores about the corpus, in plain JSON types.

        ``corpus`` is a hash of the counts and names, ``bad`` a hash of the bad list or None.
        ``sizes`` is a hash of the shards' sizes, or None where they are not known. ``sha256`` is a
        hash of their checksums, or None unless every shard has one. ``selection`` is absent where
        all samples take part.
        """
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        # Cached: a state is made at every step, and a corpus may have 100,000 names.
        sizes, checksums = self.sizes, self.checksums
        hashes = [] if checksums is None else [text for text in checksums if text is not None]
        identity: dict[str, Any] = {
            "corpus": _hash(self.counts, self.names or ()),
            "num_shards": int(self.counts.size),
            "bad": _hash_of_bad(self.bad),
            "sizes": None if sizes is None else _hash(sizes),
            "sha256": _hash(None, hashes) if hashes and len(hashes) == self.counts.size else None,
        }
        if self.selection is not None:
            num_chosen, digest = self.selection.num_chosen, self.selection.digest
            identity["selection"] = {"num_samples": num_chosen, "digest": digest}
        return identity


def _hash_of_bad(bad: IntArray) -> str | None:
    return _hash(bad) if bad.size else None


def _hash(numbers: IntArray | None, texts: Iterable[str] = ()) -> str:
    """Return the first half of the SHA-256 of numbers and texts, in hexadecimal."""
    content = hashlib.sha256(b"" if numbers is None else numbers.astype("<i8").tobytes())
    for text in texts:
        content.update(text.encode("utf-8", "surrogateescape") + b"\0")
    return content.hexdigest()[:HASH_LENGTH]


def check_identity(identity: Mapping[str, Any]) -> None:
    """Check the hashes of an identity, and the size of its selection.

    Raises:
        ValueError, TypeError or KeyError: one of them is malformed.
    """
    for key in (key for key in CONTENT_KEYS if key in identity):
        value = identity[key]
        is_hash = isinstance(value, str) and len(value) == HASH_LENGTH and value.isalnum()
        if value is not None and not is_hash:
            is_short = isinstance(value, str | int | float)  # a deep list has no repr
            text = escaped(repr(value)) if is_short else f"of type {type(value).__name__}"
            raise ValueError(f"{key} {text} is not a hash")
    if (selection := identity.get("selection")) is not None:
        integer("num_samples", selection["num_samples"], MAX_SETTING)


def differing_keys(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return the keys, sorted, whose values differ between two identities or parts of them.

    An absent key counts as None; True and 1.0 are not 1. The content of shards is compared only
    where both sides know it: a corpus may get checksums after a state was saved. That holds for
    "sha256" of a dataset and for "source web sha256" of a mixture.

    Examples:
        >>> differing_keys({"seed": 1, "sha256": "a"}, {"seed": 2, "sha256": None})
        ['seed']
    """
    return [
        key
        for key in sorted(saved.keys() | present.keys())
        if (type(saved.get(key)), saved.get(key)) != (type(present.get(key)), present.get(key))
        and not (
            key.rpartition(" ")[2] in CONTENT_KEYS
            and (saved.get(key) is None or present.get(key) is None)
        )
    ]


def require_same_shards(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse the first shards of a corpus that are not those of a saved state.

    Args:
        saved: what the state says of them, with ``num_shards``.
        present: what they are now.

    Raises:
        StateError: names, counts, sizes, checksums or the bad list differ.
    """
    differing = differing_keys(saved, present)
    shards = f"first {saved['num_shards']} shards"
    for key, subject, advice in (
        ("corpus", f"the corpus' {shards}", "resume on the old ones"),
        ("num_shards", f"the corpus' {shards}", "resume on the old ones"),
        ("sizes", f"the sizes of the {shards}", "resume on the old ones"),
        ("sha256", f"the bytes (sha256) of the {shards}", "resume on the old ones"),
        ("bad", "the known bad samples", "put back mmstream.bad.previous.json"),
        ("selection", "the chosen samples", "choose the same ones"),
    ):
        if key in differing:
            raise StateError(
                f"{subject} are not those of the state ({key} was {saved.get(key)!r} and is "
                f"{present.get(key)!r}): {advice}, or start over"
            )


def same_order(identity: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two identities are of one order, as far as both know the shards' content."""
    sources, other_sources = identity.get("sources", ()), other.get("sources", ())
    return (
        len(sources) == len(other_sources)
        and not any(map(differing_keys, sources, other_sources))
        and not differing_keys({**identity, "sources": None}, {**other, "sources": None})
    )


# -- what a saved state says of its order: the identity, as `AnyOrder.identity` writes it ----------
#
# state["order"]  --`SavedOrder.parse`-->  keys  -->  `state.resume`, `Order.from_saved`, ...
#
# An identity leaves out some keys where they have their defaults, and has other names for the
# dataset where rows are packs. Both are known here alone. Values are checked where an order is made
# of them, so a state of another version can be read as far as it goes.

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
