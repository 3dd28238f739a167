"""The files that say what a dataset is: they are read, or there are none."""

from __future__ import annotations

import os

from mmstream.dataset.bad_list import BAD_NAME
from mmstream.dataset.manifest import MANIFEST_NAME, MARKER_NAME
from mmstream.errors import ManifestError
from mmstream.storage import Store


def require_files(store: Store) -> None:
    """Refuse a folder where a manifest, a bad list or a marker is there but is no file.

    `Store.list` leaves out what is no file. The dataset would open as if there were no manifest, or
    no bad samples. Only a name that is not there at all counts as missing.

    Args:
        store: Root of the dataset. An object store holds nothing but objects, and is not asked.

    Raises:
        ManifestError: One of them is a folder, a FIFO, a device, or a link that leads nowhere.
    """
    for name in (MARKER_NAME, MANIFEST_NAME, BAD_NAME):
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
