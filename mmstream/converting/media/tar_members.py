"""Media that are members of a tar: which bytes of the tar they are.

    references -> TAR_MEMBERS -> a span of the tar

A tar has no directory: all its headers are read.
"""

from __future__ import annotations

from collections.abc import Hashable

from mmstream.converting.draft import RowError
from mmstream.converting.media.directories import Directories, ReadRange, plain_name
from mmstream.errors import ShardError
from mmstream.tar.samples import iter_members

__all__ = ["TarMembers"]

MAX_TAR_MEMBERS = 1 << 24
"""Most members of one tar."""

_SOUNDS = ("flac", "wav", "opus", "mp3", "ogg", "m4a", "sph")
"""Types of sounds that a tar of Shar may hold. Its rows do not say which."""

Spans = dict[str, tuple[int, int]]


class TarMembers:
    """The members of tars that were named last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._directories = Directories(_spans)

    def span(self, tar: Hashable, member: str, read: ReadRange, num_bytes: int) -> tuple[int, int]:
        """Return where in a tar the bytes of a member are: (start, stop).

        Args:
            tar: What identifies it: two tars have the same only if they are the same.
            member: Its name, with or without ``./`` before it. Where a tar has a name twice, the
                first one counts. ``NAME.*`` is the sound of this name, whatever its type.
            read: Returns bytes [start, stop) of the tar.
            num_bytes: Size of the tar.

        Raises:
            RowError: It is no plain tar, or it has no such file.
        """
        spans, name = self._directories.members(tar, read, num_bytes), plain_name(member)
        names = [name]
        if name.endswith(".*"):
            names += [f"{name[:-1]}{extension}" for extension in _SOUNDS]
        span = next((spans[name] for name in names if name in spans), None)
        if span is None:
            raise RowError("no such member of the tar")
        if span[0] == span[1]:
            raise RowError("empty file")
        return span


def _spans(read: ReadRange, num_bytes: int) -> Spans:
    spans: Spans = {}
    try:
        for member in iter_members(read, num_bytes):
            if member.is_file:
                data_stop = member.data_offset + member.size
                spans.setdefault(plain_name(member.name), (member.data_offset, data_stop))
            if len(spans) > MAX_TAR_MEMBERS:
                raise RowError(f"a tar of more than {MAX_TAR_MEMBERS:,} members")
    except ShardError as error:
        raise RowError(f"not a plain tar: {error}") from None
    return spans
