"""Loaders with a node cache on a real S3 server: a later run reads from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from tests.helpers.corpora import write_corpus
from tests.helpers.wait import wait_until

pytestmark = pytest.mark.s3

COUNTS = [200, 200]


def epoch_of(loader: mm.Loader) -> list[Any]:
    return [(batch["__key__"], batch["jpg"]) for batch in loader]


@pytest.mark.slow
def test_a_later_run_reads_what_two_ranks_of_the_node_have_read_from_the_disk(
    s3: str, tmp_path: Path
) -> None:
    bucket = s3.removeprefix("s3://").partition("/")[0]
    local = write_corpus(tmp_path / "local", COUNTS, checksums=True)
    url = write_corpus(f"s3://{bucket}/node-cache", COUNTS, checksums=True)

    def loader_of(url: str, rank: int, **settings: Any) -> mm.Loader:
        pipeline = mm.Pipeline(
            mm.open_dataset(url),
            global_batch_size=8,
            window=16,
            grid=(1, 2),
            reshuffle="lanes",
            **settings,
        )
        return mm.Loader(pipeline, world=mm.World(rank, 2))

    # By default nothing is written to a disk that is nearly full, as a test machine's may be.
    cache = {"cache_dir": str(tmp_path / "cache"), "max_cache_bytes": 10_000_000}
    half = sum(path.stat().st_size for path in Path(local).glob("*.tar")) / 2

    def cached_bytes() -> int:
        """What lies in the cache, whose reader may be ended before it has written all."""
        files = [path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 40]
        return sum(path.stat().st_blocks * 512 for path in files)

    for rank in range(2):
        first = loader_of(url, rank, **cache)
        epoch_of(first)
        assert first.stats.num_cached_bytes > 0
        wait_until(lambda least=0.9 * (rank + 1) * half: cached_bytes() >= least)
        state = first.state_dict()
        first.close()
        later = loader_of(url, rank, **cache)
        later.load_state_dict(state)
        expected = loader_of(local, rank)
        expected.load_state_dict(state)
        assert epoch_of(later) == epoch_of(expected)
        later.close()
        assert later.stats.cache_hit_fraction > 0.8
