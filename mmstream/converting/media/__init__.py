"""Step 4 of a conversion: the bytes of a row's media, and what they really are.

load.py          rows with drafts -> rows with media, in order
options.py       `MediaOptions`: what is asked of files, and how images are changed
access.py        `MediaAccess`: what may be read for rows
references.py    what a path or URL means
files.py         files under a local media root
objects.py       objects in S3 and other stores
data_urls.py     ``data:`` URLs and base64
tar_members.py   members of tars
zip_members.py   members of zips
directories.py   which members an archive has: each is read once
cut.py           some frames of a longer video
look_ahead.py    bytes that arrive before their row's turn
download.py      http(s), many URLs at a time
                   download_options.py: `DownloadOptions`; its steps are addresses.py, dns.py,
                   hosts.py, web_client.py with robots.py and content_encoding.py, retries.py,
                   outage.py
check_rows.py    media of rows as they are stored; idle CPUs help
types.py         the type of a file, by its first bytes
check.py         checks and facts
probe.py         facts about audio and video
spans.py         whether spans lie in their files
images.py        images made smaller, or encoded in another format
remux.py         videos as MP4, of the same packets
mp4.py           an MP4 of packets that are there already
"""
