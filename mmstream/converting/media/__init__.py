"""Step 4 of a conversion: the bytes of a row's media, and what they really are.

load.py          rows with drafts -> rows with media, in order, some ahead of their turn
options.py       `MediaOptions`: what is asked of files, and how images are changed
references.py    what a path or URL means, and what may be read; data URLs, objects
archives.py      members of tars and zips
files.py         files under a local media root
download.py      http(s), many URLs at a time
                   download_options.py: `DownloadOptions`; its steps are addresses.py, dns.py,
                   hosts.py, web_client.py with robots.py and content_encoding.py,
                   outage.py
check.py         media of rows as they are stored: checks, facts, spans; idle CPUs help
images.py        images made smaller, or encoded in another format
remux.py         videos as MP4, of the same packets
"""
