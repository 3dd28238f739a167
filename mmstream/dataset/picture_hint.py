"""A hint for those who name a folder of pictures where tars are needed.

Place in the flow: before it. `open_dataset` and `index_tars` end their errors with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mmstream.media_types import IMAGE_EXTENSIONS

MAX_ENTRIES = 1000
"""Entries of a folder that are looked at."""
MAX_FOLDERS = 10
"""Folders in the folder that are looked into."""


def picture_hint(folder: str | Path | None) -> str:
    """Return what to do with a folder of pictures, as the end of a message.

    Args:
        folder: A local folder. None: there is none.

    Returns:
        An empty text where neither the folder nor those in it hold pictures.
    """
    if folder is None or not _has_pictures(Path(folder)):
        return ""
    return (
        "; it holds pictures: docs/classification.md writes tars of a folder for each class, and "
        "docs/your-own-data.md of pictures with captions"
    )


def _has_pictures(folder: Path) -> bool:
    entries = list(_entries(folder))
    folders = islice((Path(entry.path) for entry in entries if entry.is_dir()), MAX_FOLDERS)
    return any(map(_is_picture, entries)) or any(
        _is_picture(entry) for each in folders for entry in _entries(each)
    )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from islice(entries, MAX_ENTRIES)
    except OSError:  # no folder, or no permission: the error that this hint ends says so
        return


def _is_picture(entry: os.DirEntry[str]) -> bool:
    return Path(entry.name).suffix.lower().removeprefix(".") in IMAGE_EXTENSIONS
