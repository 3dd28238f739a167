"""LLaMA-Factory's ``dataset_info.json``: which columns and tags the rows of a file have.

    {"my_chats": {"file_name": "chats.json", "formatting": "sharegpt",
                  "columns": {"messages": "talk", "images": "pics"},
                  "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "me"}}}

The entry of a file of rows is the one with its ``file_name``, or the one that the caller names. A
row is rewritten to the names that `instruction`, `messages` and `preference` know. Its other
columns are kept. The defaults are LLaMA-Factory's: without ``columns`` those of Alpaca or ShareGPT,
and with ``columns`` only those that are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mmstream.converting.draft import RowError
from mmstream.converting.formats.fields import expect
from mmstream.errors import ConfigError, escaped

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
    path = Path(file, "dataset_info.json") if Path(file).is_dir() else Path(file)
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
