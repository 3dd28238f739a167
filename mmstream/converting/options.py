"""The options of a conversion, in groups, and `Options`: those that change its output.

    OPTIONS + rows -> plan -> shards

The plan of a conversion saves `Options`. Whatever only changes how the work is done, such as
`Rerun` and the number of workers, is not in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mmstream.converting.formats.row_format import RowFormat
from mmstream.converting.media.options import MediaOptions
from mmstream.converting.rows.detect import RowKind, RowOptions
from mmstream.converting.rows.encodings import encoding_name
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import Fraction, NonEmptyStr, PositiveInt, checked

Action: TypeAlias = Literal["report", "drop"]
"""What becomes of duplicates."""


@checked(own=("encoding",))
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
            "utf-16". A guess is never made; the log says what such a file may be.

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

    splits: Mapping[str, Fraction]
    split_by: NonEmptyStr | None = None
    by_media: bool = False

    def __post_init__(self) -> None:
        for name, fraction in self.splits.items():
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name == "reports":
                raise ConfigError(
                    f"splits: {name!r} cannot name a folder; use letters, digits, _ and -"
                )
            if not fraction:
                raise ConfigError(
                    f"splits: {name}={fraction} is not a fraction above 0 and up to 1"
                )
        if not self.splits:
            raise ConfigError(
                "splits is empty: name at least one split, or leave it out to write one dataset"
            )
        total = sum(self.splits.values())
        if abs(total - 1) > 1e-9:
            raise ConfigError(f"splits: the fractions sum to {total:g}; they must sum to 1")


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
            goes into extra shards behind the last one. The other shards are not touched.

    Raises:
        ConfigError: `retry_rejects` together with `overwrite`.

    Examples:
        >>> rerun = mm.Rerun(check=True)
    """

    overwrite: bool = False
    check: bool = False
    retry_rejects: bool = False

    def __post_init__(self) -> None:
        if self.retry_rejects and self.overwrite:
            raise ConfigError(
                "retry_rejects=True adds shards to a finished dataset; leave out overwrite=True"
            )


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
    format: RowFormat = field(init=False)
    """How rows become drafts: the part of `reading` that the workers need, and `row`."""

    def __post_init__(self) -> None:
        reading = self.reading
        columns = tuple((reading.columns or {}).items())
        info = None if reading.dataset_info is None else os.fspath(reading.dataset_info)
        row_format = RowFormat(reading.format, columns, self.row, info)
        object.__setattr__(self, "format", row_format)
        for name in ("exact", "near"):
            action = getattr(self.duplicates, name)
            if action is not None and not self.sidecar:
                raise ConfigError(f"{name}={action!r}: needs the sidecars; do not switch them off")

    @property
    def row_options(self) -> RowOptions:
        """How rows are read: the part of `reading` that the source of the rows needs."""
        return RowOptions(
            rows_as=self.reading.rows_as,
            encoding=self.reading.encoding,
            limit=self.reading.limit,
            group_spans=self.reading.group_spans,
            run_length=self.samples_per_shard if self.shuffle_seed is None else 1,
            media_keys=tuple(theirs for _, theirs in self.format.columns),
        )
