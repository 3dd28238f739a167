"""Where in a sample a decoder failed: ``shard[index] key.field: `` before the reason.

Place in the flow: everything that decodes a field of a sample runs its decoder through
`with_address`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mmstream.errors import BUGS, DecodeError, SampleError, SkipSample, TimeoutError, where
from mmstream.types import Sample

T = TypeVar("T")

_KINDS = (TimeoutError, DecodeError, SkipSample, SampleError)


def with_address(sample: Sample, name: str, decode: Callable[[], T]) -> T:
    """Run one decoder. If it fails, put the field's address before the reason.

    Errors that stop a run stay as they are. A note below their traceback has the address.
    """
    try:
        return decode()
    except SampleError as error:
        raise addressed(sample, name, error) from error.__cause__  # a user's function has one
    except BUGS as error:
        error.add_note(f"while decoding {address(sample, name)}")
        raise


def addressed(sample: Sample, name: str, error: SampleError) -> SampleError:
    """Return an error with the field's address before the reason."""
    # A user's subclass may not take one string, so it becomes one of ours.
    kind = next(kind for kind in _KINDS if isinstance(error, kind))
    return kind(f"{address(sample, name)}: {error}")


def address(sample: Sample, name: str) -> str:
    """Return the address of a field, as far as it is known."""
    key = str(sample.get("__key__", ""))
    lineage = sample.get("__lineage__")
    if lineage is None:
        return ".".join(word for word in (key, name) if word)
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    if "__source__" in sample:
        shard = f"{sample['__source__']}/{shard}"
    return where(shard, lineage.index, key, name)
