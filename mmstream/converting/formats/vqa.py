"""Questions about pictures with short answers. Part of step 2 of a conversion.

    {"image": "a.jpg", "question": "What is it?", "answer": "a cat"}
    {"image": "a.jpg", "question": "What is it?", "answers": ["cat", "cat", "a cat"]}     VQAv2
    {"image": "a.jpg", "question": "Which?", "choices": ["a cat", "a dog"], "answer": 0}  ScienceQA
    {"image": "a.jpg", "qa_pairs": [{"question": "...", "answer": "..."}]}

Of several answers the most frequent one is taken, and of those the first; all of them stay in the
``json``. Choices are written below the question as ``A. a cat``. The answer is then the letter.
"""

from __future__ import annotations

from collections import Counter
from string import ascii_uppercase
from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import pair_of, parse_dialogue
from mmstream.converting.formats.fields import expect, first_key, json_name, text_of

__all__ = ["VQA_ANSWER_KEYS", "VQA_LIST_KEYS", "vqa"]

VQA_ANSWER_KEYS = ("multiple_choice_answer", "answer", "answers")
VQA_LIST_KEYS = ("qa_pairs", "qas", "qa")
CHOICE_KEYS = ("choices", "options")
FACTS = ("answers", "question_id", "question_type", "answer_type", "hint", "lecture", "solution")


def vqa(row: dict[str, Any]) -> Draft:
    """Return the draft of one or more questions with their answers."""
    key = first_key(row, VQA_LIST_KEYS)
    if key is None:
        turns, used = _turns(row, "")
        return parse_dialogue(row, {"messages": turns}, used, kept=FACTS)
    items = expect(row[key], list, key)
    turns = []
    for i, item in enumerate(items):
        name = f"{key}[{i}]"
        turns += _turns(expect(item, dict, name), f"{name}: ")[0]
    return parse_dialogue(row, {"messages": turns}, {key}, kept=FACTS)


def _turns(row: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the turns of one question, and the keys that they come from."""
    question = text_of(row.get("question"), f"{name}question")
    key = first_key(row, VQA_ANSWER_KEYS)
    if key is None:
        raise RowError(f"{name}no answer: expected answer or answers")
    used = {"question", key} - {"answers"}
    choice_key = first_key(row, CHOICE_KEYS)
    answer = row[key]
    if choice_key is not None:
        choices = _choices(row[choice_key], f"{name}{choice_key}")
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in choices.items())])
        used.add(choice_key)
        if isinstance(answer, int) and not isinstance(answer, bool):
            if not 0 <= answer < len(choices):
                raise RowError(f"{name}{key}: {answer}, and there are {len(choices)} choices")
            answer = list(choices)[answer]
        elif isinstance(answer, str) and answer not in choices:
            letters = [letter for letter, text in choices.items() if text == answer.strip()]
            answer = letters[0] if letters else answer
    return pair_of(question, _answer(answer, f"{name}{key}")), used


def _choices(value: Any, name: str) -> dict[str, str]:
    """Return {letter: text} of a question's choices."""
    if isinstance(value, dict):
        texts = {letter: text for letter, text in value.items() if text is not None}
    else:
        texts = dict(zip(ascii_uppercase, expect(value, list, name), strict=False))
        if len(texts) != len(value):
            raise RowError(f"{name}: more than {len(ascii_uppercase)} choices")
    return {str(letter): _word(text, f"{name}: {letter}") for letter, text in texts.items()}


def _answer(value: Any, name: str) -> str:
    """Return one answer: the most frequent of a list."""
    if not isinstance(value, list):
        return _word(value, name)
    words = []
    for i, item in enumerate(value):
        answer = item.get("answer") if isinstance(item, dict) else item
        words.append(_word(answer, f"{name}[{i}]"))
    if not words:
        raise RowError(f"{name} is empty")
    return Counter(words).most_common(1)[0][0]


def _word(value: Any, name: str) -> str:
    """Return a short answer as text. It may be a number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"{name}: expected a string, found {json_name(value)}")
    return text_of(value, name)
