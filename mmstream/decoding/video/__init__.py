"""Videos: which frames, at which times, decoded and resized.

decoder.py          `VideoDecoder`: the settings, also of Hugging Face processors, their checks, and
                    one video from start to end
sampling.py         which frames are taken, also as families of models take them, and their size
frames.py           decodes these frames, and nothing that they do not need
"""
