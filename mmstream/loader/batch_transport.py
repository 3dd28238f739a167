"""How a batch crosses from a worker to the main process: in one piece.

torch sends every tensor in new shared memory of its own. That is an open file and a connection per
tensor, and pages that the system must make first. Here the tensors of a batch cross in the block in
which its images were decoded, the others behind them. The rest of the batch is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from mmstream.decoding.batch_memory import BatchMemory, MemoryBlock, attach
from mmstream.decoding.image.encoded import EncodedImages

__all__ = ["SentBatch"]

ALIGN_BYTES = 64


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


class SentBatch:
    """A batch on its way: made and pickled in a worker, it arrives as the batch.

    Args:
        batch: what a pipeline made. Tensors in its dicts, lists, tuples and encoded images cross in
            shared memory. Tensors in other objects cross as torch sends them.
        memory: the shared memory of the worker.
    """

    def __init__(self, batch: Any, memory: BatchMemory) -> None:
        self._blocks: list[MemoryBlock] = []
        self._locations: dict[int, _TensorLocation] = {}
        tensors: list[torch.Tensor] = []
        _map(batch, torch.Tensor, tensors.append)
        unshared = [
            tensor for tensor in tensors if _is_plain(tensor) and not self._locate(tensor, memory)
        ]
        if unshared:
            self._copy(unshared, memory)
        self._skeleton = _map(
            batch, torch.Tensor, lambda tensor: self._locations.get(id(tensor), tensor)
        )
        for block in self._blocks:
            block.mark_sent()

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [
            (DupFd(block.file), block.num_bytes) for block in self._blocks if block.file is not None
        ]
        return _open, (self._skeleton, sent)

    def _locate(self, tensor: torch.Tensor, memory: BatchMemory) -> bool:
        """Note where a tensor lies, if it can cross in that memory.

        A block has one receiver at a time. So a tensor of a block that an earlier batch still uses
        is copied, such as an image that a transform keeps for the next sample.
        """
        block = memory.block_of(tensor)
        if block is None or block.is_sent:
            return False
        start = int(tensor.storage_offset()) * tensor.element_size()
        self._note(tensor, block, start, tensor.stride())
        return True

    def _copy(self, tensors: list[torch.Tensor], memory: BatchMemory) -> None:
        """Copy tensors behind the images, or into a block of their own."""
        ends = [0]
        for tensor in tensors:
            ends.append(_aligned(ends[-1] + tensor.numel() * tensor.element_size()))
        # A quarter more than is needed now, as texts differ in length.
        memory.spare_bytes = max(memory.spare_bytes, ends[-1] + ends[-1] // 4 + ALIGN_BYTES)
        block = self._blocks[0] if self._blocks else None
        begin = 0 if block is None else _aligned(block.num_used)
        if block is None or begin + ends[-1] > block.num_bytes:
            begin = 0
            lease = memory.take(max(1, ends[-1]))
            block = memory.block_of(lease)
            assert block is not None
        data = block.lease()
        for tensor, start in zip(tensors, ends, strict=False):
            location = self._note(tensor, block, begin + start, _dense_stride(tensor))
            location.view(data).copy_(tensor)

    def _note(
        self, tensor: torch.Tensor, block: MemoryBlock, start: int, stride: tuple[int, ...]
    ) -> _TensorLocation:
        if block not in self._blocks:
            self._blocks.append(block)
        number = self._blocks.index(block)
        location = _TensorLocation(number, start, tensor.dtype, tuple(tensor.shape), stride)
        self._locations[id(tensor)] = location
        return location


def _open(skeleton: Any, sent: list[tuple[Any, int]]) -> Any:
    data = [attach(file.detach(), num_bytes) for file, num_bytes in sent]
    return _map(skeleton, _TensorLocation, lambda location: location.view(data[location.block]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
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


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all values of a type in nested dicts, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if type(value) is dict:
        return {name: _map(item, kind, function) for name, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_map(item, kind, function) for item in value)
    if isinstance(value, EncodedImages):
        return value.map(lambda item: _map(item, kind, function))
    return value
