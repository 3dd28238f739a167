"""What a media file really is: its type, the checks that are asked of it, and its facts.

load -> CHECK -> the shard
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmstream.converting.draft import Kind, Media, RowError
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.media.types import sniff_file
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.image.limits import Limits
from mmstream.errors import DecodeError

if TYPE_CHECKING:
    from mmstream.converting.media.probe import Facts

__all__ = ["checked"]

_NOT_IN_TRAINING = ("tiff", "heic")
"""Images that no decoder of a training run reads. A sample would silently have no image."""

IMAGE_TIMEOUT_S = 300.0
"""Seconds that decoding an image may take. The largest ones take some."""

_SOUND_ALONE = {"mp4": "m4a", "mov": "m4a", "mkv": "mka", "webm": "mka", "wmv": "wma"}
"""What files are called that hold sound alone. Their first bytes do not tell that."""


def checked(kind: Kind, data: bytes, options: MediaOptions) -> Media:
    """Return a medium as it is stored, with its facts, after all checks.

    Args:
        kind: What the row says that it is.
        data: The file.
        options: What is asked of it, and how images and videos are changed.

    Raises:
        RowError: It is something else, or fails a check. The message does not name the file.
    """
    extension = _extension(kind, data, options)
    if kind == "image":
        return _image(data, extension, options)
    if options.check == "none":
        return Media(extension, data)
    from mmstream.converting.media.probe import probe  # loads FFmpeg

    facts = probe(data, kind, options.check == "full")
    _check_duration(facts, options)
    if kind == "video" and options.video_format == "mp4":
        copy = _as_mp4(data)
        if copy is not None:
            return Media("mp4", copy, facts)
    return Media(extension, data, facts)


def _as_mp4(data: bytes) -> bytes | None:
    """Return a video as an MP4, as `remuxed` does."""
    from mmstream.converting.media.probe import DECODE_TIMEOUT_S
    from mmstream.converting.media.remux import remuxed
    from mmstream.decoding.ffmpeg.deadline import Deadline

    try:
        return remuxed(data, Deadline.start(DECODE_TIMEOUT_S))
    except DecodeError as error:
        raise RowError(str(error)) from None


def _extension(kind: Kind, data: bytes, options: MediaOptions) -> str:
    """Return the type by the first bytes."""
    media_type = sniff_file(data)
    article = "a" if kind == "video" else "an"
    if media_type is None:
        raise RowError(f"not {article} {kind} (starts with {data[:12]!r})")
    if kind == "audio" and media_type.extension in _SOUND_ALONE and options.check != "none":
        return _SOUND_ALONE[media_type.extension]  # `probe` refuses it if it has pictures
    if media_type.kind != kind:
        raise RowError(f"not {article} {kind} but {media_type.extension}")
    return media_type.extension


def _image(data: bytes, extension: str, options: MediaOptions) -> Media:
    if extension in _NOT_IN_TRAINING and options.image_format is None:
        raise RowError(
            f"{extension} is not supported; make it png or jpg, for example with --image-format jpg"
        )
    if options.check == "none" and not options.changes_images:
        return Media(extension, data)
    from mmstream.converting.media.images import encode, target_of  # loads Pillow

    shape = _shape(data, extension)
    if shape is not None:
        _check_size(shape, options)
    target = target_of(extension, shape, options)
    if target is not None:
        encoded = encode(data, extension, shape, target, options, _limits())
        _check_size(encoded.original, options)
        return Media(encoded.extension, encoded.data, _size_facts(encoded.shape, encoded.original))
    if options.check == "full" or (shape is None and options.check == "header"):
        shape = _decoded_shape(data)
        _check_size(shape, options)
    return Media(extension, data, _size_facts(shape, shape) if shape is not None else {})


def _shape(data: bytes, extension: str) -> Shape | None:
    """Return (height, width) as the header says them. None: only decoding tells."""
    from mmstream.converting.media.images import foreign_shape
    from mmstream.decoding.image.formats import header_shape

    try:
        if extension in _NOT_IN_TRAINING:
            return foreign_shape(data, extension, _limits())
        shape = header_shape(data, _limits())
        if shape is not None:
            _limits().check_picture(*shape)
    except DecodeError as error:
        raise RowError(str(error)) from None
    return shape


def _decoded_shape(data: bytes) -> Shape:
    """Decode an image as strictly as in training. Return its (height, width)."""
    from mmstream.decoding.image.formats import decode_bytes

    try:
        pixels, _ = decode_bytes(data, _limits())
    except DecodeError as error:
        raise RowError(str(error)) from None
    return pixels.shape[0], pixels.shape[1]


def _limits() -> Limits:
    """Return the limits that training has by default, with more time.

    A busy machine must not reject an image that another one takes.
    """
    return Limits.start(timeout_s=IMAGE_TIMEOUT_S)


def _size_facts(shape: Shape, original: Shape) -> Facts:
    return {
        "width": shape[1],
        "height": shape[0],
        "original_width": original[1],
        "original_height": original[0],
    }


def _check_size(shape: Shape, options: MediaOptions) -> None:
    shorter, longer = sorted(shape)
    if options.min_image_side is not None and shorter < options.min_image_side:
        raise RowError(f"{shape[1]}x{shape[0]} pixels; min_image_side is {options.min_image_side}")
    if options.max_aspect is not None and longer > options.max_aspect * shorter:
        raise RowError(f"{shape[1]}x{shape[0]} pixels; max_aspect is {options.max_aspect:g}")


def _check_duration(facts: Facts, options: MediaOptions) -> None:
    shortest, longest = options.min_duration_s, options.max_duration_s
    if shortest is None and longest is None:
        return
    duration = facts.get("duration_s")
    if not isinstance(duration, int | float):
        raise RowError("its duration is not known, and min_duration_s or max_duration_s is set")
    if shortest is not None and duration < shortest:
        raise RowError(f"{duration:g} s; min_duration_s is {shortest:g}")
    if longest is not None and duration > longest:
        raise RowError(f"{duration:g} s; max_duration_s is {longest:g}")
