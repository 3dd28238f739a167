"""Loading media for rows, as a conversion does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmstream.converting.draft import Draft, Media, MediaRef, RowError
from mmstream.converting.media.load import load_rows
from mmstream.converting.media.references import MediaAccess
from mmstream.converting.options import MediaOptions
from mmstream.converting.rows.records import Row


def load_media(
    refs: Sequence[MediaRef], root: str | Path | None, options: MediaOptions | None = None, **access
) -> list[Media]:
    """Return the media of one row. Raises the error of the row."""
    if root is not None and "://" not in str(root):
        root = os.path.realpath(root)
    drafts = [(Row(0, "rows.jsonl", 1, {}), Draft({}, tuple(refs)))]
    [(_, draft, media)] = load_rows(
        drafts,
        MediaAccess(None if root is None else str(root), **access),
        options or MediaOptions(),
    )
    if isinstance(draft, RowError):
        raise draft
    return media
