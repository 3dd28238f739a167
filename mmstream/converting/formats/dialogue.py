"""Step 2 of a conversion, for conversations: turns of any format -> messages with content parts.

    rows -> FORMATS -> media -> shard

A canonical message is what the chat templates of `transformers` take:

    {"role": "user", "content": [{"type": "image", "field": "0.jpg"}, {"type": "text", "text": ""}]}

Turns may have ShareGPT's keys (from, value) or OpenAI's (role, content). Their content may be a
list of parts, or a string with ``<image>`` tokens or Qwen's ``<img>PATH</img>``. The n-th
``<image>`` token stands for the n-th path in the row's list of images; videos and audio likewise.
White space around a token is dropped. Other text is kept exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mmstream.converting.draft import KINDS, Draft, Kind, MediaRef, RowError
from mmstream.converting.formats.drafts import make_draft
from mmstream.converting.formats.fields import expect, is_set
from mmstream.converting.formats.grounding import fill_boxes, is_grounding
from mmstream.converting.formats.media_values import media_of, media_ref

__all__ = ["pair_of", "parse_dialogue", "rest_of", "turns_of"]

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # written by the model, so trained on
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

PART_KINDS: dict[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
TEXT_PARTS = ("text", "input_text", "output_text")
KEPT_PARTS = ("reasoning", "tool_call")
"""Further types of parts. They name no media file, and are kept as they are."""

FACTS = (
    *("tools", "source", "data_source", "dataset", "category", "type", "task", "width", "height"),
    *("license", "url", "objects", "split", "lang", "language", "chat_template_kwargs"),
)
"""Keys of a row that templates or people read, and that are kept."""

_MARK = re.compile(
    r"(?P<label>(?:Picture|Audio) ?\d+: ?)?"
    r"(?:<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+)</audio>)"
    r"|<(?P<token>image|video|audio)>"
)


def parse_dialogue(
    row: dict[str, Any],
    dialogue: dict[str, list[Any]],
    used: set[str],
    *,
    main: dict[str, Any] | None = None,
    kept: Sequence[str] = (),
) -> Draft:
    """Return the draft of a conversation.

    Media without a token come at the start of the first user's turn. Qwen's label, as in
    ``Picture 1:<img>...``, is dropped if the row has one image. With several images it is kept as
    text, because the question may refer to it.

    Args:
        row: The parsed row.
        dialogue: The turns: those of ``messages``, and of ``chosen`` and ``rejected`` or
            ``completion`` where the row is about preferences.
        used: The keys of the row that the turns came from.
        main: Further canonical keys.
        kept: See `make_draft`.

    Raises:
        RowError: A wrong type, an unknown role or part, or tokens that do not match the media.
    """
    media, media_keys = media_of(row)
    used = used | media_keys
    all_messages = {
        key: [
            _message(turn, f"turn {i + 1}" if key == "messages" else f"{key}, turn {i + 1}")
            for i, turn in enumerate(turns)
        ]
        for key, turns in dialogue.items()
    }
    messages = all_messages["messages"]
    system = row.get("system")
    if isinstance(system, str) and (not messages or messages[0]["role"] != "system"):
        used.add("system")
        if system.strip():
            parts = [{"type": "text", "text": system}]
            messages.insert(0, {"role": "system", "content": parts})
    every = [message for turns in all_messages.values() for message in turns]
    if not any(message["content"] for message in every):
        raise RowError("every turn is empty")
    _drop_single_label(every)
    _match_media(every, media)
    refs: list[MediaRef] = []
    for part in _media_parts(every):
        ref = part.pop("ref")
        refs.append(ref if ref is not None else media[part["type"]].pop(0))
        part["field"] = len(refs) - 1
    content: dict[str, Any] = {**all_messages, **(main or {})}
    if is_grounding(row.get("objects")):
        fill_boxes(every, row["objects"], refs)
    return make_draft(row, content, refs, used, kept=(*FACTS, *kept))


def turns_of(row: dict[str, Any], *keys: str) -> tuple[list[Any], set[str]]:
    """Return the row's list of turns, and the key that holds it.

    Pairs such as ``{"human": "question", "assistant": "answer"}`` become two turns. NeMo writes
    each text and each recording as a turn with a ``type``; those of one role become one turn.
    """
    key = next((k for k in keys if row.get(k) is not None), None)
    if key is None:
        raise RowError(f"no {keys[0]} in the row")
    turns = expect(row[key], list, key)
    if not turns:
        raise RowError(f"{key} is empty")
    if all(isinstance(turn, dict) and {"human", "assistant"} <= turn.keys() for turn in turns):
        pairs = [(turn["human"], turn["assistant"]) for turn in turns]
        turns = [turn for question, answer in pairs for turn in pair_of(question, answer)]
    if all(map(_is_part, turns)) and any(turn["type"] in KINDS for turn in turns):
        turns = [
            {
                "from": role,
                "content": [{k: v for k, v in turn.items() if k != "from"} for turn in group],
            }
            for role, group in groupby(turns, key=lambda turn: turn["from"])
        ]
    return turns, {key}


def _is_part(turn: Any) -> bool:
    """Tell whether a turn is a single part, as NeMo writes it: ``{"from", "value", "type"}``."""
    return isinstance(turn, dict) and "from" in turn and turn.get("type") in (*KINDS, "text")


def pair_of(question: Any, answer: Any) -> list[dict[str, Any]]:
    """Return the turns of a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rest_of(key: str, items: list[dict[str, Any]], read: set[str]) -> dict[str, Any]:
    """Return {key: what is left of each item without the keys that were read}, or nothing."""
    rest = [{k: v for k, v in item.items() if k not in read and is_set(v)} for item in items]
    return {key: rest} if any(rest) else {}


def _message(turn: Any, name: str) -> dict[str, Any]:
    """Return one turn as a message. Its media parts have a ``path``, or None for a token."""
    expect(turn, dict, name)
    role_key = "role" if "role" in turn else "from"
    content_key = "content" if "content" in turn else "value"
    role = expect(turn.get(role_key), str, f"{name}: {role_key}")
    if role.lower() not in ROLES:
        raise RowError(f"{name}: unknown role {role[:40]!r}")
    content = turn.get(content_key)
    if isinstance(content, str):
        parts = list(_split(content))
    elif isinstance(content, list):
        parts = [_part(part, f"{name}, part {i + 1}") for i, part in enumerate(content)]
    elif content is None and "tool_calls" in turn:
        parts = []
    else:
        expect(content, str, f"{name}: {content_key}")
    taken = ("role", "content", role_key, content_key)
    extra = {k: v for k, v in turn.items() if k not in taken and v is not None}
    return {"role": ROLES[role.lower()], "content": parts, **extra}


def _split(text: str) -> Iterator[dict[str, Any]]:
    """Yield the content parts of a string with tokens and ``<img>`` tags."""
    end = 0
    for mark in _MARK.finditer(text):
        if before := text[end : mark.start()].strip():
            yield {"type": "text", "text": before}
        if mark["label"]:
            yield {"type": "label", "text": mark["label"].strip()}
        kind: Any = mark["token"] or ("image" if mark["image"] else "audio")
        path = mark["image"] or mark["audio"]
        ref = media_ref(path, kind, "path") if path else None
        yield {"type": kind, "field": -1, "ref": ref}
        end = mark.end()
    rest = text[end:].strip() if end else text
    if rest:
        yield {"type": "text", "text": rest}


def _part(part: Any, name: str) -> dict[str, Any]:
    """Return a part of a content list as OpenAI, Qwen or LLaMA-Factory write it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    type_ = expect(expect(part, dict, name).get("type"), str, f"{name}: type")
    if type_ in TEXT_PARTS:
        key = "text" if part.get("text") is not None else "value"
        return {
            "type": "text",
            "text": expect(part.get(key), str, f"{name}: {key}"),
            **_extra(part, key),
        }
    if type_ in KEPT_PARTS:
        return dict(part)
    if type_ not in PART_KINDS:
        raise RowError(f"{name}: parts of type {type_[:40]!r} are not supported")
    kind = PART_KINDS[type_]
    keys = (type_, kind, f"{kind}_url", "value", "url", "path", "bytes", "data")
    path_key = next((k for k in keys if part.get(k) is not None), None)
    ref = None
    if path_key in ("bytes", "data"):
        ref = media_ref(part, kind, name)
        part = {k: v for k, v in part.items() if k not in ("bytes", "data", "path")}
    elif path_key is not None:
        ref = media_ref(part[path_key], kind, f"{name}: {path_key}")
    return {"type": kind, "field": -1, **_extra(part, path_key), "ref": ref}


def _extra(part: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Return what a part says besides its type and its main key. Parquet fills up with nulls."""
    taken = ("type", "field", "ref", key)
    return {k: v for k, v in part.items() if k not in taken and v is not None}


def _drop_single_label(messages: list[dict[str, Any]]) -> None:
    """Drop the label of a row's only image. Keep the labels of several images, as text."""
    keep_labels = sum(1 for _ in _media_parts(messages)) > 1
    for message in messages:
        message["content"] = [
            {**part, "type": "text"} if part["type"] == "label" else part
            for part in message["content"]
            if keep_labels or part["type"] != "label"
        ]


def _match_media(messages: list[dict[str, Any]], media: dict[Kind, list[MediaRef]]) -> None:
    """Check that there are as many tokens as media files.

    Media of a kind without tokens are added at the start of the first user's turn.
    """
    tokens = [
        part
        for part in _media_parts(messages)
        if part["ref"] is None and part["type"] in ("image", "video")
    ]
    videos = media.get("video", [])
    if videos and "image" not in media and len(tokens) == len(videos):
        for part in tokens:  # LLaVA-Video writes <image> where the video is
            part["type"] = "video"
    front: list[dict[str, Any]] = []
    for kind in KINDS:
        num_tokens = sum(p["type"] == kind and p["ref"] is None for p in _media_parts(messages))
        num_media = len(media.get(kind, ()))
        if num_tokens == 0:
            front += [{"type": kind, "field": -1, "ref": None} for _ in range(num_media)]
        elif num_tokens != num_media:
            raise RowError(f"{num_tokens} <{kind}> tokens but {num_media} {kind} files")
    if not front:
        return
    users = [message for message in messages if message["role"] == "user"]
    first = users[0] if users else messages[0]
    first["content"] = front + first["content"]


def _media_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (part for m in messages for part in m["content"] if part["type"] in KINDS)
