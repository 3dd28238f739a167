"""Mixture files: a `Mixture` that people and commands can name, beside `opening` for datasets.

    {
      "sources": {
        "captions": {"url": "captions", "weight": 0.7},
        "chats":    {"url": "s3://bucket/chats", "weight": 0.25},
        "rare":     {"url": "../rare", "weight": 0.05}
      },
      "epoch_steps": 1000,
      "changes": {"5000": {"captions": 0.5, "chats": 0.4, "rare": 0.1}}
    }

``"stop": "first"`` or ``"all"`` stands in the place of ``epoch_steps``, as `Mixture` says.
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
from mmstream.dataset.open import open_dataset
from mmstream.errors import ConfigError, MMStreamError
from mmstream.order import Stop
from mmstream.order.mixture.schedule import whole_shares
from mmstream.storage import is_remote, join_url, open_store, split_url

__all__ = ["open_data", "open_mixture"]

Weight: TypeAlias = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sources: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]
    stop: Stop | None = None
    epoch_steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    changes: dict[int, dict[str, Any]] = {}


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    weight: Weight


def open_data(name: str | os.PathLike[str]) -> Dataset | Mixture:
    """Open what a command is given: a mixture's file, which ends in ``.json``, or a dataset."""
    return open_mixture(name) if os.fspath(name).endswith(".json") else open_dataset(name)


def open_mixture(path: str | os.PathLike[str]) -> Mixture:
    """Open the mixture that a file describes.

    Sources are in the file's order, and their shards are numbered so in logs: add a source at the
    end, and the numbers of old ones stay.

    Args:
        path: of the file, local or ``s3://``. URLs in it that are relative are so to its folder.

    Raises:
        ConfigError: the file is malformed; names the key.
        ManifestError, FileNotFoundError, StorageError: as `open_dataset`, of a source.
    """
    folder, name = split_url(open_store(path).url)
    url = join_url(folder, name)
    if name == MANIFEST_NAME:
        raise ConfigError(f"{url}: a dataset's manifest, no mixture's file: name its folder")
    try:
        file = _parse(open_store(folder).read(name), url)
    except FileNotFoundError:
        raise FileNotFoundError(f"{url}: no such file of a mixture") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{url}: a folder, no mixture's file; mm.open_dataset opens a dataset's folder"
        ) from None
    sources: dict[str, _Source] = {
        key: _as(_Source, value, url, "sources", key) for key, value in file.sources.items()
    }
    changes: dict[int, dict[str, float]] = {
        step: {
            key: _as(Weight, value, url, "changes", str(step), key) for key, value in now.items()
        }
        for step, now in file.changes.items()
    }
    urls = {
        key: _resolve(source.url, folder, f"{url}: sources.{key}.url")
        for key, source in sources.items()
    }
    opened = {
        key: (_open(urls[key], f"{url}: sources.{key}"), source.weight)
        for key, source in sources.items()
    }
    with _named(url):
        made = Mixture(opened, stop=file.stop, epoch_steps=file.epoch_steps, changes=changes)
    for step, now in made.weights.items():  # here, where the file has a name, and not later
        with _named(f"{url}: {f'changes.{step}' if step else 'sources'}"):
            whole_shares(list(now.values()))
    return made


def _open(source: str, where: str) -> Dataset:
    """Open a source; whatever is wrong with it also says where in the mixture's file it stands."""
    try:
        return open_dataset(source)
    except (MMStreamError, FileNotFoundError) as error:
        raise type(error)(f"{where}: {error}") from error


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _parse(data: bytes, url: str) -> _File:
    try:
        value = json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ConfigError(f"{url}: not JSON that a mixture has: too deep") from None
    except ValueError as error:
        raise ConfigError(f"{url}: not JSON: {error}") from None
    file: _File = _as(_File, value, url)
    return file


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; a key that stands twice would hide what it said first."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {key!r} stands there twice")
        made[key] = value
    return made


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _as(kind: Any, value: Any, url: str, *keys: str) -> Any:
    """Return a value of the file as its type; the error names the file and the key."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        inside = place.replace("`key` in ", "").strip("`").removeprefix("$").removeprefix(".")
        key = ".".join((*keys, inside) if inside else keys)
        raise ConfigError(f"{url}: {key}{': ' * bool(key)}{reason}") from None


def _resolve(url: str, folder: str, key: str) -> str:
    """Return a source's URL, that of the file's folder in front where it is relative."""
    if is_remote(url) or url.startswith(("/", "~", "file://")):
        return url
    if not url:
        raise ConfigError(f"{key}: is empty")
    if not is_remote(folder):
        return posixpath.normpath(join_url(folder, url))
    scheme, _, place = folder.partition("://")
    found = posixpath.normpath(join_url(place, url))
    if found.partition("/")[0] != place.partition("/")[0]:
        raise ConfigError(f"{key}: {url} leads out of the bucket; write the whole URL")
    return f"{scheme}://{found}"
