"""Decoders get views of what was read: the same batches as of bytes, and no view after its step."""

from __future__ import annotations

import gc
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.field import PictureField
from mmstream.decoding.sample import SampleDecoding
from mmstream.pipeline import PipelineRunner
from mmstream.progress import Progress, Stage
from mmstream.reading.server import SampleMemory
from mmstream.reading.step import BatchLineage, Job
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.pictures import encoded
from tests.helpers.reader_thread import reader_thread

NUM_SAMPLES = 40

TEXT = mm.TextDecoder(byte_tokenizer(), max_length=16)

DECODE = mm.Decode(
    {"mask.png": mm.ImageDecoder(mask=True, size=8), "a.png;b.png": ..., "cls": int},
    image=mm.ImageDecoder(size=8),
    text=TEXT,
)


def picture(number: int, format: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    """A picture whose colours depend on the number."""
    shape = (9, 11, 3) if mode == "RGB" else (9, 11)
    pixels = np.random.default_rng(number).integers(0, 5, shape, dtype=np.uint8)
    return encoded(Image.fromarray(pixels, mode), format, **options)


def turned(number: int) -> bytes:
    """A JPEG that is to be shown upside down."""
    exif = Image.Exif()
    exif[0x0112] = 3
    return picture(number, "JPEG", exif=exif.tobytes())


PICTURES = {
    "plain": jpeg,
    "large": lambda number: jpeg(number, (700, 500)),
    "turned": turned,
    "progressive": lambda number: picture(number, "JPEG", progressive=True),
    "with junk": lambda number: b"\xff\xd8\x00\x00\x00" + jpeg(number)[2:],
    "a PNG": picture,
    "cut": lambda number: jpeg(number)[:-90],
    "no picture": lambda number: b"\xff\xd8" * number,
    "empty": lambda _number: b"",
}
"""What stands in a field of pictures; the last three are bad."""


def fields_of(number: int, kind: str) -> dict[str, bytes]:
    """A sample, with the files in one of two orders."""
    fields = {
        "jpg": PICTURES[kind](number),
        "mask.png": picture(number, mode="L"),
        "a.png": picture(number + 1),
        "b.png": picture(number + 2),
        "txt": f"caption {number}".encode(),
        "cls": str(number).encode(),
        "other": b"no decoder " * (1 + number % 300),
    }
    return dict(reversed(fields.items())) if number % 3 == 0 else fields


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    """A function of the user: it is why all fields are bytes."""
    return sample


def batches(
    pipeline: mm.Pipeline, num_threads: int = 1, progress: Progress | None = None
) -> list[dict[str, Any]]:
    with closing(PipelineRunner(pipeline, num_threads=num_threads, progress=progress)) as runner:
        return [runner.batch(job) for job in jobs(pipeline)]


def jobs(pipeline: mm.Pipeline) -> list[Job]:
    return [
        Job(0, step, 0, pipeline.global_batch_size, iteration=1)
        for step in range(pipeline.order.steps_per_epoch)
    ]


def served_batches(pipeline: mm.Pipeline) -> list[dict[str, Any]]:
    """The batches of steps that a reader process hands over; each step is wiped after its use."""
    batches = []
    with reader_thread(pipeline) as reader:
        (connection,) = reader.connections
        reader.begin(0, 0, (0, pipeline.global_batch_size))
        with closing(PipelineRunner(pipeline, connection=connection)) as runner:
            for job in jobs(pipeline):
                batches.append(runner.batch(job))
        gc.collect()  # errors of bad samples hold on to the frames that have raised them
        assert connection._memory is not None
        memory, connection._memory = connection._memory.obj, None
        memory.close()  # a BufferError says that there is a view of it
    return batches


class WipedMemory(SampleMemory):
    """Overwrites pieces as they come back."""

    def _put_back(self, start: int, stop: int) -> None:
        self._bytes[start:stop] = 0xEE
        super()._put_back(start, stop)


@pytest.fixture(autouse=True)
def _wiped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmstream.reading.server.SampleMemory", WipedMemory)


def content(value: Any) -> Any:
    """What can be compared. Views are not bytes here."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.stride(), value.tolist()
    if isinstance(value, list):
        return [content(each) for each in value]
    if isinstance(value, BatchLineage):
        return replace(value, num_bytes=0, num_requests=0, transfers=None)
    return type(value), value


def contents(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: content(batch[name]) for name in batch} for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "batch_size", "checksums"),
    [(0, 5, True), (1, 20, False)],
    ids=["headers one by one", "headers together"],
)
def test_batches_of_views_are_those_of_bytes(
    seed: int, batch_size: int, checksums: bool, tmp_path: Path
) -> None:
    kinds = random.Random(seed).choices(sorted(PICTURES), k=NUM_SAMPLES)
    folder = write_corpus(
        tmp_path,
        [NUM_SAMPLES // 2] * 2,
        lambda number: fields_of(number, kinds[number]),
        checksums=checksums,
    )
    views = mm.Pipeline(mm.open_dataset(folder), global_batch_size=batch_size, decode=DECODE)
    expected = contents(batches(replace(views, before=(unchanged,))))
    raw = {kind for batch in expected for name in ("other", "b.png") for kind, _ in batch[name]}
    assert raw == {bytes}
    for found in (batches(views), batches(views, num_threads=3), served_batches(views)):
        assert contents(found) == expected


def test_baked_batches_of_views_are_those_of_bytes(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "source",
        [24, 16],
        lambda number: fields_of(number, "plain" if number else "cut"),
    )
    source = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=20, decode=DECODE)
    mm.bake(source, tmp_path / "baked", progress=False)
    baked = mm.Pipeline(
        mm.open_dataset(tmp_path / "baked"), global_batch_size=20, decode=mm.Decode.baked()
    )
    assert baked.decode is not None
    assert baked.decode.takes_view("image.hwc.npy")
    assert not baked.decode.takes_view("other")
    expected = contents(batches(replace(baked, before=(unchanged,))))
    assert contents(batches(baked)) == expected
    assert contents(served_batches(baked)) == expected


IMAGE = mm.ImageDecoder(size=8)

PICTURE_NAMES = ("jpg", "1.jpg", "png", "mask.png", "b.png")


class OwnDecoder(mm.ImageDecoder):
    """A decoder of the user, who may do anything with the bytes."""

    def decode(self, data: bytes, *arguments: Any, **settings: Any) -> Any:
        assert isinstance(data, bytes)
        return super().decode(data, *arguments, **settings)


@pytest.mark.parametrize(
    ("decode", "viewed"),
    [
        (DECODE, {*PICTURE_NAMES}),
        (mm.Decode(image=OwnDecoder(size=8)), set()),
        (mm.Decode({"png": OwnDecoder(size=8)}, image=IMAGE), {*PICTURE_NAMES} - {"png"}),
        (mm.Decode({"jpg": len}, image=IMAGE), {*PICTURE_NAMES} - {"jpg"}),
        (mm.Decode(image=IMAGE, text=replace(TEXT, field=str)), set()),
        (mm.Decode(text=TEXT), set()),
    ],
)
def test_only_the_decoders_of_pictures_get_views(decode: mm.Decode, viewed: set[str]) -> None:
    names = [*PICTURE_NAMES, "txt", "json", "cls", "mp4", "other"]
    assert {name for name in names if decode.takes_view(name)} == viewed


def own_collate(samples: list[Any]) -> Any:
    return mm.collate(samples)


@pytest.mark.parametrize(
    ("memory", "settings", "kind"),
    [
        (BatchMemory(shared=True), {}, memoryview),
        (BatchMemory(), {}, bytes),
        (BatchMemory(shared=True), {"collate": own_collate}, bytes),
    ],
    ids=["sent", "kept", "of the user"],
)
def test_raw_files_are_views_only_where_the_batch_is_sent_at_once(
    memory: BatchMemory, settings: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    files = [bytes([number]) * 3000 for number in range(20)]
    corpus = write_corpus(
        tmp_path, [20], lambda number: {"bin": files[number], "json": b'{"a": %d}' % number}
    )
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=20, **settings)
    with closing(PipelineRunner(pipeline, memory=memory)) as runner:
        batch = runner.batch(Job(0, 0, 0, 20))
    assert {type(value) for value in batch["bin"]} == {kind}
    numbers = [row["a"] for row in batch["json"]]
    assert batch["bin"] == [files[number] for number in numbers]
    assert sorted(numbers) == list(range(20))


# -- pictures that are decoded before the rest of their samples ------------------------------------

NUM_MIXED = 32

RANDOM = mm.ImageDecoder(size=8, crop="random", flip=0.5)
MASK = mm.ImageDecoder(mask=True, size=8)

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
    return mm.open_dataset(write_corpus(folder, [NUM_MIXED // 2] * 2, mixed, checksums=True))


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
