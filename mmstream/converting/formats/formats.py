"""Step 2 of a conversion: one parsed row -> one `Draft`. Each format has a pure function.

    rows -> FORMATS -> media -> shard

    captions     {"image": "a.jpg", "text": "..."}; other keys: see `captions`
    llava        {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>..."}]}
    messages     {"images": ["a.jpg"], "messages": [{"role": "user", "content": "<image>..."}]}
    qwen-vl      {"input": "Picture 1:<img>a.jpg</img>question", "output": "answer"}
    instruction  {"image": "a.jpg", "instruction": "question", "input": "", "output": "answer"}
    text         {"text": "..."}

A row's format is recognised by its keys. Keys that the format does not use are kept in the json of
the sample.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats.dialogue import parse_dialogue
from mmstream.converting.formats.fields import expect, make_draft, media_of, texts_of

__all__ = ["FORMATS", "draft_of"]

FORMATS = ("captions", "llava", "messages", "qwen-vl", "instruction", "text")

CAPTION_KEYS = ("captions", "caption", "text")
QUESTION_KEYS = ("instruction", "input", "query", "prompt")
ANSWER_KEYS = ("output", "response")
_MEDIA_PATH = re.compile(
    r"(?!\w+://)\S+\.(jpe?g|png|webp|gif|bmp|wav|flac|mp3|ogg|m4a|mp4|mov|avi|mkv|webm)",
    re.IGNORECASE,
)
MAX_NAMED_KEYS = 8
"""Keys of an unknown row that its reason for rejection names."""


def draft_of(row: Any, format: str | None = None) -> Draft:
    """Return the draft of one parsed row.

    Args:
        row: Any JSON value.
        format: One of `FORMATS`. None: the row is recognised by its keys.

    Raises:
        RowError: The row cannot become a sample; the message says why.
    """
    expect(row, dict, "row")
    if not row:
        raise RowError("empty row")
    name = format or recognise(row)
    draft = _draft(row, name)
    if not draft.media and format is None:
        _refuse_unread_media(row)
    return replace(draft, format=name)


def _draft(row: dict[str, Any], format: str) -> Draft:
    match format:
        case "captions":
            return captions(row)
        case "llava":
            return parse_dialogue(row, *_turns(row, "conversations", "conversation"))
        case "messages":
            return parse_dialogue(row, *_turns(row, "messages"))
        case "qwen-vl" | "instruction":
            return instruction(row)
        case _:
            return text(row)


def _refuse_unread_media(row: dict[str, Any]) -> None:
    """Refuse a row that names a media file under a key that no format reads.

    It would silently become a sample with its text only.
    """
    for key, value in row.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and _MEDIA_PATH.fullmatch(item):
                raise RowError(
                    f"{key}: {item[:200]!r} looks like a media file, but no format reads this key; "
                    "rename it to image, video or audio"
                )


def recognise(row: dict[str, Any]) -> str:
    """Return the name of a row's format, judged by its keys.

    Raises:
        RowError: No format has these keys.
    """
    if "messages" in row:
        return "messages"
    if "conversations" in row or "conversation" in row:
        return "llava"
    if any(k in row for k in ANSWER_KEYS) and any(k in row for k in QUESTION_KEYS):
        return "instruction" if "instruction" in row else "qwen-vl"
    if media_of(row)[0] or "captions" in row or "caption" in row:
        return "captions"
    if "text" in row:
        return "text"
    names = ", ".join(list(row)[:MAX_NAMED_KEYS])
    raise RowError(f"no known format has the keys {names[:200]}")


def captions(row: dict[str, Any]) -> Draft:
    """Return the draft of one or more media files with captions: ``{"image", "text"}``.

    The captions are the first key of `CAPTION_KEYS` that the row has: a string or a list.
    """
    media, used = media_of(row)
    if not media:
        raise RowError("no media: expected a path in image, image_path, file_name or images")
    key = next((k for k in CAPTION_KEYS if row.get(k) is not None), None)
    if key is None:
        raise RowError("no text: expected text, caption or captions")
    texts = texts_of(row[key], key)
    refs = tuple(ref for refs in media.values() for ref in refs)
    return make_draft(row, {"captions": list(texts)}, refs, {*used, key}, texts=texts)


def text(row: dict[str, Any]) -> Draft:
    """Return the draft of plain text: ``{"text": "..."}``.

    The text goes to ``KEY.txt`` only, the other keys to ``KEY.json``.
    """
    value = expect(row.get("text"), str, "text")
    if not value.strip():
        raise RowError("text is empty")
    return make_draft(row, {}, (), {"text"}, texts=(value,))


def instruction(row: dict[str, Any]) -> Draft:
    """Return the draft of one question and its answer.

    These are Qwen-VL's input and output, Alpaca's instruction, or query and response. All keys of
    `QUESTION_KEYS` that the row has make the question, one line each. ``history`` holds earlier
    pairs of question and answer.
    """
    question_keys = [k for k in QUESTION_KEYS if row.get(k) is not None]
    answer_key = next((k for k in ANSWER_KEYS if row.get(k) is not None), None)
    if not question_keys or answer_key is None:
        raise RowError("expected a question in instruction or input, and an answer in output")
    question = "\n".join(filter(None, (expect(row[k], str, k) for k in question_keys)))
    answer = expect(row[answer_key], str, answer_key)
    if not answer.strip():
        raise RowError(f"{answer_key} is empty")
    turns: list[dict[str, Any]] = []
    for i, pair in enumerate(expect(row.get("history") or [], list, "history")):
        if len(expect(pair, list, f"history[{i}]")) != 2:
            raise RowError(f"history[{i}]: expected [question, answer], found {len(pair)} items")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return parse_dialogue(row, turns, {*question_keys, answer_key, "history"})


def _turns(row: dict[str, Any], *keys: str) -> tuple[list[Any], set[str]]:
    """Return the row's list of turns and the key that holds it."""
    key = next((k for k in keys if k in row), None)
    if key is None:
        raise RowError(f"no {keys[0]} in the row")
    turns = expect(row[key], list, key)
    if not turns:
        raise RowError(f"{key} is empty")
    return turns, {key}
