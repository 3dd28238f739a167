"""Measures the steps: the numbers of a line of metrics, over all ranks.

loop.fit -> `Meter` -> metrics.StepLog writes the line, summary judges the run
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmstream.bad_samples.quarantine import FILTERED, KINDS
from mmstream.batching.valid import is_flat
from mmstream.train.distributed import TrainProcess, float64_scalar
from mmstream.train.summary import Clock, Times, slowest, summarize
from mmstream.types import Batch

__all__ = ["Meter"]


_COUNTS = (
    "num_samples",
    "num_cut_texts",
    "num_dropped_parts",
    "num_wrong_reads",
    "num_bytes",
    "num_cached_bytes",
    "num_cache_hit_bytes",
)
"""Counts of the loader since the run started, summed over the ranks."""


@dataclass
class _Totals:
    """Times of this rank over some steps, and the counts of all ranks."""

    times: Times = field(default_factory=Times)
    num_steps: int = 0
    counts: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Samples, tokens, positions (tokens and padding) and rows."""


class Meter:
    """Clock and counters of one rank.

    Each step calls `arrived`, then `read` or `stepped`, then `start`.

    Args:
        stats: counts of the loader, for its waiting time and its bad samples.
        process: this rank.
        sources: names of a mixture's sources, whose rows are counted; empty for one dataset.
        max_tokens: tokens that a row of packs has room for. None: rows are no packs.
    """

    def __init__(
        self,
        stats: Any,
        process: TrainProcess,
        sources: Iterable[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        self._stats = stats
        self._max_tokens = max_tokens
        self._process = process
        self._clock = Clock(process.device, stats)
        self._zeros = torch.zeros(4, dtype=torch.float64, device=process.device)
        self._batch_counts = self._zeros
        self._rows_of_source = dict.fromkeys(sources, 0)
        self._position: dict[str, Any] = {}
        self._num_unread = 0
        self._cut_text_fraction = 0.0
        self._cache_hit_fraction: float | None = None
        self._modelled = 0.0, 0  # sum of the imbalance up to the line before, and its steps
        self._first = _Totals()  # up to the first line of metrics
        self._later = _Totals()  # after it

    def start(self, *, paused: bool) -> None:
        """Start to wait for the data of a step. Set `paused` after saving or validating."""
        self._clock.start(paused=paused)

    def arrived(self, group: list[Batch]) -> None:
        """Stop waiting: the batches of a step are here. Count their rows and tokens."""
        self._clock.arrived()
        for batch in group:
            self._batch_counts = self._batch_counts + _count(batch)
            if self._rows_of_source:
                self._count_sources(batch)
        lineage = group[-1]["__lineage__"]
        self._position = {"epoch": lineage.epoch, "step": lineage.step}

    def _count_sources(self, batch: Batch) -> None:
        if is_flat(batch):
            for source in _sources_of_samples(batch):
                self._rows_of_source[source] += 1
            return
        lineage = batch["__lineage__"]
        empty = {bad.row for bad in lineage.bad if bad.substitute is None}
        for row, source in enumerate(batch["__source__"], start=lineage.start):
            self._rows_of_source[source] += row not in empty

    def stepped(self) -> None:
        """End a step that gets no line of metrics."""
        self._clock.done()
        self._num_unread += 1

    def read(
        self, rank_loss: Tensor, grad_norm: Tensor, *, num_steps: int, lr: float
    ) -> dict[str, Any]:
        """End a step and return its line of metrics, whose fields `StepLog.write` describes.

        Rates are over the time since the line before. All ranks must call it together. The host
        waits for the device.

        Args:
            rank_loss: this rank's share of the loss, whose sum over the ranks is the loss.
            grad_norm: norm of the gradient, the same on every rank.
            num_steps: optimizer steps since the first start, this one included.
            lr: learning rate of the step.
        """
        bad_counts = getattr(self._stats, "bad", {})
        loss, tokens, positions, samples, rows, *counts = self._process.sum_over_ranks(
            rank_loss,
            *self._batch_counts,
            *(getattr(self._stats, name, 0) for name in _COUNTS),
            *(bad_counts.get(kind, 0) for kind in KINDS),
            *self._rows_of_source.values(),
        ).tolist()
        num_samples, num_cut_texts, num_dropped_parts, num_wrong_reads, *num_bytes = map(
            int, counts[: len(_COUNTS)]
        )
        self._cache_hit_fraction = _hit_fraction(*num_bytes)
        del counts[: len(_COUNTS)]
        self._cut_text_fraction = num_cut_texts / max(num_samples, 1)
        bad = {kind: int(count) for kind, count in zip(KINDS, counts, strict=False) if count}
        num_skipped = bad.get(FILTERED, 0)
        rows_of_source = zip(self._rows_of_source, counts[len(KINDS) :], strict=True)
        self._batch_counts = self._zeros
        self.stepped()
        lap = self._clock.lap()
        self._sum_up(lap, [samples, tokens, positions, rows])
        seconds = max(lap.total_s, 1e-9)
        line = {
            **self._position,
            "num_steps": num_steps,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm.item(),
            "samples_per_s": round(samples / seconds, 1),
            "tokens_per_s": round(tokens / seconds, 1) if positions else None,
            "padding_fraction": round(1 - tokens / positions, 4) if positions else None,
            "wait_fraction": round(lap.wait_s / seconds, 3),
            "num_bad": sum(bad.values()) - num_skipped,
            "num_skipped": num_skipped,
            "bad": bad,
            "num_wrong_reads": num_wrong_reads,
            "num_cut_texts": num_cut_texts,
            "num_dropped_parts": num_dropped_parts,
            "cut_text_fraction": round(self._cut_text_fraction, 4),
        }
        if self._max_tokens is not None:
            line["fill"] = round(tokens / (rows * self._max_tokens), 4)
            imbalance = self._imbalance()
            if imbalance is not None:
                line["modelled_imbalance"] = round(imbalance, 4)
        if self._cache_hit_fraction is not None:
            line["cache_hit_fraction"] = round(self._cache_hit_fraction, 4)
        if self._rows_of_source:
            line["sources"] = {name: int(count) for name, count in rows_of_source if count}
            self._rows_of_source = dict.fromkeys(self._rows_of_source, 0)
        if self._process.device.type == "cuda":
            line["idle_fraction"] = round(lap.idle_s / seconds, 3)
            line["memory_bytes"] = torch.cuda.max_memory_allocated(self._process.device)
        return line

    def _imbalance(self) -> float | None:
        """Return the mean of the modelled imbalance since the line before. None: it is unknown."""
        total = getattr(self._stats, "total_imbalance", 0.0)
        num_steps = getattr(self._stats, "num_modelled_steps", 0)
        total_before, steps_before = self._modelled
        self._modelled = total, num_steps
        if num_steps == steps_before:
            return None
        return float((total - total_before) / (num_steps - steps_before))

    def summary(self) -> str:
        """Return the summary of the run as lines of text, after its last line of metrics.

        All ranks must call it together. The steps up to the first line are left out if there are
        others, because they include starting workers and compiling kernels.
        """
        totals = self._later if self._later.num_steps else self._first
        samples, tokens, positions, rows = totals.counts
        times = slowest(totals.times, self._process)
        speed, *advice = summarize(
            times,
            totals.num_steps,
            samples,
            cuda=self._process.device.type == "cuda",
        )
        text = ""
        if positions:
            text = (
                f"{tokens / max(times.total_s, 1e-9):,.0f} tokens/s, "
                f"{1 - tokens / positions:.1%} of the positions are padding"
            )
        if self._max_tokens is not None:
            text += f", packs are {tokens / (rows * self._max_tokens):.1%} full"
            imbalance = getattr(self._stats, "modelled_imbalance", 0.0)
            if imbalance:
                text += (
                    f", the packs of the rank with most to do cost {imbalance:.2f} times the mean "
                    "of a step"
                )
        lines = [speed, text]
        if self._cache_hit_fraction is not None:
            lines.append(f"{self._cache_hit_fraction:.1%} of the bytes came from the node cache")
        if self._cut_text_fraction:
            lines.append(
                f"max_length cut the texts of {self._cut_text_fraction:.1%} of the samples"
            )
        return "\n".join(filter(None, [*lines, *advice]))

    def _sum_up(self, lap: Times, counts: list[float]) -> None:
        """Add the steps since the line before to the totals of the run.

        Args:
            lap: times of this rank.
            counts: samples, tokens, positions and rows of all ranks.
        """
        totals = self._later if self._first.num_steps else self._first
        totals.times += lap
        totals.num_steps += self._num_unread
        totals.counts = [sum(pair) for pair in zip(totals.counts, counts, strict=True)]
        self._num_unread = 0


def _hit_fraction(num_bytes: int, num_cached_bytes: int, num_hit_bytes: int) -> float | None:
    """Return the share of the bytes that came from the node cache; None: there is none."""
    if not num_cached_bytes + num_hit_bytes:
        return None
    return num_hit_bytes / (num_bytes + num_hit_bytes)


def _sources_of_samples(batch: Batch) -> Iterable[str]:
    """Return the source of each sample in a valid row of a batch without padding.

    A sample may be several documents, which have the same source.
    """
    samples = batch["document_sample"].tolist()
    valid = batch["__valid__"][batch["document_row"]].tolist()
    documents = [pair for pair in zip(samples, valid, strict=True) if pair[0] >= 0]
    return {
        sample: source
        for (sample, is_valid), source in zip(documents, batch["__source__"], strict=True)
        if is_valid
    }.values()


def _count(batch: Batch) -> Tensor:
    """Return float64 [4]: tokens of valid rows, positions for tokens, valid samples, and rows.

    Without text the first two are 0. For example, valid rows of 5 and 3 tokens and one invalid row,
    padded to length 5, give 8, 15, 2 and 3. A row of a pack has several samples.
    """
    valid = batch["__valid__"]
    mask = batch.get("attention_mask")
    if is_flat(batch):
        lineage = batch["__lineage__"]
        num_samples = sum(lineage.valid) if lineage.rows is None else len(lineage.rows)
        counts = [batch["num_tokens"], batch["input_ids"].numel(), num_samples]
    elif not isinstance(mask, Tensor):
        counts = [0, 0, valid.sum()]
    else:
        counts = [(mask * valid.unsqueeze(1)).sum(), mask.numel(), valid.sum()]
    counts.append(len(valid))
    return torch.stack([float64_scalar(count, valid.device) for count in counts])
