"""The shards of one dataset: their bytes, and the raw samples in them.

`Dataset` is what users hold; the stages read through its `ShardReader`. Where samples lie is read
when their shard is first used, and what their checksums are with it. Bytes that do not fit their
checksum are read again, past all caches.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from mmstream.dataset.index import SampleBounds, sample_checksum, walk_tar
from mmstream.dataset.manifest import Manifest
from mmstream.dataset.shard_indexes import RANGE_BYTES, ShardIndexes
from mmstream.errors import ChecksumError, SampleError, ShardError, escaped, where
from mmstream.storage import (
    NotAFileError,
    ObjectStat,
    ReplacedError,
    Store,
    require_known,
)
from mmstream.storage.store import CHANGING
from mmstream.tar.samples import LinkError, links_of, parse_sample, sample_of
from mmstream.types import IntArray, Sample, SampleLineage, SampleRef

logger = logging.getLogger(__name__)

MAX_SAMPLE_READS = 8
"""Reads of a sample whose bytes differ each time, or that comes as no sample each time."""

BLOCK_BYTES = 32 << 20
"""Bytes of a shard that `ShardReader.samples` reads together."""


class ShardReader:
    """Reads the shards of one dataset. It pickles small: without connections and indexes.

    Attributes:
        manifest: names the shards.
        store: where the tars lie.
        indexes: where the samples of each shard lie.
        has_checksums: whether bytes that are read are compared with their checksums.
        known: size and version of the shards as they were when the dataset was opened, or first
            read in this process, by name.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        indexes: ShardIndexes,
        stats: Mapping[str, ObjectStat] | None = None,
    ) -> None:
        self.manifest, self.store, self.indexes = manifest, store, indexes
        self.has_checksums = indexes.has_checksums
        names = (shard.name for shard in manifest.shards)
        self.known = {name: stats[name] for name in names if name in stats} if stats else {}
        self._expect_sizes()
        self._accepted = set[str]()  # replaced shards that are read nevertheless
        self._links: dict[int, dict[int, tuple[int, int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        versioned = {name: stat for name, stat in self.known.items() if stat.version is not None}
        return self.__dict__ | {"_links": {}, "known": versioned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._expect_sizes()

    def _expect_sizes(self) -> None:
        """Expect remote shards with the sizes of the manifest. Their first responses say more."""
        if self.store.access.concurrent:
            sizes = {info.name: ObjectStat(info.num_bytes, None) for info in self.manifest.shards}
            self.known = sizes | self.known

    @cached_property
    def counts(self) -> IntArray:
        """Samples of each shard, int64 [num_shards]."""
        return np.array([shard.num_samples for shard in self.manifest.shards], dtype=np.int64)

    def name_of(self, shard: int) -> str:
        """Return a shard's name, relative to the root of the dataset."""
        return self.manifest.shards[shard].name

    def url_of(self, shard: int) -> str:
        """Return a shard's URL."""
        return self.store.url_of(self.name_of(shard))

    # -- where samples lie -------------------------------------------------------------------------

    def offsets(self, shard: int) -> IntArray:
        """Return a shard's index: int64 [num_samples + 1], byte offsets of its samples.

        Raises:
            ShardError: no index, a damaged one, or one that does not fit the manifest or the
                checksums.
            StorageError: storage failed after retries.
        """
        return self.indexes.columns(shard).offsets()

    def bounds(
        self, shard: int, index: IntArray, count_wrong: Callable[[int], None] = lambda _: None
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
            >>> bounds = dataset.shards.bounds(0, np.array([1, 0]))
            >>> bool(bounds.stop[1] == bounds.start[0])  # sample 1 begins where sample 0 ends
            True
        """
        return self.indexes.columns(shard, count_wrong).bounds(index)

    def forget_index(self, shard: int) -> None:
        """Read a shard's index again at its next use."""
        self.indexes.forget(shard)
        self._links.pop(shard, None)

    # -- raw samples -------------------------------------------------------------------------------

    def read(self, shard: int, index: int) -> Sample:
        """Return one raw sample; raises what `dataset[i]` raises."""
        (data,) = self.read_bytes([(shard, index)])
        return self.parse(data, shard, index)

    def read_bytes(self, refs: Sequence[SampleRef]) -> list[bytes]:
        """Return the bytes of samples in their tars, with headers and padding.

        Their ranges are read side by side. Those that do not fit their checksum are read again, and
        once those that failed beside others.

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
        samples: dict[int, bytes] = {}
        missing = list(range(len(refs)))
        is_retried = len(refs) == 1
        for _ in range(MAX_SAMPLE_READS):
            responses = self.read_ranges([ranges[number] for number in missing])
            for number, data in zip(missing, responses, strict=True):
                shard, start, stop = ranges[number]
                if isinstance(data, OSError):
                    if is_retried:
                        raise self.explain(data, shard, stop) from data
                    continue
                checksum = bounds[number].checksum
                if checksum is None or sample_checksum(data) == checksum[0]:
                    samples[number] = data
                else:
                    self.store.drop_cache(self.name_of(shard), start, stop)
            is_retried = True
            missing = [number for number in missing if number not in samples]
            if not missing:
                return [samples[number] for number in range(len(refs))]
        raise self.checksum_error(*refs[missing[0]])

    def samples(self, shard: int, indexes: IntArray) -> Iterator[Sample | SampleError]:
        """Yield samples of a shard from front to back. A damaged one is its SampleError.

        A block of samples is in memory: 32 MiB, or one larger sample.

        Args:
            shard: position of the shard in the manifest.
            indexes: int64 [n], which of its samples, ascending. Others are not read.

        Raises:
            ShardError: the shard is absent, cut, or was replaced.
            StorageError: storage failed after retries.
        """
        bounds = self.bounds(shard, indexes)
        offsets, start = np.append(0, np.cumsum(bounds.stop - bounds.start)), 0
        while start < len(indexes):
            in_block = np.searchsorted(offsets, offsets[start] + BLOCK_BYTES, side="right") - 1
            stop = max(int(in_block), start + 1)
            base = int(offsets[start])
            data = self._read_block(shard, bounds.start[start:stop], bounds.stop[start:stop])
            for number, index in enumerate(indexes[start:stop].tolist(), start):
                sample_bytes = data[int(offsets[number]) - base : int(offsets[number + 1]) - base]
                checksum = None if bounds.checksum is None else bounds.checksum[number]
                try:
                    if checksum is not None and sample_checksum(sample_bytes) != checksum:
                        yield self.read(shard, index)  # again, past what this machine holds
                    else:
                        yield self.parse(sample_bytes, shard, index)
                except SampleError as error:
                    yield error
            start = stop

    def _read_block(self, shard: int, starts: IntArray, stops: IntArray) -> memoryview:
        """Return the bytes of samples of a shard, one after the other."""
        firsts = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
        ends = np.append(stops[firsts[1:] - 1], stops[-1])
        ranges = [
            (shard, at, min(stop, at + RANGE_BYTES))
            for start, stop in zip(starts[firsts].tolist(), ends.tolist(), strict=True)
            for at in range(start, stop, RANGE_BYTES)
        ]
        pieces = []
        for (_, _, stop), piece in zip(ranges, self.read_ranges(ranges), strict=True):
            if isinstance(piece, OSError):
                raise self.explain(piece, shard, stop) from piece
            pieces.append(piece)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def parse(
        self,
        data: bytes | memoryview,
        shard: int,
        index: int,
        *,
        is_viewed: Callable[[str], bool] | None = None,
    ) -> Sample:
        """Return the sample in a byte range of a shard; `is_viewed` as for `parse_sample`.

        Raises:
            SampleError: the bytes are not a sample; names its address.
        """
        linked = partial(self.linked, shard, index)
        make = partial(parse_sample, data, is_viewed=is_viewed, linked=linked)
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
            SampleError: the files are not a sample; names its address.
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
        (data,) = self.read_bytes([(shard, owner)])
        return data[start - int(offsets[owner]) : stop - int(offsets[owner])]

    # -- bytes -------------------------------------------------------------------------------------

    def read_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """Return the bytes of each (shard, start, stop), or in its place the error that it met.

        A shard that is not the one that was opened gives a `ReplacedError`. With checksums it is
        read nevertheless, with a warning: they decide about each sample.
        """
        named_ranges = [(self.name_of(shard), start, stop) for shard, start, stop in ranges]
        responses = self.store.read_ranges(named_ranges, self.known)
        replaced = [
            number
            for number, response in enumerate(responses)
            if self.has_checksums and isinstance(response, ReplacedError)
        ]
        for number in replaced:
            self.accept(named_ranges[number][0], cast(ReplacedError, responses[number]))
        if replaced:
            responses_again = self.store.read_ranges([named_ranges[number] for number in replaced])
            for number, response in zip(replaced, responses_again, strict=True):
                responses[number] = response
        return responses

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
        responses = self.store.read_ranges(named_ranges, self.known)
        for response, (_, stop) in zip(responses, ranges, strict=True):
            if isinstance(response, OSError):
                raise self.explain(response, shard, stop) from response
        return cast(list[bytes], responses)

    def checksum_error(self, shard: int, index: int) -> ChecksumError:
        """Return the error of a sample whose bytes are not those of its checksum."""
        return ChecksumError(f"{where(self.name_of(shard), index)} bytes unlike their checksum")

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

    # -- shards that change ------------------------------------------------------------------------

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


def _replaced(error: ReplacedError) -> str:
    """Return since when a shard is another one. Of the manifest, only its size is known."""
    if error.expected.version is None:
        return "is not the shard that was indexed"
    return "was replaced while this run read it"
