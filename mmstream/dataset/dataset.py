"""One dataset: its length, its indexes, and random access to raw samples.

`open_dataset` makes it. Where samples lie is read when their shard is first used, and what their
checksums are with it. Bytes that do not fit their checksum are read again, past all caches.
"""

from __future__ import annotations

import logging
import operator
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from mmap import mmap
from typing import Any, NamedTuple, cast, overload

import numpy as np

from mmstream.dataset.checksums import sample_checksum
from mmstream.dataset.index import walk_tar
from mmstream.dataset.index_part import SampleBounds
from mmstream.dataset.keys import KeyTable, find_key, parse_address, refs_at, require_own
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.shard_indexes import ShardIndex, ShardIndexes
from mmstream.display.markup import count_text
from mmstream.display.sample_dict import SampleDict
from mmstream.errors import (
    ChecksumError,
    SampleError,
    ShardError,
    StateError,
    escaped,
    where,
)
from mmstream.order import Corpus, Order
from mmstream.storage import (
    NotAFileError,
    ObjectStat,
    ReplacedError,
    Store,
    map_file,
    require_known,
)
from mmstream.storage.store import CHANGING
from mmstream.tar.samples import LinkError, links_of, parse_sample, sample_of
from mmstream.types import IntArray, Sample, SampleLineage, SampleRef
from mmstream.wrong_arguments import AnyInt, checked

logger = logging.getLogger(__name__)


MAX_SAMPLE_READS = 8
"""Reads of a sample whose bytes differ each time, or that comes as no sample each time."""


class Dataset(Sequence[Sample]):
    """The samples of a dataset, in the order of its shards. `open_dataset` makes it.

    A `ShardSource`. It pickles small: workers get the manifest, not connections or indexes.

    Attributes:
        manifest: shards, fields, and where the dataset came from.
        store: where the tars lie.
        index_store: where the indexes lie. Another store only after ``index --output``.
        bad: int64 [num_bad, 2], sorted (shard, index) of known-bad samples (see ``bad_list.py``).
            Length and random access include them; an epoch leaves them out.
        has_checksums: whether bytes that are read are compared with their checksums.
        known: size and version of the shards as they were when the dataset was opened, or first
            read in this process, by name.
        indexes: where the samples of each shard lie.

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
    ) -> None:
        self.manifest, self.store = manifest, store
        self.index_store = store if index_store is None else index_store
        self.bad = np.zeros((0, 2), dtype=np.int64) if bad is None else bad
        names = (shard.name for shard in manifest.shards)
        self.known = {name: stats[name] for name in names if name in stats} if stats else {}
        self._expect_sizes()
        self._accepted = set[str]()  # replaced shards that are read nevertheless
        self.has_checksums = checksums and manifest.checksums is not None
        self.indexes = ShardIndexes(self.index_store, manifest, self.has_checksums, offsets)
        self._urls: dict[int, str] = {}
        self._links: dict[int, dict[int, tuple[int, int]]] = {}
        self._key_tables: list[KeyTable] = []

    def __getstate__(self) -> dict[str, Any]:
        known = {name: stat for name, stat in self.known.items() if stat.version is not None}
        return self.__dict__ | {"_urls": {}, "_links": {}, "_key_tables": [], "known": known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._expect_sizes()

    def _expect_sizes(self) -> None:
        """Expect remote shards with the sizes of the manifest. Their first answers say more."""
        if self.store.access.concurrent:
            names = [info.name for info in self.manifest.shards]
            sizes = [info.num_bytes for info in self.manifest.shards]
            self.known = dict(zip(names, map(ObjectStat, sizes, repeat(None)), strict=True)) | (
                self.known
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @overload
    def __getitem__(self, item: int | str) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    @checked({"item": "give a position, a key or a slice"}, late=True)
    def __getitem__(self, item: AnyInt | str | slice) -> Sample | DatasetView:
        """Return a sample as a dict of bytes, or a view of a slice.

        A string is a key, ``sample["__key__"]``. Keys stand in the tars, one header per sample.
        Where `mmstream.convert` wrote the rows in their order, about ten headers are read. Else the
        first look-up reads the headers of all samples, and 8 bytes a sample are remembered:
        seconds per million local samples, and one request per sample in object storage. `find`
        takes an address instead, and reads nothing but the sample.

        Args:
            item: The position of the sample, its key, or a slice of positions.

        Raises:
            IndexError: no such position.
            KeyError: no sample has the key, or several have it; the message names them.
            ChecksumError: its bytes are not those of its checksum, in `MAX_SAMPLE_READS` reads.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        if isinstance(item, slice):
            return DatasetView(self, range(*item.indices(len(self))))
        if isinstance(item, str):
            return SampleDict(self.read(*self.ref_of_key(item)))
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        ((shard, index),) = refs_at(self._ends, np.array([number]))
        return SampleDict(self.read(shard, index))

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
        require_own(text, self.name_of(ref[0]), ref, self.store.url, self)
        return ref

    @checked(late=True)
    def ref_of_key(self, key: str) -> SampleRef:
        """Return (shard, index) of the sample with a key; reads headers as ``dataset[key]`` does.

        Raises:
            KeyError: no sample has the key, or several have it; the message names them.
        """
        return find_key(self, key, self._key_tables)

    def __repr__(self) -> str:
        size = f"{self.manifest.num_bytes / 1e6:,.1f} MB"
        bad = f", {len(self.bad):,} known to be bad" if len(self.bad) else ""
        samples = f"{count_text(len(self), 'sample')}{bad}"
        shards = count_text(self.num_shards, "shard")
        return f"<Dataset {self.store.url}: {samples}, {shards}, {size}>"

    def _repr_html_(self) -> str:
        from mmstream.display.datasets import dataset_html

        return dataset_html(self)

    @cached_property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.manifest.shards], dtype=np.int64)

    @property
    def corpus(self) -> Corpus:
        """What an order knows of the dataset."""
        names = [shard.name for shard in self.manifest.shards]
        sizes = np.array([shard.num_bytes for shard in self.manifest.shards], dtype=np.int64)
        checksums = [shard.sha256 for shard in self.manifest.shards]
        return Corpus(self.counts, names, self.planned_bytes, self.bad, sizes, checksums)

    @property
    def planned_bytes(self) -> int:
        """Size of the shards from which the defaults of an order are computed.

        That is the size of the source where the dataset was baked, so that its steps are those of
        the source.
        """
        content = self.manifest.source.get("bake")
        num_bytes = content.get("source_bytes") if isinstance(content, dict) else None
        return num_bytes if type(num_bytes) is int and num_bytes > 0 else self.manifest.num_bytes

    @cached_property
    def _ends(self) -> IntArray:
        return np.cumsum(self.counts)

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

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> Order:
        """Return the order of the dataset. Settings and errors are those of `Order.from_counts`."""
        corpus = self.corpus
        return Order.from_counts(
            corpus.counts,
            names=corpus.names,
            num_bytes=corpus.num_bytes,
            bad=corpus.bad,
            sizes=corpus.sizes,
            checksums=corpus.checksums,
            drop_last=drop_last,
            **settings,
        )

    def order_from_identity(self, identity: Mapping[str, Any]) -> Order:
        """Return the order that a saved state names; shards may have been appended since.

        Raises:
            StateError: the state belongs to a mixture or to another dataset.
        """
        if "sources" in identity:
            raise StateError("this state is of a mixture: give its JSON file")
        corpus = self.corpus
        return Order.from_identity(
            identity, corpus.counts, corpus.names, corpus.bad, corpus.sizes, corpus.checksums
        )

    def offsets(self, shard: int) -> IntArray:
        """Return a shard's index: int64 [num_samples + 1], byte offsets of its samples.

        Raises:
            ShardError: no index, a damaged one, or one that does not fit the manifest or the
                checksums.
            StorageError: storage failed after retries.
        """
        return self.index_of(shard).offsets

    def index_of(self, shard: int, count_wrong: Callable[[int], None] | None = None) -> ShardIndex:
        """Return a shard's index with the checksums of its samples; raises what `offsets` raises.

        Args:
            shard: position of the shard in the manifest.
            count_wrong: called with the number of reads that came wrong, after each of them.
        """
        columns = self.indexes.columns(shard, count_wrong)
        return ShardIndex(columns.offsets(), columns.checksums)

    def bounds(
        self, shard: int, index: IntArray, count_wrong: Callable[[int], None] | None = None
    ) -> SampleBounds:
        """Return where samples of a shard lie; raises what `offsets` raises.

        Args:
            shard: position of the shard in the manifest.
            index: int64 [n], which samples of the shard.
            count_wrong: called with the number of reads that came wrong, after each of them.

        Returns:
            One entry per sample of `index`, in its order.

        Examples:
            >>> dataset = mm.open_dataset("shards/")
            >>> bounds = dataset.bounds(0, np.array([1, 0]))
            >>> bool(bounds.stop[1] == bounds.start[0])  # sample 1 begins where sample 0 ends
            True
        """
        return self.indexes.columns(shard, count_wrong).bounds(index)

    def load_indexes(self, shards: Sequence[int]) -> int:
        """Fetch what `bounds` will need for these shards, all requests side by side.

        Nothing is raised: `bounds` raises the error of a shard, and reads it again where the
        storage may be at fault.

        Args:
            shards: positions in the manifest.

        Returns:
            The number of requests.
        """
        return self.indexes.load(shards)

    def forget_index(self, shard: int) -> None:
        """Read a shard's index again at its next use."""
        self.indexes.forget(shard)
        self._links.pop(shard, None)

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; raises what `dataset[i]` raises."""
        return self.parse(self._read_bytes(shard, index), shard, index)

    def read_bytes(self, refs: Sequence[SampleRef]) -> list[bytes]:
        """Return the bytes of samples in their tars, with headers and padding.

        Their ranges are read side by side. What fails, or does not fit its checksum, is read again.

        Args:
            refs: (shard, index) of each sample.

        Raises:
            ChecksumError, ShardError, StorageError: as `dataset[i]`.
        """
        bounds = [self.bounds(shard, np.array([index])) for shard, index in refs]
        ranges = [
            (shard, int(bound.start[0]), int(bound.stop[0]))
            for (shard, _), bound in zip(refs, bounds, strict=True)
        ]
        samples: list[bytes] = []
        for ref, bound, data in zip(refs, bounds, self.read_ranges(ranges), strict=True):
            if isinstance(data, OSError) or (
                bound.checksum is not None and sample_checksum(data) != bound.checksum[0]
            ):
                samples.append(self._read_bytes(*ref))
            else:
                samples.append(data)
        return samples

    def checksum_error(self, shard: int, index: int) -> ChecksumError:
        """Return the error of a sample whose bytes are not those of its checksum."""
        return ChecksumError(f"{where(self.name_of(shard), index)} bytes unlike their checksum")

    def read_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """Return the bytes of each (shard, start, stop), or in its place the error that it met.

        A shard that is not the one that was opened gives a `ReplacedError`. With checksums it is
        read nevertheless, with a warning: they decide about each sample.
        """
        named_ranges = [(self.name_of(shard), start, stop) for shard, start, stop in ranges]
        answers = self.store.read_ranges(named_ranges, self.known)
        if not self.has_checksums:
            return answers
        replaced = {i: error for i, error in enumerate(answers) if isinstance(error, ReplacedError)}
        for i, error in replaced.items():
            self.accept(named_ranges[i][0], error)
        answers_again = self.store.read_ranges([named_ranges[i] for i in replaced])
        for i, answer in zip(replaced, answers_again, strict=True):
            answers[i] = answer
        return answers

    def read_unchecked(self, shard: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges that no checksum is compared with.

        Args:
            shard: position of the shard in the manifest.
            ranges: [start, stop) of each.

        Raises:
            ShardError: the shard is absent, cut, or was replaced, even if the dataset has
                checksums.
            StorageError: storage failed after retries.
        """
        name = self.name_of(shard)
        if name in self._accepted:
            error = ShardError(
                f"{name}: was replaced while this run read it, and files that are read by ranges "
                f"cannot be compared with checksums; put the old file back into {self.store.url}"
            )
            error.is_replaced = True
            raise error
        named_ranges = [(name, start, stop) for start, stop in ranges]
        answers = self.store.read_ranges(named_ranges, self.known)
        for answer, (_, stop) in zip(answers, ranges, strict=True):
            if isinstance(answer, OSError):
                raise self.explain(answer, shard, stop) from answer
        return cast(list[bytes], answers)

    def drop_cache(self, shard: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Make the next reads of ranges of a shard pass what this machine holds of them."""
        for start, stop in ranges:
            self.store.drop_cache(self.name_of(shard), start, stop)

    def accept(self, name: str, error: ReplacedError) -> None:
        """Expect a replaced shard as it is now. A warning says so once.

        If that is not the first time, its versions say nothing: only sizes are compared from then.
        """
        self.known[name] = error.current
        if name in self._accepted:
            self.known[name] = error.current._replace(version=CHANGING)
        else:
            self._accepted.add(name)
            logger.warning(
                "%s: %s: %s; its samples are used where they fit their checksums",
                name,
                _replaced(error),
                error.difference,
            )

    def expect(self, shard: int, stat: ObjectStat) -> None:
        """Expect a shard as another process of this rank has read it.

        Args:
            shard: position of the shard in the manifest.
            stat: as that process expects it now.

        Raises:
            ShardError: this process has read another version, and there are no checksums by which
                samples of both could be told apart.
        """
        name = self.name_of(shard)
        try:
            require_known(self.url_of(shard), name, stat, self.known)
        except ReplacedError as error:
            if not self.has_checksums:
                raise self.explain(error, shard, 0) from error
            self.known[name] = stat
            self._accepted.add(name)  # that process has warned

    def map(self, shard: int, earlier: mmap | None = None) -> mmap | None:
        """Return a shard's file as a map of its bytes.

        Args:
            shard: position of the shard in the manifest.
            earlier: the map of an earlier call. It is returned again if the file is still the same.

        Returns:
            The map, or None where the shard is no file of this machine, is empty, or was replaced.
            `read_ranges` then reads it, or says why it cannot.
        """
        name = self.name_of(shard)
        path = self.store.local_path(name)
        if path is None:
            return None
        try:
            if earlier is None:
                return map_file(path, name, self.known)
            require_known(path, name, self.store.stat(name), self.known)
        except OSError:
            return None
        return earlier

    def known_stat(self, shard: int) -> ObjectStat | None:
        """Return the size and version of a shard as it was opened; None: it was not read yet."""
        return self.known.get(self.name_of(shard))

    def change_since(self, shard: int, stat: ObjectStat) -> ShardError | None:
        """Return the error of a shard whose file is not that of `stat` any more, or None."""
        name = self.name_of(shard)
        try:
            require_known(self.url_of(shard), name, self.store.stat(name), {name: stat})
        except ReplacedError as error:
            return cast(ShardError, self.explain(error, shard, 0))
        except OSError:
            return None  # it was removed: what is mapped stays as it was
        return None

    def parse(
        self, data: bytes | memoryview, shard: int, index: int, *, zero_copy: bool = False
    ) -> Sample:
        """Return the sample in a byte range of a shard.

        Raises:
            SampleError: the bytes are no sample; names its address.
        """
        linked = partial(self.linked, shard, index)
        make = partial(parse_sample, data, zero_copy=zero_copy, linked=linked)
        return self._made(make, shard, index)

    def assemble(
        self,
        files: Iterable[tuple[str, int, int]],
        value_of: Callable[[str, int, int], Any],
        shard: int,
        index: int,
    ) -> Sample:
        """Return the sample that some files of a shard make; arguments as those of `sample_of`.

        Raises:
            SampleError: the files are no sample; names its address.
        """
        return self._made(partial(sample_of, files, value_of=value_of), shard, index)

    def _made(self, make: Callable[..., Sample], shard: int, index: int) -> Sample:
        """Return what a function makes of the URL of a shard. Its errors name the sample."""
        is_baked = isinstance(self.manifest.source.get("bake"), dict)
        try:
            sample = make(self.url_of(shard), is_baked=is_baked)
        except SampleError as error:
            if error.is_refused:  # its address stands in the reason
                raise
            raise SampleError(f"{where(self.name_of(shard), index)} {error}") from error
        sample["__lineage__"] = SampleLineage(shard, index)
        return sample

    def linked(self, shard: int, index: int, field: str, offset: int) -> bytes:
        """Return the bytes that a link of a tar stands for; all headers of the tar are read once.

        Args:
            shard: position of the shard in the manifest.
            index: the sample with the link.
            field: the name of the link in its sample.
            offset: where the link starts, in bytes from the start of the sample.

        Raises:
            LinkError: they are not in the tar, or the tar is damaged.
            StorageError: as `dataset[i]`.
        """
        if shard not in self._links:
            try:
                self._links[shard] = links_of(walk_tar(self.store, self.name_of(shard)))
            except ShardError as error:
                raise LinkError(f"{escaped(field)}: is a link, and its tar is {error}") from error
        offsets = self.offsets(shard)
        start, stop = self._links[shard].get(int(offsets[index]) + offset, (-1, -1))
        owner = int(np.searchsorted(offsets, start, side="right")) - 1
        if not 0 <= owner < len(offsets) - 1:
            raise LinkError(
                f"{escaped(field)}: is a link to what is in no sample of its tar; pack the file "
                "itself with `tar --dereference --hard-dereference`"
            )
        data = self._read_bytes(shard, owner)
        return data[start - int(offsets[owner]) : stop - int(offsets[owner])]

    def url_of(self, shard: int) -> str:
        """Return a shard's URL."""
        url = self._urls.get(shard)
        if url is None:
            url = self._urls[shard] = self.store.url_of(self.name_of(shard))
        return url

    def explain(self, error: OSError, shard: int, stop: int) -> OSError | ShardError:
        """Return a ShardError where the fault is the shard's, else `error`.

        Such a shard is absent, replaced, no file, or ends before byte `stop`.
        """
        name = self.name_of(shard)
        if isinstance(error, ReplacedError):
            replaced = ShardError(
                f"{name}: {_replaced(error)}: {error.difference}; "
                f"start a new run, or put the old file back into {self.store.url}"
            )
            replaced.is_replaced = True
            return replaced
        if isinstance(error, NotAFileError):
            return ShardError(str(error))
        if isinstance(error, FileNotFoundError):
            return ShardError(
                f"{name}: no such shard in {self.store.url}; fetch it again; {self._leave_out}"
            )
        try:
            size = self.store.size(name)
        except OSError:
            return error
        if size < stop:
            return ShardError(
                f"{name}: truncated: {size} bytes, its index needs {stop} or more; fetch it "
                f"again; {self._leave_out}"
            )
        return error

    @property
    def _leave_out(self) -> str:
        command = shlex.join(["mmstream", "verify", self.store.url, "--write-bad"])
        return f"new runs leave it out after `{command}`"

    def _read_bytes(self, shard: int, index: int) -> bytes:
        """Return the bytes of a sample. Those that do not fit their checksum are read again."""
        name = self.name_of(shard)
        bounds = self.bounds(shard, np.array([index]))
        start, stop = int(bounds.start[0]), int(bounds.stop[0])
        for _ in range(MAX_SAMPLE_READS):
            (data,) = self.read_ranges([(shard, start, stop)])
            if isinstance(data, OSError):
                raise self.explain(data, shard, stop) from data
            if bounds.checksum is None or sample_checksum(data) == bounds.checksum[0]:
                return data
            self.store.drop_cache(name, start, stop)
        raise self.checksum_error(shard, index)


def _replaced(error: ReplacedError) -> str:
    """Return since when a shard is another one. Of the manifest, only its size is known."""
    if error.known.version is None:
        return "is not the shard that was indexed"
    return "was replaced while this run read it"


class ShardLocation(NamedTuple):
    """Where a shard of a `ShardSource` lies."""

    source: str
    """Name of its source in a mixture; "" for a single dataset."""
    dataset: Dataset
    shard: int
    """Position in the manifest of `dataset`."""


class DatasetView(Sequence[Sample]):
    """A slice of a dataset: reads a sample when it is asked for."""

    def __init__(self, dataset: Dataset, rows: range) -> None:
        self.dataset, self._rows = dataset, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> DatasetView: ...
    @checked({"item": "give a position or a slice"}, late=True)
    def __getitem__(self, item: AnyInt | slice) -> Sample | DatasetView:
        """Return a sample, or a slice of these.

        Raises:
            IndexError: no such position.
        """
        if isinstance(item, slice):
            return DatasetView(self.dataset, self._rows[item])
        return self.dataset[self._rows[item]]

    def __iter__(self) -> Iterator[Sample]:
        return (self.dataset[row] for row in self._rows)

    def __repr__(self) -> str:
        return f"<{len(self):,} samples of {self.dataset!r}>"

    def _repr_html_(self) -> str:
        from mmstream.display.datasets import view_html

        return view_html(self)
