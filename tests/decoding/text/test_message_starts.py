"""Answers are found alike in one rendering with marks, and in a rendering for each answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mmstream as mm
from mmstream.decoding.text.chat import Chat, probe_chat
from mmstream.decoding.text.message_starts import MARK, marking_template
from mmstream.train.tokenizer import CHAT_TEMPLATE
from tests.helpers.chats import (
    CHATML,
    MARKED,
    NEWLINES,
    ONLY_PARTS,
    PARTS,
    QWEN_VL,
    THINKING,
    UNSTABLE,
    VICUNA,
    assistant,
    byte_chat,
    user,
)

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
    {{ count.value }} {{ message['role'] }}:
    {% for word in message['content'].split() %}{{ word }}{{ '' if loop.last else ' ' }}{% endfor %}
    <|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    assistant:
{%- endif %}
"""
TRIMMED = LINES.replace("{%- for message in messages -%}", "{% for message in messages %}")
LOOPS = {
    "chatml": CHATML,
    "parts": PARTS,
    "only parts": ONLY_PARTS,
    "newlines": NEWLINES,
    "qwen": QWEN_VL,
    "vicuna": VICUNA,
    "images": CHAT_TEMPLATE,
    "lines": LINES,
    "trimmed": TRIMMED,
    "breaks": CHATML.replace("<|im_start|>", "{% if m.role == 'x' %}{% break %}{% endif %}<", 1),
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two turns": [user("what is this?"), assistant("a cat"), user("where?"), assistant("mat 😀")],
    "system": [{"role": "system", "content": "be kind"}, user("hi"), assistant("ho")],
    "two answers": [user("hi"), assistant("ho"), assistant("ho")],
    "an answer first": [assistant("ho"), user("hi"), assistant("ho")],
    "spaces": [user(" hi \n"), assistant("\n ho \n"), user(""), assistant("")],
    "same texts": [user("ho"), assistant("ho"), user("ho"), assistant("ho")],
    "a mark": [user(f"hi{MARK}"), assistant("ho")],
    "the end": [user("hi"), assistant("ho"), {"role": "x", "content": ""}, assistant("ho")],
}


def outcome(chat: Chat, messages: list[dict[str, Any]], tools: list[Any] | None) -> object:
    try:
        return chat.render(messages, tools)
    except mm.DecodeError as error:
        return str(error)


@pytest.mark.parametrize("name", LOOPS)
def test_answers_are_those_of_a_rendering_for_each(name: str) -> None:
    chat = probe_chat(byte_chat(LOOPS[name]), {"image": "<image>"})
    assert chat.marking is not None
    slow = replace(chat, marking=None)
    for messages in CONVERSATIONS.values():
        for tools in (None, [{"name": "look"}]):
            assert outcome(chat, messages, tools) == outcome(slow, messages, tools)


AHEAD = {
    "loop.last": CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ loop.last }}"),
    "the number of messages": UNSTABLE,
    "the last message": CHATML.replace("{{ m['role'] }}", "{{ messages[-1]['role'] }}"),
    "the next message": CHATML.replace("{{ m['role'] }}", "{{ messages[loop.index0 + 1] }}"),
    "another list": "{% set messages = messages[1:] %}" + CHATML,
    "a loop that is passed on": CHATML.replace("{{ m['role'] }}", "{{ loop | string }}"),
    "some messages": CHATML.replace("in messages", "in messages if loop"),
    "the prompt inside": CHATML.replace("{{ m['role'] }}", "{{ add_generation_prompt }}"),
    "a count behind": "{% set n = namespace(v=0) %}" + CHATML + "{{ n.v }}",
    "two loops": CHATML + CHATML,
    "thinking": THINKING,
    "marked turns": MARKED,
    "no template": "{% for m in messages %}",
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_template_that_may_look_ahead_is_rendered_for_each_answer(name: str) -> None:
    assert marking_template(AHEAD[name]) is None


def test_a_template_that_is_set_later_is_used() -> None:
    fast = byte_chat(CHATML)
    chat = probe_chat(fast, {"image": "<image>"})
    fast.chat_template = CHATML.replace("<|im_start|>", "# ")
    text, spans = chat.render(CONVERSATIONS["two turns"])
    assert text.startswith("# user")
    assert [text[start:stop] for start, stop in spans] == ["a cat<|im_end|>", "mat 😀<|im_end|>"]


def test_a_conversation_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = byte_chat(QWEN_VL)
    chat = probe_chat(fast, {"image": "<image>"})
    calls = []
    real = fast.apply_chat_template

    def counted(messages: list[Any], **options: Any) -> Any:
        calls.append(len(messages))
        return real(messages, **options)

    monkeypatch.setattr(fast, "apply_chat_template", counted)
    messages = [user("why?"), assistant("so")] * 20
    _, spans = chat.render(messages)
    assert len(spans) == 20
    assert calls == [40]
