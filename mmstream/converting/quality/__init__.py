"""The quality of a corpus: what it holds twice, and what two corpora share.

    hashes.py           hashes of media, texts and pictures, and what the text of a sample is
    corpus.py           the hashes of all shards of several datasets, and which came before
    near.py             perceptual hashes that differ in few bits
    duplicates.py       what a dataset holds twice, what two datasets share; the bad list
    after.py            the step of a conversion that looks for duplicates

Everything here reads sidecars, or the samples of a dataset that has none.
"""
