"""The data of the benchmarks: tars of photographs and captions, and a tokenizer for the captions.

The photographs come from the corpus of the demo. Small images are scaled to 500x375. Large images
are mosaics of many small ones. So a megapixel of a large image has as much detail, and as many
bytes, as a small photograph. An enlarged photograph would be smooth and easier to decode.

Photographs of mixed sizes come from folders of JPEGs that the caller names. Each sample is another
part of one of them, scaled down, with another quality.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 500, 375
LARGE_SIZES = ((1632, 1224), (2000, 1500), (2304, 1728), (2832, 2128), (3264, 2448), (4000, 3000))
"""2 to 12 megapixels."""
QUALITY = 92
MIXED_PIXELS = 50_000, 2_000_000
"""Fewest and most pixels of photographs of mixed sizes; their logarithm is uniform between."""
MIXED_QUALITIES = (75, 80, 85, 90, 95)
NUM_MIXED = 2000
"""Different photographs of mixed sizes; a larger corpus has them again."""


class Photograph(NamedTuple):
    """A JPEG and its captions."""

    jpeg: bytes
    captions: list[str]


def write_corpus(folder: Path, num_samples: int, samples_per_shard: int = 500) -> None:
    """Write tars of photographs of 500x375, about 48 kB each, and their captions."""
    _write_tars(folder, photographs(), num_samples, samples_per_shard)


def write_large_corpus(folder: Path, num_samples: int, samples_per_shard: int = 32) -> None:
    """Write tars of images of 2 to 12 megapixels, 1 to 5 MB each, and their captions."""
    _write_tars(folder, large_images(), num_samples, samples_per_shard)


def write_mixed_corpus(
    folder: Path, num_samples: int, sources: Sequence[Path], samples_per_shard: int = 500
) -> None:
    """Write tars of real photographs of 0.05 to 2 megapixels, 0.1 MB each, and captions."""
    images = mixed_photographs(sources, min(num_samples, NUM_MIXED))
    _write_tars(folder, images, num_samples, samples_per_shard)


def photographs() -> list[Photograph]:
    """Return the photographs of the demo as JPEGs of 500x375."""
    return [Photograph(_encode(image), captions) for image, captions in _demo_images()]


def large_images() -> list[Photograph]:
    """Return four mosaics of the demo's photographs in each of the large sizes."""
    from PIL import Image

    tiles = list(_demo_images())
    mosaics = []
    for number in range(4 * len(LARGE_SIZES)):
        width, height = LARGE_SIZES[number % len(LARGE_SIZES)]
        canvas = Image.new("RGB", (width, height))
        corners = [(x, y) for y in range(0, height, HEIGHT) for x in range(0, width, WIDTH)]
        for tile, corner in enumerate(corners):
            canvas.paste(tiles[(7 * number + tile) % len(tiles)][0], corner)
        mosaics.append(Photograph(_encode(canvas), tiles[number][1]))
    return mosaics


def mixed_photographs(sources: Sequence[Path], count: int) -> list[Photograph]:
    """Return parts of the JPEGs in some folders, each of another size and quality.

    A part of n pixels comes from a photograph of n pixels or more, so nothing is enlarged.

    Raises:
        ValueError: The folders have no JPEG of `MIXED_PIXELS`[0] pixels.
    """
    from PIL import Image

    sizes: dict[Path, int] = {}
    for path in sorted(path for folder in sources for path in folder.rglob("*.jp*g")):
        with Image.open(path) as image:
            if image.mode == "RGB" and image.width * image.height >= MIXED_PIXELS[0]:
                sizes[path] = image.width * image.height
    if not sizes:
        raise ValueError(f"{', '.join(map(str, sources))}: no JPEG of {MIXED_PIXELS[0]:,} pixels")
    captions = [row["captions"] for row in _rows()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jpegs = pool.map(partial(_part_of_photograph, sizes), range(count))
        return [
            Photograph(jpeg, captions[number % len(captions)]) for number, jpeg in enumerate(jpegs)
        ]


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of 2,000 tokens on the demo's captions, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in _rows() for text in row["captions"]), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_tars(
    folder: Path, images: list[Photograph], num_samples: int, samples_per_shard: int
) -> None:
    from mmstream.dataset.index import encode_index
    from mmstream.tar.writer import TarWriter

    numbers = iter(range(num_samples))
    for shard in range(-(-num_samples // samples_per_shard)):
        path = folder / f"shard-{shard:06d}.tar"
        with path.open("wb") as file:
            writer = TarWriter(file)
            for number in islice(numbers, samples_per_shard):
                data, captions = images[number % len(images)]
                text = captions[number % len(captions)].encode()
                writer.add(f"{number:06d}", {"jpg": data, "txt": text})
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))


def _rows() -> list[dict[str, Any]]:
    from mmstream.demo.demo import corpus_rows

    return [json.loads(line) for line in Path(corpus_rows()).read_text().splitlines()]


def _demo_images() -> Iterator[tuple[Any, list[str]]]:
    from PIL import Image

    from mmstream.demo.demo import corpus_rows

    for row in _rows():
        image = Image.open(Path(corpus_rows()).parent / row["image"]).convert("RGB")
        yield image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), row["captions"]


def _part_of_photograph(sizes: dict[Path, int], number: int) -> bytes:
    """Return the JPEG of a part of a photograph; the number draws all of it."""
    from PIL import Image

    rng = random.Random(number)
    fewest, most = MIXED_PIXELS[0], min(MIXED_PIXELS[1], max(sizes.values()))
    num_pixels = math.exp(rng.uniform(math.log(fewest), math.log(most)))
    path = rng.choice([path for path, size in sizes.items() if size >= num_pixels])
    side = math.sqrt(num_pixels / sizes[path])
    share = max(rng.uniform(0.6, 1.0), side)
    with Image.open(path) as image:
        width, height = int(share * image.width), int(share * image.height)
        left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
        shape = int(side * image.width), int(side * image.height)
        box = left, top, left + width, top + height
        scaled = image.resize(shape, Image.Resampling.LANCZOS, box)
    return _encode(scaled, rng.choice(MIXED_QUALITIES))


def _encode(image: Any, quality: int = QUALITY) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
