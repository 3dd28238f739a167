"""A data set of LeRobot, version 2 or 3: one row for each episode.

    meta/info.json                        what the features are, and where files lie
    meta/episodes.jsonl                   version 2: the episodes; a table and videos for each
    meta/episodes/chunk-*/file-*.parquet  version 3: the episodes, each with its part of the files
    data/                                 tables with a row for each frame
    videos/                               one video for each camera

    a folder or prefix -> LEROBOT -> spool

The numbers of an episode are read here, and lie in the spool as npy files; so do pictures that lie
in the tables. Its videos are only named: `media.load` reads their parts. One row group of a table
is in memory at a time, and the whole list of version 2.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from mmstream.converting.draft import RowError
from mmstream.converting.formats.lerobot import MAX_FPS, MEMBER_STEM, Episode, EpisodeVideo
from mmstream.converting.media.types import sniff
from mmstream.converting.rows.fetch import InputFile
from mmstream.converting.rows.parquet import ParquetFile, rows_of_batch
from mmstream.converting.rows.records import lines_of
from mmstream.converting.rows.spool import NumberedRow
from mmstream.errors import ConfigError, MMStreamError, StorageError, escaped
from mmstream.storage import Store, open_store
from mmstream.storage.store import NotAFileError, TooLargeError

__all__ = ["is_lerobot", "iter_episodes"]

_INFO = "meta/info.json"
_LIST = "meta/episodes.jsonl"
MAX_INFO_BYTES = 16 << 20
"""Largest file that says what the features are."""
MAX_LIST_BYTES = 1 << 30
"""Largest list of episodes of version 2."""
_VERSION = re.compile(r"v?[23]\.\d+(\.\d+)?")
_NUMBER = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_REPLACED = re.compile(r"\{(\w+)(?::0(\d)d)?\}")
_FILE_KEYS = ("chunk_index", "file_index")
"""What the list of version 3 says of a file, and what the templates of its paths name."""
_COUNTERS = ("index", "episode_index", "frame_index")
"""Numbers of frames and episodes: they say nothing that the place of a frame does not say."""


class _Feature(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    names: Any = None


class _Info(msgspec.Struct):
    codebase_version: str
    fps: float
    features: dict[str, _Feature]
    data_path: str
    video_path: str | None = None
    chunks_size: int = 1000
    robot_type: str | None = None

    @property
    def major(self) -> int:
        """2 or 3."""
        return int(self.codebase_version.removeprefix("v")[0])

    @property
    def cameras(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "video"]

    @property
    def pictures(self) -> list[str]:
        """Names of the cameras whose frames lie in the tables."""
        return [key for key, feature in self.features.items() if feature.dtype == "image"]

    @property
    def columns(self) -> list[str]:
        """Names of the numbers and texts in the tables, without the counters."""
        return [
            key
            for key, feature in self.features.items()
            if feature.dtype not in ("video", "image") and key not in _COUNTERS
        ]


class _Version(msgspec.Struct):
    codebase_version: str


def is_lerobot(url: str) -> bool:
    """Tell whether a folder or prefix is a data set of LeRobot, of any version.

    Raises:
        StorageError: An object store failed after retries.
    """
    try:
        content = open_store(url).read(_INFO, max_bytes=MAX_INFO_BYTES)
        msgspec.json.decode(content, type=_Version)
    except (FileNotFoundError, NotADirectoryError, NotAFileError, TooLargeError):
        return False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def iter_episodes(url: str) -> Iterator[NumberedRow]:
    """Yield (number from 1, row) of each episode, in the order of the list of episodes.

    An episode whose table is missing, damaged or of another length has a `RowError`.

    Raises:
        ConfigError: A version or a feature that is not read, or there is no list of episodes.
    """
    store = open_store(url)
    info = _read_info(store)
    tables = _Tables(store, info)
    for number, listed in _listed(store, info):
        if isinstance(listed, RowError):
            yield number, listed
            continue
        try:
            yield number, _row(listed, info, tables)
        except RowError as error:
            name = escaped(listed.get("episode_index"), 20)
            yield number, RowError(f"episode {name}: {error}")


def _read_info(store: Store) -> _Info:
    url = store.url_of(_INFO)
    content = store.read(_INFO, max_bytes=MAX_INFO_BYTES)
    version = msgspec.json.decode(content, type=_Version).codebase_version
    if not _VERSION.fullmatch(version):
        raise ConfigError(
            f"{url}: codebase_version {escaped(version, 20)!r} is not read; write the data set as "
            "v3.0 with the converters of lerobot"
        )
    try:
        info = msgspec.json.decode(content, type=_Info)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{url}: {escaped(error, 200)}; mend the file") from None
    if not 0 < info.fps <= MAX_FPS or info.chunks_size < 1:
        raise ConfigError(f"{url}: fps and chunks_size must be above 0; mend the file")
    names = [key.lower() for key in info.features]  # as a tar is read
    for key, feature in info.features.items():
        _require_readable(key, feature, url)
        if names.count(key.lower()) > 1:
            raise ConfigError(
                f"{url}: feature {key}: another one differs from it in capital letters alone; "
                "rename it"
            )
    if info.cameras and info.video_path is None:
        raise ConfigError(f"{url}: {info.cameras[0]} is a video, and there is no video_path")
    return info


def _require_readable(key: str, feature: _Feature, url: str) -> None:
    """Refuse a feature that cannot become a member of a tar."""
    name = escaped(key, 100)
    if not MEMBER_STEM.fullmatch(key):
        raise ConfigError(
            f"{url}: feature {name}: no name of a file in a tar; rename it, with letters, digits, "
            "'.', '_' and '-'"
        )
    if feature.dtype not in ("video", "image", "string") and not _NUMBER.fullmatch(feature.dtype):
        raise ConfigError(
            f"{url}: feature {name}: dtype {escaped(feature.dtype, 40)!r} is not read; take it out "
            "of features"
        )


def _listed(store: Store, info: _Info) -> Iterator[NumberedRow]:
    """Yield (number, what the list says) of each episode."""
    if info.major == 2:
        try:
            lines = io.BytesIO(store.read(_LIST, max_bytes=MAX_LIST_BYTES))
        except FileNotFoundError:
            raise ConfigError(
                f"{store.url_of(_LIST)}: no such file, and it lists the episodes; fetch it again"
            ) from None
        for number, row in lines_of(lines):
            is_bad = not isinstance(row, dict | RowError)
            yield number, RowError("no object of an episode") if is_bad else row
        return
    lists = open_store(store.url_of("meta/episodes"))
    paths = [
        f"{chunk}/{name}"
        for chunk in lists.folders()
        for name in sorted(open_store(lists.url_of(chunk)).list())
        if name.endswith(".parquet")
    ]
    if not paths:
        raise ConfigError(
            f"{store.url}/meta/episodes: no tables, and they list the episodes; fetch them again"
        )
    number = 0
    for path in paths:
        file = ParquetFile.open(InputFile(lists.url_of(path), f"meta/episodes/{path}"))
        columns = [name for name in file.column_names() if not name.startswith(("stats/", "meta/"))]
        for group in range(len(file.group_sizes)):
            for batch in file.batches(group, columns):
                for row in rows_of_batch(batch):
                    number += 1
                    yield number, row


def _row(listed: dict[str, Any], info: _Info, tables: _Tables) -> dict[str, Any]:
    index, length = _number(listed, "episode_index"), _number(listed, "length")
    if length < 1:
        raise RowError("length is 0")
    tasks = listed.get("tasks", [])
    members, pictures = tables.members(_data_path(listed, info), index, length)
    episode = Episode(
        id=index,
        codebase_version=info.codebase_version,
        robot_type=info.robot_type,
        episode_index=index,
        length=length,
        fps=info.fps,
        tasks=[tasks] if isinstance(tasks, str) else tasks,
        names={key: names for key in info.columns if (names := info.features[key].names)},
        videos={key: _video(key, listed, info, length) for key in info.cameras},
        members=members,
        pictures=pictures,
    )
    row: dict[str, Any] = msgspec.to_builtins(episode, builtin_types=(bytes,))
    return row


def _data_path(listed: Mapping[str, Any], info: _Info) -> str:
    if info.major == 2:
        return _path(info.data_path, _numbers_of_episode(listed, info))
    return _path(info.data_path, {key: _number(listed, f"data/{key}") for key in _FILE_KEYS})


def _video(key: str, listed: Mapping[str, Any], info: _Info, length: int) -> EpisodeVideo:
    """Return which frames of which file show an episode."""
    template = info.video_path or ""
    if info.major == 2:
        path = _path(template, {**_numbers_of_episode(listed, info), "video_key": key})
        return EpisodeVideo(path, None)
    numbers = {name: _number(listed, f"videos/{key}/{name}") for name in _FILE_KEYS}
    path = _path(template, {**numbers, "video_key": key})
    start_s, end_s = (_seconds(listed, f"videos/{key}/{end}_timestamp") for end in ("from", "to"))
    num_frames = round((end_s - start_s) * info.fps)
    if num_frames not in (length, length - 1):  # some writers give the time of the last frame
        raise RowError(
            f"videos/{key}: {num_frames} frames from {start_s:g} to {end_s:g} s, and the episode "
            f"has {length}"
        )
    return EpisodeVideo(path, start_s)


def _numbers_of_episode(listed: Mapping[str, Any], info: _Info) -> dict[str, int]:
    index = _number(listed, "episode_index")
    return {"episode_index": index, "episode_chunk": index // info.chunks_size}


def _path(template: str, values: Mapping[str, int | str]) -> str:
    """Return a path of a template such as ``data/chunk-{chunk_index:03d}/a.parquet``.

    The template may be a stranger's, so `str.format`, which does more, is not used.
    """

    def text(name: re.Match[str]) -> str:
        value = values.get(name[1])
        if value is None:
            raise RowError(f"{escaped(template, 200)}: {{{name[1]}}} is not known")
        return str(value).zfill(int(name[2] or 0))

    path = _REPLACED.sub(text, template)
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or "://" in path:
        raise RowError(f"{escaped(path, 200)}: lies outside the data set")
    return path


def _number(listed: Mapping[str, Any], key: str) -> int:
    value = listed.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise RowError(f"{key}: expected a whole number, found {escaped(value, 40)}")
    return value


def _seconds(listed: Mapping[str, Any], key: str) -> float:
    value = listed.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise RowError(f"{key}: expected seconds, found {escaped(value, 40)}")
    return float(value)


class _Tables:
    """The tables of a data set. One row group is kept, since episodes follow each other in it."""

    def __init__(self, store: Store, info: _Info) -> None:
        self._store, self._info = store, info
        self._path = ""
        self._file: ParquetFile | None = None
        self._episodes = np.zeros(0, np.int64)
        self._group: tuple[int, Any] | None = None

    def members(
        self, path: str, episode: int, length: int
    ) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return {member: bytes} of an episode's numbers and texts, and of its pictures.

        Raises:
            RowError: The table is missing or damaged, or has other rows than the episode.
        """
        try:
            table = self._rows(path, episode, length)
        except FileNotFoundError:
            raise RowError(f"{path}: no such file") from None
        except (RowError, StorageError):
            raise
        except MMStreamError as error:
            raise RowError(str(error)) from None
        if table["frame_index"].to_pylist() != list(range(length)):
            raise RowError(f"{path}: frame_index does not count from 0 to {length - 1}")
        members: dict[str, bytes] = {}
        pictures: dict[str, bytes] = {}
        for key in self._info.pictures:
            try:
                pictures |= _pictures(key, table[key])
            except RowError as error:
                raise RowError(f"{path}: {key}: {error}") from None
        for key in self._info.columns:
            feature = self._info.features[key]
            try:
                if feature.dtype == "string":
                    members[f"{key}.json"] = msgspec.json.encode(table[key].to_pylist())
                else:
                    members[f"{key}.npy"] = _npy(table[key], (length, *feature.shape))
            except (RowError, UnicodeDecodeError) as error:
                raise RowError(f"{path}: {key}: {error}") from None
        return members, pictures

    def _rows(self, path: str, episode: int, length: int) -> Any:
        """Return the rows of an episode, as an Arrow table."""
        file = self._open(path)
        rows = np.flatnonzero(self._episodes == episode)
        if len(rows) != length:
            raise RowError(f"{path}: {len(rows)} rows of the episode, and its length is {length}")
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if stop - start != length:
            raise RowError(f"{path}: the rows of the episode do not follow each other")
        tables, first = [], 0
        for group, size in enumerate(file.group_sizes):
            begin, end = max(start, first), min(stop, first + size)
            if begin < end:
                tables.append(self._read_group(file, group).slice(begin - first, end - begin))
            first += size
        return pa.concat_tables(tables)

    def _open(self, path: str) -> ParquetFile:
        """Open a table, unless it is the last one, and read which episode each row is of."""
        if self._file is not None and path == self._path:
            return self._file
        self._file = self._group = None
        file = ParquetFile.open(InputFile(self._store.url_of(path), path))
        wanted = {*self._info.columns, *self._info.pictures, "episode_index", "frame_index"}
        missing = sorted(wanted.difference(file.column_names()))
        if missing:
            raise RowError(f"{path}: has no column {escaped(missing[0], 100)}")
        batches = (
            batch
            for group in range(len(file.group_sizes))
            for batch in file.batches(group, ["episode_index"])
        )
        columns = [_numbers(pa.chunked_array([batch.column(0)])) for batch in batches]
        self._episodes = np.concatenate(columns or [np.zeros(0, np.int64)])
        self._path, self._file = path, file
        return file

    def _read_group(self, file: ParquetFile, group: int) -> Any:
        if self._group is None or self._group[0] != group:
            columns = [*self._info.columns, *self._info.pictures, "frame_index"]
            batches = file.batches(group, columns)
            self._group = group, pa.Table.from_batches(list(batches))
        return self._group[1]


def _pictures(key: str, column: Any) -> dict[str, bytes]:
    """Return {member: bytes} of a camera whose frames are structs ``{bytes, path}``."""
    if not (pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0):
        raise RowError(f"no pictures but {column.type}")
    pictures = {}
    for frame, value in enumerate(column.to_pylist()):
        data = (value or {}).get("bytes")
        if not isinstance(data, bytes) or not data:
            raise RowError(f"frame {frame} has no bytes")
        kind = sniff(data)
        if kind is None or kind.kind != "image":
            raise RowError(f"frame {frame} is no picture (starts with {data[:12]!r})")
        pictures[f"{key}.{frame:06d}.{kind.extension}"] = data
    return pictures


def _npy(column: Any, shape: tuple[int, ...]) -> bytes:
    """Return a column of numbers as an npy file, in its own type."""
    array = _numbers(column)
    if array.size != math.prod(shape):
        raise RowError(f"{array.size} numbers, and the shape is {list(shape)}")
    file = io.BytesIO()
    np.save(file, array.reshape(shape), allow_pickle=False)
    return file.getvalue()


def _numbers(column: Any) -> Any:
    """Return the numbers of a column, its lists laid end to end."""
    values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.int64())
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    while _is_list(values.type):
        if values.null_count or not _has_equal_lists(values):
            raise RowError("its rows have different lengths")
        values = values.flatten()
    if values.null_count:
        raise RowError("some of its values are missing")
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "biuf":
        raise RowError(f"no numbers but {values.type}")
    return array


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind))


def _has_equal_lists(values: Any) -> bool:
    """Tell whether all lists of an Arrow array have the same length."""
    if pa.types.is_fixed_size_list(values.type):
        return True
    lengths = np.diff(values.offsets.to_numpy())
    return bool((lengths == lengths[:1]).all())
