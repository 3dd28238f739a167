"""Pictures are planned, decoded and put into their samples in three passes over a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.decoding.field import PictureField
from mmstream.decoding.sample import SampleDecoding
from mmstream.progress import Progress, Stage
from mmstream.train.tokenizer import byte_tokenizer
from tests.decoding.test_views import PICTURES, batches, contents, fields_of
from tests.helpers.corpora import jpeg, write_corpus

NUM_SAMPLES = 32

IMAGE = mm.ImageDecoder(size=8)
RANDOM = mm.ImageDecoder(size=8, crop="random", flip=0.5)
MASK = mm.ImageDecoder(mask=True, size=8)
TEXT = mm.TextDecoder(byte_tokenizer(), max_length=16)

DECODES = {
    "by kind": mm.Decode(
        {"cls": int, "mask.png": MASK, "a.png;b.png": ...},
        image=RANDOM,
        text=TEXT,
        same_geometry=("image", "mask.png"),
    ),
    "by field": mm.Decode({"jpg": RANDOM, "a.png": IMAGE, "cls": int}),
    "one geometry": mm.Decode(
        {"a.png": RANDOM, "mask.png": MASK}, same_geometry=("a.png", "mask.png")
    ),
    "letterbox": mm.Decode(
        {"mask.png": MASK, "a.png;b.png": ...},
        image=mm.ImageDecoder(size=(6, 8), resize="letterbox", interpolation="bicubic"),
    ),
}


def mixed(number: int) -> dict[str, bytes]:
    """Samples of all kinds of pictures; some have two or none."""
    kind = random.Random(number).choice(sorted(PICTURES))
    fields = fields_of(number, kind)
    if number % 11 == 0:
        del fields["jpg"]
    if number % 13 == 0:
        fields["1.jpg"] = jpeg(number + 1)
    if number % 17 == 0:
        fields["json"] = b"{damaged"
    return fields


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    folder = tmp_path_factory.mktemp("corpus")
    return mm.open_dataset(write_corpus(folder, [NUM_SAMPLES // 2] * 2, mixed, checksums=True))


@pytest.mark.parametrize("name", DECODES)
def test_early_pictures_are_those_of_a_decoding_with_their_samples(
    name: str, all_kinds: mm.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = mm.Pipeline(all_kinds, global_batch_size=16, decode=DECODES[name])
    early = contents(batches(pipeline)), contents(batches(pipeline, num_threads=3))
    monkeypatch.setattr(PictureField, "is_early", False)
    expected = contents(batches(pipeline))
    assert any(batch["__lineage__"].bad for batch in expected)
    assert early == (expected, expected)


def test_each_picture_is_noted_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    noted = []
    real = SampleDecoding.decode_picture

    def spy(*arguments: Any) -> None:
        noted.append(progress.last())
        real(*arguments)

    monkeypatch.setattr(SampleDecoding, "decode_picture", spy)
    corpus = write_corpus(tmp_path, [4])
    pipeline = mm.Pipeline(
        mm.open_dataset(corpus), global_batch_size=4, shuffle=False, decode=mm.Decode(image=IMAGE)
    )
    batches(pipeline, progress=progress)
    assert [(note.stage, note.index, note.key) for note in noted] == [
        (Stage.DECODE, number, f"{number:06d}") for number in range(4)
    ]
