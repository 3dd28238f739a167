"""Lengths of all samples of a corpus, counted by the decoders of training, and its plan of packs.

    lengths.py    samples -> tokens, labels, images, patches, seconds; what decides them
    find_plan.py  the plan of a pipeline, found by its name and checked
    plan.py       `mm.plan`: a pipeline -> the lengths of its shards, restartable -> its plan

No pixel is decoded: the shapes of media come from their headers.
"""
