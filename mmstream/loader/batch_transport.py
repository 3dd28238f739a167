"""Part of the loader: how a batch crosses from a worker to the main process, in one piece.

torch sends each tensor in new shared memory of its own: an open file and a connection a tensor,
where a process may often have 1,024 open files, and pages that the system must make first. Here the
tensors of a batch cross in the slot in which its pictures were decoded, the others behind them; the
rest of the batch is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from mmstream.decoding.image.encoded import EncodedImages
from mmstream.loader.batch_memory import Memory, Slot, attach

__all__ = ["Parcel"]

ALIGN_BYTES = 64


class _Place(NamedTuple):
    """Where a tensor lies; crosses in its place."""

    slot: int
    start: int
    """Its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor in its slot's data."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        span = 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize
        flat = data[self.start : self.start + span].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Parcel:
    """A batch on its way: packed and pickled in a worker, it arrives as the batch.

    Args:
        batch: what a pipeline made. Tensors in its dicts, lists, tuples and encoded pictures cross
            in shared memory, those in other objects as torch sends them.
        memory: the worker's, shared.
    """

    def __init__(self, batch: Any, memory: Memory) -> None:
        self._slots: list[Slot] = []
        self._places: dict[int, _Place] = {}
        tensors: list[torch.Tensor] = []
        _map(batch, torch.Tensor, tensors.append)
        others = [one for one in tensors if _is_plain(one) and not self._leave(one, memory)]
        if others:
            self._copy(others, memory)
        self._skeleton = _map(batch, torch.Tensor, lambda one: self._places.get(id(one), one))
        for slot in self._slots:
            slot.mark_sent()

    def __reduce__(self) -> tuple[Any, ...]:
        sent = [(DupFd(slot.file), slot.num_bytes) for slot in self._slots if slot.file is not None]
        return _open, (self._skeleton, sent)

    def _leave(self, tensor: torch.Tensor, memory: Memory) -> bool:
        """Note where a tensor lies, if that is in shared memory already."""
        slot = memory.slot_of(tensor)
        if slot is not None:
            start = int(tensor.storage_offset()) * tensor.element_size()
            self._note(tensor, slot, start, tensor.stride())
        return slot is not None

    def _copy(self, tensors: list[torch.Tensor], memory: Memory) -> None:
        """Copy tensors behind the pictures, or to a slot of their own."""
        ends = [0]
        for tensor in tensors:
            ends.append(_aligned(ends[-1] + tensor.numel() * tensor.element_size()))
        # Some more than is needed now, as texts differ in length.
        memory.room = max(memory.room, ends[-1] + ends[-1] // 4 + ALIGN_BYTES)
        begin = 0
        slot = self._slots[0] if self._slots else None
        if slot is not None:
            begin = _aligned(slot.num_used)
        if slot is None or begin + ends[-1] > slot.num_bytes:
            begin, lease = 0, memory.take(max(1, ends[-1]))
            slot = memory.slot_of(lease)
            assert slot is not None
        data = slot.lease()
        for tensor, start in zip(tensors, ends, strict=False):
            place = self._note(tensor, slot, begin + start, _dense_stride(tensor))
            place.view(data).copy_(tensor)

    def _note(
        self, tensor: torch.Tensor, slot: Slot, start: int, stride: tuple[int, ...]
    ) -> _Place:
        if slot not in self._slots:
            self._slots.append(slot)
        number = self._slots.index(slot)
        place = _Place(number, start, tensor.dtype, tuple(tensor.shape), stride)
        self._places[id(tensor)] = place
        return place


def _open(skeleton: Any, sent: list[tuple[Any, int]]) -> Any:
    data = [attach(file.detach(), num_bytes) for file, num_bytes in sent]
    return _map(skeleton, _Place, lambda place: place.view(data[place.slot]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy without gaps, its dimensions in the same order of memory."""
    strides, size = [0] * tensor.ndim, 1
    for axis in sorted(range(tensor.ndim), key=lambda i: (tensor.stride(i), -i)):
        strides[axis], size = size, size * max(1, tensor.shape[axis])
    return tuple(strides)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all of a kind in nested dicts, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if type(value) is dict:
        return {name: _map(item, kind, function) for name, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_map(item, kind, function) for item in value)
    if isinstance(value, EncodedImages):
        return value.map(lambda item: _map(item, kind, function))
    return value
