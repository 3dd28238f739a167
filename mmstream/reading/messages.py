"""What a reader process and the other processes of its rank say to each other.

There are two kinds of connections. Through the *control* connection, the main process says what to
read. It is a pickled value a message. Through a *step* connection, a worker (or the main process,
where there are no workers) asks for a step and gets it. Its messages are short, and the bytes cross
in a block of shared memory that belongs to the connection: the samples of the step one after the
other, then a pickled header. A worker is done with them before it asks again, so one block serves
for all steps. A step that needs a larger block brings a new one with it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmstream.dataset.source import ShardSource
from mmstream.errors import MMStreamError, SampleError, ShardError
from mmstream.order import AnyOrder
from mmstream.reading.cached_seats import CacheLocation
from mmstream.reading.large_samples import LargeSample
from mmstream.reading.packed_rows import PackedRows
from mmstream.reading.range_cache import NodeCacheSettings
from mmstream.storage.transfer_counts import TransferCounts
from mmstream.types import IntArray

__all__ = [
    "BLOCK_FD",
    "MAX_SEATS",
    "ReaderEnded",
    "ReaderSetup",
    "StepBlock",
    "StepConnection",
    "StepHeader",
    "StepRequest",
    "Verdict",
]

ROUND_BYTES = 1 << 20
"""Sizes of blocks are multiples of this."""

BLOCK_FD = 1
"""Descriptors that come with the answer that has a new block."""


MAX_SEATS = 1024
"""Samples that one message asks for again, at most."""

MAX_MESSAGE_BYTES = 8 * (3 + MAX_SEATS)


class ReaderEnded(MMStreamError):  # noqa: N818 - seen by the loader only, which knows why
    """The reader process is gone. The loader says how it ended."""


class Verdict(IntEnum):
    """What an answer says."""

    STEP = 0
    """The step is in the block."""
    ERROR = 1
    """An exception is in the block."""
    DROPPED = 2
    """The step belongs to an iteration that is over."""


class ReaderSetup(NamedTuple):
    """What a reader process is told first."""

    source: ShardSource
    order: AnyOrder
    least_large_bytes: int | None = None
    """Of samples of this size, the first bytes are read. None: all are read whole."""
    node_cache: NodeCacheSettings | None = None
    """Where samples of earlier epochs are. None: all come from storage."""


class StepRequest(NamedTuple):
    """Asks for the samples of a step, or again for some of those of the step before."""

    iteration: int
    """Counts the iterations of a loader."""
    epoch: int
    step: int
    seats: tuple[int, ...] = ()
    """Samples of this connection's latest step whose cached bytes were not right. Empty: a step is
    asked for."""

    def packed(self) -> bytes:
        """Return the message."""
        numbers = *self[:3], *self.seats
        return struct.pack(f"={len(numbers)}q", *numbers)

    @classmethod
    def unpacked(cls, message: bytes) -> StepRequest:
        """Return the request of a message."""
        iteration, epoch, step, *seats = struct.unpack(f"={len(message) // 8}q", message)
        return cls(iteration, epoch, step, tuple(seats))


class Answer(NamedTuple):
    """Says what is in the block."""

    verdict: Verdict
    num_bytes: int
    """Bytes of all samples; the header begins there."""
    num_header_bytes: int
    block_bytes: int
    """Size of the block, if a new one comes with this message; else 0."""

    def packed(self) -> bytes:
        """Return the message."""
        return struct.pack("=4q", *self)

    @classmethod
    def unpacked(cls, message: bytes) -> Answer:
        """Return the answer of a message."""
        verdict, *sizes = struct.unpack("=4q", message)
        return cls(Verdict(verdict), *sizes)


@dataclass(frozen=True)
class StepHeader:
    """What goes with the bytes of a step. Arrays have one entry per sample, row by row.

    Where samples were asked for again, they are a step of their own, without rows.
    """

    shard: IntArray
    index: IntArray
    valid: npt.NDArray[np.bool_]
    """Of each row."""
    ends: IntArray
    """Sample i is bytes [ends[i - 1], ends[i]) of the block; empty where there is an error."""
    errors: dict[int, ShardError | SampleError]
    """By seat."""
    large: dict[int, LargeSample]
    """By seat: the samples of which the block has the first bytes only."""
    counts: TransferCounts
    num_wrong_reads: int
    packed: PackedRows | None = None
    """How samples make rows, where rows are packs. None: seats are rows."""
    cached: Mapping[int, CacheLocation] = field(default_factory=dict)
    """By seat: the samples that are not in the block. Whoever asked reads them from the node
    cache."""


class StepBlock:
    """The reader's side of the block of a connection."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._file = -1
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> tuple[memoryview, int | None]:
        """Return the block with room for so many bytes, and the descriptor of a new one.

        The descriptor belongs to the block.
        """
        if self._map is not None and num_bytes <= self.num_bytes:
            return memoryview(self._map), None
        self.close()
        # A quarter more than is needed now, as steps differ in size.
        self.num_bytes = -(-(num_bytes + num_bytes // 4) // ROUND_BYTES) * ROUND_BYTES
        self._file = os.memfd_create("mmstream-step", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.num_bytes)
        self._map = mmap.mmap(self._file, self.num_bytes)
        return memoryview(self._map), self._file

    def close(self) -> None:
        """Give the memory back."""
        if self._map is not None:
            self._map.close()
            os.close(self._file)
            self._map = None


class StepConnection:
    """The side of a connection that asks for steps. One process uses it, from its first step on.

    It can be sent to that process before.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._block: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StepConnection, (self._socket,)

    def ask(self, request: StepRequest) -> tuple[StepHeader, memoryview]:
        """Return a step: its header and the bytes of its samples, which hold until the next call.

        Raises:
            ReaderEnded: there is no reader process any more.
            MMStreamError: the step belongs to an iteration that is over.
            StorageError: storage failed for good.
        """
        try:
            self._socket.sendall(request.packed())
            message, files, _, _ = socket.recv_fds(self._socket, 256, BLOCK_FD)
        except OSError:
            message, files = b"", []
        if not message:
            raise ReaderEnded("the reader process has ended")
        answer = Answer.unpacked(message)
        if files:
            self._attach(files[0], answer.block_bytes)
        if answer.verdict is Verdict.DROPPED:
            raise MMStreamError("this step belongs to an iteration that is over")
        assert self._block is not None
        view = memoryview(self._block)
        value: Any = pickle.loads(view[answer.num_bytes :][: answer.num_header_bytes])
        if answer.verdict is Verdict.ERROR:
            raise value
        return value, view[: answer.num_bytes]

    def _attach(self, file: int, num_bytes: int) -> None:
        try:
            self._block = mmap.mmap(file, num_bytes)  # views may hold on to the old one
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        self._block = None
