"""A dataset that exists on paper only: so many samples of one size, to plan a run over it."""

from __future__ import annotations

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.index_part import HAS_CHECKSUMS, ROW, columns_size, table_size
from mmstream.dataset.manifest import IndexPart, Manifest, ShardInfo, index_part_name
from mmstream.errors import ConfigError
from mmstream.storage import open_store
from mmstream.tar.header import BLOCK

__all__ = ["equal_samples"]

SHARD_BYTES = 500_000_000
"""Bytes of a shard, as docs/sizing.md advises."""

MAX_SHARD_SAMPLES = 50_000


def equal_samples(num_samples: int, mean_bytes: int) -> Dataset:
    """Return a dataset without bytes. Its shards have about 500 MB, and at most 50,000 samples.

    Args:
        num_samples: samples of the corpus.
        mean_bytes: bytes of each sample in its tar, with headers and padding.

    Raises:
        ConfigError: samples of less than the two blocks that each file of a tar takes.

    Examples:
        >>> equal_samples(10_000_000, 110_000)
        <Dataset s3://planned/corpus: 10,000,000 samples, 2,202 shards, 1,100,800.0 MB>
    """
    if mean_bytes < 2 * BLOCK:
        raise ConfigError(
            f"mean_bytes {mean_bytes}: a sample in a tar has {2 * BLOCK} bytes or more"
        )
    sample_bytes = round(mean_bytes / BLOCK) * BLOCK
    of_shard = max(1, min(MAX_SHARD_SAMPLES, SHARD_BYTES // sample_bytes))
    num_full, rest = divmod(num_samples, of_shard)
    counts = [of_shard] * num_full + [rest] * (rest > 0)
    shards = tuple(
        ShardInfo(f"shard-{number:06d}.tar", count, count * sample_bytes)
        for number, count in enumerate(counts)
    )
    table = np.zeros(len(counts), dtype=ROW)
    table["num_samples"], table["flags"] = counts, HAS_CHECKSUMS
    index_bytes = table_size(len(counts)) + sum(map(columns_size, table))
    sha256 = "0" * 64
    part = IndexPart(index_part_name(sha256), index_bytes, sha256, 0, len(counts) - 1)
    manifest = Manifest(shards, checksums="written", index_parts=(part,))
    return Dataset(manifest, open_store("s3://planned/corpus"))
