"""The sixth stage: order -> read -> decode -> batch -> loader -> DEVICE.

to_device.py  batches on the device, one ahead of the user's code
normalize.py  uint8 images -> normalised floats, on the device
"""
