"""FLAC, MP3, Ogg Vorbis, and what else libsndfile reads faster than FFmpeg.

Place in the flow: `source.py` opens these formats here. libsndfile bundles libFLAC, mpg123 and
libvorbis. It trims what an MP3 encoder puts before and behind the samples, as FFmpeg does.

A span of an MP3 or an Ogg is reached by decoding up to it (0.2 to 0.4 ms a second). In MP3 a frame
takes bits from frames before it, so a seek would change the first samples. In a damaged Ogg a seek
of libsndfile 1.2.2 crashes the process.

mpg123 reads a few bytes at a time, so a file in memory is a `BytesIO`, which is fast. The deadline
is asked between blocks. A file that is read by ranges goes through `MediaSource`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.source import MediaSource
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia

_BLOCK_SAMPLES = 1 << 16
_SHOWN_REASON = 160


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """A file whose reads do not seek. Those of its base class seek to where they ended."""

    def seekable(self) -> bool:
        return False


@dataclass(frozen=True)
class SoundFileSource:
    """A file that libsndfile has opened; see `source.AudioSource`."""

    file: Any
    check: Callable[[], None]
    """Raises what ended the reading, such as the deadline."""
    is_sought: bool
    """Whether a span is reached by a seek."""
    sample_rate: int
    num_channels: int
    num_samples: int
    start_s: float = 0.0

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        position = self.file.seek(start) if self.is_sought and start else 0
        while position < stop:
            end = stop if position >= start else start
            last = min(end, position + _BLOCK_SAMPLES)
            memory = None
            if out is not None and position >= start:
                memory = out[position - start : last - start]
            block = self.file.read(last - position, "float32", always_2d=True, out=memory)
            self.check()
            if not len(block):
                return
            position += len(block)
            if position > start:
                yield block


@contextmanager
def open_sound_file(data: EncodedMedia, name: str, deadline: Deadline) -> Iterator[SoundFileSource]:
    """Open a file with libsndfile for the body of a with statement.

    Args:
        data: The file.
        name: Its format, by FFmpeg's name.
        deadline: When the time of the sample is over.

    Raises:
        DecodeError: libsndfile cannot read it, here or in the body.
        TimeoutError: The time of the sample is over.
    """
    source = io.BytesIO(data) if isinstance(data, bytes) else MediaSource(data, deadline)
    check = source.check if isinstance(source, MediaSource) else deadline.check
    try:
        with _Stream(source) as file:
            yield SoundFileSource(
                file=file,
                check=check,
                is_sought=name not in ("mp3", "ogg"),
                sample_rate=file.samplerate,
                num_channels=file.channels,
                num_samples=file.frames,
            )
    except soundfile.LibsndfileError as error:
        check()
        raise DecodeError(f"damaged {name}: {_reason(error)}") from None
    except BaseException:
        check()
        raise


def _reason(error: soundfile.LibsndfileError) -> str:
    text = str(error.error_string).removeprefix("Error : ")
    if "does not exist" in text:  # what libsndfile says where mpg123 cannot read the first frame
        return "no frame in it can be decoded"
    return text[:_SHOWN_REASON]
