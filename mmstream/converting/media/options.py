"""`MediaOptions`: what a conversion asks of media files, and how it changes them.

Place in the flow: a part of the conversion's `Options`, so the plan saves it. `check.py` applies
the checks, `images.py` and `remux.py` the changes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeAlias

from mmstream.errors import ConfigError
from mmstream.wrong_arguments import (
    NonNegativeFloat,
    PositiveInt,
    Within,
    checked,
)

Check: TypeAlias = Literal["none", "header", "full"]
ImageFormat: TypeAlias = Literal["jpg", "png", "webp"]
VideoFormat: TypeAlias = Literal["mp4"]

Quality: TypeAlias = Annotated[int, Within(1, 100, "a whole number from 1 to 100")]
Aspect: TypeAlias = Annotated[float, Within(1, 1e9, "a number from 1 up")]

MEDIA_FLAGS = {
    "check": "--media-check",
    "max_image_side": "--max-image-side",
    "image_quality": "--image-quality",
    "image_format": "--image-format",
    "video_format": "--video-format",
    "min_image_side": "--min-image-side",
    "max_aspect": "--max-aspect",
    "min_duration_s": "--min-duration",
    "max_duration_s": "--max-duration",
}
"""The flag of ``mmstream convert`` for each setting."""

_LIBRARIES = ("pillow", "simplejpeg", "torch")
"""What decodes, resizes and encodes images."""

DEFAULT_QUALITY = 95
"""Quality of images that are encoded again, where `image_quality` is not set."""


@checked()
@dataclass(frozen=True)
class MediaOptions:
    """What a conversion asks of media files, and how it changes them.

    A row with a file that fails a check is rejected, with the reason. By default files are stored
    byte for byte as they are. They are also stored so where a change is asked for and the file
    needs none.

    Attributes:
        check: How much of a file is read. "none": its first bytes, for its type. "header": also its
            size, duration and so on, without decoding it. "full": everything is decoded once, as
            strictly as in training.
        max_image_side: Images with a longer side than this are made smaller, to this side. None: as
            they are. Images are never made larger.
        image_quality: Quality of images that are encoded again as JPEG or WebP, 1 to 100. Default:
            95.
        image_format: Store all images as "jpg", "png" or "webp". None: as they are.
        video_format: "mp4": store videos of other containers as MP4, of the same packets, where
            frames, times and sound stay the same. Of an MP4, training reads a small part of a large
            file without the rest. Subtitles are left out. None: as they are.
        min_image_side: Reject images with a shorter side than this, in pixels of the original.
        max_aspect: Reject images whose longer side is more than this many times the shorter one.
        min_duration_s: Reject audio and video files that are shorter, in seconds, or whose duration
            is unknown.
        max_duration_s: Reject audio and video files that are longer, in seconds, or whose duration
            is unknown.

    Raises:
        ConfigError: A value is impossible, or two of them contradict each other.

    Examples:
        Images of at most 1024 pixels on their longer side, and none below 64 on the shorter one:

        >>> media = mm.MediaOptions(max_image_side=1024, min_image_side=64)
        >>> media.check
        'header'
    """

    check: Check = "header"
    max_image_side: PositiveInt | None = None
    image_quality: Quality | None = None
    image_format: ImageFormat | None = None
    video_format: VideoFormat | None = None
    min_image_side: PositiveInt | None = None
    max_aspect: Aspect | None = None
    min_duration_s: NonNegativeFloat | None = None
    max_duration_s: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        shortest, longest = self.min_duration_s, self.max_duration_s
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"min_duration_s={shortest} is more than max_duration_s={longest}: no file fits"
            )
        limits = (
            "min_image_side",
            "max_aspect",
            "min_duration_s",
            "max_duration_s",
            "video_format",
        )
        used = [name for name in limits if getattr(self, name) is not None]
        if self.check == "none" and used:
            raise ConfigError(f"{used[0]} needs the headers of files: set check to 'header'")
        if self.image_quality is not None and not self.changes_images:
            raise ConfigError(
                f"image_quality={self.image_quality} changes nothing by itself: "
                "set max_image_side or image_format, too"
            )
        if self.image_format == "png" and self.image_quality is not None:
            raise ConfigError("image_quality: PNG has no quality; leave it out")

    @property
    def changes_images(self) -> bool:
        """Whether some images may be stored with other bytes than they have."""
        return self.max_image_side is not None or self.image_format is not None

    @property
    def is_plain(self) -> bool:
        """Whether files are stored as they are, and rejected for nothing but their type."""
        return self.check != "full" and self.settings().keys() <= {"check"}

    @property
    def quality(self) -> int:
        """The quality that counts: `image_quality`, or its default."""
        return DEFAULT_QUALITY if self.image_quality is None else self.image_quality

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not at their default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def plan(self) -> dict[str, Any]:
        """Return what the plan saves: `settings`, and the libraries that write media anew.

        Other versions of them may give other bytes. So a conversion goes on with the same ones.
        """
        names = [
            *(_LIBRARIES if self.changes_images else ()),
            *(["av"] if self.video_format else ()),
        ]
        if not names:
            return self.settings()
        return {**self.settings(), "libraries": {name: version(name) for name in names}}
