"""Step 2 of a conversion: one parsed row -> one `Draft`. Each format has a pure function.

    one row -> COLUMNS map -> FUNCTION -> place in a tar -> tags -> FORMAT -> `Draft` -> media

A row's format is recognised by its keys: `_RECOGNISED` has the order of asking. A `ParsedRow`
remembers the keys that the format takes. The other keys are kept in the json of the sample, and the
draft names them. The modules show rows of each format:

    dialogue.py     llava, messages
    questions.py    vqa, qwen-vl, instruction, texts, preference
    captions.py     captions, laion, labels, text, obelics, mmc4
    spans.py        spans, speech, lhotse, webvid

`RowParser` is how the caller says that rows are to be understood. It is picklable, so that the
workers of any engine understand rows alike. A function may be named as ``module:function``. A
module in the working folder is imported from there, as `python -m` does.

An installed package adds a format by the entry point ``mmstream.row_formats``. The name of the
entry is that of the format, and it names a function from a row to a row of a known format. It is
imported where the caller asks for the format, and never because of what rows hold. Formats of
mmstream have priority.

LLaMA-Factory's ``dataset_info.json`` says which columns and tags the rows of a file have:

    {"my_chats": {"file_name": "chats.json", "formatting": "sharegpt",
                  "columns": {"messages": "talk", "images": "pics"},
                  "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "me"}}}

The entry of a file of rows is the one with its ``file_name``, or the one that the caller names. A
row is rewritten to the names that `instruction`, `messages` and `preference` know. Its other
columns are kept. The defaults are LLaMA-Factory's: without ``columns`` those of Alpaca or ShareGPT,
and with ``columns`` only those that are named.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from mmstream.converting.draft import Draft, LeftOutError, RowError, unreadable
from mmstream.converting.formats import captions, dialogue, questions, spans
from mmstream.converting.formats.fields import (
    MEDIA_KEYS,
    ParsedRow,
    expect,
    first_key,
    has_media,
    is_base64_media,
    is_set,
    kind_by_name,
)
from mmstream.errors import BUGS, ConfigError, MMStreamError, escaped
from mmstream.processes.workers import installed_entry_points

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
    (
        lambda row: (
            spans.has_spans(row)
            and (has_media(row) or "path" in row or spans.medium_by_id(row) is not None)
        ),
        "spans",
    ),
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
    keys = escaped(", ".join(map(str, list(row)[:MAX_NAMED_KEYS])), 200)
    raise RowError(f"no known format has the keys {keys}; {OPTIONS}")


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


# -- what the caller says of rows: columns, functions, tags ----------------------------------------

GROUP = "mmstream.row_formats"
"""The entry points of formats of other packages."""

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
_MAX_INFO_BYTES = 16 << 20


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
        ConfigError: The file is not a dataset_info.json, or it has no such entry.
        FileNotFoundError: There is no such file.
    """
    file, _, name = source.partition("#")
    path = Path(file, "dataset_info.json") if Path(file).is_dir() else Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file}: no such dataset_info.json")
    if path.stat().st_size > _MAX_INFO_BYTES:
        raise ConfigError(f"{file}: too large for a dataset_info.json")
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not LLaMA-Factory's dataset_info.json: {error}") from None
    if name:
        if name not in entries:
            others = escaped(", ".join(entries), 200)
            raise ConfigError(f"{file}: has no entry {name!r}, but {others}")
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
    for kind, names, keys in (("column", COLUMNS, tags.columns), ("tag", TAGS, tags.tags)):
        for key in keys or ():
            if key not in names:
                raise ConfigError(f"{name}: no {kind} is called {key!r}")
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


_URL_KEYS = {"url", "URL", "contentUrl", "path", "videoid", "videoID", "YoutubeID"}
"""Names of media that single formats know, besides `MEDIA_KEYS`."""


@dataclass(frozen=True)
class RowParser:
    """How rows become drafts: the options `format`, `row` and `columns` of a conversion.

    Attributes:
        name: One of `FORMATS`, a format of an installed package, or a function of the caller as
            ``module:function``. None: each row is recognised by its keys.
        columns: Pairs (name that the formats know, name in the rows), such as ("image", "photo").
        function: From a row to a row of any known format, or to None to leave it out.
        dataset_info: LLaMA-Factory's file, as ``FILE`` or ``FILE#NAME``; see `tags`. It is read
            once, when this is made.
        tags: {name of a file of rows: its entry of `dataset_info`}.

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
        if self._names_function:
            if self.function is not None:
                raise ConfigError(f"format={self.name!r} and row={self.function!r}: give one")
            name = str(self.name)
            function = load_function(name) if ":" in name else _load_installed(name)
            object.__setattr__(self, "function", function)
        self._check_columns()

    @property
    def _names_function(self) -> bool:
        return self.name is not None and self.name not in FORMATS

    def _check_columns(self) -> None:
        for names in zip(*self.columns, strict=True):
            for name in names:
                if not isinstance(name, str) or not name or names.count(name) > 1:
                    raise ConfigError(f"columns: {name!r} is not a column's name, or twice there")
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
        original = expect(value, dict, "row")
        row = self._called(self._renamed(original))
        format = None if self._names_function else self.name
        try:
            row = spans.with_tar(row, file)
            if self.tags is not None:
                row, format = retagged(row, self._tags_of(file))
            draft = draft_of(row, format)
        except MMStreamError as error:
            if self._is_installed and isinstance(error, RowError):
                raise RowError(f"{self._label}: {error}") from None
            raise
        except Exception as error:  # a row that no format expects: it ends itself, and no other
            raise unreadable(self._label if self._is_installed else "row", error) from error
        if self.columns and draft.unread:
            named = {ours: theirs for ours, theirs in self.columns if theirs in original}
            unread = tuple(named.get(key, key) for key in draft.unread)
            draft = msgspec.structs.replace(draft, unread=unread)
        if self.function is not None:
            try:
                msgspec.json.encode((draft.content, draft.texts))
            except Exception as error:  # of a value whose methods raise, too
                reason = f"returned what is not JSON: {escaped(error, 200)}"
                raise RowError(f"{self._label}: {reason}") from None
        return draft

    def _tags_of(self, file: str) -> Tags:
        """Return the entry of `dataset_info` for a file of rows."""
        tags = self.tags or {}
        entry = tags.get("") or tags.get(Path(file).name)
        if entry is None:
            raise ConfigError(
                f"{self.dataset_info}: has no entry with the file_name {Path(file).name}; name one "
                f"as {self.dataset_info}#NAME"
            )
        return entry

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that was named is imported by its name where this is unpickled.
        function = None if self._names_function else self.function
        return type(self), (self.name, self.columns, function, self.dataset_info, self.tags)

    def require_portable(self) -> None:
        """Raise ConfigError if other processes could not import the caller's function."""
        if self.function is None:
            return
        reason = None
        try:
            pickle.dumps(self)
        except Exception as error:  # pickle raises many types
            reason = str(error)
        main = sys.modules["__main__"]
        if self.function.__module__ == "__main__" and getattr(main, "__file__", None) is None:
            reason = "it was written in a notebook or at a prompt"
        if reason is not None:
            raise ConfigError(
                f"row={function_name(self.function)}: worker processes cannot import it "
                f"({reason}); define it in a module, or use num_workers=1"
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

    @property
    def _is_installed(self) -> bool:
        """Tell whether the format is that of an installed package."""
        return self._names_function and ":" not in str(self.name)

    @property
    def _label(self) -> str:
        """How reasons name the format or the function."""
        return str(self.name) if self._is_installed else f"{short_name(self.function)}()"

    def _called(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what the caller's function makes of a row."""
        if self.function is None:
            return row
        # Bugs of the caller's function are for the caller to mend, those of a package are not.
        passing = (RowError, MemoryError) if self._is_installed else (RowError, *BUGS)
        try:
            value: Mapping[str, Any] | None = self.function(row)
        except passing:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {escaped(error)}{_place_of(error)}"
            raise RowError(f"{self._label}: {reason}") from error
        if value is None:
            raise LeftOutError(f"left out by {self._label}")
        if not isinstance(value, dict):
            raise RowError(f"{self._label}: returned no dict but {type(value).__name__}")
        return value


def _place_of(error: Exception) -> str:
    """Return the line that raised an error in the file of the caller's function, in brackets."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)][1:]
    own = [(Path(file).name, line) for file, line in frames if file == frames[0][0]]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def _load_installed(name: str) -> Callable[..., Any]:
    """Import the function of a format that an installed package adds."""
    entries = [entry for entry in installed_entry_points(GROUP) if entry.name == name]
    if not entries:
        raise ConfigError(
            f"format={name!r}: must be one of {', '.join(FORMATS)}, a format that an installed "
            f"package adds by the entry point {GROUP}, or a function of yours as module:function"
        )
    try:
        function = entries[0].load()
    except Exception as error:
        raise ConfigError(
            f"format={name!r}: {entries[0].value} cannot be imported: {type(error).__name__}: "
            f"{escaped(error)}; update or uninstall its package"
        ) from error
    if not callable(function):
        raise ConfigError(f"format={name!r}: {entries[0].value} is not a function")
    return function  # type: ignore[no-any-return]


def load_function(name: str) -> Callable[..., Any]:
    """Import a function by its name, such as ``my_rows:caption``.

    Raises:
        ConfigError: There is no such module, it has no such name, or it is not a function. What
            the module raises when it is imported passes.
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
    names = (*module_name.split("."), *attributes.split("."))
    if not all(map(str.isidentifier, names)):
        raise ConfigError(f"{name}: is not a name such as module:function")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # after the others, so that nothing there hides an installed one
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


def short_name(function: Any) -> str:
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
