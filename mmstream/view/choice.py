"""The samples that a condition chooses, and counts of the values of their columns.

The columns of a large corpus take too long for one page. So a page counts for a short time, in
shards that are spread over the corpus, and says of how many samples the counts are. Behind it, a
thread counts on, so that a later page has the counts of all.
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
from mmstream.errors import ConfigError, MMStreamError
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

MAX_BACKGROUND_SECONDS = 300.0
"""So long after a page the thread counts on."""

TURN_SECONDS, BETWEEN_SECONDS = 0.2, 0.02
"""The thread counts so long, and then waits, so that a page gets its turn."""

NUM_THREADS = 4
"""Shards whose columns are read side by side. More of them take turns, and more memory."""

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
    names: list[str] = field(default_factory=list)
    """The columns of the dataset, once they are known."""
    counts: dict[str, Counter[Any]] = field(default_factory=dict)
    num_counted: int = 0
    problem: str = ""
    """Why there are none."""
    thread: threading.Thread | None = None
    """Counts behind the pages."""
    goes_on: bool = False
    """False: the thread ends soon."""

    def __post_init__(self) -> None:
        shards = range(self.dataset.num_shards)
        self._shards = random.Random(0).sample(shards, len(shards))
        self._lock = threading.Lock()

    def grow(self) -> dict[str, dict[Any, int]]:
        """Count in more shards for `MAX_SECONDS`, and let a thread count on.

        Returns:
            What was counted so far: {column: {value: samples}}.

        Raises:
            ShardError, StorageError: Columns cannot be read.
        """
        with self._lock:
            try:
                self._begin()
            except ConfigError as error:
                self.problem = str(error)
                return {}
        self._count_until(time.monotonic() + MAX_SECONDS)
        with self._lock:
            self.goes_on = self.is_unfinished
            if self.goes_on and (self.thread is None or not self.thread.is_alive()):
                self.thread = threading.Thread(target=self._count_on, daemon=True)
                self.thread.start()
            return {name: dict(counts) for name, counts in self.counts.items()}

    @property
    def is_unfinished(self) -> bool:
        """Whether there are shards left to count in."""
        return bool(self._shards and self.counts)

    def _count_on(self) -> None:
        """Count until all is counted, another choice is looked at, or it takes too long."""
        until = time.monotonic() + MAX_BACKGROUND_SECONDS
        with suppress(MMStreamError, OSError):  # the next page meets the same error, and shows it
            while self.goes_on and self.is_unfinished and time.monotonic() < until:
                self._count_until(time.monotonic() + TURN_SECONDS)
                time.sleep(BETWEEN_SECONDS)

    def _count_until(self, until: float) -> None:
        """Count in some shards, and in more of them until a time of the monotonic clock."""
        with self._lock, ThreadPoolExecutor(NUM_THREADS) as pool:
            while self.is_unfinished:
                # The first one shows which columns have many values; the others leave them out.
                shards = self._shards[: NUM_THREADS if self.num_counted else 1]
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
        if not self.names:
            self.names = column_names(self.dataset)
            in_json = [name for name in self.names if name.startswith("json.")]
            self.counts = {name: Counter() for name in (*FACET_COLUMNS, *in_json)}

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
        self._looked_at: Facets | None = None

    def of(self, source: str, select: str, where: str) -> Choice:
        """Return what a stored selection and a condition choose of a source."""
        try:
            return self._chosen(source, select, where)
        except (ConfigError, FileNotFoundError) as error:  # not kept: it may be written soon
            own = self._content.source(source)
            return Choice(own.name, own.dataset, select, where, problem=str(error))

    def facets(self, source: str, select: str, where: str) -> Facets:
        """Return the counts of what is chosen, as far as they are known."""
        facets = self._facets(self.of(source, select, where).dataset)
        if self._looked_at is not None and self._looked_at is not facets:
            self._looked_at.goes_on = False
        self._looked_at = facets
        return facets

    def _choose(self, source: str, select: str, where: str) -> Choice:
        own = self._content.source(source)
        view = own.dataset.select(select) if select else own.dataset
        if not where:
            return Choice(own.name, view, select, where)
        explanation, selection = explained(view, rule_of(where), progress=False)
        clauses = (*explanation.clauses, explanation.together)
        return Choice(own.name, view.with_selection(selection), select, where, clauses)
