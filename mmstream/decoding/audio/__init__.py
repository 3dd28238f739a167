"""Audio: bytes in a shard -> samples or log-mel features in the batch.

decoder.py       `AudioDecoder`: the settings, their checks, and one file from start to end,
                 at any rate of samples; seconds of audio and of time that a sample may take
features.py      `WhisperFeatures`: log-mel features, on the CPU or a GPU
"""
