"""Step 4 of a conversion: the bytes of a row's media, and what they really are.

load.py          rows with drafts -> rows with media, in order, some ahead of their turn
references.py    what a path or URL means, and what may be read; local files, objects, data URLs
archives.py      members of tars and zips
download.py      http(s), many URLs at a time; hosts.py says which hosts, and when
check.py         media of rows as they are stored: checks, facts, spans; idle CPUs help
images.py        images made smaller, or encoded in another format
remux.py         videos as MP4, of the same packets
"""
