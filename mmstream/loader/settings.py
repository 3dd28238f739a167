"""What must be the same on every rank: the settings of a pipeline, as short texts by name.

    Loader.iter_undelivered -> `rank_settings` -> mmstream.ranks

Everything that decides which rows a rank delivers and what is in them: the identity of the order,
the decoders, the transforms, the policy for bad samples, and the versions of the libraries whose
pixels or tokens the batches hold. Functions count by their names, not by their code. What may
differ between machines is left out: where shards lie, workers, threads, folders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import escaped
from mmstream.families.registry import settings_of_families, versions_of
from mmstream.order.corpus import SavedOrder
from mmstream.pipeline import Pipeline

MAX_TEXT = 60
"""Longer texts are cut, and end in a hash of the whole."""

IMAGE_PACKAGES = ("simplejpeg", "pillow", "torch", "numpy")
"""They decode JPEG, decode other formats, resize, and draw random crops."""

VIDEO_PACKAGES = ("av", "torch", "numpy")
"""They decode, resize, and draw random parts."""

AUDIO_PACKAGES = ("av", "soundfile", "soxr", "torch", "numpy")
"""They decode, resample, make features, and draw random parts."""

TEXT_PACKAGES = ("tokenizers", "transformers", "jinja2")
"""They tokenize, hold the special tokens, and render chat templates."""

_ORDER_NAMES = {
    "version": "version of the order",
    "corpus": "names and sample counts of the shards (hash)",
    "num_shards": "number of shards",
    "bad": "bad list (hash)",
    "sizes": "sizes of the shards (hash)",
    "sha256": "bytes of the shards (hash of their sha256)",
}

_RESHUFFLE = "reshuffle (lanes by default where cache_dir is set: pass reshuffle= on all ranks)"

_SHOWN_APART = ("sources", "reshuffle")


def rank_settings(
    pipeline: Pipeline, rows_per_rank: Any, on_change: str = "refuse"
) -> dict[str, str]:
    """Return what all ranks must have in common to run a pipeline.

    It hashes the tokenizer, so it is computed once per pipeline.

    Args:
        pipeline: what this rank runs.
        rows_per_rank: as the Loader has it.
        on_change: as the Loader has it.
    """
    settings = _order_settings(pipeline.order.identity())
    settings |= _checksum_settings(pipeline.dataset)
    settings["rows_per_rank"] = rows_per_rank
    settings["on_change"] = on_change
    packages = ["mmstream"]
    decode = pipeline.decode
    image = decode.image if decode else None
    text = decode.text if decode else None
    if decode is not None:
        settings["decoders by field"] = dict(decode.fields or {})
        settings["same_geometry"] = list(decode.same_geometry)
        packages += IMAGE_PACKAGES if decode.table.pictures else ()
    settings["image decoder"] = None if image is None else type(image)
    settings["text decoder"] = None if text is None else type(text)
    if isinstance(image, ImageDecoder):
        settings |= _fields(image)
        packages += IMAGE_PACKAGES
    if isinstance(text, TextDecoder):
        settings |= _fields(text) | {"TextDecoder.tokenizer": f"hash {_tokenizer_hash(text)}"}
        packages += TEXT_PACKAGES
    if decode is not None:
        settings["max_json_bytes"] = decode.max_json_bytes
        settings["min_lazy_bytes"] = decode.min_lazy_bytes
        if decode.table.media:
            settings |= _object_settings("video decoder", decode.video)
            settings |= _object_settings("audio decoder", decode.audio)
            packages += VIDEO_PACKAGES if decode.table.decoders("video") else ()
            packages += AUDIO_PACKAGES if decode.table.sounds else ()
    settings |= _object_settings("batching", pipeline.batching)
    settings.pop("Pack.plan", None)  # a folder of this machine; its digest is the order's
    settings["zero_copy"] = pipeline.zero_copy
    settings["before"] = list(pipeline.before)
    settings["transforms"] = list(pipeline.transforms)
    settings["collate"] = pipeline.collate
    policy = _fields(pipeline.bad_samples)
    del policy["BadSamplePolicy.quarantine"]  # a folder of this machine
    settings |= policy
    settings |= {f"version of {name}": _version(name) for name in packages}
    positions = getattr(pipeline.batching, "positions", None)
    own = versions_of(*settings_of_families(decode), positions)
    settings |= {f"version of {name}": text for name, text in own.items()}
    return {name: _cut(described(value)) for name, value in settings.items()}


def described(value: Any) -> str:
    """Return a text that is the same in every process: no address, no order of a set.

    Examples:
        >>> described([1, None, "a"])
        "[1, None, 'a']"
        >>> described(partial(sorted, reverse=True))
        'partial(builtins.sorted, reverse=True)'
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, partial):
        arguments = [described(value.func), *map(described, value.args)]
        arguments += [f"{name}={described(item)}" for name, item in sorted(value.keywords.items())]
        return f"partial({', '.join(arguments)})"
    if isinstance(value, Mapping):
        items = sorted((described(key), described(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if hasattr(value, "__qualname__"):  # functions and classes
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = (f"{name}={described(item)}" for name, item in _fields(value).items())
        return f"({', '.join(fields)})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _object_settings(name: str, value: Any) -> dict[str, Any]:
    """Return the class of a dataclass and its settings. None stands for itself."""
    return {name: None} if value is None else {name: type(value), **_fields(value)}


def _fields(value: Any) -> dict[str, Any]:
    """Return the settings of a dataclass, by ``Class.field``."""
    name = type(value).__name__
    return {
        f"{name}.{field.name}": getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.init
    }


def _order_settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of an order by names that a message can show."""
    settings: dict[str, Any] = {_RESHUFFLE: SavedOrder.parse(identity).keys["reshuffle"]}
    for source in identity.get("sources", ()):
        prefix = f"source {escaped(source['name'])}: "
        settings |= {prefix + _ORDER_NAMES.get(key, key): source[key] for key in source}
    settings |= {
        _ORDER_NAMES.get(key, key): value
        for key, value in identity.items()
        if key not in _SHOWN_APART
    }
    return settings


def _checksum_settings(source: Any) -> dict[str, bool]:
    """Return for each dataset whether what is read is compared with its checksums.

    Else a rank delivers damaged samples that the others replace.
    """
    name = "bytes are compared with checksums"
    if isinstance(source, Mixture):
        return {
            f"source {escaped(source_name)}: {name}": dataset.has_checksums
            for source_name, dataset in source.datasets.items()
        }
    return {name: source.has_checksums} if isinstance(source, Dataset) else {}


def _tokenizer_hash(text: TextDecoder) -> str:
    """Return a hash of the content of a tokenizer, wherever its files lie.

    Its settings of truncation and padding are left out: `transformers` writes into them at each
    call, and TextDecoder has its own. They come before "added_tokens" in the JSON.
    """
    tokenizer = text.tokenizer
    core = tokenizer.backend_tokenizer.to_str()
    content = hashlib.sha256(core[max(0, core.find('"added_tokens"')) :].encode())
    extra = [tokenizer.chat_template, text.pad_token_id, text.padding_side]
    content.update(json.dumps(extra, sort_keys=True).encode())
    return content.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        if package == "mmstream":  # as imported: the metadata may be that of another copy
            return str(sys.modules["mmstream"].__version__)
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _cut(text: str) -> str:
    """Return a text that fits into a message, and still differs from other texts."""
    if len(text) <= MAX_TEXT:
        return escaped(text)
    return f"{escaped(text[:MAX_TEXT])}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
