"""Audio and video files of strangers, opened by FFmpeg (PyAV) with limits.

open.py            opens a file, whose bytes FFmpeg reads within limits; sees where it was cut
mp4_tables.py      the boxes and numbers of an MP4 or MOV, checked before FFmpeg believes them
deadline.py        the time that the media of one sample may take
"""
