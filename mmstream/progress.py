"""What a process works on right now, so that another process can name it.

Place in the flow: the read and decode stages write it, the loader reads it. It lies below all of
them. A worker that hangs or dies cannot say where it was. So each worker writes that down before
each sample, in memory that it shares with the main process. One note takes less than a microsecond.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mmstream.errors import escaped, where


class Stage(IntEnum):
    """What a process does, in the order of the flow."""

    START = 0
    """It imports modules. Memory that nobody has written to says this."""
    READ = 1
    """It waits for the samples of the step."""
    TEXT = 2
    """It tokenizes the texts of the step."""
    READ_AGAIN = 3
    """It reads one sample: for the second time, or as a substitute."""
    DECODE = 4
    """It decodes and transforms one sample."""
    BATCH = 5
    """It collates the batch, and sends it on."""
    IDLE = 6
    """It has sent its batch, and may wait for the next job."""


_STEP = struct.Struct("=3qd")
_SAMPLE = struct.Struct("=3qd2q64p")
"""The fields of `Work`, but for the shard: 0 is none, 1 is shard 0."""


@dataclass(frozen=True)
class Work:
    """One note: what a process began, when, and the last sample that it began."""

    stage: Stage
    epoch: int = 0
    step: int = 0
    since: float = 0.0
    """`time.monotonic()`, which is the same clock in all processes of a machine."""
    shard: int = -1
    """Number of the shard; -1 where no sample was begun."""
    index: int = 0
    key: str = ""

    def sample(self, shard_name: Callable[[int], str]) -> str:
        """Return the address of the last sample that was begun, or "" where there is none."""
        if self.shard < 0:
            return ""
        return where(escaped(shard_name(self.shard)), self.index, escaped(self.key))


class Progress:
    """The note of one process: the last thing that any of its threads began.

    Args:
        memory: writable bytes, `num_bytes` of the number of processes. They may be shared.
        number: of the process.
    """

    def __init__(self, memory: Any = None, number: int = 0) -> None:
        self._memory = bytearray(self.num_bytes(1)) if memory is None else memory
        self._offset = number * _SAMPLE.size

    @staticmethod
    def num_bytes(num_processes: int) -> int:
        """Return the bytes that the notes of so many processes take."""
        return num_processes * _SAMPLE.size

    def begin_stage(self, stage: Stage, epoch: int, step: int) -> None:
        """Write down what begins now for a whole step. The last sample stays."""
        _STEP.pack_into(self._memory, self._offset, stage, epoch, step, time.monotonic())

    def begin_sample(
        self, stage: Stage, epoch: int, step: int, shard: int, index: int, key: str
    ) -> None:
        """Write down what begins now for a sample."""
        name = key.encode("utf-8", "backslashreplace")
        now = time.monotonic()
        _SAMPLE.pack_into(
            self._memory, self._offset, stage, epoch, step, now, shard + 1, index, name
        )

    def last(self) -> Work:
        """Return what was written down last.

        It may be half of one note and half of the next one, if it is being written.
        """
        stage, epoch, step, since, shard_number, index, name = _SAMPLE.unpack_from(
            self._memory, self._offset
        )
        key = name.decode("utf-8", "replace")  # a long key is cut at any byte
        return Work(Stage(stage), epoch, step, since, shard_number - 1, index, key)
