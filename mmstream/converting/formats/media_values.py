"""The media of a row, in every form that corpora give them. Part of step 2 of a conversion.

    "a.jpg"                                     a path or a URL
    "data:image/png;base64,..."                 a data: URL
    "/9j/4AAQSkZJRg..."                         base64 alone
    {"bytes": ..., "path": "a.jpg"}             an Image, Audio or Video of Hugging Face datasets
    {"url": "https://host/a.jpg"}               an image_url of OpenAI
    {"data": "UklGRg...", "format": "wav"}      an input_audio of OpenAI
    b"..."                                      bytes, from Parquet

Bytes and base64 never get into the ``json`` of a sample. What names them there is the struct's
path, or the key.
"""

from __future__ import annotations

import re
from typing import Any

from mmstream.converting.draft import KINDS, Kind, MediaRef, RowError
from mmstream.converting.formats.fields import MEDIA_KEYS, first_key, items_of, json_name, text_of
from mmstream.errors import escaped

__all__ = ["is_base64_media", "kind_by_name", "media_of", "media_ref"]

EXTENSIONS: dict[Kind, tuple[str, ...]] = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "avif", "heic", "tif", "tiff"),
    "video": ("mp4", "mov", "avi", "mkv", "webm", "m4v", "mpg", "mpeg"),
    "audio": ("wav", "flac", "mp3", "ogg", "m4a", "opus", "aac", "sph"),
}
_KINDS_BY_EXTENSION = {name: kind for kind, names in EXTENSIONS.items() for name in names}

_BASE64_HEADS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUQz", "T2dn", "ZkxhQ", "GkXfo", "AAAA")
"""How base64 of JPEG, PNG, GIF, RIFF, MP3, Ogg, FLAC, Matroska and MP4 begins."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{64}")
_DECODED_KEYS = ("array", "sampling_rate")


def kind_by_name(path: str) -> Kind | None:
    """Return the kind of a file by its extension, or None if it says nothing."""
    name = path.partition("?")[0].partition("#")[0] if "://" in path else path
    return _KINDS_BY_EXTENSION.get(name.rpartition(".")[2].lower()) if "." in name else None


def is_base64_media(text: str) -> bool:
    """Tell whether a text is a media file in base64."""
    return text.startswith(_BASE64_HEADS) and _BASE64.match(text) is not None


def media_of(row: dict[str, Any]) -> tuple[dict[Kind, list[MediaRef]], set[str]]:
    """Return {kind: media files} of a row, and the keys that name them.

    If a row has several keys of a kind, the first one in `MEDIA_KEYS` counts. A ``file_name`` is of
    the kind that its extension says; beside another key of this kind, it is only a name.

    Raises:
        RowError: A key holds something else than media.
    """
    media: dict[Kind, list[MediaRef]] = {}
    used: set[str] = set()
    for kind in KINDS:
        key = first_key(row, MEDIA_KEYS[kind])
        if key is None:
            continue
        value = row[key]
        if not isinstance(value, str | list | dict | bytes):
            raise RowError(f"{key}: expected a path or a list of paths, found {json_name(value)}")
        real_kind = kind
        if key == "file_name" and isinstance(value, str):
            real_kind = kind_by_name(value) or kind
            if real_kind != kind and first_key(row, MEDIA_KEYS[real_kind]) is not None:
                continue  # WavCaps: the name of the sound that `audio` names
        refs = [
            media_ref(item, real_kind, f"{key}[{i}]" if isinstance(value, list) else key)
            for i, item in enumerate(items_of(value))
        ]
        media.setdefault(real_kind, []).extend(refs)
        used.add(key)
    return media, used


def media_ref(value: Any, kind: Kind, name: str) -> MediaRef:
    """Return the medium that a value stands for.

    Args:
        value: A path or URL, bytes, base64, or a struct; see the module.
        kind: What it must be.
        name: Names the value in errors, and the medium where the row gives no path.

    Raises:
        RowError: The value is nothing of these, or empty.
    """
    if isinstance(value, bytes):
        return _with_data(value, kind, name, name)
    if isinstance(value, dict):
        return _of_struct(value, kind, name)
    path = text_of(value, name)
    return MediaRef(kind, f"data:;base64,{path}" if is_base64_media(path) else path)


def _of_struct(value: dict[str, Any], kind: Kind, name: str) -> MediaRef:
    path = next((value[k] for k in ("path", "url", "file_name", "src") if value.get(k)), None)
    data = value.get("bytes") if value.get("bytes") is not None else value.get("data")
    if isinstance(data, bytes):
        return _with_data(data, kind, path if isinstance(path, str) else name, name)
    if data is not None:
        text = text_of(data, f"{name}: bytes")
        return MediaRef(kind, text if text.startswith("data:") else f"data:;base64,{text}")
    if path is not None:
        return media_ref(path, kind, f"{name}: path")
    if all(key in value for key in _DECODED_KEYS):
        raise RowError(f"{name}: decoded audio; give the file, such as with Audio(decode=False)")
    keys = escaped(", ".join(list(value)[:8]), 200)
    raise RowError(f"{name}: no bytes, path or url among the keys {keys}")


def _with_data(data: bytes, kind: Kind, path: str, name: str) -> MediaRef:
    if not data:
        raise RowError(f"{name}: no bytes")
    return MediaRef(kind, path, data)
