"""Images: bytes in a shard -> uint8 pixels in the batch.

decoder.py       `ImageDecoder`: the settings, and one picture from start to end
checks.py        its early errors
formats.py       the first bytes -> which library decodes
jpeg.py          libjpeg-turbo, strict about damage;  reduced.py: the compiled decoder
pillow.py        PNG, WebP, BMP, GIF, AVIF
orientation.py   EXIF rotation
geometry.py      sizes, crops and boxes;  tiles.py: several squares of one picture
plan.py          what becomes of one image, before it is decoded
image_shape.py   the shape of the result, told from the header
resize.py        pixels -> the result, antialiased
processors.py    settings of Hugging Face image processors
encoded.py       pictures that stay files until a GPU decodes them;  gpu_eligible.py: which
"""
