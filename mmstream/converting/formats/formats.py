"""Step 2 of a conversion: one parsed row -> one `Draft`. Each format has a pure function.

    one row -> columns map -> the caller's function -> tar -> tags -> FORMAT -> `Draft` -> media

A row's format is recognised by its keys. Keys that the format does not use are kept in the json of
the sample, and the draft names them. The modules show rows of each format:

    dialogue.py     llava, messages
    questions.py    vqa, qwen-vl, instruction, texts, preference
    captions.py     captions, laion, labels, text, obelics, mmc4
    spans.py        spans, speech, lhotse

`RowFormat` is how the caller says that rows are to be understood. It is picklable, so that the
workers of any engine understand rows alike. The caller's function may be named as
``module:function``. A module that lies in the working folder is imported from there, as `python -m`
does.

LLaMA-Factory's ``dataset_info.json`` says which columns and tags the rows of a file have:

    {"my_chats": {"file_name": "chats.json", "formatting": "sharegpt",
                  "columns": {"messages": "talk", "images": "pics"},
                  "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "me"}}}

The entry of a file of rows is the one with its ``file_name``, or the one that the caller names. A
row is rewritten to the names that `instruction`, `messages` and `preference` know. Its other
columns are kept. The defaults are LLaMA-Factory's own: without ``columns`` those of Alpaca or
ShareGPT, and with ``columns`` only those that are named.

The sound of some rows is a member of a tar beside their file:

    tarred_audio_manifest.json  audio_0.tar  audio_1.tar             NeMo's tarred data sets
        {"audio_filepath": "a.wav", "text": "...", "duration": 3.2, "shard_id": 1}
    cuts.000007.jsonl.gz  recording.000007.tar                       Shar of Lhotse
        {"id": "c1", "recording": {"sources": [{"type": "shar", "source": ""}]}, ...}

Neither row names its tar. Here it gets the name, as ``tar://MEMBER::TAR``; `speech` and `spans` do
the rest.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import msgspec

from mmstream.converting.draft import Draft, LeftOutError, MediaRef, RowError, unreadable
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
    MEDIA_KEYS,
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
from mmstream.errors import BUGS, ConfigError, MMStreamError, escaped
from mmstream.media.types import Kind

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
    """Tell whether a value is a medium in any of the forms of `fields.media_of`."""
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


_URL_KEYS = {"url", "URL", "contentUrl", "path", "videoid", "videoID", "YoutubeID"}
"""Names of media that single formats know, besides `MEDIA_KEYS`."""


@dataclass(frozen=True)
class RowFormat:
    """How rows become drafts: the options `format`, `row` and `columns` of a conversion.

    Attributes:
        name: One of `FORMATS`, or a function of yours as ``module:function``. None: each row is
            recognised by its keys.
        columns: Pairs (name that the formats know, name in the rows), such as ("image", "photo").
        function: From a row to a row of any known format, or to None to leave it out.
        dataset_info: LLaMA-Factory's file, as ``FILE`` or ``FILE#NAME``; see `tags`. It is read
            once, when this is made.

    Raises:
        ConfigError: An unknown format, a column twice, a map whose sides are swapped, or a function
            that cannot be imported.
    """

    name: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    function: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    dataset_info: str | None = None
    tags: Mapping[str, Tags] | None = None

    def __post_init__(self) -> None:
        if self.dataset_info is not None and self.tags is None:
            if self.name in FORMATS:
                raise ConfigError(
                    f"format={self.name!r} and dataset_info: the file says the format"
                )
            object.__setattr__(self, "tags", read_tags(self.dataset_info))
        if self.name is not None and ":" in self.name:
            if self.function is not None:
                raise ConfigError(f"format={self.name!r} and row={self.function!r}: give one")
            object.__setattr__(self, "function", load_function(self.name))
        elif self.name is not None and self.name not in FORMATS:
            raise ConfigError(
                f"format={self.name!r}: must be one of {', '.join(FORMATS)}, or a function of "
                "yours as module:function"
            )
        self._check_columns()

    def _check_columns(self) -> None:
        for i in (0, 1):
            names = [column[i] for column in self.columns]
            for name in names:
                if not isinstance(name, str) or not name or names.count(name) > 1:
                    raise ConfigError(f"columns: {name!r} is no name of a column, or twice there")
        media = {key for keys in MEDIA_KEYS.values() for key in keys}
        if self.function is not None or any(ours in media | _URL_KEYS for ours, _ in self.columns):
            return
        for ours, theirs in self.columns:
            if theirs in media:
                raise ConfigError(
                    f"columns: {ours}={theirs}: would hide {theirs} from the formats, which do not "
                    f"read {ours}; the name that the formats know comes first: {theirs}={ours}"
                )

    def draft(self, value: Any, file: str = "") -> Draft:
        """Return the draft of one parsed row.

        Args:
            value: The row.
            file: Name of its file, which selects the entry of `dataset_info`, and the tar beside
                it that holds the sound.

        Raises:
            RowError: The row cannot become a sample; the message says why.
            LeftOutError: The caller's function returned None.
            NameError, ImportError, AttributeError, AssertionError, MemoryError: The caller's
                function has a bug. It stops the conversion.
        """
        original = value if isinstance(value, dict) else {}
        if isinstance(value, dict):
            if self.columns:
                value = self._renamed(value)
            if self.function is not None:
                value = self._called(value)
        format = self.name if self.name is not None and self.name in FORMATS else None
        try:
            if isinstance(value, dict):
                value = with_tar(value, file)
                if self.tags is not None:
                    value, format = retagged(value, self._tags_of(file))
            draft = draft_of(value, format)
        except MMStreamError:
            raise
        except Exception as error:  # a row that no format expects: it ends itself, and no other
            raise unreadable("row", error) from error
        if self.columns and draft.unread:
            named = {ours: theirs for ours, theirs in self.columns if theirs in original}
            unread = tuple(named.get(key, key) for key in draft.unread)
            draft = msgspec.structs.replace(draft, unread=unread)
        if self.function is not None:
            self._require_json(draft)
        return draft

    def _require_json(self, draft: Draft) -> None:
        """Raise RowError if the caller's function returned what no file of rows can hold."""
        try:
            msgspec.json.encode((draft.content, draft.texts))
        except Exception as error:  # of a value whose methods raise, too
            name = short_name(self.function) if self.function is not None else ""
            raise RowError(f"{name}(): returned what is not JSON: {escaped(error, 200)}") from None

    def _tags_of(self, file: str) -> Tags:
        """Return the entry of `dataset_info` for a file of rows."""
        assert self.tags is not None
        tags = self.tags.get("") or self.tags.get(Path(file).name)
        if tags is None:
            raise ConfigError(
                f"{self.dataset_info}: has no entry with the file_name {Path(file).name}; name one "
                f"as {self.dataset_info}#NAME"
            )
        return tags

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that was named is imported by its name where this is unpickled.
        function = None if self.name is not None and ":" in self.name else self.function
        return type(self), (self.name, self.columns, function, self.dataset_info, self.tags)

    def require_portable(self) -> None:
        """Raise ConfigError if other processes could not import the caller's function."""
        if self.function is None:
            return
        try:
            pickle.dumps(self)
        except Exception as error:  # pickle raises many types
            raise self._not_portable(str(error)) from None
        main = sys.modules["__main__"]
        if self.function.__module__ == "__main__" and getattr(main, "__file__", None) is None:
            raise self._not_portable("it was written in a notebook or at a prompt")

    def _not_portable(self, reason: str) -> ConfigError:
        name = function_name(self.function) if self.function is not None else ""
        return ConfigError(
            f"row={name}: worker processes cannot import it ({reason}); define it in a module, "
            "or use num_workers=1"
        )

    def plan(self) -> dict[str, Any]:
        """Return what the bytes of the output depend on, as JSON. Without options it is empty."""
        plan: dict[str, Any] = {}
        if self.columns:
            plan["columns"] = dict(sorted(self.columns))
        if self.function is not None:
            plan["row"] = function_name(self.function)
            plan["row_sha256"] = source_sha256(self.function)
        if self.tags is not None:
            entries = msgspec.json.encode(msgspec.to_builtins(self.tags), order="sorted")
            plan["dataset_info_sha256"] = hashlib.sha256(entries).hexdigest()
        return plan

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with the caller's columns under the names that the formats know."""
        names = {theirs: ours for ours, theirs in self.columns if theirs in row}
        if not names:
            return row
        hidden = {ours: f"row_{ours}" for ours in names.values() if ours in row}
        return {(hidden | names).get(key, key): value for key, value in row.items()}

    def _called(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what the caller's function makes of a row."""
        assert self.function is not None
        name = short_name(self.function)
        try:
            value: Mapping[str, Any] | None = self.function(row)
        except (RowError, *BUGS):
            raise
        except Exception as error:
            reason = f"{name}(): {type(error).__name__}: {escaped(error)}"
            raise RowError(f"{reason}{_place_of(error)}") from error
        if value is None:
            raise LeftOutError(f"left out by {name}()")
        if not isinstance(value, dict):
            raise RowError(f"{name}(): returned no dict but {type(value).__name__}")
        return value


def _place_of(error: Exception) -> str:
    """Return the line that raised an error in the file of the caller's function, in brackets."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)][1:]
    own = [(Path(file).name, line) for file, line in frames if file == frames[0][0]]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def load_function(name: str) -> Callable[..., Any]:
    """Import a function by its name, such as ``my_rows:caption``.

    Raises:
        ConfigError: There is no such module, it has no such name, or that is no function. What the
            module raises when it is imported passes.
    """
    value = load_object(name)
    if not callable(value):
        raise ConfigError(f"{name}: is {type(value).__name__}, and no function")
    return value  # type: ignore[no-any-return]


def load_object(name: str) -> Any:
    """Import an object by its name, such as ``my_rows:caption``.

    Raises:
        ConfigError: There is no such module, or it has no such name. What the module raises when it
            is imported passes.
    """
    module_name, _, attributes = name.partition(":")
    words = (*module_name.split("."), *attributes.split("."))
    if not all(word.isidentifier() for word in words):
        raise ConfigError(f"{name}: is no name such as module:function")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # behind the others, so that nothing there hides an installed one
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise
        raise ConfigError(
            f"{name}: no module {module_name!r} here or among the installed ones"
        ) from None
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{name}: the module has no {attributes!r}")
        value = getattr(value, attribute)
    return value


def function_name(function: Callable[..., Any]) -> str:
    """Return ``module:function``, as plans name it."""
    return f"{function.__module__}:{short_name(function)}"


def short_name(function: Callable[..., Any]) -> str:
    """Return the name that the caller gave a function, as the reasons of rejects name it."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def source_sha256(function: Callable[..., Any]) -> str:
    """Return the checksum of the code of a function: of its module, or of it alone in a script.

    A plan saves it, so that a conversion does not go on with another function than it began with.
    """
    in_script = function.__module__ == "__main__"
    try:
        source = inspect.getsource(function if in_script else sys.modules[function.__module__])
    except (OSError, TypeError):  # written at a prompt, or not in Python
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()


COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "images": "images",
    "videos": "videos",
    "audios": "audios",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "kto_tag",
}
"""LLaMA-Factory's names of columns, and the names that our formats know."""

DEFAULT_COLUMNS = ("prompt", "query", "response", "messages")
"""Columns that are read when the entry names none."""

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
MAX_BYTES = 16 << 20


class Tags(msgspec.Struct, frozen=True):
    """One entry of ``dataset_info.json``."""

    file_name: str = ""
    formatting: str = "alpaca"
    ranking: bool = False
    columns: Mapping[str, str | None] | None = None
    tags: Mapping[str, str | None] | None = None

    def column(self, name: str) -> str | None:
        """Return the name of a column in the rows, or None if it is not read."""
        if self.columns is None:
            return COLUMNS[name] if name in DEFAULT_COLUMNS else None
        return self.columns.get(name)

    def tag(self, name: str) -> str:
        """Return a key of a turn, or the value of its role."""
        return (self.tags or {}).get(name) or TAGS[name]


def read_tags(source: str) -> dict[str, Tags]:
    """Return {name of the file of rows: its entry}.

    Args:
        source: ``FILE``, or ``FILE#NAME`` for one entry, which then holds for all rows. That one
            is returned under the name "".

    Raises:
        ConfigError: The file is no dataset_info.json, or it has no such entry.
        FileNotFoundError: There is no such file.
    """
    file, _, name = source.partition("#")
    path = Path(file)
    if path.is_dir():
        path = path / "dataset_info.json"
    if not path.is_file():
        raise FileNotFoundError(f"{file}: no such dataset_info.json")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{file}: too large for a dataset_info.json")
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not LLaMA-Factory's dataset_info.json: {error}") from None
    if name:
        if name not in entries:
            known = escaped(", ".join(entries), 200)
            raise ConfigError(f"{file}: has no entry {name!r}, but {known}")
        return {"": _entry(entries[name], f"{file}#{name}")}
    tags: dict[str, Tags] = {}
    for key, entry in entries.items():
        if not isinstance(entry.get("file_name"), str):
            continue  # on a hub, not a file
        parsed = _entry(entry, f"{file}#{key}")
        base = Path(parsed.file_name).name
        if base in tags and tags[base] != parsed:
            raise ConfigError(f"{file}: two entries have the file {base}; name one: {file}#{key}")
        tags[base] = parsed
    return tags


def _entry(entry: dict[str, Any], name: str) -> Tags:
    try:
        tags = msgspec.convert(entry, Tags)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: {error}") from None
    if tags.formatting not in ("alpaca", "sharegpt", "openai"):
        raise ConfigError(f"{name}: formatting {tags.formatting!r} is not alpaca or sharegpt")
    for key in tags.columns or ():
        if key not in COLUMNS:
            raise ConfigError(f"{name}: no column is called {key!r}")
    for key in tags.tags or ():
        if key not in TAGS:
            raise ConfigError(f"{name}: no tag is called {key!r}")
    return tags


def retagged(row: dict[str, Any], tags: Tags) -> tuple[dict[str, Any], str]:
    """Return a row under the names that our formats know, and its format.

    Raises:
        RowError: A turn has no role, or one that no tag names.
    """
    is_alpaca = tags.formatting == "alpaca"
    skipped = ("messages",) if is_alpaca else ("prompt", "query", "response", "history")
    names = {
        column: ours
        for name, ours in COLUMNS.items()
        if name not in skipped and (column := tags.column(name)) is not None
    }
    if not is_alpaca and "messages" not in (tags.columns or {"messages": ""}):
        names[COLUMNS["messages"]] = COLUMNS["messages"]
    ours = set(names.values())
    renamed: dict[str, Any] = {}
    for key, value in row.items():
        renamed[names.get(key) or (f"row_{key}" if key in ours else key)] = value
    for key in ("chosen", "rejected") if not tags.ranking else ():
        if key in renamed:
            renamed[f"row_{key}"] = renamed.pop(key)
    if not is_alpaca:
        turns = expect(renamed.pop("conversations", None), list, "messages")
        renamed["messages"] = [_turn(turn, tags, f"turn {i + 1}") for i, turn in enumerate(turns)]
        for key in ("chosen", "rejected") if tags.ranking else ():
            renamed[key] = _turn(renamed.get(key), tags, key)
    is_pair = tags.ranking or isinstance(renamed.get("kto_tag"), bool)
    return renamed, "preference" if is_pair else "instruction" if is_alpaca else "messages"


def _turn(turn: Any, tags: Tags, name: str) -> dict[str, Any]:
    role_key, content_key = tags.tag("role_tag"), tags.tag("content_tag")
    role = expect(expect(turn, dict, name).get(role_key), str, f"{name}: {role_key}")
    our_role = next((ROLES[tag] for tag in ROLES if tags.tag(tag) == role), None)
    if our_role is None:
        raise RowError(f"{name}: {role_key} {role[:40]!r} is none of the tags")
    others = {key: value for key, value in turn.items() if key not in (role_key, content_key)}
    return {**others, "role": our_role, "content": turn.get(content_key)}


_SHAR_CUTS = re.compile(r"cuts\.(\d+)\.jsonl(\.\w+)?")
_MANIFEST = re.compile(r"tarred_audio_manifest.*\.json")
_MANIFEST_FOLDER = "sharded_manifests"
"""Where NeMo keeps the manifest of each tar. The tars lie beside this folder."""
_SECOND_ROW = re.compile(r"-sub\d+(?=\.\w+$)")
"""NeMo's mark of a second row about one file, which the tar has once, without the mark."""


def names_tars(name: str) -> bool:
    """Tell whether a file of rows has a name that says that the tars beside it hold its media."""
    return bool(_SHAR_CUTS.fullmatch(name) or _MANIFEST.fullmatch(name))


def with_tar(row: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a row with the place of its sound in a tar. Other rows are returned as they are.

    Args:
        row: A parsed row.
        file: Name of its file, which may begin with folders. Tars lie in its folder.

    Raises:
        RowError: A cut of Shar whose file has no number.
    """
    if "shard_id" in row:
        return _of_nemo(row, file)
    recording = row.get("recording")
    if isinstance(recording, dict) and recording.get("sources"):
        return _of_shar(row, recording, file)
    return row


def _of_nemo(row: dict[str, Any], file: str) -> dict[str, Any]:
    path, shard = row.get("audio_filepath"), row["shard_id"]
    if not isinstance(path, str) or not re.fullmatch(r"\d{1,9}", str(shard)) or ":" in path:
        return row
    folder = PurePosixPath(file).parent
    if folder.name == _MANIFEST_FOLDER:
        folder = folder.parent
    member = _SECOND_ROW.sub("", path)
    return {**row, "audio_filepath": f"tar://{member}::{folder / f'audio_{shard}.tar'}"}


def _of_shar(row: dict[str, Any], recording: dict[str, Any], file: str) -> dict[str, Any]:
    sources = recording["sources"]
    source = sources[0] if isinstance(sources, list) and len(sources) == 1 else None
    if not isinstance(source, dict) or source.get("type") != "shar":
        return row
    name = _SHAR_CUTS.fullmatch(PurePosixPath(file).name)
    if name is None:
        raise RowError(
            "a cut of Shar in a file that is not named cuts.NUMBER.jsonl: the number is that of "
            "recording.NUMBER.tar, which holds its sound"
        )
    if not isinstance(row.get("id"), str):
        raise RowError("a cut of Shar without id, by which its sound is named in the tar")
    tar = PurePosixPath(file).with_name(f"recording.{name[1]}.tar")
    in_tar = {**source, "type": "file", "source": f"tar://{row['id']}.*::{tar}"}
    # The tar holds what the cut holds, and no more: so times of the cut are those of its file.
    return {**row, "start": 0, "recording": {**recording, "sources": [in_tar]}}
