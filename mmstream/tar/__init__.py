"""The tar format: headers, samples and a writer. Ground floor: it knows bytes, no storage.

header.py    one header -> what a member is, and where the next one starts
samples.py   members -> samples by WebDataset's naming rules
scan.py      the headers of hundreds of plain samples together, as arrays
writer.py    samples -> a deterministic tar
"""
