"""Text for vision-language models: every token of real conversations, and images that fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.train.tokenizer import byte_tokenizer, open_tokenizer
from tests.helpers.chats import (
    CHATML,
    LLAVA,
    QWEN_VL,
    SPECIAL,
    TWO_TURNS,
    VICUNA,
    assistant,
    byte_chat,
    user,
)
from tests.helpers.corpora import jpeg
from tests.helpers.paths import DATA

CONVERSATIONS = DATA / "conversations"
LENGTH = 4
"""Tokens of an image in these tests."""

Turn = tuple[str, str]
Part = tuple[str, bool]
"""A piece of the rendered text, and whether it is learned."""


def rows_of(name: str) -> list[list[Turn]]:
    """The turns of a file's rows as (role, text), straight from its JSON."""
    roles = {"human": "user", "gpt": "assistant"}
    rows = []
    for row in json.loads((CONVERSATIONS / name).read_text("utf-8")):
        turns = row.get("conversations") or row["messages"]
        rows.append(
            [
                (
                    roles.get(turn.get("from"), turn.get("role")),
                    turn.get("value", turn.get("content")),
                )
                for turn in turns
            ]
        )
    return rows


def as_qwen(turns: list[Turn]) -> list[Part]:
    image = "<|vision_start|>" + "<|image_pad|>" * LENGTH + "<|vision_end|>"
    parts = [("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False)]
    for role, text in turns:
        text = re.sub(r"\s*<image>\s*", image, text)
        parts += [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", role == "assistant")]
        parts += [("\n", False)]
    return parts


def images_first(text: str) -> str:
    count = text.count("<image>")
    return ("<image>" * LENGTH + "\n") * count + re.sub(r"\s*<image>\s*", "", text)


def as_llava(turns: list[Turn]) -> list[Part]:
    parts: list[Part] = []
    for role, text in turns:
        parts += [(f"{role.upper()}: ", False)]
        parts += [(images_first(text) + " ", role == "assistant")]
    return parts


def as_vicuna(turns: list[Turn]) -> list[Part]:
    parts: list[Part] = []
    for role, text in turns:
        if role == "assistant":
            parts += [("ASSISTANT:", False), (f" {text}</s>", True)]
        else:
            parts += [(f"USER: {images_first(text)} ", False)]
    return parts


def tokens_of(parts: list[Part]) -> list[tuple[str, bool]]:
    """Each token, a byte or a special one, and whether it is learned."""
    special = "|".join(map(re.escape, SPECIAL))
    tokens = []
    for text, learned in parts:
        for piece in re.findall(f"{special}|.", text, re.DOTALL):
            if piece in SPECIAL:
                tokens.append((piece, learned))
            else:
                tokens += [(chr(byte), learned) for byte in piece.encode()]
    return tokens


def decoded_tokens(decoded: dict[str, Any], tokenizer: Any) -> list[tuple[str, bool]]:
    ids, labels = decoded["input_ids"], decoded["labels"]
    assert ids.dtype == labels.dtype == np.int64
    assert decoded["attention_mask"].tolist() == [1] * len(ids)
    assert np.isin(labels[labels != ids], -100).all()
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = [name if name in SPECIAL else chr(byte_of(name)) for name in names]
    return [(text, bool(label != -100)) for text, label in zip(texts, labels, strict=True)]


def byte_of(name: str) -> int:
    """The byte that a printable stand-in of GPT-2's stands for."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(name) < 256:
        return ord(name)
    return [byte for byte in range(256) if byte not in kept][ord(name) - 256]


@pytest.fixture(scope="module", params=["qwen_single_images.json", "mllm_demo.json"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(turns of each row, the samples that the converter made of them)."""
    folder = tmp_path_factory.mktemp("conversations")
    source = CONVERSATIONS / request.param
    paths = re.findall(r'"([^"\n]+\.(?:jpg|png))"', source.read_text("utf-8"))
    for number, path in enumerate(sorted(set(paths))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(jpeg(number))
    report = mm.convert(str(source), str(folder / "out"), media_root=str(folder), num_workers=1)
    turns = rows_of(request.param)
    assert report.num_samples == len(turns) > 2
    dataset = mm.open_dataset(str(folder / "out"))
    return turns, [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize(
    ("template", "rendered", "image_token"),
    [
        (QWEN_VL, as_qwen, "<|image_pad|>"),
        (LLAVA, as_llava, "<image>"),
        (VICUNA, as_vicuna, "<image>"),
    ],
    ids=["qwen", "llava", "vicuna"],
)
def test_real_conversations_are_right_token_by_token(
    converted: Any, template: str, rendered: Any, image_token: str
) -> None:
    fast = byte_chat(template)
    text = mm.TextDecoder(fast, max_length=2000, image_token=image_token, image_length=LENGTH)
    decode = mm.Decode(image=mm.ImageDecoder(size=16), text=text)
    for turns, sample in zip(*converted, strict=True):
        decoded = decode_sample(sample, decode)
        assert decoded_tokens(decoded, fast) == tokens_of(rendered(turns))
        num_images = sum(text.count("<image>") for _, text in turns)
        shown = decoded["image"] if isinstance(decoded["image"], list) else [decoded["image"]]
        assert len(shown) == num_images
        is_image = decoded["input_ids"] == fast.convert_tokens_to_ids(image_token)
        assert is_image.sum() == num_images * LENGTH
        assert (decoded["labels"][is_image] == -100).all()


def question(*fields: str, text: str = "what is this?") -> dict[str, Any]:
    """A sample that asks about its images."""
    images = [{"type": "image", "field": field} for field in fields]
    messages = [user([*images, {"type": "text", "text": text}]), assistant("a cat")]
    return {"json": {"messages": messages}, **dict.fromkeys(fields, b"")}


def decoder(template: str = VICUNA, **options: Any) -> mm.TextDecoder:
    token = "<|image_pad|>" if template == QWEN_VL else "<image>"
    settings = {"image_token": token, "image_length": LENGTH, **options}
    return mm.TextDecoder(byte_chat(template), **settings)


@pytest.mark.parametrize("template", [QWEN_VL, VICUNA, CHATML])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"2.jpg": b""}, "2 .* in the text, 3 images"),
        ({"1.jpg": None}, "2 .* in the text, 1 images"),
        ({"json": {"messages": TWO_TURNS}}, "0 .* in the text, 2 images"),
        (
            {"json": question("0.jpg", "1.jpg", text="<image><|image_pad|>")["json"]},
            "3 .* 2 images",
        ),
        ({"json": question("1.jpg", "0.jpg")["json"]}, "image 1 of the messages is 1.jpg"),
        ({"json": question("0.jpg", "0.jpg")["json"]}, "image 2 of the messages is 0.jpg"),
    ],
    ids=["more", "fewer", "none", "written by the user", "another order", "one twice"],
)
def test_images_that_do_not_match_the_text_are_a_decode_error(
    template: str, change: dict[str, Any], reason: str
) -> None:
    sample = question("0.jpg", "1.jpg") | change
    sample = {name: value for name, value in sample.items() if value is not None}
    with pytest.raises(mm.errors.DecodeError, match=reason):
        decoder(template)(sample)


def test_an_image_that_the_template_drops_is_a_decode_error() -> None:
    sample = question("0.jpg")
    shown = [{"type": "image", "field": "1.jpg"}, {"type": "text", "text": "another"}]
    sample["json"]["messages"].append(assistant(shown))
    with pytest.raises(mm.errors.DecodeError, match="1 <image> in the text, 2 images"):
        decoder(VICUNA)(sample | {"1.jpg": b""})
    learned = decoder(QWEN_VL)(sample | {"1.jpg": b""})
    ids = learned["labels"][learned["labels"] != -100]
    assert decoder(QWEN_VL).tokenizer.decode(ids) == (
        "a cat<|im_end|><|vision_start|><|vision_end|>another<|im_end|>"
    )


def test_plain_text_with_an_image_keeps_its_special_tokens() -> None:
    fast = byte_chat("")
    text = mm.TextDecoder(fast, max_length=10, image_length=LENGTH)
    tokens = text({"txt": b"<image>a caption", "jpg": b""})
    bos, eos = fast.bos_token_id, fast.eos_token_id
    image = fast.convert_tokens_to_ids("<image>")
    assert tokens["input_ids"].tolist() == [bos, *[image] * 4, *fast.encode("a ca")[1:-1], eos]
    assert tokens["labels"].tolist()[:6] == [bos, -100, -100, -100, -100, tokens["input_ids"][5]]
    with pytest.raises(mm.errors.DecodeError, match="max_length=5 ends before the media"):
        mm.TextDecoder(fast, 5, image_length=LENGTH)({"txt": b"<image>a caption", "jpg": b""})


def test_the_byte_tokenizer_can_chat_about_images(tmp_path: Path) -> None:
    fast = byte_tokenizer(chat=True)
    assert fast.convert_tokens_to_ids(["<image>", "<|im_start|>", "<|im_end|>"]) == [259, 260, 261]
    assert len(byte_tokenizer()) == 259
    assert byte_tokenizer().chat_template is None
    fast.save_pretrained(tmp_path)
    for opened in (fast, open_tokenizer(None, chat=True), open_tokenizer(str(tmp_path), chat=True)):
        chat = mm.TextDecoder(opened, image_length=2)(question("0.jpg"))
        assert opened.decode(chat["input_ids"]) == (
            "<|im_start|>user\n<image><image>what is this?<|im_end|>\n"
            "<|im_start|>assistant\na cat<|im_end|>\n"
        )
        learned = chat["labels"][chat["labels"] != -100]
        assert opened.decode(learned) == "a cat<|im_end|>"


def test_a_folder_may_keep_its_template_with_the_processor(tmp_path: Path) -> None:
    byte_chat("").save_pretrained(tmp_path)
    for path in tmp_path.glob("chat_template*"):
        path.unlink()
    with pytest.raises(mm.ConfigError, match="no chat template"):
        open_tokenizer(str(tmp_path), chat=True)
    template = {"chat_template": VICUNA}
    (tmp_path / "chat_template.json").write_bytes(msgspec.json.encode(template))
    assert open_tokenizer(str(tmp_path), chat=True).chat_template == VICUNA
