"""Typed values and media of a row, and what a format knows about it -> its `Draft`. Part of step 2.

Every mistake in a row is detected here or in the formats. It becomes a `RowError` that names the
key. Media are taken in every form that corpora give them:

    "a.jpg"                                     a path or a URL
    "data:image/png;base64,..."                 a data: URL
    "/9j/4AAQSkZJRg..."                         base64 alone
    {"bytes": ..., "path": "a.jpg"}             an Image, Audio or Video of Hugging Face datasets
    {"url": "https://host/a.jpg"}               an image_url of OpenAI
    {"data": "UklGRg...", "format": "wav"}      an input_audio of OpenAI
    b"..."                                      bytes, from Parquet
    ["0.jpg", "1.jpg"]                          of a video: its frames, with times beside them
    {"frames": ["0.jpg"], "sample_fps": 2}      the same, with times of its own

Bytes and base64 never get into the ``json`` of a sample. What names them there is the struct's
path, or the key. Secrets in URLs that rows name get neither into the ``json`` nor into the sidecar.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from mmstream.converting.draft import DIALOGUE_KEYS, KINDS, Draft, MediaRef, RowError
from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import decode_json
from mmstream.media.frames import TIME_KINDS, frame_times
from mmstream.media.types import BY_EXTENSION, Kind, sniff_file

T = TypeVar("T")

MEDIA_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": (
        *("images", "image", "image_path", "image_paths", "file_name"),
        *("image_url", "image_urls", "image_base64_str", "image_base64"),
        *("img", "img_path", "image_file"),
    ),
    "video": ("videos", "video", "video_path", "video_url"),
    "audio": ("audios", "audio", "audio_path", "audio_filepath", "audio_url"),
}
"""The keys of a row that name its media files. The first one that is set counts."""

MAX_NUMBER_CHARACTERS = 40
MAX_PARSED_CHARACTERS = 1 << 20
"""A longer text stays one, whatever it begins with."""

_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_TIME = re.compile(r"(?:(\d{1,4}):)?(\d{1,4}):(\d{1,4}(?:[.,]\d+)?)")


def json_name(value: Any) -> str:
    """Return the type of a value, in the words of JSON."""
    return _JSON_NAMES.get(type(value)) or type(value).__name__


def expect(value: Any, kind: type[T], name: str) -> T:
    """Return `value` if it has the type `kind`. Otherwise raise a RowError that says it in JSON."""
    if not isinstance(value, kind):
        raise RowError(f"{name}: expected {_JSON_NAMES[kind]}, found {json_name(value)}")
    return value


def is_set(value: Any) -> bool:
    """Tell whether a key has a value. Null, an empty string and an empty list count as none."""
    return value is not None and value != "" and value != []


def first_key(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the first of `keys` that a row has with a value, or None."""
    if row.keys().isdisjoint(keys):  # most formats are ruled out here, many times for each row
        return None
    for key in keys:
        if is_set(row.get(key)):
            return key
    return None


def has_media(row: Mapping[str, Any]) -> bool:
    """Tell whether a row names media files."""
    return any(first_key(row, keys) is not None for keys in MEDIA_KEYS.values())


def text_of(value: Any, name: str) -> str:
    """Return a text that is not blank."""
    if not expect(value, str, name).strip():
        raise RowError(f"{name} is empty")
    return str(value)


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a string or a list of strings: at least one, and none of them blank."""
    if not isinstance(value, list):
        return (text_of(value, name),)
    if not value:
        raise RowError(f"{name} is empty")
    return tuple(text_of(text, f"{name}[{i}]") for i, text in enumerate(value))


def value_of_text(text: str) -> Any:
    """Return the list or object that a text is, as JSON or as Python writes it. Else the text."""
    if text[:1] not in ("[", "{") or len(text) > MAX_PARSED_CHARACTERS:
        return text
    with suppress(ValueError, RecursionError):
        return decode_json(text.encode())
    try:
        value = ast.literal_eval(text)
        msgspec.json.encode(value)  # a set or bytes is not JSON
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, list | dict) else text


def number_of(value: Any, name: str) -> float:
    """Return a finite number. A table gives it as text."""
    number = value
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARACTERS:
        try:
            number = float(value)
        except ValueError:
            number = None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not abs(number) < 2**63 or not math.isfinite(number):
        wrong = repr(value)[:60] if isinstance(value, str | float) else json_name(value)
        raise RowError(f"{name}: expected a number, found {escaped(wrong)}")
    return float(number)


def seconds_of(value: Any, name: str) -> float:
    """Return a time in seconds. It is a number, or ``HH:MM:SS.mmm``, or ``MM:SS``."""
    time = _TIME.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if time is not None:
        hours, minutes, seconds = time.groups()
        return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    number = number_of(value, name)
    if number < 0:
        raise RowError(f"{name}: {number:g} s is before the beginning")
    return number


_BASE64_HEADS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "SUQz", "T2dn", "ZkxhQ", "GkXfo", "AAAA")
"""How base64 of JPEG, PNG, GIF, RIFF, MP3, Ogg, FLAC, Matroska and MP4 begins."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{64}")
_DECODED_KEYS = ("array", "sampling_rate")


def kind_by_name(path: str) -> Kind | None:
    """Return the kind of a file by its extension, or None if it says nothing."""
    name = path.partition("?")[0].partition("#")[0] if "://" in path else path
    media_type = BY_EXTENSION.get(name.rpartition(".")[2].lower()) if "." in name else None
    return media_type.kind if media_type is not None else None


def is_base64_media(text: str) -> bool:
    """Tell whether a text is a media file in base64."""
    return text.startswith(_BASE64_HEADS) and _BASE64.match(text) is not None


class ParsedRow(dict[str, Any]):
    """A parsed row, which remembers its format and the keys that this has read.

    A key that was taken is not repeated in the ``json``. The other keys are kept there, and those
    that are not known facts are counted as unread.
    """

    __slots__ = ("facts", "format", "taken")

    def __init__(
        self, row: Mapping[str, Any], facts: frozenset[str] = frozenset(), format: str = ""
    ) -> None:
        super().__init__(row)
        self.taken: set[str] = set()
        self.format = format
        self.facts = facts
        """Keys that say something about the medium or the row, and that are kept."""

    def take(self, key: str) -> Any:
        """Return the value of a key, or None, and remember that it was read."""
        self.taken.add(key)
        return self.get(key)


def media_of(row: ParsedRow) -> dict[Kind, list[MediaRef]]:
    """Return {kind: media files} of a row, and take the keys that name them.

    A list of pictures in a key of videos is one video, whose times are in the row.

    If a row has several keys of a kind, the first one in `MEDIA_KEYS` counts. A ``file_name`` is of
    the kind that its extension says; beside another key of this kind, it is only a name.

    Raises:
        RowError: A key holds something else than media.
    """
    media: dict[Kind, list[MediaRef]] = {}
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
        row.take(key)
        is_list = isinstance(value, list) and not (real_kind == "video" and is_picture(value[0]))
        refs = [
            media_ref(item, real_kind, f"{key}[{i}]" if is_list else key, row)
            for i, item in enumerate(value if is_list else [value])
        ]
        media.setdefault(real_kind, []).extend(refs)
    return media


def all_media(row: ParsedRow) -> list[MediaRef]:
    """Return the media files of all kinds of a row, as `media_of`."""
    return [ref for refs in media_of(row).values() for ref in refs]


def media_ref(
    value: Any, kind: Kind, name: str, times: Mapping[str, Any] | None = None
) -> MediaRef:
    """Return the medium that a value stands for.

    Args:
        value: A path or URL, bytes, base64, or a struct; see the module.
        kind: What it must be.
        name: Names the value in errors, and the medium where the row gives no path.
        times: What states the times of a list of frames. It remembers which of its keys do.

    Raises:
        RowError: The value is nothing of these, or empty. Or a list of frames has no times.
    """
    if kind == "video" and isinstance(value, dict) and value.get("frames") is not None:
        own = any(value.get(key) is not None for key in TIME_KINDS)
        frames = expect(value["frames"], list, f"{name}: frames")
        return _list_of_frames(frames, name, value if own else times or {})
    if kind == "video" and isinstance(value, list):
        return _list_of_frames(value, name, times or {})
    if isinstance(value, bytes):
        if not value:
            raise RowError(f"{name}: no bytes")
        return MediaRef(kind, name, value)
    if isinstance(value, dict):
        return _of_struct(value, kind, name)
    path = text_of(value, name)
    return MediaRef(kind, f"data:;base64,{path}" if is_base64_media(path) else path)


def is_picture(item: Any) -> bool:
    """Tell whether an item in a list of videos is a picture: a frame, then, of one video."""
    if isinstance(item, dict):
        item = next((item[key] for key in ("bytes", "path", "url") if item.get(key)), None)
    if isinstance(item, bytes):
        media_type = sniff_file(item)
        return media_type is not None and media_type.kind == "image"
    is_text = isinstance(item, str)
    return is_text and (item.startswith("data:image/") or kind_by_name(item) == "image")


def _list_of_frames(frames: list[Any], name: str, times: Mapping[str, Any]) -> MediaRef:
    """Return the video that a list of pictures is."""
    refs = tuple(media_ref(frame, "image", f"{name}[{i}]") for i, frame in enumerate(frames))
    stated: dict[str, Any] = {}
    for key in TIME_KINDS:
        value = times.get(key)
        if isinstance(value, list):
            read = seconds_of if key == "timestamps" else number_of
            numbers = [read(number, f"{key}[{i}]") for i, number in enumerate(value)]
            stated[key] = [int(x) if x.is_integer() else x for x in numbers]
        elif is_set(value):
            stated[key] = number_of(value, key)
    if "indices" in stated and is_set(times.get("fps")):
        stated["fps"] = number_of(times["fps"], "fps")
    try:
        frame_times(stated, len(refs))
    except DecodeError as error:
        raise RowError(f"{name}: {error}") from None
    if isinstance(times, ParsedRow):
        times.taken |= stated.keys()
    return MediaRef("video", name, msgspec.json.encode(stated), frames=refs)


def _of_struct(value: dict[str, Any], kind: Kind, name: str) -> MediaRef:
    path = next((value[k] for k in ("path", "url", "file_name", "src") if value.get(k)), None)
    data = value.get("bytes") if value.get("bytes") is not None else value.get("data")
    if isinstance(data, bytes):
        ref = media_ref(data, kind, name)
        return msgspec.structs.replace(ref, path=path) if isinstance(path, str) else ref
    if data is not None:
        text = text_of(data, f"{name}: bytes")
        return MediaRef(kind, text if text.startswith("data:") else f"data:;base64,{text}")
    if path is not None:
        return media_ref(path, kind, f"{name}: path")
    if all(key in value for key in _DECODED_KEYS):
        raise RowError(f"{name}: decoded audio; give the file, such as with Audio(decode=False)")
    keys = escaped(", ".join(list(value)[:8]), 200)
    raise RowError(f"{name}: no bytes, path or url among the keys {keys}")


_SECRET = re.compile(
    r"(?i)(?<=://)[^/?#]*(?=@)|(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)"
    r"|(?:access_?)?token|sig|signature|api_?key|awsaccesskeyid)=)[^&#]*"
)
"""Passwords, tokens and signatures in a URL. Other parameters may be part of the address."""


def without_secrets(url: str) -> str:
    """Return a URL with asterisks for its password, token or signature.

    Examples:
        >>> without_secrets("https://me:word@host/a.jpg?w=100&X-Amz-Signature=1f2e")
        'https://***@host/a.jpg?w=100&X-Amz-Signature=***'
    """
    return _SECRET.sub(r"\1***", url) if "://" in url else url


CANONICAL_KEYS = ("id", *DIALOGUE_KEYS, "captions", "segments", "media_paths")
"""The keys of ``KEY.json`` with a fixed meaning. A row's own key of that name is renamed."""

SPAN_KEYS = frozenset(("start_s", "end_s"))
"""What decoders of videos and recordings read of the ``json`` in training."""

MAX_MEDIA = 1000
MAX_FRAMES = 8192
"""Most frames of all lists of a row."""
MAX_PATH_CHARACTERS = 4096
"""Longer paths are shortened in ``media_paths``."""


def make_draft(
    row: ParsedRow,
    main: dict[str, Any],
    refs: Sequence[MediaRef],
    texts: tuple[str, ...] = (),
    fields: Mapping[str, bytes] | None = None,
) -> Draft:
    """Return a draft. Its ``json`` holds id, `main`, media_paths, then the keys not taken.

    ``media_paths`` has the path of each media field as the row gives it, so that a sample can be
    traced to its files; for a list of frames it is a list. A row's own key with a name in
    `CANONICAL_KEYS` is kept as ``row_KEY``.

    Args:
        row: The parsed row.
        main: What the format made of it.
        refs: Its media files.
        texts: See `Draft.texts`.
        fields: See `Draft.fields`.
    """
    if len(refs) > MAX_MEDIA:
        raise RowError(f"{len(refs)} media files in one row, the limit is {MAX_MEDIA}")
    num_frames = sum(len(ref.frames) for ref in refs)
    if num_frames > MAX_FRAMES:
        raise RowError(f"{num_frames} frames of videos in one row, the limit is {MAX_FRAMES}")
    row_id = row.get("image_id") if row.get("id") is None else row["id"]
    content: dict[str, Any] = {"id": row_id, **main}
    facts = row.facts
    if refs:
        content["media_paths"] = [
            [short_path(frame.path) for frame in ref.frames] or short_path(ref.path) for ref in refs
        ]
        if any(ref.kind in ("video", "audio") for ref in refs):
            facts |= SPAN_KEYS
    unread: list[str] = []
    for key, value in row.items():
        if key in row.taken or key == "id":
            continue
        content[f"row_{key}" if key in CANONICAL_KEYS else key] = _without_bytes(value)
        if key not in facts and is_set(value):
            unread.append(key)
    return Draft(content, tuple(refs), texts, fields or {}, tuple(unread), row.format)


def captioned(row: ParsedRow, refs: Sequence[MediaRef], texts: tuple[str, ...]) -> Draft:
    """Return the draft of media files with their captions."""
    return make_draft(row, {"captions": list(texts)}, refs, texts)


def short_path(path: str) -> str:
    """Return a path as the ``json`` of a sample names it: without bytes of a file, or secrets."""
    if path.startswith("data:"):
        head = path[:100].partition(",")[0]
        return f"{head},({len(path):,} characters)"
    path = without_secrets(path)
    if len(path) <= MAX_PATH_CHARACTERS:
        return path
    half = MAX_PATH_CHARACTERS // 2
    return f"{path[:half]}...{path[-half:]}"


def _without_bytes(value: Any) -> Any:
    """Return a value with bytes and data: URLs replaced by their lengths."""
    if isinstance(value, bytes):
        return f"({len(value):,} bytes)"
    if isinstance(value, str):
        return short_path(value) if value.startswith("data:") and len(value) > 200 else value
    if isinstance(value, dict):
        return {key: _without_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_bytes(item) for item in value]
    return value
