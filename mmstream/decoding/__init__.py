"""The third stage: order -> read -> DECODE -> batch -> loader -> device.

stage.py         a step of raw samples -> a step of decoded samples
substitute.py    one row: its planned sample, or a substitute for a bad one
sample.py        one sample: ``json`` parsed, then the decoders of a `Decode`
fields.py        which fields are images, and in which order
image/           bytes of an image -> pixels
text/            messages or a caption -> tokens and labels
sample_rng.py    the random generator of a sample, for transforms
batch_memory.py  memory of batches, used again and again
"""
