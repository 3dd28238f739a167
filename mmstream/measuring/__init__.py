"""Lengths of all samples of a corpus, counted by the decoders of training, and its plan of packs.

    lengths.py    samples -> tokens, labels, images, patches, seconds; what decides them
    measure.py    all shards of a corpus -> a measure, in processes, restartable
    plan.py       `mm.plan`: the pipeline of a run -> its measure -> its plan
    find_plan.py  the plan of a pipeline, found by its name and checked

No pixel is decoded: the shapes of media come from their headers.
"""
