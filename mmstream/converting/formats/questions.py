r"""Questions with answers, and preferences between answers. Part of step 2 of a conversion.

Questions about pictures and videos with short answers (vqa):

    {"image": "a.jpg", "question": "What is it?", "answer": "a cat"}
    {"image": "a.jpg", "question": "What is it?", "answers": ["cat", "cat", "a cat"]} VQAv2
    {"image": "a.jpg", "question": "Which?", "choices": ["a cat", "a dog"], "answer": 0} ScienceQA
    {"video": "a.mp4", "question": "Why?", "a0": "a cat", "a1": "a dog", "answer": 0}   NExT-QA
    {"image": "a.jpg", "question": "Which?", "A": "a cat", "B": "a dog", "answer": "A"} MMBench
    {"image": "a.jpg", "questions": ["Who?"], "answers": ["A cat."]}                    OCR-VQA
    {"image": "a.jpg", "query": "How many?", "label": ["14"]}                         ChartQA
    {"image": "a.jpg", "qa_pairs": [{"question": "...", "answer": "..."}]}
    {"video": "a.mp4", "QA": [{"i": "", "q": "What is it?", "a": "A cat."}]}          VideoChat2
    {"video_id": "v_x1", "q": "What is it?", "a": "A cat."}                           Video-ChatGPT

Of several answers the most frequent one is taken, and of those the first; all of them stay in the
``json``. Choices are written below the question as ``A. a cat``. The answer is then the letter. The
row may name it by the letter, by the text of the choice, or by a number, which counts from 0. A
video that has only an id is the file ``ID.mp4`` in the media root.

A question and its answer in keys of their own (instruction, qwen-vl):

    {"input": "Picture 1:<img>a.jpg</img>question", "output": "answer"}           Qwen-VL
    {"instruction": "question", "input": "", "output": "answer", "history": []}   Alpaca
    {"query": "question", "response": "answer"}                                   ms-swift
    {"instruction": "", "inputs": "question", "outputs": "answer",
     "image_base64_str": ["..."]}                                                 M3IT
    {"prompt": "question", "completion": "answer"}                                TRL

The Cauldron and FineVision (texts). What else is said of a pair, such as The Cauldron's ``source``,
stays under ``texts``:

    {"images": [{"bytes": ..., "path": null}], "texts": [{"user": "...", "assistant": "..."}]}

Preferences are pairs of answers, or one answer with a verdict (preference):

    {"prompt": "...", "chosen": "...", "rejected": "..."}                             TRL
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}              TRL
    {"chosen": [messages], "rejected": [messages]}                    TRL, the prompt in both
    {"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "..."}             HH-RLHF
    {"conversations": [...], "chosen": {turn}, "rejected": {turn}}    LLaMA-Factory, sharegpt
    {"instruction": "...", "input": "", "chosen": "...", "rejected": "..."}           alpaca
    {"messages": [... answer], "rejected_response": "..."}                            ms-swift
    {"image": "a.jpg", "question": "...", "chosen": "...", "rejected": "..."}         RLAIF-V
    {"prompt": "...", "completion": "...", "label": true}             TRL's KTO, kto_tag, label

Their canonical form is ``messages`` with the turns before the answer, and ``chosen`` and
``rejected`` with those of the answer; or ``completion`` and ``label`` where one answer has a
verdict.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import (
    DIALOGUE_FACTS,
    not_taken,
    pair_of,
    parse_dialogue,
    take_turns,
)
from mmstream.converting.formats.fields import (
    MEDIA_KEYS,
    ParsedRow,
    expect,
    first_key,
    has_media,
    is_set,
    json_name,
    text_of,
    value_of_text,
)
from mmstream.converting.formats.spans import medium_by_id
from mmstream.errors import escaped

LIST_KEYS = ("qa_pairs", "qas", "qa", "QA")
SHORT_ANSWER_KEYS = ("multiple_choice_answer", "answer", "answers")
_ANSWER_KEYS_OF = MappingProxyType(
    {
        "question": (*SHORT_ANSWER_KEYS, "correct_choice_idx"),
        "query": (*SHORT_ANSWER_KEYS, "label"),
        "q": ("a",),
    }
)
"""{key of a question: keys of its answer}, each in the order in which they are looked for."""
_CHOICE_KEYS = ("choices", "options")
_CHOICE_COLUMNS = (
    tuple(f"a{i}" for i in range(9)),
    tuple("ABCDEFGH"),
    tuple(f"choice_{letter}" for letter in "abcdefgh"),
    tuple(f"option_{letter}" for letter in "abcdefgh"),
)
"""Choices in keys of their own: at least the first two of such a row."""
_INDEX = re.compile(r"(-?\d{1,9})(?:\.0)?")
"""A table writes 1 as 1.0 where other cells of its column are empty."""
_LETTERED = re.compile(r"\(?([A-Z])[.:)] *(.+)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d.,]*\d")
_PICTURE_ID_KEYS = ("image_id", "imageId", "img_id", "imgid")
VQA_FACTS = DIALOGUE_FACTS.union(
    ("answers", "question_id", "question_type", "answer_type", "hint", "lecture", "solution"),
    ("video_id", "image_id", "human_or_machine", "direct_answers", "rationales"),
)


def is_vqa(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has questions with answers.

    A ``query`` with a ``label`` is one only beside a medium: rows of search have such keys too.
    """
    if first_key(row, LIST_KEYS) is not None or _has_parallel_lists(row):
        return True
    _, answer = _keys(row)
    is_label = answer == "label" and not (has_media(row) and isinstance(row["label"], str | list))
    return answer is not None and not is_label


def vqa(row: ParsedRow) -> Draft:
    """Return the draft of one or more questions with their answers."""
    video = None if has_media(row) else medium_by_id(row)
    if video is not None:
        row["video"] = video[0].path
    if _has_parallel_lists(row):
        pairs = zip(row.take("questions"), row.take("answers"), strict=True)
        turns = [
            turn
            for i, (question, answer) in enumerate(pairs)
            for turn in pair_of(
                text_of(question, f"questions[{i}]"), _answer(answer, f"answers[{i}]")
            )
        ]
        return parse_dialogue(row, {"messages": turns})
    key = first_key(row, LIST_KEYS)
    if key is None:
        return parse_dialogue(row, {"messages": _question(row, "")})
    items, turns = [], []
    for i, item in enumerate(expect(row.take(key), list, key)):
        items.append(ParsedRow(expect(item, dict, f"{key}[{i}]")))
        turns += _question(items[-1], f"{key}[{i}]: ")
    unread = not_taken(items)
    return parse_dialogue(row, {"messages": turns}, {key: unread} if any(unread) else {})


def _has_parallel_lists(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has as many answers as questions."""
    questions, answers = row.get("questions"), row.get("answers")
    is_both = isinstance(questions, list) and isinstance(answers, list)
    return is_both and 0 < len(row["questions"]) == len(row["answers"])


def require_picture(row: Mapping[str, Any]) -> None:
    """Refuse a question about a picture that the row names by an id alone.

    It would silently become a sample with its text only. A row with ``image: null`` says that there
    is none.
    """
    key = first_key(row, _PICTURE_ID_KEYS)
    if key is not None and not any(name in row for keys in MEDIA_KEYS.values() for name in keys):
        raise RowError(
            f"{key}: {escaped(row[key], 40)} is an id of a picture, and the row names no file; add "
            "its path as image, with a function of yours, or keep the text alone with --format vqa"
        )


def _keys(row: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the keys of a question and of its answer. None: the row has no pair of them."""
    for key, answers in _ANSWER_KEYS_OF.items():
        answer = first_key(row, answers)
        if row.get(key) is not None and answer is not None:
            return key, answer
    return "question", None


def _question(row: ParsedRow, name: str) -> list[dict[str, Any]]:
    """Take one question and its answer, and return their turns."""
    key, answer_key = _keys(row)
    question = text_of(row.take(key), f"{name}{key}")
    if answer_key is None:
        raise RowError(f"{name}no answer: expected answer or answers")
    answer = row["answers"] if answer_key == "answers" else row.take(answer_key)  # a list is kept
    if key == "q" and is_set(row.get("i")):
        question = f"{text_of(row.take('i'), f'{name}i')}\n{question}"
    choices, choice_keys = _choices_of(row, name)
    if choices:
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in choices.items())])
        row.taken |= choice_keys
        if not isinstance(answer, list):
            is_counted = answer_key == "correct_choice_idx" or "a0" in choice_keys
            answer = _letter_of(answer, choices, f"{name}{answer_key}", is_counted=is_counted)
    return pair_of(question, _answer(answer, f"{name}{answer_key}"))


def _letter_of(answer: Any, choices: dict[str, str], name: str, *, is_counted: bool) -> str:
    """Return the letter of the right choice.

    Args:
        answer: A letter, the text of a choice, both, or its number from 0.
        choices: {letter: text}.
        name: The answer's name in messages.
        is_counted: The keys of the row say that a number counts from 0.

    Raises:
        RowError: It is none of them, or a number that may be an answer as well as an index.
    """
    text = _word(answer, name).strip()
    lettered = _LETTERED.fullmatch(text)  # "B. dog", where B is "dog"
    if lettered and choices.get(lettered[1], "").strip() == lettered[2]:
        return lettered[1]
    index = _INDEX.fullmatch(text)
    if index is None or not is_counted or int(index[1]) >= len(choices):
        if text in choices:
            return text
        is_integer = isinstance(answer, int) and not isinstance(answer, bool)
        letters = [letter for letter, choice in choices.items() if choice.strip() == text]
        if letters and not is_integer:
            return letters[0]
    if index is None:
        letter = text.strip("(). ").upper()
        if letter not in choices:
            raise RowError(f"{name}: {escaped(text, 40)} is neither a choice nor the letter of one")
        return letter
    is_text = isinstance(answer, str) and not is_counted
    if is_text and any(_NUMBER.fullmatch(choice.strip()) for choice in choices.values()):
        raise RowError(
            f"{name}: {text} is not a choice, and not an index where choices are numbers; name "
            "the letter"
        )
    number = int(index[1])
    if not 0 <= number < len(choices):
        raise RowError(f"{name}: {number}, and there are {len(choices)} choices")
    return list(choices)[number]


def _choices_of(row: Mapping[str, Any], name: str) -> tuple[dict[str, str], set[str]]:
    """Return {letter: text} of a question's choices, and the keys that they come from."""
    key = first_key(row, _CHOICE_KEYS)
    if key is not None:
        return _choices(row[key], f"{name}{key}"), {key}
    for columns in _CHOICE_COLUMNS:
        keys = [column for column in columns if is_set(row.get(column))]
        if keys[:2] == list(columns[:2]):
            if keys != list(columns[: len(keys)]):
                raise RowError(f"{name}{keys[-1]}: a choice, and one before it is empty")
            texts = zip(ascii_uppercase, keys, strict=False)
            return {letter: _word(row[key], f"{name}{key}") for letter, key in texts}, set(keys)
    return {}, set()


def _choices(value: Any, name: str) -> dict[str, str]:
    """Return {letter: text} of a question's choices. MMMU has the list as a text."""
    value = value_of_text(value) if isinstance(value, str) else value
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
    if not value:
        raise RowError(f"{name} is empty")
    answers = [item.get("answer") if isinstance(item, dict) else item for item in value]
    counts = Counter(_word(answer, f"{name}[{i}]") for i, answer in enumerate(answers))
    return counts.most_common(1)[0][0]


def _word(value: Any, name: str) -> str:
    """Return a short answer as text. It may be a number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"{name}: expected a string, found {json_name(value)}")
    return text_of(value, name)


QUESTION_KEYS = ("instruction", "input", "inputs", "query", "prompt")
ANSWER_KEYS = ("output", "outputs", "response", "completion")


def is_instruction(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has a question and its answer in keys of these formats."""
    return not row.keys().isdisjoint(ANSWER_KEYS) and not row.keys().isdisjoint(QUESTION_KEYS)


def instruction(row: ParsedRow) -> Draft:
    """Return the draft of one question and its answer.

    All keys of `QUESTION_KEYS` that the row has make the question, one line each. ``history`` holds
    earlier pairs of question and answer.
    """
    turns = _take_question(row)
    key = first_key(row, ANSWER_KEYS) or next((k for k in ANSWER_KEYS if k in row), None)
    if not turns or key is None:
        raise RowError("expected a question in instruction or input, and an answer in output")
    answer = row.take(key)
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        return parse_dialogue(row, {"messages": turns + answer})  # TRL's messages
    turns.append({"role": "assistant", "content": text_of(answer, key)})
    return parse_dialogue(row, {"messages": turns})


def _take_question(row: ParsedRow) -> list[dict[str, Any]]:
    """Take the turns up to the question. Without a question there are none."""
    keys = [key for key in QUESTION_KEYS if row.get(key) is not None]
    if not keys:
        return []
    row.taken |= {*keys, "history"}
    turns: list[dict[str, Any]] = []
    for i, pair in enumerate(expect(row.get("history") or [], list, "history")):
        if len(expect(pair, list, f"history[{i}]")) != 2:
            raise RowError(f"history[{i}]: expected [question, answer], found {len(pair)} items")
        turns += pair_of(*pair)
    if len(keys) == 1 and isinstance(row[keys[0]], list) and is_set(row[keys[0]]):
        return [*turns, *row[keys[0]]]  # TRL's prompt: a list of messages
    question = "\n".join(filter(None, (expect(row[key], str, key) for key in keys)))
    return [*turns, {"role": "user", "content": question}]


TEXTS_FACTS = DIALOGUE_FACTS.union(
    ("relevance_ratings", "relevance_min", "formatting_ratings", "formatting_min"),
    ("visual_dependency_ratings", "visual_dependency_min"),
    ("image_correspondence_ratings", "image_correspondence_min"),
)


def is_texts(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has a list of questions and answers in ``texts``."""
    turns = row.get("texts")
    return isinstance(turns, list) and any(isinstance(turn, dict) for turn in turns)


def texts(row: ParsedRow) -> Draft:
    """Return the draft of images with questions and answers about them.

    Images come before the first question, as Idefics was trained.
    """
    items, turns = [], []
    for i, item in enumerate(expect(row.take("texts"), list, "texts")):
        name = f"texts[{i}]"
        items.append(ParsedRow(expect(item, dict, name)))
        question = expect(items[-1].take("user"), str, f"{name}: user")
        turns += pair_of(question, expect(items[-1].take("assistant"), str, f"{name}: assistant"))
    if not turns:
        raise RowError("texts is empty")
    unread = not_taken(items)
    return parse_dialogue(row, {"messages": turns}, {"texts": unread} if any(unread) else {})


TURN_KEYS = ("messages", "conversations", "conversation")
VERDICT_KEYS = ("kto_tag", "label")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_preference(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has preferences.

    A conversation that ends with an answer is none, even if it has a pair beside it: it is trained
    on as it is, and ``format="preference"`` reads the pair instead.
    """
    turns = next((row[key] for key in TURN_KEYS if isinstance(row.get(key), list)), None)
    if row.get("rejected_response") is not None or isinstance(row.get("kto_tag"), bool):
        return True
    if isinstance(row.get("label"), bool):
        has_pair = any(key in row for key in ("completion", "response", "output"))
        return bool(turns) or (has_pair and first_key(row, ANSWER_KEYS) is not None)
    has_pair = row.get("chosen") is not None and row.get("rejected") is not None
    return has_pair and (not turns or not _is_answer(turns[-1]))


def preference(row: ParsedRow) -> Draft:
    """Return the draft of a pair of answers, or of one answer with a verdict."""
    verdict = next((key for key in VERDICT_KEYS if isinstance(row.get(key), bool)), None)
    turns = _take_prompt(row)
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _pair(row, turns)
    if row.get("rejected_response") is not None:
        prompt, chosen = _split_answer(turns, row)
        rejected = _answer_turns(row.take("rejected_response"), "rejected_response")
        return parse_dialogue(row, {"messages": prompt, "chosen": chosen, "rejected": rejected})
    if verdict is None:
        raise RowError("no preference: expected chosen and rejected, or an answer with a label")
    prompt, completion = _split_answer(turns, row)
    dialogue = {"messages": prompt, "completion": completion}
    return parse_dialogue(row, dialogue, {"label": row.take(verdict)})


def _pair(row: ParsedRow, turns: list[Any]) -> Draft:
    chosen = _answer_turns(row.take("chosen"), "chosen")
    rejected = _answer_turns(row.take("rejected"), "rejected")
    if len(chosen) > 1 or len(rejected) > 1:  # both may begin with the prompt
        pairs = zip(chosen, rejected, strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_shared = min(num_shared, len(chosen) - 1, len(rejected) - 1)
        # A prompt of its own is the same turns once more, or their text.
        turns = chosen[:num_shared] or turns
        chosen, rejected = chosen[num_shared:], rejected[num_shared:]
    if not turns:
        raise RowError(
            "no prompt: expected prompt, messages or question, or turns that chosen and rejected "
            "share"
        )
    return parse_dialogue(row, {"messages": turns, "chosen": chosen, "rejected": rejected})


def _take_prompt(row: ParsedRow) -> list[Any]:
    """Take the turns of a row's prompt."""
    if any(isinstance(row.get(key), list) for key in TURN_KEYS):
        return take_turns(row, TURN_KEYS)
    turns = _take_question(row)
    if not turns and row.get("question") is not None:
        return [{"role": "user", "content": text_of(row.take("question"), "question")}]
    return turns


def _split_answer(turns: list[Any], row: ParsedRow) -> tuple[list[Any], list[Any]]:
    """Return the turns before the answer, and those of the answer. It may have a key of its own."""
    key = first_key(row, ANSWER_KEYS)
    if key is not None:
        return turns, _answer_turns(row.take(key), key)
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
    _, *turns = _SPEAKER.split(text)
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(turns[::2], turns[1::2], strict=True)
    ]
