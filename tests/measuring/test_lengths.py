"""Lengths that are counted without making samples are those of the code of training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import mmstream as mm
from mmstream.measuring.measure import Counter
from mmstream.types import SampleLineage
from tests.helpers.chats import QWEN_VL, byte_chat
from tests.helpers.corpora import jpeg

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
    {"role": "assistant", "content": "a cat 😀 "},
    {"role": "user", "content": "where?"},
    {"role": "assistant", "content": "on a mat", "weight": 0},
]
SHOWN = [
    {"role": "user", "content": "show it"},
    {"role": "assistant", "content": [{"type": "text", "text": "so: "}, {"type": "image"}]},
]
TURNS = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
PREFERENCE = {
    "messages": MESSAGES[:1],
    "chosen": [{"role": "assistant", "content": "a cat"}],
    "rejected": [{"role": "assistant", "content": "no dog"}],
}
WIDE, TALL = jpeg(1, (90, 40)), jpeg(2, (30, 70))


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


FIELDS: dict[str, dict[str, bytes]] = {
    "caption": {"jpg": WIDE, "txt": b"a caption"},
    "text alone": {"txt": "schön".encode()},
    "two pictures": {"0.jpg": WIDE, "1.jpg": TALL, "txt": b"two"},
    "pictures with names": {"input.jpg": WIDE, "target.jpg": TALL, "txt": b"two"},
    "placeholder in the text": {"jpg": WIDE, "txt": b"see <|image_pad|> here"},
    "placeholder without a picture": {"txt": b"see <|image_pad|> here"},
    "empty": {"txt": b""},
    "not UTF-8": {"jpg": WIDE, "txt": b"\xff"},
    "special token": {"txt": b"an end</s> and </s>"},
    "end": {"txt": b"it ends<eos>"},
    "other row": {"jpg": WIDE, "txt": b"a text", "json": as_json({"id": 3, "captions": ["one"]})},
    "several captions": {"jpg": WIDE, "json": as_json({"captions": ["one", "another one"]})},
    "damaged row": {"jpg": WIDE, "txt": b"a text", "json": b'{"id'},
    "conversation": {"jpg": TALL, "json": as_json({"messages": MESSAGES})},
    "picture in an answer": {"jpg": TALL, "json": as_json({"messages": SHOWN})},
    "conversation without a picture": {"json": as_json(TURNS)},
    "no answer": {"json": as_json({"messages": MESSAGES[2:3]})},
    "preference": {"jpg": TALL, "json": as_json(PREFERENCE)},
    "damaged picture": {"jpg": b"\xff\xd8 no picture", "txt": b"a text"},
    "reserved name": {"jpg": WIDE, "txt": b"a text", "labels": b"1"},
    "recording": {"txt": b"a text", "wav": b"RIFF"},
    "nothing": {"cls": b"3"},
}


def plain_end() -> Any:
    """A tokenizer that adds no token for the end of text."""
    fast = byte_chat(QWEN_VL)
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    return fast


def decode(image: dict[str, Any] | None, fast: Any = None, **text: Any) -> mm.Decode:
    decoder = mm.TextDecoder(fast or byte_chat(QWEN_VL), image_token="<|image_pad|>", **text)
    return mm.Decode(image=None if image is None else mm.ImageDecoder(**image), text=decoder)


ANY_SIZE = {"resize": "max_pixels", "multiple_of": 28}
DECODERS = {
    "captions": decode({"size": 32}),
    "texts": decode(None),
    "pictures of any size": decode(ANY_SIZE),
    "tokens by size": decode(ANY_SIZE, image_length=mm.families.qwen_vl.image_length()),
    "tokens of a number": decode({"size": 32}, image_length=5),
    "a path": decode({"size": 32}, field="json.captions.0"),
    "all texts": decode({"size": 32}, texts="all", field="json.captions", image_length=5),
    "preferences": decode(ANY_SIZE, texts="all", image_length=mm.families.qwen_vl.image_length()),
    "ends": decode({"size": 32}, plain_end(), append_eos=True),
    "no labels": decode({"size": 32}, unlabeled_texts="keep", max_bytes=9),
    "dropped": decode({"size": 32}, undecoded_parts="drop"),
    "by field": mm.Decode({"txt": mm.TextDecoder(byte_chat(QWEN_VL)), "cls": int}),
}


def samples(names: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"{number:06d}",
            "__url__": "corpus/shard-000000.tar",
            **FIELDS[name],
            "__lineage__": SampleLineage(0, number),
        }
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", DECODERS)
def test_lengths_are_those_of_the_decoders(name: str) -> None:
    counter = Counter(DECODERS[name])
    given: list[Any] = [*samples(list(FIELDS)), mm.SampleError("shard[3]: damaged")]
    refs = [(0, number) for number in range(len(given))]
    decoded = counter.decoded_lengths(given, refs, "shard-{:06d}.tar".format)
    counted = counter.lengths(given, refs, "shard-{:06d}.tar".format)
    for label, one, other in zip([*FIELDS, "unread"], decoded, counted, strict=True):
        assert (label, other.values, other.reason) == (label, one.values, one.reason)
    assert any(not each.reason for each in counted)
    assert any(each.reason for each in counted)
