"""Images: a file in a shard -> uint8 pixels in the batch. `mmstream.media.image` opens the file.

decoder.py    `ImageDecoder`: the settings, also of Hugging Face processors, their checks, and one
              picture from start to end
geometry.py   plans sizes, crops, boxes and tiles; the shape of the result
resize.py     makes the result of the pixels, antialiased
"""
