"""Step 2 of a conversion: one parsed row -> one `Draft`. Each format has a pure function.

    one row -> columns, function, tags of the caller -> FORMAT -> `Draft` -> media

A row's format is recognised by its keys: `_RECOGNISED` has the order of asking. A `ParsedRow`
remembers the keys that the format takes. The other keys are kept in the json of the sample, and the
draft names them. The modules show rows of each format:

    dialogue.py     llava, messages
    questions.py    vqa, qwen-vl, instruction, texts, preference
    captions.py     captions, laion, labels, text, obelics, mmc4
    spans.py        spans, speech, lhotse, webvid

Other packages add formats by the entry point ``mmstream.row_formats``, whose name is that of the
format: see `caller.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from mmstream.converting.draft import Draft, RowError
from mmstream.converting.formats import captions, dialogue, questions, spans
from mmstream.converting.formats.fields import (
    ParsedRow,
    expect,
    first_key,
    has_media,
    is_base64_media,
    is_set,
    kind_by_name,
)
from mmstream.errors import escaped

MAX_NAMED_KEYS = 8
"""Keys of an unknown row that its reason for rejection names."""

CHAT_KEYS = frozenset(
    (
        *(*questions.TURN_KEYS, *questions.QUESTION_KEYS, *questions.ANSWER_KEYS),
        *(*questions.SHORT_ANSWER_KEYS, *questions.LIST_KEYS),
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


class RowFormat(NamedTuple):
    """A format of rows."""

    read: Callable[[ParsedRow], Draft]
    facts: frozenset[str]
    """Keys that its rows are known to have besides those that are read. They are kept."""


_CHAT_FACTS = dialogue.DIALOGUE_FACTS
FORMATS: Mapping[str, RowFormat] = MappingProxyType(
    {
        "captions": RowFormat(captions.captions, captions.MEDIA_FACTS),
        "llava": RowFormat(
            partial(dialogue.conversation, keys=("conversations", "conversation")), _CHAT_FACTS
        ),
        "messages": RowFormat(partial(dialogue.conversation, keys=("messages",)), _CHAT_FACTS),
        "qwen-vl": RowFormat(questions.instruction, _CHAT_FACTS),
        "instruction": RowFormat(questions.instruction, _CHAT_FACTS),
        "text": RowFormat(captions.text, captions.TEXT_FACTS),
        "vqa": RowFormat(questions.vqa, questions.VQA_FACTS),
        "texts": RowFormat(questions.texts, questions.TEXTS_FACTS),
        "preference": RowFormat(questions.preference, _CHAT_FACTS),
        "laion": RowFormat(captions.laion, captions.LAION_FACTS),
        "labels": RowFormat(captions.labels, captions.LABEL_FACTS),
        "obelics": RowFormat(captions.obelics, captions.OBELICS_FACTS),
        **{
            f"mmc4{'-files' * from_files}{'-after' * images_after}": RowFormat(
                partial(captions.mmc4, from_files=from_files, images_after=images_after),
                captions.MMC4_FACTS,
            )
            for from_files in (False, True)
            for images_after in (False, True)
        },
        "speech": RowFormat(spans.speech, spans.SPEECH_FACTS),
        "lhotse": RowFormat(spans.lhotse, spans.LHOTSE_FACTS),
        "spans": RowFormat(spans.spans, spans.SPAN_FACTS),
        "webvid": RowFormat(spans.webvid, spans.WEBVID_FACTS),
    }
)
"""{name: format} of the formats that a caller may name."""


def _has_turns(row: Mapping[str, Any], *keys: str) -> bool:
    """Tell whether a row has turns under a key. An empty list counts if nothing else is there."""
    if row.keys().isdisjoint(keys):
        return False
    is_empty = first_key(row, questions.TURN_KEYS) is None
    return any(key in row and (is_empty or is_set(row[key])) for key in keys)


def _has_spans_of_medium(row: Mapping[str, Any]) -> bool:
    return spans.has_spans(row) and (
        has_media(row) or "path" in row or spans.medium_by_id(row) is not None
    )


_RECOGNISED: tuple[tuple[Callable[[dict[str, Any]], bool], str], ...] = (
    # The text alone is the last format, and its rows are the most: so they are asked for first.
    (lambda row: "text" in row and row.keys() <= TEXT_ROW_KEYS, "text"),
    (questions.is_preference, "preference"),
    (lambda row: _has_turns(row, "messages"), "messages"),
    (lambda row: _has_turns(row, "conversations", "conversation"), "llava"),
    (questions.is_texts, "texts"),
    (captions.is_obelics, "obelics"),
    (lambda row: "text_list" in row and "image_info" in row, "mmc4"),
    (spans.is_lhotse, "lhotse"),
    (lambda row: questions.is_instruction(row) and "instruction" in row, "instruction"),
    (questions.is_instruction, "qwen-vl"),
    (questions.is_vqa, "vqa"),
    (spans.is_cut_out, "speech"),
    (_has_spans_of_medium, "spans"),
    (spans.is_speech, "speech"),
    (lambda row: has_media(row) and captions.has_caption(row), "captions"),
    (has_media, "labels"),
    # With an id of a video, the address may be that of a page with it.
    (lambda row: captions.is_laion(row) and spans.medium_by_id(row) is None, "laion"),
    (spans.is_webvid, "webvid"),
    (lambda row: not row.keys().isdisjoint(("captions", "caption")), "captions"),
    (captions.is_karpathy, "captions"),
    (lambda row: "text" in row, "text"),
)
"""(test of a row, its format), in the order of asking: the first test that fits decides."""


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
    read, facts = FORMATS[name]
    draft = read(ParsedRow(row, facts, name))
    if format is None:
        if not draft.media and draft.unread:
            _refuse_unread_media(row, draft)
        if name == "vqa":
            questions.require_picture(row)
    return draft


def recognise(row: dict[str, Any]) -> str:
    """Return the name of a row's format, judged by its keys.

    Raises:
        RowError: No format has these keys, or two formats have.
    """
    for recognises, name in _RECOGNISED:
        if recognises(row):
            _require_clear(row, name)
            return name
    raise _unknown(row)


def _require_clear(row: dict[str, Any], name: str) -> None:
    """Refuse a row that two formats of turns have, or whose text lies under an unknown name."""
    if name in ("messages", "llava", "preference"):
        turns = [key for key in questions.TURN_KEYS if _has_turns(row, key)]
        if len(turns) > 1:
            raise RowError(
                f"both {turns[0]} and {turns[1]} hold turns; say which with --format messages or "
                "--format llava"
            )
    if name == "labels":
        _refuse_lost_text(row)


def _unknown(row: dict[str, Any]) -> RowError:
    keys = escaped(", ".join(map(str, list(row)[:MAX_NAMED_KEYS])), 200)
    return RowError(f"no known format has the keys {keys}; {OPTIONS}")


def _refuse_lost_text(row: dict[str, Any]) -> None:
    """Refuse a row of media that has a text under a name that no format knows."""
    label = first_key(row, captions.LABEL_KEYS)
    if label is not None and not isinstance(row[label], bool):
        return
    if (key := next((key for key in row if key in CHAT_KEYS), None)) is not None:
        raise RowError(
            f"{key}: a question and no answer, an answer alone, or lists of unequal length; if KEY "
            "is the answer, say --map answer=KEY, if it is a caption --map text=KEY, else --format "
            "labels"
        )
    for key in captions.labels(ParsedRow(row, captions.LABEL_FACTS | {"image_id"})).unread:
        texts = row[key] if isinstance(row[key], list) and row[key] else [row[key]]
        if not all(isinstance(text, str) for text in texts):
            continue
        if (" " in texts[0].strip() or key in captions.ALT_KEYS) and "://" not in texts[0]:
            raise RowError(
                f"no text: expected text, caption or captions; if {escaped(key, 40)} is the text, "
                f"say --map text={escaped(key, 40)}, else --format labels"
            )


def _refuse_unread_media(row: dict[str, Any], draft: Draft) -> None:
    """Refuse a row without media whose media lie under a key that no format reads.

    It would silently become a sample with its text only.
    """
    for key in draft.unread:
        values = row[key] if isinstance(row[key], list) else [row[key]]
        value = next(filter(_looks_like_media, values), None)
        if value is not None:
            medium = f"{len(value)} bytes" if isinstance(value, bytes) else "an object"
            medium = repr(value[:200]) if isinstance(value, str) else medium
            raise RowError(
                f"{key}: {medium} looks like a media file, but no format reads this key; rename it "
                f"to image, video or audio, such as with --map image={key}, or keep it as it is "
                f"with --format {draft.format}"
            )


def _looks_like_media(value: Any) -> bool:
    r"""Tell whether a value is a medium in any of the forms of `fields.media_of`.

    A text is one if it is a path, base64 or a ``data:`` URL. A path may have spaces:
    ``C:\My pictures\a.jpg``. Other URLs are often only mentioned.
    """
    if isinstance(value, dict):  # a struct of Hugging Face
        return "bytes" in value and any(
            _looks_like_media(value.get(key)) for key in ("bytes", "path")
        )
    if not isinstance(value, str):
        return isinstance(value, bytes)
    path = value.strip().removeprefix("file://")
    is_path = "\n" not in path and "://" not in path and kind_by_name(path) is not None
    is_data_url = value.startswith(("data:image/", "data:audio/", "data:video/"))
    return is_path or is_base64_media(value) or is_data_url
