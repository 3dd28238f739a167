"""Chat templates of real models: a tokenizer for each, conversations, and what is trained of them.

A template comes from a package that is installed (trl) or from a wheel (axolotl). The tokenizer is
one of bytes with the special tokens that the template writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from mmstream import TextDecoder
from mmstream.decoding.text.message_starts import GENERATION
from mmstream.errors import DecodeError
from mmstream.train.tokenizer import byte_tokenizer

_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,60}[|｜]>|<\|[^\s<>|]{1,40}>|<[^\s<>|]{1,40}\|>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|SPECIAL_\d+|image|video|sop)>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|gMASK|IMG)\]"
    r"|</?(?:think|tool_call|tool_response)>"
)

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, *calls: dict[str, Any], **keys: Any) -> dict[str, Any]:
    called = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": content, **called, **keys}


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, Any]:
    name = f"call0000{number}"
    return {"role": "tool", "content": content, "tool_call_id": name, "name": "weather"}


SYSTEM = {"role": "system", "content": "Be brief."}
ONE, TWO = [user("One?"), answer("First.")], [user("Two?"), answer("Second.")]
WARM = [user("How warm?"), answer("", call(1, "Oslo")), result(1, "3 C"), answer("Three degrees.")]
CONVERSATIONS: dict[str, Messages] = {
    "two answers": [*ONE, *TWO],
    "user last": [*ONE, user("Two?")],
    "system": [SYSTEM, *ONE, *TWO],
    "system later": [*ONE, SYSTEM, *TWO],
    "empty": [user("One?"), answer(""), *TWO],
    "same texts": [user("ho"), answer("ho"), user("ho"), answer("ho"), user("ho")],
    "spaces": [user(" One? \n"), answer("\n First. \n"), *TWO],
    "answer first": [answer("Hello."), *TWO],
    "in a row": [*ONE, answer("More."), *TWO],
    "call": WARM,
    "call with text": [WARM[0], answer("Let me look.", call(1, "Oslo")), *WARM[2:], *TWO],
    "two calls": [
        *(user("Where?"), answer("", call(1, "Oslo"), call(2, "Rome"))),
        *(result(1, "3 C"), result(2, "20 C"), answer("In Rome.")),
    ],
    "thoughts": [
        *(user("One?"), answer("First.", reasoning_content="Hm one.")),
        *(user("Two?"), answer("Second.", reasoning_content="Hm two.")),
    ],
    "thoughts in texts": [
        *(user("One?"), answer("<think>\nHm one.\n</think>\n\nFirst.")),
        *(user("Two?"), answer("<think>\nHm two.\n</think>\n\nSecond.")),
    ],
    "thoughts and a call": [
        *(WARM[0], answer("", call(1, "Oslo"), reasoning_content="Look.")),
        *(WARM[2], answer("Three.", reasoning_content="Got it."), *TWO),
    ],
}


@lru_cache(maxsize=128)
def decoder(template: str, action: Any = "bad") -> TextDecoder:
    """A decoder with a tokenizer of bytes, and the special tokens that a template writes."""
    fast = byte_tokenizer()
    special = sorted(set(_SPECIAL.findall(template)) - {"</s>"})
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.bos_token, fast.eos_token, fast.chat_template = "<s>", "</s>", template
    return TextDecoder(fast, max_length=1_000_000, undecoded_parts=action)


def trained(template: str, messages: Messages) -> list[str]:
    """The texts of a conversation that are trained. Raises DecodeError."""
    decode = decoder(template)
    tokens = decode({"json": {"messages": messages}})
    ids, is_trained = tokens["input_ids"], tokens["labels"] != -100
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(is_trained)) + 1)
    return [decode.tokenizer.decode(ids[run]) for run in runs if is_trained[run[0]]]


def differences(template: str) -> Iterator[str]:
    """Where the labels differ from transformers' own mask, for a template that marks answers."""
    if not GENERATION.search(template):
        return
    decode = decoder(template, "drop")
    for name, messages in CONVERSATIONS.items():
        try:
            tokens = decode({"json": {"messages": messages}})
        except DecodeError:
            continue
        theirs = _masked(decode.tokenizer, messages)
        mask = (tokens["labels"] != -100).astype(int).tolist()
        if (tokens["input_ids"].tolist(), mask) != (theirs["input_ids"], theirs["assistant_masks"]):
            yield name


def _masked(fast: Any, messages: Messages) -> Any:
    """What transformers makes of a conversation. Some templates take only lists as content."""
    template = re.sub(r"strftime_now\((.*?)\)", '"2026-01-01"', fast.chat_template)
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template}
    if "['content'][0]" in template:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return fast.apply_chat_template(messages, **options)
