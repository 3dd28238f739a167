"""What a dataset, or several, hold more than once, and what two datasets share.

    sidecars or tars -> corpus -> DUPLICATES -> duplicates.jsonl, the bad list
    two datasets -> corpus -> LEAKS -> leaks.jsonl, a page with the pictures

The first sample in the order of the dataset stays. Later ones are its duplicates. Nothing is
rewritten: to drop duplicates is to put them on the bad list, so that no epoch shows them.

Perceptual hashes that differ in few bits are found without comparing each with each. Hashes of 256
bits are cut into 16 bands of 16 bits. Two hashes that differ in at most 15 bits have a band in
common, since 15 bits cannot change 16 bands. So only hashes with an equal band are compared. A
million random hashes give 8 comparisons for each hash and band.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.converting.quality.corpus import (
    Corpus,
    Entries,
    SampleName,
    equal_to_first,
    read_corpus,
)
from mmstream.dataset.bad_list import listed_as_bad, write_bad
from mmstream.dataset.dataset import Dataset
from mmstream.errors import ConfigError
from mmstream.types import IntArray
from mmstream.wrong_arguments import PositiveInt, checked

DUPLICATES_NAME = "duplicates.jsonl"

KINDS = ("media", "text", "pair")


@dataclass(frozen=True, slots=True)
class DuplicatePair:
    """Two samples that hold the same."""

    kind: str
    """"media", "text", "pair" (all media and the text), or "near" (images that look alike)."""
    first: SampleName
    again: SampleName
    first_field: str | None = None
    """With "media" and "near": which field it is."""
    again_field: str | None = None
    distance: int = 0
    """With "near": bits of 256 that differ between the perceptual hashes."""


@dataclass(frozen=True)
class PairNumbers:
    """The pairs of one kind, as numbers of a corpus. All arrays are int64 [num_pairs]."""

    first: IntArray
    again: IntArray
    first_medium: IntArray | None = None
    """Positions among the media of their shards."""
    again_medium: IntArray | None = None
    distance: IntArray | None = None

    def only(self, chosen: IntArray) -> PairNumbers:
        """Return some of the pairs."""
        columns = (self.first, self.again, self.first_medium, self.again_medium, self.distance)
        return PairNumbers(*(None if column is None else column[chosen] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Duplicates:
    """The duplicates of one dataset or several.

    Attributes:
        corpus: The hashes that were compared.
        by_kind: The pairs of each kind, as numbers of the corpus.
    """

    corpus: Corpus
    by_kind: Mapping[str, PairNumbers]

    @property
    def num_pairs(self) -> dict[str, int]:
        """{kind: number of pairs}. A sample or medium that comes n times is n - 1 pairs."""
        return {kind: int(numbers.again.size) for kind, numbers in self.by_kind.items()}

    def across(self, kind: str) -> PairNumbers:
        """Return the pairs of one kind whose samples are in two datasets. In splits, these leak."""
        numbers = self.by_kind[kind]
        is_across = self._dataset_of(numbers.first) != self._dataset_of(numbers.again)
        return numbers.only(np.flatnonzero(is_across))

    def refs(self, kinds: Collection[str]) -> dict[str, IntArray]:
        """Return the samples that are duplicates as a whole.

        With "text" and "pair", that is the later sample of a pair. With "media" and "near", all
        media of a sample must be duplicates. So a conversation about two pictures of which one is
        new stays.

        Args:
            kinds: One kind or several.

        Returns:
            {name of the dataset: int64 [n, 2] (shard, index), sorted}
        """
        samples = np.unique(np.concatenate([np.zeros(0, np.int64), *map(self._whole, kinds)]))
        shards, indexes = self.corpus.refs_of(samples)
        names = self.corpus.shards
        refs: dict[str, list[tuple[int, int]]] = {name: [] for name in self.corpus.datasets}
        for shard, index in zip(shards.tolist(), indexes.tolist(), strict=True):
            name, local = names[shard]
            refs[name].append((local, index))
        return {
            name: np.array(pairs, dtype=np.int64).reshape(-1, 2) for name, pairs in refs.items()
        }

    def pairs(self, kinds: Collection[str] | None = None) -> Iterator[DuplicatePair]:
        """Yield all pairs: kind by kind, in the order of the later samples.

        The names of all samples that are part of a pair are in memory.

        Args:
            kinds: Only these. Default: all.
        """
        by_kind = {
            kind: numbers
            for kind, numbers in self.by_kind.items()
            if kinds is None or kind in kinds
        }
        involved = [np.concatenate([numbers.first, numbers.again]) for numbers in by_kind.values()]
        names = self.corpus.names_of(np.concatenate([np.zeros(0, np.int64), *involved]).tolist())
        for kind, numbers in by_kind.items():
            yield from self._pairs_of(kind, numbers, names)

    def _pairs_of(
        self, kind: str, numbers: PairNumbers, names: Mapping[int, SampleName]
    ) -> Iterator[DuplicatePair]:
        first_fields = self._positions(numbers.first, numbers.first_medium)
        again_fields = self._positions(numbers.again, numbers.again_medium)
        distances = (
            [0] * numbers.first.size if numbers.distance is None else numbers.distance.tolist()
        )
        columns = (
            numbers.first.tolist(),
            numbers.again.tolist(),
            first_fields,
            again_fields,
            distances,
        )
        for first, again, first_field, again_field, distance in zip(*columns, strict=True):
            yield DuplicatePair(
                kind,
                names[first],
                names[again],
                _field(names[first], first_field),
                _field(names[again], again_field),
                distance,
            )

    def _positions(self, samples: IntArray, media: IntArray | None) -> list[int | None]:
        """Return which of its sample's media each is."""
        if media is None:
            return [None] * samples.size
        return list((media - self.corpus.media_start(samples)).tolist())

    def _whole(self, kind: str) -> IntArray:
        numbers = self.by_kind[kind]
        if numbers.again_medium is None:
            return numbers.again
        samples, counts = np.unique(numbers.again, return_counts=True)
        whole: IntArray = samples[counts == self.corpus.media_counts(samples)]
        return whole

    def _dataset_of(self, samples: IntArray) -> IntArray:
        ends = np.cumsum([len(dataset) for dataset in self.corpus.datasets.values()])
        return np.asarray(np.searchsorted(ends, samples, side="right"), dtype=np.int64)


@checked({"dataset": "give mm.open_dataset(...), or {name: dataset}"})
def find_duplicates(
    dataset: Dataset | Mapping[str, Dataset],
    *,
    kinds: Collection[str] = KINDS,
    near: bool = False,
    num_threads: PositiveInt = 1,
    progress: bool = True,
) -> Duplicates:
    """Find samples that hold the same media, the same text, or both.

    Hashes come from the sidecars that `convert` wrote. Shards without a sidecar are read whole. In
    memory are 16 bytes for each sample and kind, 32 more for each image with `near`, and about 250
    MB to sort them. Samples of the same source row (``captions="each"``) are no duplicates of each
    other. Samples on the bad list are left out, but for those that are there as duplicates.

    Args:
        dataset: A dataset, or several by name, such as splits. They are searched as one.
        kinds: "media" (a file that an earlier sample has too), "text" (equal text), "pair" (equal
            media in the same order, and equal text: the whole sample comes twice).
        near: Also find images that look alike: encoded again, resized, in another format.
        num_threads: Threads that read samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The pairs. The first sample in the order of the dataset counts as the original.

    Raises:
        ConfigError: An unknown kind.
        ShardError: A shard without a sidecar cannot be read.
        StorageError: The storage failed after retries.

    Examples:
        >>> duplicates = mm.find_duplicates(mm.open_dataset("shards/"), progress=False)
        >>> duplicates.num_pairs
        {'media': 384, 'text': 0, 'pair': 0}
    """
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ConfigError(f"kinds={sorted(unknown)}: must be among {', '.join(KINDS)}")
    datasets = {"": dataset} if isinstance(dataset, Dataset) else dict(dataset)
    wanted = [kind for kind in KINDS if kind in kinds] + ["near"] * near
    left_out = {name: listed_as_bad(item) for name, item in datasets.items()}
    corpus = read_corpus(datasets, wanted, left_out, num_threads=num_threads, progress=progress)
    return Duplicates(corpus, {kind: find_in(corpus, kind) for kind in wanted})


def find_in(corpus: Corpus, kind: str) -> PairNumbers:
    """Return the pairs of one kind: "media", "text", "pair", "id", or "near"."""
    entries = corpus.entries[kind]
    if kind == "near":
        hashes = np.concatenate([np.zeros((0, 32), np.uint8), *entries.hashes])
        pairs = numbers_of(entries, *keep_first(near_pairs(hashes)))
    else:
        pairs = numbers_of(entries, *equal_to_first(entries.hashes))
    return pairs.only(np.flatnonzero(~corpus.same_row(pairs.first, pairs.again)))


def numbers_of(
    entries: Entries, first: IntArray, again: IntArray, distance: IntArray | None = None
) -> PairNumbers:
    """Return pairs of hashes as pairs of samples and media."""
    has_media = bool(entries.media)
    return PairNumbers(
        entries.sample_of(first),
        entries.sample_of(again),
        entries.medium_of(first) if has_media else None,
        entries.medium_of(again) if has_media else None,
        distance,
    )


def drop_duplicates(
    duplicates: Duplicates, kinds: Collection[str], datasets: Collection[str]
) -> dict[str, int]:
    """Put duplicates on the bad lists of their datasets, in place of earlier duplicates there.

    The caller holds the locks of the datasets. Takes effect when they are opened again.

    Args:
        duplicates: The duplicates.
        kinds: Those to drop.
        datasets: The names of those whose lists are written.

    Returns:
        {name of the dataset: samples that its list names as duplicates}

    Raises:
        ConfigError: They are more than a bad list may name. Nothing was written to this dataset.
    """
    refs_of = duplicates.refs(kinds)
    dropped = {name: refs_of[name] for name in datasets}
    for name, refs in dropped.items():
        dataset = duplicates.corpus.datasets[name]
        write_bad(dataset, listed_as_bad(dataset), refs)
    return {name: len(refs) for name, refs in dropped.items()}


def write_pairs(duplicates: Duplicates, datasets: Collection[str]) -> None:
    """Write ``duplicates.jsonl`` into datasets: the pairs whose later sample is theirs."""
    pairs = list(duplicates.pairs())
    for name in datasets:
        store = duplicates.corpus.datasets[name].index_store
        with store.create(DUPLICATES_NAME) as file:
            for pair in pairs:
                if pair.again.dataset == name:
                    file.write(msgspec.json.encode(pair_of(pair)) + b"\n")


def pair_of(pair: DuplicatePair) -> dict[str, object]:
    """Return a pair as a line of JSONL has it."""
    line: dict[str, object] = {"kind": pair.kind}
    if pair.kind == "near":
        line["distance"] = pair.distance
    line.update(_json_of(pair.again, pair.again_field))
    line["first"] = _json_of(pair.first, pair.first_field)
    return line


def _json_of(name: SampleName, field: str | None) -> dict[str, object]:
    line: dict[str, object] = {"dataset": name.dataset} if name.dataset else {}
    line.update(shard=name.shard, index=name.index, key=name.key)
    return line if field is None else {**line, "field": field}


def _field(name: SampleName, position: int | None) -> str | None:
    if position is None:
        return None
    return name.fields[position] if position < len(name.fields) else ""


LEAK_KINDS = ("media", "near", "text", "id")


@checked()
def find_leaks(
    a: Dataset,
    b: Dataset,
    *,
    kinds: Collection[str] = LEAK_KINDS,
    num_threads: PositiveInt = 1,
    progress: bool = True,
) -> Duplicates:
    """Find samples of `b` that hold something that `a` holds too.

    Hashes come from the sidecars that `convert` wrote. Shards without a sidecar are read whole, and
    with "near" also those whose sidecar has no perceptual hashes. In memory are 16 bytes for each
    sample and kind, and 32 for each image with "near". Samples on the bad lists are left out: no
    epoch shows them.

    Args:
        a: A dataset, such as the training set.
        b: Another one, such as a benchmark.
        kinds: "media" (a file that both have), "near" (images that look alike: encoded again,
            resized, in another format), "text" (equal text), "id" (equal id of the rows).
        num_threads: Threads that read samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The pairs, each with a sample of `a` first and one of `b`. Their datasets are named "a" and
        "b". A medium or sample of `b` is in at most one pair of each kind.

    Raises:
        ConfigError: An unknown kind.
        ShardError: A shard without a sidecar cannot be read.
        StorageError: The storage failed after retries.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.find_leaks(dataset, dataset, kinds=["text"], progress=False).num_pairs
        {'text': 480}
    """
    unknown = set(kinds) - set(LEAK_KINDS)
    if unknown:
        raise ConfigError(f"kinds={sorted(unknown)}: must be among {', '.join(LEAK_KINDS)}")
    wanted = [kind for kind in LEAK_KINDS if kind in kinds]
    datasets, left_out = {"a": a, "b": b}, {"a": a.bad, "b": b.bad}
    corpus = read_corpus(datasets, wanted, left_out, num_threads=num_threads, progress=progress)
    return Duplicates(corpus, {kind: _across(corpus, kind, a.num_shards) for kind in wanted})


def _across(corpus: Corpus, kind: str, num_shards: int) -> PairNumbers:
    """Return the pairs of one kind with one sample in each dataset.

    Args:
        corpus: Of both datasets.
        kind: One of `LEAK_KINDS`.
        num_shards: Of the first dataset.
    """
    entries = corpus.entries[kind]
    num_first = sum(len(chunk) for chunk in entries.hashes[:num_shards])
    if kind == "near":
        hashes = np.concatenate([np.zeros((0, 32), np.uint8), *entries.hashes])
        return numbers_of(entries, *match_with_first(near_pairs(hashes), num_first))
    first, again = equal_to_first(entries.hashes)  # the first of a kind is in `a`, if any is
    is_across = (first < num_first) & (again >= num_first)
    return numbers_of(entries, first[is_across], again[is_across])


MAX_DISTANCE = 15
"""Most bits of 256 that differ between near-duplicates. One less than the number of bands."""

MAX_BUCKET = 4096
"""Largest group of hashes with an equal band in which each is compared with each."""

Words = npt.NDArray[np.uint64]


class NearPairs(NamedTuple):
    """Pairs of hashes that are near to each other.

    Equal hashes are one: the first of them represents the others.
    """

    representative: IntArray
    """int64 [n]: for each hash, the first that equals it."""
    first: IntArray
    """int64 [num_pairs]: a representative."""
    second: IntArray
    """A later representative that is near to `first`. Pairs are sorted by `second`."""
    distance: IntArray
    """Bits that differ: 1 to `MAX_DISTANCE`."""


class Matches(NamedTuple):
    """Hashes, each with the one that it is near to. All arrays are int64 [num_matches]."""

    first: IntArray
    again: IntArray
    """Later than `first`. Sorted, and none comes twice."""
    distance: IntArray


def near_pairs(hashes: npt.NDArray[np.uint8]) -> NearPairs:
    """Find all pairs of different hashes that differ in at most `MAX_DISTANCE` bits.

    In a group of more than 4,096 different hashes with an equal band, those near to an earlier one
    of the group are not compared with each other. So pictures that a corpus holds a million times,
    with small differences, cost little.

    Memory: about 150 bytes for each hash, and 24 for each pair.

    Args:
        hashes: uint8 [n, 32]
    """
    words = np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4)
    representative = _representatives(words)
    different = np.flatnonzero(representative == np.arange(len(words)))
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for earlier, later in _near_different(words[different]):
        pairs.append(np.stack([different[later], different[earlier]], axis=1))
    second, first = np.unique(np.concatenate(pairs), axis=0).T
    return NearPairs(representative, first, second, _distance(words[first], words[second]))


def keep_first(near: NearPairs) -> Matches:
    """Match each hash that is near to an earlier one that is kept with the first such.

    Hashes are looked at in order. One that is near to a kept one is not kept itself. So in a chain
    of pictures, each a little unlike the one before, none is dropped for one that it is not near
    to.
    """
    count = len(near.representative)
    leader, distance = np.arange(count), np.zeros(count, dtype=np.int64)
    pairs = zip(near.first.tolist(), near.second.tolist(), near.distance.tolist(), strict=True)
    for first, second, bits in pairs:
        if leader[first] == first and leader[second] == second:
            leader[second], distance[second] = first, bits
    return _matches(near, leader, distance, np.arange(count))


def match_with_first(near: NearPairs, num_first: int) -> Matches:
    """Match each of the later hashes with the nearest one among the first `num_first`."""
    count = len(near.representative)
    leader = np.where(near.representative < num_first, near.representative, -1)
    distance = np.zeros(count, dtype=np.int64)
    is_across = near.first < num_first
    is_across &= near.second >= num_first
    across = np.lexsort((near.first, near.distance))
    for number in across[is_across[across]].tolist():
        second = near.second[number]
        if leader[second] < 0:
            leader[second], distance[second] = near.first[number], near.distance[number]
    later = np.arange(num_first, count)
    is_matched = leader[near.representative[later]] >= 0
    return _matches(near, leader, distance, later[is_matched])


def _matches(near: NearPairs, leader: IntArray, distance: IntArray, hashes: IntArray) -> Matches:
    """Give each hash what its representative was matched with."""
    representative = near.representative[hashes]
    first = leader[representative]
    is_other = first != hashes
    return Matches(first[is_other], hashes[is_other], distance[representative][is_other])


def _representatives(words: Words) -> IntArray:
    """Return for each hash the first that equals it."""
    order = np.lexsort(words.T)  # stable: the earliest comes first
    ordered = words[order]
    is_new = np.ones(len(words), dtype=np.bool_)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    representative = np.empty(len(words), dtype=np.int64)
    representative[order] = order[is_new][np.cumsum(is_new) - 1]
    return representative


def _near_different(words: Words) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (earlier, later) of near hashes, for each band. A pair may come several times."""
    bands = words.view(np.uint16).reshape(-1, 16)
    for band in range(bands.shape[1]):
        keys = bands[:, band]
        order = np.argsort(keys, kind="stable")
        sizes = np.bincount(keys, minlength=1 << 16)
        stops = np.repeat(np.cumsum(sizes), sizes)
        num_after = stops - np.arange(len(keys)) - 1  # in the same bucket
        is_large = sizes > MAX_BUCKET
        num_after[np.repeat(is_large, sizes)] = 0
        yield from _near_neighbours(words, order, num_after)
        starts = np.cumsum(sizes) - sizes
        for bucket in np.flatnonzero(is_large).tolist():
            yield from _near_leaders(words, order[starts[bucket] :][: sizes[bucket]])


def _near_neighbours(
    words: Words, order: IntArray, num_after: IntArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare each hash with all that follow it in its bucket.

    A bucket of the hashes a, b, c: step 1 compares a with b and b with c, step 2 a with c.
    """
    ordered = words[order]
    head = np.ascontiguousarray(ordered[:, 0])
    active = np.flatnonzero(num_after > 0)
    step = 1
    while active.size:
        # A quarter of the bits decides about nearly all pairs.
        is_candidate = np.bitwise_count(head[active] ^ head[active + step]) <= MAX_DISTANCE
        candidates = active[is_candidate]
        is_near = _distance(ordered[candidates], ordered[candidates + step]) <= MAX_DISTANCE
        near = candidates[is_near]
        if near.size:
            yield order[near], order[near + step]
        step += 1
        active = active[num_after[active] >= step]


def _near_leaders(words: Words, members: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Compare the first hash of a large bucket with the others, leave out the near ones; again."""
    while members.size > 1:
        leader, others = members[0], members[1:]
        is_near = _distance(words[others], words[leader]) <= MAX_DISTANCE
        if is_near.any():
            near = others[is_near]
            yield np.full_like(near, leader), near
        members = others[~is_near]


def _distance(a: Words, b: Words) -> IntArray:
    """Return the number of bits that differ, int64 [n]."""
    distance: IntArray = np.bitwise_count(a ^ b).sum(axis=-1, dtype=np.int64)
    return distance
