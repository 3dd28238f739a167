"""Audio: bytes in a shard -> samples or log-mel features in the batch.

decoder.py       `AudioDecoder`: the settings, their checks, and one file from start to end
processors.py    takes settings from Hugging Face feature extractors
limits.py        seconds of audio and of time that a sample may take
source.py        chooses who reads a file, by its first bytes
headers.py       tells whether a file is whole and knows its length
wav.py           reads plain numbers of a wav where they stand
libsndfile.py    decodes flac, mp3 and Ogg Vorbis with libsndfile
container.py     decodes opus, m4a and the audio of videos with FFmpeg
resample.py      samples at another rate
features.py      `WhisperFeatures`: log-mel features, on the CPU or a GPU
"""
