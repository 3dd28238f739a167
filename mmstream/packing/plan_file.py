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
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import ShardInfo
from mmstream.dataset.sealed import decode_sealed, read_sealed, seal
from mmstream.errors import ConfigError, ManifestError, StateError
from mmstream.packing.array_files import ArrayInfo, open_array, remove_arrays, write_array
from mmstream.packing.measure_file import is_same_shard, require_name
from mmstream.packing.plan import PackPlan
from mmstream.packing.settings import PackLimits
from mmstream.storage import Store, open_store
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray

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
    settings: PackLimits
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
        settings=plan.settings,
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
        settings=file.settings,
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
