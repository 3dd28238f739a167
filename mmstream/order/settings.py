"""The settings of an order: their checks, and the defaults of those that were not given.

The defaults of grid, window, interleave and chunk size depend on the samples, their mean size and
G alone, never on ranks or workers. So a fresh run has the same batches on every topology.
`Order.from_counts` and `Recipe` call these functions.

The windows of all lanes hold B bytes together, over all ranks: 2 MiB for each row of a batch,
within 2 to 8 GiB. So a run that was planned on 64 ranks also resumes on one. What follows from B::

    R    bytes of a range, which one request reads: 64 samples, within 512 KiB to 4 MiB
    r    samples of a range: R / mean bytes
    H    ranges that B holds: B / (r * mean bytes)
    P    1: only the lanes of one group give rows to a step, and each group takes memory
    Q    lanes: at least 4 rows of a step each, at least 1,024 samples of the corpus each
    K    ranges of a window: H / Q, up to 32
    M    K * r, samples of a window
    C    4 * r, samples of a chunk

Samples of 2 MiB or more are read one by one: r = K = M = C = 1. That is a true permutation, and no
window holds anything. A corpus of at most B bytes fits in its windows: each is a whole lane.

Where a row is a pack of several samples (`RowShape`), "samples" above are packs. A pack's samples
lie among those of its neighbours on storage, so ranges are longer: three times the spread, up to
12 MiB. Windows hold up to 16 MiB for each row. Up to 256 lanes may have single rows, and 64 packs
are enough for a lane, because a step and a corpus have fewer rows.

Example: 1,000,000 samples of 110 kB, G = 256. B is 2 GiB, and R = 4 MiB, so r = 38 and H = 513.
64 lanes give 4 rows each to a step. K = 513 // 64 = 8, M = 304, C = 152.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from mmstream.errors import ConfigError
from mmstream.settings import shown

# A saved state is a stranger's data too. These limits keep it from taking the machine's memory.
MAX_ROWS = 1 << 24
"""Largest global batch size."""
MAX_GRID_LANES = 1 << 20
"""Most lanes of a grid, P * Q."""
MAX_SETTING = 1 << 40
"""Largest window, interleave and chunk: more samples than a dataset has."""

Reshuffle: TypeAlias = Literal["global", "lanes"]
"""Where an epoch may put a sample: anywhere, or in the lane that has it in all epochs of a seed."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message if a condition is false."""
    if not condition:
        raise ConfigError(message)


def integer(name: str, value: Any, most: int | None = None) -> int:
    """Return a value as a plain int.

    Keys and saved states contain the repr of such values, and numpy's integers have another repr.

    Args:
        name: of the setting, for messages.
        value: any value.
        most: the largest value that is allowed.

    Raises:
        ConfigError: the value is not an integer, or too large; the message names it.
    """
    try:
        number = int(operator.index("" if isinstance(value, bool) else value))  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} {shown(value)}: needs an integer") from None
    if most is not None:
        require(number <= most, f"{name} {number}: at most {most:,}")
    return number


def positive(name: str, value: Any, most: int = MAX_SETTING) -> int:
    """Return a setting that counts samples, bytes or steps as a plain int.

    Args:
        name: of the setting, for messages.
        value: any value.
        most: the largest value that is allowed.

    Raises:
        ConfigError: it is not an integer from 1 to `most`.
    """
    number = integer(name, value, most)
    require(number >= 1, f"{name} {number}: needs at least 1")
    return number


def positive_or_none(name: str, value: Any) -> int | None:
    """Return the same of a setting that may be None: it was not given."""
    return None if value is None else positive(name, value)


def checked_grid(
    grid: Any, global_batch_size: int, most: int = MAX_GRID_LANES, repeat: int = 1
) -> tuple[int, int]:
    """Return a grid (P, Q) as plain ints.

    Args:
        grid: any value.
        global_batch_size: G.
        most: lanes that are allowed, P * Q.
        repeat: rows of a batch for each of G.

    Raises:
        ConfigError: it is not two integers from 1, has too many lanes, or Q does not divide G.
    """
    require(
        isinstance(grid, Sequence) and len(grid) == 2,
        f"grid {shown(grid)}: needs two integers, P and Q",
    )
    groups, lanes = (integer("grid", number, most) for number in grid)
    require(groups * lanes <= most, f"grid {(groups, lanes)}: at most {most:,} lanes")
    require(
        min(groups, lanes) >= 1 and global_batch_size % lanes == 0,
        f"grid {(groups, lanes)}: P and Q must be positive, and Q must divide global_batch_size "
        f"{batch_size_text(global_batch_size, repeat)}",
    )
    return groups, lanes


def batch_size_text(global_batch_size: int, repeat: int) -> str:
    """Return the rows of a step for a message, as the user gave them.

    Examples:
        >>> batch_size_text(4, repeat=1), batch_size_text(4, repeat=8)
        ('4', '32 / repeat 8')
    """
    return (
        f"{global_batch_size}" if repeat == 1 else f"{global_batch_size * repeat} / repeat {repeat}"
    )


def checked_reshuffle(reshuffle: Any, *, shuffle: bool, has_cache: bool) -> Reshuffle:
    """Return how epochs are reshuffled.

    Args:
        reshuffle: any value. None: "lanes" with a node cache, else "global".
        shuffle: whether epochs are shuffled at all.
        has_cache: whether nodes keep what they read.

    Raises:
        ConfigError: it is neither, or "lanes" where nothing is shuffled.
    """
    if reshuffle is None:
        return "lanes" if has_cache and shuffle else "global"
    if reshuffle not in get_args(Reshuffle):
        raise ConfigError(f"reshuffle {shown(reshuffle)}: give global or lanes")
    require(
        shuffle or reshuffle == "global",
        "reshuffle lanes with shuffle=False: every epoch is the same, so leave out one of the two",
    )
    return "lanes" if reshuffle == "lanes" else "global"


@dataclass(frozen=True)
class ChosenSettings:
    """The settings that were given for an order, checked and as plain values. None: not given."""

    global_batch_size: int
    """Rows of the order in a step: with `repeat`, its samples."""
    seed: int
    grid: tuple[int, int] | None
    window: int | None
    window_bytes: int | None
    interleave: int | None
    chunk: int | None
    shuffle: bool
    reshuffle: Reshuffle
    repeat: int
    defaulted: tuple[str, ...]
    """Those of grid, window, interleave, chunk and reshuffle that were left to defaults. With
    `window_bytes`, only `reshuffle` counts."""

    @classmethod
    def check(
        cls,
        max_lanes: int = MAX_GRID_LANES,
        /,
        *,
        global_batch_size: Any,
        seed: Any = 0,
        grid: Any = None,
        window: Any = None,
        window_bytes: Any = None,
        interleave: Any = None,
        chunk: Any = None,
        shuffle: Any = True,
        reshuffle: Any = None,
        has_cache: bool = False,
        repeat: Any = 1,
    ) -> ChosenSettings:
        """Check settings. They are those of `Order.from_counts`.

        Raises:
            ConfigError: a setting is impossible, or both `window` and `window_bytes` are given.
        """
        rows = positive("global_batch_size", global_batch_size, MAX_ROWS)
        repeat = positive("repeat", repeat)
        below = rows - rows % repeat
        require(
            rows == below,
            f"global_batch_size {rows} is not a multiple of repeat {repeat}: it counts rows, and "
            f"each sample takes {repeat} of them: give {f'{below} or ' * (below > 0)}"
            f"{below + repeat}",
        )
        rows //= repeat
        require(
            window is None or window_bytes is None,
            f"window {shown(window)} and window_bytes {shown(window_bytes)}: give one of the two",
        )
        choices = {"grid": grid, "window": window, "interleave": interleave, "chunk": chunk}
        defaulted = [name for name, value in choices.items() if value is None and not window_bytes]
        return cls(
            rows,
            integer("seed", seed),
            None if grid is None else checked_grid(grid, rows, max_lanes, repeat),
            positive_or_none("window", window),
            positive_or_none("window_bytes", window_bytes),
            positive_or_none("interleave", interleave),
            positive_or_none("chunk", chunk),
            bool(shuffle),
            checked_reshuffle(reshuffle, shuffle=shuffle, has_cache=has_cache),
            repeat,
            tuple(defaulted + ["reshuffle"] * (reshuffle is None)),
        )


# -- defaults --------------------------------------------------------------------------------------

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

WINDOW_BYTES_PER_ROW = 2 * MIB
"""Bytes of all windows together, for each row of a batch. More rows need more open ranges."""

MIN_WINDOW_BYTES = 2 * GIB
MAX_WINDOW_BYTES = 8 * GIB

RANGE_SAMPLES = 64
"""Samples of a range. Small samples cost a request each 64, whatever their bytes."""

MIN_RANGE_BYTES = 512 * KIB
"""A shorter range costs more in latency than in bytes."""

MAX_RANGE_BYTES = 4 * MIB
"""A longer range hardly costs fewer requests a GB, and fewer of them fit in the windows."""

SINGLE_SAMPLE_BYTES = 2 * MIB
"""A sample of this size is a whole range."""

UNKNOWN_SAMPLE_BYTES = 64 * KIB
"""Taken for the mean where the bytes of a dataset are not known."""

MIN_LANE_SAMPLES = 1024
"""Samples of a lane, at least. A small corpus fits in memory, where good mixing matters more."""

MIN_LANE_ROWS = 4
"""Rows that a lane gives to a step, where there are more than 8 lanes: fewer cost CPU."""

MAX_LANES = 1024
"""Most lanes. Each costs time at every step."""

FEW_LANES = 8
"""Lanes that are always allowed, and all that a corpus needs that fits in its windows."""

MAX_INTERLEAVE = 32
"""Most ranges of a window."""

SMALL_CORPUS_CHUNK = 64
"""C of a corpus that fits in its windows."""

MAX_CHUNKS = 1 << 22
"""Most chunks: 64 MB of table per epoch."""

MIN_LANE_UNITS = 64
"""Packs of a lane, at least. They have more samples than `MIN_LANE_SAMPLES`, or nearly so."""

UNITS_OF_SPREAD = 3
"""Packs of a range for each one of the spread, so that most of the bytes between its ends are the
range's own."""

MAX_UNIT_RANGE_BYTES = 12 * MIB
"""A range of packs is longer than `MAX_RANGE_BYTES` only where their spread asks for it."""

MAX_ROW_SAMPLES = 8
"""A row of more samples has no more bytes of windows."""

FEW_PACK_LANES = 256
"""Lanes of packs that may have fewer rows than `MIN_LANE_ROWS`."""

MIN_LANE_CHUNKS = 16
"""Chunks of a lane, at least, where a small corpus of packs has chunks of several."""

MIN_SHARE = 1 / 64
"""Sources of a mixture with a smaller share do not count for the number of lanes."""


@dataclass(frozen=True)
class OrderSettings:
    """The settings of an order that have computed defaults."""

    grid: tuple[int, int]
    """(P, Q)."""
    window: int
    """M."""
    interleave: int
    """K."""
    chunk: int
    """C."""


@dataclass(frozen=True)
class RowShape:
    """The shape of a row: one sample, or a pack of several."""

    num_samples: float = 1
    """Samples of a row, on average."""
    spread: int = 1
    """Among the bytes of how many rows, side by side, the samples of a row lie."""

    @property
    def are_packs(self) -> bool:
        """Whether rows have more than one sample."""
        return self.num_samples > 1


SINGLE_SAMPLE = RowShape()


@dataclass(frozen=True)
class WindowBudget:
    """How many samples a range has, and how many ranges all windows hold.

    Examples:
        >>> WindowBudget.of_samples(110_000, global_batch_size=256)
        WindowBudget(num_bytes=2147483648, range_samples=38, num_ranges=513)
    """

    num_bytes: int
    """B, bytes of all windows together, over all ranks."""
    range_samples: int
    """r."""
    num_ranges: int
    """H."""

    @classmethod
    def of_samples(
        cls,
        mean_bytes: float,
        global_batch_size: int,
        window_bytes: int | None = None,
        row_shape: RowShape = SINGLE_SAMPLE,
    ) -> WindowBudget:
        """Return the budget for rows of a mean size, more than 0."""
        row_samples = min(MAX_ROW_SAMPLES, row_shape.num_samples)
        wanted = int(WINDOW_BYTES_PER_ROW * row_samples * global_batch_size)
        num_bytes = window_bytes or min(MAX_WINDOW_BYTES, max(MIN_WINDOW_BYTES, wanted))
        range_bytes = min(MAX_RANGE_BYTES, max(MIN_RANGE_BYTES, RANGE_SAMPLES * mean_bytes))
        if row_shape.are_packs:
            of_spread = UNITS_OF_SPREAD * row_shape.spread * mean_bytes
            range_bytes = max(range_bytes, min(MAX_UNIT_RANGE_BYTES, of_spread))
        samples = min(round(range_bytes / mean_bytes), int(num_bytes / mean_bytes))
        samples = 1 if mean_bytes >= SINGLE_SAMPLE_BYTES else max(1, samples)
        return cls(num_bytes, samples, max(1, int(num_bytes / (samples * mean_bytes))))

    def window(self, num_lanes: int, num_sources: int = 1) -> int:
        """Return M: up to 32 ranges a source, or less than one if there are too many lanes."""
        if self.range_samples == 1:
            return 1
        if num_lanes > self.num_ranges:
            return max(1, self.num_ranges * self.range_samples // num_lanes)
        most_ranges = MAX_INTERLEAVE * num_sources
        return min(most_ranges, self.num_ranges // num_lanes) * self.range_samples


def default_settings(
    num_samples: int,
    num_bytes: int | None,
    global_batch_size: int,
    *,
    window_bytes: int | None = None,
    grid: tuple[int, int] | None = None,
    window: int | None = None,
    row_shape: RowShape = SINGLE_SAMPLE,
) -> OrderSettings:
    """Return the settings of a dataset, with those that were chosen among them.

    Args:
        num_samples: N, rows of an epoch: samples of the dataset, or packs. At least 1.
        num_bytes: size of all its shards in bytes. None: a sample counts as 64 KiB.
        global_batch_size: G.
        window_bytes: B. None: 2 MiB * G, within 2 to 8 GiB.
        grid: (P, Q), if it was chosen.
        window: M, if it was chosen.
        row_shape: what a row is.

    Examples:
        >>> default_settings(1_000_000, 1_000_000 * 110_000, 256)
        OrderSettings(grid=(1, 64), window=304, interleave=8, chunk=152)
        >>> default_settings(1_000_000, 1_000_000 * 20_000_000, 256)  # a true permutation
        OrderSettings(grid=(1, 64), window=1, interleave=1, chunk=1)
        >>> default_settings(10_000, 10_000 * 110_000, 256)  # 1.1 GB
        OrderSettings(grid=(1, 8), window=1250, interleave=32, chunk=64)
    """
    num_bytes = num_bytes or num_samples * UNKNOWN_SAMPLE_BYTES
    mean_bytes = num_bytes / num_samples
    budget = WindowBudget.of_samples(mean_bytes, global_batch_size, window_bytes, row_shape)
    is_small = num_bytes <= budget.num_bytes and budget.range_samples > 1
    if not grid:
        has_few = is_small and not row_shape.are_packs
        most_lanes = FEW_LANES if has_few else budget.num_ranges
        grid = 1, _num_lanes(num_samples, global_batch_size, budget, most_lanes, row_shape)
    num_lanes = grid[0] * grid[1]
    if is_small:
        window = window or -(-num_samples // num_lanes)
        chunk = max(1, round(SMALL_CORPUS_CHUNK / row_shape.num_samples))
        if row_shape.are_packs:
            most = num_samples // (MIN_LANE_CHUNKS * num_lanes)
            chunk = max(chunk, min(UNITS_OF_SPREAD * row_shape.spread, most))
        return OrderSettings(grid, window, MAX_INTERLEAVE, _few_chunks(chunk, num_samples))
    return _settings(num_samples, grid, window or budget.window(num_lanes), budget)


def mixture_settings(
    shares: Sequence[int],
    sizes: Sequence[tuple[int | None, int]],
    global_batch_size: int,
    *,
    window_bytes: int | None = None,
    grid: tuple[int, int] | None = None,
    window: int | None = None,
    row_shape: RowShape = SINGLE_SAMPLE,
) -> OrderSettings:
    """Return the settings of a mixture: those of a dataset of its mean sample.

    A source with share p gets p * M samples of each window. So there are at most p * H lanes for
    the smallest share above 1/64, and the sources divide the ranges of a window between them.

    Args:
        shares: share of each source in the mixture; a share of 0 does not count.
        sizes: (bytes, samples) of each source. Bytes of None: a sample counts as 64 KiB.
        global_batch_size: G.
        window_bytes: B. None: 2 MiB * G, within 2 to 8 GiB.
        grid: (P, Q), if it was chosen.
        window: M of all sources together, if it was chosen.
        row_shape: what a row is, on average.
    """
    drawn = [
        (share, num_bytes or num_samples * UNKNOWN_SAMPLE_BYTES, num_samples)
        for share, (num_bytes, num_samples) in zip(shares, sizes, strict=True)
        if share
    ]
    period = sum(shares)
    num_samples = sum(samples for _, _, samples in drawn)
    mean_bytes = sum(share * num_bytes / samples for share, num_bytes, samples in drawn) / period
    budget = WindowBudget.of_samples(mean_bytes, global_batch_size, window_bytes, row_shape)
    all_bytes = sum(num_bytes for _, num_bytes, _ in drawn)
    is_small = all_bytes <= budget.num_bytes and budget.range_samples > 1
    if not grid:
        counting = [share / period for share, _, _ in drawn if share / period > MIN_SHARE]
        of_rarest = max(FEW_LANES, int(budget.num_ranges * min(counting, default=MIN_SHARE)))
        most_lanes = FEW_LANES if is_small else min(of_rarest, budget.num_ranges)
        grid = 1, _num_lanes(num_samples, global_batch_size, budget, most_lanes, row_shape)
    num_lanes = grid[0] * grid[1]
    if is_small:
        fitting = max(1, int(budget.num_bytes / (num_lanes * mean_bytes)))
        chunk = max(1, round(SMALL_CORPUS_CHUNK / row_shape.num_samples))
        chunk = _few_chunks(chunk, num_samples)
        return OrderSettings(grid, window or fitting, MAX_INTERLEAVE, chunk)
    window = window or budget.window(num_lanes, len(drawn))
    return _settings(num_samples, grid, window, budget, len(drawn))


def _num_lanes(
    num_samples: int,
    global_batch_size: int,
    budget: WindowBudget,
    most_lanes: int,
    row_shape: RowShape,
) -> int:
    """Return Q: the largest divisor of G that leaves each lane enough rows and samples."""
    lane_samples = max(MIN_LANE_SAMPLES, 2 * budget.range_samples)
    few_lanes = FEW_LANES
    if row_shape.are_packs:
        least = max(MIN_LANE_UNITS, round(MIN_LANE_SAMPLES / row_shape.num_samples))
        lane_samples, few_lanes = max(least, 2 * budget.range_samples), FEW_PACK_LANES
    limit = min(
        MAX_LANES,
        max(few_lanes, global_batch_size // MIN_LANE_ROWS),
        most_lanes,
        num_samples // lane_samples,
        global_batch_size,
    )
    return next(lanes for lanes in range(max(1, limit), 0, -1) if global_batch_size % lanes == 0)


def _settings(
    num_samples: int,
    grid: tuple[int, int],
    window: int,
    budget: WindowBudget,
    num_sources: int = 1,
) -> OrderSettings:
    """Return the settings of a corpus that is larger than its windows."""
    single = budget.range_samples == 1
    chunk = _few_chunks(1 if single else 4 * budget.range_samples, num_samples)
    num_ranges = window // (budget.range_samples * num_sources)
    interleave = min(MAX_INTERLEAVE, max(1, num_ranges))
    if single and chunk > 1:  # too many samples for a true permutation
        interleave = MAX_INTERLEAVE
    return OrderSettings(grid, window, interleave, chunk)


def _few_chunks(chunk: int, num_samples: int) -> int:
    """Return C: a chunk size, doubled until there are at most 4 Mi chunks."""
    while num_samples // chunk > MAX_CHUNKS:
        chunk *= 2
    return chunk
