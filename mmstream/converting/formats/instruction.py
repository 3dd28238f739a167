"""A question and its answer in keys of their own. Part of step 2 of a conversion.

{"input": "Picture 1:<img>a.jpg</img>question", "output": "answer"}           Qwen-VL
{"instruction": "question", "input": "", "output": "answer", "history": []}   Alpaca
{"query": "question", "response": "answer"}                                   ms-swift
{"instruction": "", "inputs": "question", "outputs": "answer",
 "image_base64_str": ["..."]}                                                 M3IT
{"prompt": "question", "completion": "answer"}                                TRL
"""

from __future__ import annotations

from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import pair_of, parse_dialogue
from mmstream.converting.formats.fields import expect, first_key, is_set, text_of

QUESTION_KEYS = ("instruction", "input", "inputs", "query", "prompt")
ANSWER_KEYS = ("output", "outputs", "response", "completion")


def instruction(row: dict[str, Any]) -> Draft:
    """Return the draft of one question and its answer.

    All keys of `QUESTION_KEYS` that the row has make the question, one line each. ``history`` holds
    earlier pairs of question and answer.
    """
    turns, used = question_turns(row)
    key = first_key(row, ANSWER_KEYS)
    if key is None:
        key = next((k for k in ANSWER_KEYS if k in row), None)
    if not turns or key is None:
        raise RowError("expected a question in instruction or input, and an answer in output")
    answer = row[key]
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        return parse_dialogue(row, {"messages": turns + answer}, {*used, key})  # TRL's messages
    turns.append({"role": "assistant", "content": text_of(answer, key)})
    return parse_dialogue(row, {"messages": turns}, {*used, key})


def question_turns(row: dict[str, Any]) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the turns up to the question, and the keys of the row that they come from.

    Without a question there are no turns.
    """
    keys = [key for key in QUESTION_KEYS if row.get(key) is not None]
    if not keys:
        return [], set()
    used = {*keys, "history"}
    turns: list[dict[str, Any]] = []
    for i, pair in enumerate(expect(row.get("history") or [], list, "history")):
        if len(expect(pair, list, f"history[{i}]")) != 2:
            raise RowError(f"history[{i}]: expected [question, answer], found {len(pair)} items")
        turns += pair_of(*pair)
    if len(keys) == 1 and isinstance(row[keys[0]], list) and is_set(row[keys[0]]):
        return turns + row[keys[0]], used  # TRL's prompt: a list of messages
    question = "\n".join(filter(None, (expect(row[key], str, key) for key in keys)))
    return [*turns, {"role": "user", "content": question}], used
