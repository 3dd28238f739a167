"""Step 3 of a conversion: rows with drafts -> rows with the bytes of their media.

rows -> formats -> LOAD -> shard
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mmstream.converting.draft import Draft, Media, RowError
from mmstream.converting.media.access import MediaAccess
from mmstream.converting.media.check import checked
from mmstream.converting.media.files import read_media
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.rows.source import Row

__all__ = ["load_rows"]


def load_rows(
    drafts: Iterable[tuple[Row, Draft | RowError]], access: MediaAccess, options: MediaOptions
) -> Iterator[tuple[Row, Draft | RowError, list[Media]]]:
    """Yield each row with its draft and its media, in order.

    Nothing is lost: a row that cannot be used is yielded with its `RowError` and without media.

    Args:
        drafts: Rows, each with its draft, or with the error that it has already.
        access: What may be read for them.
        options: What is asked of the files, and how images are changed.

    Raises:
        StorageError: The disk failed. That is not the row's fault, so the conversion stops.
    """
    for row, draft in drafts:
        if isinstance(draft, RowError):
            yield row, draft, []
            continue
        try:
            media = [
                checked(medium, ref.path, options)
                for medium, ref in zip(
                    read_media(draft.media, access.root), draft.media, strict=True
                )
            ]
        except RowError as error:
            yield row, error, []
        else:
            yield row, draft, media
