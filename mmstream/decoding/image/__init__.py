"""Images: bytes in a shard -> uint8 pixels in the batch.

decoder.py       `ImageDecoder`: the settings, also of Hugging Face processors, their checks, and
                 one picture from start to end
geometry.py      plans sizes, crops and boxes; the shape of the result
tiles.py         plans several squares of one picture
limits.py        pixels, memory and time that the images of a sample may cost
formats.py       chooses the library by the first bytes of a file
jpeg.py          decodes JPEG with libjpeg-turbo, strict about damage
pillow.py        decodes PNG, WebP, BMP, GIF and AVIF
orientation.py   reads and applies the EXIF orientation
resize.py        makes the result of the pixels, antialiased
"""
