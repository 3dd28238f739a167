"""The samples that a condition chooses, and counts of the values of their columns.

The columns of a large corpus take too long for one page. So counts grow from page to page: each
reads shards for a short time, spread over the corpus, and says of how many samples the counts are.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from mmstream.dataset.columns import column_names, read_columns
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.select import ClauseCounts, explained, rule_of
from mmstream.errors import ConfigError
from mmstream.view.content import Content

FACET_COLUMNS = (
    *("kind", "codec", "license", "split", "num_media", "rotation", "fps"),
    *("sample_rate", "num_channels"),
)
"""Columns of the sidecar whose values may be few. So may be those of ``json``."""

MAX_VALUES = 20
"""A column with more values has no counts."""

MAX_SECONDS = 0.6
"""What the counts of a page may take."""

NUM_THREADS = 8
"""Shards whose columns are read side by side."""

MAX_CHOICES = 16
"""Choices that are kept."""


class Choice(NamedTuple):
    """The samples that a page shows."""

    source: str
    dataset: Dataset
    """The dataset, or a view of it."""
    select: str
    where: str
    clauses: tuple[ClauseCounts, ...] = ()
    """What each clause of `where` leaves."""
    problem: str = ""
    """Why `select` or `where` chooses nothing; all samples are shown then."""

    @property
    def query(self) -> dict[str, str]:
        """What leads to this choice in an address."""
        query = {"source": self.source, "select": self.select, "where": self.where}
        return {name: value for name, value in query.items() if value}


@dataclass
class Facets:
    """Counts of the values of few-valued columns, over a growing part of a dataset."""

    dataset: Dataset
    counts: dict[str, Counter[Any]] = field(default_factory=dict)
    num_counted: int = 0
    problem: str = ""
    """Why there are none."""

    def __post_init__(self) -> None:
        shards = range(self.dataset.num_shards)
        self._shards = random.Random(0).sample(shards, len(shards))
        self._lock = threading.Lock()
        self._names: list[str] | None = None

    def grow(self) -> None:
        """Count in more shards, for `MAX_SECONDS`.

        Raises:
            ShardError, StorageError: Columns cannot be read.
        """
        with self._lock, ThreadPoolExecutor(NUM_THREADS) as pool:
            try:
                self._begin()
            except ConfigError as error:
                self.problem = str(error)
                return
            until = time.monotonic() + MAX_SECONDS
            while self._shards and self.counts:
                shards = self._shards[:NUM_THREADS]
                results = list(pool.map(self._counts_of, shards))
                del self._shards[: len(shards)]
                for shard, counts in zip(shards, results, strict=True):
                    self.num_counted += int(self.dataset.shown_counts[shard])
                    for name in list(self.counts):
                        self._add(name, counts.get(name))
                if time.monotonic() > until:
                    break

    def _begin(self) -> None:
        """Find which columns there are, once."""
        if self._names is None:
            names = column_names(self.dataset)
            in_json = [name for name in names if name.startswith("json.")]
            self._names = [*FACET_COLUMNS, *in_json]
            self.counts = {name: Counter() for name in self._names}

    def _add(self, name: str, counts: Counter[Any] | None) -> None:
        """Add the counts of a shard. None: the values there are of several types."""
        if counts is not None:
            self.counts[name] += counts
        if counts is None or len(self.counts[name]) > MAX_VALUES:
            del self.counts[name]

    def _counts_of(self, shard: int) -> dict[str, Counter[Any]]:
        """Return the counts of a shard: {column: {value: samples}}."""
        import pyarrow as pa

        indexes = pa.array(self.dataset.indexes_of(shard))
        columns = {}
        names = list(self.counts)
        try:
            columns = read_columns(self.dataset, shard, names)
        except ConfigError:
            for name in names:
                with suppress(ConfigError):
                    columns |= read_columns(self.dataset, shard, [name])
        return {
            name: Counter(
                {
                    entry["values"]: entry["counts"]
                    for entry in column.take(indexes).value_counts().to_pylist()
                    if entry["values"] is not None
                }
            )
            for name, column in columns.items()
        }


class Choices:
    """The choices of a server, of which the last ones are kept."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._chosen = lru_cache(MAX_CHOICES)(self._choose)
        self._facets = lru_cache(MAX_CHOICES)(Facets)

    def of(self, source: str, select: str, where: str) -> Choice:
        """Return what a stored selection and a condition choose of a source."""
        try:
            return self._chosen(source, select, where)
        except (ConfigError, FileNotFoundError) as error:  # not kept: it may be written soon
            own = self._content.source(source)
            return Choice(own.name, own.dataset, select, where, problem=str(error))

    def facets(self, source: str, select: str, where: str) -> Facets:
        """Return the counts of what is chosen, as far as they are known."""
        return self._facets(self.of(source, select, where).dataset)

    def _choose(self, source: str, select: str, where: str) -> Choice:
        own = self._content.source(source)
        view = own.dataset.select(select) if select else own.dataset
        if not where:
            return Choice(own.name, view, select, where)
        explanation, selection = explained(view, rule_of(where), progress=False)
        clauses = (*explanation.clauses, explanation.together)
        return Choice(own.name, view.with_selection(selection), select, where, clauses)
