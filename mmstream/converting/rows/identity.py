"""What decides the split of a row: a group, an id, or the content.

a source of rows -> IDENTITY of each row -> plan: which split it goes into
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.errors import ConfigError, escaped

__all__ = ["ID_KEYS", "hash_ids", "identity_of"]

logger = logging.getLogger(__name__)

ID_KEYS = ("id", "image_id")
"""The keys that identify a row, the first one first."""


def identity_of(value: Any, field: str | None = None) -> tuple[bytes, bool]:
    """Return the identity of a parsed row, and whether it is the value of `field`.

    The number 5 and the text "5" are the same. Without `field` and without an id, the identity is
    the row itself, as compact JSON.

    Examples:
        >>> identity_of({"id": 5, "speaker": "ann"}), identity_of({"id": "5"}, "speaker")
        ((b'5', False), (b'5', False))
        >>> identity_of({"id": 5, "speaker": "ann"}, "speaker")
        (b'ann', True)
    """
    if isinstance(value, dict):
        for key in (field, *ID_KEYS) if field else ID_KEYS:
            row_id = value.get(key)
            if row_id is not None:
                is_text = isinstance(row_id, str)
                return row_id.encode() if is_text else msgspec.json.encode(row_id), key == field
    return msgspec.json.encode(value), False


def hash_ids(
    identities: Iterable[tuple[bytes, bool]], num_rows: int, field: str | None
) -> npt.NDArray[np.uint64]:
    """Return uint64 [num_rows]: the first 64 bits of the SHA-256 of each identity.

    Raises:
        ConfigError: No row has the field.
    """
    hashes = np.empty(num_rows, dtype="<u8")
    num_grouped = 0
    for number, (identity, is_grouped) in enumerate(identities):
        hashes[number] = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little")
        num_grouped += is_grouped
    if field is not None and not num_grouped:
        raise ConfigError(f"split_by={escaped(field)!r}: no row has this key")
    if field is not None and num_grouped < num_rows:
        logger.warning(
            "split_by=%r: %d of %d rows lack this key; each of them is split by its own id",
            escaped(field),
            num_rows - num_grouped,
            num_rows,
        )
    return hashes
