"""What an order knows about a dataset."""

import numpy as np
import pytest

from mmstream.errors import ConfigError
from mmstream.order import Corpus
from mmstream.order.corpus import content_of


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


def test_sizes_and_checksums_are_in_the_identity_apart_from_counts_and_names():
    plain = corpus().identity()
    sized = corpus(sizes=[7, 1, 9])
    assert sized.identity() == plain | {"sizes": sized.identity()["sizes"]}
    assert sized.identity() == corpus(sizes=np.array([7, 1, 9], dtype=np.int32)).identity()
    assert sized.identity()["sizes"] != corpus(sizes=[7, 9, 1]).identity()["sizes"]
    hashed = corpus(checksums=["aa", "bb", "cc"]).identity()
    assert hashed == plain | {"sha256": hashed["sha256"]}
    assert hashed["sha256"] != corpus(checksums=["aa", "cc", "bb"]).identity()["sha256"]


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
        content_of({key: value})


def test_counts_names_and_bad_list_are_the_identity_and_the_size_is_not():
    plain = corpus().identity()
    assert plain["num_shards"] == 3
    assert plain["bad"] is None
    assert corpus(num_bytes=10**6).identity() == plain
    for other in (corpus(counts=(5, 1, 3)), corpus(names=["a", "b", "c"])):
        assert other.identity()["corpus"] != plain["corpus"]
        assert other.identity()["bad"] is None
    listed = corpus(bad=[(0, 1)]).identity()
    assert listed["corpus"] == plain["corpus"]
    assert listed["bad"] != corpus(bad=[(0, 2)]).identity()["bad"]


def test_names_are_kept_apart_in_the_identity():
    identities = [
        corpus(names=names).identity()["corpus"]
        for names in (["ab", "c", "d"], ["a", "bc", "d"], ["abc", "", "d"])
    ]
    assert len(set(identities)) == 3


def test_golden_identities():
    # These hashes are in saved states.
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
