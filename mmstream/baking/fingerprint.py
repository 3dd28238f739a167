"""What makes a baked dataset, in words: its bytes depend on nothing else.

Place in the flow: `bake` writes it to ``mmstream.bake.json`` before the first shard. A call that
finds another one there is refused, with the first difference.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
import numpy as np
import torch

from mmstream.converting.formats.formats import source_sha256
from mmstream.dataset.dataset import Dataset
from mmstream.decoding.decode import Decode
from mmstream.decoding.stored import tensor_bytes
from mmstream.decoding.text.decoder import TextDecoder, own_core
from mmstream.pipeline import Pipeline

FINGERPRINT_NAME = "mmstream.bake.json"

BAKER_VERSION = 1
"""It must be raised when any byte of the output changes."""

_LIBRARIES = (
    "mmstream",
    "numpy",
    "torch",
    "pillow",
    "simplejpeg",
    "av",
    "soundfile",
    "soxr",
    "tokenizers",
    "transformers",
)
"""Libraries whose version may change what decoders make. Those that are not installed do not
count."""


def settings_of(
    pipeline: Pipeline,
    batch_function: Callable[..., Any] | None,
    batch_size: int,
    device: str,
    epoch_of_draws: int | None,
) -> dict[str, Any]:
    """Return what decides the bytes of a baked dataset, in plain JSON types."""
    draws = None if epoch_of_draws is None else {"seed": pipeline.seed, "epoch": epoch_of_draws}
    batch = None
    if batch_function is not None:
        batch = {
            "function": _plain(batch_function),
            "batch_size": batch_size,
            "device": _device(device),
        }
    assert isinstance(pipeline.dataset, Dataset)
    return {
        "baker": BAKER_VERSION,
        "source": _source(pipeline.dataset),
        "decode": _plain(pipeline.decode),
        "before": [_plain(function) for function in pipeline.before],
        "transforms": [_plain(function) for function in pipeline.transforms],
        "batch": batch,
        "draws": draws,
        "libraries": _versions(),
    }


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of settings: 64 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()


def first_difference(saved: Any, present: Any) -> str:
    """Return the first setting that differs, and both values. "": none does.

    Examples:
        >>> first_difference({"decode": {"size": 224}}, {"decode": {"size": 256}})
        'decode.size was 224 and is now 256'
        >>> first_difference(
        ...     {"name": "train.crop", "source": "3f"}, {"name": "train.crop", "source": "9a"}
        ... )
        'the code of train.crop or of its module has changed'
    """
    return next(_differences(saved, present, ""), "")


def _differences(saved: Any, present: Any, name: str) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys([*present, *saved]):
            inner = f"{name}.{key}" if name else str(key)
            saved_value, present_value = saved.get(key), present.get(key)
            if key == "source" and isinstance(saved_value, str) and isinstance(present_value, str):
                if saved_value != present_value:
                    owner = present.get("name") or present.get("type")
                    yield f"the code of {owner} or of its module has changed"
                continue
            yield from _differences(saved_value, present_value, inner)
    elif isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        for number, pair in enumerate(zip(saved, present, strict=True)):
            yield from _differences(*pair, f"{name}[{number}]")
    elif saved != present:
        yield f"{name} was {_shown(saved)} and is now {_shown(present)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()[:200].strip('"')


def _source(dataset: Dataset) -> dict[str, Any]:
    """Return the identity of a dataset: shards with their contents, bad list and selection."""
    manifest = dataset.manifest
    shards = [
        [shard.name, shard.num_samples, shard.num_bytes, shard.sha256] for shard in manifest.shards
    ]
    chosen = {} if dataset.selection is None else {"selection": dataset.selection.digest}
    return {
        **chosen,
        "num_shards": dataset.num_shards,
        "num_samples": len(dataset),
        "num_bytes": manifest.num_bytes,
        "shards": _sha256(msgspec.json.encode(shards)),
        "bad": _sha256(dataset.bad.tobytes()) if dataset.bad.size else None,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _device(device: str) -> dict[str, Any]:
    """Return what a batch function's numbers may depend on: other devices give other last bits."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return {"type": device.partition(":")[0]}
    return {
        "type": "cuda",
        "name": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _weights(module: torch.nn.Module) -> str:
    """Return the checksum of a model's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()[:32]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Return a value in plain JSON types. Equal settings give equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return _in_utf8(value) if isinstance(value, str) else value
    if isinstance(value, bytes):
        return _sha256(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), _sha256(value.tobytes())]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if isinstance(value, torch.nn.Module):
        return {"module": _name(type(value)), "weights": _weights(value)}
    if isinstance(value, partial):
        return {
            "function": _plain(value.func),
            "arguments": [_plain(argument) for argument in value.args],
            **{str(name): _plain(argument) for name, argument in value.keywords.items()},
        }
    if isinstance(value, Decode) and value.stored is not None:
        return {"baked": value.stored.content.fingerprint}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": _name(type(value)), **_fields(value)}
    return _plain_function(value)


def _in_utf8(text: str) -> str:
    r"""Return a text that has a UTF-8 form: half of a surrogate pair becomes ``\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode()


def _fields(value: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        setting = getattr(value, field.name)
        is_tokenizer = isinstance(value, TextDecoder) and field.name == "tokenizer"
        settings[field.name] = _tokenizer(setting) if is_tokenizer else _plain(setting)
    if callable(value) and not type(value).__module__.startswith("mmstream."):
        settings["source"] = source_sha256(type(value))[:32]
    return settings


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return {
        "core": _sha256(own_core(tokenizer).to_str().encode()),
        "chat_template": _sha256(template.encode()),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_side": str(tokenizer.padding_side),
    }


def _plain_function(value: Any) -> Any:
    """Return the name and the source of a function, or of the class of an object."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    owner = value if hasattr(value, "__qualname__") else type(value)
    if owner.__module__.startswith("mmstream."):  # its version is among those of libraries
        described: dict[str, Any] = {"name": _name(owner)}
    else:
        described = {"name": _name(owner), "source": source_sha256(owner)[:32]}
    values = _enclosed(value) if owner is value else dict(getattr(value, "__dict__", {}))
    simple = {
        name: _plain(variable)
        for name, variable in values.items()
        if variable is None
        or isinstance(variable, bool | int | float | str | bytes | np.ndarray | torch.nn.Module)
    }
    return described | ({"values": simple} if simple else {})


def _enclosed(function: Any) -> dict[str, Any]:
    """Return the variables of an enclosing function that a function uses."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
