"""The published figures: ``python -m tools.bench TABLE`` prints a table of docs/benchmarks.md.

decoded.py       decoded samples a second beside other loaders; `loaders.py` has each of them
equal_steps.py   steps and samples of every rank on a grid of topologies, beside other loaders
mixing.py        how far from a true permutation an order is, and what its windows cost
storage.py       raw samples from S3 behind slow and faulty links
compare.py       speed and memory of two checkouts; `compare_rows.py` has each row
corpus.py        the data: photographs, captions and a tokenizer
"""
