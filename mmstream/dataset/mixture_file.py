"""Mixture files: JSON that describes a `Mixture`, so that people and commands can name it.

    {
      "sources": {
        "captions": {"url": "captions", "weight": 0.7},
        "chats":    {"url": "s3://bucket/chats", "weight": 0.25},
        "rare":     {"url": "../rare", "weight": 0.05}
      },
      "epoch_steps": 1000,
      "changes": {"5000": {"captions": 0.5, "chats": 0.4, "rare": 0.1}}
    }

Instead of ``epoch_steps`` a file may say ``"stop": "first"`` or ``"stop": "all"``. See `Mixture`
for what they mean.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import msgspec

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import MANIFEST_NAME
from mmstream.dataset.mixture import Mixture
from mmstream.dataset.open import expand_braces, open_dataset
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.order import Stop
from mmstream.order.mixture.schedule import whole_shares
from mmstream.storage import NotAFileError, is_remote, join_url, open_store, split_url
from mmstream.wrong_arguments import checked

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
    is_mixture = os.fspath(name).endswith(".json")
    open_it = open_mixture if is_mixture else open_dataset
    return open_it(name, allow_foreign_urls=allow_foreign_urls)


@checked()
def open_mixture(path: str | os.PathLike[str], *, allow_foreign_urls: bool = False) -> Mixture:
    """Open the mixture that a file describes.

    Sources keep the order of the file, and logs number their shards in this order. Add a new source
    at the end: then the numbers of the old ones stay.

    Args:
        path: Of the file: a local path, or a URL such as ``s3://bucket/mixture.json``. Relative
            URLs in the file are relative to its folder.
        allow_foreign_urls: Sources may lie anywhere, and so may their tars (see `open_dataset`).
            By default, the sources of a remote file lie in its bucket. Those of a local file lie in
            local folders or in object stores, but not behind ``http://``.

    Raises:
        ConfigError: The file is malformed; the message names the key.
        ManifestError, FileNotFoundError, StorageError: A source cannot be opened, for the reasons
            of `open_dataset`.
    """
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
    sources: dict[str, _Source] = {
        source_name: _convert(_Source, value, url, "sources", source_name)
        for source_name, value in file.sources.items()
    }
    changes: dict[int, dict[str, float]] = {
        step: {
            source_name: _convert(Weight, value, url, "changes", str(step), source_name)
            for source_name, value in weights.items()
        }
        for step, weights in file.changes.items()
    }
    # All URLs are checked before the first source is opened.
    source_urls = {
        source_name: _resolve(source.url, folder, f"{url}: sources.{escaped(source_name)}.url")
        for source_name, source in sources.items()
    }
    for source_name, source_url in source_urls.items():
        address = f"{url}: sources.{escaped(source_name)}.url"
        with _prefix_errors(address):
            is_foreign = _is_foreign(source_url, folder)
        if is_foreign and not allow_foreign_urls:
            raise ConfigError(
                f"{address}: {escaped(source_url)} lies elsewhere than the file; if you trust "
                "that, open it with allow_foreign_urls=True"
            )
    datasets = {
        source_name: (
            _open(
                source_urls[source_name],
                f"{url}: sources.{escaped(source_name)}",
                allow_foreign_urls,
            ),
            source.weight,
        )
        for source_name, source in sources.items()
    }
    with _prefix_errors(url):
        mixture = Mixture(datasets, stop=file.stop, epoch_steps=file.epoch_steps, changes=changes)
    # The order would refuse impossible weights later, when the name of the file is not known.
    for step, weights in mixture.weights.items():
        with _prefix_errors(f"{url}: {f'changes.{step}' if step else 'sources'}"):
            whole_shares(list(weights.values()))
    return mixture


def _open(source_url: str, address: str, allow_foreign_urls: bool) -> Dataset:
    """Open a source. Every error also says where in the mixture file the source is named."""
    try:
        return open_dataset(source_url, allow_foreign_urls=allow_foreign_urls)
    except (MMStreamError, FileNotFoundError) as error:
        raise type(error)(f"{address}: {error}") from error
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{address}: {error.strerror or error}") from error


@contextmanager
def _prefix_errors(address: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{address}: {error}") from None


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
    raise ValueError(f"{text} is no number")


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


def _resolve(source_url: str, folder: str, address: str) -> str:
    """Return the URL of a source. A relative one is relative to the folder of the mixture file.

    Example: in ``s3://bucket/mixtures/a.json``, ``../rare`` is ``s3://bucket/rare``.
    """
    if is_remote(source_url) or source_url.startswith(("/", "~", "file://")):
        return source_url
    if not source_url:
        raise ConfigError(f"{address}: is empty")
    if not is_remote(folder):
        return posixpath.normpath(join_url(folder, source_url))
    scheme, _, folder_path = folder.partition("://")
    path = posixpath.normpath(join_url(folder_path, source_url))
    if path.partition("/")[0] != folder_path.partition("/")[0]:
        raise ConfigError(f"{address}: {source_url} leads out of the bucket; write the whole URL")
    return f"{scheme}://{path}"
