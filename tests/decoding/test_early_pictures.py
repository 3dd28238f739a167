"""Pictures are planned, decoded and put into their samples in three passes over a step."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding import stage, substitute
from mmstream.decoding.image import limits
from mmstream.decoding.image.decoder import Decoded
from mmstream.decoding.image.jpeg import jpeg_header
from mmstream.decoding.pictures import early_decoders, plan_pictures
from mmstream.errors import TimeoutError
from mmstream.pipeline import PipelineRunner
from mmstream.progress import Progress, Stage
from mmstream.train.tokenizer import byte_tokenizer
from tests.decoding.test_views import PICTURES, contents, fields_of, jobs
from tests.helpers.corpora import captioned, jpeg, write_corpus

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


def batches(
    pipeline: mm.Pipeline, num_threads: int = 1, progress: Progress | None = None
) -> list[dict[str, Any]]:
    with closing(PipelineRunner(pipeline, num_threads=num_threads, progress=progress)) as runner:
        return [runner.batch(job) for job in jobs(pipeline)]


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
    monkeypatch.setattr(stage, "early_decoders", lambda _decode: {})
    expected = contents(batches(pipeline))
    assert any(batch["__lineage__"].bad for batch in expected)
    assert early == (expected, expected)


class Diary:
    """What a runner does with pictures, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[str] = []
        for owner, name, entry in (
            (stage, "plan_pictures", "plan"),
            (stage, "decode_picture", "decode"),
            (substitute, "decode_sample", "finish"),
        ):
            self._spy(monkeypatch, owner, name, entry)

    def _spy(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, entry: str) -> None:
        real = getattr(owner, name)

        def spy(*arguments: Any) -> Any:
            self.entries.append(entry)
            return real(*arguments)

        monkeypatch.setattr(owner, name, spy)


def test_a_step_is_planned_then_decoded_then_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(monkeypatch)
    corpus = write_corpus(tmp_path, [8])
    pipeline = mm.Pipeline(
        mm.open_dataset(corpus), global_batch_size=4, decode=mm.Decode(image=IMAGE, text=TEXT)
    )
    batches(pipeline)
    assert diary.entries == [*["plan"] * 4, *["decode"] * 4, *["finish"] * 4] * 2


def test_a_sample_that_is_bad_before_its_picture_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_even(data: bytes) -> int:
        if int(data) % 2:
            raise mm.SkipSample("odd")
        return int(data)

    diary = Diary(monkeypatch)
    corpus = write_corpus(
        tmp_path, [8], lambda number: captioned(number) | {"json": str(number).encode()}
    )
    decode = mm.Decode({"json": only_even}, image=IMAGE)
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=8, decode=decode)
    (batch,) = batches(pipeline)
    assert all(number % 2 == 0 for number in batch["json"])
    assert diary.entries.count("decode") == 4  # substitutes are decoded with their samples


class OwnDecoder(mm.ImageDecoder):
    """A decoder of the user."""

    def decode(self, *arguments: Any, **settings: Any) -> Decoded:
        return super().decode(*arguments, **settings)


@pytest.mark.parametrize(
    ("decode", "fields"),
    [
        (mm.Decode(image=IMAGE), {"image"}),
        (mm.Decode({"jpg": IMAGE, "cls": int}), {"jpg"}),
        (
            mm.Decode({"a.png": IMAGE, "mask.png": MASK}, same_geometry=("a.png", "mask.png")),
            {"a.png"},
        ),
        (mm.Decode(image=mm.ImageDecoder(resize="native")), set()),
        (mm.Decode(image=mm.ImageDecoder(size=336, tiles=mm.LlavaNextTiles())), set()),
        (mm.Decode(image=mm.ImageDecoder(size=8, device="cuda")), set()),
        (mm.Decode(image=OwnDecoder(size=8)), set()),
        (mm.Decode(text=TEXT), set()),
        (mm.Decode.baked(), set()),
        (None, set()),
    ],
)
def test_pictures_of_one_shape_are_early(decode: mm.Decode | None, fields: set[str]) -> None:
    assert {*early_decoders(decode)} == fields


def test_the_time_of_a_picture_starts_when_its_decoding_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8, timeout_s=30))
    sample = {"__key__": "k", "jpg": jpeg(0)}
    now = 0.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    picture = plan_pictures(sample, decode, early_decoders(decode))["image"]
    now = 1000.0
    out = np.empty((8, 8, 3), np.uint8)
    assert isinstance(stage.decode_picture(picture, out), Decoded)
    clock = iter((0.0, 31.0))
    monkeypatch.setattr(limits.time, "monotonic", lambda: next(clock))
    result = stage.decode_picture(picture, out)
    assert isinstance(result, TimeoutError)
    assert str(result) == "k.jpg: decoding takes longer than timeout_s=30"


def test_each_picture_is_noted_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    noted = []
    real = stage.decode_picture

    def spy(*arguments: Any) -> Any:
        noted.append(progress.last())
        return real(*arguments)

    monkeypatch.setattr(stage, "decode_picture", spy)
    corpus = write_corpus(tmp_path, [4])
    pipeline = mm.Pipeline(
        mm.open_dataset(corpus), global_batch_size=4, shuffle=False, decode=mm.Decode(image=IMAGE)
    )
    batches(pipeline, progress=progress)
    assert [(note.stage, note.index, note.key) for note in noted] == [
        (Stage.DECODE, number, f"{number:06d}") for number in range(4)
    ]


def test_a_planned_picture_is_that_of_a_call() -> None:
    data = jpeg(0, (64, 48))
    plan = mm.ImageDecoder(size=16).plan_picture(data)
    assert plan is not None
    assert plan.jpeg is not None
    assert (plan.picture, plan.factor, plan.jpeg.stored) == ((48, 64), 2, jpeg_header(data).stored)
    assert mm.ImageDecoder(size=16).plan_picture(PICTURES["a PNG"](0)) is None
    out = np.empty((16, 16, 3), np.uint8)
    decoded = mm.ImageDecoder(size=16).decode_planned(data, plan, out)
    assert decoded.pixels is out
    assert np.array_equal(out, mm.ImageDecoder(size=16)(data))
