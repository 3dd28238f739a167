"""The values of a field become one tensor, where they have one shape and type.

collate.collate -> `join_values`, `stack_values`, `as_tensor`, `join_rows`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

TakeMemory: TypeAlias = Callable[[int], torch.Tensor]
"""Returns memory of so many bytes, uint8 [num_bytes]."""


def as_list(value: Any) -> Sequence[Any]:
    """Return the values of a field of a sample: none, one or several."""
    return value if isinstance(value, list | tuple) else () if value is None else (value,)


def join_values(values: Sequence[Any], are_rows: bool, take_memory: TakeMemory | None) -> Any:
    """Return the values of a field as one tensor, or as they are where they do not make one.

    Args:
        values: One of each sample.
        are_rows: Tensors may be rows of one buffer. They are joined without a copy.
        take_memory: As `collate` has it.
    """
    joined = _stack_arrays(values, take_memory)
    if joined is None and are_rows:
        joined = join_rows(values)
    return stack_values(list(map(as_tensor, values))) if joined is None else joined


def as_tensor(value: Any) -> Any:
    """Return an array as a tensor where torch has its type."""
    if not isinstance(value, np.ndarray):
        return value
    try:  # a plain copy, because torch refuses reversed views and warns about read-only arrays
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):
        return value


def stack_values(values: list[Any]) -> Any:
    """Return the values as one tensor, or as they are where they do not make one.

    Numbers keep their type, as torch's ``default_collate`` keeps it: floats are float64, whole
    numbers int64, and numpy scalars of one type have that.
    """
    kinds = set(map(type, values))
    if any(issubclass(kind, np.generic) for kind in kinds):
        numbers = as_tensor(np.array(values)) if len(kinds) == 1 else None
        if isinstance(numbers, torch.Tensor):
            return numbers
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
        kinds = set(map(type, values))
    if all(issubclass(kind, int | float) for kind in kinds):  # enumerations' numbers among them
        has_floats = any(issubclass(kind, float) for kind in kinds)
        try:
            joined = torch.tensor(values, dtype=torch.float64 if has_floats else None)
        except (RuntimeError, OverflowError, ValueError):  # an integer beyond 64 bits
            return values
        is_exact = len(kinds) == 1 or all(
            isinstance(number, float) or number == kept
            for number, kept in zip(values, joined.tolist(), strict=True)
        )  # whole numbers beyond 2^53 among floats are not
        return joined if is_exact else values
    if all(isinstance(value, torch.Tensor) for value in values) and (
        len({(value.shape, value.dtype, value.device) for value in values}) == 1
    ):
        return torch.stack(values)
    return values


def _stack_arrays(values: Sequence[Any], take_memory: TakeMemory | None) -> torch.Tensor | None:
    """Return arrays of one shape and type as one tensor, with one copy. None: they are not."""
    first = values[0]
    if not all(
        type(value) is np.ndarray and value.shape == first.shape and value.dtype == first.dtype
        for value in values
    ):
        return None
    try:
        empty = torch.from_numpy(np.empty(0, first.dtype))
    except (TypeError, ValueError):  # a type that torch does not have
        return None
    shape = (len(values), *first.shape)
    num_bytes = len(values) * first.nbytes
    if take_memory is None or not num_bytes:
        stacked = empty.new_empty(shape)
    else:
        stacked = take_memory(num_bytes).view(empty.dtype).view(shape)
    np.stack(values, out=stacked.numpy())
    return stacked


def join_rows(values: Sequence[Any]) -> torch.Tensor | None:
    """Return tensors of one shape that are rows of one buffer as one tensor, without a copy.

    None: they are something else.
    """
    first = values[0]
    if not isinstance(first, torch.Tensor) or not all(
        isinstance(value, torch.Tensor) and is_alike(value, first) for value in values
    ):
        return None
    num_bytes = first.numel() * first.element_size()
    start = first.data_ptr()
    memory = first.untyped_storage()
    # Decoders write into the rows of one buffer. Then row i starts i * num_bytes after the first.
    if start + num_bytes * len(values) > memory.data_ptr() + memory.nbytes() or any(
        value.data_ptr() != start + num_bytes * i or value.stride() != first.stride()
        for i, value in enumerate(values)
    ):
        return None
    shape, strides = (len(values), *first.shape), (first.numel(), *first.stride())
    return first.as_strided(shape, strides, first.storage_offset())


def is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape, type and device."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.device == second.device
    )
