"""What the decoders of a pipeline read of large samples, from a few that are decoded.

    pipeline -> `measure_large_reads` -> reads.py

A plan knows where samples lie, and not what a decoder asks of them. So some are read and decoded as
a worker does it, and what is read behind their first bytes is counted. The first bytes are part of
the plan.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import compress

import numpy as np

from mmstream.bad_samples.policy import BadSamplePolicy
from mmstream.dataset.source import ShardSource, load_indexes
from mmstream.decoding.sample import RowMemory
from mmstream.decoding.substitute import RowDecoder, one_by_one
from mmstream.errors import SampleError, ShardError
from mmstream.forecast.reads import LargeReads, MeasuredReads, Reads, some
from mmstream.order import AnyOrder
from mmstream.pipeline import Pipeline, large_files_of
from mmstream.progress import Progress
from mmstream.reading.fetcher import Fetcher
from mmstream.reading.large_samples import first_bytes
from mmstream.reading.lookup import SampleLookup
from mmstream.reading.plan import by_shard
from mmstream.reading.step import BatchLineage, RawStep
from mmstream.types import SampleRef

__all__ = ["measure_large_reads"]

NUM_SAMPLES = 16
"""Samples that are decoded."""

DRAWN_STEPS, DRAWN_ROWS = 32, 16
"""Steps of an epoch, and rows of each, among which large samples are looked for."""


def measure_large_reads(
    pipeline: Pipeline, order: AnyOrder, *, num_samples: int = NUM_SAMPLES
) -> MeasuredReads:
    """Decode some large samples of an epoch, and count what is read of them.

    Args:
        pipeline: its dataset, its decoders, and its functions before decoding.
        order: the samples are drawn from its first epoch.
        num_samples: how many are decoded, at most.

    Raises:
        SampleError: none of them can be decoded.
        StorageError: storage failed after retries.
        NameError, ImportError, ...: a function has a bug.
    """
    files = large_files_of(pipeline)
    if files is None:
        return MeasuredReads(None, 0)
    unmeasured = LargeReads(files.least_bytes)
    if pipeline.decode is None or not pipeline.decode.has_ranged_decoders:
        return MeasuredReads(unmeasured, 0)
    refs = _large_refs(pipeline.dataset, order, files.least_bytes)
    if not refs:
        return MeasuredReads(unmeasured, 0)
    fetcher = Fetcher(pipeline.dataset, zero_copy=False, large_files=files)
    decode_row = RowDecoder(
        SampleLookup(pipeline.dataset, order, fetcher),
        pipeline.decode,
        tuple(pipeline.before),
        (),
        BadSamplePolicy(),
        Progress(),
    )
    total, num_decoded, reason = Reads(), 0, ""
    for ref in some(refs, num_samples):
        held = fetcher.fetch([ref])
        fetcher.pop_counts()  # its first bytes
        step = RawStep(BatchLineage(0, 0, 0, [ref], [True], [ref]), [held.take(0)])
        (prepared,) = decode_row.prepare(step, one_by_one)
        document = decode_row.planned(step, 0, prepared, RowMemory({}, {}))
        num_bytes, num_requests = fetcher.pop_counts()
        if document.refusal is not None:  # it was read twice, and another one takes its row
            reason = reason or document.refusal.reason
            continue
        total += Reads(num_requests, num_bytes)
        num_decoded += 1
    if not num_decoded:
        raise SampleError(reason)
    mean = total.times(1 / num_decoded)
    return MeasuredReads(LargeReads(files.least_bytes, mean), num_decoded)


def _large_refs(source: ShardSource, order: AnyOrder, least_bytes: int) -> list[SampleRef]:
    """Return large samples of epoch 0, in the order of delivery."""
    drawn: list[SampleRef] = []
    for step in some(range(order.steps_per_epoch), DRAWN_STEPS):
        shards, indexes, _ = order.refs(0, step)
        drawn += some(list(zip(shards.tolist(), indexes.tolist(), strict=True)), DRAWN_ROWS)
    shards, indexes = np.array(drawn, dtype=np.int64).reshape(-1, 2).T
    load_indexes(source, np.unique(shards).tolist())
    is_large = np.zeros(len(drawn), dtype=np.bool_)
    for positions in by_shard(shards, indexes):
        location = source.locate(int(shards[positions[0]]))
        with suppress(ShardError):  # a loader decides whether it goes on without this shard
            bounds = location.dataset.bounds(location.shard, indexes[positions])
            is_large[positions] = first_bytes(bounds, least_bytes)[1]
    return list(compress(drawn, is_large))
