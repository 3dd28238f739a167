"""Convert's second step, for conversations: turns of any dialect -> messages with content parts.

The canonical message is what chat templates of `transformers` take:

    {"role": "user", "content": [{"type": "image", "field": "0.jpg"}, {"type": "text", "text": ""}]}

Turns may be ShareGPT's (from, value) or OpenAI's (role, content); the content a string with
``<image>`` tokens or Qwen's ``<img>PATH</img>``, or a list of parts. A token takes the next path
of the row's list of that kind. White space around a token is dropped, other text is kept exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mmstream.converting.draft import KINDS, Draft, Kind, MediaRef, RowError
from mmstream.converting.fields import content_of, expect, media_of

__all__ = ["parse_dialogue"]

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # the model's own words, so it is trained on them
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
"""Parts of other types that have nothing to load and are kept as they are."""

_MARK = re.compile(
    r"(?P<label>(?:Picture|Audio) ?\d+: ?)?"
    r"(?:<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+)</audio>)"
    r"|<(?P<token>image|video|audio)>"
)


def parse_dialogue(row: dict[str, Any], turns: list[Any], used: set[str]) -> Draft:
    """Return the draft of a row whose turns lie in `turns`; `used` are the keys they came from.

    Media that no token asks for come first in the first user's turn. The label of Qwen's
    ``Picture 1:<img>...`` is dropped when the row has one picture, and kept as text when it has
    several, since the question may refer to it.

    Raises:
        RowError: a wrong type, an unknown role or part, or tokens that do not match the media.
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
    _drop_lone_label(messages)
    _match(messages, media)
    refs: list[MediaRef] = []
    for part in _media_parts(messages):
        path = part.pop("path")
        refs.append(MediaRef(part["type"], path if path is not None else _next(media, part)))
        part["field"] = len(refs) - 1
    if not any(message["content"] for message in messages):
        raise RowError("every turn is empty")
    return Draft(content_of(row, {"messages": messages}, refs, used), tuple(refs))


def _message(turn: Any, name: str) -> dict[str, Any]:
    """Return one turn as a message; media parts carry ``path``: None where a token stands."""
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
    """Yield the parts of a string with tokens and ``<img>`` tags."""
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
    """Return one part of a content list: OpenAI's, Qwen's and LLaMA-Factory's spellings."""
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
    found = next((k for k in keys if part.get(k) is not None), None)
    path = part[found] if found else None
    if isinstance(path, dict):
        path = path.get("url", path.get("path"))
    if found:
        expect(path, str, f"{name}: {found}")
    extra = {k: v for k, v in part.items() if k not in ("type", "field", found)}
    return {"type": PART_KINDS[type_], "field": -1, **extra, "path": path}


def _drop_lone_label(messages: list[dict[str, Any]]) -> None:
    """Drop the label of a row's only picture; keep the labels of several as text."""
    several = sum(1 for _ in _media_parts(messages)) > 1
    for message in messages:
        message["content"] = [
            {**part, "type": "text"} if part["type"] == "label" else part
            for part in message["content"]
            if several or part["type"] != "label"
        ]


def _match(messages: list[dict[str, Any]], media: dict[Kind, list[MediaRef]]) -> None:
    """Check that tokens and the row's media agree; without any token, put the media in front."""
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


def _next(media: dict[Kind, list[MediaRef]], part: dict[str, Any]) -> str:
    return media[part["type"]].pop(0).path
