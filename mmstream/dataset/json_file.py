"""Small JSON files beside a dataset, such as the marker of an unfinished conversion."""

from __future__ import annotations

from typing import Any

import msgspec

from mmstream.errors import ConfigError, ManifestError, escaped
from mmstream.storage import Store


def read_json(store: Store, name: str) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ManifestError: It is no JSON, or no object.
    """
    try:
        return msgspec.json.decode(store.read(name), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{store.url_of(name)}: {error}") from None


def json_lines(value: object) -> bytes:
    """Return a value as JSON for people: a line for each entry.

    Raises:
        ConfigError: A text in it is no UTF-8, such as the name of a file from an old disk.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a name that is no UTF-8 cannot be written down: {escaped(error.object)}; rename that "
            "file or folder, or name a link to it"
        ) from None
