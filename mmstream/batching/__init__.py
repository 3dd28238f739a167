"""The fourth stage: order -> read -> decode -> BATCH -> loader -> device.

collate.py  the samples of a step -> a dict of tensors and lists
split.py    a delivered batch -> micro-batches
"""
