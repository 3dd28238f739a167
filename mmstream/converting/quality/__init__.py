"""The quality of a corpus: what it holds twice, and what two corpora share.

    corpus.py           the hashes of all shards of several datasets, and which came before
    duplicates.py       what a dataset holds twice, what two datasets share; the bad list

Everything here reads sidecars, or the samples of a dataset that has none.
"""
