"""Files of media and texts: what they hold, as their headers say, and what they decode to.

Converter, datasets, notebooks and decoders open files here, within limits. What a model gets of
them is the matter of `mmstream.decoding`: sizes, crops, frames, spans, rates.

types.py          the types of files: by their names, and by their first bytes
fields.py         which fields of a sample are media, in which order; how text and JSON are read
limits.py         pixels, memory and time that the media of one sample may cost
image.py          sizes and pixels of an image, by its first bytes; JPEG, strict about damage
pillow.py         decodes PNG, WebP, BMP, GIF and AVIF
orientation.py    reads and applies the EXIF orientation
video.py          what is known of a video before it is decoded; decodes chosen frames
mp4.py            the header of an MP4 or MOV: its numbers, checked, and where each frame lies
timeline.py       when each frame of a video is shown, and which packets it is decoded from
audio.py          an audio file of any format, as samples that can be read from any position
audio_headers.py  what the libraries do not tell about a FLAC, an MP3 or an Ogg
ffmpeg.py         opens a file by FFmpeg, which reads it within limits; sees where it was cut
facts.py          duration, size and rate, noted by the converter
"""
