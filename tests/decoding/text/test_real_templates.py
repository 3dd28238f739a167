"""Labels of the chat templates that trl carries, against transformers' masks and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmstream.decoding.text.message_starts import GENERATION
from mmstream.errors import DecodeError
from tests.helpers.real_templates import CONVERSATIONS, differences, trained

FOLDER = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))}

QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QWEN_35_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>"
)
SPANS = {
    "qwen3": {
        "two answers": ["First.<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"],
        "call": [f"{QWEN_CALL}<|im_end|>", "<think>\n\n</think>\n\nThree degrees.<|im_end|>"],
        "thoughts": ["First.<|im_end|>", "<think>\nHm two.\n</think>\n\nSecond.<|im_end|>"],
        "empty": ["<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"],
    },
    "qwen3_5_think": {  # the generation prompt begins the thought
        "two answers": ["First.<|im_end|>", "\n</think>\n\nSecond.<|im_end|>"],
        "call": [
            f"\n</think>\n\n{QWEN_35_CALL}<|im_end|>",
            "\n</think>\n\nThree degrees.<|im_end|>",
        ],
        "thoughts": ["First.<|im_end|>", "Hm two.\n</think>\n\nSecond.<|im_end|>"],
    },
    "qwen3_5_nothink": {
        "two answers": ["First.<|im_end|>", "Second.<|im_end|>"],
        "call": [f"{QWEN_35_CALL}<|im_end|>", "Three degrees.<|im_end|>"],
    },
    "llama3": {
        "two answers": ["First.<|eot_id|>", "Second.<|eot_id|>"],
        "answer first": ["Hello.<|eot_id|>", "Second.<|eot_id|>"],
        "in a row": ["First.<|eot_id|>", "More.<|eot_id|>", "Second.<|eot_id|>"],
    },
    "gemma3": {
        "system": ["First.<end_of_turn>", "Second.<end_of_turn>"],
        "spaces": ["First.<end_of_turn>", "Second.<end_of_turn>"],
    },
    "gemma4_v5": {
        "two answers": ["First.<turn|>", "Second.<turn|>"],
        "call": [
            '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>',
            "Three degrees.<turn|>",
        ],
        "thoughts": ["First.<turn|>", "<|channel>thought\nHm two.\n<channel|>Second.<turn|>"],
    },
    "phi3": {
        "two answers": ["First.<|end|>", "Second.<|end|>"],
        "user last": ["First.<|end|>"],
    },
    "deepseek_r1_distill": {
        "two answers": ["First.<｜end▁of▁sentence｜>", "Second.<｜end▁of▁sentence｜>"],
        "system later": ["First.<｜end▁of▁sentence｜>", "Second.<｜end▁of▁sentence｜>"],
    },
    "glm4moe": {  # the token of the next turn ends an answer, as its training copy says
        "two answers": ["\n<think></think>\nFirst.<|user|>", "\n<think></think>\nSecond."],
        "call": [
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Oslo</arg_value>\n</tool_call><|observation|>",
            "\n<think></think>\nThree degrees.",
        ],
        "thoughts": ["\n<think></think>\nFirst.<|user|>", "\n<think>Hm two.</think>\nSecond."],
    },
    "gptoss": {
        "two answers": [
            "<|channel|>final<|message|>First.<|end|>",
            "<|channel|>final<|message|>Second.<|return|>",
        ],
        "call": [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>Three degrees.<|return|>",
        ],
        "thoughts": [
            "<|channel|>final<|message|>First.<|end|>",
            "<|channel|>analysis<|message|>Hm two.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Second.<|return|>",
        ],
    },
    "cohere2": {
        "two answers": [
            "First.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            "Second.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ],
    },
}


@pytest.mark.slow
def test_labels_are_the_masks_of_templates_that_mark_answers() -> None:
    wrong = {name: [*differences(template)] for name, template in TEMPLATES.items()}
    assert {name: names for name, names in wrong.items() if names} == {}
    assert len(TEMPLATES) > 60


@pytest.mark.parametrize("name", SPANS)
def test_labels_are_those_that_are_written_down(name: str) -> None:
    found = {case: trained(TEMPLATES[name], CONVERSATIONS[case]) for case in SPANS[name]}
    assert found == SPANS[name]


UNMARKED = {name: text for name, text in TEMPLATES.items() if not GENERATION.search(text)}
# gpt-oss leaves out what was written beside a call, once there is an answer. It is counted.
LEFT_OUT = {("gptoss", "call with text", 1)}


@pytest.mark.slow
def test_every_answer_is_trained_and_nothing_else_or_the_sample_is_bad() -> None:
    """Templates that mark answers: the test above."""
    num_read = 0
    for name, template in UNMARKED.items():
        for case, messages in CONVERSATIONS.items():
            try:
                text = "".join(trained(template, messages))
            except DecodeError:
                continue
            num_read += 1
            for i, message in enumerate(messages):
                words = message["content"].rpartition("</think>")[2].strip()
                is_answer = message["role"] == "assistant"
                if words not in ("", "ho") and (name, case, i) not in LEFT_OUT:
                    assert (words in text) == is_answer, (name, case)
    assert num_read > 250
