"""The destination of a baked dataset, before its first shard and after its last one.

    bake.bake_into -> `open_destination` -> `is_finished`, `begin` -> shards -> `finish`

The marker and the fingerprint are written first: they say what is baked, and what continues it. The
manifest commits the dataset; then the reports and the marker are removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mmstream.baking.fingerprint import FINGERPRINT_NAME, fingerprint_of, first_difference
from mmstream.baking.shard import ShardReport
from mmstream.converting.report import REPORTS, report_name
from mmstream.dataset.bad_list import BAD_NAME, write_bad
from mmstream.dataset.checksums import checksums_name
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.files import README_NAME, json_lines, read_json, require_files, write_readme
from mmstream.dataset.index import index_name
from mmstream.dataset.manifest import INDEX_PART_NAME, MANIFEST_NAME, MARKER_NAME, Manifest
from mmstream.dataset.shard_indexes import write_part
from mmstream.decoding.stored import BakedContent
from mmstream.errors import ConfigError, escaped
from mmstream.storage import RemoteStore, Store, open_store
from mmstream.storage.new_file import remove_temporaries
from mmstream.storage.urls import require_no_secret
from mmstream.storage.write_lock import WriteLock
from mmstream.tar.samples import REFUSED_FIELD


def open_destination(dest: str, source: Dataset) -> Store:
    """Return the store of a destination; nothing is read or written.

    Raises:
        ConfigError: It is the source, or a file, or its URL holds a secret.
    """
    require_no_secret(dest)
    store = open_store(dest)
    if _real_folder(store) in map(_real_folder, (source.store, source.index_store)):
        raise ConfigError(f"{store.url}: is the source; name another destination")
    folder = store.local_path("")
    if folder is not None and Path(folder).is_file():
        raise ConfigError(f"{store.url}: is a file, not a folder; name another folder")
    return store


def _real_folder(store: Store) -> str:
    """Return what two names of one folder or prefix have in common."""
    folder = store.local_path("")
    return store.url.rstrip("/") if folder is None else os.path.realpath(folder)


def is_finished(store: Store, settings: dict[str, Any]) -> bool:
    """Tell whether an earlier call wrote the dataset.

    Raises:
        ConfigError: There is something else.
        ManifestError: A file is damaged.
    """
    require_files(store)
    names = store.list().keys()
    if MARKER_NAME in names:
        marker = read_json(store, MARKER_NAME)
        if "bake" not in marker:
            raise _holds_something_else(store)
        _require_same(store, marker["bake"], settings, is_finished=MANIFEST_NAME in names)
        if MANIFEST_NAME not in names:
            return False
        _clean_up(store)  # killed behind its last write
        return True
    if MANIFEST_NAME in names:
        if "bake" not in Manifest.read(store).source or FINGERPRINT_NAME not in names:
            raise _holds_something_else(store)
        saved = read_json(store, FINGERPRINT_NAME).get("settings")
        _require_same(store, saved, settings, is_finished=True)
        return True
    if names:
        raise _holds_something_else(store)
    return False


def _holds_something_else(store: Store) -> ConfigError:
    return ConfigError(f"{store.url}: holds something else; give an empty folder or prefix")


def _require_same(store: Store, saved: Any, present: dict[str, Any], *, is_finished: bool) -> None:
    if difference := first_difference(saved, present):
        content = "a dataset" if is_finished else "an unfinished dataset"
        advice = "Name" if is_finished else "Undo that to finish it, name"
        raise ConfigError(
            f"{store.url}: holds {content} that was baked otherwise: {escaped(difference, 600)}. "
            f"{advice} another destination, or empty this one"
        )


def begin(store: Store, dataset: Dataset, settings: dict[str, Any], command: str) -> None:
    """Write the marker and the fingerprint. Before, remove what killed calls left."""
    _remove_temporary_files(store, dataset)
    if not store.exists(MARKER_NAME):
        store.write(MARKER_NAME, json_lines({"command": command, "bake": settings}))
    content = {"fingerprint": fingerprint_of(settings), "settings": settings}
    store.write(FINGERPRINT_NAME, json_lines(content))


def _remove_temporary_files(store: Store, dataset: Dataset) -> None:
    shards = [shard.name for shard in dataset.manifest.shards]
    names = [
        *(name for shard in shards for name in (shard, index_name(shard), checksums_name(shard))),
        *map(report_name, shards),
        *(MARKER_NAME, MANIFEST_NAME, FINGERPRINT_NAME, BAD_NAME, README_NAME),
    ]
    folder = store.local_path("")
    if folder is not None:
        by_parent: dict[str, list[str]] = {}
        for name in names:
            parent, _, file = name.rpartition("/")
            by_parent.setdefault(parent, []).append(re.escape(file))
        by_parent[""].append(INDEX_PART_NAME.pattern)
        for parent, files in by_parent.items():
            remove_temporaries(Path(folder, parent), "|".join(files))
    if isinstance(store, RemoteStore):
        store.remove_uploads("|".join([*map(re.escape, names), INDEX_PART_NAME.pattern]))


def finish(
    store: Store,
    source: Dataset,
    reports: Sequence[ShardReport],
    content: BakedContent,
    lock: WriteLock,
) -> None:
    """Write the bad list, the index and the manifest, which commits the dataset."""
    fields = {name: file.num_samples for name, file in content.files.items()}
    if content.num_bad:
        fields[REFUSED_FIELD] = content.num_bad
    manifest = Manifest(
        tuple(report.info for report in reports),
        fields=fields,
        source={"by": "mmstream bake", "bake": msgspec.to_builtins(content)},
        checksums="written",
    )
    lock.require()
    write_bad(Dataset(manifest, store), source.bad)
    part = write_part(store, manifest, 0, len(reports) - 1) if reports else None
    manifest = replace(manifest, index_parts=(part,) if part else ())
    write_readme(store)
    store.write(MANIFEST_NAME, manifest.to_bytes())
    _clean_up(store)


def _clean_up(store: Store) -> None:
    """Remove what a finished dataset does not need. The marker goes last."""
    for shard in Manifest.read(store).shards:
        store.remove(report_name(shard.name))
    root = store.local_path(REPORTS)
    if root is not None:
        folders = [path for path in Path(root).rglob("*") if path.is_dir()]
        for folder in [*sorted(folders, reverse=True), Path(root)]:
            with suppress(OSError):  # it holds other files
                folder.rmdir()
    store.remove(MARKER_NAME)
