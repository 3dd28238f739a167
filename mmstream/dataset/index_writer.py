"""Writes parts of an index from the files beside the tars, ``NAME.tar.idx`` and ``.crc32c``."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from mmstream.dataset.index_part import PartWriter, tar_checksum
from mmstream.dataset.manifest import MANIFEST_NAME, IndexPart, Manifest
from mmstream.dataset.readme import write_readme
from mmstream.dataset.shard_indexes import ShardIndexes
from mmstream.storage import Store

MAX_SHARDS_AT_ONCE = 128
"""Shards whose files are read side by side: 4 MB where shards have 5,000 samples."""


def commit(store: Store, manifest: Manifest) -> None:
    """Write the index in one part, ``README.md``, and last the manifest: it says that all is there.

    Args:
        store: Holds the shards and the files beside them.
        manifest: Names the shards.

    Raises:
        ShardError, StorageError, OSError: As `write_part`.
    """
    part = write_part(store, manifest, 0, len(manifest.shards) - 1)
    write_readme(store)
    parts = () if part is None else (part,)
    store.write(MANIFEST_NAME, replace(manifest, index_parts=parts).to_bytes())


def write_part(
    store: Store, manifest: Manifest, first_shard: int, last_shard: int
) -> IndexPart | None:
    """Write a part of the index for some shards in a row. Equal shards give an equal part.

    Args:
        store: Holds the files, and gets the part.
        manifest: Names the shards. Its parts are not looked at.
        first_shard: Position of the first shard.
        last_shard: Position of the last one.

    Returns:
        What the manifest must say of the part. None without shards.

    Raises:
        ShardError: The index of a shard is lost or damaged.
        StorageError: The storage failed after retries.
        OSError: The disk with the temporary file failed.
    """
    indexes = ShardIndexes(store, replace(manifest, index_parts=()), manifest.checksums is not None)
    with tempfile.TemporaryFile(prefix="mmstream-") as columns_file:
        writer = PartWriter(columns_file, first_shard)
        for shard in range(first_shard, last_shard + 1):
            if (shard - first_shard) % MAX_SHARDS_AT_ONCE == 0:
                stop = min(shard + MAX_SHARDS_AT_ONCE, last_shard + 1)
                indexes.load(range(shard, stop))
            columns, num_bytes = indexes.columns(shard), manifest.shards[shard].num_bytes
            checksum = None
            if manifest.checksums == "written" and columns.checksums is not None:
                checksum = tar_checksum(columns.offsets(), columns.checksums, num_bytes)
            writer.add(num_bytes, columns, checksum)
        return writer.write(store)
