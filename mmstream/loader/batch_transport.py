"""How a batch crosses from a worker to the main process: in one piece.

torch sends every tensor in new shared memory of its own. That is an open file and a connection per
tensor, and pages that the system must make first. Bytes go through a pipe, 64 KiB at a time. Here
the tensors and the long bytes of a batch cross in the block in which its images were decoded, the
others after them. The rest of the batch is pickled.

A worker uses a few blocks in turn. The main process maps each of them once.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from io import BytesIO
from itertools import count
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch

from mmstream.decoding.batch_memory import AttachedBlock, BatchMemory, MemoryBlock

ALIGN_BYTES = 64

MIN_BYTES = 1024
"""Shorter bytes are pickled with the rest."""


class _TensorLocation(NamedTuple):
    """Where a tensor lies in the blocks of a batch; it crosses instead of the tensor."""

    block: int
    start: int
    """Its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the data of its block."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        span = 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize
        flat = data[self.start : self.start + span].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


_BytesLocation: TypeAlias = tuple[int, int, int]
"""Block, first byte and the byte after the last one. A NamedTuple takes ten times as long to cross:
1.6 us a sample."""


class _SentBlock(NamedTuple):
    """A block on its way."""

    number: int
    num_bytes: int
    file: Any
    """A DupFd; None where the receiver has the block since a batch before."""


class BatchReceiver:
    """The main process' side: it holds the blocks of a group of workers.

    Attributes:
        number: the workers' batches say by it to whom they go.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._blocks: dict[int, dict[int, AttachedBlock]] = {}  # by pid, then by number
        _receivers[self.number] = self

    def attach(
        self, pid: int, sent: Sequence[_SentBlock], kept: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the data of the blocks of a batch.

        Args:
            pid: process id of the worker.
            sent: the blocks of the batch.
            kept: numbers of all blocks that the worker still has; others are dropped here too.
        """
        blocks = self._blocks.setdefault(pid, {})
        for number, num_bytes, file in sent:
            if file is not None:
                blocks[number] = AttachedBlock(file.detach(), num_bytes)
        for number in blocks.keys() - set(kept):
            del blocks[number]
        return [blocks[number].lease() for number, _, _ in sent]


_numbers = count()
_receivers: WeakValueDictionary[int, BatchReceiver] = WeakValueDictionary()
"""By number. Batches are unpickled deep inside torch, in one of its threads where memory is pinned;
nothing can be handed to them there."""


class SentBatch:
    """A batch on its way: made and pickled in a worker, it arrives as the batch.

    Args:
        batch: what a pipeline made. Tensors of it cross in shared memory, and so do long bytes.
            Bytes arrive as bytes, and so do views of bytes.
        memory: the shared memory of the worker. All its batches go to one receiver.
        receiver: number of the `BatchReceiver`.
    """

    def __init__(self, batch: Any, memory: BatchMemory, receiver: int) -> None:
        self._receiver = receiver
        self._blocks: list[MemoryBlock] = []
        file = BytesIO()
        pickler = BatchPickler(file)
        pickler.dump(batch)
        self._pickled = file.getvalue()
        self._locations: list[_TensorLocation | _BytesLocation | None] = [
            self._locate(value, memory) if isinstance(value, torch.Tensor) else None
            for value in pickler.shared
        ]
        unshared = [n for n, location in enumerate(self._locations) if location is None]
        if unshared:
            copies = self._copy([pickler.shared[n] for n in unshared], memory)
            for number, location in zip(unshared, copies, strict=True):
                self._locations[number] = location
        self._new_files = [None if block.is_attached else block.file for block in self._blocks]
        self._kept = memory.numbers
        for block in self._blocks:
            block.mark_sent()
            block.is_attached = True

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [
            _SentBlock(block.number, block.num_bytes, None if file is None else DupFd(file))
            for block, file in zip(self._blocks, self._new_files, strict=True)
        ]
        blocks = os.getpid(), sent, self._kept
        return _open, (self._receiver, self._pickled, self._locations, blocks)

    def _locate(self, tensor: torch.Tensor, memory: BatchMemory) -> _TensorLocation | None:
        """Return where a tensor lies, if it can cross in that memory.

        A block has one receiver at a time. So a tensor of a block that an earlier batch still uses
        is copied, such as an image that a transform keeps for the next sample.
        """
        block = memory.block_of(tensor)
        if block is None or block.is_sent:
            return None
        start = int(tensor.storage_offset()) * tensor.element_size()
        return _TensorLocation(
            self._number(block), start, tensor.dtype, tuple(tensor.shape), tensor.stride()
        )

    def _copy(
        self, values: Sequence[torch.Tensor | bytes | memoryview], memory: BatchMemory
    ) -> list[_TensorLocation | _BytesLocation]:
        """Copy tensors and bytes after the images, or into a block of their own."""
        ends = ends_of(values)
        # A quarter more than is needed now, as texts differ in length.
        memory.spare_bytes = max(memory.spare_bytes, ends[-1] + ends[-1] // 4 + ALIGN_BYTES)
        block = self._blocks[0] if self._blocks else None
        begin = 0 if block is None else _aligned(block.num_used)
        if block is None or begin + ends[-1] > block.num_bytes:
            begin = 0
            lease = memory.take(max(1, ends[-1]))
            block = memory.block_of(lease)
            assert block is not None
        starts = [begin + end for end in ends]
        return copied_into(block.lease(), values, starts, self._number(block))

    def _number(self, block: MemoryBlock) -> int:
        """Return the number of a block among those of this batch."""
        if block not in self._blocks:
            self._blocks.append(block)
        return self._blocks.index(block)


class BatchPickler(ForkingPickler):
    """Pickles a batch with numbers in the place of tensors and long bytes, and gathers these."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[torch.Tensor | bytes | memoryview] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a value that crosses in shared memory; called for all values."""
        kind = type(value)
        if kind is bytes:
            if len(value) < MIN_BYTES:
                return None
        elif kind is memoryview:
            if value.ndim != 1 or value.format != "B":
                return None
        elif kind is not torch.Tensor or not _is_plain(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.shared))
        if number == len(self.shared):
            self.shared.append(value)
        return number


class BatchUnpickler(pickle.Unpickler):
    """Loads a batch, with values in the place of numbers."""

    def __init__(self, pickled: bytes, values: Sequence[torch.Tensor | bytes]) -> None:
        super().__init__(BytesIO(pickled))
        self._values = values

    def persistent_load(self, number: int) -> torch.Tensor | bytes:
        """Return the value of a number."""
        return self._values[number]


def _open(
    receiver: int,
    pickled: bytes,
    locations: Sequence[_TensorLocation | _BytesLocation],
    blocks: tuple[int, Sequence[_SentBlock], Sequence[int]],
) -> Any:
    data = _receivers[receiver].attach(*blocks)
    return BatchUnpickler(pickled, values_at(locations, data)).load()


def ends_of(values: Sequence[torch.Tensor | bytes | memoryview]) -> list[int]:
    """Return where values end that lie one after the other, from 0 on: [0, 64, 128]."""
    ends = [0]
    for value in values:
        ends.append(_aligned(ends[-1] + _num_bytes(value)))
    return ends


def copied_into(
    data: torch.Tensor,
    values: Sequence[torch.Tensor | bytes | memoryview],
    starts: Sequence[int],
    block: int = 0,
) -> list[_TensorLocation | _BytesLocation]:
    """Copy tensors and bytes into the data of a block, and return where they lie."""
    view = data.numpy().data
    locations: list[_TensorLocation | _BytesLocation] = []
    for value, start in zip(values, starts, strict=False):
        if not isinstance(value, torch.Tensor):
            stop = start + len(value)
            view[start:stop] = value
            locations.append((block, start, stop))
        else:
            location = _TensorLocation(
                block, start, value.dtype, tuple(value.shape), _dense_stride(value)
            )
            location.view(data).copy_(value)
            locations.append(location)
    return locations


def values_at(
    locations: Sequence[_TensorLocation | _BytesLocation], data: Sequence[torch.Tensor]
) -> list[torch.Tensor | bytes]:
    """Return the values that lie in the data of blocks. Tensors are views, bytes are copies."""
    views = [tensor.numpy().data for tensor in data]

    def value(location: _TensorLocation | _BytesLocation) -> torch.Tensor | bytes:
        if isinstance(location, _TensorLocation):
            return location.view(data[location.block])
        block, start, stop = location
        return bytes(views[block][start:stop])

    return [value(location) for location in locations]


def _num_bytes(value: torch.Tensor | bytes | memoryview) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else len(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps, with dimensions in the same order of memory.

    Example: shape (2, 3, 4, 5), channels_last strides (60, 1, 15, 3): the result is the same.
    """
    strides, size = [0] * tensor.ndim, 1
    for axis in sorted(range(tensor.ndim), key=lambda i: (tensor.stride(i), -i)):
        strides[axis], size = size, size * max(1, tensor.shape[axis])
    return tuple(strides)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
