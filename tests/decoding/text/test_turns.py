"""Roles and calls of other trainers, and what a chat template loses of a conversation."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from tests.helpers.chats import CHATML, THINKING, assistant, byte_chat, trained, user

CALLS = CHATML.replace(
    "<|im_end|>\n{% endfor %}",
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}",
)
JOINED = CHATML.replace(
    "<|im_end|>\n{% endfor %}",
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}",
)
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
OSLO, ROME = "<call>weather city=Oslo</call>", "<call>weather city=Rome</call>"


def called(*calls: dict[str, Any], **keys: Any) -> dict[str, Any]:
    functions = [{"type": "function", "function": call} for call in calls]
    return {**assistant(""), "tool_calls": functions, **keys}


ROWS = {
    "ms-swift": [
        *({"role": "user", "content": "q"}, {"role": "assistant", "content": "Look. "}),
        *[{"role": "tool_call", "content": json.dumps(CALL)}] * 2,
        *[{"role": "tool_response", "content": "3 C"}] * 2,
        {"role": "assistant", "content": "Cold."},
    ],
    "LLaMA-Factory": [
        *({"from": "human", "value": "q"}, {"from": "gpt", "value": "Look. "}),
        {"from": "function_call", "value": json.dumps([CALL, CALL])},
        *[{"from": "observation", "value": "3 C"}] * 2,
        {"from": "gpt", "value": "Cold."},
    ],
    "OpenAI": [
        {"role": "user", "content": "q"},
        called(*[{**CALL, "arguments": json.dumps(CALL["arguments"])}] * 2, content="Look. "),
        *[{"role": "function", "content": "3 C"}, {"role": "ipython", "content": "3 C"}],
        {"role": "assistant", "content": "Cold."},
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_tool_turns_of_trainers_are_read_alike(tmp_path: Path, name: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": ROWS[name]}))
    mm.convert(rows, tmp_path / "out", progress=False)
    stored = mm.open_dataset(tmp_path / "out")[0]["json"]
    messages = json.loads(bytes(stored))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert trained(CALLS, *messages) == f"Look. {OSLO}{OSLO}<|im_end|>Cold.<|im_end|>"
    if name != "LLaMA-Factory":  # as they are, in a tar of somebody else
        assert trained(CALLS, *ROWS[name]) == trained(CALLS, *messages)
    if name == "OpenAI":  # nothing but the reader sees objects
        assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], str)


def test_a_call_is_an_answer_of_its_own_where_it_counts_otherwise() -> None:
    rome = {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Rome"}}'}
    text = trained(CALLS, user("q"), {**assistant("Look."), "loss": False}, rome)
    assert text == f"{ROME}<|im_end|>"


def test_a_thought_before_a_call_stays_with_it() -> None:
    call = {"role": "function_call", "content": f"<think>Hm</think>{json.dumps(CALL)}"}
    assert trained(CALLS, user("q"), call) == f"<think>Hm</think>{OSLO}<|im_end|>"


def test_openais_first_form_of_a_call_is_read() -> None:
    message = {"role": "assistant", "content": None, "function_call": CALL}
    assert trained(CALLS, user("q"), message) == f"{OSLO}<|im_end|>"


def test_developers_are_systems_for_a_template_that_does_not_know_them() -> None:
    row = {"json": {"messages": [{"role": "developer", "content": "x"}, user("a"), assistant("b")]}}
    knows = (
        (CHATML, "system"),
        (CHATML + "{# developer #}", "system"),
        (CHATML + "{# 'developer' #}", "developer"),
    )
    for template, role in knows:
        fast = byte_chat(template)
        text = fast.decode(mm.TextDecoder(fast)(row)["input_ids"])
        assert text.startswith(f"<|im_start|>{role}\nx")


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "tool_call", "content": "weather()"}, "a tool call is not JSON"),
        ({"role": "tool_call", "content": '["weather"]'}, "a call needs JSON with name"),
        ({"role": "tool_call", "content": "[]"}, "an empty list of calls"),
        (called({"name": "f", "arguments": "[1]"}), "are not a JSON object"),
        (called({"name": "f", "arguments": "Oslo"}), "a tool call is not JSON"),
        (called({"name": "f", "arguments": [1]}), "are not a JSON object"),
        (called({"name": "f", "parameters": {"city": "Oslo"}}), "needs a name and arguments"),
        (called({"arguments": {}}), "needs a name and arguments"),
        ({"role": "tool_call", "content": '{"name": "f", "args": {}}'}, "needs a name and arg"),
        ({**assistant(""), "function_call": "f()"}, "needs a name and arguments"),
        ({**assistant(""), "tool_calls": "f()"}, "tool_calls is not a list of calls"),
    ],
)
def test_calls_of_another_form_are_a_bad_sample(turn: dict[str, Any], reason: str) -> None:
    with pytest.raises(mm.errors.DecodeError, match=rf"messages\[1\]: .*{reason}"):
        trained(CALLS, user("q"), turn)


def test_no_calls_and_no_arguments_are_read_as_such() -> None:
    calls = CALLS.replace("m.tool_calls or []", "m.tool_calls").replace(
        "{% for c in", "{% if m.tool_calls is defined %}<calls>{% for c in"
    )
    calls = calls.replace("</call>{% endfor %}", "</call>{% endfor %}{% endif %}")
    none = {**assistant("ho"), "tool_calls": [], "function_call": None}
    assert trained(calls, user("q"), none) == "ho<|im_end|>"
    empty = [{"name": "f", "arguments": value} for value in (None, "", {})] + [{"name": "f"}]
    turns = [{"role": "tool_call", "content": json.dumps(call)} for call in empty]
    for message in (*map(called, empty), *turns):
        assert trained(calls, user("q"), message) == "<calls><call>f </call><|im_end|>"


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_a_template_that_joins_texts_gets_arguments_as_text(arguments: Any) -> None:
    message = called({"name": "weather", "arguments": arguments})
    assert trained(JOINED.replace("'<call>'", "c.function.name"), user("q"), message) == (
        'weather{"city": "Oslo"}<|im_end|>'
    )


def dropped(template: str, *messages: dict[str, Any]) -> tuple[str, int | None]:
    """Why a conversation is refused, and how many parts it loses where it is not."""
    sample = {"json": {"messages": list(messages)}}
    strict = mm.TextDecoder(byte_chat(template)).decode_all([sample])[0]
    lax = mm.TextDecoder(byte_chat(template), undecoded_parts="drop").decode_all([sample])[0]
    return str(strict) * isinstance(strict, Exception), getattr(lax, "num_dropped_parts", None)


THOUGHT = {**assistant("ho"), "reasoning_content": "hm"}
TWO_THOUGHTS = [
    user("a"),
    assistant("<think>hm</think>b"),
    user("c"),
    assistant("<think>x</think>d"),
]


def test_what_a_template_never_writes_is_refused_or_counted() -> None:
    assert dropped(CALLS, user("q"), called(CALL)) == ("", 0)
    reason, number = dropped(CHATML, user("q"), called(CALL, CALL))
    assert (
        "messages[1]: a tool call, messages[1]: a tool call, which the chat template does" in reason
    )
    assert number == 2
    reason, number = dropped(CHATML, user("q"), THOUGHT)
    assert "messages[1]: a thought, which" in reason
    assert number == 1
    silent = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.role != 'tool' %}"
    )
    silent = silent.replace("{% endfor %}", "{% endif %}{% endfor %}")
    reason, number = dropped(silent, user("q"), {"role": "tool", "content": "3 C"}, assistant("ho"))
    assert "messages[1]: its text, which" in reason
    assert number == 1


SILENT = CHATML.replace("{{ m['content'] }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
FIRST = CHATML.replace("{{ m['content'] }}", "{% for p in m.content[:1] %}{{ p.text }}{% endfor %}")
FIRST += "{% for p in messages[0].content if p.type == 'image' %}<image>{% endfor %}"
PARTS = [{"type": "text", "text": text} for text in ("CCC", "DDD")]


@pytest.mark.parametrize(
    ("template", "turn", "reason"),
    [
        (SILENT, {"role": "tool", "content": "SECRET"}, "messages[1]: its text"),
        (FIRST, assistant(PARTS), "messages[1]: its text"),
        (FIRST.replace("[:1]", "[1:]"), assistant(PARTS), "messages[1]: its text"),
        (
            CHATML,
            {**assistant("<think>\nA\n</think>B"), "reasoning_content": "LOST"},
            "messages[1]: a thought, which",
        ),
    ],
)  # fmt: skip
def test_a_text_of_a_written_header_is_noticed(
    template: str, turn: dict[str, Any], reason: str
) -> None:
    assert reason in dropped(template, user("q"), turn, assistant("ho"))[0]


def test_the_same_thought_in_two_places_is_one() -> None:
    message = {**assistant("<think>\nA\n</think>B"), "reasoning_content": "A"}
    assert dropped(CHATML, user("q"), message) == ("", 0)


def test_thoughts_that_a_template_keeps_in_the_last_turn_are_counted_only() -> None:
    assert dropped(THINKING, *TWO_THOUGHTS) == ("", 1)
    assert dropped(CHATML, *TWO_THOUGHTS) == ("", 0)


def test_a_result_that_is_written_with_its_call_is_not_trained() -> None:
    inside = CALLS.replace(
        "<|im_end|>\n{% endfor %}",
        "{% if loop.nextitem and loop.nextitem.role == 'tool' %}<got>{{ loop.nextitem.content }}"
        "{% endif %}<|im_end|>\n{% endif %}{% endfor %}",
    ).replace("{% for m in messages %}", "{% for m in messages %}{% if m.role != 'tool' %}")
    result = {"role": "tool", "content": "3 C"}
    for results in ([result], [{**result, "content": " "}, result], [{**result, "content": ""}]):
        assert dropped(inside, user("q"), called(CALL), *results, assistant("ho"))[0].startswith(
            "chat template: it writes messages[2] inside of messages[1]"
        )
    looped = inside.replace("{% if loop.nextitem and loop.nextitem.role == 'tool' %}<got>{{ ", "")
    looped = looped.replace(
        "loop.nextitem.content }}{% endif %}",
        "{% for n in messages[loop.index:] %}{% if n.role == 'tool' %}<got>{{ n.content }}"
        "{% endif %}{% endfor %}</got>",
    )
    assert "inside of" in dropped(looped, user("q"), called(CALL), result, assistant("ho"))[0]
    open_end = inside.replace(
        "{% if loop.nextitem", "{% if m.tool_calls %}<got>{% endif %}{% if loop.nextitem"
    )
    open_end = open_end.replace("%}<got>{{", "%}{{").replace(
        "<|im_end|>\n{% endif %}", "{% if not m.tool_calls %}<|im_end|>{% endif %}\n{% endif %}"
    )
    assert trained(open_end, user("q"), called(CALL), result, user("?"), assistant("ho")) == (
        f"{OSLO}<got>ho<|im_end|>"
    )


DATED = "{{ strftime_now('%d %b %Y') }}\n" + CHATML


def test_the_date_of_a_template_is_the_one_that_is_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = {"json": {"messages": [user("a"), assistant("b")]}}
    fast = byte_chat(DATED)
    caplog.set_level(logging.WARNING)
    given = mm.TextDecoder(fast, today=datetime.date(2024, 2, 29))(row)
    assert fast.decode(given["input_ids"]).startswith("29 Feb 2024\n")
    assert not caplog.records
    computed = "{% set form = '%Y' %}{{ strftime_now (form) }}\n" + CHATML
    mm.TextDecoder(byte_chat(computed), today=datetime.date(2024, 2, 29))
    assert [record.message.count("tokens differ from day to day") for record in caplog.records] == [
        1
    ]
    caplog.clear()
    for _ in range(2):
        default = mm.TextDecoder(fast)(row)
        assert fast.decode(default["input_ids"]).startswith("01 Jan 2026\n")
    assert [record.message.count("every text gets 2026-01-01") for record in caplog.records] == [1]


@pytest.mark.parametrize("today", ["2026-01-01", datetime.datetime(2026, 1, 1)])
def test_a_date_of_another_type_is_refused(today: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r"today=.*: give a datetime\.date, without a time"):
        mm.TextDecoder(byte_chat(DATED), today=today)


def test_plans_and_baked_corpora_are_those_of_their_date(tmp_path: Path) -> None:
    def pipeline_of(day: int, **settings: Any) -> mm.Pipeline:
        text = mm.TextDecoder(byte_chat(CHATML), today=datetime.date(2026, 1, day))
        decode = mm.Decode(text=text)
        dataset = mm.open_dataset(tmp_path / "corpus")
        return mm.Pipeline(dataset, global_batch_size=1, decode=decode, **settings)

    mm.convert([{"text": "a cat"}], tmp_path / "corpus", progress=False)
    mm.bake(pipeline_of(1), tmp_path / "baked", progress=False)
    mm.plan(pipeline_of(1), 64, progress=False)
    assert len(mm.Loader(pipeline_of(1, batching=mm.Pack(64)))) == 1
    with pytest.raises(mm.ConfigError, match=r"text\.today was 2026-01-01"):
        mm.bake(pipeline_of(2), tmp_path / "baked", progress=False)
    with pytest.raises(mm.ConfigError, match="no plan of these decoders and limits"):
        mm.Loader(pipeline_of(2, batching=mm.Pack(64)))
