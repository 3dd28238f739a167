"""The CPU time of a sample, stage by stage: the stages of a pipeline in one thread of this process.

    pipeline -> `measure_stages` -> speed.py

A clock in the place of the `Progress` that a worker writes: each stage begins with a note, so the
CPU time since the note before belongs to the stage before.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack, closing

from mmstream.pipeline import Pipeline, PipelineRunner, large_files_of
from mmstream.progress import Progress, Stage
from mmstream.reading.process import ReaderProcess, needs_reader_process
from mmstream.reading.step import Job, later_job

__all__ = ["STAGES", "measure_stages"]

STAGES = {
    Stage.READ: "read",
    Stage.TEXT: "text",
    Stage.READ_AGAIN: "read",
    Stage.DECODE: "decode",
    Stage.BATCH: "collate",
}
"""What the stages of a process count as."""


class StageClock(Progress):
    """Adds up the CPU seconds of this process by stage.

    Attributes:
        seconds: by the names in `STAGES`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stage = Stage.IDLE
        self._mark = time.process_time()

    def begin_stage(self, stage: Stage, epoch: int, step: int) -> None:
        """End the stage before, and begin one for a whole step."""
        self._turn_to(stage)
        super().begin_stage(stage, epoch, step)

    def begin_sample(
        self, stage: Stage, epoch: int, step: int, shard: int, index: int, key: str
    ) -> None:
        """End the stage before, and begin one for a sample."""
        self._turn_to(stage)
        super().begin_sample(stage, epoch, step, shard, index, key)

    def _turn_to(self, stage: Stage) -> None:
        now = time.process_time()
        if self._stage in STAGES:
            self.seconds[STAGES[self._stage]] += now - self._mark
        self._stage, self._mark = stage, now


def measure_stages(
    pipeline: Pipeline, rows: tuple[int, int], first_step: int, *, seconds: float
) -> dict[str, float]:
    """Return the CPU seconds of a sample by stage: "read", "text", "decode" and "collate".

    On object storage, "read" is what this process does with the bytes that a reader process hands
    over. The first step does not count: it imports, opens files and takes memory. So at least two
    steps are run.

    Args:
        pipeline: what is measured.
        rows: the rows [start, stop) of the rank.
        first_step: a step of epoch 0, from which on steps are run.
        seconds: after which no further step begins.

    Raises:
        ShardError, StorageError, SampleError, BadSampleLimitError: as `PipelineRunner.batch`.
    """
    clock = StageClock()
    with ExitStack() as stack:
        job, connection = Job(0, first_step, *rows), None
        if needs_reader_process(pipeline.dataset):
            large_files = large_files_of(pipeline)
            least_bytes = None if large_files is None else large_files.least_bytes
            reader = ReaderProcess(pipeline.dataset, pipeline.order, 1, least_bytes)
            stack.callback(reader.close)
            job = job._replace(iteration=reader.begin(0, first_step, rows))
            connection = reader.connections[0]
        runner = PipelineRunner(pipeline, progress=clock, connection=connection)
        stack.enter_context(closing(runner))
        runner.batch(job)
        clock.begin_stage(Stage.IDLE, 0, 0)
        clock.seconds.clear()
        num_samples = 0
        end = time.perf_counter() + seconds
        while num_samples == 0 or time.perf_counter() < end:
            job = later_job(job, 1, pipeline.order.steps_per_epoch)
            num_samples += len(runner.batch(job)["__lineage__"].planned)
            clock.begin_stage(Stage.IDLE, 0, 0)
    return {stage: clock.seconds[stage] / num_samples for stage in dict.fromkeys(STAGES.values())}
