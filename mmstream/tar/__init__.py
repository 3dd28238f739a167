"""The tar format: headers, samples and a writer. Knows bytes only, no storage.

header.py   one header -> what a member is, and where the next one starts
samples.py  members -> samples, by the naming rules of WebDataset
writer.py   samples -> a deterministic tar
lazy_bytes.py  large files of samples, read by ranges
"""
