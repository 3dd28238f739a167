"""What a conversation says about its training: answers that are not trained, and tools."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import (
    CHATML,
    MARKED,
    QWEN_VL,
    assistant,
    byte_chat,
    tokenizer,
    trained,
    user,
)

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
WITH_TOOLS = "{% if tools %}TOOLS {{ tools|tojson }}\n{% endif %}" + CHATML


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss": 0.0}])
def test_an_answer_that_its_row_excludes_has_no_label(template: str, mark: dict[str, Any]) -> None:
    bad, good = assistant("bad"), assistant("good")
    whole = trained(template, user("hi"), bad, user("again"), {**good, "weight": 1})
    assert "bad" in whole
    assert "good" in whole
    text = trained(template, user("hi"), {**bad, **mark}, user("again"), good)
    assert "good" in text
    assert "bad" not in text


def test_a_conversation_whose_answers_are_all_excluded_is_a_bad_sample() -> None:
    with pytest.raises(mm.errors.DecodeError, match="no answer of an assistant that is trained"):
        trained(CHATML, user("hi"), {**assistant("bad"), "weight": 0})


@pytest.mark.parametrize(
    "mark", [{"weight": -0.5}, {"weight": "no"}, {"weight": [1]}, {"weight": float("nan")}]
)
def test_a_weight_that_is_no_number_from_zero_up_is_a_bad_sample(mark: dict[str, Any]) -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=r"messages\[1\]: weight is .*; give a number from 0 to"
    ):
        trained(CHATML, user("hi"), {**assistant("so so"), **mark})


def test_train_is_all_or_nothing() -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=r"messages\[1\]: train is 0.5; give 0 or false"
    ):
        trained(CHATML, user("hi"), {**assistant("so so"), "train": 0.5})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_tokens_of_an_answer_have_the_weight_of_its_message(template: str) -> None:
    messages = [
        *(user("hi"), {**assistant("bad"), "weight": 0.25}),
        *(user("again"), {**assistant("none"), "weight": 0}),
        *(user("once more"), assistant("good")),
    ]
    fast = byte_chat(template)
    tokens = mm.TextDecoder(fast)({"json": {"messages": messages}})
    weights, labels = tokens["label_weights"], tokens["labels"]
    assert weights.dtype == np.float32
    assert "bad" in fast.decode(labels[weights == 0.25])
    assert "good" in fast.decode(labels[weights == 1])
    assert ((weights == 0) == (labels == -100)).all()
    assert "none" not in fast.decode(labels[labels != -100])
    alike = mm.TextDecoder(fast)({"json": {"messages": [user("hi"), assistant("good")]}})
    assert "label_weights" not in alike


def test_an_answer_with_two_marks_has_one_weight() -> None:
    twice = MARKED.replace(
        "{{ m['content'] }}<|im_end|>{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}!{% generation %}<|im_end|>{% endgeneration %}",
    )
    row = user("hi"), {**assistant("bad"), "weight": 0}, user("again"), assistant("good")
    assert trained(twice, *row) == "good<|im_end|>"


def test_answers_that_a_template_marks_in_another_number_cannot_be_excluded() -> None:
    captured = "{% set all %}" + MARKED.replace("messages %", "messages[2:] %")
    row = user("hi"), {**assistant("bad"), "weight": 0}, user("again"), assistant("good")
    with pytest.raises(mm.errors.DecodeError, match="marks 1 answers of 2, and the messages say"):
        trained(captured + "{% endset %}{{ all }}", *row)


@pytest.mark.parametrize("template", [WITH_TOOLS, WITH_TOOLS.replace(CHATML, MARKED)])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_the_template_gets_the_tools_of_a_row(template: str, tools: Any) -> None:
    fast = byte_chat(template)
    sample = {"json": {"messages": [user("hi"), assistant("good")], "tools": tools}}
    tokens = mm.TextDecoder(fast)(sample)
    assert "TOOLS" in fast.decode(tokens["input_ids"])
    assert '"name": "weather"' in fast.decode(tokens["input_ids"])
    assert "TOOLS" not in trained(template, user("hi"), assistant("good"), tools=tools)


@pytest.mark.parametrize("tools", [[], "", " ", "[]", None])
def test_a_row_without_tools_needs_no_template_for_them(tools: Any) -> None:
    assert "good" in trained(CHATML, user("hi"), assistant("good"), tools=tools)


@pytest.mark.parametrize("tools", ["a hammer", {"name": "f"}, ["f"], 7])
def test_tools_that_are_no_list_of_functions_are_a_bad_sample(tools: Any) -> None:
    with pytest.raises(mm.errors.DecodeError, match="tools: "):
        trained(WITH_TOOLS, user("hi"), assistant("good"), tools=tools)


def test_tools_that_the_template_does_not_write_are_refused_or_counted() -> None:
    with pytest.raises(
        mm.errors.DecodeError, match="has tools, which the chat template does not write"
    ):
        trained(CHATML, user("hi"), assistant("good"), tools=TOOLS)
    sample = {"json": {"messages": [user("hi"), assistant("good")], "tools": TOOLS}}
    for action in ("drop", "keep"):
        decoder = mm.TextDecoder(byte_chat(CHATML), undecoded_parts=action)
        decoded = decoder.decode_all([sample])[0]
        assert not isinstance(decoded, Exception)
        assert decoded.num_dropped_parts == 1


@pytest.mark.parametrize(
    ("template", "num_dropped"),
    [
        (CHATML, 3),
        (QWEN_VL, 3),
        (
            QWEN_VL.replace(
                "{% elif 'text' in p %}", "{% elif p.type == 'video' %}V{% elif 'text' in p %}"
            ),
            1,
        ),
    ],
)
def test_kept_parts_that_the_template_does_not_write_are_counted(
    template: str, num_dropped: int
) -> None:
    parts = [{"type": "video"}, {"type": "audio"}, {"type": "video"}]
    messages = [user([*parts, {"type": "text", "text": "what?"}]), assistant("a cat")]
    decoder = mm.TextDecoder(byte_chat(template), undecoded_parts="keep")
    decoded = decoder.decode_all([{"json": {"messages": messages}}])[0]
    assert not isinstance(decoded, Exception)
    assert decoded.num_dropped_parts == num_dropped


# -- texts no token of which is trained ------------------------------------------------------------

BYTES = byte_tokenizer(chat=True)


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"json": {"messages": list(messages)}}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_prompt_longer_than_max_length_is_a_bad_sample(template: str) -> None:
    sample = chat(user("a cat on a mat " * 20), assistant("yes"))
    whole = mm.TextDecoder(tokenizer(template))(sample)
    first = int(np.flatnonzero(whole["labels"] != -100)[0])
    reason = (
        f"no token of it is trained: the first answer begins at token {first}, "
        f"max_length is {first}"
    )
    with pytest.raises(mm.errors.DecodeError, match=reason):
        mm.TextDecoder(tokenizer(template), max_length=first)(sample)
    one_label = mm.TextDecoder(tokenizer(template), max_length=first + 1)(sample)
    assert np.count_nonzero(one_label["labels"] != -100) == 1
    kept = mm.TextDecoder(tokenizer(template), max_length=first, unlabeled_texts="keep")(sample)
    assert (kept["labels"] == -100).all()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((user("what is this?"),), "the conversation has no answer of an assistant"),
        (({"role": "system", "content": "be brief"},), "no answer of an assistant"),
    ],
)
def test_a_conversation_without_an_answer_is_a_bad_sample(
    messages: tuple[dict[str, Any], ...], reason: str
) -> None:
    with pytest.raises(mm.errors.DecodeError, match=f"no token of it is trained: .*{reason}"):
        mm.TextDecoder(tokenizer(CHATML))(chat(*messages))


def test_an_empty_answer_that_the_template_marks_is_a_bad_sample() -> None:
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}")
    with pytest.raises(mm.errors.DecodeError, match="the assistant's answers are empty"):
        mm.TextDecoder(tokenizer(template))(chat(user("what?"), assistant("")))


def test_the_first_token_of_a_conversation_is_no_label() -> None:
    only = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    fast = byte_chat(only)
    with pytest.raises(mm.errors.DecodeError, match="no token of it is trained"):
        mm.TextDecoder(fast)(chat(assistant("a")))
    assert mm.TextDecoder(fast)(chat(assistant("ab")))["labels"].size == 2


def test_an_empty_caption_is_a_bad_sample_though_special_tokens_are_added_to_it() -> None:
    for sample in ({"txt": b""}, {"txt": ""}):
        with pytest.raises(mm.errors.DecodeError, match="no token of it is trained: empty text"):
            mm.TextDecoder(BYTES)(sample)
    kept = mm.TextDecoder(BYTES, unlabeled_texts="keep")({"txt": b""})
    assert kept["input_ids"].tolist() == [BYTES.bos_token_id, BYTES.eos_token_id]
    with pytest.raises(mm.errors.DecodeError, match="max_length=2 leaves no text"):
        mm.TextDecoder(BYTES, max_length=2)({"txt": b"a cat"})
    fast = byte_chat("")
    with pytest.raises(mm.errors.DecodeError, match="no token of it is trained: empty text"):
        mm.TextDecoder(fast, image_length=4)({"txt": b"", "jpg": b""})


@pytest.mark.parametrize("max_length", range(1, 12))
def test_a_cut_keeps_the_special_tokens_as_the_library_does(max_length: int) -> None:
    text = mm.TextDecoder(BYTES, max_length=max_length, unlabeled_texts="keep")
    ids = text({"txt": b"a cat on"})["input_ids"].tolist()
    if max_length >= 2:
        expected = BYTES("a cat on", truncation=True, max_length=max_length).input_ids
        assert ids == expected
    assert len(ids) == min(max_length, 10)
