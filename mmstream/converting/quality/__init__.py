"""The quality of a corpus: what it holds twice, and what two corpora share.

    hashes.py   hashes of media and texts, and what the text of a sample is

Everything here reads sidecars, or the samples of a dataset that has none.
"""
