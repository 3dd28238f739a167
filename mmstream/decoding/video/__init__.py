"""Videos: which frames, at which times, and their size. `mmstream.media.video` decodes them.

decoder.py    `VideoDecoder`: the settings, also of Hugging Face processors, their checks, and one
              video from start to end
sampling.py   which frames are taken, also as families of models take them, and their size
"""
