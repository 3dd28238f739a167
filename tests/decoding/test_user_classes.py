"""Classes of the user draw alike on every topology, also inside decoders of ours."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.media_files import audio_file, video_file

Sample = dict[str, Any]

threads: set[threading.Thread] = set()


def draw() -> float:
    threads.add(threading.current_thread())
    return float(torch.rand(())) + random.random() + np.random.rand()


class OwnAudio(mm.AudioDecoder):
    def decode(self, *arguments: Any, **settings: Any) -> Any:
        decoded = super().decode(*arguments, **settings)
        return decoded._replace(samples=decoded.samples * 0 + np.float32(draw()))


class OwnFeatures(mm.families.whisper.WhisperFeatures):
    def __call__(self, *arguments: Any) -> Any:
        return super().__call__(*arguments) * 0 + draw()


class OwnBoxes(mm.Boxes):
    def place(self, *arguments: Any) -> Any:
        placed, visible = super().place(*arguments)
        return placed * 0 + np.float32(draw()), visible


class OwnPlaces(mm.Times):
    def place(self, *arguments: Any) -> Any:
        placed, visible = super().place(*arguments)
        return placed * 0 + draw(), visible


class OwnTiles(mm.families.llava.LlavaNextTiles):
    def views(self, *arguments: Any) -> Any:
        return super().views(*arguments)[: int(draw() * 10) % 4 + 1]


class OwnPlanned(mm.ImageDecoder):
    def decode_planned(self, *arguments: Any) -> Any:
        decoded = super().decode_planned(*arguments)
        decoded.pixels[:] = int(draw() * 80)
        return decoded


class OwnSeeds(mm.ImageDecoder):
    def decode(self, *arguments: Any, **settings: Any) -> Any:
        torch.manual_seed(0)
        return super().decode(*arguments, **settings)


class OwnPicture(mm.ImageDecoder):
    def decode(self, *arguments: Any, **settings: Any) -> Any:
        decoded = super().decode(*arguments, **settings)
        decoded.pixels[:] = int(draw() * 80)
        return decoded


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    files = {
        "jpg": jpeg(0),
        "b.jpg": jpeg(0),
        "txt": b"words",
        "json": json.dumps({"boxes": [[1, 2, 30, 20]], "times": [[0.1, 0.3]]}).encode(),
        "mp4": video_file(num_frames=4, audio_codec="aac"),
        "wav": audio_file(seconds=0.2),
    }
    return write_corpus(tmp_path_factory.mktemp("media"), [12], lambda _: files)


def drawn(decode: mm.Decode, corpus: str, field: str, num_threads: int, seed: int) -> list[Any]:
    """What was drawn for each sample of a batch. The state of the process is another one."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=12, decode=decode)
    batch = next(iter(mm.Loader(pipeline, num_threads=num_threads)))
    moved = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    assert moved == (torch.rand(()), random.random(), np.random.rand())
    return [np.asarray(value).ravel()[:1].tolist() for value in batch[field]]


JPG = mm.ImageDecoder(size=16)


@pytest.mark.parametrize(
    ("decode", "field"),
    [
        (lambda: mm.Decode(video=mm.VideoDecoder(audio=OwnAudio())), "audio"),
        (lambda: mm.Decode({"mp4": mm.VideoDecoder(audio=OwnAudio())}), "mp4_audio"),
        (
            lambda: mm.Decode(audio=mm.AudioDecoder(features=OwnFeatures(chunk_s=1))),
            "audio_features",
        ),
        (
            lambda: mm.Decode(
                {"jpg": JPG, "boxes": OwnBoxes("json.boxes")}, same_geometry=("jpg", "boxes")
            ),
            "boxes",
        ),
        (
            lambda: mm.Decode(
                {"wav": mm.AudioDecoder(), "times": OwnPlaces("json.times", follows="wav")}
            ),
            "times",
        ),
        (
            lambda: mm.Decode(
                {"b.jpg": JPG}, image=mm.ImageDecoder(size=336, tiles=OwnTiles(((672, 672),)))
            ),
            "image_tiles",
        ),
        (lambda: mm.Decode({"b.jpg": JPG}, image=OwnPlanned(size=16)), "image"),
        (lambda: mm.Decode({"jpg": OwnPlanned(size=16)}), "jpg"),
        (lambda: mm.Decode({"b.jpg": JPG}, image=OwnPicture(size=16)), "image"),
    ],
)
def test_classes_inside_decoders_draw_in_one_thread_as_the_sample_says(
    corpus: str, decode: Callable[[], mm.Decode], field: str
) -> None:
    threads.clear()
    rows = drawn(decode(), corpus, field, num_threads=1, seed=0)
    assert drawn(decode(), corpus, field, num_threads=4, seed=1) == rows
    assert len({str(row) for row in rows}) > 1
    assert threads == {threading.current_thread()}


def test_a_class_also_decodes_the_pictures_of_a_sample_with_several(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [12], lambda _: {"0.jpg": jpeg(0), "1.jpg": jpeg(0)})
    decode = mm.Decode(image=OwnPlanned(size=16))
    rows = drawn(decode, corpus, "image", num_threads=1, seed=0)
    assert drawn(decode, corpus, "image", num_threads=4, seed=1) == rows
    assert len(rows) == 24
    assert len({str(row) for row in rows}) > 12  # of 80 values


def test_a_built_in_decoder_runs_none_of_the_users_code() -> None:
    video = mm.VideoDecoder(audio=mm.AudioDecoder())
    boxes = mm.Boxes("json.boxes")
    decode = mm.Decode({"jpg": JPG, "b": boxes}, same_geometry=("jpg", "b"), video=video)
    assert not decode.has_user_functions


class Drawing(mm.VideoDecoder):
    def plan(self, data: Any, *arguments: Any, **settings: Any) -> Any:
        plans.setdefault(bytes(data), set()).add(draw())
        return super().plan(data, *arguments, **settings)


plans: dict[bytes, set[float]] = {}


def test_a_substitute_draws_as_it_does_in_its_own_row(tmp_path: Path) -> None:
    files = [b"no video", *(video_file(num_frames=4, first_number=n) for n in range(3))]
    corpus = write_corpus(tmp_path, [4], lambda number: {"mp4": files[number]})
    policy = mm.BadSamplePolicy(max_fraction=1.0, quarantine=None)
    decode = mm.Decode(video=Drawing())
    plans.clear()
    drawn_files = set()
    for seed in range(2):
        pipeline = mm.Pipeline(
            mm.open_dataset(corpus), global_batch_size=4, decode=decode, bad_samples=policy
        )
        torch.manual_seed(seed)
        drawn_files |= set(next(iter(mm.Loader(pipeline)))["__key__"])
    assert len(drawn_files) == 3
    assert [len(plans[data]) for data in files[1:]] == [1, 1, 1]


class OwnShape(mm.ImageDecoder):
    def prepared_shape(self, data: Any) -> Any:
        shapes.append(draw())
        return super().prepared_shape(data)


shapes: list[float] = []


def test_what_reads_headers_draws_as_the_sample_says(corpus: str) -> None:
    text = mm.TextDecoder(
        byte_tokenizer(chat=True), image_length=lambda _: 2, undecoded_parts="drop"
    )
    decode = mm.Decode({"b.jpg": JPG}, image=OwnShape(), text=text)
    shapes.clear()
    for seed in range(2):
        drawn(decode, corpus, "input_ids", num_threads=1, seed=seed)
    assert shapes[:12] == shapes[12:]
    assert len(set(shapes)) == 12


def test_what_one_decoder_seeds_does_not_change_another(corpus: str) -> None:
    alone = mm.Decode({"jpg": OwnPicture(size=8), "b.jpg": OwnPicture(size=8)})
    seeding = mm.Decode({"jpg": OwnSeeds(size=8), "b.jpg": OwnPicture(size=8)})
    rows = drawn(alone, corpus, "b.jpg", num_threads=1, seed=0)
    assert len({str(row) for row in rows}) > 1
    assert drawn(seeding, corpus, "b.jpg", num_threads=1, seed=0) == rows


def test_media_of_two_fields_draw_on_their_own(corpus: str) -> None:
    alone = mm.Decode({"wav": OwnAudio()})
    both = mm.Decode({"wav": OwnAudio()}, video=mm.VideoDecoder(audio=OwnAudio()))
    rows = drawn(alone, corpus, "wav", num_threads=1, seed=0)
    assert drawn(both, corpus, "wav", num_threads=1, seed=0) == rows


def test_a_function_with_the_name_of_one_of_ours_is_the_users(corpus: str) -> None:
    @functools.wraps(mm.collate)
    def collate(samples: list[Sample]) -> Sample:
        return mm.collate(samples) | {"drawn": [draw() for _ in samples]}

    pipeline = mm.Pipeline(mm.open_dataset(corpus), global_batch_size=12, collate=collate)
    rows = []
    for seed in range(2):
        torch.manual_seed(seed)
        rows.append(next(iter(mm.Loader(pipeline)))["drawn"])
    assert rows[0] == rows[1]
