"""Argument checks and small caches."""

import numpy as np
import pytest

from mmstream.errors import ConfigError
from mmstream.order.cache import keep
from mmstream.order.checks import integer, require
from mmstream.order.permute import stream_key


def test_an_integer_comes_back_as_a_plain_int():
    for value in (7, np.int64(7), np.uint8(7)):
        assert type(integer("seed", value)) is int
    with pytest.raises(ConfigError, match=r"seed 7\.0: needs an integer"):
        integer("seed", 7.0)
    with pytest.raises(ConfigError, match="seed True: needs an integer"):
        integer("seed", True)


def test_a_condition_that_is_false_raises_its_message():
    require(True, "never")
    with pytest.raises(ConfigError, match="too small"):
        require(False, "too small")


def test_a_cache_keeps_the_newest_entries():
    cache = {}
    for number in range(5):
        keep(cache, number, str(number), most=2)
        assert len(cache) <= 2
    assert cache == {3: "3", 4: "4"}
    keep(cache, 9, "9", most=5)
    assert list(cache) == [3, 4, 9]


def test_a_key_depends_on_every_part_of_its_purpose():
    purposes = [(1, "a"), (1, "b"), (2, "a"), ("1", "a"), (1,), (1, "a", 0), ("a", 1)]
    assert len({stream_key(*purpose) for purpose in purposes}) == len(purposes)
    assert stream_key(np.int64(1), "a") == stream_key(1, "a") < 2**128
