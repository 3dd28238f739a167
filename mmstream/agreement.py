"""All ranks compare their settings before they begin: all of them go on, or none does.

    Loader.iter_undelivered, loop.run -> `agree` -> nothing, or ConfigError on every rank

A rank with another seed or another copy of the corpus would train on other rows than those that are
left to it: samples are lost and repeated, and nothing else fails.

The ranks compare through the key-value store of their process group, and not by a collective. A
Loader may begin in a thread beside the model's collectives, and NCCL would need CUDA tensors. Each
rank writes its settings under its own key, and rank 0 reads them all and writes the verdict, which
the others wait for. So W ranks make a few requests each, and rank 0 makes W of them::

    mmstream/begun/3             rank 3 has compared so often: N
    mmstream/comparison/N/3      the N-th settings of rank 3, removed when they are compared
    mmstream/comparison/N        the verdict, removed at the next comparison
    mmstream/comparison/N/read   ranks that have read a verdict against the run
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.world import World

logger = logging.getLogger(__name__)

WARNING_S = 30.0
"""Seconds after which ranks that have not come are named in a warning, again and again."""

ANSWER_S = 60.0
"""Seconds that rank 0 has for its verdict beyond the time that it waits for the others."""

READ_S = 10.0
"""Seconds that rank 0 waits until all others have read a verdict against them.

Its process often holds the store. If it ended at once, the others would see a lost connection.
"""

MAX_PAUSE_S = 0.2
"""Longest pause between two looks at the store. It begins at `MIN_PAUSE_S` and grows by half."""

MIN_PAUSE_S = 0.001

MAX_NAMED = 4
"""Most groups of ranks, and most settings of a group, that a message names."""

DIGEST_LENGTH = 64
"""Characters of a SHA-256 in hexadecimal: 32 bytes."""

SAME = "same"
"""The verdict when all ranks have the same settings."""

MISSING = "missing: "
"""The verdict begins with it when ranks did not come."""


def agree(settings: Mapping[str, str], world: World, *, beginning: str, advice: str) -> None:
    """Compare settings over all ranks of the process group of ``torch.distributed``.

    Every rank must call it, the same number of times. It does nothing for a single rank, without a
    process group, and where the group has another number of ranks than `world`: with tensor
    parallelism, several processes have the same rows. It takes a few milliseconds when all ranks
    come at once. It waits as long as the group's own time limit
    (``init_process_group(timeout=)``), and names in a warning who is missing.

    Args:
        settings: what must be the same on all ranks, as short texts by name.
        world: the data-parallel rank of this process.
        beginning: what begins now, for messages: "this iteration".
        advice: what to do about a rank that does not come, for messages.

    Raises:
        ConfigError: on every rank, if one differs or does not come. Names the rank.
        MMStreamError: the store has failed, as it does when the process of rank 0 has ended.
    """
    dist: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1 or world.world_size != world_size:
        return
    store = _default_store()
    if store is None:
        return
    text = json.dumps([world.rank, dict(settings)])
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()
    try:
        number = store.add(f"mmstream/begun/{rank}", 1)
        store.set(_key(number, rank), digest + text)
        is_judge = rank == 0
        verdict = _judge(store, number, world_size) if is_judge else _await_verdict(store, number)
    except RuntimeError as error:  # what torch raises for its stores
        raise MMStreamError(
            "the ranks cannot compare their settings: the store of the process group has failed "
            f"({escaped(str(error))}); the process of rank 0 may have ended"
        ) from error
    if verdict.startswith(MISSING):
        who = verdict.removeprefix(MISSING)
        raise ConfigError(f"{who} not begun {beginning}: {advice}; nobody trains")
    if verdict != SAME:
        raise ConfigError(f"{verdict}; nobody trains")


def _default_store() -> Any:
    """Return the key-value store of the default process group, or None: MPI has none.

    torch (2.13) has no public function for it, and this one stands beside those that
    ``torch.distributed`` itself calls.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _key(number: int, rank: int | None = None) -> str:
    """Return the key of a rank's settings, or of the verdict."""
    return f"mmstream/comparison/{number}" + ("" if rank is None else f"/{rank}")


def _judge(store: Any, number: int, world_size: int) -> str:
    """Read the settings of all ranks and write the verdict: the part of rank 0."""
    ranks = range(world_size)
    keys = [_key(number, rank) for rank in ranks]
    has_all = _wait_until(
        lambda: store.check(keys), _limit_s(store), lambda: _absent(store, number, ranks)
    )
    if has_all:
        verdict = _compare([store.get(key).decode() for key in keys])
    else:
        verdict = _missing(_absent(store, number, ranks), _limit_s(store))
    store.set(_key(number), verdict)
    if verdict != SAME:
        num_readers = world_size - 1 - len(_absent(store, number, ranks))
        _wait_until(lambda: store.add(_key(number) + "/read", 0) >= num_readers, READ_S, list)
    for key in [*keys, _key(number - 1)] if has_all else ():
        store.delete_key(key)
    return verdict


def _await_verdict(store: Any, number: int) -> str:
    """Wait for the verdict of rank 0, and return it."""
    key, limit_s = _key(number), _limit_s(store)
    if not _wait_until(lambda: store.check([key]), limit_s, lambda: _absent(store, number, [0])):
        if _absent(store, number, [0]) and not store.check([key]):
            return _missing([0], limit_s)
        # Rank 0 came later than this rank, and still waits for others.
        if not _wait_until(lambda: store.check([key]), limit_s + ANSWER_S, list):
            return "rank 0 has not compared the settings of all ranks: see its messages"
    verdict = str(store.get(key).decode())
    if verdict != SAME:
        store.add(key + "/read", 1)
    return verdict


def _limit_s(store: Any) -> float:
    """Return how long to wait for other ranks: as long as the process group does."""
    return float(store.timeout.total_seconds())


def _absent(store: Any, number: int, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not written their settings."""
    return [rank for rank in ranks if not store.check([_key(number, rank)])]


def _wait_until(
    is_so: Callable[[], bool], limit_s: float, absent_ranks: Callable[[], list[int]]
) -> bool:
    """Wait until something in the store is so; return whether it is.

    It looks again and again, with pauses. ``store.wait`` would hold the lock of the store, which
    other threads of the process need.

    Args:
        is_so: asks the store.
        limit_s: seconds to wait at most.
        absent_ranks: who is waited for, for warnings.
    """
    started = time.monotonic()
    warn_s, pause_s = WARNING_S, MIN_PAUSE_S
    while not is_so():
        waited_s = time.monotonic() - started
        if waited_s > limit_s:
            return False
        if waited_s > warn_s:
            warn_s += WARNING_S
            ranks = absent_ranks()
            if ranks:
                logger.warning(
                    "waiting for %s since %.0f s: every rank begins here, and they compare their "
                    "settings first",
                    _ranks_in_words(ranks),
                    waited_s,
                )
        time.sleep(min(pause_s, max(0.0, limit_s - waited_s) + MIN_PAUSE_S))
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)
    return True


def _compare(texts: Sequence[str]) -> str:
    """Return the verdict about the settings of ranks 0, 1, 2 and so on.

    The settings of most ranks are taken for the right ones; rank 0 decides between equally many.
    """
    digests = [text[:DIGEST_LENGTH] for text in texts]
    contents = [json.loads(text[DIGEST_LENGTH:]) for text in texts]
    (common, _), *others = Counter(digests).most_common()  # of equal counts, the first seen
    common_settings = contents[digests.index(common)][1]
    if others:
        parts = []
        for digest, _ in others[:MAX_NAMED]:
            ranks = [rank for rank, own in enumerate(digests) if own == digest]
            settings = contents[ranks[0]][1]
            parts.append(
                f"{_ranks_in_words(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from the "
                f"other ranks: {_differences(settings, common_settings)}"
            )
        more = f"; and {len(others) - MAX_NAMED} more kinds" if len(others) > MAX_NAMED else ""
        return f"{'; '.join(parts)}{more}"
    ranks_by_row: dict[int, list[int]] = {}
    for rank, (world_rank, _) in enumerate(contents):
        ranks_by_row.setdefault(world_rank, []).append(rank)
    for world_rank, ranks in ranks_by_row.items():
        if len(ranks) > 1:
            return (
                f"{_ranks_in_words(ranks)} all have World(rank={world_rank}), and so the same "
                "rows: give each rank its own, or a smaller world_size"
            )
    return SAME


def _differences(settings: Mapping[str, str], common: Mapping[str, str]) -> str:
    """Return what differs between the settings of a rank and those of most ranks, in words."""
    names = [
        name
        for name in dict.fromkeys([*common, *settings])
        if settings.get(name) != common.get(name)
    ]
    texts = [
        f"{name} is {settings.get(name, 'not set')} there and {common.get(name, 'not set')} "
        "elsewhere"
        for name in names[:MAX_NAMED]
    ]
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(texts) + more


def _missing(ranks: Sequence[int], limit_s: float) -> str:
    """Return the verdict about ranks that did not come."""
    have = "has" if len(ranks) == 1 else "have"
    return f"{MISSING}within {limit_s:.0f} s {_ranks_in_words(ranks)} {have}"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """Return for example "rank 3", "ranks 1 and 2", or "ranks 0, 1, 2, 3 and 60 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks]
    if len(ranks) > MAX_NAMED + 1:
        shown = [*shown[:MAX_NAMED], f"{len(ranks) - MAX_NAMED} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
