"""What decides the lengths of samples, in words: tokenizer, template, decoders, draws.

Place in the flow: a measure and a plan are named by its hash, and the plan keeps it. So `find_plan`
says what differs when a pipeline counts otherwise. It refuses nothing itself.

A function counts by its name alone: of its module there are two names where it is the main script.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mmstream.decoding.decode import Decode
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.measuring.lengths import Counter

_OTHER_FIELDS = ("tokenizer", "max_length", "padding")
"""Settings of a text decoder that have a line of their own, or decide no length."""


_NO_LENGTH = (
    "scaled_decoding",
    "interpolation",
    "fill",
    "flip",
    "mask",
    "max_memory",
    "timeout_s",
)
"""Settings of decoders of media that decide no length."""


def settings_of(
    counter: Counter,
    seed: int | None = None,
    epochs: Sequence[int] | None = None,
    room: int = 0,
) -> dict[str, Any]:
    """Return what decides the lengths, in plain JSON types.

    Args:
        counter: Decoders and functions.
        seed: Of the random draws that were measured. None: lengths do not depend on any.
        epochs: Their epochs.
        room: Tokens that each sample got more.
    """
    decode = counter.decode
    text = decode.text
    assert text is not None
    tokenizer = text.tokenizer
    return {
        "tokenizer": _sha256(core_without_limits(tokenizer)),
        "chat_template": _sha256(str(getattr(tokenizer, "chat_template", None) or "")),
        "text": _fields(text, _OTHER_FIELDS),
        "image": None if decode.image is None else _fields(decode.image, _NO_LENGTH),
        "video": None if decode.video is None else _fields(decode.video, _NO_LENGTH),
        "audio": None if decode.audio is None else _fields(decode.audio, _NO_LENGTH),
        "fields": sorted(decode.fields or {}),
        "before": [_plain(function) for function in counter.before],
        "patch_size": counter.patch_size,
        "seed": seed,
        "epochs": None if epochs is None else list(epochs),
        "room": room,
    }


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ, such as "tokenizer" or "image.size"."""
    names = []
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            names += [f"{name}.{inner}" for inner in differing_settings(before, now)]
        else:
            names.append(name)
    return names


def core_without_limits(tokenizer: Any) -> str:
    """Return what a tokenizer's core is, without the settings that a caller leaves in it."""
    core = tokenizer.backend_tokenizer
    copy = type(core).from_str(core.to_str())
    copy.no_padding()
    copy.no_truncation()
    return str(copy.to_str())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields(decoder: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        field.name: _plain(getattr(decoder, field.name))
        for field in dataclasses.fields(decoder)
        if field.init and field.name not in without
    }


def _plain(value: Any) -> Any:
    """Return a value in plain JSON types. Equal settings give equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, partial):
        words = [_plain(value.func), [_plain(each) for each in value.args], _plain(value.keywords)]
        return words if value.args or value.keywords else words[0]
    if isinstance(value, TextDecoder | Decode):
        return type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **_fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)
