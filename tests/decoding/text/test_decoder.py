"""Text to token ids: where it comes from, what is refused, and how it is cut and padded."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.decoding.threaded_calls import ThreadedCalls
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import (
    CHATML,
    LLAMA,
    MARKED,
    TWO_TURNS,
    assistant,
    tokenizer,
    user,
)
from tests.helpers.decodings import decode_texts


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


PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(chat=True)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
def test_a_sample_without_txt_names_its_fields_and_the_setting(tokenizer: Any) -> None:
    sample = {"jpg": b"", "json": {"id": 7, "caption": "a cat"}}
    with pytest.raises(mm.errors.DecodeError) as error:
        mm.TextDecoder(tokenizer)(sample)
    assert str(error.value).startswith(
        "no text: neither messages nor txt; the sample has jpg, json, and its json has id, caption"
    )
    assert 'TextDecoder(field="json.KEY")' in str(error.value)


# -- many texts in one call ------------------------------------------------------------------------

ROW_OF_CHAT = (
    b'{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}'
)
SAMPLES = [
    {"__key__": "a", "txt": b"a plain text"},
    {"__key__": "b", "json": ROW_OF_CHAT},
    {"__key__": "c", "json": ROW_OF_CHAT, "txt": b"and a caption"},
    {"__key__": "d", "txt": b"\xff no text"},
    {"__key__": "e", "json": b'{"broken'},
    {"__key__": "f", "json": b'{"messages": [{"role": "user"}]}'},
    {"__key__": "g", "json": b'{"id": 3}', "txt": "schön lang ".encode() * 20},
    {"__key__": "h"},
    {"__key__": "i", "json": b'{"messages": []}', "txt": b"x"},
]


def outcome(function):
    try:
        return function()
    except mm.errors.DecodeError as error:
        return str(error)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("field", [None, "txt"])
def test_a_step_is_tokenized_as_its_samples_are_one_by_one(chat, field):
    text = mm.TextDecoder(byte_tokenizer(chat=chat), max_length=40, field=field)
    decode = mm.Decode(text=text)
    alone = [outcome(lambda s=s: decode_sample(s, decode)) for s in SAMPLES]
    together = [
        outcome(lambda s=s, t=t: decode_sample(s, decode, tokens=t))
        for s, t in decode_texts(SAMPLES, decode)
    ]
    assert sum(isinstance(one, str) for one in alone) >= 3
    np.testing.assert_equal(together, alone)


def word_tokenizer():
    core = Tokenizer(models.WordLevel({"known": 0, "word": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    ("tokenizer", "bad"),
    [(word_tokenizer(), "other"), (byte_tokenizer(), "\ud800")],
    ids=["an unknown word", "half a character"],
)
def test_a_text_that_the_tokenizer_refuses_is_one_bad_sample(tokenizer, bad):
    text = mm.TextDecoder(tokenizer)
    good = ("known word", "word")
    first, refused, last = text.decode_all([{"txt": words} for words in (good[0], bad, good[1])])
    for words, decoded in zip(good, (first, last), strict=True):
        assert decoded.tokens["input_ids"].tolist() == tokenizer(words).input_ids
    assert isinstance(refused, mm.errors.DecodeError)
    assert "tokenizer: " in str(refused)
    with pytest.raises(mm.errors.DecodeError, match="tokenizer"):
        text({"txt": bad})


@pytest.mark.parametrize("helpers", [1, 3])
def test_of_several_errors_in_a_step_the_first_rows_is_raised(helpers):
    def fill(place):
        if place in (5, 6, 40):
            raise ValueError(place)
        return place

    def called(function):
        calls = ThreadedCalls(function, range(64))  # row 40 comes before row 5
        calls.begin(pool, helpers)
        return calls.finish()

    with ThreadPoolExecutor(helpers) as pool:
        for _ in range(50):
            with pytest.raises(ValueError, match=r"^5$"):
                called(fill)
        assert called(str) == [str(n) for n in range(64)]
