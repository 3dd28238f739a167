"""The rows that `tools.bench.storage` compares: for each a runner, its environment and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Row", "all_rows"]

Kind = Literal["mmstream", "client", "peer"]


@dataclass(frozen=True)
class Row:
    """One line of the tables."""

    name: str
    kind: Kind
    runner: str
    """``peers/runners/stored_RUNNER.py``."""
    environment: str | None = None
    """Of `tools.bench.peers.environments`. None: the running interpreter."""
    words: tuple[str, ...] = ()
    """Of the command line, before the command."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `tools.bench.peers.runners.stored.Settings`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the runner alone."""
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
        Row("obstore", "client", "client", "litdata", ("obstore",)),
        Row("boto3", "client", "client", "litdata", ("boto3",)),
    ]
    for checkout in (None, *checkouts):
        version = "" if checkout is None else f" at {checkout.name}"
        settings: tuple[tuple[str, dict[str, Any]], ...] = (
            ("", {}),
            (", no worker", {"num_workers": 0}),
            (", decoded", {"decoded": True}),
            (", decoded, from local disk", {"decoded": True, "local": "yes"}),
            (", from local disk", {"local": "yes"}),
        )
        rows += [
            Row(f"mmstream{version}{words}", "mmstream", "mmstream", None, (), values, {}, checkout)
            for words, values in settings
        ]
    rows += [
        Row("webdataset, curl", "peer", "webdataset", "webdataset"),
        Row(
            "webdataset, s3torchconnector",
            "peer",
            "webdataset",
            "s3torchconnector",
            arguments={"connector": True},
        ),
        Row("HF datasets", "peer", "datasets", "datasets"),
        Row("litdata", "peer", "litdata", "litdata"),
        Row("mosaicml-streaming", "peer", "mosaicml", "mosaicml"),
    ]
    return {row.name: row for row in rows}
