"""Values of Python and Arrow -> what JSON knows, and bytes. Everything else is an error of its row.

    iterables, Parquet -> VALUES -> formats

NaN and missing values of pandas are null. Times are text, as ISO 8601 writes them. NumPy's numbers
and arrays are numbers and lists. A picture of Pillow becomes ``{"bytes": ..., "path": ...}``: its
file's own bytes as long as nobody has touched the picture, otherwise PNG, which loses nothing.
"""

from __future__ import annotations

import datetime
import decimal
import io
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mmstream.converting.draft import RowError
from mmstream.decoding.fields import MAX_JSON_DEPTH

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["plain", "plain_row", "without_nulls"]

_MAX_INTEGER = 1 << 63
_IMAGE_KEYS = ("image", "images", "img", "photo", "picture")
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


def plain_row(row: Any) -> Any:
    """Return a row as JSON values and bytes, or the `RowError` that says which of them is none."""
    try:
        return plain(row, "row")
    except RowError as error:
        return error


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a value as JSON values and bytes.

    Args:
        value: Any object.
        name: Its name in messages.
        depth: Lists and dicts around it.

    Raises:
        RowError: It is no such value, such as a set, or nested too deeply.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if depth > MAX_JSON_DEPTH:
        raise RowError(f"{name}: nested too deeply")
    if isinstance(value, dict | Mapping):
        return {_key(key, name): plain(item, str(key), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic):
        return plain(_listed(value, name), name, depth + 1)
    for kinds, convert in _CONVERTERS:
        if isinstance(value, kinds):
            return convert(value, name)
    if _is_picture(value):
        return _picture(value, name)
    if type(value).__name__ in ("NAType", "NaTType"):  # what pandas has for missing values
        return None
    raise RowError(f"{name}: a {type(value).__name__} is no JSON value, bytes or picture")


def _listed(value: np.ndarray[Any, Any] | np.generic, name: str) -> Any:
    """Return an array as lists, or a number of NumPy as Python's. An image is no list."""
    if isinstance(value, np.ndarray):
        key = name.partition("[")[0].lower()
        is_image = value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] in (1, 3, 4)
        if is_image or (key in _IMAGE_KEYS and value.ndim > 1 and value.dtype.kind in "uif"):
            raise RowError(
                f"{name}: a NumPy array of pixels; pass PIL.Image.fromarray(array), or the bytes "
                "of an image file"
            )
    return value.tolist()


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys that are null.

    A table has every column in every row, so a null there says that the row lacks the key. In lists
    a null stays.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise RowError(f"{name}: the key {key!r} is no text")
    return key


def _integer(value: int, name: str) -> int:
    if not -_MAX_INTEGER <= value < 2 * _MAX_INTEGER:
        raise RowError(f"{name}: an integer of more than 64 bits")
    return int(value)


def _time(value: Any, name: str) -> str | None:
    del name
    return None if value != value else str(value.isoformat())


def _is_picture(value: Any) -> bool:
    """Tell whether a value is a picture of Pillow. Who has one has imported Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _picture(image: Image.Image, name: str) -> dict[str, Any]:
    path = getattr(image, "filename", "") or ""
    data = _original_bytes(image)
    if data is None:
        if image.mode not in _PNG_MODES:
            raise RowError(
                f"{name}: a picture in mode {image.mode}, which PNG cannot hold; convert it, or "
                "pass the bytes of its file"
            )
        buffer = io.BytesIO()
        exif = image.getexif()
        image.save(buffer, "PNG", **({"exif": exif} if exif else {}))
        data = buffer.getvalue()
    return {"bytes": data, "path": os.path.basename(os.fsdecode(path)) or None}  # noqa: PTH119


def _original_bytes(image: Image.Image) -> bytes | None:
    """Return the bytes of a picture's file. None: it is loaded, so it may have been changed."""
    file = getattr(image, "fp", None)
    if file is None or not getattr(image, "tile", None):
        return None
    try:
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, bytes) else None


def _finite(value: float, name: str) -> float | None:
    del name
    return float(value) if math.isfinite(value) else None


_CONVERTERS: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
    (int, _integer),
    (float, _finite),
    (bytes, lambda value, _: bytes(value)),
    ((bytearray, memoryview), lambda value, _: bytes(value)),
    ((datetime.datetime, datetime.date, datetime.time), _time),
    (datetime.timedelta, lambda value, _: value.total_seconds()),
    (decimal.Decimal, lambda value, name: _finite(float(value), name)),
    (uuid.UUID, lambda value, _: str(value)),
    (os.PathLike, lambda value, _: os.fspath(value)),
)
