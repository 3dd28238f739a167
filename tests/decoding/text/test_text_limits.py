"""Limits of text and JSON: what a tokenizer, a template and a parser are asked to do."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.sample import decode_sample
from mmstream.decoding.text.chat import MAX_MESSAGES, MAX_PARTS
from mmstream.media.fields import MAX_TEXT_BYTES
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import CHATML, UNSTABLE, assistant, tokenizer, user
from tests.helpers.decodings import decode_texts
from tests.helpers.paths import ROOT


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"json": {"messages": list(messages)}}


@pytest.mark.parametrize("text", [b"a" * 101, "é" * 51, "a" * 101])
def test_a_text_with_a_byte_too_many_is_a_bad_sample(text: bytes | str) -> None:
    decoder = mm.TextDecoder(byte_tokenizer(), max_bytes=100)
    with pytest.raises(
        mm.errors.DecodeError, match=r"text of 10[12] bytes, the limit is 100; raise TextDec"
    ):
        decoder({"txt": text})
    assert len(decoder({"txt": text[:50]})["input_ids"]) in (52, 102)


def test_a_conversation_is_measured_as_the_template_writes_it() -> None:
    messages = (user("a" * 40), assistant("b" * 40))
    whole = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n") + 80
    mm.TextDecoder(tokenizer(CHATML), max_bytes=whole)(chat(*messages))
    with pytest.raises(
        mm.errors.DecodeError, match=f"text of {whole} bytes, the limit is {whole - 1}"
    ):
        mm.TextDecoder(tokenizer(CHATML), max_bytes=whole - 1)(chat(*messages))


def test_json_beyond_its_limit_is_a_bad_sample() -> None:
    row = {"id": "a" * 100}
    data = json.dumps(row).encode()
    sample = {"__key__": "7", "json": data}
    assert decode_sample(sample, mm.Decode(max_json_bytes=len(data)))["json"] == row
    less = mm.Decode(max_json_bytes=len(data) - 1)
    reason = rf"^7\.json: JSON of {len(data)} bytes, the limit is {len(data) - 1}; raise Decode\("
    large = {"__key__": "7", "json": b'"' + b"a" * MAX_TEXT_BYTES + b'"'}
    for data, decode, message in (
        (sample, less, reason),
        (large, None, r"JSON of 1,048,578 bytes"),
    ):
        with pytest.raises(mm.errors.DecodeError, match=message):
            decode_sample(data, decode)
    assert decode_texts([sample], less) == [(sample, None)]
    with pytest.raises(mm.ConfigError, match="max_json_bytes=0"):
        mm.Decode(max_json_bytes=0)


@pytest.mark.parametrize("caller_depth", [0, 300])
def test_how_deep_json_may_be_nested_does_not_depend_on_the_caller(caller_depth: int) -> None:
    def decode(depth: int, deeper: int) -> Any:
        if deeper:
            return decode(depth, deeper - 1)
        data = b'{"a":' * (depth - 1) + b"[" + b"]" + b"}" * (depth - 1)
        return decode_sample({"__key__": "7", "json": data}, None)["json"]

    assert pickle.loads(pickle.dumps(decode(200, caller_depth))) == decode(200, 0)
    for depth in (201, 600, 950, 100_000):
        with pytest.raises(
            mm.errors.DecodeError, match=r"^7\.json: JSON: nested deeper than 200 levels$"
        ):
            decode(depth, caller_depth)
    shallow = {"__key__": "7", "json": b"[" + b"[]," * 300 + b'"' + b"[" * 300 + b'"]'}
    assert len(decode_sample(shallow, None)["json"]) == 301


def test_a_template_that_prints_deep_values_refuses_them_as_a_bad_sample() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    template = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m | tojson }}")
    messages = (user("a") | {"facts": nested}, assistant("b"))
    with pytest.raises(mm.errors.DecodeError, match="chat template: maximum recursion depth"):
        mm.TextDecoder(tokenizer(template))(chat(*messages))


PART = {"type": "text", "text": ""}
TURNS = [user("a"), assistant("b")] * (MAX_MESSAGES // 2)
PARTS = [user([PART] * 39), assistant([PART])] * 200


def test_many_messages_and_parts_are_decoded() -> None:
    text = mm.TextDecoder(tokenizer(CHATML))
    assert text(chat(*TURNS))["input_ids"].size == 512
    for messages in ([user([PART] * MAX_PARTS), assistant("b")], PARTS[:100]):
        text(chat(*messages))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([*TURNS, user("a")], r"501 messages, the limit is 500; split"),
        (PARTS, "200 answers among 400 messages of 8,000 parts are too"),
        (
            [user([PART] * (MAX_PARTS - 1)), user([PART] * 2), assistant("b")],
            "more than 10,000 parts in the messages",
        ),
    ],
    ids=["messages", "answers", "parts"],
)
def test_too_many_messages_or_parts_are_a_bad_sample(
    messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.TextDecoder(tokenizer(CHATML))(chat(*messages))


def test_a_turn_of_hundreds_of_kilobytes_is_found() -> None:
    answer = "ab " * 100_000
    for template in (CHATML, UNSTABLE):
        text = mm.TextDecoder(tokenizer(template), max_length=1_000_000)
        tokens = text(chat(user("?"), assistant(answer)))
        assert np.count_nonzero(tokens["labels"] != -100) > 200_000


MEMORY = """
import os, resource, sys
os.environ["RAYON_NUM_THREADS"] = "1"
from mmstream import TextDecoder
from mmstream.train.tokenizer import byte_tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

text = TextDecoder(byte_tokenizer(chat=True), max_length=64)
before = peak()
for word in sys.argv[1:]:
    words = word * ((1 << 20) // len(word.encode()) - 100)
    rows = [{"txt": words}]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
    rows += [{"json": {"messages": turns}}]
    for outcome in text.decode_all(rows):
        assert outcome.num_tokens > 1_000_000, outcome
    print(peak() - before)
"""


@pytest.mark.slow
def test_texts_at_the_limit_take_less_memory_than_a_worker_has() -> None:
    words = ["a", "e\u0301"]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *words],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    peaks = list(map(int, result.stdout.split()))
    assert len(peaks) == len(words)
    assert max(peaks) < 450 << 20, peaks
