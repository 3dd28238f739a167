"""The third stage: order -> read -> DECODE -> batch -> loader -> device.

In: raw samples of a step. Out: as many decoded, transformed samples, whatever the data is like: a
bad sample's place is taken by a deterministic substitute (see `filling`), so steps and ranks stay
in balance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import NamedTuple

import torch

from mmstream.bad_samples.policy import Action, BadSample
from mmstream.decoding.sample import Decode, decode_texts
from mmstream.decoding.substitute import SHAPE_ATTEMPTS, Filler, Ready, Row, Transform
from mmstream.errors import BadSampleLimitError, SampleError
from mmstream.loader.batch_memory import Memory
from mmstream.order import AnyOrder
from mmstream.reading.reader import Job, RawStep, Reader
from mmstream.types import Sample, SampleLineage, SampleRef

__all__ = ["DecodedStep", "Transform", "decode"]


class DecodedStep(NamedTuple):
    """The samples of a job, a row each, ready to be collated."""

    job: Job
    samples: list[Sample]
    valid: list[bool]
    planned: list[SampleRef]
    shown: list[SampleRef]
    bad: tuple[BadSample, ...]
    num_bytes: int
    num_requests: int


def decode(
    steps: Iterable[RawStep],
    reader: Reader,
    decoders: Decode | None = None,
    transforms: Sequence[Transform] = (),
    *,
    substitute_shards: bool = False,
    action: Action = "substitute",
    num_threads: int = 1,
    memory: Memory | None = None,
) -> Iterator[DecodedStep]:
    """Yield each step with its samples decoded and transformed, in the order of rows.

    Args:
        steps: raw samples.
        reader: for second reads and substitutes.
        decoders: of images and text; None only parses ``json``.
        transforms: functions from sample to sample, run in this order after decoding.
        substitute_shards: whether an unreadable shard makes bad samples or ends the stream.
        action: what becomes of a bad sample's row; see `BadSamplePolicy`.
        num_threads: rows decoded side by side; decoders release the GIL.
        memory: for pictures of one size; None: of this process alone.

    Raises:
        ShardError: an unreadable shard, unless `substitute_shards`.
        SampleError: a bad sample, where `action` is "raise".
        BadSampleLimitError: a step of which no row can be filled.
        StorageError: storage failed after retries.
        NameError, AttributeError, ...: a transform has a bug.
    """
    shape = None
    if decoders and decoders.image and decoders.image.device == "cpu":
        shape = decoders.image.output_shape
    memory = memory or Memory()
    filler = Filler(reader, decoders, tuple(transforms), substitute_shards, action)
    as_read = decoders is None and not transforms
    if as_read:
        num_threads = 1  # nothing here is worth handing to a thread
    helpers = num_threads - 1  # this thread decodes too
    with ThreadPoolExecutor(helpers) if helpers else nullcontext() as pool:
        for step in steps:
            whole = _as_read(step, reader.order) if as_read else None
            if whole is not None:
                yield whole
                continue
            pictures = _picture_buffer(memory, len(step.refs), shape)
            fill = _bind(filler, step, _ready(step, decoders), pictures)
            rows = _side_by_side(fill, len(step.refs), pool, helpers)
            yield _assemble(step, rows)


def _as_read(step: RawStep, order: AnyOrder) -> DecodedStep | None:
    """Return a step of which nothing is decoded at once; None: a sample is bad, or may be."""
    samples = [found for found in step.samples if isinstance(found, dict)]
    if len(samples) < len(step.refs):
        return None
    if any("json" in sample for sample in samples):
        samples = [sample for sample, _ in decode_texts(samples, None)]
        if any(isinstance(sample.get("json"), bytes) for sample in samples):
            return None
    job = step.job
    for row, sample in enumerate(samples, start=job.start):
        seed, epoch = order.stream(job.epoch, job.step, row)
        lineage = (*sample["__lineage__"][:2], epoch, job.step, seed)
        sample["__lineage__"] = SampleLineage._make(lineage)  # half the time of a call
    return DecodedStep(
        job,
        samples,
        step.valid,
        step.refs,
        step.refs,
        (),
        step.num_bytes,
        step.num_requests,
    )


def _side_by_side(
    fill: Callable[[int], Row], num_rows: int, pool: Executor | None, helpers: int
) -> list[Row]:
    """Fill all rows; each thread takes the next one, which is cheaper than a future a row.

    Raises the error of the first row that has one: rows before it are done, or under way.
    """
    if pool is None:
        return list(map(fill, range(num_rows)))
    rows: dict[int, Row] = {}
    errors: list[tuple[bool, int, BaseException]] = []
    places = iter(range(num_rows))

    def work() -> None:
        while not errors:
            place = next(places, None)
            if place is None:
                return
            try:
                rows[place] = fill(place)
            except BaseException as error:
                errors.append((isinstance(error, Exception), place, error))  # Ctrl-C goes first

    waiting = [pool.submit(work) for _ in range(helpers)]
    work()
    wait(waiting)
    if errors:
        raise min(errors, key=lambda found: found[:2])[2]
    return [rows[place] for place in range(num_rows)]


def _ready(step: RawStep, decoders: Decode | None) -> list[Ready | None]:
    """Parse and tokenize a step's samples together; those that could not be read are None."""
    read = [found if isinstance(found, dict) else None for found in step.samples]
    done = iter(decode_texts([found for found in read if found is not None], decoders))
    return [None if found is None else next(done) for found in read]


def _bind(
    filler: Filler,
    step: RawStep,
    ready: list[Ready | None],
    pictures: torch.Tensor | None,
) -> Callable[[int], Row]:
    return lambda place: filler(
        step, place, ready[place], None if pictures is None else pictures[place]
    )


def _assemble(step: RawStep, rows: list[Row]) -> DecodedStep:
    """Put a step together; a row that nothing could fill shows another one and is invalid."""
    spare = next((row for row in rows if row.sample is not None), None)
    if spare is None:
        reason = next((row.bad.reason for row in rows if row.bad), "padding only")
        raise BadSampleLimitError(
            f"epoch {step.job.epoch} step {step.job.step}: no row could be filled, nor by "
            f"{SHAPE_ATTEMPTS[SampleError]} substitutes each or more; the first: {reason}"
        )
    filled = [spare if row.sample is None else row for row in rows]
    return DecodedStep(
        step.job,
        [row.sample for row in filled if row.sample is not None],
        [ok and row.filled for ok, row in zip(step.valid, rows, strict=True)],
        step.refs,
        [row.shown for row in filled],
        tuple(row.bad for row in rows if row.bad),
        step.num_bytes,
        step.num_requests,
    )


def _picture_buffer(
    memory: Memory, num_rows: int, shape: tuple[int, int] | None
) -> torch.Tensor | None:
    """Return uint8 [B, H, W, 3] for the pictures of a batch: decoders write, nobody copies."""
    if shape is None:
        return None
    pictures = memory.take(num_rows * shape[0] * shape[1] * 3, room=memory.room)
    return pictures.view(num_rows, *shape, 3)
