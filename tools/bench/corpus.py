"""The data of the benchmarks: tars of photographs and captions, and a tokenizer for the captions.

The photographs are those of the demo, scaled to 500x375. Images of 4 megapixels are mosaics of
them. So a megapixel of a large image has as much detail, and as many bytes, as a small photograph.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

SMALL, LARGE = (500, 375), (2304, 1728)
"""Widths and heights of 0.2 and 4 megapixels."""
NUM_LARGE = 24
"""Different images of 4 megapixels; a larger corpus has them again."""
QUALITY = 92


class Photograph(NamedTuple):
    """A JPEG and its captions."""

    jpeg: bytes
    captions: list[str]


def write_corpus(
    folder: Path,
    num_samples: int,
    samples_per_shard: int = 500,
    size: tuple[int, int] = SMALL,
) -> None:
    """Write tars of photographs, 48 kB or 1.2 MB each, and one caption of each; and an index."""
    from mmstream.dataset.index import encode_index
    from mmstream.tar.writer import TarWriter

    images = photographs() if size == SMALL else mosaics(size)
    numbers = iter(range(num_samples))
    for shard in range(-(-num_samples // samples_per_shard)):
        path = folder / f"shard-{shard:06d}.tar"
        with path.open("wb") as file:
            writer = TarWriter(file)
            for number in islice(numbers, samples_per_shard):
                jpeg, captions = images[number % len(images)]
                text = captions[number % len(captions)].encode()
                writer.add(f"{number:06d}", {"jpg": jpeg, "txt": text})
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))


def photographs() -> list[Photograph]:
    """Return the photographs of the demo as JPEGs of 500x375."""
    return [Photograph(_encode(image), captions) for image, captions in _demo_images()]


def mosaics(size: tuple[int, int], count: int = NUM_LARGE) -> list[Photograph]:
    """Return large images, each made of many photographs of 500x375."""
    from PIL import Image

    tiles = list(_demo_images())
    made = []
    for number in range(count):
        canvas = Image.new("RGB", size)
        places = [(x, y) for y in range(0, size[1], SMALL[1]) for x in range(0, size[0], SMALL[0])]
        for tile, place in enumerate(places):
            canvas.paste(tiles[(7 * number + tile) % len(tiles)][0], place)
        made.append(Photograph(_encode(canvas), tiles[number][1]))
    return made


def write_shaped(folder: Path, num_samples: int) -> list[float]:
    """Write a dataset of the photographs in their own shapes, and return width / height of each.

    They are enlarged to a longer side of 576.
    """
    from PIL import Image

    import mmstream as mm

    ratios = []
    photographs = folder / "photographs"
    photographs.mkdir()
    for number, row in enumerate(_rows()):
        image = Image.open(_corpus_file().parent / row["image"]).convert("RGB")
        ratios.append(image.width / image.height)
        larger = image.resize((2 * image.width, 2 * image.height), Image.Resampling.LANCZOS)
        (photographs / f"{number}.jpg").write_bytes(_encode(larger))
    rows = "".join(f'{{"image": "{n % len(ratios)}.jpg"}}\n' for n in range(num_samples))
    (folder / "rows.jsonl").write_text(rows)
    mm.convert(folder / "rows.jsonl", folder / "shards", media_root=photographs, progress=False)
    return ratios


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


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _corpus_file().read_text().splitlines()]


def _corpus_file() -> Path:
    from mmstream.train.demo import corpus_rows

    return Path(corpus_rows())


def _demo_images() -> Iterator[tuple[Any, list[str]]]:
    from PIL import Image

    for row in _rows():
        image = Image.open(_corpus_file().parent / row["image"]).convert("RGB")
        yield image.resize(SMALL, Image.Resampling.LANCZOS), row["captions"]


def _encode(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
