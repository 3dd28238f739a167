"""Step 3 of a conversion: the bytes of a row's media, and what they really are.

load.py    rows with drafts -> rows with media
files.py   media files on local disk, and their type by their first bytes
"""
