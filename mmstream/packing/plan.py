"""A plan: the units of a dataset, which are packs of samples, what they hold, and its files.

The order of a run asks a plan by unit numbers. Unit number = first unit of its group + its number
in the group. All answers are arrays; nothing is read but the rows that are asked for.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from mmap import mmap
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.manifest import (
    IndexPart,
    ShardInfo,
    is_same_shard,
    read_sealed_as,
    require_name,
    seal,
)
from mmstream.dataset.shard_indexes import map_whole
from mmstream.errors import ConfigError, ManifestError, ShardError, StateError, escaped
from mmstream.order.mixture.schedule import whole_shares
from mmstream.order.settings import RowShape
from mmstream.settings import Within, checked
from mmstream.storage import ReplacedError, Store, open_store
from mmstream.storage.write_lock import write_lock
from mmstream.types import IntArray

logger = logging.getLogger(__name__)

Overlong = Literal["reject", "truncate"]
"""How a sample that is longer than a pack is treated."""

MAX_PACK_TOKENS = 1 << 30
"""Longest pack."""

Tokens: TypeAlias = Annotated[
    int, Within(1, MAX_PACK_TOKENS, f"a whole number from 1 to {MAX_PACK_TOKENS:,}")
]
Limit: TypeAlias = Annotated[int, Within(1, 1 << 40, f"a whole number from 1 to {1 << 40:,}")]


@checked()
@dataclass(frozen=True)
class PackLimits:
    """What a pack may hold, and which samples are packed.

    Attributes:
        max_tokens: T, tokens of a pack.
        max_documents: Documents of a pack. None: no limit.
        max_images: Images of a pack. None: no limit.
        max_patches: Patches of all pictures and frames of a pack. None: no limit.
        max_seconds: Seconds of sound of a pack. None: no limit.
        document_multiple_of: Each document takes a multiple of this number of tokens.
        where: Condition over the columns of the measure, such as
            ``"num_images = 0 or num_label_tokens > 8"``. Other samples are left out. "": all.
        overlong: "reject" leaves out samples with more than T tokens. "truncate" keeps those of
            plain text: a `TextDecoder` with ``max_length=T`` cuts them to T tokens. Conversations
            and samples with media are left out too: a cut may take their answers or media.

    Raises:
        ConfigError: A number is not positive, T is not a multiple of `document_multiple_of`, or the
            condition cannot be read.

    Examples:
        >>> from mmstream.packing.plan import PackLimits
        >>> PackLimits(8192, max_images=16).max_tokens
        8192
    """

    max_tokens: Tokens
    max_documents: Limit | None = None
    max_images: Limit | None = None
    max_patches: Limit | None = None
    max_seconds: Limit | None = None
    document_multiple_of: Limit = 1
    where: str = ""
    overlong: Overlong = "reject"

    def __post_init__(self) -> None:
        if self.max_tokens % self.document_multiple_of:
            raise ConfigError(
                f"max_tokens {self.max_tokens}: needs a multiple of document_multiple_of "
                f"{self.document_multiple_of}"
            )
        if self.where:
            import pyarrow as pa

            from mmstream.dataset.condition import Condition

            condition = Condition.parse(self.where)
            # All columns of a measure are integers, so whether values compare is known at once.
            condition.evaluate(dict.fromkeys(condition.names, pa.array([], pa.int64())))

    def as_json(self) -> dict[str, Any]:
        """Return the settings in plain JSON types."""
        return asdict(self)


SELECTION = "selection"
"""Setting of a measure: the digest of the selection. Absent: all samples were measured."""

LEFT_OUT_REASONS = (
    "unusable",
    "on the bad list",
    "condition",
    "too long",
    "over a limit",
    "not chosen",
)
"""Why a sample is in no unit, by the number in the second column of `PackPlan.left_out`."""

UNUSABLE, ON_BAD_LIST, CONDITION, TOO_LONG, OVER_A_LIMIT, NOT_CHOSEN = range(len(LEFT_OUT_REASONS))


class Units(NamedTuple):
    """The samples of units, one after the other.

    Attributes:
        counts: int64 [n], samples of each unit.
        shard: int64 [m], shard of each sample, m = sum of `counts`.
        index: int64 [m], its index in the shard.
        num_tokens: int64 [m], its tokens.
    """

    counts: IntArray
    shard: IntArray
    index: IntArray  # type: ignore[assignment]  # the field's name wins over tuple.index
    num_tokens: IntArray


class UnitSums(NamedTuple):
    """The sums of units, int64 [n] each.

    Attributes:
        num_tokens: Tokens of all documents, without padding.
        squared_tokens: Sum of L * L over the samples, each of L tokens.
        num_label_tokens: Tokens with a label, without the first of each document.
        num_images: Images.
        patches: Sum of p over all media, each of p patches.
        squared_patches: Sum of p * p over all media.
        num_documents: Documents; a sample may have several.
    """

    num_tokens: IntArray
    squared_tokens: IntArray
    num_label_tokens: IntArray
    num_images: IntArray
    patches: IntArray
    squared_patches: IntArray
    num_documents: IntArray


@dataclass(frozen=True, eq=False)
class PackPlan:
    """The units of a dataset. `make_plan` makes it, and `open_plan` opens it.

    A plan of a folder pickles as its address, and its arrays are mapped again.

    Attributes:
        settings: What a unit may hold.
        digest: Hash of the settings and of those of the measure: what decides the units, beside
            the samples.
        shards: The shards that are planned.
        group_stops: int64 [num_groups], the stop of each group, in shards.
        counts: int64 [num_groups], units of each group.
        group_digests: Of each group: hash of its units, by positions in the group.
        spread: Among the bytes of how many units in a row the samples of a unit lie, on average.
        unit_rows: int64 [num_units, 8], the first member of each unit, and its sums in the order
            of `UnitSums`.
        members: int64 [num_members], positions in the dataset of the samples of all units.
        member_tokens: int32 [num_members], tokens of each.
        left_out: int64 [n, 3], samples that are in no unit: position, reason, tokens. The reason is
            an index into `LEFT_OUT_REASONS`; -1 tokens are not known.
        lengths: The settings of its measure: what decided the lengths.
        url: The folder of the plan. None: it is in memory.
        reopen: Opens the plan of the folder again, in another process. None: it is in memory.

    Examples:
        >>> import numpy as np
        >>> from mmstream.packing.planner import plan_of_lengths
        >>> from mmstream.packing.plan import PackLimits
        >>> plan = plan_of_lengths([3, 2], [6, 5, 4, 4, 1], PackLimits(10))
        >>> plan.num_units, plan.counts.tolist()
        (2, [2])
        >>> units = plan.units(np.array([1]))
        >>> units.shard.tolist(), units.index.tolist(), units.num_tokens.tolist()
        ([0, 1, 1], [1, 0, 1], [5, 4, 1])
        >>> plan.sums(np.array([0, 1])).num_tokens.tolist()
        [10, 10]
    """

    settings: PackLimits
    digest: str
    shards: tuple[ShardInfo, ...]
    group_stops: IntArray
    counts: IntArray
    group_digests: tuple[str, ...]
    spread: int
    unit_rows: IntArray
    members: IntArray
    member_tokens: npt.NDArray[np.int32]
    left_out: IntArray
    lengths: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None
    reopen: Callable[[], PackPlan] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopen is None:
            return PackPlan, tuple(getattr(self, name) for name in self.__dataclass_fields__)
        return self.reopen, ()

    def __repr__(self) -> str:
        where = "in memory" if self.url is None else self.url
        return (
            f"<PackPlan {where}: {self.num_units:,} packs of {self.settings.max_tokens:,} tokens, "
            f"{self.fill:.1%} full, {self.members.size:,} samples>"
        )

    @property
    def num_units(self) -> int:
        """Units of all groups."""
        return len(self.unit_rows)

    @property
    def mean_samples(self) -> float:
        """Samples of a unit, on average."""
        return self.members.size / max(1, self.num_units)

    @property
    def num_groups(self) -> int:
        """Groups of shards."""
        return len(self.counts)

    @property
    def fill(self) -> float:
        """Tokens of all units, as a share of what they could hold; 0 without units."""
        room = self.num_units * self.settings.max_tokens
        return int(self.member_tokens.sum(dtype=np.int64)) / room if room else 0.0

    @cached_property
    def first_units(self) -> IntArray:
        """int64 [num_groups + 1], number of the first unit of each group, and of all units."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @cached_property
    def shard_ends(self) -> IntArray:
        """int64 [num_shards], samples up to the end of each shard."""
        counts = [shard.num_samples for shard in self.shards]
        return np.cumsum(np.array(counts, dtype=np.int64))

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups: their first and last shard."""
        starts = [0, *self.group_stops.tolist()]
        return tuple(
            f"{self.shards[start].name}..{self.shards[stop - 1].name}"
            for start, stop in zip(starts, self.group_stops.tolist(), strict=False)
        )

    @cached_property
    def group_bytes(self) -> IntArray:
        """int64 [num_groups], bytes of the shards of each group."""
        sizes = np.array([0, *(shard.num_bytes for shard in self.shards)], dtype=np.int64)
        ends = np.cumsum(sizes)[np.concatenate([[0], self.group_stops]).astype(np.int64)]
        return np.diff(ends)

    def units(self, numbers: IntArray) -> Units:
        """Return the samples of units, in the order of `numbers`.

        Args:
            numbers: int64 [n], numbers of units.
        """
        numbers = np.asarray(numbers, dtype=np.int64)
        first = self.unit_rows[numbers, 0]
        is_last = numbers == self.num_units - 1
        stop = self.unit_rows[np.where(is_last, 0, numbers + 1), 0]
        counts = np.where(is_last, self.members.size, stop) - first
        # Unit 0 with members 5-6 and unit 1 with members 2-4 are members 5, 6, 2, 3, 4.
        ends = np.cumsum(counts)
        rows = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
        positions = self.members[rows]
        shard = np.searchsorted(self.shard_ends, positions, side="right").astype(np.int64)
        starts = np.where(shard > 0, self.shard_ends[shard - 1], 0)
        return Units(counts, shard, positions - starts, self.member_tokens[rows].astype(np.int64))

    def sums(self, numbers: IntArray) -> UnitSums:
        """Return what units hold, in the order of `numbers`.

        Args:
            numbers: int64 [n], numbers of units.
        """
        rows = self.unit_rows[np.asarray(numbers, dtype=np.int64)]
        return UnitSums(*rows[:, 1:].T)


# -- a plan in a folder, local or remote -----------------------------------------------------------
#
#     mmstream.plan.NAME/        beside the manifest, or in another folder
#         plan.json              settings, shards, groups, and the SHA-256 of the arrays
#         arrays.<12 digits>     8 bytes that say what it is; then units int64 [num_units, 8],
#                                members int64 [num_members], left_out int64 [n, 3], and the tokens
#                                of the members, int32 [num_members]; all little-endian
#
# The arrays take 12 bytes a sample and 64 a pack. Their file is named by its content and never
# changes, so the replacement of plan.json is the only commit.
#
# A local file is mapped where it lies. A remote one is copied once into the cache of this machine,
# compared with its SHA-256, and mapped from there: all processes of a machine share its pages.

PLAN_NAME = "plan.json"
PLAN_PREFIX = "mmstream.plan."

FORMAT_VERSION = 2
"""Version 1 had a file for each array."""

MAGIC = b"mmplan 2"
"""The first bytes of the arrays. They keep the int64 after them aligned."""

MAX_JSON_BYTES = 256 << 20
"""Largest plan.json."""

MAX_HASHED_BYTES = 1 << 30
"""A larger local file is compared with its SHA-256 when it is copied, and not when it is opened:
that would take seconds in each process."""

BLOCK_ROWS = 1 << 20
"""Rows that are compared at a time."""

_CURE = "run `mmstream plan` with --overwrite"

_ARRAYS = re.compile(r"(?:arrays\.[0-9a-f]{12}|\w+\.[0-9a-f]{12}\.npy)")
"""Names of arrays, those of version 1 too."""

MAX_COUNT = 1 << 48
"""Shards, units, samples of a shard, and its bytes are fewer, so that they fit in arrays."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]


@dataclass(frozen=True)
class _File:
    """The content of plan.json."""

    version: int
    settings: dict[str, Any]
    digest: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the arrays."""
    num_members: Count
    group_stops: list[Count]
    counts: list[Count]
    group_digests: list[str]
    spread: int
    shards: list[ShardInfo]
    lengths: dict[str, Any]

    @property
    def arrays_name(self) -> str:
        """The file of the arrays."""
        return f"arrays.{self.sha256[:12]}"


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
    arrays = [_bytes_of(array, "<i8") for array in (plan.unit_rows, plan.members, plan.left_out)]
    blocks: list[bytes | memoryview] = [MAGIC, *arrays, _bytes_of(plan.member_tokens, "<i4")]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    content = _File(
        version=FORMAT_VERSION,
        settings=plan.settings.as_json(),
        digest=plan.digest,
        sha256=digest.hexdigest(),
        num_members=plan.members.size,
        group_stops=plan.group_stops.tolist(),
        counts=plan.counts.tolist(),
        group_digests=list(plan.group_digests),
        spread=plan.spread,
        shards=list(plan.shards),
        lengths=dict(plan.lengths),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
    with write_lock(store, "plan"):
        with store.create(content.arrays_name) as file:
            for block in blocks:
                file.write(block)
        store.write(PLAN_NAME, seal(text))
        for name in store.list():
            if _ARRAYS.fullmatch(name) and name != content.arrays_name:
                store.remove(name)
    return open_plan(folder)


def _bytes_of(array: npt.NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def open_plan(folder: str, expected_digest: str | None = None) -> PackPlan:
    """Open a plan. Its arrays are mapped, and are read when they are used.

    Args:
        folder: Path or URL. A remote plan is copied into the cache of this machine, once.
        expected_digest: SHA-256 of what plan.json holds, where another process has opened and
            checked this plan. Its arrays are not checked again.

    Raises:
        FileNotFoundError: There is no plan.
        ManifestError: It is damaged, or of an earlier version.
        StateError: There is another plan in the folder than the expected one.
        StorageError: The storage failed after retries.
    """
    store = open_store(folder)
    name = store.url_of(PLAN_NAME)
    try:
        file = read_sealed_as(
            store, PLAN_NAME, MAX_JSON_BYTES, _File, newest=FORMAT_VERSION, cure=_CURE
        )
    except FileNotFoundError:
        raise FileNotFoundError(f"{store.url}: no plan; run `mmstream plan` first") from None
    file_digest = hashlib.sha256(msgspec.json.encode(file)).hexdigest()
    if expected_digest not in (None, file_digest):
        raise StateError(f"{name}: the plan was replaced while this run used it; start it again")
    num_left_out = sum(shard.num_samples for shard in file.shards) - file.num_members
    shapes = [(sum(file.counts), 8), (file.num_members,), (num_left_out, 3)]
    if num_left_out < 0:
        raise _unfit(name)
    num_int64 = sum(math.prod(shape) for shape in shapes)
    num_bytes = len(MAGIC) + 8 * num_int64 + 4 * file.num_members
    data = _arrays(store, file, num_bytes, check=expected_digest is None)
    int64 = np.frombuffer(data, "<i8", num_int64, len(MAGIC))
    bounds = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    unit_rows, members, left_out = (
        part.reshape(shape) for part, shape in zip(np.split(int64, bounds), shapes, strict=True)
    )
    try:
        settings = PackLimits(**file.settings)
    except (ConfigError, TypeError) as error:
        raise ManifestError(f"{name}: settings: {escaped(error)}; {_CURE}") from None
    plan = PackPlan(
        settings=settings,
        digest=file.digest,
        shards=tuple(file.shards),
        group_stops=np.array(file.group_stops, dtype=np.int64),
        counts=np.array(file.counts, dtype=np.int64),
        group_digests=tuple(file.group_digests),
        spread=file.spread,
        unit_rows=unit_rows,
        members=members,
        member_tokens=np.frombuffer(data, "<i4", offset=len(MAGIC) + 8 * num_int64),
        left_out=left_out,
        lengths=file.lengths,
        url=store.url,
        reopen=partial(open_plan, store.url, file_digest),
    )
    if expected_digest is None:
        _require_whole(plan, name)
    return plan


def _arrays(store: Store, file: _File, num_bytes: int, *, check: bool) -> mmap | bytes:
    """Return the bytes of the arrays as a map of their file, which is read-only.

    Args:
        store: The folder.
        file: Names them.
        num_bytes: How many they must be.
        check: Compare a local file with its SHA-256, up to `MAX_HASHED_BYTES`. A copy in the cache
            was compared when it came.

    Raises:
        ManifestError: There is no such file, or it is another one.
        StorageError: The storage failed after retries.
    """
    name = store.url_of(file.arrays_name)
    try:
        data = map_whole(store, IndexPart(file.arrays_name, num_bytes, file.sha256, 0, 0))
    except FileNotFoundError:
        raise ManifestError(f"{name}: is missing, and {PLAN_NAME} names it; {_CURE}") from None
    except ReplacedError as error:
        size = error.current.size
        raise ManifestError(
            f"{name}: {size} bytes, and {PLAN_NAME} says {num_bytes}; {_CURE}"
        ) from None
    except ShardError as error:
        raise ManifestError(f"{error}; {_CURE}") from None
    is_local = store.local_path(file.arrays_name) is not None
    is_hashed = check and is_local and num_bytes <= MAX_HASHED_BYTES
    if data[: len(MAGIC)] != MAGIC or (
        is_hashed and hashlib.sha256(data).hexdigest() != file.sha256
    ):
        raise ManifestError(f"{name}: its bytes are not those of its sha256; {_CURE}")
    return data


def _require_whole(plan: PackPlan, name: str) -> None:
    """Raise a ManifestError where the numbers of a plan cannot be those of its shards."""
    num_groups, num_shards = plan.counts.size, len(plan.shards)
    stops = plan.group_stops
    num_samples = sum(shard.num_samples for shard in plan.shards)
    first = plan.unit_rows[:, 0]
    sizes = [(shard.num_samples, shard.num_bytes) for shard in plan.shards]
    is_whole = (
        all(0 <= number < MAX_COUNT for size in sizes for number in size)
        and stops.size == num_groups == len(plan.group_digests)
        and bool((np.diff(np.concatenate([[0], stops])) > 0).all())
        and (int(stops[-1]) if num_groups else 0) == num_shards
        and plan.spread >= 1
        and (int(first[0]) if first.size else plan.members.size) == 0
        and (not first.size or int(first[-1]) < plan.members.size)
        and _rises(first)
        and _holds_each_once(num_samples, plan.members, plan.left_out[:, 0])
    )
    if not is_whole:
        raise _unfit(name)


def _unfit(name: str) -> ManifestError:
    return ManifestError(f"{name}: its numbers do not fit each other; {_CURE}")


def _holds_each_once(num_samples: int, *positions: IntArray) -> bool:
    """Tell whether positions are those of all samples, each of them once."""
    seen = np.zeros(num_samples, dtype=np.bool_)
    for array in positions:
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < num_samples:
            return False
        seen[array] = True
    return bool(seen.all())


def _rises(numbers: IntArray) -> bool:
    """Tell whether each number is larger than the one before; by blocks, for memory."""
    blocks = (
        numbers[start : start + BLOCK_ROWS + 1] for start in range(0, numbers.size, BLOCK_ROWS)
    )
    return all(bool((block[1:] > block[:-1]).all()) for block in blocks)


def require_plan_of(dataset: Dataset, plan: PackPlan) -> None:
    """Refuse a plan of other shards or chosen samples: its lengths would be those of others.

    Raises:
        ConfigError: Its shards are not the first ones of the dataset, or others were chosen.
    """
    shards = dataset.manifest.shards
    if len(plan.shards) > len(shards) or not all(map(is_same_shard, plan.shards, shards)):
        raise ConfigError(
            f"{plan.url or 'the plan'}: is of other shards than {dataset.index_store.url}; run "
            "`mmstream plan` for these"
        )
    chosen = dataset.selection and dataset.selection.first_shards(len(plan.shards)).digest
    if plan.lengths.get(SELECTION) != chosen:
        raise ConfigError(
            f"{plan.url or 'the plan'}: is of other chosen samples than {dataset!r}; run "
            "mm.plan(pipeline) over this dataset or view"
        )


# -- the plans of a mixture as one -----------------------------------------------------------------
#
# Example: "web" has 5 units and "books" 3, so unit 6 is the second unit of "books".

WeightsOf: TypeAlias = Literal["samples", "tokens"]
"""The amounts that the weights of a mixture are proportions of."""

MAX_SHARE_ERROR = Fraction(1, 200)
"""Shares of packs are rounded so far, relative to each. A longer period would be rounded less."""


@dataclass(frozen=True, eq=False)
class MixturePlan:
    """The plans of the sources of a mixture.

    Raises:
        ConfigError: packs of two sources may not hold the same.

    Examples:
        >>> import numpy as np
        >>> from mmstream.packing.planner import plan_of_lengths
        >>> from mmstream.packing.plan import PackLimits
        >>> web = plan_of_lengths([3, 2], [6, 5, 4, 4, 1], PackLimits(10))
        >>> books = plan_of_lengths([2], [9, 8], PackLimits(10))
        >>> plan = MixturePlan({"web": web, "books": books}, [2, 1])
        >>> units = plan.units(np.array([3, 0]))
        >>> units.counts.tolist(), units.shard.tolist(), units.index.tolist()
        ([1, 2], [2, 0, 0], [1, 0, 2])
        >>> plan.sums(np.array([3, 0])).num_tokens.tolist()
        [8, 10]
    """

    plans: Mapping[str, PackPlan]
    """The plan of each source, by its name."""
    num_shards: Sequence[int]
    """Shards of each source. A plan may lack the last ones."""

    digest = "of each source"
    """In the place of a plan's digest: the identity of each source has its own."""

    def __post_init__(self) -> None:
        limits = {name: _common(plan.settings) for name, plan in self.plans.items()}
        first_name, first = next(iter(limits.items()))
        for name, other in limits.items():
            if other != first:
                raise ConfigError(
                    f"mm.Pack: packs of {name!r} hold {other.as_json()}, and those of "
                    f"{first_name!r} {first.as_json()}: plan both with the same limits"
                )

    def __repr__(self) -> str:
        return (
            f"<MixturePlan {', '.join(f'{name}: {plan!r}' for name, plan in self.plans.items())}>"
        )

    @property
    def settings(self) -> PackLimits:
        """The limits of all units. Sources may choose their samples by other conditions."""
        return _common(next(iter(self.plans.values())).settings)

    @cached_property
    def first_units(self) -> IntArray:
        """int64 [num_groups + 1], number of the first unit of each group, and of all units."""
        counts = np.concatenate([plan.counts for plan in self.plans.values()])
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def units(self, numbers: IntArray) -> Units:
        """Return the samples of units, in the order of `numbers`. See `PackPlan.units`."""
        numbers = np.asarray(numbers, dtype=np.int64)
        sources = self._by_source(numbers)
        units_of_sources = []
        for number, (plan, _, local_numbers) in enumerate(sources):
            units = plan.units(local_numbers)
            units = units._replace(shard=units.shard + self._first_shards[number])
            units_of_sources.append(units)
        rows = np.concatenate([rows for _, rows, _ in sources])
        counts = np.empty_like(numbers)
        counts[rows] = np.concatenate([units.counts for units in units_of_sources])
        # Samples are source by source: bring them to the order of the rows.
        row_of_sample = np.repeat(rows, counts[rows])
        by_row = np.argsort(row_of_sample, kind="stable")
        columns = list(zip(*units_of_sources, strict=True))[1:]
        return Units(counts, *(np.concatenate(column)[by_row] for column in columns))

    def sums(self, numbers: IntArray) -> UnitSums:
        """Return what units hold, in the order of `numbers`. See `PackPlan.sums`."""
        sources = self._by_source(np.asarray(numbers, dtype=np.int64))
        by_row = np.argsort(np.concatenate([rows for _, rows, _ in sources]))
        sums = [plan.sums(local_numbers) for plan, _, local_numbers in sources]
        return UnitSums(*(np.concatenate(c)[by_row] for c in zip(*sums, strict=True)))

    @cached_property
    def _first_shards(self) -> IntArray:
        return np.cumsum([0, *self.num_shards])

    def _by_source(self, numbers: IntArray) -> list[tuple[PackPlan, IntArray, IntArray]]:
        """Return for each source its plan, where `numbers` are of it, and these in its plan."""
        ends = np.cumsum([0, *(plan.num_units for plan in self.plans.values())])
        source_of = np.searchsorted(ends, numbers, side="right") - 1
        sources = []
        for number, plan in enumerate(self.plans.values()):
            rows = np.flatnonzero(source_of == number)
            sources.append((plan, rows, numbers[rows] - ends[number]))
        return sources

    def shares(self, weights: Sequence[float], weights_of: WeightsOf) -> list[int]:
        """Return shares of packs, so that the weights of what they hold are kept on average.

        Args:
            weights: of the sources, from 0.
            weights_of: what they are proportions of.

        Raises:
            ConfigError: impossible weights, or one is too small beside the others.
        """
        means = []
        for plan in self.plans.values():
            is_of_tokens, column = weights_of == "tokens", 1 + UnitSums._fields.index("num_tokens")
            total = int(plan.unit_rows[:, column].sum()) if is_of_tokens else plan.members.size
            means.append(Fraction(total, plan.num_units) if total else Fraction(1))
        return unit_shares(weights, means)

    def shares_by_step(
        self, weights: Mapping[int, Mapping[str, float]], weights_of: WeightsOf
    ) -> dict[int, dict[str, int]]:
        """Return shares of packs by source, by the step from which they hold. See `shares`.

        Args:
            weights: of the sources by name, by the step of the run from which they hold.
            weights_of: what they are proportions of.
        """
        return {
            step: dict(
                zip(
                    self.plans,
                    self.shares([of_step[name] for name in self.plans], weights_of),
                    strict=True,
                )
            )
            for step, of_step in sorted(weights.items())
        }

    def row_shape(self, shares: Mapping[str, int]) -> RowShape:
        """Return what a unit is, on average over shares of units."""
        total = sum(shares.values()) or 1
        samples = [shares[name] * plan.mean_samples for name, plan in self.plans.items()]
        spread = [shares[name] * plan.spread for name, plan in self.plans.items()]
        return RowShape(math.fsum(samples) / total, max(1, round(sum(spread) / total)))


def unit_shares(weights: Sequence[float], means: Sequence[Fraction]) -> list[int]:
    """Return whole shares of units of sources, so that weights of what units hold are kept.

    The sum is the smallest power of two of those that round no share by more than 0.5 %.

    Args:
        weights: of the sources, from 0.
        means: what a unit of each source holds on average.

    Raises:
        ConfigError: impossible weights, or one is too small beside the others.

    Examples:
        >>> unit_shares([7, 3], [Fraction(70), Fraction(3)])  # one unit of ten
        [93, 931]
    """
    wanted = [share / mean for share, mean in zip(whole_shares(weights), means, strict=True)]
    total = sum(wanted)
    exact = [share / total for share in wanted]
    for bits in range(6, 16):
        shares = [round(share * 2**bits) for share in exact]
        if all(
            abs(Fraction(share, sum(shares)) - wish) <= MAX_SHARE_ERROR * wish
            for share, wish in zip(shares, exact, strict=True)
        ):
            return whole_shares(shares)
    return whole_shares([float(share) for share in exact])


def _common(limits: PackLimits) -> PackLimits:
    """Return what a unit may hold, without which samples were chosen."""
    return replace(limits, where="", overlong="reject")
