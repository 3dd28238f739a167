"""Counts what delivered batches hold, and warns once of each kind of loss.

Loader.mark_delivered -> `DeliveredCounts` -> loader.stats

Bad samples and their limits are counted in ``decoding/bad_samples.py``. The samples here are good:
they never reach a limit. A warning for each of them would flood the log. So the first one of a kind
is a warning.
"""

from __future__ import annotations

import logging

from mmstream.batching.flat import Flat, Pack
from mmstream.decoding.bad_samples import Stats
from mmstream.pipeline import Pipeline
from mmstream.reading.step import BatchLineage
from mmstream.types import Batch

logger = logging.getLogger(__name__)

MIN_SAMPLES = 1000
"""Delivered samples from which on filters are judged."""

MIN_LEFT_OUT = 0.05
"""A filter that leaves out this share of the samples is worth a warning."""


class DeliveredCounts:
    """The counts of one loader, and which warnings it has logged.

    Args:
        stats: of the loader; changed in place.
        pipeline: what makes the batches.
    """

    def __init__(self, stats: Stats, pipeline: Pipeline) -> None:
        self._stats = stats
        self._batching = pipeline.flat
        self._action = pipeline.bad_samples.action
        self._has_warned_of_filters = False

    def count(self, batch: Batch) -> None:
        """Count a delivered batch, whose bad samples are counted already."""
        lineage: BatchLineage = batch["__lineage__"]
        self._count_lengths(lineage)
        if self._batching is not None:
            self._count_tokens(batch, self._batching)
        if self._stats.num_samples >= MIN_SAMPLES:
            self._warn_of_filters()
        self._count_text_losses(lineage)

    def end_epoch(self) -> None:
        """Warn of filters also where the epoch had few samples."""
        self._warn_of_filters()

    def _count_lengths(self, lineage: BatchLineage) -> None:
        """Count samples of packs that have other lengths than were measured."""
        stats = self._stats
        is_first = not (stats.num_longer or stats.num_shorter)
        if is_first and (lineage.num_longer or lineage.num_shorter):
            logger.warning(
                "%s: decoders, templates or draws are not those of the measure, so packs are "
                "emptier than planned, or samples do not fit: measure and plan again; others are "
                "only counted, see loader.stats",
                lineage.unlike_measured,
            )
        stats.num_longer += lineage.num_longer
        stats.num_shorter += lineage.num_shorter

    def _count_tokens(self, batch: Batch, batching: Flat) -> None:
        """Count documents and tokens of rows without padding."""
        stats = self._stats
        stats.num_documents += len(batch["__key__"])
        stats.num_tokens += batch["num_tokens"]
        stats.num_label_tokens += batch.get("num_label_tokens", 0)
        if not isinstance(batching, Pack):
            stats.num_token_slots += batch["input_ids"].numel()
            return
        stats.num_token_slots += batching.max_tokens * int(batch["__valid__"].sum())
        stats.num_planned_tokens += batch["__lineage__"].num_planned_tokens

    def _warn_of_filters(self) -> None:
        """Warn once where filters leave out so much that an epoch is not what it seems."""
        stats = self._stats
        num_skipped, num_samples = stats.num_skipped, stats.num_samples
        is_little = num_skipped < max(1, MIN_LEFT_OUT * num_samples)
        if self._has_warned_of_filters or is_little:
            return
        self._has_warned_of_filters = True
        repeats = num_samples / max(1, num_samples - num_skipped)
        is_repeated = self._action == "substitute" and not isinstance(self._batching, Pack)
        logger.warning(
            "filters (mm.SkipSample) left out %s of %s samples that were read%s; leave them out "
            "before training: with `mmstream select --where`, at conversion, or of packs with "
            "`mmstream plan --where` (docs/pipeline.md#filters)",
            f"{num_skipped:,}",
            f"{num_samples:,}",
            f": the others come {repeats:.1f} times in an epoch, on average" * is_repeated,
        )

    def _count_text_losses(self, lineage: BatchLineage) -> None:
        """Count texts that were cut, and parts of conversations that were dropped."""
        stats = self._stats
        is_new = (lineage.num_cut_texts and not stats.num_cut_texts) or (
            lineage.num_dropped_parts and not stats.num_dropped_parts
        )
        stats.num_cut_texts += lineage.num_cut_texts
        stats.num_dropped_parts += lineage.num_dropped_parts
        for example in lineage.text_losses if is_new else ():
            logger.warning("%s; others are only counted, see loader.stats", example)
