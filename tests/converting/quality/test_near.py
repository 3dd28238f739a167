"""Hashes that differ in few bits, and equal ones: compared with a search of all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from mmstream.converting.quality import equal, near
from mmstream.converting.quality.equal import equal_to_first
from mmstream.converting.quality.near import (
    MAX_DISTANCE,
    keep_first,
    match_with_first,
    near_pairs,
)


def flipped(hashes, num_bits, rng):
    """Return hashes with so many bits changed."""
    bits = np.unpackbits(hashes, axis=1)
    for row, count in zip(bits, num_bits):
        row[rng.permutation(256)[:count]] ^= 1
    return np.packbits(bits, axis=1)


def planted(count, rng):
    """Return random hashes. The last quarter are the first with 0 to 20 bits changed."""
    hashes = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    quarter = count // 4
    hashes[-quarter:] = flipped(hashes[:quarter], rng.integers(0, 21, quarter), rng)
    hashes[quarter : quarter + 30] = hashes[0]
    return hashes[rng.permutation(count)]


def distances(hashes):
    return np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(-1, dtype=np.int64)


@pytest.mark.parametrize("max_bucket", [near.MAX_BUCKET, 1])
def test_every_pair_within_the_distance_is_found_and_no_other(monkeypatch, max_bucket):
    monkeypatch.setattr(near, "MAX_BUCKET", max_bucket)
    hashes = planted(600, np.random.default_rng(0))
    pairs = near_pairs(hashes)
    bits = distances(hashes)
    assert pairs.representative.tolist() == [int(np.flatnonzero(row == 0)[0]) for row in bits]
    different = np.unique(pairs.representative)
    expected = {
        (int(a), int(b))
        for a in different
        for b in different[different > a]
        if bits[a, b] <= MAX_DISTANCE
    }
    found = list(zip(pairs.first.tolist(), pairs.second.tolist()))
    assert set(found) == expected
    assert len(found) == len(expected) > 90
    assert pairs.distance.tolist() == [bits[a, b] for a, b in found]


def test_each_later_hash_is_matched_with_the_first_kept_one():
    rng = np.random.default_rng(1)
    hashes = planted(400, rng)
    bits = distances(hashes)
    kept, expected = [], {}
    for number in range(len(hashes)):
        leaders = [leader for leader in kept if bits[leader, number] <= MAX_DISTANCE]
        if leaders:
            expected[number] = leaders[0]
        else:
            kept.append(number)
    matches = keep_first(near_pairs(hashes))
    assert dict(zip(matches.again.tolist(), matches.first.tolist())) == expected
    assert matches.distance.tolist() == [bits[a, b] for b, a in expected.items()]


def test_a_chain_of_pictures_keeps_what_is_not_near_to_the_first():
    """Each is 10 bits from the one before, so the third is 20 bits from the first."""
    bits = np.zeros((3, 256), dtype=np.uint8)
    bits[1, :10] = bits[2, :20] = 1
    matches = keep_first(near_pairs(np.packbits(bits, axis=1)))
    assert (matches.first.tolist(), matches.again.tolist()) == ([0], [1])


def test_later_hashes_are_matched_with_the_nearest_of_the_first_ones():
    rng = np.random.default_rng(2)
    hashes = planted(500, rng)
    bits = distances(hashes)[:300, 300:]
    matches = match_with_first(near_pairs(hashes), 300)
    expected = {
        300 + number: int(column.min())
        for number, column in enumerate(bits.T)
        if column.min() <= MAX_DISTANCE
    }
    assert dict(zip(matches.again.tolist(), matches.distance.tolist())) == expected
    assert len(expected) > 20
    assert (matches.first < 300).all()


def test_a_hash_that_comes_again_leaks_where_its_likeness_is_in_the_first_dataset():
    rng = np.random.default_rng(3)
    one = rng.integers(0, 256, (1, 32), dtype=np.uint8)
    other = flipped(one, [5], rng)
    matches = match_with_first(near_pairs(np.concatenate([one, other, other])), 1)
    assert (matches.first.tolist(), matches.again.tolist()) == ([0, 0], [1, 2])


def test_no_hashes_have_no_pairs():
    pairs = near_pairs(np.zeros((0, 32), np.uint8))
    assert pairs.first.size == keep_first(pairs).again.size == 0


@pytest.mark.parametrize("bucket", [equal.BUCKET, 7])
def test_equal_hashes_are_matched_with_the_first_in_any_number_of_buckets(monkeypatch, bucket):
    monkeypatch.setattr(equal, "BUCKET", bucket)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, (60, 2), dtype=np.uint64)
    values[1, 0] = values[2, 0]  # equal in 64 bits only
    values[3, 1] = values[4, 1]
    hashes = values[rng.integers(0, 60, 200)]
    first, again = equal_to_first([hashes[:50], hashes[50:50], hashes[50:]])
    earliest: dict[bytes, int] = {}
    expected = {}
    for number, value in enumerate(hashes):
        leader = earliest.setdefault(value.tobytes(), number)
        if leader != number:
            expected[number] = leader
    assert dict(zip(again.tolist(), first.tolist())) == expected
    assert again.tolist() == sorted(expected)
