"""`processor_collate`: what a processor of transformers makes by hand, from shards."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.errors import ConfigError
from tests.helpers.chats import QWEN_VL, assistant, learned, user
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.families import FAMILIES, PICTURES, conversation, transformers
from tests.helpers.media_families import SEEING_TEMPLATE, qwen2_audio, qwen3_vl
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.pictures import JPEG, encoded

Fields = dict[str, Any]

QUIET = mm.BadSamplePolicy(quarantine=None, max_fraction=1.0)
WHITE = Image.new("RGB", (300, 1))
"""So long that Qwen's processor refuses it."""


def raw(fields: Fields) -> dict[str, bytes]:
    """A sample as it lies in a shard."""
    row = {name: json.dumps(v).encode() for name, v in fields.items() if not isinstance(v, bytes)}
    return fields | row


def batches_of(
    folder: Path,
    samples: list[Fields],
    collate: Callable[..., Any],
    *,
    num_workers: int = 0,
    batch_size: int | None = None,
    **settings: Any,
) -> list[mm.types.Batch]:
    path = write_corpus(folder / "corpus", [len(samples)], lambda number: raw(samples[number]))
    pipeline = mm.Pipeline(
        mm.open_dataset(path),
        global_batch_size=batch_size or len(samples),
        shuffle=False,
        collate=collate,
        bad_samples=QUIET,
        **settings,
    )
    return list(mm.Loader(pipeline, num_workers=num_workers))


def qwen(**settings: Any) -> Any:
    processor = FAMILIES["qwen2-vl"](max_pixels=100_000, **settings).processor
    processor.chat_template = QWEN_VL
    return processor


def by_hand(processor: Any, samples: list[Fields], **settings: Any) -> dict[str, Any]:
    """What the page of a processor says to write for conversations with pictures."""
    conversations = []
    for sample in samples:
        messages = json.loads(json.dumps(sample["json"]["messages"]))
        pictures = iter([v for name, v in sample.items() if name.endswith("jpg")])
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.open(BytesIO(next(pictures))).convert("RGB")
        conversations.append(messages)
    return dict(
        processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, **settings},
        )
    )


def assert_equal(batch: Fields, expected: Fields) -> None:
    own = {name for name in batch if not name.startswith("__")} - {"labels"}
    assert own == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(batch[name], value, rtol=0, atol=1e-6)


CHATS = [
    conversation(*PICTURES[:3]),
    {"json": {"messages": [user("what?"), assistant("a cat")]}},
    {
        "json": {
            "messages": [
                user([{"type": "image"}, {"type": "text", "text": "where?"}]),
                assistant("on a mat"),
            ]
        },
        "jpg": PICTURES[3],
    },
]


def test_conversations_are_what_the_processor_makes_with_labels_of_answers(tmp_path: Path) -> None:
    processor = qwen()
    collate = mm.processor_collate(processor)
    (batch,) = batches_of(tmp_path, CHATS, collate)
    assert_equal(batch, by_hand(processor, CHATS))
    rows = [
        {"labels": labels, "input_ids": ids}
        for labels, ids in zip(batch["labels"], batch["input_ids"], strict=True)
    ]
    texts = [learned(processor.tokenizer, row) for row in rows]
    assert texts == ["a cat<|im_end|>a mat<|im_end|>", "a cat<|im_end|>", "on a mat<|im_end|>"]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_the_processor_refuses_is_a_bad_sample(tmp_path: Path, num_workers: int) -> None:
    photo = {"type": "image"}
    bad = {
        "a damaged picture": [user([photo]), assistant("a cat")],
        "a picture as a line": [user([photo]), assistant("a cat")],
        "no answer": [user([photo])],
        "two pictures in the text, one file": [user([photo, photo]), assistant("a cat")],
        "no messages": [],
    }
    files = [JPEG[:-40], encoded(WHITE, "jpeg"), *PICTURES[:3]]
    samples = [
        {"json": {"messages": messages}, "jpg": file}
        for messages, file in zip(bad.values(), files, strict=True)
    ]
    samples += CHATS
    collate = mm.processor_collate(qwen())
    batches = batches_of(tmp_path, samples, collate, batch_size=4, num_workers=num_workers)
    reasons = [record.reason for batch in batches for record in batch["__lineage__"].bad]
    assert len(reasons) == len(bad)
    for reason, words in zip(
        reasons, ["jpg", "aspect ratio", "no token of it is trained", "2 ", "messages"], strict=True
    ):
        assert words in reason
        assert "shard" in reason or ".tar[" in reason
    assert all(batch["__valid__"].all() and len(batch["input_ids"]) == 4 for batch in batches)
    assert batches[0]["input_ids"].shape == batches[0]["labels"].shape


def test_bad_samples_have_the_same_substitutes_on_every_number_of_ranks(tmp_path: Path) -> None:
    lines = [{"json": CHATS[2]["json"], "jpg": encoded(WHITE, "jpeg")}]
    samples = [*CHATS, *lines, *CHATS, *lines]
    path = write_corpus(tmp_path / "corpus", [8], lambda number: raw(samples[number]))
    pipeline = mm.Pipeline(
        mm.open_dataset(path),
        global_batch_size=4,
        collate=mm.processor_collate(qwen()),
        bad_samples=QUIET,
    )

    def rows(rank: int, num_ranks: int) -> list[list[Any]]:
        loader = mm.Loader(pipeline, world=mm.World(rank, num_ranks))
        return [
            list(zip(batch["__key__"], map(learned_ids, batch["labels"]), strict=True))
            for batch in loader
        ]

    def learned_ids(labels: torch.Tensor) -> list[int]:
        return [label for label in labels.tolist() if label != -100]

    whole = rows(0, 1)
    halves = [rows(rank, 2) for rank in range(2)]
    assert whole == [first + second for first, second in zip(*halves, strict=True)]


def test_a_text_beyond_max_length_loses_its_end_and_never_a_picture(tmp_path: Path) -> None:
    words = " ".join(["cat"] * 200)
    long = {"json": {"messages": [user("what?"), assistant(words)]}}
    late = {
        "json": {"messages": [user([{"type": "text", "text": words}, {"type": "image"}]),
                              assistant("a cat")]},
        "jpg": PICTURES[0],
    }  # fmt: skip
    collate = mm.processor_collate(qwen(), max_length=500)
    (batch,) = batches_of(tmp_path, [long, late], collate)
    assert batch["input_ids"].shape == (2, 500)
    assert batch["labels"][0, -2] != -100  # this tokenizer ends every text with <eos>
    (bad,) = batch["__lineage__"].bad
    assert "Mismatch in `image` token count" in bad.reason


def clip() -> Any:
    tokenizer = FAMILIES["qwen2-vl"]().processor.tokenizer
    tokenizer.chat_template = None
    return transformers.CLIPProcessor(transformers.CLIPImageProcessor(), tokenizer)


def test_two_towers_get_one_picture_and_one_text_a_row(tmp_path: Path) -> None:
    processor = clip()
    pairs = [{"jpg": jpeg(i), "txt": b"a cat" * (i + 1)} for i in range(3)]
    two = {"0.jpg": jpeg(5), "1.jpg": jpeg(6), "txt": b"two"}
    collate = pickle.loads(pickle.dumps(mm.processor_collate(processor)))
    (batch,) = batches_of(tmp_path, [*pairs, two], collate)
    (bad,) = batch["__lineage__"].bad
    assert "takes one image a row, and it has 2" in bad.reason
    assert "labels" not in batch


def test_speech_to_text_learns_the_text(tmp_path: Path) -> None:
    tokenizer = FAMILIES["qwen2-vl"]().processor.tokenizer
    processor = transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer)
    texts = ["a cat", "a dog on a mat"]
    sounds = [audio_file(seconds=s) for s in (0.5, 1.0)]
    samples = [{"wav": w, "txt": t.encode()} for w, t in zip(sounds, texts, strict=True)]
    (batch,) = batches_of(tmp_path, samples, mm.processor_collate(processor))
    assert batch["input_features"].shape == (2, 80, 3000)
    kept = [row[row != -100].tolist() for row in batch["labels"]]
    assert kept == [tokenizer(text)["input_ids"] for text in texts]


def test_a_part_of_a_processor_needs_no_text(tmp_path: Path) -> None:
    part = transformers.CLIPImageProcessor()
    samples = [{"jpg": jpeg(i), "cls": b"3"} for i in range(2)]
    collate = mm.processor_collate(part, text=False, fields=("cls",))
    decode = mm.Decode({"cls": int}, image=mm.ImageDecoder())
    (batch,) = batches_of(tmp_path, samples, collate, decode=decode)
    assert batch["cls"].tolist() == [3, 3]
    pictures = [Image.open(BytesIO(sample["jpg"])) for sample in samples]
    expected = part(pictures, return_tensors="pt")
    torch.testing.assert_close(batch["pixel_values"], expected["pixel_values"])
    with pytest.raises(ConfigError, match="no tokenizer: pass text=False"):
        mm.processor_collate(part)
    with pytest.raises(ConfigError, match=r"for text alone, mm.Decode\(text=\)"):
        mm.processor_collate(clip().tokenizer)


def test_sound_in_conversations(tmp_path: Path) -> None:
    processor = qwen2_audio().processor
    part = {"type": "audio"}
    heard = {"json": {"messages": [user([part]), assistant("a tone")]}, "wav": audio_file()}
    read = {"json": {"messages": [user("what?"), assistant("no tone")]}}
    (batch,) = batches_of(tmp_path, [heard, read], mm.processor_collate(processor))
    rows = [{"labels": v, "input_ids": v} for v in batch["labels"]]
    texts = [learned(processor.tokenizer, row) for row in rows]
    assert texts == ["a tone<|im_end|>", "no tone<|im_end|>"]
    assert len(batch["input_features"]) == 1


def test_videos_need_a_decoder_that_chooses_frames(tmp_path: Path) -> None:
    processor = qwen3_vl().processor
    processor.chat_template = SEEING_TEMPLATE
    part = {"type": "video"}
    sample = {"json": {"messages": [user([part]), assistant("a clip")]}, "mp4": video_file()}
    collate = mm.processor_collate(processor)
    with pytest.raises(ConfigError, match=r"takes videos, and nothing decodes mp4.*VideoDecoder"):
        batches_of(tmp_path / "none", [sample], collate)
    decode = mm.Decode(video=mm.VideoDecoder(num_frames=4))
    (batch,) = batches_of(tmp_path / "some", [sample], collate, decode=decode)
    assert batch["video_grid_thw"][0, 0] == 2
    assert learned(processor.tokenizer, {"labels": batch["labels"][0]}) == "a clip<|im_end|>"
    text = processor.tokenizer.decode(batch["input_ids"][0])
    # Frames 0, 4, 7 and 11 of 10 a second; the model takes two at a time.
    assert re.findall(r"<([\d.]+) seconds>", text) == ["0.2", "0.9"]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"json": {"messages": [user("?"), assistant("!")]}}, "no chat template.*pass text="),
        ({"mp3": b"", "txt": b"a text"}, "takes image, and the samples have mp3"),
    ],
)
def test_the_first_batch_says_what_to_pass(tmp_path: Path, sample: Fields, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batches_of(tmp_path, [sample], mm.processor_collate(clip()))


def test_rows_that_do_not_go_together_stop_the_run(tmp_path: Path) -> None:
    part = transformers.CLIPImageProcessor(do_resize=False, do_center_crop=False)
    samples = [{"jpg": jpeg(i, (40, 30 + i))} for i in range(2)]
    with pytest.raises(ConfigError, match=r"each row works alone.*ImageDecoder"):
        batches_of(tmp_path, samples, mm.processor_collate(part, text=False))


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (mm.Decode(image=mm.ImageDecoder(size=56, tiles=mm.families.internvl.InternVLTiles())),
         "tiles itself"),
        (mm.Decode(text=mm.TextDecoder(qwen().tokenizer)), "tokenizes the texts itself"),
        (mm.Decode({"jpg": mm.ImageDecoder()}), "as image=, not by field"),
    ],
)  # fmt: skip
def test_decoders_that_do_the_work_of_the_processor_are_refused(
    tmp_path: Path, decode: mm.Decode, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        batches_of(tmp_path, [CHATS[2]], mm.processor_collate(qwen()), decode=decode)


def test_what_makes_tokens_of_samples_is_refused(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "corpus", [3], lambda number: raw(CHATS[number]))
    collate = mm.processor_collate(qwen())
    pipeline = mm.Pipeline(mm.open_dataset(path), global_batch_size=3, collate=collate)
    with pytest.raises(ConfigError, match=r"bake: mm\.processor_collate"):
        mm.bake(pipeline, str(tmp_path / "baked"), progress=False)
    with pytest.raises(ConfigError, match="without collate="):
        mm.plan(pipeline, 64, name="p", progress=False)
    own = mm.Pipeline(
        mm.open_dataset(path),
        global_batch_size=3,
        decode=mm.Decode(image=mm.ImageDecoder()),
        collate=lambda samples: collate(samples),
    )
    with pytest.raises(ConfigError, match="pass its result itself"):
        next(iter(mm.Loader(own)))


def test_a_function_or_a_field_gives_the_text_and_weights_count(tmp_path: Path) -> None:
    samples = [{"json": {"question": f"q{i}", "answer": f"a{i}"}} for i in range(2)]

    def turns(sample: Fields) -> list[dict[str, Any]]:
        row = sample["json"]
        return [user(row["question"]), assistant("no") | {"weight": 0},
                user("and?"), assistant(row["answer"]) | {"weight": 0.5}]  # fmt: skip

    processor = qwen()
    (batch,) = batches_of(tmp_path / "f", samples, mm.processor_collate(processor, text=turns))
    rows = [{"labels": row} for row in batch["labels"]]
    assert [learned(processor.tokenizer, r) for r in rows] == ["a0<|im_end|>", "a1<|im_end|>"]
    assert set(batch["label_weights"].unique().tolist()) == {0.0, 0.5}
    collate = mm.processor_collate(processor, text="json.question")
    (batch,) = batches_of(tmp_path / "p", samples, collate)
    assert learned(processor.tokenizer, {"labels": batch["labels"][0]}) == "<bos>q0<eos>"
