"""Which tokens of a conversation a model learns from, for all kinds of chat templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmstream as mm
from tests.helpers.chats import (
    CHATML,
    LLAMA,
    MARKED,
    NEWLINES,
    ONLY_PARTS,
    PARTS,
    THINKING,
    TWO_TURNS,
    UNSTABLE,
    Messages,
    assistant,
    tokenizer,
    user,
)


def run(template: str, messages: Messages, **options: Any) -> tuple[str, list[str]]:
    """The text the model sees, and the runs of tokens it learns."""
    decoder = mm.TextDecoder(tokenizer(template), **options)
    result = decoder({"json": {"messages": messages}, "0.jpg": b""})
    ids, labels = result["input_ids"], result["labels"]
    assert result["attention_mask"].tolist() == [1] * len(ids)
    assert all(array.dtype == np.int64 for array in result.values())
    assert np.isin(labels[labels != ids], -100).all()
    learned = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(labels != -100)) + 1)
    runs = [decoder.tokenizer.decode(ids[r]) for r in learned if len(r) and labels[r[0]] != -100]
    return decoder.tokenizer.decode(ids), runs


def test_labels_are_checked_token_by_token() -> None:
    decoder = mm.TextDecoder(tokenizer(CHATML))
    result = decoder({"json": {"messages": [user("a"), assistant("b")]}})
    tokens = decoder.tokenizer.convert_ids_to_tokens(result["input_ids"])
    learned = [token for token, label in zip(tokens, result["labels"], strict=True) if label >= 0]
    assert tokens[0] == "<|im_start|>"
    assert tokens[-3:] == ["b", "<|im_end|>", "Ċ"]
    assert learned == ["b", "<|im_end|>"]
    assert result["labels"][-3] == result["input_ids"][-3]
    assert result["labels"][-1] == -100


def test_chatml_turns_are_learned_with_their_end_mark() -> None:
    text, learned = run(CHATML, [{"role": "system", "content": "be brief"}, *TWO_TURNS])
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
    assert learned == ["a cat<|im_end|>", "on a mat 😀<|im_end|>"]


def test_llama_turns_are_learned_with_their_end_mark() -> None:
    text, learned = run(LLAMA, TWO_TURNS)
    assert text == (
        "<s>[INST] what is this? [/INST] a cat </s>[INST] where? [/INST] on a mat 😀 </s>"
    )
    assert learned == [" a cat </s>", " on a mat 😀 </s>"]


def test_a_template_that_marks_the_turns_decides_itself() -> None:
    assert run(MARKED, TWO_TURNS)[1] == ["a cat<|im_end|>", "on a mat 😀<|im_end|>"]


def test_a_line_break_is_learned_where_it_is_the_end_mark() -> None:
    assert run(NEWLINES, TWO_TURNS)[1] == [" a cat\n", " on a mat 😀\n"]  # the token " a"


def test_reasoning_is_found_where_the_template_keeps_it_and_where_not() -> None:
    answers = ["<think>\nhm\n</think>\n\na cat", "on a mat"]
    messages = [user("what?"), assistant(answers[0]), user("where?"), assistant(answers[1])]
    text, learned = run(THINKING, messages)
    assert "hm" not in text
    assert learned == ["a cat<|im_end|>", "<think>\n\n</think>\n\non a mat<|im_end|>"]
    assert run(THINKING, messages[:2])[1] == [answers[0] + "<|im_end|>"]


def test_turns_are_found_in_a_template_whose_renderings_never_begin_alike() -> None:
    messages = [user("a cat"), assistant("a cat"), user("a"), assistant("a"), user("t")]
    assert run(UNSTABLE, messages)[1] == [" a cat<|im_end|>", " a<|im_end|>"]
    result = mm.TextDecoder(tokenizer(UNSTABLE))({"json": {"messages": messages}})
    first = int(np.flatnonzero(result["labels"] != -100)[0])
    before = tokenizer().decode(result["input_ids"][:first])
    assert before == "5 turns\nuser: a cat<|im_end|>\nassistant:"  # not the user's "a cat"


@pytest.mark.parametrize("content", ["", "  padded  ", "<|im_end|>", "assistant", "line\n\nline\n"])
@pytest.mark.parametrize("template", [CHATML, THINKING, UNSTABLE, PARTS])
def test_odd_answers_are_learned_whole(template: str, content: str) -> None:
    messages = [user("assistant"), assistant(content), user("what?"), assistant("a mat")]
    _, learned = run(template, messages)
    assert len(learned) == 2
    assert "".join(learned[0].split()) == "".join((content + "<|im_end|>").split())


def test_a_conversation_may_start_with_the_assistant_or_do_without() -> None:
    assert run(CHATML, [assistant("a cat"), user("a mat")])[1] == ["a cat<|im_end|>"]
    assert run(CHATML, [user("a cat")], unlabeled_texts="keep")[1] == []


IMAGE_QUESTION = [
    user([{"type": "image", "field": "0.jpg"}, {"type": "text", "text": "what is this?"}]),
    assistant([{"type": "text", "text": "a cat"}]),
]


def test_a_template_that_takes_parts_gets_them() -> None:
    text, learned = run(PARTS, IMAGE_QUESTION)
    assert "user\n<|image_pad|>what is this?<|im_end|>" in text
    assert learned == ["a cat<|im_end|>"]


def test_a_template_that_takes_only_parts_gets_strings_as_parts() -> None:
    text, learned = run(ONLY_PARTS, [*IMAGE_QUESTION, user("where?"), assistant("on a mat")])
    assert text.startswith(
        "user:<image>what is this?<|im_end|>\nassistant:a cat<|im_end|>\nuser:where?"
    )
    assert learned == ["a cat<|im_end|>", "on a mat<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, LLAMA, THINKING])
def test_a_template_for_text_gets_the_image_token(template: str) -> None:
    assert "<image>what is this?" in run(template, IMAGE_QUESTION)[0]
    assert "<|image_pad|>what" in run(template, IMAGE_QUESTION, image_token="<|image_pad|>")[0]


def test_a_turn_that_the_template_leaves_out_is_a_decode_error() -> None:
    silent = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}X"
    )
    with pytest.raises(mm.errors.DecodeError, match="turn 1 cannot be found"):
        mm.TextDecoder(tokenizer(silent))({"json": {"messages": TWO_TURNS}})
