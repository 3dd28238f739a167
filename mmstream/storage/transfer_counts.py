"""Storage: what the transfers of a reader process count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Requests, bytes and troubles of a span of time.

    The counts of two spans can be added. ``num_bytes / busy_s`` is the mean rate in bytes/s.

    Examples:
        >>> from mmstream.storage.transfer_counts import TransferCounts
        >>> total = TransferCounts(num_requests=3, num_bytes=300) + TransferCounts(num_requests=1)
        >>> total.num_requests, total.num_bytes
        (4, 300)
    """

    num_requests: int = 0
    """Requests for ranges of shards that were sent, repeated ones included."""
    num_index_requests: int = 0
    """Requests for indexes and their parts that were sent."""
    num_bytes: int = 0
    """Bytes that arrived."""
    num_retries: int = 0
    """Requests that were sent because an earlier one had failed, had stopped or was late."""
    num_stalls: int = 0
    """Requests that were given up because they were late or stood still."""
    num_throttled: int = 0
    """Answers that asked for fewer requests (429, 503)."""
    num_cache_hit_bytes: int = 0
    """Bytes of samples that came from the node cache, and not from storage."""
    num_cached_bytes: int = 0
    """Bytes of samples that were written into the node cache."""
    num_cache_dropped_bytes: int = 0
    """Bytes that were not, because the disk could not write them as fast as they arrived."""
    num_cache_damaged: int = 0
    """Files of the node cache with wrong bytes. They were removed, and read from storage."""
    busy_s: float = 0.0
    """Seconds in which at least one request was under way."""
    request_s: float = 0.0
    """Seconds that requests were under way, all of them together. ``request_s / busy_s`` is the
    mean number of requests in flight."""

    def __add__(self, other: TransferCounts) -> TransferCounts:
        # `astuple` copies deeply, which takes eight times as long.
        return TransferCounts(
            *(getattr(self, name) + getattr(other, name) for name in self.__slots__)
        )
