"""Audio: bytes in a shard -> samples or log-mel features in the batch.

decoder.py       `AudioDecoder`: the settings, their checks, and one file from start to end,
                 at any rate of samples
limits.py        seconds of audio and of time that a sample may take
source.py        chooses who reads a file, by its first bytes; wav, flac, mp3 and Ogg Vorbis
headers.py       tells whether a file is whole and knows its length
container.py     decodes opus, m4a and the audio of videos with FFmpeg
features.py      `WhisperFeatures`: log-mel features, on the CPU or a GPU
"""
