"""Small files of a dataset's folder: those that say what it is, JSON, and the README.md.

``datasets.load_dataset(FOLDER)`` and the viewer of Hugging Face's Hub read the YAML at the top of
the README.md. Without it they would take indexes and reports for data. Format:
https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec

from mmstream.dataset.bad_list import BAD_NAME
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.dataset.removed import REMOVED_NAME
from mmstream.dataset.shard_indexes import write_part
from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store


def require_files(store: Store) -> None:
    """Refuse a folder where a manifest, a marker, or a list of samples is there but is not a file.

    `Store.list` leaves out what is not a file. The dataset would open as if there were no manifest,
    or no bad samples. Only a name that is not there at all counts as missing.

    Args:
        store: Root of the dataset. An object store holds nothing but objects, and is not asked.

    Raises:
        ManifestError: One of them is a folder, a FIFO, a device, or a link that leads nowhere.
    """
    for name in (MARKER_NAME, MANIFEST_NAME, BAD_NAME, REMOVED_NAME):
        path = store.local_path(name)
        if path is None or not os.path.lexists(path):
            continue
        try:
            store.stat(name)
        except FileNotFoundError:
            if os.path.lexists(path):  # else another process has removed it since
                raise ManifestError(
                    f"{path}: a link that leads nowhere; remove it, or bring its file back"
                ) from None
        except OSError as error:
            reason = error.strerror or str(error).removeprefix(f"{path}: ")
            raise ManifestError(f"{path}: {reason}; remove it, or put the file back") from None


def read_json(store: Store, name: str) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ManifestError: It is not JSON, or no object.
    """
    try:
        return msgspec.json.decode(store.read(name), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{store.url_of(name)}: {error}") from None


def json_lines(value: object) -> bytes:
    """Return a value as JSON for people: a line for each entry.

    Raises:
        ConfigError: A text in it is not UTF-8, such as the name of a file from an old disk.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a name that is not UTF-8 cannot be written down: {escaped(error.object)}; rename "
            "that file or folder, or name a link to it"
        ) from None


README_NAME = "README.md"

_README = """\
---
configs:
- config_name: default
  data_files: "*.tar"
---

Plain WebDataset tars, with indexes and a manifest of mmstream.

- `mmstream.open_dataset(FOLDER)` reads them in any order, and in training.
- `datasets.load_dataset(FOLDER)` and `webdataset` read them as they are.
"""


def write_readme(store: Store) -> None:
    """Write ``README.md`` into a dataset's folder, unless there is one."""
    if not store.exists(README_NAME):
        store.write(README_NAME, _README.encode())


def commit(store: Store, manifest: Manifest) -> None:
    """Write the index in one part, ``README.md``, and last the manifest: it says that all is there.

    Args:
        store: Holds the shards and the files beside them.
        manifest: Names the shards.

    Raises:
        ShardError, StorageError, OSError: As `write_part`.
    """
    part = write_part(store, manifest, 0, len(manifest.shards) - 1)
    write_readme(store)
    index_parts = () if part is None else (part,)
    store.write(MANIFEST_NAME, replace(manifest, index_parts=index_parts).to_bytes())
