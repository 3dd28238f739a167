"""What an order knows about a dataset, and what a saved state stores about it."""

import json

import numpy as np
import pytest

from mmstream.errors import ConfigError, StateError
from mmstream.order import Corpus, Order
from mmstream.order.corpus import check_identity


def corpus(counts=(5, 0, 3), names=None, num_bytes=None, bad=(), sizes=None, checksums=None):
    return Corpus(np.array(counts), names, num_bytes, np.array(bad), sizes, checksums)


def test_known_bad_samples_are_counted_once_and_are_not_planned():
    listed = corpus(bad=[(2, 2), (0, 4), (0, 4), (0, 0)])
    assert listed.bad.tolist() == [[0, 0], [0, 4], [2, 2]]
    assert listed.good_counts.tolist() == [3, 0, 2]
    assert (listed.num_samples, corpus().num_samples) == (5, 8)
    without = Corpus(np.array([2])).bad
    assert (without.shape, without.dtype) == ((0, 2), np.int64)


@pytest.mark.parametrize("bad", [(0, 5), (1, 0), (2, 3), (3, 0), (-1, 0), (0, -1)])
def test_a_bad_sample_that_the_corpus_does_not_have_is_refused(bad):
    message = rf"the bad list has \(shard, index\) \[\[{bad[0]}, {bad[1]}\]\], which is not in"
    with pytest.raises(ConfigError, match=message):
        corpus(bad=[(0, 4), bad, (2, 2)])


@pytest.mark.parametrize("counts", [[5, 0, 3], np.array([[5], [0], [3]], dtype=np.uint16)])
def test_counts_and_bad_list_may_be_any_integers(counts):
    plain = Corpus(counts, bad=np.array([(2, 1)], dtype=np.uint8))
    assert plain.counts.dtype == plain.bad.dtype == plain.good_counts.dtype == np.int64
    assert (plain.counts.tolist(), plain.good_counts.tolist()) == ([5, 0, 3], [5, 0, 2])
    assert plain.identity() == corpus(bad=[(2, 1)]).identity()


@pytest.mark.parametrize("field", ["sizes", "checksums"])
def test_sizes_and_checksums_come_one_for_each_count(field):
    with pytest.raises(ConfigError, match=f"2 {field} for 3 counts: give one for each count"):
        corpus(**{field: [1, 2] if field == "sizes" else ["a", "b"]})


def test_sizes_are_positive_and_their_sum_is_the_size_of_the_corpus():
    with pytest.raises(ConfigError, match=r"^a shard has a negative size$"):
        corpus(sizes=[1, -1, 0])
    known, given = corpus(sizes=[1, 2, 4]), corpus(sizes=[1, 2, 4], num_bytes=9)
    assert [each.num_bytes for each in (known, given, corpus())] == [7, 9, None]


def test_a_checksum_of_the_corpus_needs_one_of_every_shard():
    some = corpus(checksums=["aa", "bb", None])
    assert some.identity()["sha256"] is None
    first = some.first_shards(2)
    assert first.identity() == Corpus(np.array([5, 0]), checksums=["aa", "bb"]).identity()
    assert first.identity()["sha256"] is not None
    assert corpus(checksums=[None, None, None]).identity()["sha256"] is None
    assert corpus(counts=(), checksums=[]).identity()["sha256"] is None


@pytest.mark.parametrize("value", [5, "", "a" * 31, "a" * 33, ["a"], True, "-" * 32])
@pytest.mark.parametrize("key", ["sizes", "sha256"])
def test_what_is_no_hash_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} .* is not a hash"):
        check_identity({key: value})


def test_names_are_kept_apart_in_the_identity():
    identities = [
        corpus(names=names).identity()["corpus"]
        for names in (["ab", "c", "d"], ["a", "bc", "d"], ["abc", "", "d"])
    ]
    assert len(set(identities)) == 3


def test_golden_identities():
    # These hashes are in saved states.
    assert corpus(num_bytes=10**6).identity() == corpus().identity()
    assert corpus().identity() == {
        "corpus": "08fd140c89ed3d2a8b97b7821e951b94",
        "num_shards": 3,
        "bad": None,
        "sizes": None,
        "sha256": None,
    }
    odd = corpus(names=["a", "\udcff.tar", "é"], bad=[(2, 1), (0, 0)])  # a name that is not UTF-8
    assert odd.identity() == {
        "corpus": "0b261310b6e7aa7d9b9da27b691a0606",
        "num_shards": 3,
        "bad": "b89d82308d53e487f1d65573e224b53c",
        "sizes": None,
        "sha256": None,
    }
    content = corpus(sizes=[1, 2, 3], checksums=["a" * 64, "b" * 64, "c" * 64]).identity()
    assert content == corpus().identity() | {
        "sizes": "e2e2033ae7e19d680599d4eb0a1359a2",
        "sha256": "547d8dae43abe53b189a3f6e80d26249",
    }


def test_the_first_shards_are_the_corpus_before_others_were_appended():
    whole = corpus(names=["a", "b", "c"], num_bytes=9, bad=[(0, 1), (2, 0)])
    first = whole.first_shards(2)
    assert (first.counts.tolist(), first.names) == ([5, 0], ["a", "b"])
    assert (first.num_bytes, first.bad.tolist()) == (None, [[0, 1]])
    sized = corpus(sizes=[7, 1, 9], num_bytes=17).first_shards(2)
    assert (list(sized.sizes), sized.num_bytes) == ([7, 1], 8)
    assert whole.first_shards(3).bad.tolist() == [[0, 1], [2, 0]]
    assert whole.first_shards(2, keep_bad=False).bad.tolist() == []
    assert corpus().first_shards(1).names is None


# -- how an order comes back from a saved state ----------------------------------------------------


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
    with pytest.raises(StateError, match=f"KeyError: '{missing}'|{missing} was None"):
        Order.from_identity(identity, COUNTS, NAMES, BAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "order version 2, this mmstream has 1"),
        (
            {"num_shards": 3.5},
            r"not an order's identity: num_shards 3\.5: needs an integer",
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
