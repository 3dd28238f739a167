"""Lengths of all samples of a corpus, counted by the decoders of training.

    lengths.py    samples -> tokens, labels, pictures, patches, seconds
    settings.py   what decides the lengths, in words
    probes.py     samples that prove that a pipeline still counts alike
    measure.py    all shards of a corpus -> a measure, in processes, restartable
    pieces.py     what each shard gave, as files until all shards are measured
    automatic.py  the plan of a pipeline: one that fits, or a new one; automatic_mixture.py: those
                  of a mixture

No pixel is decoded: the shapes of media come from their headers.
"""
