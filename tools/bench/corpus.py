"""The data of the benchmarks: tars of photographs and captions, and a tokenizer for these.

The photographs are the embedded corpus's. Small ones are scaled to 500x375; large ones are laid
out of many small ones, so that a megapixel holds as many details, and bytes, as a small photograph
has: an enlarged picture would be smooth, and easier to decode than any photograph.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, HEIGHT = 500, 375
LARGE_SIZES = ((1632, 1224), (2000, 1500), (2304, 1728), (2832, 2128), (3264, 2448), (4000, 3000))
"""2 to 12 megapixels."""
QUALITY = 92


class Photograph(NamedTuple):
    """An encoded picture and what is said about it."""

    jpeg: bytes
    captions: list[str]


def write_corpus(folder: Path, num_samples: int, samples_per_shard: int = 500) -> None:
    """Write tars of photographs of 500x375, about 48 kB each, with captions."""
    _write_tars(folder, photographs(), num_samples, samples_per_shard)


def write_large_corpus(folder: Path, num_samples: int, samples_per_shard: int = 32) -> None:
    """Write tars of pictures of 2 to 12 megapixels, 1 to 5 MB each, with captions."""
    _write_tars(folder, large_pictures(), num_samples, samples_per_shard)


def photographs() -> list[Photograph]:
    """Return the embedded photographs as JPEG of 500x375."""
    return [Photograph(_encode(image), captions) for image, captions in _embedded()]


def large_pictures(num_of_each: int = 4) -> list[Photograph]:
    """Return pictures of each of the large sizes, laid out of the embedded photographs."""
    from PIL import Image

    tiles = [(image, captions) for image, captions in _embedded()]
    made = []
    for number in range(num_of_each * len(LARGE_SIZES)):
        size = LARGE_SIZES[number % len(LARGE_SIZES)]
        canvas = Image.new("RGB", size)
        corners = [(x, y) for y in range(0, size[1], HEIGHT) for x in range(0, size[0], WIDTH)]
        for place, corner in enumerate(corners):
            canvas.paste(tiles[(7 * number + place) % len(tiles)][0], corner)
        made.append(Photograph(_encode(canvas), tiles[number][1]))
    return made


def write_tokenizer(folder: Path, vocabulary: int = 2000) -> None:
    """Train a byte-level BPE on the embedded captions and save it, with <pad> and <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in _rows() for text in row["captions"]), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_tars(
    folder: Path, pictures: list[Photograph], num_samples: int, samples_per_shard: int
) -> None:
    from mmstream.dataset.index import encode_index
    from mmstream.tar.writer import TarWriter

    numbers = iter(range(num_samples))
    for shard in range(-(-num_samples // samples_per_shard)):
        path = folder / f"shard-{shard:06d}.tar"
        with path.open("wb") as file:
            writer = TarWriter(file)
            for number in islice(numbers, samples_per_shard):
                data, captions = pictures[number % len(pictures)]
                text = captions[number % len(captions)].encode()
                writer.add(f"{number:06d}", {"jpg": data, "txt": text})
            writer.close()
        path.with_suffix(".tar.idx").write_bytes(encode_index(writer.offsets))


def _rows() -> list[dict[str, Any]]:
    from mmstream.demo.demo import corpus_rows

    return [json.loads(line) for line in Path(corpus_rows()).read_text().splitlines()]


def _embedded() -> Iterator[tuple[Any, list[str]]]:
    from PIL import Image

    from mmstream.demo.demo import corpus_rows

    for row in _rows():
        image = Image.open(Path(corpus_rows()).parent / row["image"]).convert("RGB")
        yield image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), row["captions"]


def _encode(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
