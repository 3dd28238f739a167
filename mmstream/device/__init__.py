"""The sixth stage: order -> read -> decode -> batch -> loader -> DEVICE.

to_device.py  batches on the device, one ahead of the user's code
normalize.py  uint8 images -> normalised floats, on the device
nvjpeg.py     pictures that were left to the GPU
nvdec.py      videos that were left to the GPU
render.py     their crops and sizes; bad_rows.py: rows that cannot be decoded
"""
