"""The quality of a corpus: what it holds twice, and what two corpora share.

    hashes.py           hashes of media and texts, and what the text of a sample is
    perceptual_hash.py  256 bits of an image that hardly change when it is encoded again
    contents.py         the hashes of a shard's samples, from its sidecar or its tar
    corpus.py           the hashes of all shards of several datasets
    equal.py            hashes that came before
    near.py             perceptual hashes that differ in few bits
    duplicates.py       what a dataset holds twice; the bad list
    leaks.py            what two datasets share
    after.py            the step of a conversion that looks for duplicates

Everything here reads sidecars, or the samples of a dataset that has none.
"""
