"""A plan in a folder, local or remote.

    mmstream.plan.NAME/        beside the manifest, or in a folder of its own
        plan.json              settings, shards, groups, and the files of the arrays
        units.<hash>.npy       int64 [num_units, 8]
        members.<hash>.npy     int64 [num_members]
        tokens.<hash>.npy      int32 [num_members]
        left_out.<hash>.npy    int64 [n, 3]

The files take 12 bytes a sample and 64 a pack. They are mapped: all processes of a machine share
their pages.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
import time
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import IndexPart, ShardInfo, decode_sealed, read_sealed, seal
from mmstream.dataset.shard_indexes import fetch_part, map_cached
from mmstream.errors import ConfigError, ManifestError, StateError, escaped
from mmstream.packing.measure_file import is_same_shard, require_name
from mmstream.packing.plan import PackPlan
from mmstream.packing.settings import PackLimits
from mmstream.storage import Store, map_file, open_store
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

PLAN_NAME = "plan.json"
PLAN_PREFIX = "mmstream.plan."

FORMAT_VERSION = 1

MAX_JSON_BYTES = 256 << 20
"""Largest plan.json."""

BLOCK_ROWS = 1 << 20
"""Rows that are compared at a time."""

_CURE = "run `mmstream plan` again"

_DTYPES = {"units": "<i8", "members": "<i8", "tokens": "<i4", "left_out": "<i8"}


MAX_COUNT = 1 << 48
"""Shards, units, samples of a shard, and its bytes are fewer, so that they fit in arrays."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]


@dataclass(frozen=True)
class _File:
    """The content of plan.json."""

    version: int
    settings: dict[str, Any]
    digest: str
    arrays: dict[str, ArrayInfo]
    group_stops: list[Count]
    counts: list[Count]
    group_digests: list[str]
    spread: int
    shards: list[ShardInfo]
    lengths: dict[str, Any] = field(default_factory=dict)


def plan_folder(url: str, name: str) -> str:
    """Return where the plan of a dataset lies by default.

    Examples:
        >>> plan_folder("s3://bucket/corpus", "8k")
        's3://bucket/corpus/mmstream.plan.8k'
    """
    require_name(name)
    return f"{url.rstrip('/')}/{PLAN_PREFIX}{name}"


def write_plan(plan: PackPlan, folder: str) -> PackPlan:
    """Write a plan, and return it as it is opened from there.

    An older plan of the folder is replaced when plan.json is replaced. Equal plans give equal
    files.

    Args:
        plan: What to write.
        folder: Path or URL.

    Raises:
        LockedError: Another process writes a plan there.
        StorageError: The storage failed after retries.
    """
    store = open_store(folder)
    with write_lock(store, "plan"):
        _write(plan, store)
    return open_plan(folder)


def _write(plan: PackPlan, store: Store) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "units": plan.unit_rows,
        "members": plan.members,
        "tokens": plan.member_tokens,
        "left_out": plan.left_out,
    }
    infos = {stem: write_array(store, stem, array) for stem, array in arrays.items()}
    content = _File(
        version=FORMAT_VERSION,
        settings=plan.settings.as_json(),
        digest=plan.digest,
        arrays=infos,
        group_stops=plan.group_stops.tolist(),
        counts=plan.counts.tolist(),
        group_digests=list(plan.group_digests),
        spread=plan.spread,
        shards=list(plan.shards),
        lengths=dict(plan.lengths),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
    store.write(PLAN_NAME, seal(text))
    remove_arrays(store, {info.name for info in infos.values()})


def open_plan(folder: str) -> PackPlan:
    """Open a plan. Its arrays are mapped, and are read when they are used.

    Args:
        folder: Path or URL. A remote plan is copied into the cache of this machine, once.

    Raises:
        FileNotFoundError: There is no plan.
        ManifestError: It is damaged.
        StorageError: The storage failed after retries.
    """
    return _open(open_store(folder))


def reopen_plan(folder: str, file_digest: str) -> PackPlan:
    """Open a plan that another process has opened, and checked.

    Raises:
        StateError: There is another plan in the folder now.
        FileNotFoundError, ManifestError, StorageError: As `open_plan`.
    """
    return _open(open_store(folder), file_digest)


def _open(store: Store, expected_digest: str | None = None) -> PackPlan:
    name = store.url_of(PLAN_NAME)
    file, file_digest = read_sealed(
        store, PLAN_NAME, MAX_JSON_BYTES, lambda data: _decode(data, name)
    )
    check = expected_digest is None
    if expected_digest not in (None, file_digest):
        raise StateError(f"{name}: the plan was replaced while this run used it; start it again")
    units, members, tokens, left_out = (
        open_array(
            store, file.arrays[stem], dtype, 1 + (stem in ("units", "left_out")), check=check
        )
        for stem, dtype in _DTYPES.items()
    )
    plan = PackPlan(
        settings=_limits(file.settings, name),
        digest=file.digest,
        shards=tuple(file.shards),
        group_stops=np.array(file.group_stops, dtype=np.int64),
        counts=np.array(file.counts, dtype=np.int64),
        group_digests=tuple(file.group_digests),
        spread=file.spread,
        unit_rows=units,
        members=members,
        member_tokens=tokens,
        left_out=left_out,
        lengths=file.lengths,
        url=store.url,
        reopen=partial(reopen_plan, store.url, file_digest),
    )
    if check:
        _require_whole(plan, name)
    return plan


def _decode(data: bytes, name: str) -> tuple[_File, str]:
    file = decode_sealed(data, name, _File, newest=FORMAT_VERSION, cure=_CURE)
    if missing := _DTYPES.keys() - file.arrays.keys():
        raise ManifestError(f"{name}: lists no {sorted(missing)[0]}; {_CURE}")
    return file, hashlib.sha256(data).hexdigest()


def _limits(settings: dict[str, Any], name: str) -> PackLimits:
    try:
        return PackLimits(**settings)
    except (ConfigError, TypeError) as error:
        raise ManifestError(f"{name}: settings: {escaped(error)}; {_CURE}") from None


def _require_whole(plan: PackPlan, name: str) -> None:
    """Raise a ManifestError where the numbers of a plan cannot be those of its shards."""
    num_groups, num_shards = plan.counts.size, len(plan.shards)
    stops = plan.group_stops
    num_samples = sum(shard.num_samples for shard in plan.shards)
    first = plan.unit_rows[:, 0] if plan.unit_rows.shape[1:] == (8,) else None
    sizes = [(shard.num_samples, shard.num_bytes) for shard in plan.shards]
    is_whole = (
        all(0 <= number < MAX_COUNT for size in sizes for number in size)
        and stops.size == num_groups == len(plan.group_digests)
        and bool((np.diff(np.concatenate([[0], stops])) > 0).all())
        and (int(stops[-1]) if num_groups else 0) == num_shards
        and plan.spread >= 1
        and bool((plan.counts >= 0).all())
        and int(plan.counts.sum()) == plan.num_units
        and first is not None
        and plan.members.shape == plan.member_tokens.shape
        and plan.left_out.shape == (num_samples - plan.members.size, 3)
        and (int(first[0]) if first.size else plan.members.size) == 0
        and (not first.size or int(first[-1]) < plan.members.size)
        and _rises(first)
        and _holds_each_once(num_samples, plan.members, plan.left_out[:, 0])
    )
    if not is_whole:
        raise ManifestError(f"{name}: its numbers do not fit each other; {_CURE}")


def _holds_each_once(num_samples: int, *positions: IntArray) -> bool:
    """Tell whether so many positions are all samples: then none of them comes twice."""
    seen = np.zeros(num_samples, dtype=np.bool_)
    for each in positions:
        if each.size and not 0 <= int(each.min()) <= int(each.max()) < num_samples:
            return False
        seen[each] = True
    return bool(seen.all())


def _rises(numbers: IntArray) -> bool:
    """Tell whether each number is larger than the one before; by blocks, for memory."""
    blocks = (
        numbers[start : start + BLOCK_ROWS + 1] for start in range(0, numbers.size, BLOCK_ROWS)
    )
    return all(bool((block[1:] > block[:-1]).all()) for block in blocks)


def require_plan_of(dataset: Dataset, plan: PackPlan) -> None:
    """Refuse a plan of other shards: its lengths would be those of other samples.

    Raises:
        ConfigError: Its shards are not the first ones of the dataset.
    """
    shards = dataset.manifest.shards
    if len(plan.shards) > len(shards) or not all(map(is_same_shard, plan.shards, shards)):
        raise ConfigError(
            f"{plan.url or 'the plan'}: is of other shards than {dataset.index_store.url}; run "
            "`mmstream plan` for these"
        )


# -- arrays that are named by their content --------------------------------------------------------
#
#     units.<first 12 hex digits of its SHA-256>.npy
#
# A file never changes: its name says its content. A JSON file beside it lists the arrays, so the
# replacement of that file is the only commit. ``numpy.load`` reads the files too.
#
# A local file is mapped where it lies. A remote one is copied once into the cache of this machine,
# compared with its SHA-256, and mapped from there. No request follows.

_NAME = re.compile(r"(\w{1,64})\.([0-9a-f]{12})\.npy")

MAX_HASHED_BYTES = 1 << 30
"""A larger local file is compared with its SHA-256 when it is copied, and not when it is opened:
that would take seconds in each process."""

POLL_S = 0.2
"""Between two looks at a file that another process fetches."""


@dataclass(frozen=True)
class ArrayInfo:
    """What a JSON file says of an array beside it."""

    name: str
    num_bytes: int
    sha256: str


def write_array(store: Store, stem: str, array: npt.NDArray[Any]) -> ArrayInfo:
    """Write an array. Equal arrays give equal files.

    Args:
        store: The folder.
        stem: First word of the file's name, such as "units".
        array: Of integers.

    Raises:
        StorageError: The storage failed after retries.
    """
    header = io.BytesIO()
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    head, body = header.getvalue(), array.reshape(-1).view(np.uint8).data
    digest = hashlib.sha256(head)
    digest.update(body)
    sha256 = digest.hexdigest()
    name = f"{stem}.{sha256[:12]}.npy"
    with store.create(name) as file:
        file.write(head)
        file.write(body)
    return ArrayInfo(name, len(head) + len(body), sha256)


def open_array(
    store: Store, info: ArrayInfo, dtype: str, num_dims: int = 1, *, check: bool = True
) -> npt.NDArray[Any]:
    """Return an array as a map of its file, which is read-only.

    Args:
        store: The folder.
        info: The array.
        dtype: What its type must be, such as "<i8".
        num_dims: How many dimensions it must have.
        check: Compare a local file with its SHA-256, up to `MAX_HASHED_BYTES`. A copy in the cache
            was compared when it came.

    Raises:
        ManifestError: There is no such file, or it is not the array.
        StorageError: The storage failed after retries.
    """
    match = _NAME.fullmatch(info.name)
    if match is None or info.sha256[:12] != match[2] or len(info.sha256) != 64:
        raise ManifestError(f"{store.url}: {escaped(info.name)} is no name of an array")
    path = store.local_path(info.name)
    data: mmap | bytes
    try:
        data = _cached(store, info) if path is None else map_file(path, info.name)
    except FileNotFoundError:
        raise ManifestError(
            f"{store.url_of(info.name)}: is missing, and the file beside it lists it; run "
            "`mmstream plan --overwrite`"
        ) from None
    if len(data) != info.num_bytes:
        raise ManifestError(
            f"{store.url_of(info.name)}: {len(data)} bytes, and the file beside it says "
            f"{info.num_bytes}; write it again"
        )
    if (
        path is not None
        and check
        and info.num_bytes <= MAX_HASHED_BYTES
        and hashlib.sha256(data).hexdigest() != info.sha256
    ):
        raise ManifestError(f"{path}: its bytes are not those of its sha256; write it again")
    return _decoded(data, store.url_of(info.name), dtype, num_dims)


def _decoded(data: mmap | bytes, name: str, dtype: str, num_dims: int) -> npt.NDArray[Any]:
    file = io.BytesIO(data[:4096])
    try:
        np.lib.format.read_magic(file)
        shape, is_fortran, written_dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy evaluates the header as a literal, which raises anything
        raise ManifestError(f"{name}: is no file of numpy; write it again") from None
    size = math.prod(shape) * written_dtype.itemsize
    if (
        written_dtype != np.dtype(dtype)
        or len(shape) != num_dims
        or is_fortran
        or min(shape) < 0
        or size != len(data) - file.tell()
    ):
        raise ManifestError(f"{name}: is another array than the file beside it says")
    return np.frombuffer(data, written_dtype, offset=file.tell()).reshape(shape)


def _cached(store: Store, info: ArrayInfo) -> mmap | bytes:
    """Return the bytes of a remote file, from the cache of this machine where it has one."""
    part = IndexPart(info.name, info.num_bytes, info.sha256, 0, 0)
    try:
        while (data := map_cached(part)) is None:
            if not fetch_part(store, part):  # another process fetches it
                time.sleep(POLL_S)
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.warning(
            "%s: is in the memory of this process, because the cache took no copy: %s",
            store.url_of(info.name),
            error,
        )
        whole = store.read(info.name, info.num_bytes)
        if hashlib.sha256(whole).hexdigest() != info.sha256:
            raise ManifestError(
                f"{store.url_of(info.name)}: its bytes are not those of its sha256; write it again"
            ) from None
        return whole
    return data


def remove_arrays(store: Store, kept: set[str]) -> None:
    """Remove the arrays of a folder that its JSON file does not name any more."""
    for name in store.list():
        if _NAME.fullmatch(name) and name not in kept:
            store.remove(name)
