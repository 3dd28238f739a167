"""Batches from the node cache are those of a run without it, whatever is in its files."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings, strategies as st

from mmstream.pipeline import PipelineRunner
from mmstream.reading import range_cache
from mmstream.reading.range_cache import NodeCacheSettings
from mmstream.reading.step import Job
from mmstream.storage.node_cache import open_cache_dir
from tests.helpers.bad_corpus import make_pipeline, policy
from tests.helpers.corpora import write_corpus
from tests.helpers.reader_thread import reader_thread
from tests.helpers.stores import far
from tests.reading.test_range_cache import cached_files

Damage = Callable[[list[Path], random.Random], object]


def sample(number: int) -> dict[str, bytes]:
    return {"bin": random.Random(number).randbytes(1 + number * 37 % 3_000), "txt": b"%d" % number}


def fields(batch: dict[str, Any]) -> Any:
    names = ("__key__", "bin", "txt")
    return [list(map(bytes, batch[name])) if name != "__key__" else batch[name] for name in names]


def wait_for_writes() -> None:
    """Wait until all is written that caches of this process have taken. They are closed."""
    for thread in threading.enumerate():
        if thread.name == "mmstream-cache-write":
            thread.join(500)
            assert not thread.is_alive(), "a test has left a cache open"


def remove_all(files: list[Path], draw: random.Random) -> None:
    for path in files:
        path.unlink()


def change_bytes(files: list[Path], draw: random.Random) -> None:
    content = bytearray(draw.choice(files).read_bytes())
    place = draw.randrange(4096, len(content))
    content[place : place + 200] = bytes(byte ^ 1 for byte in content[place : place + 200])
    draw.choice(files).write_bytes(content)


def cut(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    os.truncate(path, draw.randrange(path.stat().st_size))


DAMAGES: list[Damage] = [remove_all, change_bytes, cut]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8)
def test_whatever_is_in_the_cache_batches_are_the_same(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3), "counts")
    options = {
        "global_batch_size": data.draw(st.integers(1, sum(counts)), "rows"),
        "window": data.draw(st.sampled_from([None, 1, 6]), "window"),
        "zero_copy": data.draw(st.booleans(), "zero_copy"),
    }
    max_bytes = data.draw(st.sampled_from([1 << 30, 60_000]), "max_bytes")
    num_workers = data.draw(st.integers(1, 2), "num_workers")
    draw = random.Random(data.draw(st.integers(0, 1 << 30), "seed"))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_cache, "FILE_BYTES", 12_000)
        write_corpus(f"{folder}/corpus", counts, sample, checksums=True)
        local = make_pipeline(f"{folder}/corpus", bad_samples=policy(action="mask"), **options)
        remote = replace(local, dataset=far(local.dataset))
        root = open_cache_dir(f"{folder}/cache", max_bytes)
        node_cache = NodeCacheSettings(root, max_bytes, 1.0)
        rows, steps = (0, local.global_batch_size), local.order.steps_per_epoch

        def read(epochs: list[int], damage: Callable[[], object]) -> int:
            """Compare the batches of epochs; return the bytes that came from the cache."""
            num_hit_bytes = 0
            with reader_thread(remote, num_workers, node_cache) as reader:
                runners = [PipelineRunner(remote, connection=one) for one in reader.connections]
                with closing(PipelineRunner(local)) as own:
                    for epoch in epochs:
                        iteration = reader.begin(epoch, 0, rows)
                        for step in range(steps):
                            job = Job(epoch, step, *rows, num_workers, iteration)
                            batch = runners[step % num_workers].batch(job)
                            num_hit_bytes += batch["__lineage__"].transfers.num_cache_hit_bytes
                            assert fields(batch) == fields(own.batch(job))
                            damage()
                for runner in runners:
                    runner.close()
            return num_hit_bytes

        read([0], lambda: None)
        wait_for_writes()
        assert cached_files(root)

        def damage() -> None:
            files = cached_files(root)
            if files and draw.random() < 0.3:
                with suppress(FileNotFoundError):  # a step that is read ahead removes damaged files
                    draw.choice(DAMAGES)(files, draw)

        event("hits" if read([1, 0], damage) else "no hits")
