"""The second stage: order -> READ -> decode -> batch -> loader -> device.

step.py     what is asked for (`Job`), and the record of a step from here to the logs
reader.py   reads the windows of a run ahead of their use
fetcher.py  (shard, index) pairs -> byte ranges -> samples
held.py     samples that were read together, until they are taken
lookup.py   single samples, for second reads and substitutes
"""
