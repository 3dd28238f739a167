"""All errors that mmstream raises on purpose. Every other module may import this one.

    MMStreamError
      ConfigError(ValueError)     the caller's mistake; nothing was changed or lost
      ManifestError               a manifest is missing, malformed, unfinished, or another dataset's
      StateError(ValueError)      a saved state does not fit this run exactly
      StorageError(OSError)       storage failed after all retries
      ShardError                  one shard is unreadable; a `BadSamplePolicy` can tolerate it
      SampleError                 one sample is unusable; a `BadSamplePolicy` handles it
        DecodeError               the bytes of a field cannot be decoded
          TimeoutError            decoding a field took too long
        LengthError               more tokens than were planned for its pack
        ChecksumError             the bytes are not those of its checksum
        SkipSample                a user's filter leaves the sample out; never counted as bad
          TakenDownError          it was taken down since its epoch was planned
      BadSampleLimitError         too many bad samples; always stops the run

All are names of this module, such as ``mm.errors.DecodeError``. What people catch or raise most is
also a name of the package: `MMStreamError`, `ConfigError`, `SampleError`, `StateError` and
`SkipSample`.

An absent file or object is Python's own FileNotFoundError.

Every class can be built from one string, because a DataLoader re-raises the errors of its workers
that way. Messages about data start with ``shard[index] key.field: `` (see `where`).

Data may come from strangers. So what a message shows of it goes through `escaped`, and so does
every message of these classes as a whole: it is one line, and a terminal shows it as it is.
"""

from __future__ import annotations

BUGS = (NameError, ImportError, AttributeError, AssertionError, MemoryError)
"""What a user's function raises because of its code, not its data. These errors stop the run."""

MAX_DATA_CHARACTERS = 200
"""Longest piece of data in a message."""

MAX_MESSAGE_CHARACTERS = 4000
"""Longest message of an error."""

MARK_CHARACTERS = 40
"""Room for what stands in place of characters that are left out."""


class MMStreamError(Exception):
    """Base class of all errors that mmstream raises on purpose.

    Examples:
        >>> try:
        ...     dataset = mm.open_dataset("no-such-folder")
        ... except (mm.MMStreamError, OSError) as error:
        ...     print("cannot open:", error)
        cannot open: ...no-such-folder: no such folder
    """

    def __str__(self) -> str:
        """Return the message in one line of printable text."""
        return escaped(super().__str__(), MAX_MESSAGE_CHARACTERS)


class ConfigError(MMStreamError, ValueError):
    """The caller's mistake.

    It lies in settings, arguments, files that the caller named, or functions that the caller passed
    in. Raised as early as it can be known; nothing was changed or lost. Correct the mistake and
    call again.
    """


class ManifestError(MMStreamError):
    """A manifest is missing, malformed, unfinished, or does not match its shards.

    The message names the file, and the command that completes an unfinished conversion.
    """


class StateError(MMStreamError, ValueError):
    """A saved state does not fit this run exactly, so training cannot resume from it.

    The message names each setting that differs, with its saved and its current value.
    """


class StorageError(MMStreamError, OSError):
    """Storage failed after all retries.

    A file or object that does not exist is a FileNotFoundError instead.
    """


class ShardError(MMStreamError):
    """One shard is unreadable: truncated, not a tar, replaced in mid-run, or its checksum is wrong.

    It stops a run, unless the `BadSamplePolicy` has ``shards=True``. Then all
    samples of the shard count as bad.

    Attributes:
        is_replaced: The shard is another one than before: to read it again would mix the two.
    """

    is_replaced = False


class SampleError(MMStreamError):
    """One sample is unusable.

    A `Pipeline` does not raise it but applies its `BadSamplePolicy`: by default another sample
    takes the row. A `Dataset` raises it when the sample is read by its index.

    Attributes:
        is_refused: The sample was refused when its dataset was baked. There is nothing to read.
    """

    is_refused = False


class DecodeError(SampleError):
    """The bytes of a field cannot be decoded as what the field's name says."""


class LengthError(SampleError):
    """A sample has more tokens than were measured, and its pack has no room for them.

    Its pack goes on without it. Measure and plan again: decoders, templates or draws have changed.
    """


class ChecksumError(SampleError):
    """The bytes of a sample are not those that its checksum was made of.

    They were read several times, past the caches of this machine, and never matched: the shard was
    changed or damaged after its checksums were written. ``mmstream verify`` checks all of it.
    """


class TimeoutError(DecodeError):
    """Decoding a field took longer than the time that the decoder gives to one sample."""


class SkipSample(SampleError):  # noqa: N818 - a request, not a failure; the name is public
    """A transform raises it to leave a sample out of training, for example to filter.

    Another sample of the same shuffle window takes the row. Skipped samples are counted apart from
    bad ones and never reach the limits of a `BadSamplePolicy`.

    Examples:
        >>> def only_long_captions(sample):
        ...     if len(sample["txt"]) < 20:
        ...         raise mm.SkipSample("caption too short")
        ...     return sample
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"), global_batch_size=32, transforms=(only_long_captions,)
        ... )
    """


class TakenDownError(SkipSample):
    """A sample was taken down. An epoch that was planned before shows another one in its row."""


class BadSampleLimitError(MMStreamError):
    """More samples are bad than the `BadSamplePolicy` allows.

    It is not a SampleError, so that no policy can tolerate it: it always stops the run.
    """


def escaped(text: object, limit: int | None = MAX_DATA_CHARACTERS) -> str:
    r"""Return text as one line that is safe to show, whoever wrote it.

    Characters that a terminal or a log would obey, or that cannot be encoded, become visible:
    control characters, line ends, text directions, lone surrogates. Printable text stays as it is,
    in any script. Escaped text does not change when it is escaped again.

    Args:
        text: A name, a key, a reason, or anything else that `str` accepts.
        limit: Most characters of the result. A longer text loses its middle. None: no limit.

    Examples:
        >>> escaped("cat\x1b[2J\n")
        'cat\\x1b[2J\\n'
        >>> escaped("abcdefghij" * 10, limit=60)
        'abcdefghijabcde[80 characters left out]fghij'
    """
    try:
        line = str(text)
    except Exception as error:  # a stranger's class may do anything
        line = f"{type(text).__name__} without a text ({type(error).__name__})"
    if not line.isprintable():
        line = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in line
        )
    if limit is None or len(line) <= limit:
        return line
    num_kept = max(0, limit - MARK_CHARACTERS)
    head, left_out = num_kept - num_kept // 4, len(line) - num_kept
    tail = line[head + left_out :]
    return f"{line[:head]}[{left_out:,} characters left out]{tail}"


def where(shard: str, index: int, key: str = "", field: str = "") -> str:
    """Return the address of a sample, with which every message about data starts.

    Names are escaped, because they come from the data.

    Examples:
        >>> where("shard-000000.tar", 3, "000000004", "jpg")
        'shard-000000.tar[3] 000000004.jpg'
    """
    name = ".".join(escaped(word) for word in (key, field) if word)
    return f"{escaped(shard)}[{index}] {name}".rstrip()
