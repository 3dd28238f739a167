"""The fields of a sample: which are images, how text and JSON are read, what a path leads to.

Place in the flow: decoding and tokenizing both ask here, so that pictures and placeholders agree,
and one rule limits every field of text. A conversion asks how deep JSON may be nested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import msgspec

from mmstream.errors import (
    BUGS,
    DecodeError,
    MMStreamError,
    SampleError,
    SkipSample,
    TimeoutError,
    escaped,
    where,
)
from mmstream.media.types import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, kind_of
from mmstream.types import Sample

P = ParamSpec("P")
T = TypeVar("T")

MAX_TEXT_BYTES = 1 << 20
"""Most bytes of a text or of a ``json`` field, unless a decoder is told otherwise.

A tokenizer takes up to 640 times the memory of a text, and up to 2 s per MiB. Parsed JSON takes up
to 35 times the memory of its bytes.
"""

MAX_JSON_DEPTH = 200
"""Lists and objects that may lie inside each other in JSON.

Pickle takes an object from a worker to the main process only up to a few hundred levels.
"""


_STRING_OR_NAN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|-?\bInfinity\b|\bNaN\b', re.DOTALL)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of JSON. Its group is half of a character outside of the first plane."""


def decode_json(text: bytes, type: Any = Any) -> Any:
    r"""Return the value of a JSON text, also where it is only what Python writes.

    Raises:
        msgspec.DecodeError: It is not JSON, or not of this type.
        UnicodeDecodeError: It is not UTF-8.
        RecursionError: It is nested too deeply.

    Examples:
        >>> decode_json(b'{"score": NaN, "text": "NaN", "half": "\\ud83d"}')
        {'score': None, 'text': 'NaN', 'half': '\ufffd'}
    """
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.DecodeError:
        strict = _strict(text)
        if strict == text:
            raise
    return msgspec.json.decode(strict, type=type)


def json_object(data: object) -> dict[str, Any]:
    """Return the object that a stranger's ``json`` holds, parsed or not; empty if it holds none."""
    try:
        value = decode_json(data) if isinstance(data, bytes) else data
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_json(text: bytes) -> bool:
    """Tell whether a text is one JSON value, however deep."""
    try:
        decode_json(text, msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    except RecursionError:
        pass
    return True


def _strict(text: bytes) -> bytes:
    """Return the same JSON without a byte order mark, NaN, and halves of characters."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if b"NaN" in text or b"Infinity" in text:
        text = _STRING_OR_NAN.sub(lambda m: m[0] if m[0].startswith(b'"') else b"null", text)
    return _ESCAPE.sub(lambda m: rb"\ufffd" if m[1] else m[0], text) if b"\\u" in text else text


def parse_json(data: bytes, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Parse a ``json`` field.

    Raises:
        DecodeError: It is not JSON, nested deeper than `MAX_JSON_DEPTH` levels, or larger than
            `max_bytes`.
    """
    if len(data) > max_bytes:
        raise DecodeError(
            f"JSON of {len(data):,} bytes, the limit is {max_bytes:,}; "
            "raise Decode(max_json_bytes=)"
        )
    try:
        value = decode_json(data)
    except ValueError as error:  # msgspec's errors and UnicodeDecodeError
        raise DecodeError(f"JSON: {error}") from None
    except RecursionError:
        raise DecodeError(_TOO_DEEP) from None
    if is_too_deep(data, value):
        raise DecodeError(_TOO_DEEP)
    return value


def is_too_deep(data: bytes, value: Any) -> bool:
    """Tell whether parsed JSON is nested deeper than `MAX_JSON_DEPTH` levels.

    What the parser follows depends on how deep its caller stands, so it must not decide.

    Args:
        data: The JSON.
        value: What it was parsed to.
    """
    # A level has two brackets, so short JSON is known not to be too deep.
    if len(data) <= 2 * MAX_JSON_DEPTH or data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return any(isinstance(child, dict | list) for child in level)


def decode_text(value: object, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a text field as a string.

    Raises:
        DecodeError: The value is neither a string nor bytes in UTF-8, or it has more than
            `max_bytes` bytes.
    """
    if isinstance(value, str):
        return check_text(value, max_bytes)
    if not isinstance(value, bytes):
        raise DecodeError(f"expected text, not {type(value).__name__}")
    if len(value) > max_bytes:
        raise _too_long(len(value), max_bytes)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def check_text(text: str, max_bytes: int) -> str:
    """Return the same text, if it has at most `max_bytes` bytes in UTF-8.

    Raises:
        DecodeError: It has more.
    """
    if len(text) * 4 > max_bytes:  # no character has more than 4 bytes
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > max_bytes:
            raise _too_long(num_bytes, max_bytes)
    return text


_TOO_DEEP = f"JSON: nested deeper than {MAX_JSON_DEPTH} levels"


def _too_long(num_bytes: int, max_bytes: int) -> DecodeError:
    return DecodeError(
        f"text of {num_bytes:,} bytes, the limit is {max_bytes:,}; raise TextDecoder(max_bytes=), "
        "or decode it with a function of your own"
    )


def value_at(sample: Mapping[str, Any], path: str) -> Any:
    """Return what a path leads to: a field, or a value inside a parsed field.

    A field of exactly this name comes first. Else the path begins with the name of a field, and
    goes on with keys of objects and positions in lists. ``*`` stands for all items of a list.

    Raises:
        DecodeError: There is no such field or value; the message says what there is instead.

    Examples:
        >>> sample = {"json": {"captions": ["a cat", "a pet"], "objects": [{"box": 1}, {"box": 2}]}}
        >>> value_at(sample, "json.captions.0")
        'a cat'
        >>> value_at(sample, "json.objects.*.box")
        [1, 2]
    """
    if path in sample:
        return sample[path]
    segments = path.split(".")
    for stop in range(len(segments) - 1, 0, -1):
        name = ".".join(segments[:stop])
        if name in sample and not isinstance(sample[name], bytes):
            return _inside(sample[name], segments[stop:], name)
    raise DecodeError(f"no field {escaped(path)}; the sample has {field_names(sample)}")


def _inside(value: Any, segments: list[str], path: str) -> Any:
    """Return what the rest of a path leads to. `path` is what led to the value."""
    if not segments:
        return value
    segment, remainder = segments[0], segments[1:]
    deeper = f"{path}.{segment}"
    if isinstance(value, dict) and segment in value:
        return _inside(value[segment], remainder, deeper)
    if isinstance(value, list | tuple) and segment == "*":
        return [_inside(item, remainder, deeper) for item in value]
    if isinstance(value, list | tuple) and segment.isdecimal() and int(segment) < len(value):
        return _inside(value[int(segment)], remainder, deeper)
    content = type(value).__name__
    if isinstance(value, dict):
        content = f"the names {field_names(value)}"
    elif isinstance(value, list | tuple):
        content = f"a list of {len(value)}"
    raise DecodeError(f"nothing at {escaped(deeper)}: {escaped(path)} holds {content}")


def field_names(names: Iterable[str]) -> str:
    """Return the names of fields for a message."""
    public = [str(name) for name in names if not str(name).startswith("__")]
    more = f" and {len(public) - 8} more" if len(public) > 8 else ""
    return ", ".join(escaped(name, 60) for name in public[:8]) + more or "none"


def undecoded_media(counts: Mapping[str, int | None]) -> str:
    """Return which fields of a dataset hold videos or audios; "" if none does.

    Args:
        counts: {field: number of samples that have it}. None: the number is not known.

    Examples:
        >>> undecoded_media({"json": 9, "0.mp4": 2, "1.mp4": 1, "0.wav": 1})
        '3 mp4, 1 wav'
    """
    numbers: dict[str, int] = {}
    for name, count in counts.items():
        extension = name.rpartition(".")[2]
        if extension in VIDEO_EXTENSIONS | AUDIO_EXTENSIONS:
            numbers[extension] = numbers.get(extension, 0) + (count or 0)
    return ", ".join(f"{n:,} {extension}" if n else extension for extension, n in numbers.items())


def call_user(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a user's function on data. What it raises because of the data is a DecodeError.

    Raises:
        DecodeError: The function raised something else than one of `BUGS`.
        MMStreamError: The function raised it itself, such as SkipSample.
        NameError, AttributeError, ...: It has a bug.
    """
    try:
        return function(argument)
    except (MMStreamError, *BUGS):
        raise
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise DecodeError(f"{name}: {type(error).__name__}: {error}") from error


def named_image_fields(names: Iterable[str]) -> list[str]:
    """Return the image fields that have a name of their own, not a number.

    Examples:
        >>> named_image_fields(["jpg", "0.jpg", "mask.png"])
        ['mask.png']
    """
    return [name for name in names if _rank(name)[0] == 2]


def image_fields(sample: Iterable[str]) -> list[str]:
    """List the fields that hold images, in the order in which messages count them.

    Args:
        sample: A sample, or the names of its fields.

    Returns:
        The names whose last extension is that of an image. First come names without a number
        (``jpg``), then names by their number (``2.png`` before ``10.jpg``), then others by name
        (``mask.png``).

    Examples:
        >>> image_fields(["json", "10.jpg", "mask.png", "2.png"])
        ['2.png', '10.jpg', 'mask.png']
    """
    return list(_fields_of(tuple(sample), IMAGE_EXTENSIONS))


def video_fields(sample: Iterable[str]) -> list[str]:
    """List the fields that hold videos, in the order of `image_fields`.

    Examples:
        >>> video_fields(["json", "10.mp4", "0.jpg", "2.webm"])
        ['2.webm', '10.mp4']
    """
    return list(_fields_of(tuple(sample), VIDEO_EXTENSIONS))


def audio_fields(sample: Iterable[str]) -> list[str]:
    """List the fields that hold recordings, in the order of `image_fields`.

    Examples:
        >>> audio_fields(["json", "1.flac", "0.mp4", "wav"])
        ['wav', '1.flac']
    """
    return list(_fields_of(tuple(sample), AUDIO_EXTENSIONS))


FRAMES = "frames"
"""Extension of a video that is a list of pictures: ``0.frames`` with ``0.frames.000.jpg``."""

_FRAME = re.compile(rf"((?:.+\.)?{FRAMES})\.(\d{{1,9}})\.\w+")


def list_of_frame(name: str) -> str | None:
    """Return the list that a picture belongs to by its name, if the sample has this field.

    Examples:
        >>> list_of_frame("0.frames.012.jpg"), list_of_frame("12.jpg")
        ('0.frames', None)
    """
    match = _FRAME.fullmatch(name)
    return None if match is None else match[1]


def frame_names(names: Iterable[str], video: str) -> list[str]:
    """List the pictures of a list of frames, by their numbers. The file of a video has none.

    Examples:
        >>> frame_names(["frames", "frames.10.jpg", "frames.9.jpg", "jpg"], "frames")
        ['frames.9.jpg', 'frames.10.jpg']
    """
    if video.rpartition(".")[2] != FRAMES:
        return []
    pictures = [name for name in names if list_of_frame(name) == video and kind_of(name) == "image"]
    return sorted(pictures, key=lambda name: (int(name.split(".")[-2]), name))


def media_files(names: Collection[str]) -> dict[str, list[str]]:
    """Return the fields that hold media, in the order of `names`, each with the frames of its list.

    Examples:
        >>> media_files(["0.mp4", "1.frames", "1.frames.0.jpg", "json"])
        {'0.mp4': [], '1.frames': ['1.frames.0.jpg']}
    """
    return {
        name: frame_names(names, name)
        for name in names
        if kind_of(name) is not None and list_of_frame(name) not in names
    }


FIELDS_OF = {"image": image_fields, "video": video_fields, "audio": audio_fields}
"""The fields that hold media of a kind, in the order in which messages count them."""


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of fields of any media as `image_fields` does.

    Examples:
        >>> in_order(["1.wav", "extra.mp4", "0.mp4", "wav"])
        ['wav', '0.mp4', '1.wav', 'extra.mp4']
    """
    return sorted(names, key=_rank)


@lru_cache(maxsize=64)  # most samples have the same names, and are asked several times
def _fields_of(names: tuple[str, ...], extensions: frozenset[str]) -> tuple[str, ...]:
    candidates = (name for name in names if name.rpartition(".")[2] in extensions)
    every = frozenset(names)
    return tuple(
        in_order(
            name
            for name in candidates
            if not name.startswith("__") and list_of_frame(name) not in every
        )
    )


def _rank(name: str) -> tuple[int, int, str]:
    """Return the sort key of a field of media."""
    number = name.rpartition(".")[0]
    if not number:
        return (0, 0, name)
    return (1, int(number), name) if number.isdecimal() else (2, 0, name)


# -- where in a sample a decoder failed: ``shard[index] key.field: `` before the reason ------------

_KINDS = (TimeoutError, DecodeError, SkipSample, SampleError)


def with_address(
    sample: Sample, name: str, decode: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call one decoder. If it fails, put the field's address before the reason.

    Errors that stop a run stay as they are. A note below their traceback has the address.
    """
    try:
        return decode(*args, **kwargs)
    except SampleError as error:
        raise addressed(sample, name, error) from error.__cause__  # a user's function has one
    except BUGS as error:
        error.add_note(f"while decoding {address(sample, name)}")
        raise


def addressed(sample: Sample, name: str, error: SampleError) -> SampleError:
    """Return an error with the field's address before the reason."""
    # A user's subclass may not take one string, so it becomes one of ours.
    kind = next(kind for kind in _KINDS if isinstance(error, kind))
    return kind(f"{address(sample, name)}: {error}")


def address(sample: Sample, name: str) -> str:
    """Return the address of a field, as far as it is known."""
    key = str(sample.get("__key__", ""))
    lineage = sample.get("__lineage__")
    if lineage is None:
        return ".".join(word for word in (key, name) if word)
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    if "__source__" in sample:
        shard = f"{sample['__source__']}/{shard}"
    return where(shard, lineage.index, key, name)
