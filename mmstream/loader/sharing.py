"""Ranks that need the same rows: which they are, and how one of them reads for the others.

    Loader(mesh=, data=)     -> `group_of_mesh`: the data-parallel rank, and who has the same one
    Loader(share="broadcast") -> `BatchChannel`: batches from the reader of a group to its others

With tensor, context and pipeline parallelism several ranks train on the same rows. Example: a mesh
of dp 2 x cp 2 x tp 2, with ``data=("dp",)``::

    rank           0 1 2 3   4 5 6 7
    mm.World rank  0 0 0 0   1 1 1 1    of world_size 2
    reader         0         4          the first rank of each group

The reader sends messages to each of the others, over a gloo group. A message has a head of four
numbers: the iteration, a `_Kind`, and two sizes. Then come so many pickled bytes, and so many of
tensors. The reader is one batch ahead. Example: an iteration of two steps, where each line is a
``next()``::

    reader                                           another rank
    1  makes batch 0 and sends it; makes batch 1     takes batch 0, and the head of batch 1;
       and sends it; returns batch 0                 begins to take the rest; returns batch 0
    2  sends END; returns batch 1                    takes the rest, and END; returns batch 1
    3  waits until END was taken; has ended          has ended

There is no thread. gloo moves the bytes of batch 1 while the model works on batch 0, and all else
happens in ``next()``. Before the reader sends a message, it waits until all have taken the one
before. So nobody is more than a step behind, and two batches are on their way at most.

An iteration may end in other ways, and none of them waits for ever:

- An error of the reader is a message. It is raised in place of the batch, on all ranks.
- A reader whose loop is left or closed says so. Ranks that ask for more raise it. Where all ranks
  leave at the same step nobody asks, and the next iteration drops these messages by their number.
  It begins when all ranks have begun it, because they compare their settings first.
- A rank that has ended is an error of gloo, at once. One that hangs, or left alone, is one after
  the time limit of the process group. Both name the rank. gloo ends all connections then.
- Limits for bad samples need no message: all ranks count the same samples.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist

from mmstream import errors
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.loader.batch_transport import (
    BatchPickler,
    BatchUnpickler,
    copied_into,
    ends_of,
    values_at,
)
from mmstream.loader.watchdog import in_one_line
from mmstream.ranks import World, check_consistency, group_limit_s
from mmstream.storage.transfers import TransferCounts
from mmstream.types import Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Share: TypeAlias = Literal["read", "broadcast"]
"""Whether each rank reads by itself, or one of those that need the same rows."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks that need the same rows as this one."""

    world: World
    """The data-parallel rank of all of them."""
    ranks: tuple[int, ...] = (0,)
    """Their ranks in the process group. The first one reads, where one does."""

    @property
    def is_first(self) -> bool:
        """Whether this rank reads for the others, and writes for them."""
        return len(self.ranks) == 1 or dist.get_rank() == self.ranks[0]


def group_of_mesh(mesh: DeviceMesh, data: str | Sequence[str], share: Share) -> RankGroup:
    """Return the group of this rank. All ranks call it, and compare what they were given.

    Raises:
        ConfigError: on every rank, where the mesh is not that of all ranks, where a name is none of
            its dimensions, or where ranks were given different things.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("mesh: there is no process group yet: make it by init_device_mesh first")
    world = World(dist.get_rank(), dist.get_world_size())
    names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
    data = (data,) if isinstance(data, str) else tuple(data)
    problem, grid = "", torch.as_tensor(getattr(mesh, "mesh", ()))
    if unknown := [name for name in data if name not in names]:
        has = f"has {', '.join(names)}" if names else "has no names: give mesh_dim_names="
        problem = f"data: {unknown[0]!r} is not a dimension of the mesh, which {has}"
    elif sorted(grid.flatten().tolist()) != list(range(world.world_size)):
        problem = (
            f"mesh: it has {grid.numel()} ranks, and the process group {world.world_size}: give "
            "the mesh of all ranks, not a part of it"
        )
    shape = " x ".join(f"{name} {size}" for name, size in zip(names, grid.shape, strict=False))
    order = crc32(grid.numpy().tobytes())  # of the ranks in it
    check_consistency(
        {
            "mesh": problem or f"{shape} (hash {order:08x})",
            "data": ", ".join(sorted(data)),
            "share": share,
        },
        world,
        beginning="to make this Loader",
        advice="every rank of a mesh makes the same loaders, in the same order",
    )
    if problem:
        raise ConfigError(problem)
    # Rows of the table are groups. Example: dp 2 x tp 2 and data=("tp",) give [[0, 2], [1, 3]].
    splits_rows = [name in data for name in names] or [False] * grid.ndim
    axes = sorted(range(grid.ndim), key=lambda axis: not splits_rows[axis])
    num_groups = math.prod(grid.shape[axis] for axis in axes if splits_rows[axis])
    groups = grid.permute(axes).reshape(num_groups, -1).tolist()
    number = next(n for n, ranks in enumerate(groups) if world.rank in ranks)
    return RankGroup(World(number, num_groups), tuple(sorted(groups[number])))


_NOTHING = torch.empty(0, dtype=torch.uint8)

# -- messages --------------------------------------------------------------------------------------


class _Kind(IntEnum):
    BATCH = 0
    END = 1
    """The iteration has no more batches."""
    ERROR = 2
    """In place of a batch: the name of a class of mmstream.errors, and the message."""


class _Message(NamedTuple):
    """A message whose head has come. The rest has come when the works are done."""

    iteration: int
    kind: int
    pickled: torch.Tensor
    data: torch.Tensor
    works: list[Any]


class _Gloo(NamedTuple):
    """What the loaders of a group share. Its ranks could only end it all at the same time."""

    group: Any
    tags: Iterator[int]
    """The next free one."""
    dropped: list[Any]
    """What dropped loaders have sent. gloo would take back what was not taken yet."""


_gloo_of: WeakKeyDictionary[Any, dict[tuple[int, ...], _Gloo]] = WeakKeyDictionary()
"""By default process group, then by ranks."""


class BatchChannel:
    """Carries the batches of a loader from the reader of a group to its other ranks.

    All ranks of the group make it, in the same order.

    Args:
        group: the ranks.
        stall_timeout_s: as the Loader has it: the reader raises after it. Others wait longer.

    Attributes:
        is_reader: whether this rank reads for the others.
        tag: number of the channel among those of the group.
    """

    def __init__(self, group: RankGroup, stall_timeout_s: float | None) -> None:
        self._ranks = group.ranks
        self.is_reader = group.is_first
        of_world = _gloo_of.setdefault(dist.group.WORLD, {})
        if group.ranks not in of_world:
            made = dist.new_group([*group.ranks], backend="gloo", use_local_synchronization=True)
            of_world[group.ranks] = _Gloo(made, count(0, 3), [])
        self._group, tags, dropped = of_world[group.ranks]
        self.tag = next(tags)  # of heads; the rest has the next two
        self._limit_s = max(group_limit_s(), 3 * (stall_timeout_s or 0))  # two batches, and more
        self._iteration = 0
        self._is_open = False  # the reader has not said how this iteration ends
        self._pid = os.getpid()
        self._sent: list[tuple[int, Any]] = []
        dropped.clear()  # the others make a new loader, too
        weakref.finalize(self, dropped.extend, self._sent)
        self._coming: _Message | None = None

    def shared(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an iteration, on each rank of the group.

        Args:
            batches: those of the reader. On other ranks they are not used.

        Raises:
            ConfigError: a batch holds what cannot cross, or the reader has left the iteration.
            MMStreamError: the reader has raised one, or a rank of the group has ended or hangs.
        """
        self._iteration += 1
        return self._send_all(batches) if self.is_reader else self._receive_all()

    def leave(self) -> None:
        """Tell the others that the iteration ends here, where this rank reads for them."""
        if self._is_open and self._pid == os.getpid():  # a fork leaves the sockets to its parent
            self._is_open = False
            words = "it has left the loop: all ranks of a group take the same steps"
            self._post(_Kind.ERROR, pickle.dumps(("ConfigError", words)))

    # -- the reader

    def _send_all(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        iteration, self._is_open = self._iteration, True
        try:
            ahead = self._send_next(batches)
            while isinstance(ahead, dict):
                batch, ahead = ahead, self._send_next(batches)
                yield batch
        finally:
            if iteration == self._iteration:  # else another loop has begun
                self.leave()
        if ahead is not None:
            raise ahead
        self._wait_for_others()  # END would be lost with a process that ends now

    def _send_next(self, batches: Iterator[Batch]) -> Batch | Exception | None:
        """Make and send the next batch. None: there is none. An error is sent, and returned."""
        outcome: Batch | Exception | None
        kind, pickled, data = _Kind.END, b"", _NOTHING
        try:
            outcome = next(batches, None)
            if outcome is not None:
                kind, (pickled, data) = _Kind.BATCH, _packed(outcome)
        except Exception as error:
            outcome, name = error, type(error).__name__
            if isinstance(error, MMStreamError):
                words = str(in_one_line(error))
            else:  # of a function of the user, maybe in a worker, whose traceback comes first
                words = f"{name}: {escaped(str(error).rstrip().rpartition(chr(10))[2])}"
                name = "MMStreamError"
            kind, pickled = _Kind.ERROR, pickle.dumps((name, words))
        self._wait_for_others()
        self._is_open = kind == _Kind.BATCH
        self._post(kind, pickled, data)
        return outcome

    def _post(self, kind: _Kind, pickled: bytes, data: torch.Tensor = _NOTHING) -> None:
        """Begin to send a message to all others. It is kept until they have it."""
        numbers = [self._iteration, kind, len(pickled), len(data)]
        head = torch.tensor(numbers, device="cpu")
        rest = torch.frombuffer(bytearray(pickled), dtype=torch.uint8) if pickled else _NOTHING
        for number, rank in enumerate(self._ranks[1:], start=1):
            for tag, tensor in enumerate((head, rest, data), start=self.tag):
                if not len(tensor):
                    continue
                begun = partial(dist.isend, tensor, group=self._group, group_dst=number, tag=tag)
                self._sent.append((rank, _work(begun)))

    def _wait_for_others(self) -> None:
        for rank, work in self._sent:
            self._wait(work, rank, "has not taken the batch before")
        self._sent.clear()

    # -- the others

    def _receive_all(self) -> Iterator[Batch]:
        iteration, message = self._iteration, self._next_message()
        while message.iteration != iteration:  # an earlier one was left
            message = self._next_message()
        while message.kind == _Kind.BATCH:
            following = self._next_message()  # and the rest of this one
            yield _unpacked(message)
            message = following
        self._wait_for_rest(message)
        if message.kind == _Kind.ERROR:
            name, words = pickle.loads(message.pickled.numpy().data)
            kind = getattr(errors, name, MMStreamError)
            raise kind(f"rank {self._ranks[0]}, which reads for this one: {words}")

    def _next_message(self) -> _Message:
        """Take the rest of the message before, and the head of the next one."""
        if self._coming is not None:
            self._wait_for_rest(self._coming)
        head = torch.empty(4, dtype=torch.int64)
        self._wait(self._receive(head, self.tag), self._ranks[0], "has sent nothing")
        iteration, kind, *sizes = head.tolist()
        # `to_device` copies from pinned memory at once.
        pickled, data = (
            torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            for size in sizes
        )
        works = [
            self._receive(tensor, tag)
            for tag, tensor in enumerate((pickled, data), start=self.tag + 1)
            if len(tensor)
        ]
        self._coming = _Message(iteration, kind, pickled, data, works)
        return self._coming

    def _wait_for_rest(self, message: _Message) -> None:
        while message.works:
            self._wait(message.works.pop(), self._ranks[0], "has not sent the rest of a batch")

    def _receive(self, tensor: torch.Tensor, tag: int) -> Any:
        return _work(partial(dist.irecv, tensor, group=self._group, group_src=0, tag=tag))

    def _wait(self, work: Any, rank: int, late: str) -> None:
        """Wait for a message to or from a rank.

        Raises:
            MMStreamError: the rank has ended, or the time is over.
        """
        try:
            if isinstance(work, Exception):
                raise work
            work.wait(timedelta(seconds=self._limit_s))
        except (RuntimeError, ValueError) as error:
            is_late = "Timed out" in str(error)
            words = f"{late} within {self._limit_s:.0f} s" if is_late else "has ended or gave up"
            raise MMStreamError(
                f"rank {rank}, which needs the same rows as this one, {words}; its own log may say "
                "why. Start all ranks again from a saved state"
            ) from error


def _work(begin: Callable[[], Any]) -> Any:
    """Begin to send or receive. Returns the work, or why there is none: a rank has ended."""
    try:
        return begin()
    except (RuntimeError, ValueError) as error:
        return error


# -- batches as bytes ------------------------------------------------------------------------------


class _Pickler(BatchPickler):
    """Pickles plain values only, beside what crosses as bytes."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse objects of other libraries and of the user; called for all but built-in values."""
        kind = type(value)
        if kind.__module__.partition(".")[0] in ("builtins", "mmstream", "numpy"):
            return NotImplemented
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _packed(batch: Batch) -> tuple[bytes, torch.Tensor]:
    """Return a batch as pickled bytes, and as those of its tensors and long bytes.

    Raises:
        ConfigError: a field holds what cannot cross.
    """
    file = BytesIO()
    pickler = _Pickler(file)
    for name, value in batch.items():
        try:
            pickler.dump((name, value))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f'share="broadcast": batch[{name!r}] holds what cannot cross to other ranks '
                f"({escaped(error)}): give tensors on the CPU, arrays, numbers, texts or bytes, "
                'or share="read"'
            ) from error
    ends = ends_of(pickler.shared)
    data = torch.empty(ends[-1], dtype=torch.uint8)
    locations = copied_into(data, pickler.shared, ends)
    return pickle.dumps((len(batch), file.getvalue(), locations)), data


def _unpacked(message: _Message) -> Batch:
    """Return the batch of a message. This rank has read nothing for it."""
    num_fields, pickled, locations = pickle.loads(message.pickled.numpy().data)
    unpickler = BatchUnpickler(pickled, values_at(locations, [message.data]))
    batch: Batch = dict(unpickler.load() for _ in range(num_fields))
    if "__lineage__" in batch:
        batch["__lineage__"] = replace(
            batch["__lineage__"],
            num_bytes=0,
            num_requests=0,
            num_wrong_reads=0,
            read_s=0.0,
            decode_s=0.0,
            collate_s=0.0,
            transfers=TransferCounts(),
        )
    return batch
