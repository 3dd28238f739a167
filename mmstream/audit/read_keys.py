"""Keys of samples without their payload, from one dataset or a mixture: one tar header each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mmstream.dataset import keys
from mmstream.dataset.source import ShardSource
from mmstream.types import SampleRef


def read_keys(source: ShardSource, refs: Sequence[SampleRef]) -> list[str | None]:
    """Return the keys of samples, from their first tar headers alone.

    Reads as `mmstream.dataset.keys.read_keys`. The sources of a mixture are read side by side. A
    key that cannot be read is None and a warning.

    Raises:
        StorageError: storage failed after retries.
    """
    by_source: dict[str, list[int]] = {}
    locations = [source.locate(shard) for shard, _ in refs]
    for number, location in enumerate(locations):
        by_source.setdefault(location.source, []).append(number)

    def read_source(item: tuple[str, list[int]]) -> list[str | None]:
        name, numbers = item
        local_refs = [(locations[i].shard, refs[i][1]) for i in numbers]
        prefix = f"{name}/" if name else ""
        return keys.read_keys(locations[numbers[0]].dataset, local_refs, prefix=prefix)

    key_of_ref: list[str | None] = [None] * len(refs)
    with ThreadPoolExecutor(max(1, len(by_source))) as pool:
        for numbers, answer in zip(
            by_source.values(), pool.map(read_source, by_source.items()), strict=True
        ):
            for number, key in zip(numbers, answer, strict=True):
                key_of_ref[number] = key
    return key_of_ref
