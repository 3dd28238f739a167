"""The error tree: everything mmstream raises on purpose.

    MMStreamError
      ConfigError(ValueError)     the caller's mistake, raised before any IO
      ManifestError               missing, malformed, unfinished, or not matching its shards
      StateError(ValueError)      this state cannot be applied exactly: says saved and current value
      StorageError(OSError)       storage failed after retries (an absent object: FileNotFoundError)
      ShardError                  one shard unreadable (truncated, checksum); skippable by policy
      SampleError                 one sample unusable; skippable
        DecodeError               bytes that are not what their field says
        SkipSample                raised by a user's filter: substituted, outside the limits
      BadSampleLimitError         too many bad samples; not a SampleError, so it always stops a run

Every class can be built from one string, because DataLoader workers re-raise errors that way, and
every message about data reads ``shard[index] key.field: reason`` (see `where`).
"""

from __future__ import annotations

__all__ = [
    "BadSampleLimitError",
    "ConfigError",
    "DecodeError",
    "MMStreamError",
    "ManifestError",
    "SampleError",
    "ShardError",
    "SkipSample",
    "StateError",
    "StorageError",
    "where",
]


class MMStreamError(Exception):
    """Base of all errors that mmstream raises on purpose."""


class ConfigError(MMStreamError, ValueError):
    """The caller asked for something impossible; raised before any IO."""


class ManifestError(MMStreamError):
    """A manifest is missing, malformed, unfinished, or does not match its shards."""


class StateError(MMStreamError, ValueError):
    """A saved state cannot be applied exactly; names the saved and the current value."""


class StorageError(MMStreamError, OSError):
    """Storage failed after retries. An absent object is a FileNotFoundError instead."""


class ShardError(MMStreamError):
    """One shard is unreadable: truncated, not a tar, wrong checksum."""


class SampleError(MMStreamError):
    """One sample is unusable; its place in the batch is taken by a substitute."""


class DecodeError(SampleError):
    """The bytes of a field are not what the field's name says."""


class SkipSample(SampleError):  # noqa: N818 - a request, not a failure; the name is public
    """Raised by a user's filter to leave a sample out; counted apart from bad samples."""


class BadSampleLimitError(MMStreamError):
    """More samples are bad than the BadSamplePolicy allows."""


def where(shard: str, index: int, key: str = "", field: str = "") -> str:
    """Return ``shard[index] key.field``, the address that every message about data starts with."""
    name = ".".join(part for part in (key, field) if part)
    return f"{shard}[{index}] {name}".rstrip()
