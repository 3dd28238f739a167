"""The options of a conversion, in groups, and `Options`: those that change its output.

    OPTIONS + rows -> plan -> shards

The plan of a conversion saves `Options`. Whatever only changes how the work is done, such as
`Rerun`, `DownloadOptions` and the number of workers, is not in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeAlias

from mmstream.converting.formats.formats import RowParser
from mmstream.converting.media.hosts import host_rule
from mmstream.converting.rows.detect import RowKind, encoding_name
from mmstream.settings import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Within,
    checked,
    refuse_broken,
)

Action: TypeAlias = Literal["report", "drop"]
"""What becomes of duplicates."""


@checked({"columns": "give {name: column}, such as {'image': 'photo'}"}, own=("encoding",))
@dataclass(frozen=True)
class RowReading:
    """How rows are read, and what they mean. By default their content says it.

    Attributes:
        rows_as: What the rows lie in, such as "csv". Default: their content says it.
        limit: Convert the first so many rows only.
        format: The format of all rows, such as "captions" or "llava": the page on formats of rows
            lists them. Or a function as "module:function". Default: each row is recognised by its
            keys.
        columns: {name that the formats know: name in the rows}, such as ``{"image": "photo"}``.
            A row may lack a column; one that none of the first 10,000 rows has is an error.
        dataset_info: LLaMA-Factory's ``dataset_info.json``, which says what columns and tags the
            rows have. The entry is the one with their file name; ``FILE#NAME`` names another.
        captions: "all": one sample with all captions of a row. "each": one sample per caption.
        group_spans: Consecutive rows about the same medium become one sample with ``segments``, so
            that the medium is stored once.
        encoding: Encoding of files of text that are not UTF-8, such as "gb18030", "shift_jis" or
            "utf-16". A guess is never made.

    Raises:
        ConfigError: A value is impossible. What needs the rows or a file is checked by `convert`.

    Examples:
        >>> reading = mm.RowReading(columns={"image": "photo", "text": "alt"}, captions="each")
        >>> reading.limit is None
        True
    """

    rows_as: RowKind | None = None
    limit: PositiveInt | None = None
    format: str | None = None
    columns: Mapping[str, str] | None = None
    dataset_info: str | os.PathLike[str] | None = None
    captions: Literal["all", "each"] = "all"
    group_spans: bool = False
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.encoding is not None:
            object.__setattr__(self, "encoding", encoding_name(self.encoding))


@checked({"splits": "give {name: fraction}, with fractions that sum to 1"})
@dataclass(frozen=True)
class Splitting:
    """Which rows go to which split. Each split becomes a dataset of its own at ``DEST/NAME``.

    A hash of the row's id decides, so a row stays in its split when more rows are added later.

    Attributes:
        splits: {name: fraction}, with fractions that sum to 1.
        split_by: Key of a group, such as "speaker". All rows of a group go to one split.
        by_media: Rows that name the same image, audio or video go to one split, also where other
            rows connect them. The page on conversion says how.

    Raises:
        ConfigError: A name cannot be a folder, or the fractions do not sum to 1.

    Examples:
        >>> splitting = mm.Splitting({"train": 0.98, "val": 0.02}, split_by="speaker")
    """

    splits: Mapping[str, float]
    split_by: NonEmptyStr | None = None
    by_media: bool = False

    def __post_init__(self) -> None:
        for name, fraction in self.splits.items():
            refuse_broken(
                (
                    not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == "reports",
                    f"splits: {name!r} cannot name a folder; use letters, digits, _ and -",
                ),
                (
                    not 0 < fraction <= 1,
                    f"splits: {name}={fraction} is not a fraction above 0 and up to 1",
                ),
            )
        total = sum(self.splits.values())
        refuse_broken(
            (
                not self.splits,
                "splits is empty: name at least one split, or leave it out to write one dataset",
            ),
            (
                abs(total - 1) > 1e-9,
                f"splits: the fractions sum to {total:g}; they must sum to 1",
            ),
        )


@checked()
@dataclass(frozen=True)
class Duplicates:
    """Which duplicates are looked for in the end, and what becomes of them. By default none.

    "report" lists pairs of samples in ``duplicates.jsonl``. "drop" also lists samples in
    ``mmstream.bad.json``, so that epochs leave them out. The first of them stays.

    Attributes:
        exact: Samples with equal media or text. "drop" is about samples that come twice as a whole.
        near: Images that look alike: encoded again, resized. "drop" looks at the images only,
            whatever the texts say.

    Raises:
        ConfigError: A value is neither "report" nor "drop".

    Examples:
        >>> duplicates = mm.Duplicates(exact="drop", near="report")
    """

    exact: Action | None = None
    near: Action | None = None


@checked()
@dataclass(frozen=True)
class Rerun:
    """What a conversion does with what an earlier one wrote. By default it goes on from there.

    Attributes:
        overwrite: Replace another conversion, or an unfinished one.
        check: Also read the shards that an earlier call wrote, and compare their checksums. Damaged
            ones are written again.
        retry_rejects: Try the rejected rows of a finished conversion again. What becomes a sample
            goes into extra shards after the last one. The other shards are not touched.
        append: Add the rows to a finished dataset that was converted with the same options, as
            shards after the last one. Rows that it has already are rejects.

    Raises:
        ConfigError: More than one of `retry_rejects`, `append` and `overwrite`.

    Examples:
        >>> rerun = mm.Rerun(check=True)
    """

    overwrite: bool = False
    check: bool = False
    retry_rejects: bool = False
    append: bool = False

    def __post_init__(self) -> None:
        refuse_broken(
            (
                self.retry_rejects and self.overwrite,
                "retry_rejects=True adds shards to a finished dataset; leave out overwrite=True",
            ),
            (
                self.append and (self.overwrite or self.retry_rejects),
                "append=True adds rows to a finished dataset; leave out overwrite=True and "
                "retry_rejects=True",
            ),
        )


ImageFormat: TypeAlias = Literal["jpg", "png", "webp"]

Quality: TypeAlias = Annotated[int, Within(1, 100, "a whole number from 1 to 100")]
Aspect: TypeAlias = Annotated[float, Within(1, 1e9, "a number from 1 up")]

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

    check: Literal["none", "header", "full"] = "header"
    max_image_side: PositiveInt | None = None
    image_quality: Quality | None = None
    image_format: ImageFormat | None = None
    video_format: Literal["mp4"] | None = None
    min_image_side: PositiveInt | None = None
    max_aspect: Aspect | None = None
    min_duration_s: NonNegativeFloat | None = None
    max_duration_s: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        shortest, longest, quality = self.min_duration_s, self.max_duration_s, self.image_quality
        limits = (
            "min_image_side",
            "max_aspect",
            "min_duration_s",
            "max_duration_s",
            "video_format",
        )
        used = next((name for name in limits if getattr(self, name) is not None), None)
        refuse_broken(
            (
                shortest is not None and longest is not None and shortest > longest,
                f"min_duration_s={shortest} is more than max_duration_s={longest}: no file fits",
            ),
            (
                self.check == "none" and used is not None,
                f"{used} needs the headers of files: set check to 'header'",
            ),
            (
                quality is not None and not self.changes_images,
                f"image_quality={quality} changes nothing by itself: set max_image_side or "
                "image_format, too",
            ),
            (
                quality is not None and self.image_format == "png",
                "image_quality: PNG has no quality; leave it out",
            ),
        )

    @property
    def changes_images(self) -> bool:
        """Whether some images may be stored with other bytes than they have."""
        return self.max_image_side is not None or self.image_format is not None

    @property
    def is_plain(self) -> bool:
        """Whether files are stored as they are, and rejected for nothing but their type."""
        return self.check != "full" and changed_settings(self).keys() <= {"check"}

    @property
    def quality(self) -> int:
        """The quality that counts: `image_quality`, or its default."""
        return DEFAULT_QUALITY if self.image_quality is None else self.image_quality

    def plan(self) -> dict[str, Any]:
        """Return what the plan saves: changed settings, and the libraries that re-encode media.

        Other versions of them may give other bytes. So a conversion goes on with the same ones.
        """
        names = [
            *(_LIBRARIES if self.changes_images else ()),
            *(["av"] if self.video_format else ()),
        ]
        versions = {"libraries": {name: version(name) for name in names}} if names else {}
        return {**changed_settings(self), **versions}


@checked()
@dataclass(frozen=True)
class DownloadOptions:
    """How to download media that rows name by ``http://`` and ``https://`` URLs.

    The worker processes of a conversion share the connections.

    Args:
        num_connections: Downloads that run at the same time, over all worker processes of this
            machine. Each worker has one at least.
        num_connections_per_host: The same, to one host. A host that asks for patience (429, 503)
            gets fewer for a while.
        timeout_s: Seconds for one try. A try gets a further second for every 128 KiB that arrived,
            so that a large file may take longer.
        idle_timeout_s: Seconds without a byte, after which a try has failed.
        num_tries: Tries of one URL. Only failures that may pass are tried again: time-outs, broken
            connections, a DNS server that does not answer, and the statuses 408, 425, 429 and 5xx.
        max_bytes: Longest medium in bytes, also after decompression.
        max_redirects: Redirects that one download follows.
        honor_robots: Refuse media whose server says ``noai``, ``noimageai``, ``noindex`` or
            ``noimageindex`` in ``X-Robots-Tag``, or reserves its rights by ``TDM-Reservation: 1``.
        allow_hosts: Hosts that may have private addresses and any port, as ``NAME`` or
            ``NAME:PORT``. By default, addresses that are not public are refused.
        max_unanswered: Stop with a StorageError after so many downloads in a row that no server
            answered. 0: never stop.

    Raises:
        ConfigError: A value is impossible.

    Examples:
        >>> options = mm.DownloadOptions(num_tries=5, allow_hosts=("media.lan", "127.0.0.1:8080"))
        >>> options.num_connections
        64
    """

    num_connections: PositiveInt = 64
    num_connections_per_host: PositiveInt = 16
    timeout_s: Seconds = 20.0
    idle_timeout_s: Seconds = 10.0
    num_tries: PositiveInt = 3
    max_bytes: PositiveInt = 128 << 20
    max_redirects: NonNegativeInt = 5
    honor_robots: bool = True
    allow_hosts: tuple[str, ...] = ()
    max_unanswered: NonNegativeInt = 100

    def __post_init__(self) -> None:
        for host in self.allow_hosts:
            host_rule(host)


GROUPS: dict[str, type] = {
    "reading": RowReading,
    "splitting": Splitting,
    "media": MediaOptions,
    "downloads": DownloadOptions,
    "duplicates": Duplicates,
    "rerun": Rerun,
}
"""Arguments of `convert` that are several settings, and their types."""

FLAGS = {
    "reading": {
        "rows_as": "--rows-as",
        "encoding": "--encoding",
        "limit": "--limit",
        "format": "--format",
        "columns": "--map",
        "dataset_info": "--dataset-info",
        "captions": "--captions",
    },
    "splitting": {"splits": "--split", "split_by": "--split-by", "by_media": "--split-by-media"},
    "media": {
        "check": "--media-check",
        "max_image_side": "--max-image-side",
        "image_format": "--image-format",
    },
    "downloads": {
        "num_connections": "--num-connections",
        "honor_robots": "--ignore-robots",
        "allow_hosts": "--allow-host",
    },
    "duplicates": {"exact": "--duplicates"},
    "rerun": {
        "overwrite": "--overwrite",
        "check": "--check",
        "retry_rejects": "--retry-rejects",
        "append": "--append",
    },
}
"""{argument of `convert`: {setting: option of ``mmstream convert``}}. Few need the others."""


def changed_settings(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass that are not at their defaults."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    defaults = {field.name: field.default for field in fields(settings)}
    return {name: value for name, value in values.items() if value != defaults[name]}


@dataclass(frozen=True)
class Options:
    """The caller's options that change the output. Impossible ones raise ConfigError."""

    samples_per_shard: int
    reading: RowReading
    row: Callable[[dict[str, Any]], dict[str, Any] | None] | None
    shuffle_seed: int | None
    splitting: Splitting | None
    media: MediaOptions = field(default_factory=MediaOptions)
    sidecar: bool = True
    duplicates: Duplicates = field(default_factory=Duplicates)
    format: RowParser = field(init=False)
    """How rows become drafts: the part of `reading` that the workers need, and `row`."""

    def __post_init__(self) -> None:
        reading = self.reading
        columns = tuple((reading.columns or {}).items())
        info = None if reading.dataset_info is None else os.fspath(reading.dataset_info)
        row_format = RowParser(reading.format, columns, self.row, info)
        object.__setattr__(self, "format", row_format)
        exact, near = self.duplicates.exact, self.duplicates.near
        if not self.sidecar:
            refuse_broken(
                (exact, f"exact={exact!r}: needs the sidecars; do not switch them off"),
                (near, f"near={near!r}: needs the sidecars; do not switch them off"),
            )
