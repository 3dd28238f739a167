"""The third stage: order -> read -> DECODE -> batch -> loader -> device.

stage.py         a step of raw samples -> a step of decoded samples, or of rows of packs
substitute.py    one row: its planned sample, or a substitute for a bad one
sample.py        one sample: ``json`` parsed, then the decoders of a `Decode`
decode.py        `Decode`: which decoders a pipeline runs
by_field.py      decoders by the names of fields, and pictures that share a geometry
values.py        the built-in decoders of numbers, texts, JSON and arrays
address.py       where in a sample a decoder failed
fields.py        which fields are images, and in which order
image/           bytes of an image -> pixels
video/           bytes of a video -> frames and their times
audio/           bytes of a recording -> samples or log-mel features
ffmpeg/          files of both, opened with limits
facts.py         duration, size and rate of both, without decoding
pictures.py      pictures of one shape: planned, then decoded, before their samples
media.py         the videos and recordings of a sample: planned, then decoded
media_shapes.py  what their shapes will be
spans.py         spans of time in settings and rows
times.py         `Times`: they follow the span of their file
threaded_calls.py  one function called by several threads, which may begin early
stored.py        decoded samples -> files of a tar, and back
text/            messages or a caption -> tokens and labels
sample_rng.py    the random generators of a sample, for functions of the user; one piece of a file
batch_memory.py  memory of batches, used again and again
"""
