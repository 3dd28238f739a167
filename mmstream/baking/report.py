"""What a bake will take, and what it did.

Place in the flow: `bake` says before the first shard how large its result will be. ``mmstream bake
--dry-run`` says it in more detail.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mmstream.bad_samples.quarantine import FILTERED
from mmstream.baking.samples import BakedSample, Baker, joined_files
from mmstream.decoding.stored import StoredFile
from mmstream.display.text import count_text, time_text
from mmstream.tar.header import BLOCK, padded

MAX_REASONS = 5
"""Reasons of bad samples that an estimate shows."""

MAX_SHARDS = 8
"""Shards whose first samples are tried."""


@dataclass(frozen=True)
class BakeReport:
    """What `bake` did.

    Attributes:
        num_samples: Samples of the new dataset, as many as the source has.
        num_bad: Samples that the pipeline refused. They are bad samples of the new dataset too.
        num_left_out: Those of `num_bad` that a filter left out: no fault.
        num_shards: Shards of the new dataset.
        num_bytes: Size of all tars.
        num_new_bytes: Size of the tars that this call wrote. An earlier, interrupted call wrote the
            others.
        seconds: Wall time of this call.
        fingerprint: Of what made the dataset: ``mmstream.bake.json`` has the settings.
        first_reason: Why the first bad sample was refused that no filter left out.
        was_finished: True: the destination held this dataset already. Nothing was written.
    """

    num_samples: int
    num_bad: int
    num_left_out: int
    num_shards: int
    num_bytes: int
    num_new_bytes: int
    seconds: float
    fingerprint: str
    first_reason: str = ""
    was_finished: bool = False

    def __repr__(self) -> str:
        return f"<BakeReport: {self.summary()}>"

    def summary(self) -> str:
        """Return one line: the samples and their size."""
        return (
            f"{count_text(self.num_samples, 'sample')} in {count_text(self.num_shards, 'shard')}, "
            f"{self.num_bytes / 1e6:,.1f} MB"
        )


@dataclass(frozen=True)
class BakeEstimate:
    """What some samples say about all of them."""

    num_tried: int
    num_samples: int
    """Samples of the dataset."""
    files: dict[str, StoredFile]
    """By name: what the files of a sample will be."""
    tried_bytes: int
    """Of the samples that were tried, in a tar."""
    source_bytes: int
    """Size of the shards of the source."""
    seconds: float
    """Of the samples that were tried, in one process."""
    num_bad: int
    reasons: tuple[str, ...]
    """Why some of them were refused."""

    @property
    def num_bytes(self) -> int:
        """Size of all tars, about."""
        return round(self.tried_bytes / max(1, self.num_tried) * self.num_samples)

    def text(self, num_workers: int = 1) -> str:
        """Return one line."""
        seconds = self.seconds / max(1, self.num_tried) * self.num_samples / max(1, num_workers)
        each = self.tried_bytes / max(1, self.num_tried) / 1e6
        return (
            f"{self.num_samples:,} samples of {each:.3g} MB, about {self.num_bytes / 1e9:,.3g} GB "
            f"in all (the source has {self.source_bytes / 1e9:,.3g} GB) and "
            f"{time_text(seconds)} with {max(1, num_workers)} "
            f"{'processes' if num_workers > 1 else 'process'}"
        )

    def lines(self, num_workers: int = 1) -> list[str]:
        """Return the files of a sample, the size of all, and what was refused."""
        lines = [f"{self.num_tried:,} samples tried, {self.num_bad:,} of them bad or left out"]
        for name, file in self.files.items():
            each = file.num_bytes / max(1, file.num_samples)
            shape = "" if file.shape is None else f" {list(file.shape)}"
            kind = file.kind if file.dtype is None else f"{file.dtype}{shape}"
            lines.append(f"  .{name}: {kind}, {each:,.0f} bytes, in {file.num_samples:,} samples")
        return [*lines, *(f"  bad: {reason}" for reason in self.reasons), self.text(num_workers)]


def estimate(baker: Baker, num_samples: int) -> BakeEstimate:
    """Try the first samples of some shards, in this process. Nothing is written.

    Raises:
        ConfigError: A value cannot be stored, or depends on random draws. And what
            `Baker.samples` raises.
    """
    dataset = baker.dataset
    shards = [shard for shard in range(dataset.num_shards) if dataset.counts[shard]]
    shards = shards[:: -(-len(shards) // MAX_SHARDS)] if shards else []
    each = -(-num_samples // max(1, len(shards)))
    files: dict[str, StoredFile] = {}
    num_tried = tried_bytes = num_bad = 0
    reasons: list[str] = []
    seconds = 0.0
    for shard in shards:
        begin = time.monotonic()
        for sample in baker.samples(shard, min(each, num_samples - num_tried)):
            num_tried += 1
            tried_bytes += _tar_bytes(sample)
            num_bad += bool(sample.kind)
            if sample.kind and sample.kind != FILTERED:
                reasons.append(sample.reason)
            files = joined_files(files, sample.files)
        seconds += time.monotonic() - begin
    return BakeEstimate(
        num_tried,
        len(dataset),
        files,
        tried_bytes,
        dataset.manifest.num_bytes,
        seconds,
        num_bad,
        tuple(reasons[:MAX_REASONS]),
    )


def _tar_bytes(sample: BakedSample) -> int:
    return sum(BLOCK + padded(len(data)) for data in sample.members.values())
