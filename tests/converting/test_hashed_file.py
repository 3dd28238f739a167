"""The thread that writes and hashes the bytes of a tar."""

from __future__ import annotations

import hashlib
import io
import random
import threading

import pytest

from mmstream.converting import hashed_file
from mmstream.converting.hashed_file import HashedFile


def test_all_bytes_are_written_in_order_and_hashed(monkeypatch):
    monkeypatch.setattr(hashed_file, "BLOCK_BYTES", 1000)
    rng = random.Random(0)
    pieces = [rng.randbytes(rng.choice([0, 1, 512, 3000])) for _ in range(200)]
    file = io.BytesIO()
    with HashedFile(file) as hashed:
        assert [hashed.write(piece) for piece in pieces] == list(map(len, pieces))
        sha256 = hashed.close()
    assert file.getvalue() == b"".join(pieces)
    assert sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()


class FullDisk(io.RawIOBase):
    def write(self, data):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("num_blocks", [1, 50])
def test_an_error_of_the_file_reaches_the_caller_and_ends_the_thread(monkeypatch, num_blocks):
    monkeypatch.setattr(hashed_file, "BLOCK_BYTES", 10)
    num_threads = threading.active_count()

    def write_all():
        with HashedFile(FullDisk()) as hashed:
            for _ in range(num_blocks):
                hashed.write(bytes(20))
            hashed.close()

    with pytest.raises(OSError, match="No space left"):
        write_all()
    assert threading.active_count() == num_threads


def test_a_slow_file_bounds_what_is_in_memory(monkeypatch):
    monkeypatch.setattr(hashed_file, "BLOCK_BYTES", 10)
    may_write, waiting = threading.Event(), []

    class SlowFile(io.RawIOBase):
        def write(self, data):
            assert may_write.wait(timeout=500)
            return len(data)

    with HashedFile(SlowFile()) as hashed:
        blocks = iter(range(100))

        def produce():
            for block in blocks:
                hashed.write(bytes(20))
                waiting.append(block)

        producer = threading.Thread(target=produce)
        producer.start()
        producer.join(timeout=0.2)
        assert len(waiting) <= hashed_file.MAX_WAITING
        may_write.set()
        producer.join(timeout=500)
        hashed.close()
    assert len(waiting) == 100
