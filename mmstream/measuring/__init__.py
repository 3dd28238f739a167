"""What a corpus holds, measured before a run.

plan.py        `mm.plan`: the lengths of all samples, and the packs that they form; restartable
statistics.py  `mm.statistics`: sizes, words, tokens and classes of some samples
"""
