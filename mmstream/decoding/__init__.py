"""The third stage: order -> read -> DECODE -> batch -> loader -> device.

step.py          read this first: raw samples -> decoded samples, a step in three passes
rows.py          one row: its planned samples, or substitutes for bad ones; packs
sample.py        one sample on its way through the passes
decode.py        `Decode`: which decoders a pipeline runs; its table: which makes which field
field.py         what decodes one field: values, pictures, masks, tiles, videos and recordings
values.py        the built-in decoders of numbers, texts, JSON and arrays
image/           settings of images: sizes, crops, tiles
video/           settings of videos: which frames, and their sizes
audio.py         `AudioDecoder`: spans and rates of recordings; `WhisperFeatures`: log-mel features
media_shapes.py  what their shapes will be; spans of time
followers.py     `Boxes`, `Points`, `Times`: they follow a picture, a video or a recording
threaded_calls.py  one function called by several threads, which may begin early; exact torch
stored.py        decoded samples -> files of a tar, and back; what batches must know of decoders
text/            messages or a caption -> tokens and labels
sample_rng.py    the random generators of a sample, for functions of the user; one piece of a file
batch_memory.py  memory of batches, used again and again
"""
