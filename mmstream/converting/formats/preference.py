r"""Preferences: pairs of answers, or one answer with a verdict. Part of step 2 of a conversion.

    {"prompt": "...", "chosen": "...", "rejected": "..."}                             TRL
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}              TRL
    {"chosen": [messages], "rejected": [messages]}                    TRL, the prompt in both
    {"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "..."}             HH-RLHF
    {"conversations": [...], "chosen": {turn}, "rejected": {turn}}    LLaMA-Factory, sharegpt
    {"instruction": "...", "input": "", "chosen": "...", "rejected": "..."}           alpaca
    {"messages": [... answer], "rejected_response": "..."}                            ms-swift
    {"image": "a.jpg", "question": "...", "chosen": "...", "rejected": "..."}         RLAIF-V
    {"prompt": "...", "completion": "...", "label": true}             TRL's KTO, kto_tag, label

The canonical form is ``messages`` with the turns before the answer, and ``chosen`` and ``rejected``
with those of the answer; or ``completion`` and ``label`` where one answer has a verdict.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import parse_dialogue, turns_of
from mmstream.converting.formats.fields import expect, first_key, json_name, text_of
from mmstream.converting.formats.instruction import ANSWER_KEYS, question_turns

TURN_KEYS = ("messages", "conversations", "conversation")
VERDICT_KEYS = ("kto_tag", "label")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_preference(row: dict[str, Any]) -> bool:
    """Tell whether a row has preferences.

    A conversation that ends with an answer is none, even if it has a pair beside it: it is trained
    on as it is, and ``format="preference"`` reads the pair instead.
    """
    turns = next((row[key] for key in TURN_KEYS if isinstance(row.get(key), list)), None)
    if row.get("rejected_response") is not None:
        return True
    if isinstance(row.get("kto_tag"), bool):
        return True
    if isinstance(row.get("label"), bool):
        has_pair = any(key in row for key in ("completion", "response", "output"))
        return bool(turns) or (has_pair and first_key(row, ANSWER_KEYS) is not None)
    if row.get("chosen") is None or row.get("rejected") is None:
        return False
    return not turns or not _is_answer(turns[-1])


def preference(row: dict[str, Any]) -> Draft:
    """Return the draft of a pair of answers, or of one answer with a verdict."""
    verdict = next((key for key in VERDICT_KEYS if isinstance(row.get(key), bool)), None)
    turns, used = _prompt(row)
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _pair(row, turns, used)
    if row.get("rejected_response") is not None:
        prompt, chosen = _split_answer(turns, row, used)
        rejected = _answer_turns(row["rejected_response"], "rejected_response")
        dialogue = {"messages": prompt, "chosen": chosen, "rejected": rejected}
        return parse_dialogue(row, dialogue, used | {"rejected_response"})
    if verdict is None:
        raise RowError("no preference: expected chosen and rejected, or an answer with a label")
    prompt, completion = _split_answer(turns, row, used)
    return parse_dialogue(
        row,
        {"messages": prompt, "completion": completion},
        used | {verdict},
        main={"label": row[verdict]},
    )


def _pair(row: dict[str, Any], turns: list[Any], used: set[str]) -> Draft:
    chosen = _answer_turns(row["chosen"], "chosen")
    rejected = _answer_turns(row["rejected"], "rejected")
    if len(chosen) > 1 or len(rejected) > 1:  # both may begin with the prompt
        pairs = zip(chosen, rejected, strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_shared = min(num_shared, len(chosen) - 1, len(rejected) - 1)
        # A prompt of its own is the same turns once more, or their text.
        turns = chosen[:num_shared] if num_shared else turns
        chosen, rejected = chosen[num_shared:], rejected[num_shared:]
    if not turns:
        raise RowError(
            "no prompt: expected prompt, messages or question, or turns that chosen and rejected "
            "share"
        )
    dialogue = {"messages": turns, "chosen": chosen, "rejected": rejected}
    return parse_dialogue(row, dialogue, used | {"chosen", "rejected"})


def _prompt(row: dict[str, Any]) -> tuple[list[Any], set[str]]:
    """Return the turns of a row's prompt, and the keys that they come from."""
    if any(isinstance(row.get(key), list) for key in TURN_KEYS):
        return turns_of(row, *TURN_KEYS)
    turns, used = question_turns(row)
    if turns:
        return turns, used
    if row.get("question") is not None:
        return [{"role": "user", "content": text_of(row["question"], "question")}], {"question"}
    return [], set()


def _split_answer(
    turns: list[Any], row: dict[str, Any], used: set[str]
) -> tuple[list[Any], list[Any]]:
    """Return the turns before the answer, and those of the answer. It may have a key of its own."""
    key = first_key(row, ANSWER_KEYS)
    if key is not None:
        used.add(key)
        return turns, _answer_turns(row[key], key)
    if not turns or not _is_answer(turns[-1]):
        raise RowError("the conversation does not end with an answer of the assistant")
    return turns[:-1], turns[-1:]


def _is_answer(turn: Any) -> bool:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return role in ("assistant", "gpt", "chatgpt", "bot", "model", "function_call")


def _answer_turns(value: Any, name: str) -> list[Any]:
    """Return the turns of an answer: a text, one turn, or a list of turns."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        if not value:
            raise RowError(f"{name} is empty")
        return [expect(turn, dict, f"{name}[{i}]") for i, turn in enumerate(value)]
    if not isinstance(value, str):
        raise RowError(f"{name}: expected a text or turns, found {json_name(value)}")
    text = text_of(value, name)
    if not _SPEAKER.match(text):
        return [{"role": "assistant", "content": text}]
    _, *words = _SPEAKER.split(text)
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(words[::2], words[1::2], strict=True)
    ]
