"""Texts of a step are tokenized in one call, with the same result, sample by sample."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.decoding.threaded_calls import ThreadedCalls
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.decodings import decode_texts

CHAT = (
    b'{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}'
)
SAMPLES = [
    {"__key__": "a", "txt": b"a plain text"},
    {"__key__": "b", "json": CHAT},
    {"__key__": "c", "json": CHAT, "txt": b"and a caption"},
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
        for _ in range(200):
            with pytest.raises(ValueError, match=r"^5$"):
                called(fill)
        assert called(str) == [str(n) for n in range(64)]
