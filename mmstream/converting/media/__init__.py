"""Step 4 of a conversion: the bytes of a row's media, and what they really are.

load.py          rows with drafts -> rows with media, in order, some ahead of their turn; their
                 checks, facts and spans; idle CPUs help
references.py    what a path or URL means, and what may be read; local files, objects, data URLs,
                 members of tars and zips
download.py      http(s), many URLs at a time; hosts.py says which hosts, and when
images.py        images made smaller, or encoded in another format
remux.py         videos as MP4, of the same packets
"""
