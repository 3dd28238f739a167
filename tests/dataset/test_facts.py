"""Facts: the texts of a shard, and headers of its pictures, which tell the same sizes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

import mmstream as mm
from mmstream.dataset.facts import Fact, fact_of, facts_name, header_of, read_facts, write_facts
from mmstream.errors import ShardError
from mmstream.media.image import header_shape
from mmstream.media.limits import Limits
from tests.helpers.corpora import captioned, jpeg, write_corpus
from tests.helpers.paths import PHOTOS


def encoded(kind: str, size: tuple[int, int], **settings: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (9, 99, 200)).save(file, kind, **settings)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded("JPEG", (64, 48), exif=exif.tobytes())


PICTURES = {
    "jpg": jpeg(1, (641, 33)),
    "progressive": encoded("JPEG", (100, 300), progressive=True),
    **{f"turned {number}": turned(number) for number in (3, 6, 8)},
    **{kind: encoded(kind, (123, 45)) for kind in ("PNG", "WEBP", "BMP", "GIF")},
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_header_tells_the_same_upright_size(name: str) -> None:
    header = header_of(PICTURES[name])
    assert len(header) == 35
    limits = Limits.start()
    assert header_shape(header, limits) == header_shape(PICTURES[name], limits) is not None
    for decoder in (
        mm.ImageDecoder(resize="max_pixels", multiple_of=28),
        mm.ImageDecoder(size=336, tiles=mm.families.llava.LlavaNextTiles()),
        mm.ImageDecoder(size=32),
    ):
        assert decoder.prepared_shape(header) == decoder.prepared_shape(PICTURES[name])


def test_headers_of_photographs_tell_their_sizes() -> None:
    for path in PHOTOS:
        data = path.read_bytes()
        assert header_shape(header_of(data), Limits.start()) == header_shape(data, Limits.start())


def test_a_picture_with_an_odd_header_is_kept() -> None:
    for data in (b"", b"no picture", b"\xff\xd8\xff\xe0", PICTURES["PNG"][:20]):
        assert header_of(data) == data


def test_facts_are_texts_and_headers(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [3, 2])
    dataset = mm.open_dataset(folder)
    assert write_facts(dataset) == 2
    (_, second) = read_facts(dataset, 1)
    assert second.key == "000004"
    assert second.fields == captioned(4) | {"jpg": header_of(jpeg(4))}
    assert write_facts(dataset) == 0
    assert write_facts(dataset, overwrite=True) == 2
    assert len(mm.open_dataset(folder)) == 5


def test_equal_shards_have_equal_facts(tmp_path: Path) -> None:
    facts = []
    for name, num_workers in (("a", 1), ("b", 2)):
        folder = write_corpus(tmp_path / name, [3, 2])
        write_facts(mm.open_dataset(folder), num_workers=num_workers)
        facts.append([path.read_bytes() for path in sorted(Path(folder).glob("*.facts"))])
    assert facts[0] == facts[1]
    assert len(facts[0]) == 2


def test_a_sample_with_a_video_or_a_large_file_has_no_facts() -> None:
    assert fact_of("a", {"mp4": b"", "txt": b"a"}) is None
    assert fact_of("a", {"wav": b"", "txt": b"a"}) is None
    assert fact_of("a", {"npy": bytes(2 << 20), "txt": b"a"}) is None
    assert fact_of("a", {"npy": b"1", "__url__": "x"}) == Fact("a", {"npy": b"1"})


def test_facts_of_another_shard_are_refused(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [3, 3]))
    write_facts(dataset)
    first, second = (tmp_path / facts_name(f"shard-00000{i}.tar") for i in range(2))
    data = first.read_bytes()
    for wrong in (second.read_bytes(), data[:-9], b"", data[:40] + b"?" + data[41:]):
        first.write_bytes(wrong)
        with pytest.raises(ShardError, match=r"shard-000000\.tar\.facts: damaged, or of another"):
            read_facts(dataset, 0)
