"""The second stage: order -> READ -> decode -> batch -> loader -> device.

reader.py   reads the windows of a run ahead of their use
fetcher.py  (shard, index) pairs -> byte ranges -> samples
held.py     samples that were read together, until they are taken
"""
