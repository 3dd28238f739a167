"""Part of the loader: how a batch crosses from a worker to the main process.

torch sends each tensor as shared memory of its own, an open file on both sides and a connection
between them. A list of tensors (pictures of different sizes) would need hundreds a batch, where a
process may often have 1,024 open files, so such a list crosses as one tensor.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack_lists"]


class _Packed(list[torch.Tensor]):
    """Tensors of one type; on the other side, a plain list of views of one memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        layouts = [_layout(tensor) for tensor in self]
        flat = [
            tensor.permute(order).reshape(-1) for tensor, order in zip(self, layouts, strict=True)
        ]
        return _unpack, (torch.cat(flat), [tensor.shape for tensor in self], layouts)


def pack_lists(batch: Any) -> Any:
    """Return a batch whose lists of tensors cross in one piece and arrive as lists."""
    return {
        name: _Packed(value)
        if isinstance(value, list)
        and all(isinstance(item, torch.Tensor) and item.device.type == "cpu" for item in value)
        and len({item.dtype for item in value}) == 1
        else value
        for name, value in batch.items()
    }


def _layout(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of memory, so that pictures stay channels_last."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def _unpack(
    flat: torch.Tensor, shapes: list[torch.Size], layouts: list[list[int]]
) -> list[torch.Tensor]:
    found = []
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    for part, shape, order in zip(parts, shapes, layouts, strict=True):
        inverse = sorted(range(len(order)), key=order.__getitem__)
        found.append(part.view([shape[i] for i in order]).permute(inverse))
    return found
