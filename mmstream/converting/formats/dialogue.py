"""Step 2 of a conversion, for conversations: turns of any format -> messages with content parts.

    rows -> FORMATS -> media -> shard

A canonical message is what the chat templates of `transformers` take:

    {"role": "user", "content": [{"type": "image", "field": "0.jpg"}, {"type": "text", "text": ""}]}

Turns may have ShareGPT's keys (from, value) or OpenAI's (role, content). Their content may be a
list of parts, or a string with ``<image>`` tokens or Qwen's ``<img>PATH</img>``. The n-th
``<image>`` token stands for the n-th path in the row's list of images; videos and audio likewise.
White space around a token is dropped. Other text is kept exactly, Qwen's ``Picture 1:`` too.

A part may have an ``index``. Beside a medium it is the number of the path in the row's list, from
0. Where texts have one too, it is the place of the part in its turn.

Boxes of ms-swift's grounding rows become content parts:

    {"messages": [{"role": "user", "content": "<image>Find <ref-object>"},
                  {"role": "assistant", "content": "<bbox>"}],
     "images": ["a.jpg"], "objects": {"ref": ["a cat"], "bbox": [[10, 20, 110, 220]]}}

``<ref-object>`` is replaced by the next text of ``ref``. ``<bbox>`` becomes a part, because each
model writes boxes in another way:

    {"type": "bbox", "bbox": [10, 20, 110, 220], "unit": "pixels", "field": "0.jpg"}

A point has two coordinates. The unit is "pixels" of the original image, or "fraction" of its sides,
as ``bbox_type`` says ("real" or "norm1").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mmstream.converting.draft import KINDS, Draft, MediaRef, RowError
from mmstream.converting.formats.fields import (
    ParsedRow,
    expect,
    is_set,
    make_draft,
    media_of,
    media_ref,
    number_of,
    text_of,
)
from mmstream.decoding.text.turns import CALL, ROLES, join_calls
from mmstream.errors import DecodeError, escaped
from mmstream.media.frames import TIME_KINDS
from mmstream.media.types import Kind

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

DIALOGUE_FACTS = frozenset(
    (
        *("tools", "source", "data_source", "dataset", "category", "type", "task", "width"),
        *("height", "license", "url", "objects", "split", "lang", "language"),
        "chat_template_kwargs",
    )
)
"""Keys of a row that templates or people read, and that are kept."""

_MARK = re.compile(
    r"(?:<img>(?P<image>[^<>\n]+)</img>|<audio>(?P<audio>[^<>\n]+)</audio>)"
    r"|<(?P<token>image|video|audio)>"
)


def parse_dialogue(
    row: ParsedRow, dialogue: dict[str, list[Any]], main: dict[str, Any] | None = None
) -> Draft:
    """Return the draft of a conversation.

    Media without a token come at the start of the first user's turn.

    Args:
        row: The parsed row.
        dialogue: The turns: those of ``messages``, and of ``chosen`` and ``rejected`` or
            ``completion`` where the row is about preferences.
        main: Further canonical keys.

    Raises:
        RowError: A wrong type, an unknown role or part, or tokens that do not match the media.
    """
    media = media_of(row)
    all_messages = {
        key: _join_calls(
            [
                _message(turn, f"turn {i + 1}" if key == "messages" else f"{key}, turn {i + 1}")
                for i, turn in enumerate(turns)
            ]
        )
        for key, turns in dialogue.items()
    }
    messages = all_messages["messages"]
    system = row.get("system")
    if isinstance(system, str) and (not messages or messages[0]["role"] != "system"):
        row.take("system")
        if system.strip():
            parts = [{"type": "text", "text": system}]
            messages.insert(0, {"role": "system", "content": parts})
    every = [message for turns in all_messages.values() for message in turns]
    if not any(message["content"] for message in every):
        raise RowError("every turn is empty")
    _match_media(every, media)
    refs: list[MediaRef] = []
    for part in _media_parts(every):
        ref = part.pop("ref")
        refs.append(ref if ref is not None else media[part["type"]].pop(0))
        part["field"] = len(refs) - 1
    objects = row.get("objects")
    if isinstance(objects, dict) and "bbox" in objects:
        fill_boxes(every, objects, refs)
    return make_draft(row, {**all_messages, **(main or {})}, refs)


def conversation(row: ParsedRow, keys: tuple[str, ...]) -> Draft:
    """Return the draft of a conversation whose turns are in one of `keys`."""
    return parse_dialogue(row, {"messages": take_turns(row, keys)})


def take_turns(row: ParsedRow, keys: tuple[str, ...]) -> list[Any]:
    """Take the row's list of turns, from the first of the keys that it has.

    Pairs such as ``{"human": "question", "assistant": "answer"}`` become two turns. NeMo writes
    each text and each recording as a turn with a ``type``; those of one role become one turn.
    """
    key = next((k for k in keys if row.get(k) is not None), None)
    if key is None:
        raise RowError(f"no {keys[0]} in the row")
    turns = expect(row.take(key), list, key)
    if not turns:
        raise RowError(f"{key} is empty")
    if all(isinstance(turn, dict) and {"human", "assistant"} <= turn.keys() for turn in turns):
        pairs = [(turn["human"], turn["assistant"]) for turn in turns]
        turns = [turn for question, answer in pairs for turn in pair_of(question, answer)]
    is_of_parts = all(
        isinstance(turn, dict) and "from" in turn and turn.get("type") in (*KINDS, "text")
        for turn in turns
    )
    if is_of_parts and any(turn["type"] in KINDS for turn in turns):
        turns = [
            {
                "from": role,
                "content": [{k: v for k, v in turn.items() if k != "from"} for turn in group],
            }
            for role, group in groupby(turns, key=lambda turn: turn["from"])
        ]
    return turns


def pair_of(question: Any, answer: Any) -> list[dict[str, Any]]:
    """Return the turns of a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def not_taken(items: list[ParsedRow]) -> list[dict[str, Any]]:
    """Return what is left of items without the keys that were taken from any of them."""
    taken = set().union(*(item.taken for item in items))
    return [{k: v for k, v in item.items() if k not in taken and is_set(v)} for item in items]


def _join_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make answers with tool calls of turns that are calls."""
    try:
        return join_calls(messages)
    except DecodeError as error:
        raise RowError(str(error)) from None


def _message(turn: Any, name: str) -> dict[str, Any]:
    """Return one turn as a message. Its media parts have a ``path``, or None for a token."""
    expect(turn, dict, name)
    is_openai = turn.keys().isdisjoint(("from", "value"))
    role_key = "role" if "role" in turn or is_openai else "from"
    content_key = "content" if "content" in turn or is_openai else "value"
    role = expect(turn.get(role_key), str, f"{name}: {role_key}")
    if role.lower() not in ROLES:
        raise RowError(f"{name}: unknown role {role[:40]!r}")
    role = ROLES[role.lower()]
    content = turn.get(content_key)
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}] if role == CALL else list(_split(content))
    elif isinstance(content, list):
        parts = [_part(part, f"{name}, part {i + 1}") for i, part in enumerate(_in_order(content))]
    elif content is None and ("tool_calls" in turn or "function_call" in turn):
        parts = []
    else:
        expect(content, str, f"{name}: {content_key}")
    taken = ("role", "content", role_key, content_key)
    extra = {k: v for k, v in turn.items() if k not in taken and v is not None}
    return {"role": role, "content": parts, **extra}


def _split(text: str) -> Iterator[dict[str, Any]]:
    """Yield the content parts of a string with tokens and ``<img>`` tags."""
    end = 0
    for mark in _MARK.finditer(text):
        if before := text[end : mark.start()].strip():
            yield {"type": "text", "text": before}
        kind: Any = mark["token"] or ("image" if mark["image"] else "audio")
        path = mark["image"] or mark["audio"]
        ref = media_ref(path, kind, "path") if path else None
        yield {"type": kind, "field": -1, "ref": ref}
        end = mark.end()
    if after := text[end:].strip() if end else text:
        yield {"type": "text", "text": after}


def _in_order(parts: list[Any]) -> list[Any]:
    """Return the parts of a turn by their ``index``, if all of them have one, texts too."""
    is_numbered = all(isinstance(part, dict) and is_set(part.get("index")) for part in parts)
    if not is_numbered or all(part.get("type") in PART_KINDS for part in parts):
        return parts
    parts = sorted(parts, key=lambda part: part["index"])
    return [{key: value for key, value in part.items() if key != "index"} for part in parts]


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
        times = part
        if kind == "video" and not any(is_set(part.get(key)) for key in TIME_KINDS):
            times = {"sample_fps": part.get("fps")}  # as Qwen's tools name it
        ref = media_ref(part[path_key], kind, f"{name}: {path_key}", times)
        if ref.frames:  # which have their times with them now
            part = {k: v for k, v in part.items() if k not in ("fps", *TIME_KINDS)}
    return {"type": kind, "field": -1, **_extra(part, path_key), "ref": ref}


def _extra(part: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Return what a part says besides its type and its main key. Parquet fills up with nulls."""
    taken = ("type", "field", "ref", key)
    return {k: v for k, v in part.items() if k not in taken and v is not None}


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
        refs = media.get(kind, [])
        tokens = [p for p in _media_parts(messages) if p["type"] == kind and p["ref"] is None]
        indexes = [part.pop("index", None) for part in tokens]
        if any(index is not None for index in indexes):
            if set(indexes) != set(range(len(refs))):
                raise RowError(
                    f"{kind} parts of index {escaped(', '.join(map(str, indexes)))} for "
                    f"{len(refs)} {kind} files: expected each number from 0"
                )
            for part, index in zip(tokens, indexes, strict=True):
                part["ref"] = refs[int(index)]
        elif not tokens:
            front += [{"type": kind, "field": -1, "ref": None} for _ in refs]
        elif len(tokens) != len(refs):
            raise RowError(f"{len(tokens)} <{kind}> tokens but {len(refs)} {kind} files")
    if not front:
        return
    users = [message for message in messages if message["role"] == "user"]
    first = users[0] if users else messages[0]
    first["content"] = front + first["content"]


def _media_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (part for m in messages for part in m["content"] if part["type"] in KINDS)


UNITS = {None: "pixels", "": "pixels", "real": "pixels", "norm1": "fraction"}
_TOKEN = re.compile("<ref-object>|<bbox>")


def fill_boxes(
    messages: list[dict[str, Any]], objects: dict[str, Any], refs: Sequence[MediaRef]
) -> None:
    """Replace the tokens in the texts of messages, in place.

    Raises:
        RowError: There are fewer or more tokens than texts or boxes, or a box is none.
    """
    names = list(expect(objects.get("ref") or [], list, "objects: ref"))
    boxes = list(_boxes(objects, [i for i, ref in enumerate(refs) if ref.kind == "image"]))
    num_tokens = {"<ref-object>": 0, "<bbox>": 0}
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] != "text" or _TOKEN.search(part["text"]) is None:
                parts.append(part)
                continue
            text, end = "", 0
            for match in _TOKEN.finditer(part["text"]):
                text += part["text"][end : match.start()]
                end = match.end()
                number = num_tokens[match[0]]
                num_tokens[match[0]] += 1
                if match[0] == "<ref-object>" and number < len(names):
                    text += text_of(names[number], f"objects: ref[{number}]")
                elif match[0] == "<bbox>" and number < len(boxes):
                    parts += [{"type": "text", "text": text}] if text else []
                    parts.append(boxes[number])
                    text = ""
            text += part["text"][end:]
            parts += [{"type": "text", "text": text}] if text else []
        message["content"] = parts
    for token, values in (("<ref-object>", names), ("<bbox>", boxes)):
        # All boxes may be facts beside the text, but some of them are a mistake.
        if num_tokens[token] and num_tokens[token] != len(values):
            raise RowError(
                f"{num_tokens[token]} {token} tokens but {len(values)} of them in objects"
            )


def _boxes(objects: dict[str, Any], images: list[int]) -> Iterator[dict[str, Any]]:
    bbox_type = objects.get("bbox_type")
    if not isinstance(bbox_type, str | None) or bbox_type not in UNITS:
        raise RowError(f"objects: bbox_type {str(bbox_type)[:40]!r} is neither real nor norm1")
    image_ids = expect(objects.get("image_id") or [], list, "objects: image_id")
    for i, value in enumerate(expect(objects["bbox"], list, "objects: bbox")):
        name = f"objects: bbox[{i}]"
        box = [number_of(number, name) for number in expect(value, list, name)]
        if len(box) not in (2, 4):
            raise RowError(f"{name}: expected 2 or 4 numbers, found {len(box)}")
        if len(box) == 4:  # as ms-swift does: the corners in any order
            (left, right), (top, bottom) = sorted(box[::2]), sorted(box[1::2])
            box = [left, top, right, bottom]
        image_id = image_ids[i] if i < len(image_ids) else 0
        is_index = isinstance(image_id, int) and not isinstance(image_id, bool)
        if not is_index or not 0 <= image_id < len(images):
            raise RowError(f"{name}: of image {str(image_id)[:20]}, the row has {len(images)}")
        yield {
            "type": "bbox",
            "bbox": [int(number) if number.is_integer() else number for number in box],
            "unit": UNITS[bbox_type],
            "field": images[image_id],
        }
