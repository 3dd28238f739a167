"""What a saved state stores about an order, and how the order comes back from it."""

import json

import pytest

from mmstream.errors import StateError
from mmstream.order import Order
from tests.helpers.orders import pairs, steps_of_epoch

COUNTS = [30, 0, 41]
NAMES = ["a.tar", "b.tar", "c.tar"]
BAD = [(0, 3), (2, 40)]


SIZES = [300, 10, 410]
CHECKSUMS = ["aa", "bb", "cc"]


def order(**settings):
    defaults = {
        "global_batch_size": 6,
        "names": NAMES,
        "bad": BAD,
        "window": 7,
        "grid": (2, 3),
        "sizes": SIZES,
        "checksums": CHECKSUMS,
    }
    return Order.from_counts(COUNTS, **{**defaults, **settings})


def saved(**settings):
    return json.loads(json.dumps(order(**settings).identity()))


def test_an_identity_names_every_setting():
    identity = saved(seed=9, interleave=5, chunk=4, shuffle=True, drop_last=False)
    hashes = [identity.pop(key) for key in ("corpus", "bad", "sizes", "sha256")]
    assert [len(value) for value in hashes] == [32] * 4
    assert len(set(hashes)) == 4
    assert identity == {
        "version": 1,
        "num_shards": 3,
        "seed": 9,
        "global_batch_size": 6,
        "grid": [2, 3],
        "window": 7,
        "interleave": 5,
        "chunk": 4,
        "shuffle": True,
        "drop_last": False,
    }


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_order_comes_back_from_its_identity(shuffle, drop_last):
    first = order(shuffle=shuffle, drop_last=drop_last, seed=4, interleave=3, chunk=5)
    again = Order.from_identity(
        json.loads(json.dumps(first.identity())),
        counts=COUNTS,
        names=NAMES,
        bad=BAD,
        sizes=SIZES,
        checksums=CHECKSUMS,
    )
    assert again.identity() == first.identity()
    for refs, other in zip(steps_of_epoch(again, 2), steps_of_epoch(first, 2), strict=True):
        assert pairs(refs) == pairs(other)


def test_an_order_comes_back_after_shards_were_appended():
    for checksum in ("dd", None):
        again = Order.from_identity(
            saved(),
            [*COUNTS, 9],
            [*NAMES, "d.tar"],
            [*BAD, (3, 0)],
            [*SIZES, 90],
            [*CHECKSUMS, checksum],
        )
        assert again.identity() == saved()


@pytest.mark.parametrize(
    ("sizes", "checksums", "message"),
    [
        ([300, 11, 410], CHECKSUMS, r"the sizes of the first 3 shards are not .* \(sizes was '"),
        ([300, 11, 410], None, "the sizes of the first 3 shards are not those of the state"),
        (SIZES, ["aa", "bb", "cd"], r"the bytes \(sha256\) of the first 3 shards are not those"),
        (None, ["aa", "bb", "cd"], r"the bytes \(sha256\) of the first 3 shards are not those"),
        ([*SIZES, 5], ["aa", "bb", "cd", "dd"], r"the bytes \(sha256\) of the first 3 shards"),
    ],
)
def test_shards_of_the_same_names_and_counts_with_other_bytes_are_refused(
    sizes, checksums, message
):
    more = len(sizes or SIZES) - 3
    with pytest.raises(StateError, match=message):
        Order.from_identity(
            saved(), [*COUNTS, 9][: 3 + more], [*NAMES, "d"][: 3 + more], BAD, sizes, checksums
        )


@pytest.mark.parametrize(
    ("saved_content", "sizes", "checksums"),
    [
        ({}, None, None),
        ({}, SIZES, ["aa", None, "cc"]),
        ({"checksums": None}, SIZES, CHECKSUMS),
        ({"sizes": None, "checksums": None}, SIZES, CHECKSUMS),
    ],
)
def test_what_only_one_side_knows_of_the_shards_is_not_compared(saved_content, sizes, checksums):
    again = Order.from_identity(saved(**saved_content), COUNTS, NAMES, BAD, sizes, checksums)
    assert again.identity() == saved(sizes=sizes, checksums=checksums)


def test_a_state_without_a_bad_list_ignores_a_later_one():
    again = Order.from_identity(saved(bad=[]), COUNTS, NAMES, BAD, SIZES, CHECKSUMS)
    assert again.identity() == saved(bad=[])
    assert again.num_samples == 71


@pytest.mark.parametrize(
    ("counts", "names", "bad", "message"),
    [
        ([30, 1, 41], NAMES, BAD, "the corpus' first 3 shards are not those .*old ones, or start"),
        ([30, 0], NAMES[:2], BAD[:1], "the corpus' first 3 shards are not those of the state"),
        (COUNTS, ["a.tar", "b.tar", "x.tar"], BAD, "the corpus' first 3 shards are not those"),
        (COUNTS, None, BAD, "the corpus' first 3 shards are not those of the state"),
        (COUNTS, NAMES, BAD[:1], "the known bad samples are not .*put back mmstream.bad.previous"),
        (
            COUNTS,
            NAMES,
            [],
            "the known bad samples are not those of the state .bad was '.* is None",
        ),
    ],
)
def test_another_corpus_or_bad_list_is_refused(counts, names, bad, message):
    with pytest.raises(StateError, match=message):
        Order.from_identity(saved(), counts, names, bad)


@pytest.mark.parametrize("missing", sorted(order().identity().keys() - {"sizes", "sha256"}))
def test_an_identity_without_one_of_its_keys_is_refused(missing):
    identity = saved()
    del identity[missing]
    with pytest.raises(StateError, match=f"not an order's identity: KeyError: '{missing}'"):
        Order.from_identity(identity, COUNTS, NAMES, BAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "order version 2, this mmstream has 1"),
        (
            {"num_shards": 3.5},
            r"not an order's identity: ConfigError: num_shards 3\.5: needs an integer",
        ),
        ({"window": 0}, "not an order's identity: window 0"),
        ({"grid": [2, 4]}, r"not an order's identity: grid \(2, 4\)"),
        ({"grid": [2]}, "not an order's identity"),
        ({"grid": "x"}, "not an order's identity"),
        ({"seed": None}, "not an order's identity: seed None"),
        ({"global_batch_size": 600}, "not an order's identity: 69 samples do not fill"),
        ({"sizes": 5}, "not an order's identity: ValueError: sizes 5 is not a hash"),
        ({"sha256": "abc"}, "not an order's identity: ValueError: sha256 'abc' is not a hash"),
    ],
)
def test_a_damaged_identity_is_refused(change, message):
    with pytest.raises(StateError, match=message):
        Order.from_identity(saved() | change, COUNTS, NAMES, BAD)


def test_something_else_is_not_an_identity():
    with pytest.raises(StateError, match="not an order's identity: TypeError"):
        Order.from_identity(None, COUNTS)
