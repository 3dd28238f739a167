"""Images: a file in a shard -> uint8 pixels in the batch. `mmstream.media.image` opens the file.

decoder.py    `ImageDecoder`: the settings, also of Hugging Face processors, their checks, and one
              picture from start to end
geometry.py   plans sizes, crops and boxes; the shape of the result
tiles.py      plans several squares of one picture
resize.py     makes the result of the pixels, antialiased
"""
