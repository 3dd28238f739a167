"""What a pipeline makes of a corpus, as a dataset of its own: decoded once, read every epoch.

bake.py     `bake`: from a pipeline to a finished dataset; resumable, committed at the end; what it
            will take, what it did, and what made it: decoders, functions, source, libraries
samples.py  the samples of a shard, decoded in order, in batches where a function takes them, and
            written
"""
