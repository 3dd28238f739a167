"""The samples of a WAV file that are stored as plain numbers: PCM and floating point.

Place in the flow: `source.py` tries this first for a WAV. The numbers are read where they stand, so
a span costs the bytes of the span. Compressed samples (ADPCM, mu-law) are left to libsndfile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.audio.limits import TOLERANCE_S
from mmstream.errors import DecodeError
from mmstream.media_types import EncodedMedia, read_range

_PCM = 1
_FLOAT = 3
_EXTENSIBLE = 0xFFFE
_MAX_CHUNKS = 1000
"""Most chunks of a file that are looked at."""
_UNKNOWN_SIZE = 0x7FFF_0000
"""A pipe does not know its size when it writes the header: programs write such a number or more."""
_BLOCK_VALUES = 1 << 18


@dataclass(frozen=True)
class WavSource:
    """Numbers in a file; see `source.AudioSource`."""

    data: EncodedMedia
    sample_rate: int
    num_channels: int
    num_samples: int
    codec: int
    """1: integers. 3: floating point."""
    sample_bytes: int
    """Bytes of one number."""
    position: int
    """Where in the file the first number stands."""
    start_s: float = 0.0

    def blocks(
        self, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the samples from `start` to before `stop`; see `source.AudioSource`."""
        frame_bytes = self.num_channels * self.sample_bytes
        step = max(1, _BLOCK_VALUES // self.num_channels)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            raw = read_range(
                self.data, self.position + first * frame_bytes, self.position + last * frame_bytes
            )
            num_read = len(raw) // frame_bytes
            if out is None:
                block = np.empty((num_read, self.num_channels), np.float32)
            else:
                block = out[first - start : first - start + num_read]
            self._write_floats(raw[: num_read * frame_bytes], block.reshape(-1))
            yield block

    def _write_floats(self, raw: bytes, out: NDArray[np.float32]) -> None:
        """Write the numbers as float32; integers are scaled to -1 to 1."""
        scale = 2.0 ** (1 - 8 * self.sample_bytes)
        if self.codec == _FLOAT:
            out[:] = np.frombuffer(raw, f"<f{self.sample_bytes}")
        elif self.sample_bytes == 1:  # the only integers without a sign
            np.subtract(np.frombuffer(raw, np.uint8), 128.0, out=out, dtype=np.float32)
            out *= np.float32(scale)
        elif self.sample_bytes == 3:
            wide = np.zeros((len(raw) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            np.multiply(wide.view("<i4")[:, 0], scale / 256, out=out, dtype=np.float32)
        else:
            integers = np.frombuffer(raw, f"<i{self.sample_bytes}")
            np.multiply(integers, scale, out=out, dtype=np.float32)


def open_wav(data: EncodedMedia) -> WavSource | None:
    """Read the header of a WAV.

    Returns:
        The file. None where its samples are compressed, or the header is odd.

    Raises:
        DecodeError: More than 0.1 s of samples that the header promises are missing.
    """
    codec = sample_rate = num_channels = frame_bytes = sample_bits = 0
    long_size: int | None = None  # of a file beyond 4 GiB, whose header is RF64
    position = 12
    for _ in range(_MAX_CHUNKS):
        head = read_range(data, position, position + 48)
        if len(head) < 8:
            return None
        name, size = head[:4], int.from_bytes(head[4:8], "little")
        if name == b"ds64" and len(head) >= 24:
            long_size = int.from_bytes(head[16:24], "little")
        if name == b"fmt " and size >= 16 and len(head) >= 24:
            codec, num_channels, sample_rate, _, frame_bytes, sample_bits = struct.unpack_from(
                "<HHIIHH", head, 8
            )
            if codec == _EXTENSIBLE and size >= 26 and len(head) >= 34:
                codec = int.from_bytes(head[32:34], "little")
        if name == b"data":
            sample_bytes = sample_bits // 8
            known = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8)}.get(codec, ())
            is_plain = sample_bits % 8 == 0 and sample_bytes in known and sample_rate > 0
            if not is_plain or not num_channels or frame_bytes != num_channels * sample_bytes:
                return None
            tolerated = int(TOLERANCE_S * sample_rate) * frame_bytes
            num_bytes = _data_bytes(size, long_size, len(data) - position - 8, tolerated)
            num_samples = num_bytes // frame_bytes
            return WavSource(
                *(data, sample_rate, num_channels, num_samples, codec, sample_bytes, position + 8)
            )
        position += 8 + size + size % 2
    return None


def _data_bytes(size: int, long_size: int | None, num_present: int, tolerated: int) -> int:
    """Return how many bytes the samples have.

    Raises:
        DecodeError: The file ends before them.
    """
    if size == 0xFFFF_FFFF and long_size is not None:
        size = long_size
    elif size >= _UNKNOWN_SIZE and size > num_present:
        return num_present
    if size > num_present + tolerated:
        raise DecodeError(f"truncated wav: {size - num_present:,} bytes of its samples are missing")
    return min(size, num_present)
