"""Headers of many samples at once: the same samples as one by one, whatever the tar is like."""

from __future__ import annotations

import sys
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmstream as mm
from mmstream.dataset.index import build_index
from mmstream.errors import SampleError, ShardError
from mmstream.reading.fetcher import Fetcher
from mmstream.tar import scan as tarscan
from mmstream.tar.header import BLOCK
from mmstream.tar.samples import parse_sample
from tests.helpers.foreign_tars import CountingStore, make_tar, special

keys = st.sampled_from(
    ["a", "b", "0001", "é" * 3, "folder/a", "./a", "x.y/a", "__a", "_a", "long" * 30, "n" * 94]
)
suffixes = ["jpg", "txt", "json", "0.png", "CLS", ""]
odd_suffixes = ["JPG", "jpg", "image_row", "__key__", "__url__", "__lineage__", "a__", "/"]
odd_names = ["README", "__meta__", "__m__/a.txt", "x/.hidden.txt", ".b.c", "a\nb.c", "a", "b.txt"]
odd_kinds = [tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE, tarfile.SYMTYPE]


def names_of(key, plain, odd):
    """The names of a sample's members."""
    return [f"{key}.{suffix}" for suffix in plain + odd]


names = st.builds(
    names_of,
    keys,
    st.lists(st.sampled_from(suffixes), min_size=1, max_size=3, unique=True),
    st.just([]) | st.just([]) | st.lists(st.sampled_from(odd_suffixes), max_size=1),
) | st.lists(st.sampled_from(odd_names), max_size=1)
members = st.lists(names, min_size=1, max_size=8).flatmap(
    lambda name_lists: st.tuples(
        *[
            st.tuples(
                st.just(name),
                st.sampled_from([b"", b"payload", bytes(511), bytes(513), bytes(1024)]),
                st.sampled_from([tarfile.REGTYPE] * 15 + odd_kinds),
                st.sampled_from(["", "", "", "root", "ü"]),
            )
            for name in sum(name_lists, [])
        ]
    )
)
formats = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
damage = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, BLOCK - 1), st.integers(1, 255)), max_size=3
)


def make(members, format) -> bytes:
    """A tar of members of any kind."""
    tar_members = []
    for name, data, kind, owner in members:
        info = special(name, kind)
        info.uname = owner
        # A name with a slash at its end and the type of old tars is a folder too.
        has_data = kind not in (tarfile.DIRTYPE, tarfile.SYMTYPE)
        has_data &= kind != tarfile.AREGTYPE or not name.endswith("/")
        tar_members.append((info, data if has_data else b""))
    return make_tar(tar_members, format)


def alone(data: bytes, starts, stops):
    """Each sample by itself: its fields in their order, or None where it is bad."""
    samples = []
    for start, stop in zip(starts, stops, strict=True):
        try:
            samples.append(list(parse_sample(data[start:stop], "u").items()))
        except SampleError:
            samples.append(None)
    return samples


def together(data: bytes, starts, stops):
    """The same by one look at all; "odd" where that leaves it open."""
    blocks = [tarscan.blocks_of(data)]
    scan = tarscan.scan_samples(blocks, np.zeros_like(starts), starts, stops)
    samples = [[("__key__", key), ("__url__", "u")] for key in scan.keys.tolist()]
    for columns in scan.members:
        is_member = columns.field != None  # noqa: E711
        assert (columns.start >= starts)[is_member].all(), "before its sample"
        assert (columns.stop <= stops)[is_member].all(), "behind its sample, odd ones included"
        for fields, field, start, stop in zip(samples, *columns, strict=True):
            fields += [(field, data[start:stop])] if field is not None else []
    return ["odd" if odd else fields for odd, fields in zip(scan.irregular, samples, strict=True)]


def assert_same(data: bytes, starts, stops) -> int:
    """Return how many samples were found together, after a look at all of them."""
    expected = alone(data, starts, stops)
    samples = together(data, starts, stops)
    for scanned, one in zip(samples, expected, strict=True):
        if scanned == "odd":
            continue
        assert scanned == one
    return sum(scanned != "odd" for scanned in samples)


@pytest.mark.slow
@given(members, formats, damage, st.integers(0, 2))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_found_together_are_those_found_one_by_one(
    monkeypatch, members, format, damage, merged
):
    monkeypatch.setattr(tarscan, "MIN_HEADERS", 1)
    try:
        data = bytearray(make(members, format))
        offsets = build_index(CountingStore(bytes(data)), "x.tar")
    except (ValueError, UnicodeEncodeError, ShardError):  # a name that this format cannot hold,
        return  # or a sample in pieces
    for block, byte, flip in damage:
        if block * BLOCK + byte < len(data):
            data[block * BLOCK + byte] ^= flip
    starts, stops = offsets[:-1], offsets[1:]
    if merged and starts.size > merged:  # an index that is not this tar's
        starts, stops = starts[:-merged], stops[merged:]
    assert_same(bytes(data), starts, stops)


def test_plain_samples_are_found_together_and_odd_ones_among_them_seen():
    names = [f"{n:05d}.{field}" for n in range(40) for field in ("jpg", "txt", "json")[n % 2 * 2 :]]
    data = make_tar([(name, bytes(len(name) * number)) for number, name in enumerate(names)])
    offsets = build_index(CountingStore(data), "x.tar")
    assert assert_same(data, offsets[:-1], offsets[1:]) == 40
    offsets = np.arange(0, 21 * 1024, 1024)
    for field in ("image_row", "Image_Size", "image_tiles", "__key__"):
        names = [f"{number:03d}.{field if number == 5 else 'a'}" for number in range(20)]
        data = make_tar([(name, b"x") for name in names])
        assert assert_same(data, offsets[:-1], offsets[1:]) == 19
    many = tarscan.MAX_MEMBERS + 1
    data = make_tar([(f"{n:02d}.{k}", b"") for n in range(20) for k in range(many)])
    offsets = np.arange(21) * many * BLOCK
    assert assert_same(data, offsets[:-1], offsets[1:]) == 0
    # Without its last member each is found among the others.
    assert assert_same(data, offsets[:-1], offsets[1:] - BLOCK) == 20


@pytest.mark.parametrize("byte", [0, 3, 124, 130, 135, 148, 155, 156, 200, 345, 511])
def test_a_damaged_header_is_seen_among_good_ones(byte):
    data = bytearray(make_tar([(f"{n:03d}.{f}", b"x") for n in range(20) for f in ("a", "b")]))
    offsets = np.arange(0, 41 * 2048, 2048)[:21]
    assert assert_same(bytes(data), offsets[:-1], offsets[1:]) == 20
    for header in (10 * 2048, 10 * 2048 + 1024):
        damaged = bytearray(data)
        damaged[header + byte] ^= 0x55
        samples = together(bytes(damaged), offsets[:-1], offsets[1:])
        assert [number for number, fields in enumerate(samples) if fields == "odd"] == [10]


def test_a_name_ends_at_its_first_zero_byte():
    data = bytearray(make_tar([(f"{n:03d}.a", b"x") for n in range(20)]))
    offsets = np.arange(0, 21 * 1024, 1024)
    data[5 * 1024 + 50] = ord("z")  # behind the name, and the checksum that goes with it
    total = sum(data[5 * 1024 : 5 * 1024 + 148]) + sum(data[5 * 1024 + 156 : 6 * 1024 - 512]) + 256
    data[5 * 1024 + 148 : 5 * 1024 + 156] = b"%06o\0 " % total
    assert assert_same(bytes(data), offsets[:-1], offsets[1:]) == 20


def test_ranges_that_make_no_sense_are_left_to_the_careful_way():
    data = make_tar([(f"{n:03d}.a", b"x") for n in range(40)])
    starts = np.arange(0, 40 * 1024, 1024)
    stops = starts + 1024
    starts[3] += 1
    stops[5] -= 100
    stops[7] = starts[7]
    stops[9] = starts[9] - 512
    samples = together(data, starts, stops)
    assert [n for n, fields in enumerate(samples) if fields == "odd"] == [3, 5, 7, 9]


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_fetch_is_the_same_with_and_without_a_scan(tmp_path, monkeypatch, zero_copy, mixed):
    odd = [
        ("é.jpg", b"5"),
        ("é.TXT", b"6"),
        ("f.jpg", b"1"),
        ("f.JPG", b"twice"),
        ("g.__key__", b"ours"),
        ("h.__lineage__", b"ours too"),
        ("x/y.a", b"7"),
        ("README", b""),
        ("z.jpg", b"8"),
        (f"{'long' * 40}.txt", b"a pax header"),
        ("last.jpg", b"damaged"),
    ]
    plain = [(f"{n:03d}.{field}", b"%d" % n) for n in range(30) for field in ("jpg", "txt", "cls")]
    for number, members in enumerate((plain + odd, odd + plain)):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(make_tar(members))

    dataset = mm.open_dataset(tmp_path)
    data = bytearray((tmp_path / "0.tar").read_bytes())
    data[int(dataset.shards.offsets(0)[-2]) + 20] ^= 1
    (tmp_path / "0.tar").write_bytes(data)
    offsets = {dataset.name_of(shard): dataset.shards.offsets(shard) for shard in range(2)}
    dataset = mm.Dataset(dataset.manifest, dataset.store, offsets=offsets)  # as if it were new
    source = mm.Mixture({"a": (dataset, 1), "b": (dataset, 1)}, stop="first") if mixed else dataset
    num_shards = 4 if mixed else 2
    refs = [(s, n) for s in range(num_shards) for n in range(int(dataset.counts[s % 2]))]
    np.random.default_rng(0).shuffle(refs)

    def fetch(refs):
        held = Fetcher(source, zero_copy=zero_copy).fetch(refs)
        cut = len(refs) // 3
        taken = held.take_all(0, cut) + [held.take(n) for n in range(cut, len(refs))]
        return [list(s.items()) if isinstance(s, dict) else (type(s), str(s)) for s in taken]

    quick = fetch(refs)
    monkeypatch.setattr(tarscan, "MIN_HEADERS", 1 << 40)
    assert quick == fetch(refs)
    assert quick == [outcome for ref in refs for outcome in fetch([ref])]
    bad = [outcome for outcome in quick if not isinstance(outcome, list)]
    assert {kind for kind, _ in bad} == {SampleError}
    assert len(bad) == (14 if mixed else 7)  # f, g and h in both shards, and the damaged one
    kinds = {
        type(value)
        for sample in quick
        if isinstance(sample, list)
        for name, value in sample
        if name[:2] != "__"
    }
    assert kinds == {memoryview if zero_copy else bytes}


def test_bytes_that_were_taken_are_held_by_nobody_else(corpus):
    dataset = mm.open_dataset(corpus)
    refs = [(0, n) for n in range(int(dataset.counts[0]))]
    fetched = Fetcher(dataset, zero_copy=False).fetch(refs)
    assert len(fetched) == len(refs) > tarscan.MIN_HEADERS
    (sample, *_) = fetched.take_all(0, len(refs) // 2)
    assert len(fetched) == len(refs) - len(refs) // 2
    assert {sys.getrefcount(sample[name]) for name in ("jpg", "json")} == {
        2
    }  # here, and the sample
