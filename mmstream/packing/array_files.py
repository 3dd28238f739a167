"""Arrays of integers as ``.npy`` files that are named by their content.

    units.<first 12 hex digits of its SHA-256>.npy

A file never changes: its name says its content. A JSON file beside it lists the arrays, so the
replacement of that file is the only commit. ``numpy.load`` reads the files too.

A local file is mapped where it lies. A remote one is copied once into the cache of this machine,
compared with its SHA-256, and mapped from there. No request follows.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
import time
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from mmstream.dataset.index_cache import fetch_part, map_cached
from mmstream.dataset.manifest import IndexPart
from mmstream.errors import ManifestError, escaped
from mmstream.storage import Store, map_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\w{1,64})\.([0-9a-f]{12})\.npy")

MAX_HASHED_BYTES = 1 << 30
"""A larger local file is compared with its SHA-256 when it is copied, and not when it is opened:
that would take seconds in each process."""

POLL_S = 0.2
"""Between two looks at a file that another process fetches."""


@dataclass(frozen=True)
class ArrayInfo:
    """What a JSON file says of an array beside it."""

    name: str
    num_bytes: int
    sha256: str


def write_array(store: Store, stem: str, array: npt.NDArray[Any]) -> ArrayInfo:
    """Write an array. Equal arrays give equal files.

    Args:
        store: The folder.
        stem: First word of the file's name, such as "units".
        array: Of integers.

    Raises:
        StorageError: The storage failed after retries.
    """
    header = io.BytesIO()
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    head, body = header.getvalue(), array.reshape(-1).view(np.uint8).data
    digest = hashlib.sha256(head)
    digest.update(body)
    sha256 = digest.hexdigest()
    name = f"{stem}.{sha256[:12]}.npy"
    with store.create(name) as file:
        file.write(head)
        file.write(body)
    return ArrayInfo(name, len(head) + len(body), sha256)


def open_array(
    store: Store, info: ArrayInfo, dtype: str, num_dims: int = 1, *, check: bool = True
) -> npt.NDArray[Any]:
    """Return an array as a map of its file, which is read-only.

    Args:
        store: The folder.
        info: The array.
        dtype: What its type must be, such as "<i8".
        num_dims: How many dimensions it must have.
        check: Compare a local file with its SHA-256, up to `MAX_HASHED_BYTES`. A copy in the cache
            was compared when it came.

    Raises:
        ManifestError: There is no such file, or it is not the array.
        StorageError: The storage failed after retries.
    """
    match = _NAME.fullmatch(info.name)
    if match is None or info.sha256[:12] != match[2] or len(info.sha256) != 64:
        raise ManifestError(f"{store.url}: {escaped(info.name)} is no name of an array")
    path = store.local_path(info.name)
    data: mmap | bytes
    try:
        data = _cached(store, info) if path is None else map_file(path, info.name)
    except FileNotFoundError:
        raise ManifestError(
            f"{store.url_of(info.name)}: is missing, and the file beside it lists it; run "
            "`mmstream plan --overwrite`"
        ) from None
    if len(data) != info.num_bytes:
        raise ManifestError(
            f"{store.url_of(info.name)}: {len(data)} bytes, and the file beside it says "
            f"{info.num_bytes}; write it again"
        )
    if (
        path is not None
        and check
        and info.num_bytes <= MAX_HASHED_BYTES
        and hashlib.sha256(data).hexdigest() != info.sha256
    ):
        raise ManifestError(f"{path}: its bytes are not those of its sha256; write it again")
    return _decoded(data, store.url_of(info.name), dtype, num_dims)


def _decoded(data: mmap | bytes, name: str, dtype: str, num_dims: int) -> npt.NDArray[Any]:
    file = io.BytesIO(data[:4096])
    try:
        np.lib.format.read_magic(file)
        shape, is_fortran, written_dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy evaluates the header as a literal, which raises anything
        raise ManifestError(f"{name}: is no file of numpy; write it again") from None
    size = math.prod(shape) * written_dtype.itemsize
    if (
        written_dtype != np.dtype(dtype)
        or len(shape) != num_dims
        or is_fortran
        or min(shape) < 0
        or size != len(data) - file.tell()
    ):
        raise ManifestError(f"{name}: is another array than the file beside it says")
    return np.frombuffer(data, written_dtype, offset=file.tell()).reshape(shape)


def _cached(store: Store, info: ArrayInfo) -> mmap | bytes:
    """Return the bytes of a remote file, from the cache of this machine where it has one."""
    part = IndexPart(info.name, info.num_bytes, info.sha256, 0, 0)
    try:
        while (data := map_cached(part)) is None:
            if not fetch_part(store, part):  # another process fetches it
                time.sleep(POLL_S)
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.warning(
            "%s: is in the memory of this process, because the cache took no copy: %s",
            store.url_of(info.name),
            error,
        )
        whole = store.read(info.name, info.num_bytes)
        if hashlib.sha256(whole).hexdigest() != info.sha256:
            raise ManifestError(
                f"{store.url_of(info.name)}: its bytes are not those of its sha256; write it again"
            ) from None
        return whole
    return data


def remove_arrays(store: Store, kept: set[str]) -> None:
    """Remove the arrays of a folder that its JSON file does not name any more."""
    for name in store.list():
        if _NAME.fullmatch(name) and name not in kept:
            store.remove(name)
