"""The rows that `tools.bench.storage` compares: for each a runner, its environment and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Kind", "Row", "all_rows"]

Kind = Literal["mmstream", "client", "peer"]


@dataclass(frozen=True)
class Row:
    """One line of the tables."""

    name: str
    kind: Kind
    runner: str
    """Its module in `tools.bench.peers.runners`, without ``stored_``."""
    environment: str | None = None
    """Of `tools.bench.peers.environments`. None: the running interpreter."""
    words: tuple[str, ...] = ()
    """Of the command line, before the command."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `tools.bench.peers.runners.stored.Settings`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the runner alone."""
    limits: dict[str, float] = field(default_factory=dict)
    """mmstream only: other numbers in `mmstream.storage.transfer_limits.TransferLimits`."""
    note: str = ""
    """How it reads, with the settings that are not its defaults."""
    checkout: Path | None = None
    """Folder with another version of mmstream. None: this one."""

    @property
    def prefix(self) -> str:
        """Where its objects lie in the bucket: rows that need the same have the same."""
        if self.runner in ("client", "webdataset", "datasets"):
            return "tars"
        version = "" if self.checkout is None else f"-{self.checkout.name}"
        return f"{self.runner}{version}"


def all_rows(checkouts: list[Path]) -> dict[str, Row]:
    """Return all rows by name.

    Args:
        checkouts: Folders with other versions of mmstream, each of which gets its own rows.
    """
    rows = [
        *(_raw("obstore", number) for number in (64, 128)),
        _raw("boto3", 64),
    ]
    for checkout in (None, *checkouts):
        version = "" if checkout is None else f" at {checkout.name}"
        rows += [
            Row(
                f"mmstream{version}{words}",
                "mmstream",
                "mmstream",
                settings=settings,
                checkout=checkout,
                note="defaults" if settings.get("num_workers") is None else "no worker",
            )
            for words, settings in OWN_SETTINGS.items()
        ]
    rows += [
        Row(
            f"mmstream, {number} in flight",
            "mmstream",
            "mmstream",
            limits=dict.fromkeys(("start_in_flight", "min_in_flight", "max_in_flight"), number),
            note=f"always {number} requests in flight",
        )
        for number in (32, 64, 128, 256)
    ]
    return {row.name: row for row in [*rows, *PEERS]}


OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", no worker": {"num_workers": 0},
    ", decoded": {"decoded": True},
    ", decoded, from local disk": {"decoded": True, "local": "yes"},
    ", from local disk": {"local": "yes"},
}

SHARD_SHUFFLE = "a buffer of 1,000 samples a worker"

PEERS = (
    Row(
        "webdataset, curl",
        "peer",
        "webdataset",
        "webdataset",
        note=f"pipe:curl, shardshuffle=100, {SHARD_SHUFFLE}",
    ),
    Row(
        "webdataset, curl, 8 workers",
        "peer",
        "webdataset",
        "webdataset",
        settings={"num_workers": 8},
        note="the same with 8 workers",
    ),
    Row(
        "webdataset, s3torchconnector",
        "peer",
        "webdataset",
        "s3torchconnector",
        arguments={"connector": True},
        note="the same two workers, each shard a stream of S3Client.get_object",
    ),
    Row(
        "HF datasets",
        "peer",
        "datasets",
        "datasets",
        note=f'load_dataset("webdataset", data_files="s3://.../*.tar", streaming=True), '
        f"{SHARD_SHUFFLE}; s3fs was made to accept an argument of datasets",
    ),
    Row(
        "HF datasets, http",
        "peer",
        "datasets",
        "datasets",
        arguments={"http": True},
        note="the same from the public URL of each shard",
    ),
    Row(
        "litdata",
        "peer",
        "litdata",
        "litdata",
        note="its format, chunk_bytes=64MB, max_cache_size=8GB",
    ),
    Row(
        "litdata, chunks decoded as a whole",
        "peer",
        "litdata",
        "litdata",
        arguments={"batch_decode": "all"},
        note='the same, batch_decode="all" (else it reads the chunk again for each sample)',
    ),
    Row(
        "mosaicml-streaming",
        "peer",
        "mosaicml",
        "mosaicml",
        note="its format, shards of 64 MiB",
    ),
    Row(
        "mosaicml-streaming, small blocks",
        "peer",
        "mosaicml",
        "mosaicml",
        arguments={"shuffle_block_size": 8192, "predownload": 4096},
        note="the same, shuffle_block_size=8192 (16 shards), predownload=4096",
    ),
    Row(
        "energon",
        "peer",
        "energon",
        "energon",
        note=f"msc:// with the S3 provider, {SHARD_SHUFFLE}, max_samples_per_sequence=100",
    ),
    Row(
        "energon, client's cache",
        "peer",
        "energon",
        "energon",
        arguments={"cache_line_size": "16M"},
        note="the same, with the cache of the Multi-Storage Client on disk: 8 GB, lines of 16 MB, "
        "versions not checked",
    ),
    Row(
        "energon, from local disk",
        "peer",
        "energon",
        "energon",
        settings={"local": "yes"},
        note="the same from a folder",
    ),
)


def _raw(name: str, num_connections: int) -> Row:
    words = "" if num_connections == 64 else f", {num_connections} in flight"
    return Row(
        f"{name}{words}",
        "client",
        "client",
        "litdata",
        (name,),
        settings={"num_connections": num_connections},
        note=f"ranges of 4 MiB anywhere, {num_connections} in flight, no samples",
    )
