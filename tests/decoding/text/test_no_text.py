"""A sample without a text: the error says what it has, and what to write."""

from __future__ import annotations

from typing import Any

import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(chat=True)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            {"jpg": b"", "json": {"id": 7, "caption": "a cat", "captions": ["a cat", "a pet"]}},
            "the sample has jpg, json, and its json has id, caption, captions: "
            'TextDecoder(field="json.caption")',
        ),
        ({"json": {"captions": ["a cat"]}}, 'TextDecoder(field="json.captions.0")'),
        ({"json": {"captions": [], "text": "a cat"}}, 'TextDecoder(field="json.text")'),
        ({"caption.txt": b"a cat"}, 'the sample has caption.txt: TextDecoder(field="caption.txt")'),
        (
            {"json": {"alt": "a cat"}},
            "and its json has alt: name the field that has it with TextDecoder(field=...)",
        ),
        (
            {"json": ["a cat"]},
            "the sample has json: name the field that has it with TextDecoder(field=...)",
        ),
        (
            {"jpg": b""},
            "the sample has jpg: name the field that has it with TextDecoder(field=...)",
        ),
        ({"mp4": b"", "json": {"segments": [{"text": "a"}]}}, "Pipeline(before=(mm.one_segment,))"),
    ],
)
def test_a_sample_without_txt_names_its_fields_and_the_setting(
    sample: dict[str, Any], words: str, tokenizer: Any
) -> None:
    with pytest.raises(mm.errors.DecodeError) as error:
        mm.TextDecoder(tokenizer)(sample)
    assert words in str(error.value)
    assert str(error.value).startswith("no text: neither messages nor txt; ")


def test_messages_without_a_chat_template_are_said() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    with pytest.raises(
        mm.errors.DecodeError, match="messages in json, and the tokenizer has no chat templ"
    ):
        mm.TextDecoder(PLAIN)({"jpg": b"", "json": {"messages": messages}})
