"""Media of a text that nothing decodes: named, dropped when asked, and never trained in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import mmstream as mm
from mmstream.cli import cli
from mmstream.decoding.sample import decode_sample
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import CHATML, PARTS, QWEN_VL, assistant, byte_chat, user
from tests.helpers.corpora import jpeg
from tests.helpers.decodings import decode_texts

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"]
# Like Qwen's templates, it writes one token for a video, whether or not anyone decodes it.
WITH_VIDEO = QWEN_VL.replace(
    "{% elif 'text' in p %}", "{% elif p.type == 'video' %}<|video_pad|>{% elif 'text' in p %}"
)


def chat(*parts: dict[str, Any], template: str = WITH_VIDEO, **options: Any) -> str:
    """The text that the model sees of a question with these parts."""
    fast = byte_chat(template, SPECIAL)
    question = user([*parts, {"type": "text", "text": "what is this?"}])
    sample = {"json": {"messages": [question, assistant("a cat")]}}
    return str(fast.decode(mm.TextDecoder(fast, **options)(sample)["input_ids"]))


@pytest.mark.parametrize("template", [CHATML, PARTS, QWEN_VL, WITH_VIDEO])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "video", "field": "0.mp4"}, "a video part"),
        ({"type": "audio", "field": "0.wav"}, "an audio part"),
        ({"type": "video"}, "a video part"),
        ({"type": "image_url", "image_url": "x.jpg"}, "an image_url part"),
        ({"type": "point\x1b[2J"}, r"a point\\x1b\[2J part"),
    ],
)
def test_a_part_that_nothing_decodes_is_a_bad_sample_that_says_so(
    part: dict[str, Any], name: str, template: str
) -> None:
    reason = rf'has {name}, which nothing decodes; pass TextDecoder\(undecoded_parts="drop"\)'
    with pytest.raises(mm.errors.DecodeError, match=reason):
        chat(part, template=template)


def test_a_dropped_part_leaves_the_conversation_before_the_template_sees_it() -> None:
    video = {"type": "video", "field": "0.mp4"}
    assert chat(video, undecoded_parts="drop") == chat()
    assert "<|video_pad|>what is this?" in chat(video, undecoded_parts="keep")


@pytest.mark.parametrize(
    "text", ["<image>what?", "<video>\nwhat?", "hear <audio>", "<|video_pad|>?"]
)
@pytest.mark.parametrize("is_part", [False, True])
def test_a_placeholder_that_no_field_answers_is_a_bad_sample(text: str, is_part: bool) -> None:
    content = [{"type": "text", "text": text}] if is_part else text
    sample = {"json": {"messages": [user(content), assistant("a cat")]}}
    options = {"image_token": "<|image_pad|>"}
    fast = byte_chat(CHATML, SPECIAL)
    with pytest.raises(mm.errors.DecodeError, match="stands for media that nothing decodes"):
        mm.TextDecoder(fast, **options)(sample)
    dropping = mm.TextDecoder(fast, undecoded_parts="drop", **options)
    (dropped,) = dropping.decode_all([sample])
    assert dropped.num_dropped_parts == 1
    shown = fast.decode(dropped.tokens["input_ids"])
    assert not any(word in shown for word in ("<image>", "<video>", "<audio>", "video_pad"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "1 images in the conversation, 0 in the sample"),
        ({"jpg": b""}, r"image 1 of the messages is 0\.tiff, not jpg"),
    ],
)
def test_a_conversation_about_an_image_that_the_sample_lacks_is_a_bad_sample(
    fields: dict[str, bytes], reason: str
) -> None:
    parts = [{"type": "image", "field": "0.tiff"}, {"type": "text", "text": "what?"}]
    sample = {"json": {"messages": [user(parts), assistant("a cat")]}, "0.tiff": b""}
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.TextDecoder(byte_chat(QWEN_VL))(sample | fields)


def test_images_without_an_image_decoder_are_undecoded() -> None:
    parts = [{"type": "image", "field": "jpg"}, {"type": "text", "text": "what?"}]
    row = {"messages": [user(parts), assistant("a cat")]}
    sample = {"__key__": "7", "json": msgspec.json.encode(row), "jpg": jpeg(0)}
    fast = byte_chat(QWEN_VL)
    with pytest.raises(
        mm.errors.DecodeError, match=r"^7\.json: the conversation has an image part, which"
    ):
        decode_sample(sample, mm.Decode(text=mm.TextDecoder(fast)))
    image = mm.ImageDecoder(size=32)
    assert "input_ids" in decode_sample(sample, mm.Decode(image=image, text=mm.TextDecoder(fast)))
    dropping = mm.Decode(text=mm.TextDecoder(fast, undecoded_parts="drop"))
    decoded = decode_sample(sample, dropping)
    assert "image_pad" not in fast.decode(decoded["input_ids"])
    assert decoded["__text_loss__"].num_dropped_parts == 1
    _, text = decode_texts([sample], dropping)[0]
    assert text.num_dropped_parts == 1  # as for a whole step


@pytest.mark.parametrize(("template", "num_dropped"), [(QWEN_VL, 1), (WITH_VIDEO, 0)])
def test_a_decoded_video_that_the_template_does_not_write_is_counted(template, num_dropped) -> None:
    parts = [{"type": "video", "field": "mp4"}, {"type": "text", "text": "what?"}]
    sample = {"json": {"messages": [user(parts), assistant("a cat")]}, "mp4": b""}
    decoder = mm.TextDecoder(byte_chat(template))
    for media, number in (("video", num_dropped), ("image", None)):
        (text,) = decoder.decode_all([sample], media={media})
        assert getattr(text, "num_dropped_parts", None) == number


def test_html_about_videos_is_plain_text() -> None:
    fast = byte_chat(CHATML, SPECIAL)
    page = {"txt": b"<video src='a.mp4'></video> and <video>"}
    assert "<video>" in fast.decode(mm.TextDecoder(fast)(page)["input_ids"])
    with pytest.raises(mm.errors.DecodeError, match=r"<\|video_pad\|>, which stands for media"):
        mm.TextDecoder(fast)({"txt": b"<|video_pad|>a cat"})


def test_a_caption_of_a_video_is_bad_for_a_model_that_sees() -> None:
    fast = byte_chat("")
    caption = {"txt": b"a cat", "mp4": b""}
    with pytest.raises(mm.errors.DecodeError, match=r"the text belongs to a video \(mp4\)"):
        mm.TextDecoder(fast, image_length=4)(caption)
    model_of_text = mm.TextDecoder(fast)
    dropping = mm.TextDecoder(fast, image_length=4, undecoded_parts="drop")
    assert [len(each(caption)["input_ids"]) for each in (model_of_text, dropping)] == [7, 7]


ROWS = [
    {
        "id": "1",
        "messages": [
            {"role": "user", "content": "<image>What is this?"},
            {"role": "assistant", "content": "A picture."},
        ],
        "images": ["0.jpg"],
    },
    {
        "id": "2",
        "messages": [
            {"role": "user", "content": "<video>Why is this video funny?"},
            {"role": "assistant", "content": "Because a baby is reading."},
        ],
        "videos": ["1.mp4"],
    },
    {
        "id": "3",
        "conversations": [
            {"from": "human", "value": "<audio>What's that sound?"},
            {"from": "gpt", "value": "Glass."},
        ],
        "audios": ["2.wav"],
    },
    {
        "id": "4",
        "messages": [
            {"role": "user", "content": "<image>Who are they?<image>And they?"},
            {"role": "assistant", "content": "Players."},
        ],
        "images": ["0.jpg", "0.jpg"],
    },
]


@pytest.fixture
def converted(tmp_path: Path) -> mm.Dataset:
    """Rows as LLaMA-Factory's demo files have them: two with images, one video, one audio."""
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    (tmp_path / "1.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(100))
    (tmp_path / "2.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt " + bytes(100))
    (tmp_path / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in ROWS))
    unread = mm.MediaOptions(check="none")  # of video and audio, only the first bytes are there
    mm.convert(
        tmp_path / "rows.jsonl", tmp_path / "out", num_workers=0, media=unread, progress=False
    )
    return mm.open_dataset(tmp_path / "out")


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_from_conversion_to_loader_videos_and_audio_are_named(
    converted: mm.Dataset, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(**options: Any) -> mm.Loader:
        text = mm.TextDecoder(byte_tokenizer(chat=True), image_length=4, **options)
        return mm.Loader(
            mm.Pipeline(
                converted,
                global_batch_size=4,
                decode=mm.Decode(image=mm.ImageDecoder(size=32), text=text),
                bad_samples=mm.BadSamplePolicy(quarantine=None),
                shuffle=False,
            ),
            num_workers=num_workers,
        )

    refusing = loader()
    (batch,) = refusing
    reasons = [record.reason for record in batch["__lineage__"].bad]
    refusing.close()
    assert refusing.stats.num_bad == 2
    assert [reason.partition("; ")[0] for reason in reasons] == [
        "shard-000000.tar[1] 000000002.json: the conversation has a video part, which nothing "
        "decodes",
        "shard-000000.tar[2] 000000003.json: the conversation has an audio part, which nothing "
        "decodes",
    ]
    caplog.clear()
    dropping = loader(undecoded_parts="drop")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert all(len(list(batch["input_ids"])) == 4 for batch in dropping)
    dropping.close()
    assert (dropping.stats.num_bad, dropping.stats.num_dropped_parts) == (0, 6)
    (logged,) = [record.getMessage() for record in caplog.records]
    assert logged.startswith("shard-000000.tar[1] 000000002.json: 1 part of the conversation")


def test_a_right_conversion_of_recordings_warns_of_nothing_and_info_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF\x00\x00\x00\x00WAVEfmt ")
    row = {
        "messages": [user("<audio>what?"), assistant("a cat")],
        "audios": ["a.wav"],
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join(msgspec.json.encode({**row, "id": i}) for i in range(4)))
    with caplog.at_level(logging.WARNING):
        unread = mm.MediaOptions(check="none")  # only the first bytes are there
        mm.convert(rows, tmp_path / "whole", media=unread, progress=False)
    assert not caplog.records
    shown = CliRunner().invoke(cli, ["info", str(tmp_path / "whole")]).output
    assert "videos and recordings: 4 wav; mm.Decode(video=, audio=) decodes them" in shown
