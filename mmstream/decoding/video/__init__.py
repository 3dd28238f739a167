"""Videos: which frames, at which times, decoded and resized.

decoder.py          `VideoDecoder`: the settings, also of Hugging Face processors, their checks, and
                    one video from start to end
file.py             what is known of a file before decoding, of an MP4 or MOV from its header alone,
                    and the pictures of chosen packets
timeline.py         when each frame is shown, and which packets it is decoded from
sampling.py         which frames are taken, also as families of models take them, and their size
frames.py           decodes these frames, and nothing that they do not need
"""
