"""What media files hold, as their headers say. Converter, datasets and decoders read it here.

types.py           the types of files: by their names, and by their first bytes
mp4.py             the header of an MP4 or MOV: its numbers, checked, and where each frame lies
timeline.py        when each frame of a video is shown, and which packets it is decoded from
video.py           what is known of a video before it is decoded
audio_headers.py   what the libraries do not tell about a FLAC, an MP3 or an Ogg
audio.py           an audio file of any format, as samples that can be read from any position
ffmpeg.py          opens a file by FFmpeg, which reads it within limits; sees where it was cut
deadline.py        the time that the media of one sample may take
facts.py           duration, size and rate, noted by the converter
"""
