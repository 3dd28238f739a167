"""What `tools.bench.loader` compares: the rows of its tables, each a runner and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.bench.corpus import write_corpus, write_large_corpus

Kind = Literal["mmstream", "peer", "peer with mmstream's decoder", "floor"]

PEERS = {
    "webdataset": "webdataset",
    "energon": "energon",
    "mosaicml-streaming": "mosaicml",
    "litdata": "litdata",
    "HF datasets": "datasets",
}
"""Name in the tables -> environment and runner."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    runner: str
    """``peers/runners/decoded_RUNNER.py``."""
    kind: Kind
    delivers: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `tools.bench.peers.runners.decoded.Settings`."""


@dataclass(frozen=True)
class Table:
    """One table: its rows, all on the same data."""

    title: str
    rows: tuple[Row, ...]
    num_samples: int
    batch_size: int
    num_rounds: int
    large: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """Of all rows."""

    def write_corpus(self, folder: Path) -> None:
        """Write the tars that all rows start from: eight shards."""
        write = write_large_corpus if self.large else write_corpus
        write(folder, self.num_samples, samples_per_shard=-(-self.num_samples // 8))


def rows_of_all(*more: Row) -> tuple[Row, ...]:
    """Return mmstream, the bare loops, and each peer in both forms."""
    ours = (
        Row("mmstream", "mmstream", "mmstream", "uint8"),
        Row("mmstream, 2 threads, no worker", "mmstream", "mmstream", "uint8",
            {"num_workers": 0, "num_threads": 2}),
        Row("mmstream, normalised on the host", "mmstream", "mmstream", "float32",
            {"normalize": True}),
    )  # fmt: skip
    peers = tuple(
        Row(name, runner, "peer", "float32", {"work": "torchvision"})
        for name, runner in PEERS.items()
    )
    with_decoder = tuple(
        Row(f"{name} with mmstream's decoder", runner, "peer with mmstream's decoder", "uint8")
        for name, runner in PEERS.items()
    )
    floors = (
        Row("bare loop, mmstream's decoder", "floor", "floor", "nothing"),
        Row("bare loop, simplejpeg and one resize", "floor", "floor", "nothing",
            {"work": "torchvision"}),
    )  # fmt: skip
    return (*ours, *more, *peers, *with_decoder, *floors)


def rows_of_curve() -> tuple[Row, ...]:
    """Return mmstream with workers x threads."""
    return tuple(
        Row(f"{workers} workers x {threads} threads", "mmstream", "mmstream", "uint8",
            {"num_workers": workers, "num_threads": threads})
        for workers in (0, 1, 2, 4)
        for threads in (1, 2, 4)
        if workers * threads <= 4
    )  # fmt: skip


TABLES = {
    "decoded": Table(
        "photographs of 500x375 (about 48 kB) to 224", rows_of_all(), 24000, 64, num_rounds=3
    ),
    "large": Table(
        "pictures of 2 to 12 megapixels to 224",
        rows_of_all(
            Row(
                "mmstream, scaled_decoding=False",
                "mmstream",
                "mmstream",
                "uint8",
                {"scaled_decoding": False},
            )
        ),
        1280,
        16,
        num_rounds=2,
        large=True,
        settings={"shuffle_buffer": 64},
    ),
    "curve": Table(
        "mmstream, photographs of 500x375 to 224", rows_of_curve(), 24000, 64, num_rounds=3
    ),
}
