"""Step 2 of a conversion: one parsed row -> one `Draft`. Each format has a pure function.

    rows -> FORMATS -> media -> shard

A row's format is recognised by its keys. Keys that the format does not use are kept in the json of
the sample, and the draft names them. The modules show rows of each format:

    dialogue.py     llava, messages
    questions.py    vqa, qwen-vl, instruction, texts, preference
    captions.py     captions, laion, labels, text, obelics, mmc4
    spans.py        spans, speech, lhotse
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.formats.captions import (
    ALT_KEYS,
    CAPTION_KEYS,
    LABEL_KEYS,
    MEDIA_FACTS,
    captions,
    is_karpathy,
    is_laion,
    is_obelics,
    labels,
    laion,
    mmc4,
    numbered_captions,
    obelics,
    text,
)
from mmstream.converting.formats.dialogue import parse_dialogue, turns_of
from mmstream.converting.formats.fields import (
    expect,
    first_key,
    has_media,
    is_base64_media,
    is_set,
    kind_by_name,
    make_draft,
    texts_of,
)
from mmstream.converting.formats.questions import (
    ANSWER_KEYS,
    LIST_KEYS,
    QUESTION_KEYS,
    SHORT_ANSWER_KEYS,
    TURN_KEYS,
    instruction,
    is_preference,
    is_texts,
    is_vqa,
    preference,
    require_picture,
    texts,
    vqa,
)
from mmstream.converting.formats.spans import (
    has_spans,
    is_cut_out,
    is_speech,
    lhotse,
    medium_by_id,
    spans,
    speech,
)
from mmstream.errors import escaped
from mmstream.media_types import Kind

MAX_NAMED_KEYS = 8
"""Keys of an unknown row that its reason for rejection names."""

CHAT_KEYS = frozenset(
    (
        *(*TURN_KEYS, *QUESTION_KEYS, *ANSWER_KEYS, *SHORT_ANSWER_KEYS, *LIST_KEYS),
        *("question", "questions", "texts", "chosen", "rejected"),
    )
)
"""Keys of questions, answers and turns. A row with one of them says more than a label."""

TEXT_ROW_KEYS = frozenset(("text", "id", "timestamp", "meta", "metadata"))
"""Keys of rows of plain text. No other format is recognised by one of them alone."""

OPTIONS = (
    "name the columns with --map, such as --map text=KEY, or the format with --format, or make "
    "known rows of them with a function of yours, --format module:function"
)


def _conversation(row: dict[str, Any], keys: tuple[str, ...]) -> Draft:
    turns, used = turns_of(row, *keys)
    return parse_dialogue(row, {"messages": turns}, used)


def _video_caption(row: dict[str, Any]) -> Draft:
    """Return the draft of a video by its id or address, with its captions: WebVid, VATEX."""
    key = first_key(row, ("name", *CAPTION_KEYS))
    url = row.get("contentUrl")
    by_id = medium_by_id(row)
    if key is None or (by_id is None and not isinstance(url, str)):
        raise RowError("expected a video in contentUrl or videoid, and a caption in name")
    if isinstance(url, str) and url:
        ref, used = MediaRef("video", url), {"contentUrl", key}
    else:
        assert by_id is not None
        ref, used = by_id[0], {by_id[1], key}
    caption_texts = texts_of(row[key], key)
    facts = (*MEDIA_FACTS, "videoid", "page_dir", "contentUrl", "chCap")
    content = {"captions": list(caption_texts)}
    return make_draft(row, content, [ref], used, kept=facts, texts=caption_texts)


_PARSERS: MappingProxyType[str, Callable[[dict[str, Any]], Draft]] = MappingProxyType(
    {
        "captions": captions,
        "llava": partial(_conversation, keys=("conversations", "conversation")),
        "messages": partial(_conversation, keys=("messages",)),
        "qwen-vl": instruction,
        "instruction": instruction,
        "text": text,
        "vqa": vqa,
        "texts": texts,
        "preference": preference,
        "laion": laion,
        "labels": labels,
        "obelics": obelics,
        "mmc4": mmc4,
        "mmc4-after": partial(mmc4, images_after=True),
        "mmc4-files": partial(mmc4, from_files=True),
        "mmc4-files-after": partial(mmc4, from_files=True, images_after=True),
        "speech": speech,
        "lhotse": lhotse,
        "spans": spans,
        "webvid": _video_caption,
    }
)

FORMATS = tuple(_PARSERS)
"""The formats that a caller may name."""


def draft_of(row: Any, format: str | None = None) -> Draft:
    """Return the draft of one parsed row.

    Args:
        row: Any JSON value. Bytes may stand where media are.
        format: One of `FORMATS`. None: the row is recognised by its keys.

    Raises:
        RowError: The row cannot become a sample; the message says why.
    """
    expect(row, dict, "row")
    if not row:
        raise RowError("empty row")
    name = format or recognise(row)
    draft = _PARSERS[name](row)
    if format is None:
        _refuse_unread_media(row, draft, name)
        if name == "vqa":
            require_picture(row)
    return msgspec.structs.replace(draft, format=name)


def _refuse_unread_media(row: dict[str, Any], draft: Draft, name: str) -> None:
    """Refuse a row without media whose media lie under a key that no format reads.

    It would silently become a sample with its text only.
    """
    if draft.media:
        return
    for key in draft.unread:
        value = row[key]
        for item in value if isinstance(value, list) else [value]:
            if _looks_like_media(item):
                shown = f"{len(item)} bytes" if isinstance(item, bytes) else "an object"
                if isinstance(item, str):
                    shown = repr(item[:200])
                raise RowError(
                    f"{key}: {shown} looks like a media file, but no format reads this key; "
                    f"rename it to image, video or audio, such as with --map image={key}, or keep "
                    f"it as it is with --format {name}"
                )


def _is_media(text: str) -> bool:
    r"""Tell whether a text is a path of a media file, its bytes in base64, or a ``data:`` URL.

    A path may have spaces: ``C:\My pictures\a.jpg``. Other URLs are often only mentioned.
    """
    path = text.strip().removeprefix("file://")
    is_path = "\n" not in path and "://" not in path and kind_by_name(path) is not None
    is_data_url = text.startswith(("data:image/", "data:audio/", "data:video/"))
    return is_path or is_base64_media(text) or is_data_url


def _looks_like_media(value: Any) -> bool:
    """Tell whether a value is a medium in any of the forms of `media_values`."""
    if isinstance(value, dict):  # a struct of Hugging Face
        return "bytes" in value and any(
            _looks_like_media(value.get(key)) for key in ("bytes", "path")
        )
    return isinstance(value, bytes) or (isinstance(value, str) and _is_media(value))


def _kind_of(medium: Any) -> Kind:
    """Return what the name of a medium says that it is; bytes without a name are an image."""
    name = medium.get("path") if isinstance(medium, dict) else medium
    if not isinstance(name, str):
        return "image"
    if name.startswith("data:audio/"):
        return "audio"
    return "video" if name.startswith("data:video/") else kind_by_name(name.strip()) or "image"


def recognise(row: dict[str, Any]) -> str:
    """Return the name of a row's format, judged by its keys.

    Raises:
        RowError: No format has these keys, or two formats have.
    """
    if "text" in row and row.keys() <= TEXT_ROW_KEYS:  # the last format, so it is asked for first
        return "text"
    dialogue = [key for key in TURN_KEYS if key in row and _has(row, key)]
    if len(dialogue) > 1:
        raise RowError(
            f"both {dialogue[0]} and {dialogue[1]} hold turns; say which with --format messages "
            "or --format llava"
        )
    if is_preference(row):
        return "preference"
    if dialogue:
        return "messages" if dialogue[0] == "messages" else "llava"
    return _by_lists(row) or _by_texts(row) or _by_media(row)


def _has(row: dict[str, Any], key: str) -> bool:
    """Tell whether a row has turns under a key. An empty list counts if nothing else is there."""
    return is_set(row[key]) or not any(is_set(row.get(other)) for other in TURN_KEYS)


def _by_lists(row: dict[str, Any]) -> str | None:
    """Recognise formats whose rows hold several texts."""
    if is_texts(row):
        return "texts"
    if is_obelics(row):
        return "obelics"
    if "text_list" in row and "image_info" in row:
        return "mmc4"
    if ("recording" in row and "supervisions" in row) or row.get("type") == "MixedCut":
        return "lhotse"
    return None


def _by_texts(row: dict[str, Any]) -> str | None:
    """Recognise questions with answers."""
    keys = row.keys()
    if not keys.isdisjoint(ANSWER_KEYS) and not keys.isdisjoint(QUESTION_KEYS):
        return "instruction" if "instruction" in row else "qwen-vl"
    return "vqa" if is_vqa(row) else None


def _by_media(row: dict[str, Any]) -> str:
    """Recognise media with texts, labels or nothing; and text alone."""
    has_medium = has_media(row)
    if is_cut_out(row):
        return "speech"
    if has_spans(row) and (has_medium or "path" in row or medium_by_id(row) is not None):
        return "spans"
    if is_speech(row):
        return "speech"
    if has_medium:
        has_text = any(key in row for key in CAPTION_KEYS) or bool(numbered_captions(row))
        return "captions" if has_text else _labels_or_refuse(row)
    has_id = medium_by_id(row) is not None
    if is_laion(row) and not has_id:  # else the address may be that of a page with the video
        return "laion"
    named = has_id or first_key(row, ("contentUrl",)) is not None
    if named and first_key(row, ("name", *CAPTION_KEYS)) is not None:
        return "webvid"
    if "captions" in row or "caption" in row or is_karpathy(row):
        return "captions"
    if "text" in row:
        return "text"
    hint = OPTIONS
    medium = next((key for key in row if _looks_like_media(row[key])), None)
    if medium is not None:
        key = escaped(medium, 40)
        hint = f"{key} looks like a media file: say --map {_kind_of(row[medium])}={key}"
    raise RowError(f"no known format has the keys {_keys(row)}; {hint}")


def _labels_or_refuse(row: dict[str, Any]) -> str:
    """Return "labels", unless the row has a text under a name that no format knows."""
    label = first_key(row, LABEL_KEYS)
    if label is not None and not isinstance(row[label], bool):
        return "labels"
    known = {*MEDIA_FACTS, "id", "image_id"}
    if not row.keys().isdisjoint(CHAT_KEYS):
        key = next(key for key in row if key in CHAT_KEYS)
        raise RowError(
            f"{key}: a question and no answer, or an answer alone; if KEY is the answer, say --map "
            "answer=KEY, if it is a caption --map text=KEY, else --format labels"
        )
    for key in labels(row).unread:
        texts = row[key] if isinstance(row[key], list) and row[key] else [row[key]]
        if key in known or not all(isinstance(text, str) for text in texts):
            continue
        if (" " in texts[0].strip() or key in ALT_KEYS) and "://" not in texts[0]:
            raise RowError(
                f"no text: expected text, caption or captions; if {escaped(key, 40)} is the text, "
                f"say --map text={escaped(key, 40)}, else --format labels"
            )
    return "labels"


def _keys(row: dict[str, Any]) -> str:
    return escaped(", ".join(map(str, list(row)[:MAX_NAMED_KEYS])), 200)
