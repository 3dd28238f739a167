"""The rows that `tools.bench.loader` compares: for each row a runner and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.bench.corpus import write_corpus, write_large_corpus, write_mixed_corpus

Kind = Literal["mmstream", "peer", "peer with mmstream's decoder", "floor"]

PEERS = {
    "webdataset": "webdataset",
    "energon": "energon",
    "mosaicml-streaming": "mosaicml",
    "litdata": "litdata",
    "HF datasets": "datasets",
}
"""Name in the tables -> environment and runner."""

NATIVE_PEERS = {"NVIDIA DALI": "dali", "SPDL": "spdl"}
"""As `PEERS`, of loaders that decode with threads and libraries of their own."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    runner: str
    """``peers/runners/decoded_RUNNER.py``."""
    kind: Kind
    delivers: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tools.bench.peers.runners.decoded.Settings`."""


@dataclass(frozen=True)
class Table:
    """One table: rows that use the same data."""

    title: str
    rows: tuple[Row, ...]
    num_samples: int
    batch_size: int
    num_rounds: int
    corpus: Literal["500x375", "large", "mixed"] = "500x375"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all rows; a row's own settings come first."""

    def write_corpus(self, folder: Path, photographs: Sequence[Path] = ()) -> None:
        """Write the tars that all rows use, in eight shards.

        Args:
            folder: Where to.
            photographs: Folders of JPEGs, for photographs of mixed sizes.
        """
        per_shard = -(-self.num_samples // 8)
        if self.corpus == "mixed":
            write_mixed_corpus(folder, self.num_samples, photographs, per_shard)
        elif self.corpus == "large":
            write_large_corpus(folder, self.num_samples, per_shard)
        else:
            write_corpus(folder, self.num_samples, per_shard)


def all_loaders(*more: Row) -> tuple[Row, ...]:
    """Return rows of mmstream, of each peer in both forms, and of the bare loops."""
    ours = (
        Row("mmstream", "mmstream", "mmstream", "uint8"),
        Row(
            "mmstream, 2 threads, no worker",
            "mmstream",
            "mmstream",
            "uint8",
            {"num_workers": 0, "num_threads": 2},
        ),
        Row(
            "mmstream, normalised on the host",
            "mmstream",
            "mmstream",
            "float32",
            {"normalize": True},
        ),
    )
    by_map = tuple(
        Row(name, runner, "peer", "float32", {"work": "torchvision"})
        for name, runner in PEERS.items()
    )
    native = (
        Row("NVIDIA DALI", "dali", "peer", "uint8", {"work": "native"}),
        Row(
            "NVIDIA DALI, normalised by DALI",
            "dali",
            "peer",
            "float32",
            {"work": "native", "normalize": True},
        ),
        Row("SPDL", "spdl", "peer", "uint8", {"work": "native"}),
    )
    with_decoder = tuple(
        Row(f"{name} with mmstream's decoder", runner, "peer with mmstream's decoder", "uint8")
        for name, runner in {**PEERS, "SPDL": NATIVE_PEERS["SPDL"]}.items()
    )
    floors = (
        Row("bare loop, mmstream's decoder", "floor", "floor", "nothing"),
        Row(
            "bare loop, simplejpeg and one resize",
            "floor",
            "floor",
            "nothing",
            {"work": "torchvision"},
        ),
    )
    return (*ours, *more, *by_map, *native, *with_decoder, *floors)


def workers_and_threads() -> tuple[Row, ...]:
    """Return rows of mmstream with different numbers of workers and threads."""
    return tuple(
        Row(
            f"{workers} workers x {threads} threads",
            "mmstream",
            "mmstream",
            "uint8",
            {"num_workers": workers, "num_threads": threads},
        )
        for workers in (0, 1, 2, 4)
        for threads in (1, 2, 4)
        if workers * threads <= 4
    )


TABLES = {
    "decoded": Table(
        "photographs of 500x375 (about 48 kB) to 224", all_loaders(), 24000, 64, num_rounds=3
    ),
    "mixed": Table(
        "real photographs of 0.05 to 2 megapixels (about 110 kB) to 224",
        all_loaders(
            Row("mmstream, pictures alone", "mmstream", "mmstream", "uint8", {"has_text": False})
        ),
        16000,
        64,
        num_rounds=3,
        corpus="mixed",
    ),
    "large": Table(
        "images of 2 to 12 megapixels to 224",
        all_loaders(
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
        corpus="large",
        settings={"shuffle_buffer": 64},
    ),
    "curve": Table(
        "mmstream, photographs of 500x375 to 224", workers_and_threads(), 24000, 64, num_rounds=3
    ),
}
