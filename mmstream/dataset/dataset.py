"""One dataset: its length, its order, and random access to raw samples.

`open_dataset` makes it. The stages read bytes and samples through `Dataset.shards`. They take any
`ShardSource`: a dataset, or several as a mixture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from mmstream.dataset import select as selections
from mmstream.dataset.keys import (
    find_key,
    key_hashes,
    parse_address,
    refs_at,
    require_own,
    shard_stamp,
)
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.shard_indexes import ShardIndexes
from mmstream.dataset.shards import ShardReader
from mmstream.display.text import MAX_VALUE_CHARACTERS, count_text, value_text
from mmstream.errors import ConfigError, StateError, TakenDownError, escaped, where
from mmstream.order import AnyOrder, BucketOrder, Corpus, Order
from mmstream.order.permute import random_words
from mmstream.order.selection import Mask, Selection
from mmstream.ranks import World
from mmstream.settings import AnyInt, Fraction, NonEmptyStr, checked, missing_attribute
from mmstream.storage import Access, ObjectStat, SharedStore, Store, is_remote
from mmstream.types import IntArray, Sample, SampleRef

MAX_STORED_PER_CHOSEN = 1.3
"""Stored samples for each chosen one, up to which bytes between chosen samples are read too."""


class Dataset(Sequence[Sample]):
    """The samples of a dataset, in the order of its shards. `open_dataset` makes it.

    A `ShardSource`. It pickles small: workers get the manifest, not connections or indexes.

    Attributes:
        manifest: shards, fields, and where the dataset came from.
        shards: reads bytes and samples of the shards.
        index_store: where the indexes lie. Another store only after ``index --output``.
        bad: int64 [num_bad, 2], sorted (shard, index) of known-bad samples (see ``bad_list.py``),
            and of those that were taken down. Length and random access include them; an epoch
            leaves them out.
        takedowns: what was taken down, the first one first (see ``bad_list.py``).
        selection: the samples that this dataset shows. None: all.
        folders: the datasets of which this is the union, in their order (see ``open.py``). None,
            where it has one folder.
        has_checksums: whether bytes that are read are compared with their checksums.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> len(dataset), dataset[0]["__key__"]
        (480, '000000001')
    """

    can_finish_epoch = True

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        index_store: Store | None = None,
        offsets: Mapping[str, IntArray] | None = None,
        bad: IntArray | None = None,
        stats: Mapping[str, ObjectStat] | None = None,
        *,
        checksums: bool = True,
        takedowns: Sequence[Takedown] = (),
    ) -> None:
        self.manifest = manifest
        self.index_store = store if index_store is None else index_store
        self.takedowns = tuple(takedowns)
        listed = np.zeros((0, 2), dtype=np.int64) if bad is None else bad
        self.bad, self._takedown_of_bad = _with_takedowns(listed, self.takedowns)
        self.selection: Selection | None = None
        self.folders: tuple[Dataset, ...] = ()
        self.has_checksums = checksums and manifest.checksums is not None
        indexes = ShardIndexes(self.index_store, manifest, self.has_checksums, offsets)
        self.shards = ShardReader(manifest, store, indexes, stats)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("Dataset", name, self)

    def __getstate__(self) -> dict[str, Any]:
        of_all_samples = ("removed", "_key_hashes")
        return {name: value for name, value in vars(self).items() if name not in of_all_samples}

    @property
    def store(self) -> Store:
        """Where the tars lie."""
        return self.shards.store

    @cached_property
    def access(self) -> Access:
        """How reads of the shards are best cut.

        Bytes between samples are read and dropped only where most samples are chosen. So where
        samples are of like sizes, at most about 1.3 times the chosen bytes are read.
        """
        access = self.store.access
        if len(self) * MAX_STORED_PER_CHOSEN < int(self.counts.sum()):
            return replace(access, max_gap_bytes=0)
        return access

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @overload
    def __getitem__(self, item: int | str) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> Dataset: ...
    @checked({"item": "give a position, a key or a slice"}, late=True)
    def __getitem__(self, item: AnyInt | str | slice) -> Sample | Dataset:
        """Return a sample as a dict of bytes, or a view of the samples of a slice.

        A string is a key, ``sample["__key__"]``. The first look-up reads all keys from the
        sidecars, and 8 bytes a sample are remembered. Without sidecars it reads a tar header of
        each sample, which is a request in object storage. `find` takes an address instead, and
        reads nothing but the sample.

        Args:
            item: The position of the sample, its key, or a slice of positions.

        Raises:
            ConfigError: a slice runs backwards.
            IndexError: no such position.
            KeyError: no sample has the key, or several have it; the message names them.
            ChecksumError: its bytes are not those of its checksum, in `MAX_SAMPLE_READS` reads.
            TakenDownError: it was taken down.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        if isinstance(item, slice):
            return self._sliced(item)
        if isinstance(item, str):
            return SampleDict(self.read(*self.ref_of_key(item)))
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        (ref,) = self.refs(np.array([number]))
        return SampleDict(self.read(*ref))

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples in their order, without those that were taken down."""
        for position in range(len(self)):
            with suppress(TakenDownError):
                yield self[position]

    @property
    def num_left_out(self) -> tuple[int, int]:
        """Samples of this dataset or view that no epoch has: bad ones, and those taken down."""
        corpus = self.corpus
        num_bad = len(corpus.before_takedowns.chosen.bad)
        return num_bad, len(corpus.chosen.bad) - num_bad

    def refs(self, positions: IntArray) -> list[SampleRef]:
        """Return (shard, index) of the samples at positions, int64 [n], of this dataset or view."""
        refs = refs_at(self._ends, positions)
        if self.selection is None or not refs:
            return refs
        shards, numbers = np.array(refs, dtype=np.int64).T
        indexes = self.selection.locate(shards, numbers)
        return list(zip(shards.tolist(), indexes.tolist(), strict=True))

    def shows(self, ref: SampleRef) -> bool:
        """Return whether a stored sample is one of this dataset or view."""
        shard, index = np.array(ref)[:, None]
        return self.selection is None or bool(self.selection.has(shard, index)[0])

    def ref_of_key(self, key: str) -> SampleRef:
        """Return (shard, index) of the sample with a key; errors as `dataset[key]`."""
        ref = find_key(self.shards, key, self._key_hashes)
        if not self.shows(ref):
            raise KeyError(f"the sample with the key {escaped(key)!r} is not chosen here")
        return ref

    def find(self, text: str) -> Sample:
        """Return the sample that a line of a log names.

        Args:
            text: ``shard[index]``, or a whole line that holds it: a message, a line of
                ``mmstream replay``, or a record of a quarantine file.

        Raises:
            ConfigError: the text names no sample, or none of this dataset.
            SampleError, ShardError, StorageError: it cannot be read.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> line = "W [rank 0] shard-000000.tar[175] 000000176.jpg: truncated"
            >>> dataset.find(line)["__key__"]
            '000000176'
        """
        return SampleDict(self.read(*self.ref_of(text)))

    @checked()
    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names; errors as `find`."""
        shards = {info.name: shard for shard, info in enumerate(self.manifest.shards)}
        ref = parse_address(text, shards, self.counts)
        if ref not in self.removed:  # its key may be erased
            require_own(text, self.name_of(ref[0]), ref, self.shards)
        return ref

    def __repr__(self) -> str:
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        num_bad, num_removed = self.num_left_out
        bad = f", {num_bad:,} known to be bad" if num_bad else ""
        bad += f", {num_removed:,} taken down" if num_removed else ""
        samples = f"{count_text(len(self), 'sample')}{bad}"
        if self.selection is not None:
            samples = f"{len(self):,} chosen of {count_text(int(self.counts.sum()), 'sample')}{bad}"
        shards = count_text(self.num_shards, "shard")
        return f"<Dataset {self.store.url}: {samples}, {shards}, {size}>"

    def _repr_html_(self) -> str:
        from mmstream.display.samples import dataset_html

        return dataset_html(self)

    @property
    def counts(self) -> IntArray:
        """Stored samples of each shard, int64 [num_shards], whatever a view shows of them."""
        return self.shards.counts

    @property
    def shown_counts(self) -> IntArray:
        """Samples of each shard that this dataset or view shows, int64 [num_shards]."""
        return self.counts if self.selection is None else self.selection.chosen_counts

    @property
    def num_bytes(self) -> int:
        """Bytes of the samples of this dataset or view, by the share of each shard."""
        num_bytes = self.manifest.num_bytes
        if self.selection is None:
            return num_bytes
        return replace(self.corpus, num_bytes=num_bytes).chosen_bytes or 0

    def indexes_of(self, shard: int) -> IntArray:
        """Return the samples of a shard that this dataset or view shows: int64, ascending."""
        if self.selection is None:
            return np.arange(self.counts[shard])
        return np.flatnonzero(self.selection.mask(shard))

    @property
    def corpus(self) -> Corpus:
        """The numbers and names from which an order is made.

        Where the dataset was baked, `num_bytes` is the size of its source. So the defaults of an
        order, and its steps, are those of the source.
        """
        names = [shard.name for shard in self.manifest.shards]
        sizes = np.array([shard.num_bytes for shard in self.manifest.shards], dtype=np.int64)
        checksums = [shard.sha256 for shard in self.manifest.shards]
        baked = self.manifest.source.get("bake")
        num_bytes = baked.get("source_bytes") if isinstance(baked, dict) else None
        if type(num_bytes) is not int or num_bytes <= 0:
            num_bytes = self.manifest.num_bytes
        return Corpus(
            self.counts,
            names,
            num_bytes,
            self.bad,
            sizes,
            checksums,
            self.selection,
            self._takedown_of_bad,
            tuple(len(own.takedowns) for own in self.folders) or (len(self.takedowns),),
        )

    @cached_property
    def shards_identity(self) -> dict[str, Any]:
        """What an identity says of the shards, whatever is chosen of them or known to be bad."""
        identity = self.corpus.identity()  # it hashes all names, which may be 100,000
        return {key: identity[key] for key in ("corpus", "num_shards", "sizes", "sha256")}

    @cached_property
    def removed(self) -> Mapping[SampleRef, str]:
        """{(shard, index): the reason} of the samples that were taken down."""
        return {
            (shard, index): takedown.reason
            for takedown in self.takedowns
            for shard, index in takedown.refs.tolist()
        }

    @cached_property
    def _key_hashes(self) -> IntArray:
        return key_hashes(self)

    @cached_property
    def _ends(self) -> IntArray:
        """Samples of this dataset or view up to the end of each shard."""
        return np.cumsum(self.shown_counts)

    @property
    def num_shards(self) -> int:
        """Shards of the corpus."""
        return len(self.manifest.shards)

    def name_of(self, shard: int) -> str:
        """Return a shard's name, relative to the corpus' root."""
        return self.manifest.shards[shard].name

    def locate(self, shard: int) -> ShardLocation:
        """Return where a shard lies: in this dataset, which has no source name."""
        return ShardLocation("", self, shard)

    def own(self, shard: int) -> tuple[Dataset, int]:
        """Return the dataset of the folder that a shard lies in, and its position there.

        Only there has the shard the name that its sidecar holds.
        """
        for folder in self.folders:
            if shard < folder.num_shards:
                return folder, shard
            shard -= folder.num_shards
        return self, shard

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> Order:
        """Return the order of the dataset. Settings and errors are those of `Order.from_counts`."""
        return Order.from_corpus(self.corpus, drop_last=drop_last, **settings)

    def order_from_identity(self, identity: Mapping[str, Any]) -> Order | BucketOrder:
        """Return the order that a saved state names; shards may have been appended since.

        Raises:
            StateError: the state belongs to a mixture or to another dataset, or its samples were
                chosen by a selection that is neither that of this view nor stored.
        """
        if "sources" in identity:
            raise StateError("this state is of a mixture: give its JSON file")
        if "buckets" in identity:
            return selections.saved_bucket_order(self, identity)
        try:
            return Order.from_saved(identity, self.corpus)
        except StateError as error:
            corpus = selections.saved_corpus(self, identity)
            if corpus is None and "selection" in identity and not self.folders:
                raise StateError(f"{error}; or store them with `mmstream select`") from None
            if corpus is None:
                raise
        return Order.from_saved(identity, corpus)

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; raises what `dataset[i]` raises."""
        if (shard, index) in self.removed:
            raise taken_down(where(self.name_of(shard), index), self.removed[shard, index])
        return self.shards.read(shard, index)

    # -- views: the same shards, fewer samples -----------------------------------------------------

    @checked({"selection": "give the selection of a view, or None"})
    def with_selection(self, selection: Selection | None) -> Dataset:
        """Return a view of chosen samples, in place of those that this dataset shows.

        Args:
            selection: The samples. None: all that are stored.

        Raises:
            ConfigError: it is of other shards.
        """
        if selection is not None and not np.array_equal(selection.counts, self.counts):
            raise ConfigError(
                f"a selection of {int(selection.counts.sum()):,} samples in "
                f"{len(selection.counts):,} shards, and {escaped(self.store.url)} has "
                f"{int(self.counts.sum()):,} in {self.num_shards:,}: choose among these"
            )
        view = copy(self)
        is_whole = selection is not None and selection.num_chosen == int(self.counts.sum())
        view.selection = None if is_whole else selection
        for name in ("_ends", "access"):
            view.__dict__.pop(name, None)
        return view

    @checked({"condition": "write it as \"width >= 200 and lang = 'en'\", or give a function"})
    def where(
        self,
        condition: str | Callable[[Any], Any],
        *,
        columns: Sequence[str] | None = None,
        world: World | None = None,
        progress: bool = True,
    ) -> Dataset:
        """Return a view of the samples that fulfil a condition.

        It looks for a stored selection of this condition first (see `select`). Else the columns of
        all shards are read. Samples of which a value is not known (NULL) are left out, and a
        warning counts them.

        Args:
            condition: A condition on columns, or a function from a ``pyarrow.Table`` of them to
                true or false for each row.
            columns: The columns that a function gets.
            world: Of several ranks, each would read all columns. So they need a stored selection.
                A process that chooses for itself passes ``mm.World()``. None: as of `Loader`.
            progress: Show a progress bar (on a terminal only).

        Raises:
            ConfigError: It is not a condition, a column does not exist, no sample fulfils it, or
                there are several ranks.
            ManifestError: What is stored of it is damaged.
            ShardError, StorageError: Columns cannot be read.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> large = dataset.where("width >= 64 and caption is not null")
            >>> len(large) + len(dataset.without(large))
            480
        """
        view: Dataset = selections.where(self, condition, columns, world, progress=progress)
        return view

    @checked()
    def explain(
        self,
        condition: str | Callable[[Any], Any],
        *,
        columns: Sequence[str] | None = None,
        progress: bool = True,
    ) -> Any:
        """Return what each clause of a condition leaves. It prints as a table.

        Arguments and errors are those of `where`, but no sample need fulfil the condition.

        Returns:
            ``clauses``, the operands of the outermost ``and``, and ``together``, the whole
            condition. Each has a ``text``, ``num_passed``, ``num_failed`` and ``num_null``.
        """
        rule = selections.rule_of(condition, columns)
        return selections.explained(self, rule, progress=progress)[0]

    @checked()
    def select(self, name: str) -> Dataset:
        """Return a view of the samples that ``mmstream select --name`` has stored under a name.

        They are not chosen again: their bits are mapped. A remote file is copied once to each
        machine.

        Raises:
            FileNotFoundError: No selection has this name.
            ConfigError: It has no sample of this view.
            ManifestError: It is damaged, of another corpus, or shards were appended since.
            StorageError: The storage failed after retries.
        """
        view: Dataset = selections.select(self, name)
        return view

    @checked({"fraction": "give the share to keep, such as 0.1"})
    def sample(
        self, fraction: Fraction, seed: AnyInt = 0, *, by: NonEmptyStr | None = None
    ) -> Dataset:
        """Return a view of a random share of the samples.

        Whether a sample is chosen depends on the seed, the name of its shard and its index alone.
        So a growing dataset keeps its choice, and a larger fraction of a seed has all samples of a
        smaller one.

        Args:
            fraction: The share of the samples, from 0 to 1. Their number is close to it.
            seed: Each seed chooses others.
            by: A column: samples of one value are chosen together, such as those of one speaker.
                Samples without a value are chosen one by one. None: so are all.

        Raises:
            ConfigError: `fraction` is not from 0 to 1, or there is no such column.
            ShardError, StorageError: The column cannot be read.
        """
        masks = (draws < fraction for draws in self._draws(seed, by))
        return self.with_selection(self._chosen & Selection.of_shards(masks, self.counts))

    def _draws(self, seed: int, by: str | None) -> Iterator[npt.NDArray[np.float64]]:
        """Yield float64 [its samples] of each shard: a random number for each sample."""
        # By names of shards in their folders: a sample is chosen in a union where it is alone.
        owned = map(self.own, range(self.num_shards))
        draws = (_draws(int(own.counts[shard]), seed, own.name_of(shard)) for own, shard in owned)
        if by is None:
            return draws
        return selections.draws_by(self, seed, by, draws)

    @checked({"fraction": "give the share of the first part, such as 0.98"})
    def split(
        self,
        fraction: Fraction,
        seed: AnyInt = 0,
        *,
        by: NonEmptyStr | None = None,
        by_media: bool = False,
        world: World | None = None,
    ) -> tuple[Dataset, Dataset]:
        """Return two views: a random share of the samples, and the others.

        Args:
            fraction: The share of the first part, from 0 to 1.
            seed: Each seed draws other parts.
            by: A column, as `sample` has it. No value is in both parts.
            by_media: No picture, video or recording is in both parts. Samples that share one, also
                through others, are in the part of the first of them. A later sample with media of
                both parts is in neither, and a warning counts these.
            world: With `by_media`, of several ranks; as for `where`.

        Raises:
            ConfigError: As `sample`; or `by_media` with `by`, without hashes of media, or on
                several ranks without what ``mmstream select --by-media`` stores.
            ManifestError: What is stored of it is damaged.
            ShardError, StorageError: The columns cannot be read.

        Examples:
            >>> train, val = mm.open_dataset("shards/").split(0.9, by_media=True)
            >>> len(train) + len(val)
            480
        """
        if not by_media:
            first = self.sample(fraction, seed, by=by)
            return first, self.without(first)
        if by is not None:
            raise ConfigError(f"split: by={by!r} and by_media=True: give one of the two")
        return selections.split_by_media(self, fraction, seed, self._draws(seed, None), world)

    @checked({"other": "give a view of this dataset"})
    def without(self, other: Dataset) -> Dataset:
        """Return a view of the samples that another view of the same dataset does not show.

        Raises:
            ConfigError: `other` has other shards.
        """
        if self._stamps != other._stamps:
            raise ConfigError(
                f"without: {other!r} has other shards than {self!r}: give a view of it"
            )
        return self.with_selection(self._chosen - other._chosen)

    def num_shared(self, other: Dataset) -> int:
        """Return how many samples of this dataset or view another one of the same folder shows."""
        is_same = self.store.url == other.store.url and self._stamps == other._stamps
        return (self._chosen & other._chosen).num_chosen if is_same else 0

    @property
    def _stamps(self) -> list[tuple[str, str]]:
        """What tells the shards from those of another dataset. Their stamps have no names."""
        return [(shard.name, shard_stamp(shard)) for shard in self.manifest.shards]

    @property
    def _chosen(self) -> Selection:
        return Selection.of_all(self.counts) if self.selection is None else self.selection

    def _sliced(self, item: slice) -> Dataset:
        try:
            positions = range(*item.indices(len(self)))
        except (TypeError, ValueError):
            raise ConfigError(
                f"[{item.start!r}:{item.stop!r}:{item.step!r}]: give whole numbers, and a step "
                "from 1 up"
            ) from None
        if positions.step < 0:
            raise ConfigError(
                f"[::{positions.step}]: a view has its samples in the order of the shards; read "
                "backwards with reversed(dataset)"
            )
        chosen, start, step = self._chosen, positions.start, positions.step

        def mask_of(shard: int) -> Mask:
            # Example: of the positions 2, 5, 8 of [2:9:3], a shard that shows 4 to 7 has 5, which
            # is its number 1.
            first_position = int(self._ends[shard] - chosen.chosen_counts[shard])
            num_before = max(0, -(-(first_position - start) // step))
            first = start + num_before * step - first_position
            stop = max(0, positions.stop - first_position)
            mask = np.zeros(int(self.counts[shard]), dtype=np.bool_)
            mask[np.flatnonzero(chosen.mask(shard))[first:stop:step]] = True
            return mask

        masks = map(mask_of, range(self.num_shards))
        return self.with_selection(Selection.of_shards(masks, self.counts))


def _draws(size: int, seed: int, shard: str) -> npt.NDArray[np.float64]:
    """Return float64 [size] from 0 to 1, without 1: a random number for each sample of a shard."""
    words = random_words(size, seed, "sample", shard) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


class Takedown(NamedTuple):
    """Samples that were taken down together."""

    reason: str
    refs: IntArray
    """int64 [n, 2], sorted (shard, index)."""


def _with_takedowns(
    bad: IntArray, takedowns: Sequence[Takedown]
) -> tuple[IntArray, IntArray | None]:
    """Return the samples that are never planned, and which takedown each is of; 0: it is bad."""
    if not takedowns:
        return bad, None
    lists = [bad, *(takedown.refs for takedown in takedowns)]
    refs, first = np.unique(np.concatenate(lists), axis=0, return_index=True)
    return refs, np.repeat(np.arange(len(lists)), [len(refs) for refs in lists])[first]


def taken_down(address: str, reason: str) -> TakenDownError:
    """Return the error of a sample that was taken down."""
    return TakenDownError(f"{address} was taken down: {escaped(reason)}")


class ShardLocation(NamedTuple):
    """Where a shard of a `ShardSource` lies."""

    source: str
    """Name of its source in a mixture; "" for a single dataset."""
    dataset: Dataset
    shard: int
    """Position in the manifest of `dataset`."""


# -- the source of all stages: one dataset, or several as a mixture --------------------------------
#
# `ShardSource` is all that order, read and state ask for. Everything else about a shard is asked of
# the dataset that `locate` names.


@runtime_checkable
class ShardSource(Protocol):
    """Shards numbered 0, 1, 2, ... over one or more datasets: `Dataset` and `Mixture`."""

    can_finish_epoch: bool
    """Whether an old epoch can be finished before new settings begin (``on_change``)."""

    def __len__(self) -> int: ...

    @property
    def num_shards(self) -> int:
        """Number of shards."""

    def name_of(self, shard: int) -> str:
        """Return the name of a shard, as messages and logs show it."""

    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names."""

    def locate(self, shard: int) -> ShardLocation:
        """Return the dataset of a shard, and its position there."""

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> AnyOrder:
        """Return the order with these settings. Raises ConfigError: impossible ones."""

    def order_from_identity(self, identity: Mapping[str, Any]) -> AnyOrder:
        """Return the order of a saved state. Raises StateError: it is of another source."""


def datasets_of(source: ShardSource) -> list[Dataset]:
    """Return the datasets of a source, in the order of their shards."""
    return [dataset for _, dataset in numbered_datasets(source)]


def numbered_datasets(source: ShardSource) -> Iterator[tuple[int, Dataset]]:
    """Yield (position of its first shard, dataset) for each dataset of a source, in order."""
    shard = 0
    while shard < source.num_shards:
        _, dataset, local_shard = source.locate(shard)
        yield shard, dataset
        shard += dataset.num_shards - local_shard


def is_behind_network(dataset: Dataset) -> bool:
    """Tell whether reads of a dataset mostly wait for a network."""
    store = dataset.store
    return isinstance(store, SharedStore) or (store.access.concurrent and is_remote(store.url))


class DatasetItems(NamedTuple):
    """The items whose shards belong to one dataset."""

    source: str
    """Name of the dataset in a mixture; "" for a single dataset."""
    dataset: Dataset
    numbers: list[int]
    """Positions of the items among all."""
    shards: list[int]
    """The shard of each of them, in the manifest of `dataset`."""


def by_dataset(source: ShardSource, shards: Iterable[int]) -> list[DatasetItems]:
    """Group items by the dataset in which their shards lie.

    Args:
        source: Numbers the shards.
        shards: The shard of each item.
    """
    groups: dict[str, DatasetItems] = {}
    for number, shard in enumerate(shards):
        name, dataset, local_shard = source.locate(shard)
        group = groups.setdefault(name, DatasetItems(name, dataset, [], []))
        group.numbers.append(number)
        group.shards.append(local_shard)
    return list(groups.values())


def load_indexes(source: ShardSource, shards: Iterable[int]) -> int:
    """Fetch the indexes of shards, all of a dataset side by side. See `ShardIndexes.load`."""
    return sum(
        group.dataset.shards.indexes.load(group.shards) for group in by_dataset(source, shards)
    )


def refs_of(source: ShardSource, positions: IntArray) -> list[SampleRef]:
    """Return (shard, index) of the samples at these positions of all samples, int64 [n]."""
    refs: dict[int, SampleRef] = {}
    start = 0
    for first_shard, dataset in numbered_datasets(source):
        stop = start + len(dataset)
        numbers = np.flatnonzero((start <= positions) & (positions < stop))
        of_dataset = dataset.refs(positions[numbers] - start)
        shifted = ((first_shard + shard, index) for shard, index in of_dataset)
        refs |= zip(numbers.tolist(), shifted, strict=True)
        start = stop
    return [refs[number] for number in range(positions.size)]


def read_sample(source: ShardSource, shard: int, index: int) -> Sample:
    """Return one raw sample, with its source in a mixture; raises what ``dataset[i]`` raises."""
    name, dataset, local_shard = source.locate(shard)
    sample = SampleDict(dataset.read(local_shard, index))
    if name:
        sample["__source__"] = name
    return sample


def read_ranges(
    source: ShardSource, ranges: Sequence[tuple[int, int, int]]
) -> list[bytes | OSError]:
    """Return the bytes of each (shard, start, stop), or in its place the error that it met.

    Remote ranges travel side by side, also those of different stores.
    """
    groups = by_dataset(source, [shard for shard, _, _ in ranges])

    def read_one_dataset(group: DatasetItems) -> list[bytes | OSError]:
        numbered = zip(group.numbers, group.shards, strict=True)
        return group.dataset.shards.read_ranges(
            [(shard, *ranges[number][1:]) for number, shard in numbered]
        )

    if sum(group.dataset.store.access.concurrent for group in groups) > 1:
        with ThreadPoolExecutor(len(groups)) as pool:
            responses = list(pool.map(read_one_dataset, groups))
    else:
        responses = list(map(read_one_dataset, groups))
    results: dict[int, bytes | OSError] = {}
    for group, of_group in zip(groups, responses, strict=True):
        results |= zip(group.numbers, of_group, strict=True)
    return [results[number] for number in range(len(ranges))]


# -- a sample as users get it ----------------------------------------------------------------------

MAX_NAMED_FIELDS = 20
"""Fields in the line of a sample."""

MAX_LINE_CHARACTERS = 1000


class SampleDict(dict[str, Any]):
    """A sample: a dict in every respect, but for how it is shown.

    Its ``repr`` is one line and never the bytes of a file. In a notebook it shows its images and
    its text. Samples inside a pipeline are plain dicts, which are made twice as fast.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> dataset[0]
        {'__key__': '000000001', ...'jpg': <... JPEG ...>, ...}
    """

    __slots__ = ()

    def __repr__(self) -> str:
        entries = [
            f"{value_text(str(name))}: {_value_text(name, value)}"
            for name, value in islice(self.items(), MAX_NAMED_FIELDS)
        ]
        if len(self) > len(entries):
            entries.append(f"... {len(self) - len(entries):,} more")
        return f"{{{escaped(', '.join(entries), MAX_LINE_CHARACTERS)}}}"

    def _repr_html_(self) -> str | None:
        from mmstream.display.samples import sample_html

        is_sample = isinstance(self.get("__key__"), str)  # not what a collate function made of it
        return sample_html(self) if is_sample else None

    def copy(self) -> SampleDict:
        """Return a shallow copy."""
        return SampleDict(self)


def _value_text(name: str, value: Any) -> str:
    """Return a value of a sample: the end of the shard's URL, the sample's position in it, ..."""
    if name == "__url__" and isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
        return repr("..." + value[-MAX_VALUE_CHARACTERS:])
    if name == "__lineage__" and hasattr(value, "index") and hasattr(value, "shard"):
        return f"<shard {value.shard}, index {value.index}>"
    return value_text(value)
