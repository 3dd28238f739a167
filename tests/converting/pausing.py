"""Conversions in other processes that stand still in the middle of a shard."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from mmstream.converting import shard
from mmstream.errors import MMStreamError
from mmstream.storage import open_store
from mmstream.storage.write_lock import LOCK_NAME
from tests.helpers import convert_corpus
from tests.helpers.convert_corpus import run

FORK = multiprocessing.get_context("fork")


def objects(dest):
    """Return {name: bytes} of a destination, its reports and its lock."""
    store = open_store(dest)
    lock = {LOCK_NAME: store.read(LOCK_NAME)} if store.exists(LOCK_NAME) else {}
    return convert_corpus.objects(dest) | lock


def files(dest):
    """Return {name: bytes} without the locks, which their owners renew again and again."""
    return {name: data for name, data in objects(dest).items() if not name.endswith(".lock")}


class PausedConversions:
    """Conversions of one corpus to one destination."""

    def __init__(self, corpus, dest):
        self.corpus, self.dest = corpus, dest
        self.processes: list[BaseProcess] = []

    def start(self, pause_at, **options) -> tuple[BaseProcess, Connection]:
        """Start one, and return it when it is in the middle of the shard of this number."""
        pipe, other_end = FORK.Pipe()
        process = FORK.Process(target=self._convert, args=(pause_at, other_end, options))
        self.processes.append(process)
        process.start()
        require_message(pipe, "in the middle")
        return process, pipe

    def end(self):
        for process in self.processes:
            kill(process)

    def _convert(self, pause_at, pipe, options):
        samples = shard._samples

        def pausing_samples(job, *others):
            for number, sample in enumerate(samples(job, *others)):
                yield sample
                if job.name == f"shard-{pause_at:06d}.tar" and number == 2:
                    pipe.send("in the middle")
                    pipe.poll(500)

        shard._samples = pausing_samples
        try:
            run(self.corpus, self.dest, **options)
        except MMStreamError as error:
            pipe.send(str(error))
        else:
            pipe.send("finished")


def kill(process):
    process.kill()
    process.join()


def require_message(pipe, expected):
    assert pipe.poll(500)
    assert expected in pipe.recv()


def go_on(pipe, expected="finished"):
    """Let a conversion go on, and compare how it ends."""
    pipe.send("go on")
    require_message(pipe, expected)
