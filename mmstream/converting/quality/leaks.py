"""What two datasets share: a training set and a benchmark, for example.

two datasets -> corpus -> LEAKS -> leaks.jsonl, a page with the pictures
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mmstream.converting.quality.corpus import Corpus, equal_to_first, read_corpus
from mmstream.converting.quality.duplicates import (
    Duplicates,
    PairNumbers,
    entries_of,
    numbers_of,
)
from mmstream.converting.quality.near import match_with_first, near_pairs
from mmstream.dataset.dataset import Dataset
from mmstream.errors import ConfigError
from mmstream.wrong_arguments import PositiveInt, checked

LEAK_KINDS = ("media", "near", "text", "id")


@checked()
def find_leaks(
    a: Dataset,
    b: Dataset,
    *,
    kinds: Collection[str] = LEAK_KINDS,
    num_threads: PositiveInt = 1,
    progress: bool = True,
) -> Duplicates:
    """Find samples of `b` that hold something that `a` holds too.

    Hashes come from the sidecars that `convert` wrote. Shards without a sidecar are read whole, and
    with "near" also those whose sidecar has no perceptual hashes. In memory are 16 bytes for each
    sample and kind, and 32 for each image with "near". Samples on the bad lists are left out: no
    epoch shows them.

    Args:
        a: A dataset, such as the training set.
        b: Another one, such as a benchmark.
        kinds: "media" (a file that both have), "near" (images that look alike: encoded again,
            resized, in another format), "text" (equal text), "id" (equal id of the rows).
        num_threads: Threads that read samples of shards without a sidecar.
        progress: Show a progress bar (on a terminal only).

    Returns:
        The pairs, each with a sample of `a` first and one of `b`. Their datasets are named "a" and
        "b". A medium or sample of `b` is in at most one pair of each kind.

    Raises:
        ConfigError: An unknown kind.
        ShardError: A shard without a sidecar cannot be read.
        StorageError: The storage failed after retries.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> mm.find_leaks(dataset, dataset, kinds=["text"], progress=False).num_pairs
        {'text': 480}
    """
    unknown = set(kinds) - set(LEAK_KINDS)
    if unknown:
        raise ConfigError(f"kinds={sorted(unknown)}: must be among {', '.join(LEAK_KINDS)}")
    wanted = [kind for kind in LEAK_KINDS if kind in kinds]
    datasets, left_out = {"a": a, "b": b}, {"a": a.bad, "b": b.bad}
    corpus = read_corpus(datasets, wanted, left_out, num_threads=num_threads, progress=progress)
    return Duplicates(corpus, {kind: _across(corpus, kind, a.num_shards) for kind in wanted})


def _across(corpus: Corpus, kind: str, num_shards: int) -> PairNumbers:
    """Return the pairs of one kind with one sample in each dataset.

    Args:
        corpus: Of both datasets.
        kind: One of `LEAK_KINDS`.
        num_shards: Of the first dataset.
    """
    entries = entries_of(corpus, kind)
    num_first = sum(len(chunk) for chunk in entries.hashes[:num_shards])
    if kind == "near":
        hashes = np.concatenate([np.zeros((0, 32), np.uint8), *entries.hashes])
        return numbers_of(entries, *match_with_first(near_pairs(hashes), num_first))
    first, again = equal_to_first(entries.hashes)  # the first of a kind is in `a`, if any is
    is_across = (first < num_first) & (again >= num_first)
    return numbers_of(entries, first[is_across], again[is_across])
