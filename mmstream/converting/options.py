"""The options of a conversion that change its output.

    OPTIONS + rows -> plan -> shards

The plan of a conversion saves them. Whatever only changes how the work is done, such as the number
of workers, is not among them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mmstream.converting.formats.row_format import RowFormat
from mmstream.converting.media.options import MediaOptions
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import refuse_bools

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The caller's options that change the output. Impossible ones raise ConfigError."""

    samples_per_shard: int
    format: RowFormat
    captions: str
    shuffle_seed: int | None
    splits: tuple[tuple[str, float], ...] | None
    media: MediaOptions = field(default_factory=MediaOptions)
    sidecar: bool = True
    split_by: str | None = None
    group_spans: bool = False
    duplicates: str | None = None
    near_duplicates: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        refuse_bools(samples_per_shard=self.samples_per_shard, shuffle_seed=self.shuffle_seed)
        if self.samples_per_shard < 1:
            raise ConfigError(f"samples_per_shard={self.samples_per_shard}: must be 1 or more")
        if self.captions not in ("all", "each"):
            raise ConfigError(f"captions={self.captions!r}: must be 'all' or 'each'")
        for name in ("duplicates", "near_duplicates"):
            action = getattr(self, name)
            if action not in (None, "report", "drop"):
                raise ConfigError(f"{name}={action!r}: must be 'report' or 'drop'")
            if action is not None and not self.sidecar:
                raise ConfigError(f"{name}={action!r}: needs the sidecars; do not switch them off")
        if self.splits is not None:
            _check_splits(self.splits)
        elif self.split_by is not None:
            raise ConfigError(f"split_by={self.split_by!r}: needs splits=, such as train=0.98")


def _check_splits(splits: tuple[tuple[str, float], ...]) -> None:
    for name, fraction in splits:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == "reports":
            raise ConfigError(
                f"splits: {name!r} cannot name a folder; use letters, digits, _ and -"
            )
        refuse_bools(splits=[fraction])
        if not 0 < fraction <= 1:
            raise ConfigError(f"splits: {name}={fraction} is not a fraction above 0 and up to 1")
    if not splits:
        raise ConfigError(
            "splits is empty: name at least one split, or leave it out to write one dataset"
        )
    total = sum(fraction for _, fraction in splits)
    if abs(total - 1) > 1e-9:
        raise ConfigError(f"splits: the fractions sum to {total:g}; they must sum to 1")
