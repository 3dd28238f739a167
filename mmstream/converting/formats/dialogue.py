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
from collections.abc import Iterator
from typing import Any

from mmstream.converting.draft import KINDS, Draft, Kind, MediaRef, RowError
from mmstream.converting.formats.fields import expect, make_draft, media_of

__all__ = ["parse_dialogue"]

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
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
}
KEPT_PARTS = ("reasoning", "tool_call")
"""Further types of parts. They name no media file, and are kept as they are."""

_MARK = re.compile(
    r"(?P<label>(?:Picture|Audio) ?\d+: ?)?"
    r"(?:<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+)</audio>)"
    r"|<(?P<token>image|video|audio)>"
)


def parse_dialogue(row: dict[str, Any], turns: list[Any], used: set[str]) -> Draft:
    """Return the draft of a conversation.

    Media without a token come at the start of the first user's turn. Qwen's label, as in
    ``Picture 1:<img>...``, is dropped if the row has one image. With several images it is kept as
    text, because the question may refer to it.

    Args:
        row: The parsed row.
        turns: Its turns.
        used: The keys of the row that the turns came from.

    Raises:
        RowError: A wrong type, an unknown role or part, or tokens that do not match the media.
    """
    media, media_keys = media_of(row)
    used = used | media_keys
    messages = [_message(turn, f"turn {i + 1}") for i, turn in enumerate(turns)]
    system = row.get("system")
    if isinstance(system, str) and messages[0]["role"] != "system":
        used.add("system")
        if system.strip():
            parts = [{"type": "text", "text": system}]
            messages.insert(0, {"role": "system", "content": parts})
    _drop_single_label(messages)
    _match_media(messages, media)
    refs: list[MediaRef] = []
    for part in _media_parts(messages):
        path = part.pop("path")
        refs.append(MediaRef(part["type"], path if path is not None else _next_path(media, part)))
        part["field"] = len(refs) - 1
    if not any(message["content"] for message in messages):
        raise RowError("every turn is empty")
    if messages[-1]["role"] != "assistant" and {"chosen", "rejected"} <= row.keys():
        raise RowError(
            "no answer but the pair chosen and rejected, and no format trains on pairs; to train "
            "on the chosen answer, append it as the last turn"
        )
    return make_draft(row, {"messages": messages}, refs, used)


def _message(turn: Any, name: str) -> dict[str, Any]:
    """Return one turn as a message. Its media parts have a ``path``, or None for a token."""
    expect(turn, dict, name)
    role_key = "role" if "role" in turn else "from"
    content_key = "content" if "content" in turn else "value"
    role = expect(turn.get(role_key), str, f"{name}: {role_key}")
    if role not in ROLES:
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
    extra = {k: v for k, v in turn.items() if k not in ("role", "content", role_key, content_key)}
    return {"role": ROLES[role], "content": parts, **extra}


def _split(text: str) -> Iterator[dict[str, Any]]:
    """Yield the content parts of a string with tokens and ``<img>`` tags."""
    end = 0
    for mark in _MARK.finditer(text):
        if before := text[end : mark.start()].strip():
            yield {"type": "text", "text": before}
        if mark["label"]:
            yield {"type": "label", "text": mark["label"].strip()}
        kind = mark["token"] or ("image" if mark["image"] else "audio")
        path = mark["image"] or mark["audio"]
        yield {"type": kind, "field": -1, "path": path.strip() if path else None}
        end = mark.end()
    rest = text[end:].strip() if end else text
    if rest:
        yield {"type": "text", "text": rest}


def _part(part: Any, name: str) -> dict[str, Any]:
    """Return a part of a content list as OpenAI, Qwen or LLaMA-Factory write it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    type_ = expect(expect(part, dict, name).get("type"), str, f"{name}: type")
    if type_ == "text":
        key = "text" if "text" in part else "value"
        extra = {k: v for k, v in part.items() if k not in ("type", key)}
        return {"type": "text", "text": expect(part.get(key), str, f"{name}: {key}"), **extra}
    if type_ in KEPT_PARTS:
        return dict(part)
    if type_ not in PART_KINDS:
        raise RowError(f"{name}: parts of type {type_[:40]!r} are not supported")
    keys = (type_, PART_KINDS[type_], "value", "url", "path")
    path_key = next((k for k in keys if part.get(k) is not None), None)
    path = part[path_key] if path_key else None
    if isinstance(path, dict):
        path = path.get("url", path.get("path"))
    if path_key:
        expect(path, str, f"{name}: {path_key}")
    extra = {k: v for k, v in part.items() if k not in ("type", "field", path_key)}
    return {"type": PART_KINDS[type_], "field": -1, **extra, "path": path}


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
    front: list[dict[str, Any]] = []
    for kind in KINDS:
        num_tokens = sum(p["type"] == kind and p["path"] is None for p in _media_parts(messages))
        num_media = len(media.get(kind, ()))
        if num_tokens == 0:
            front += [{"type": kind, "field": -1, "path": None} for _ in range(num_media)]
        elif num_tokens != num_media:
            raise RowError(f"{num_tokens} <{kind}> tokens but {num_media} {kind} files")
    users = [message for message in messages if message["role"] == "user"]
    first = users[0] if users else messages[0]
    first["content"] = front + first["content"]


def _media_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (part for m in messages for part in m["content"] if part["type"] in KINDS)


def _next_path(media: dict[Kind, list[MediaRef]], part: dict[str, Any]) -> str:
    return media[part["type"]].pop(0).path
