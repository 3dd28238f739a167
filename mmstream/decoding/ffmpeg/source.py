"""The bytes of a file, as the file object that FFmpeg reads.

FFmpeg takes an error of a read for the end of the file, at times, and goes on with what it has. So
no read raises: after an error, and after the deadline, it returns nothing, which ends FFmpeg's
work. `MediaSource.check` then raises what happened. A cut connection is never taken for a short
video.
"""

from __future__ import annotations

import io

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.lazy_bytes import LazyBytes
from mmstream.media_types import EncodedMedia, read_range

_INVALID_ARGUMENT = -22


class MediaSource:
    """A seekable file object over a file's bytes, read only.

    Args:
        data: The file.
        deadline: After it, reads return nothing.
    """

    def __init__(self, data: EncodedMedia, deadline: Deadline) -> None:
        self._data = data
        self._size = len(data)
        self._deadline = deadline
        self._position = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what ended the reading.

        Raises:
            TimeoutError: The deadline is over.
            BaseException: What reading a range raised, such as a StorageError.
        """
        if self._error is not None:
            raise self._error
        self._deadline.check()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes at most. Nothing at the end, and after an error."""
        if self._error is not None or self._deadline.is_over or self._position >= self._size:
            return b""
        stop = self._size if size < 0 else min(self._position + size, self._size)
        try:
            if isinstance(self._data, LazyBytes):  # no further than what it has at hand
                piece = self._data.read_some(self._position, stop)
            else:
                piece = bytes(read_range(self._data, self._position, stop))
        except BaseException as error:  # a signal's too: FFmpeg's callback would swallow it
            self._error = error
            return b""
        # FFmpeg's buffer holds `size` bytes, and a longer piece would overrun it.
        piece = piece[: stop - self._position]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it. Below zero: FFmpeg's number for a wrong argument."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}.get(whence)
        if start is None or start + offset < 0:
            return _INVALID_ARGUMENT
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position
