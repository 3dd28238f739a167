"""What a loader has delivered, in numbers: ``loader.stats``.

The loader and ``limits.py`` count as batches are delivered, in the main process of a rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, fields

from mmstream.storage.transfer_counts import TransferCounts

MAX_DAMAGED = 3
"""So many samples of one shard that do not fit their checksums are more than a chance: a warning
names the shard."""

MAX_WAITS = 1000
"""Waits for batches that are kept for their quantiles."""


@dataclass
class Stats:
    """What a loader has delivered since it was made.

    If a limit stops the run, the batch that it stopped is counted.
    """

    num_steps: int = 0
    num_samples: int = 0
    """Planned samples of this rank, bad and filtered ones included, padding left out."""
    num_bad: int = 0
    num_skipped: int = 0
    """Samples that a user's filter left out."""
    bad: Counter[str] = field(default_factory=Counter)
    """Bad and filtered samples by kind."""
    num_cut_texts: int = 0
    """Delivered texts that `max_length` has cut."""
    num_dropped_parts: int = 0
    """Parts of delivered conversations that their texts lack, with ``undecoded_parts="drop"`` or
    "keep"."""
    num_longer: int = 0
    """Samples of packs that have more tokens than were measured. Those that did not fit count as
    bad, too."""
    num_shorter: int = 0
    """Samples of packs that have fewer tokens than were measured."""
    num_documents: int = 0
    """Documents of delivered batches without padding (`mm.Flat`, `mm.Pack`). Other batches do not
    count here, nor in the next fields."""
    num_tokens: int = 0
    """Tokens of these documents."""
    num_label_tokens: int = 0
    """Tokens of these documents that have a label."""
    num_token_slots: int = 0
    """Tokens that their rows have room for: of packs, ``max_tokens`` of each row that is valid."""
    num_planned_tokens: int = 0
    """Tokens of all samples that were planned for packs, as measured."""
    num_modelled_steps: int = 0
    """Steps of which the cost of each rank was modelled (`mm.Pack(cost=...)`)."""
    total_imbalance: float = 0.0
    """The largest cost of a rank over the mean of all ranks, summed over these steps."""
    num_bytes: int = 0
    """Bytes read from storage."""
    num_requests: int = 0
    """Ranges read from storage."""
    num_wrong_reads: int = 0
    """Samples and indexes that came with bytes unlike their checksums. Each was read again, and
    each of its reads counts."""
    transfers: TransferCounts = field(default_factory=TransferCounts)
    """What the reader process of a rank has counted on remote storage: requests, retries,
    stalls and more."""
    wait_s: float = 0.0
    """Seconds that the consumer has waited for batches."""
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS), repr=False)
    """The last `MAX_WAITS` of these waits, in seconds."""
    consecutive: Counter[str] = field(default_factory=Counter)
    """Bad samples in a row up to now, by source of a mixture; "" for a single dataset."""
    damaged: dict[str, set[int]] = field(default_factory=dict)
    """The first `MAX_DAMAGED` samples of each shard that do not fit their checksums."""

    def __repr__(self) -> str:
        """Leave out what is 0: of most runs, that is most."""
        empty = Stats()
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.repr)
        counted = [f"{name}={v!r}" for name, v in values if v != getattr(empty, name)]
        return f"Stats({', '.join(counted)})"

    @property
    def fill(self) -> float:
        """Tokens of documents, as a share of what their rows have room for; 0 without documents."""
        return self.num_tokens / self.num_token_slots if self.num_token_slots else 0.0

    @property
    def planned_fill(self) -> float:
        """The same as the plan of packs has it; 0 without packs."""
        return self.num_planned_tokens / self.num_token_slots if self.num_token_slots else 0.0

    @property
    def modelled_imbalance(self) -> float:
        """Largest modelled cost of a rank over the mean, as the mean of the steps. 0: unknown."""
        steps = self.num_modelled_steps
        return self.total_imbalance / steps if steps else 0.0

    @property
    def wait_p50_s(self) -> float:
        """Seconds that half of the last `MAX_WAITS` batches were waited for, at most."""
        return _quantile(self.waits, 0.5)

    @property
    def wait_p99_s(self) -> float:
        """Seconds that 99 % of the last `MAX_WAITS` batches were waited for, at most."""
        return _quantile(self.waits, 0.99)

    @property
    def mb_per_s(self) -> float:
        """10^6 bytes a second of remote storage, while requests were under way; else 0."""
        counts = self.transfers
        return counts.num_bytes / 1e6 / counts.busy_s if counts.busy_s else 0.0

    @property
    def num_cache_hit_bytes(self) -> int:
        """Bytes of samples that came from the node cache; `num_bytes` does not count them."""
        return self.transfers.num_cache_hit_bytes

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of samples that were written into the node cache."""
        return self.transfers.num_cached_bytes

    @property
    def cache_hit_fraction(self) -> float:
        """Share of the bytes that came from the node cache; 0 without one."""
        num_bytes = self.num_bytes + self.num_cache_hit_bytes
        return self.num_cache_hit_bytes / num_bytes if num_bytes else 0.0

    def count_wait(self, seconds: float) -> None:
        """Count the wait for a batch."""
        self.wait_s += seconds
        self.waits.append(seconds)


def _quantile(values: Collection[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0
