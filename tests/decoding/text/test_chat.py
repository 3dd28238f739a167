"""Which tokens of a conversation a model learns from, for all kinds of chat templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mmstream as mm
from mmstream.decoding.text.message_starts import MARK
from mmstream.train.tokenizer import CHAT_TEMPLATE
from tests.helpers.chats import (
    CHATML,
    LLAMA,
    NEWLINES,
    ONLY_PARTS,
    PARTS,
    QWEN_VL,
    THINKING,
    TWO_TURNS,
    UNSTABLE,
    VICUNA,
    Messages,
    assistant,
    byte_chat,
    tokenizer,
    trained,
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


def test_llama_turns_are_learned_with_their_end_mark() -> None:
    text, learned = run(LLAMA, TWO_TURNS)
    assert text == (
        "<s>[INST] what is this? [/INST] a cat </s>[INST] where? [/INST] on a mat 😀 </s>"
    )
    assert learned == [" a cat </s>", " on a mat 😀 </s>"]


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


# -- marks in one rendering ------------------------------------------------------------------------

# Laid out over lines, as templates of models are: white space depends on how tags end.
LINES = """{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{%- set count = namespace(value=0) %}
{%- for message in messages -%}
    {% if loop.first and messages[0]['role'] != 'system' %}
        [system]
    {% endif %}
    {% set count.value = count.value + 1 %}
    {{ message['role'] }}: {{ count.value }}
    {% for word in message['content'].split() %}{{ word }}{{ '' if loop.last else ' ' }}{% endfor %}
    <|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    assistant:
{%- endif -%}
"""
LOOPS = {
    "chatml": CHATML,
    "parts": PARTS,
    "only parts": ONLY_PARTS,
    "newlines": NEWLINES,
    "qwen": QWEN_VL,
    "vicuna": VICUNA,
    "images": CHAT_TEMPLATE,
    "breaks": CHATML.replace(
        "<|im_start|>", "{% if m.role == 'x' %}{% break %}{% endif %}<|im_start|>", 1
    ),
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two turns": [user("what is this?"), assistant("a cat"), user("where?"), assistant("mat 😀")],
    "system": [{"role": "system", "content": "be kind"}, user("hi"), assistant("ho")],
    "two answers": [user("hi"), assistant("ho"), assistant("ho")],
    "spaces": [user(" hi \n"), assistant("\n ho \n"), user(""), assistant("")],
    "same texts": [user("ho"), assistant("ho"), user("ho"), assistant("ho")],
}


DROP = {"undecoded_parts": "drop"}
AROUND = {"newlines": ("", "\n"), "vicuna": (" ", "</s>")}
"""What is trained around an answer; of the others, the end mark behind it."""


def outcome(template: str, messages: list[dict[str, Any]]) -> object:
    """The labels of a conversation; None where they cannot be told."""
    decoder = mm.TextDecoder(byte_chat(template), max_length=10_000, undecoded_parts="drop")
    try:
        return decoder({"json": {"messages": messages}})["labels"].tolist()
    except mm.errors.DecodeError:
        return None


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_answers_are_trained_whole_in_loops_of_many_kinds(name: str, case: str) -> None:
    messages = CONVERSATIONS[case]
    before, behind = AROUND.get(name, ("", "<|im_end|>"))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    expected = "".join(f"{before}{answer}{behind}" for answer in answers)
    assert trained(LOOPS[name], *messages, **DROP) == expected


@pytest.mark.parametrize("end_of_tag", ["-%}", "%}"])
def test_white_space_around_tags_is_that_of_the_template(end_of_tag: str) -> None:
    template = LINES.replace("in messages -%}", f"in messages {end_of_tag}")
    messages = CONVERSATIONS["two turns"]
    expected = " 2\na cat    <|im_end|> 4\nmat 😀    <|im_end|>"
    assert trained(template.removesuffix("\n"), *messages, **DROP) == expected


@pytest.mark.parametrize("text", [f"a{MARK}", f"a{MARK}5:b", f"x{MARK}7:2:y{MARK}7:z"])
def test_messages_cannot_forge_marks(text: str) -> None:
    assert outcome(CHATML, [user("hi"), assistant(text)]) is None
    assert outcome(CHATML, [user(text), assistant("ho")]) is None
    with pytest.raises(mm.errors.DecodeError, match=r"U\+FDD0"):
        trained(CHATML, user(text), assistant("ho"))


def test_a_template_that_is_set_later_is_used() -> None:
    fast = byte_chat(CHATML)
    decoder = mm.TextDecoder(fast)
    fast.chat_template = CHATML.replace("<|im_start|>", "# ")
    tokens = decoder({"json": {"messages": CONVERSATIONS["two turns"]}})
    assert fast.decode(tokens["input_ids"]).startswith("# user")


BARE = CHATML.split("{% if add")[0]
ODD = {
    "reversed": CHATML.replace("in messages", "in messages[::-1]"),
    "twice": CHATML + CHATML,
    "another header": CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ loop.last }}"),
    "some messages": CHATML.replace("in messages", "in messages if m.role != 'system'"),
    "captured": "{% set all %}" + CHATML + "{% endset %}{{ all }}",
    "changed texts": CHATML.split("{% if add")[0].replace("m['content']", "m['content'] | upper"),
    "with its question": "{% for m in messages %}{% if m.role == 'assistant' %}Q: "
    "{{ loop.previtem.content }}\nA: {{ m.content }}</s>{% endif %}{% endfor %}",
    "other messages": BARE.replace(
        "for m in messages %}",
        "set later = messages[1:] %}{% for i in range(later | length) %}{% set m = messages[i] %}",
    ),
    "all but the last": "{% with messages = messages[:-1] %}" + BARE + "{% endwith %}",
    "a pair": "{% set messages, x = messages[:-1], 1 %}" + BARE,
}


@pytest.mark.parametrize("name", ODD)
def test_answers_that_cannot_be_told_make_a_bad_sample(name: str) -> None:
    assert outcome(ODD[name], [*CONVERSATIONS["two turns"], user("why?")]) is None


LOOKS_AHEAD = {
    "the last message": CHATML.replace("{{ m", "{{ '' if loop.last }}{{ m"),
    "all but the first": "{% set later = messages[1:] %}" + CHATML.replace("messages %", "later %"),
    "by number": CHATML.replace(
        "for m in messages %}", "for i in range(messages | length) %}{% set m = messages[i] %}"
    ),
    "checked first": "{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('x') }}"
    "{% endif %}{% endfor %}" + CHATML,
    "inside": CHATML.replace(
        "<|im_end|>",
        "{% for l in messages[loop.index:] %}"
        "{% if l.role == 'x' %}x{% endif %}{% endfor %}<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_loops_of_many_kinds_tell_their_messages(name: str) -> None:
    messages = [user("hi"), user("again"), assistant("ho"), user("ha"), assistant("he")]
    assert trained(LOOKS_AHEAD[name], *messages, **DROP) == "ho<|im_end|>he<|im_end|>"


NO_THINK = (
    CHATML.replace("{% for", "{% set ns = namespace(t=1) %}{% for", 1)
    .replace(
        "{{ m['content'] }}",
        "{% if m.role == 'user' %}{% set ns.t = '/no' not in m.content %}{% else %}<think>"
        "{% if ns.t %}{{ m.reasoning_content }}{% endif %}</think>{% endif %}{{ m.content }}",
    )
    .replace(
        "assistant\n{% endif", "assistant\n{% if not ns.t %}<think></think>{% endif %}{% endif"
    )
)
NUMBERED = CHATML.replace("<|im_start|>{{ m['role'] }}", "[{{ loop.index }}] ").replace(
    "<|im_start|>assistant", "[{{ messages | length + 1 }}] "
)
WITH_QUESTION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<user>{{ loop.previtem.content }}"
    "<bot>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<user>{{ messages[-1].content }}<bot>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (NO_THINK, "<think>hm</think>ho<|im_end|>", "he<|im_end|>"),
        (NUMBERED, "ho<|im_end|>", "he<|im_end|>"),
        (WITH_QUESTION, "ho</s>", "he</s>"),
    ],
)
def test_a_prompt_that_depends_on_the_messages_is_not_trained(
    template: str, first: str, second: str
) -> None:
    answers = [{**assistant("ho"), "reasoning_content": "hm"}, assistant("he")]
    messages = [user("(hi) you?"), answers[0], user("¿you? /no"), answers[1]]
    assert trained(template, *messages, **DROP) == first + second
    assert trained(template, *messages[2:], **DROP) == second


TOOL = (
    "{{ tools | length }}{% for m in messages %}{% if m.role == 'assistant' %}<s>{{ m.content }}"
    "</s>{% else %}# {{ m.content }}{% endif %}{% endfor %}"
)
BETWEEN = (
    "{{ tools | length }}{% for m in messages %}{% if not loop.first %}</s>{% endif %}"
    "{{ '<s>' if m.role == 'assistant' else '# ' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}</s><s>{% endif %}"
)
PROMPTED = TOOL + "{% if add_generation_prompt %}<s>{% endif %}"
MARKING = PROMPTED.replace(
    "{{ m.content }}</s>", "{% generation %}{{ m.content }}{% endgeneration %}</s>"
)


@pytest.mark.parametrize(
    ("default", "tool_use", "expected"),
    [
        (CHATML, TOOL, "ho</s>he</s>"),
        (CHATML, BETWEEN, "ho</s>he"),
        (BETWEEN, PROMPTED, "ho</s>he</s>"),
        (CHATML, MARKING, "hohe"),
        (MARKING, PROMPTED, "ho</s>he</s>"),
        (TOOL, PROMPTED, "ho</s>he</s>"),
    ],
)
def test_each_template_of_a_tokenizer_is_read_as_it_is(
    default: str, tool_use: str, expected: str
) -> None:
    default = default.replace("{{ tools | length }}", "")
    messages = [user("hi"), assistant("ho"), user("ha"), assistant("he")]
    templates = {"default": default, "tool_use": tool_use}
    assert trained(templates, *messages, tools=[{"name": "f"}], **DROP) == expected


UNOWNED = {
    "outside of a loop": "{% macro r(m) %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endmacro %}"
    "{{ r(messages[0]) }}{{ r(messages[1]) }}{% for m in messages[2:] %}{{ r(m) }}{% endfor %}",
    "with its question": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
    "{% generation %}{{ loop.nextitem.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "as many by chance": "{% for m in messages if m.role != 'x' %}{% if m.role == 'user' %}"
    "{{ m.content }}{% elif m.content %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% generation %}</s>{% endgeneration %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", UNOWNED)
def test_weights_need_to_know_whose_mark_it_is(name: str) -> None:
    empty = assistant("" if name == "as many by chance" else "ho")
    messages = [user("hi"), empty, user("ha"), {**assistant("he"), "weight": 0}]
    with pytest.raises(
        mm.errors.DecodeError, match="the messages say which of them are not trained"
    ):
        trained(UNOWNED[name], *messages, **DROP)


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
PLACES = {
    "the last mark behind": (
        "{% for m in messages %}"
        + TURN
        + "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% else %}<|im_end|>"
        "{% endif %}",
        "ho<|im_end|>he<|im_end|>",
    ),
    "no mark, lines between": (
        "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
        + TURN
        + "{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n' }}<|im_start|>assistant\n{% endif %}",
        "ho\n<|im_start|>he",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_answer_is_trained_from_its_prompt_to_its_end_mark(name: str) -> None:
    template, expected = PLACES[name]
    messages = [user("hi"), assistant("ho"), user("ha"), assistant("he")]
    assert trained(template, *messages, **DROP) == expected
