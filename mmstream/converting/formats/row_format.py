"""`RowFormat`: how the caller says that rows are to be understood. Part of step 2 of a conversion.

    one row -> columns map -> the caller's function -> tar -> tags -> format -> `Draft`

It is picklable, so that the workers of any engine understand rows alike.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mmstream.converting.draft import Draft, LeftOutError, RowError
from mmstream.converting.formats.fields import MEDIA_KEYS
from mmstream.converting.formats.formats import FORMATS, draft_of
from mmstream.converting.formats.function import (
    function_name,
    load_function,
    short_name,
    source_sha256,
)
from mmstream.converting.formats.tags import Tags, read_tags, retagged
from mmstream.converting.formats.tarred import with_tar
from mmstream.errors import BUGS, ConfigError, escaped

__all__ = ["RowFormat"]

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
        if isinstance(value, dict):
            value = with_tar(value, file)
        if self.tags is not None and isinstance(value, dict):
            value, format = retagged(value, self._tags_of(file))
        draft = draft_of(value, format)
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
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
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
            raise RowError(f"{name}(): {type(error).__name__}: {escaped(error)}") from error
        if value is None:
            raise LeftOutError(f"left out by {name}()")
        if not isinstance(value, dict):
            raise RowError(f"{name}(): returned no dict but {type(value).__name__}")
        return value
