"""What all pages show: the data, a pipeline, its order, a run, and the samples that are chosen.

Each is opened when a page first needs it. Where that fails, the page says why, and the next one
tries again: a store may come back.

The columns of a large corpus take too long for one page. So a page counts for a short time, in
shards that are spread over the corpus, and says of how many samples the counts are. Behind it, a
thread counts on, so that a later page has the counts of all.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mmstream.dataset.columns import column_names, read_columns
from mmstream.dataset.dataset import Dataset, numbered_datasets, read_sample
from mmstream.dataset.select import ClauseCounts, explained, rule_of
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, MMStreamError, escaped, where
from mmstream.order import AnyOrder
from mmstream.order.corpus import differing_keys
from mmstream.types import Sample

MAX_CACHED_SAMPLES = 2
"""Samples that are kept: a browser asks for a recording piece by piece."""


class Source(NamedTuple):
    """A dataset, or one of a mixture."""

    name: str
    first_shard: int
    """Position of its first shard among those of the mixture."""
    dataset: Dataset


class Content:
    """What the pages show.

    Args:
        url: Of the data, for people.
        open_data: Returns the Dataset or Mixture.
        open_pipeline: Returns the Pipeline of the data. None: there is none.
        open_order: Returns the order of the run. None: there is none.
        run: Folder of metrics and quarantine files of a run. None: there is none.
        others: Other datasets, of which pages show what they share with this one.
        path: Where the pages of its samples lie, such as ``("against", 0)`` of another dataset.
    """

    def __init__(
        self,
        url: str,
        open_data: Callable[[], Any],
        open_pipeline: Callable[[Any], Any] | None = None,
        open_order: Callable[[Any], AnyOrder] | None = None,
        run: Path | None = None,
        *,
        others: Sequence[Content] = (),
        path: tuple[str | int, ...] = (),
    ) -> None:
        self.url, self.run, self.others, self.path = url, run, others, path
        self._open_data = open_data
        self._open_pipeline = open_pipeline
        self._open_order = open_order
        self.read = lru_cache(MAX_CACHED_SAMPLES)(self._read)
        self._chosen = lru_cache(MAX_CHOICES)(self._choose)
        self._facets = lru_cache(MAX_CHOICES)(Facets)
        self._looked_at: Facets | None = None

    @cached_property
    def data(self) -> Any:
        """The Dataset or Mixture."""
        return self._open_data()

    @cached_property
    def pipeline(self) -> Any:
        """The Pipeline. None: there is none."""
        return None if self._open_pipeline is None else self._open_pipeline(self.data)

    @cached_property
    def order(self) -> AnyOrder:
        """The order of the pipeline, or else that of the run.

        Raises:
            ConfigError: There is neither.
        """
        if self.pipeline is None:
            return self.run_order
        order: AnyOrder = self.pipeline.order
        return order

    @cached_property
    def run_order(self) -> AnyOrder:
        """The order of the run's newest checkpoint.

        Raises:
            ConfigError: There is none.
        """
        if self._open_order is None:
            raise ConfigError(
                "the order is not known: start `mmstream view` with --pipeline module:object, or "
                "with --run FOLDER of a run that has saved a checkpoint"
            )
        return self._open_order(self.data)

    def unlike_run(self) -> str:
        """Return how the run's order differs from that of the pipeline; "" where it does not."""
        if self.pipeline is None or self._open_order is None:
            return ""
        try:
            of_run = self.run_order.identity()
        except (MMStreamError, OSError):
            return ""  # a run without a checkpoint has no order to compare
        names = ", ".join(differing_keys(of_run, self.order.identity()))
        return names and f"this is not the order of the run, which differs in {names}"

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The datasets by their names in a mixture. One dataset has the name ""."""
        return {
            name: Source(name, first_shard, dataset)
            for first_shard, dataset in numbered_datasets(self.data)
            for name in (self.data.locate(first_shard).source,)
        }

    def source(self, name: str) -> Source:
        """Return a source by its name, or the first one where no name is given.

        Raises:
            ConfigError: There is none.
        """
        if not self.sources:
            raise ConfigError("the dataset has no shards")
        first = next(iter(self.sources))
        if (name or first) not in self.sources:
            raise ConfigError(f"{escaped(name)}: no such source of the mixture")
        return self.sources[name or first]

    def other(self, number: int) -> Content:
        """Return another dataset by its number.

        Raises:
            ConfigError: There is none.
        """
        if number >= len(self.others):
            raise ConfigError(f"dataset {number}: start `mmstream view` with --against URL")
        return self.others[number]

    def locate(self, shard: int, index: int) -> tuple[Dataset, int]:
        """Return the dataset of a sample, and its shard there.

        Raises:
            ConfigError: There is none at this place.
        """
        if not 0 <= shard < self.data.num_shards:
            num_shards = count_text(self.data.num_shards, "shard")
            raise ConfigError(f"shard {shard}: the data has {num_shards}")
        _, dataset, own_shard = self.data.locate(shard)
        if not 0 <= index < dataset.counts[own_shard]:
            raise ConfigError(f"{where(self.data.name_of(shard), index)}: no such sample")
        return dataset, own_shard

    def _read(self, shard: int, index: int) -> Sample:
        """Return a raw sample; raises what `locate` and `read_sample` raise."""
        self.locate(shard, index)
        return read_sample(self.data, shard, index)

    def choice(self, source: str, select: str, where: str) -> Choice:
        """Return what a stored selection and a condition choose of a source."""
        try:
            return self._chosen(source, select, where)
        except (ConfigError, FileNotFoundError) as error:  # not kept: it may be written soon
            own = self.source(source)
            return Choice(own.name, own.dataset, select, where, problem=str(error))

    def facets(self, source: str, select: str, where: str) -> Facets:
        """Return the counts of what is chosen, as far as they are known."""
        facets = self._facets(self.choice(source, select, where).dataset)
        if self._looked_at is not None and self._looked_at is not facets:
            self._looked_at.goes_on = False
        self._looked_at = facets
        return facets

    def _choose(self, source: str, select: str, where: str) -> Choice:
        own = self.source(source)
        view = own.dataset.select(select) if select else own.dataset
        if not where:
            return Choice(own.name, view, select, where)
        explanation, selection = explained(view, rule_of(where), progress=False)
        clauses = (*explanation.clauses, explanation.together)
        return Choice(own.name, view.with_selection(selection), select, where, clauses)


# -- the samples that a condition chooses, and counts of the values of their columns ---------------

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
            ConfigError: There are no columns.
            ShardError, StorageError: They cannot be read.
        """
        with self._lock:
            if not self.names:
                self.names = column_names(self.dataset)
                in_json = [name for name in self.names if name.startswith("json.")]
                self.counts = {name: Counter() for name in (*FACET_COLUMNS, *in_json)}
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
