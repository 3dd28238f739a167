"""Text to token ids: where it comes from, what is refused, and how it is cut and padded."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import mmstream as mm
from tests.helpers.chats import (
    CHATML,
    LLAMA,
    MARKED,
    TWO_TURNS,
    assistant,
    byte_level_bpe,
    tokenizer,
    user,
)


def test_plain_text_learns_everything_and_keeps_its_special_tokens() -> None:
    core = byte_level_bpe()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core)
    result = mm.TextDecoder(fast, max_length=6)({"txt": b"a cat on a mat, a cat on a mat"})
    assert len(result["input_ids"]) == 6
    assert result["input_ids"][[0, -1]].tolist() == [4, 5]
    np.testing.assert_array_equal(result["labels"], result["input_ids"])


def test_ids_are_those_of_the_tokenizer_itself() -> None:
    fast = tokenizer(CHATML)
    words = "a cat über 猫"
    by_decoder = [
        mm.TextDecoder(fast)(x) for x in ({"txt": words}, {"json": {"messages": TWO_TURNS}})
    ]
    expected = fast.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]
    assert [each["input_ids"].tolist() for each in by_decoder] == [fast(words).input_ids, expected]


@pytest.mark.parametrize(
    ("template", "field", "chosen"),
    [
        (CHATML, None, "messages"),
        (CHATML, "json", "messages"),
        (CHATML, "txt", "a caption"),
        (CHATML, "alt.txt", "another"),
        (None, None, "a caption"),
    ],
)
def test_messages_come_first_then_txt_and_a_field_overrides(
    template: str | None, field: str | None, chosen: str
) -> None:
    sample = {"json": {"messages": TWO_TURNS}, "txt": b"a caption", "alt.txt": b"another"}
    fast = tokenizer(template)
    expected = chosen
    if chosen == "messages":
        expected = fast.apply_chat_template(TWO_TURNS, tokenize=False)
    assert fast.decode(mm.TextDecoder(fast, field=field)(sample)["input_ids"]) == expected


def test_a_row_without_messages_has_a_caption() -> None:
    captions = {"json": {"id": 1, "messages": []}, "txt": b"a caption"}
    fast = tokenizer(CHATML)
    assert fast.decode(mm.TextDecoder(fast)(captions)["input_ids"]) == "a caption"


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({}, "no text"),
        ({"json": {"id": 3}}, "no text"),
        ({"json": [1, 2]}, "no text"),
        ({"txt": b""}, "empty text"),
        ({"txt": b"caf\xe9"}, "not UTF-8"),
        ({"txt": 3}, "expected text, not int"),
        ({"json": {"messages": "hello"}}, "not a list"),
        ({"json": {"messages": ["hello"]}}, r"messages\[0\]: no role"),
        ({"json": {"messages": [{"content": "x"}]}}, r"messages\[0\]: no role"),
        ({"json": {"messages": [user(None)]}}, r"messages\[0\]: content"),
        ({"json": {"messages": [user("x"), assistant(4)]}}, r"messages\[1\]: content"),
        ({"json": {"messages": [user([{"type": "text"}])]}}, r"messages\[0\]: content"),
        ({"json": {"messages": [user(["x"])]}}, r"messages\[0\]: content"),
        ({"json": {"messages": [{"role": "tool", "content": "x"}]}}, "only user and assistant"),
    ],
)
def test_unusable_text_is_a_decode_error(sample: dict[str, Any], reason: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.TextDecoder(tokenizer(LLAMA))(sample)


@pytest.mark.parametrize(
    ("tokens", "pad_token_id"),
    [({"pad_token": "</s>"}, 5), ({"eos_token": "<|im_end|>"}, 2), ({"eos_token": None}, 0)],
)
def test_the_pad_token_falls_back_to_the_end_token_then_to_zero(
    tokens: dict[str, Any], pad_token_id: int
) -> None:
    assert mm.TextDecoder(tokenizer(**tokens)).pad_token_id == pad_token_id


@pytest.mark.parametrize(
    "options", [{"max_length": 0}, {"padding": "left"}, {"field": "json"}, {"max_length": "9"}]
)
def test_impossible_arguments_are_config_errors(options: dict[str, Any]) -> None:
    with pytest.raises(mm.ConfigError):
        mm.TextDecoder(tokenizer(), **options)


@pytest.mark.parametrize("name", ["image_token", "video_token", "audio_token"])
@pytest.mark.parametrize("token", [["<image>"], None, 5])
def test_a_token_that_is_no_text_is_named(name: str, token: object) -> None:
    with pytest.raises(mm.ConfigError) as error:
        mm.TextDecoder(tokenizer(), **{name: token})
    assert str(error.value) == f"{name}={token!r}: give text"


def test_a_slow_tokenizer_is_a_config_error_that_says_why() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(mm.ConfigError, match="SlowTokenizer is not a fast tokenizer"):
        mm.TextDecoder(SlowTokenizer())


def test_what_others_set_on_the_shared_tokenizer_changes_nothing() -> None:
    fast = tokenizer(CHATML, pad_token="</s>")
    decoder = mm.TextDecoder(fast)
    before = decoder({"txt": "a cat on a mat"})["input_ids"]
    fast(["a cat on a mat", "a"], truncation=True, max_length=3, padding="max_length")
    np.testing.assert_array_equal(decoder({"txt": "a cat on a mat"})["input_ids"], before)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_threads_share_a_decoder_and_do_not_mix_turns(template: str) -> None:
    decoder = pickle.loads(pickle.dumps(mm.TextDecoder(tokenizer(template), 60, field="json")))
    samples = [{"json": {"messages": TWO_TURNS[: 2 + 2 * (i % 2)]}} for i in range(400)]
    alone = [decoder(sample)["labels"].tolist() for sample in samples[:2]]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(decoder, samples))
    assert [result["labels"].tolist() for result in together] == alone * 200
