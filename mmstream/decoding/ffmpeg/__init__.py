"""Audio and video files of strangers, opened by FFmpeg (PyAV) with limits.

source.py          the bytes of a file, as FFmpeg reads them
open.py            opens a file
mp4_boxes.py       the boxes of an MP4 or MOV, read without FFmpeg
mp4_tables.py      their numbers, checked before FFmpeg believes them
display_matrix.py  how the frames of a track are turned to be shown
truncated.py       files that end before their end
deadline.py        the time that the media of one sample may take
"""
