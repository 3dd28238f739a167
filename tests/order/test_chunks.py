"""Slots of an epoch to samples, against a list that is laid out by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.order import Corpus
from mmstream.order.chunks import ChunkTable
from mmstream.order.permute import permutation


@st.composite
def corpora(draw):
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any))
    samples = [(shard, index) for shard, count in enumerate(counts) for index in range(count)]
    bad = draw(st.sets(st.sampled_from(samples), max_size=len(samples) - 1))
    return Corpus(np.array(counts), bad=np.array(sorted(bad)))


def chunks_of(corpus, chunk_size):
    """Lists of (shard, index)."""
    bad = {tuple(sample) for sample in corpus.bad.tolist()}
    chunks = []
    for shard, count in enumerate(corpus.counts.tolist()):
        good = [(shard, index) for index in range(count) if (shard, index) not in bad]
        chunks += [good[i : i + chunk_size] for i in range(0, len(good), chunk_size)]
    return chunks


def located(epoch, slots):
    shards, indexes = epoch.locate(slots)
    assert shards.dtype == indexes.dtype == np.int64
    return list(zip(shards.tolist(), indexes.tolist(), strict=True))


@settings(max_examples=100)
@given(corpora(), st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_is_its_chunks_permuted_end_to_end_and_rotated(corpus, chunk_size, seed, epoch):
    table = ChunkTable.cut(corpus, chunk_size)
    chunks = chunks_of(corpus, chunk_size)
    assert table.chunk_sizes().tolist() == [len(chunk) for chunk in chunks]
    plain = [sample for chunk in chunks for sample in chunk]
    slots = np.arange(corpus.num_samples)
    assert located(table.epoch(epoch, seed, shuffle=False), slots) == plain

    shuffled = table.epoch(epoch, seed, shuffle=True)
    order = permutation(len(chunks), seed, epoch, "chunks").tolist()
    flat = [sample for number in order for sample in chunks[number]]
    assert 0 <= shuffled.rotation < len(flat)
    assert located(shuffled, slots) == flat[shuffled.rotation :] + flat[: shuffled.rotation]


def test_epochs_are_rotated_by_any_number_of_samples():
    table = ChunkTable.cut(Corpus(np.array([3, 2])), 2)
    rotations = {table.epoch(epoch, 0, shuffle=True).rotation for epoch in range(100)}
    assert rotations == {0, 1, 2, 3, 4}
