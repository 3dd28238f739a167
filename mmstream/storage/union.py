"""Storage: several folders that are read as one. Each name begins with the prefix of its folder.

Nothing is written there, because a file of one folder would have the name of another.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from mmstream.errors import ConfigError
from mmstream.storage.store import (
    Access,
    CommonCalls,
    ObjectStat,
    Range,
    Store,
    join_url,
    map_requests,
)

SCHEME = "union"


def refuse_union(url: str) -> NoReturn:
    """Raise the ConfigError of whoever wants to open or to write the folder of a union."""
    raise ConfigError(
        f"{url}: is a union, and has no folder of its own: name one of its folders; or, for a plan "
        'of packs, name another one, mm.plan(pipeline, folder="plans/") and mm.Pack(plan=)'
    )


@dataclass(frozen=True)
class UnionStore(CommonCalls):
    """Stores under one root, by prefixes.

    Example: of ``old`` and ``new``, ``new/shard-000000.tar`` is ``shard-000000.tar`` of the second.
    """

    stores: tuple[tuple[str, Store], ...]
    """Prefixes, which hold no slash, and the store of each."""

    @cached_property
    def url(self) -> str:
        """What stands for the root in messages. It cannot be opened."""
        return f"{SCHEME}://{','.join(store.url for _, store in self.stores)}"

    @cached_property
    def _store_of(self) -> dict[str, Store]:
        return dict(self.stores)

    @property
    def access(self) -> Access:
        """How reads are best cut: as those of the first store with concurrent requests, if any."""
        accesses = [store.access for _, store in self.stores]
        return next((access for access in accesses if access.concurrent), accesses[0])

    def find(self, name: str) -> tuple[Store, str]:
        """Return the store of an object, and its name there.

        Raises:
            FileNotFoundError: No store has the prefix.
        """
        prefix, slash, own_name = name.partition("/")
        if not slash or prefix not in self._store_of:
            raise FileNotFoundError(f"{join_url(self.url, name)}: no such file")
        return self._store_of[prefix], own_name

    def url_of(self, name: str) -> str:
        """Return the path or URL of an object, whether it exists or not."""
        try:
            store, own_name = self.find(name)
        except FileNotFoundError:
            return join_url(self.url, name)
        return store.url_of(own_name)

    def local_path(self, name: str) -> str | None:
        """Return the path of an object that is a file. None: its store has no files."""
        try:
            store, own_name = self.find(name)
        except FileNotFoundError:
            return None
        return store.local_path(own_name)

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return a whole object."""
        store, own_name = self.find(name)
        return store.read(own_name, max_bytes)

    def read_ranges(
        self, ranges: Sequence[Range], expected: MutableMapping[str, ObjectStat] | None = None
    ) -> list[bytes | OSError]:
        """Return the bytes of every range, or the error in its place."""
        numbers_of: dict[str, list[int]] = {}
        for number, (name, _, _) in enumerate(ranges):
            numbers_of.setdefault(name.partition("/")[0], []).append(number)

        def read(prefix: str) -> Sequence[bytes | OSError]:
            of_store = [ranges[number] for number in numbers_of[prefix]]
            try:
                store, _ = self.find(of_store[0][0])
            except FileNotFoundError as error:
                return [error] * len(of_store)
            named = [
                (name.removeprefix(f"{prefix}/"), start, stop) for name, start, stop in of_store
            ]
            if expected is None:
                return store.read_ranges(named)
            names = {name: f"{prefix}/{name}" for name, _, _ in named}
            known = {own: expected[name] for own, name in names.items() if name in expected}
            responses = store.read_ranges(named, known)
            expected.update({names[own]: stat for own, stat in known.items()})
            return responses

        results: dict[int, bytes | OSError] = {}
        responses = map_requests(self, read, numbers_of)
        for numbers, of_store in zip(numbers_of.values(), responses, strict=True):
            results |= zip(numbers, of_store, strict=True)
        return [results[number] for number in range(len(ranges))]

    def drop_cache(self, name: str, start: int, stop: int) -> None:
        """Make the next read of bytes [start, stop) pass what this machine has cached of them."""
        store, own_name = self.find(name)
        store.drop_cache(own_name, start, stop)

    def stat(self, name: str) -> ObjectStat:
        """Return the size and the version of an object; errors as `read`."""
        store, own_name = self.find(name)
        return store.stat(own_name)

    def list(self) -> dict[str, ObjectStat]:
        """Return the objects directly under the root: there are only folders."""
        return {}

    def folders(self) -> Sequence[str]:
        """Return the prefixes, sorted."""
        return sorted(self._store_of)

    def create(self, name: str, *_: object, **__: object) -> NoReturn:
        """Raise a ConfigError. All calls that change something do so."""
        refuse_union(self.url_of(name))

    write = write_if = remove = create
