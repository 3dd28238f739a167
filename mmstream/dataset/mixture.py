"""Several datasets as one stream: what a `Pipeline` takes in place of a dataset.

A mixture says which datasets, in which proportions and for how long. ``order/mixture/`` says which
sample comes when. The stages that read see one long list of shards, all sources end to end.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from mmstream.dataset.dataset import Dataset, ShardLocation, read_sample
from mmstream.dataset.keys import parse_address, require_own
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.dataset.open import expand_braces, open_dataset
from mmstream.display.text import count_text
from mmstream.errors import ConfigError, MMStreamError, StateError, escaped
from mmstream.order import Corpus, MixtureOrder, Recipe, Stop
from mmstream.order.mixture.schedule import whole_shares
from mmstream.settings import (
    NonEmptyStr,
    NonNegativeFloat,
    PositiveInt,
    checked,
    refuse_broken,
)
from mmstream.storage import NotAFileError, is_remote, join_url, open_store, split_url
from mmstream.types import Sample, SampleRef

logger = logging.getLogger(__name__)


@checked(
    {
        "sources": "give {name: (mm.open_dataset(...), weight)}, with weights from 0 up",
        "changes": "give {step: {name: weight}}, with steps from 1 up and weights from 0 up",
    }
)
class Mixture:
    """Several datasets as one, in the proportions that weights give.

    Each source has separate epochs, with each sample once. After any number of steps, a source
    has given its share of all samples, to less than two samples in each lane. A warning says how
    many samples two sources share, where they are views of one dataset.

    Args:
        sources: by name, (dataset, weight). Weights are proportions of samples, as whole numbers or
            decimals: 0.1 and 0.9 are exactly 1 and 9 of 10.
        stop: when an epoch of the mixture ends. "first": when the first source has been seen once.
            "all": when all sources have. Give this or `epoch_steps`.
        epoch_steps: steps of an epoch of the mixture.
        changes: weights of all sources that hold from a step of the run on; needs `epoch_steps`. A
            weight may be 0, so a source can come later or end early.

    Raises:
        ConfigError: neither or both of `stop` and `epoch_steps`, or impossible weights or names.
    """

    can_finish_epoch = False  # its sources do not end where its epochs do

    def __init__(
        self,
        sources: Mapping[NonEmptyStr, tuple[Dataset, NonNegativeFloat]],
        *,
        stop: Stop | None = None,
        epoch_steps: PositiveInt | None = None,
        changes: Mapping[PositiveInt, Mapping[str, NonNegativeFloat]] | None = None,
    ) -> None:
        refuse_broken(
            (not sources, "Mixture: name at least one source, {name: (dataset, weight)}"),
            (
                (stop is None) == (epoch_steps is None),
                'Mixture: say when an epoch ends: stop="first", stop="all" or epoch_steps=n',
            ),
            (
                changes and epoch_steps is None,
                "Mixture: weights that change need epoch_steps=n",
            ),
        )
        self.datasets = {name: dataset for name, (dataset, _) in sources.items()}
        self.epoch_steps: int | Stop = stop or epoch_steps or 0
        self.weights = {0: {name: weight for name, (_, weight) in sources.items()}}
        for step, weights in (changes or {}).items():
            if weights.keys() != self.datasets.keys():
                raise ConfigError(
                    f"Mixture: changes at step {step} name {sorted(weights)}, the sources are "
                    f"{sorted(self.datasets)}"
                )
            self.weights[step] = dict(weights)
        self._names = list(self.datasets)
        counts = [dataset.num_shards for dataset in self.datasets.values()]
        self._first_shards = np.cumsum([0, *counts])
        for (name, dataset), (other, of_other) in combinations(self.datasets.items(), 2):
            if num_shared := dataset.num_shared(of_other):
                logger.warning(
                    "Mixture: sources %r and %r share %s",
                    *(name, other, count_text(num_shared, "sample")),
                )

    @classmethod
    @checked()
    def open(cls, path: str | os.PathLike[str], *, allow_foreign_urls: bool = False) -> Mixture:
        """Open the mixture that a file describes.

        Sources keep the order of the file, and logs number their shards in this order. Add a new
        source at the end: then the numbers of the old ones stay.

        Args:
            path: Of the file: a local path, or a URL such as ``s3://bucket/mixture.json``. Relative
                URLs in the file are relative to its folder.
            allow_foreign_urls: Sources may lie anywhere, and so may their tars (see
                `open_dataset`). By default, the sources of a remote file must be in its bucket.
                Those of a local file may be local folders or in object stores, but not behind
                ``http://``.

        Raises:
            ConfigError: The file is malformed; the message names the key.
            ManifestError, FileNotFoundError, StorageError: A source cannot be opened, for the
                reasons of `open_dataset`.
        """
        return _open_file(path, allow_foreign_urls)

    def __len__(self) -> int:
        """Samples of all sources together."""
        return sum(map(len, self.datasets.values()))

    def __repr__(self) -> str:
        sources = [
            f"{name} ({len(dataset):,} samples, weight {float(self.weights[0][name]):g})"
            for name, dataset in self.datasets.items()
        ]
        changes = f", weights change at step {', '.join(map(str, list(self.weights)[1:]))}"
        return f"<Mixture: {', '.join(sources)}{changes * (len(self.weights) > 1)}>"

    @property
    def num_shards(self) -> int:
        """Shards of all sources."""
        return int(self._first_shards[-1])

    @property
    def fractions(self) -> dict[int, dict[str, float]]:
        """Part of all samples that each source gives, by the step from which it holds."""
        return {
            step: {name: weight / (sum(weights.values()) or 1) for name, weight in weights.items()}
            for step, weights in self.weights.items()
        }

    @property
    def epoch_text(self) -> str:
        """An epoch, in words."""
        if isinstance(self.epoch_steps, int):
            return f"an epoch is {self.epoch_steps:,} steps"
        which = {"first": "the first", "all": "the last"}[self.epoch_steps]
        return f"an epoch ends when {which} source has been seen once"

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The corpus of each source, from which the order is made.

        A source goes on over the epochs of the mixture, and has no point at which it could be
        planned again. So what was taken down is planned, and other samples take its rows.
        """
        return {name: dataset.corpus.before_takedowns for name, dataset in self.datasets.items()}

    def locate(self, shard: int) -> ShardLocation:
        """Return the source of a shard, its dataset, and its position there."""
        number = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        name = self._names[number]
        return ShardLocation(name, self.datasets[name], shard - int(self._first_shards[number]))

    def name_of(self, shard: int) -> str:
        """Return ``source/shard`` of a shard."""
        name, dataset, local_shard = self.locate(shard)
        return f"{name}/{dataset.name_of(local_shard)}"

    @checked()
    def find(self, text: str) -> Sample:
        """Return the sample that a line of a log names, as ``source/shard[index]``.

        Raises:
            ConfigError: the text names no sample, or none of this mixture.
            SampleError, ShardError, StorageError: it cannot be read.
        """
        return read_sample(self, *self.ref_of(text))

    def ref_of(self, text: str) -> SampleRef:
        """Return (shard, index) of the sample that a line of a log names; errors as `find`."""
        shards = {self.name_of(shard): shard for shard in range(self.num_shards)}
        counts = np.concatenate([dataset.counts for dataset in self.datasets.values()])
        shard, index = parse_address(text, shards, counts)
        _, dataset, own = self.locate(shard)
        if (own, index) not in dataset.removed:
            require_own(text, self.name_of(shard), (own, index), dataset.shards)
        return shard, index

    def plan_order(self, *, drop_last: bool = True, **settings: Any) -> MixtureOrder:
        """Return the order of the mixture. No step of it is partial, so `drop_last` has no effect.

        Raises:
            ConfigError: impossible settings.
        """
        del drop_last
        return MixtureOrder(
            Recipe.from_weights(
                self.corpora, self.weights, epoch_steps=self.epoch_steps, **settings
            )
        )

    def order_from_identity(self, identity: Mapping[str, Any]) -> MixtureOrder:
        """Return the order that a saved state names. Only its datasets count; it knows the weights.

        Raises:
            StateError: the state belongs to a single dataset or to other sources.
        """
        if "sources" not in identity:
            raise StateError("this state is of one dataset: give that")
        return MixtureOrder(Recipe.from_identity(identity, self.corpora))


# -- the JSON file of a mixture --------------------------------------------------------------------
#
#     {
#       "sources": {
#         "captions": {"url": "captions", "weight": 0.7},
#         "chats":    {"url": "s3://bucket/chats", "weight": 0.25},
#         "rare":     {"url": "../rare", "weight": 0.05}
#       },
#       "epoch_steps": 1000,
#       "changes": {"5000": {"captions": 0.5, "chats": 0.4, "rare": 0.1}}
#     }
#
# Instead of ``epoch_steps`` a file may say ``"stop": "first"`` or ``"stop": "all"``. See `Mixture`
# for what they mean.

Weight: TypeAlias = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]


OBJECT_STORES = frozenset({"s3", "gs", "gcs", "az", "abfs", "memory"})
"""Schemes that a local mixture file may name."""

MAX_FILE_BYTES = 16 << 20
"""Largest mixture file."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sources: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]
    stop: Stop | None = None
    epoch_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    changes: dict[int, dict[str, Any]] = {}


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    weight: Weight


def open_data(
    name: str | os.PathLike[str], *, allow_foreign_urls: bool = False
) -> Dataset | Mixture:
    """Open what a command was given: a mixture file, which ends in ``.json``, or a dataset."""
    if os.fspath(name).endswith(".json"):
        return Mixture.open(name, allow_foreign_urls=allow_foreign_urls)
    return open_dataset(name, allow_foreign_urls=allow_foreign_urls)


def _open_file(path: str | os.PathLike[str], allow_foreign_urls: bool) -> Mixture:
    """Open the mixture that a file describes; arguments and errors are those of `Mixture.open`."""
    folder, name = split_url(open_store(path).url)
    url = join_url(folder, name)
    if name == MANIFEST_NAME:
        raise ConfigError(f"{url}: a dataset's manifest, no mixture's file: name its folder")
    try:
        file = _parse(open_store(folder).read(name, max_bytes=MAX_FILE_BYTES), url)
    except FileNotFoundError:
        raise FileNotFoundError(f"{url}: no such file of a mixture") from None
    except NotAFileError as error:
        raise ConfigError(
            f"{error}; a mixture is a file, and mm.open_dataset opens a dataset's folder"
        ) from None
    sources = {
        source_name: _convert(_Source, value, url, "sources", source_name)
        for source_name, value in file.sources.items()
    }
    changes = {
        step: {
            source_name: _convert(Weight, value, url, "changes", str(step), source_name)
            for source_name, value in weights.items()
        }
        for step, weights in file.changes.items()
    }
    addresses = {source_name: f"{url}: sources.{escaped(source_name)}" for source_name in sources}
    source_urls: dict[str, str] = {}
    for source_name, source in sources.items():  # all of them before the first source is opened
        with _prefix_errors(f"{addresses[source_name]}.url"):
            source_url = source_urls[source_name] = _resolve(source.url, folder)
            if not allow_foreign_urls and _is_foreign(source_url, folder):
                raise ConfigError(
                    f"{escaped(source_url)} lies elsewhere than the file; if you trust that, open "
                    "it with allow_foreign_urls=True"
                )
    datasets: dict[str, tuple[Dataset, float]] = {}
    for source_name, source in sources.items():
        with _prefix_errors(addresses[source_name]):
            dataset = open_dataset(source_urls[source_name], allow_foreign_urls=allow_foreign_urls)
            datasets[source_name] = dataset, source.weight
    with _prefix_errors(url):
        mixture = Mixture(datasets, stop=file.stop, epoch_steps=file.epoch_steps, changes=changes)
    # The order would refuse impossible weights later, when the name of the file is not known.
    for step, weights in mixture.weights.items():
        with _prefix_errors(f"{url}: {f'changes.{step}' if step else 'sources'}"):
            whole_shares(list(weights.values()))
    return mixture


@contextmanager
def _prefix_errors(address: str) -> Iterator[None]:
    """Say where in the file stands what an error is about."""
    try:
        yield
    except (MMStreamError, FileNotFoundError) as error:
        raise type(error)(f"{address}: {error}") from error
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{address}: {error.strerror or error}") from error


def _parse(data: bytes, url: str) -> _File:
    try:
        value = json.loads(
            data, object_pairs_hook=_object_of_unique_keys, parse_constant=_refuse_constant
        )
        json.dumps(value, ensure_ascii=False).encode()  # refuses half of a surrogate pair
    except RecursionError:
        raise ConfigError(f"{url}: not JSON that a mixture has: too deep") from None
    except ValueError as error:
        raise ConfigError(f"{url}: not JSON: {error}") from None
    file: _File = _convert(_File, value, url)
    return file


def _object_of_unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. A repeated key is an error: the first value would be lost silently."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} stands there twice")
        values[key] = value
    return values


def _refuse_constant(text: str) -> float:
    """Refuse NaN and Infinity, which Python accepts in JSON."""
    raise ValueError(f"{text} is not a number")


def _convert(kind: Any, value: Any, url: str, *keys: str) -> Any:
    """Return a value of the file as its type. Errors name the file and the key."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        # "Expected `str`, got `int` - at `$.url`" -> reason and path "url"
        reason, _, location = str(error).partition(" - at ")
        path = location.replace("`key` in ", "").strip("`").removeprefix("$").removeprefix(".")
        key = ".".join((*keys, path) if path else keys)
        raise ConfigError(f"{url}: {key}{': ' * bool(key)}{reason}") from None


def _is_foreign(source_url: str, folder: str) -> bool:
    """Tell whether a source lies where a stranger's mixture file must not lead.

    Examples: a file in ``s3://bucket/mixtures`` may name sources in ``s3://bucket``. A local file
    may name local folders and ``s3://bucket/chats``.
    """
    urls = expand_braces(source_url)
    if is_remote(folder):
        scheme, _, path = folder.partition("://")
        bucket = f"{scheme}://{path.partition('/')[0]}/"
        return any(not f"{url}/".startswith(bucket) for url in urls)
    return any(is_remote(url) and url.partition("://")[0] not in OBJECT_STORES for url in urls)


def _resolve(source_url: str, folder: str) -> str:
    """Return the URL of a source. A relative one is relative to the folder of the mixture file.

    Example: in ``s3://bucket/mixtures/a.json``, ``../rare`` is ``s3://bucket/rare``.
    """
    if is_remote(source_url) or source_url.startswith(("/", "~", "file://")):
        return source_url
    if not source_url:
        raise ConfigError("is empty")
    if not is_remote(folder):
        return posixpath.normpath(join_url(folder, source_url))
    scheme, _, folder_path = folder.partition("://")
    path = posixpath.normpath(join_url(folder_path, source_url))
    if path.partition("/")[0] != folder_path.partition("/")[0]:
        raise ConfigError(f"{source_url} leads out of the bucket; write the whole URL")
    return f"{scheme}://{path}"
