"""What a media file really is: its checks and its facts.

    load -> CHECK -> images

The type is recognised by the first bytes, not by the file's name (`types.py`). The rest is read
from the header of the file, or all of it is decoded once, as `MediaOptions.check` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from mmstream.converting.draft import Media, RowError
from mmstream.converting.media.files import short_name
from mmstream.converting.media.options import MediaOptions
from mmstream.decoding.image.limits import MAX_MEMORY, MAX_PIXELS, TIMEOUT_S, Limits
from mmstream.errors import DecodeError

__all__ = ["Facts", "checked", "image_facts"]

Facts: TypeAlias = dict[str, int | float | str]
"""What is known about a file, by the names of `Media.facts`."""

_IMAGES = ("jpg", "png", "webp", "gif", "bmp", "avif")


def checked(medium: Media, name: str, options: MediaOptions) -> Media:
    """Return a medium with its facts, after all checks that `options` asks for.

    Args:
        medium: Its bytes, and its type by the first of them.
        name: Its path or URL, for messages.
        options: What is asked of it.

    Raises:
        RowError: It fails a check.
    """
    if options.check == "none" or medium.extension not in _IMAGES:
        return medium
    try:
        return replace(medium, facts=image_facts(medium, options))
    except RowError as error:
        raise RowError(f"{short_name(name)}: {error}") from None


def image_facts(medium: Media, options: MediaOptions) -> Facts:
    """Return what the header of an image says: ``width`` and ``height``, upright.

    Raises:
        RowError: The image fails a check of `options`. The message does not name the file.
    """
    # Not at the top: it loads Pillow, which planning a conversion does not need.
    from mmstream.decoding.image.formats import decode_bytes, header_shape

    try:
        limits = Limits.start(MAX_PIXELS, MAX_MEMORY, TIMEOUT_S)
        shape = header_shape(medium.data, limits)
        if options.check == "full" or shape is None:  # None: only decoding tells
            pixels, _ = decode_bytes(medium.data, limits)
            shape = (pixels.shape[0], pixels.shape[1])
    except DecodeError as error:
        raise RowError(str(error)) from None
    height, width = shape
    return {"width": width, "height": height, "original_width": width, "original_height": height}
