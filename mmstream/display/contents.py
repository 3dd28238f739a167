"""What a sample or batch holds for people to see: texts, images, videos, sounds and tokens.

    samples.py, packs.py -> contents.py

A sample may be raw or decoded, a batch on the host or on a device.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from mmstream.errors import DecodeError
from mmstream.media.fields import image_fields, json_object
from mmstream.media.frames import FrameList, encoded_video
from mmstream.media.types import kind_of
from mmstream.types import IGNORED_LABEL

# -- texts -----------------------------------------------------------------------------------------


def row_json(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object in ``json``, parsed or not; empty if there is none."""
    return json_object(sample.get("json"))


def messages_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of the conversation in ``json``, parsed or not; empty if there is none."""
    turns = row_json(sample).get("messages")
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def parts_of(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message: texts as ``{"text": ...}``, and media that name a field."""
    content = turn.get("content", "")
    parts = content if isinstance(content, list) else [content]
    return [part if isinstance(part, Mapping) else {"text": part} for part in parts]


def fields_named(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields that parts of messages name, in their order."""
    names = (part.get("field") for turn in messages for part in parts_of(turn))
    return [name for name in names if isinstance(name, str)]


def text_of(sample: Mapping[str, Any]) -> object:
    """Return the caption of a sample, or the texts of the first turns of its conversation."""
    if isinstance(sample.get("txt"), str | bytes):
        return sample["txt"]
    row = row_json(sample)
    for name in ("caption", "text"):  # of foreign tars
        if isinstance(row.get(name), str):
            return row[name]
    parts = (part for turn in messages_of(sample)[:4] for part in parts_of(turn))
    return " / ".join(str(part["text"]) for part in parts if "text" in part)


def caption_of(sample: Mapping[str, Any]) -> str | bytes:
    """Return the text of a sample beside its conversation; "" if there is none."""
    text = sample.get("txt") or ("" if messages_of(sample) else text_of(sample))
    return text if isinstance(text, str | bytes) else ""


# -- where samples come from -----------------------------------------------------------------------


def address_of(sample: Mapping[str, Any]) -> str:
    """Return ``shard[index]`` of a sample, or what of it is known."""
    lineage = sample.get("__lineage__")
    shard = str(sample.get("__url__", "")).rpartition("/")[2]
    return f"{shard}[{lineage.index}]" if lineage is not None else shard


def key_text(sample: Mapping[str, Any]) -> str:
    """Return ``key`` of a sample, or ``source: key`` in a mixture."""
    source = sample.get("__source__")
    return f"{source}: {sample['__key__']}" if source else str(sample["__key__"])


def spread(num_samples: int, count: int, seed: int | None = None) -> list[int]:
    """Return positions that cut a dataset into equal parts, one from each part.

    Args:
        num_samples: Of the dataset.
        count: Positions to return, at most.
        seed: Draws a position from each part. None: the middle of each.

    Examples:
        >>> spread(1000, 4), spread(3, 4)
        ([125, 375, 625, 875], [0, 1, 2])
    """
    if num_samples <= count:
        return list(range(num_samples))
    if seed is None:
        return [(2 * i + 1) * num_samples // (2 * count) for i in range(count)]
    draw = random.Random(seed).random  # the same numbers in every version of Python
    bounds = [i * num_samples // count for i in range(count + 1)]
    return [start + int(draw() * (stop - start)) for start, stop in pairwise(bounds)]


# -- images ----------------------------------------------------------------------------------------


def images_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of a sample by field: bytes, or tensors if they are decoded."""
    names = image_fields(dict(sample))
    by_field = {name: sample[name] for name in names if _is_image(sample[name])}
    if "image" not in sample:
        return by_field
    decoded = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
    names_in_messages = image_fields(dict.fromkeys(fields_named(messages_of(sample))))
    return _with_names("image", decoded, names_in_messages) | by_field


def row_of_batch(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return what a batch holds of one row, as a sample: its key, texts, files and images."""
    names = image_fields(batch)
    columns = {
        name: value for name, value in batch.items() if name in names or isinstance(value, list)
    }
    sample = {name: value[row] for name, value in columns.items() if row < len(value)}
    if batch.get("image") is not None:
        images = batch["image"]
        owners = batch["image_row"].tolist() if "image_row" in batch else range(len(images))
        sample["image"] = [
            image for image, owner in zip(images, owners, strict=False) if owner == row
        ]
    return sample


def _is_image(value: Any) -> bool:
    """Tell whether a field of an image holds a file, pixels, or a mask."""
    return isinstance(value, bytes) or (hasattr(value, "detach") and value.ndim in (2, 3))


def _with_names(field: str, values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return decoded media by their names in the messages; by numbers where these do not fit."""
    if len(names) != len(values):
        names = [field] if len(values) == 1 else [f"{field} {i}" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


# -- videos and sounds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """Decoded frames of a video: uint8 or floating, [F, 3, H, W]."""

    frames: Any
    times_s: Any = None
    """When each frame is shown, in seconds, [F]. None: not known."""


Recording: TypeAlias = bytes | FrameList | Clip
"""A video or a sound: its file or list of frames, or the frames that a decoder made of it."""


def array_of(value: Any) -> npt.NDArray[Any]:
    """Return a tensor, on any device, or an array as an array of numpy."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value if "bfloat16" not in str(value.dtype) else value.float()
    return np.asarray(value)


def is_recording_file(name: str, value: object) -> bool:
    """Tell whether a field holds the file of a video or a sound."""
    return isinstance(value, bytes) and kind_of(name) in ("video", "audio")


def recordings_of(sample: Mapping[str, Any]) -> dict[str, Recording]:
    """Return the files of videos and sounds of a sample, and its decoded videos, by field.

    Those of ``video`` have the names that the messages give them, if these are as many.
    """
    recordings: dict[str, Recording] = {}
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if is_recording_file(name, value):
            recordings[name] = _whole(sample, name)
        elif f"{name}_pts_s" in sample:
            recordings |= _clips(sample, name)
    return recordings


def _clips(sample: Mapping[str, Any], field: str) -> dict[str, Recording]:
    """Return the decoded videos of a field by their names."""
    frames, times = sample[field], sample[f"{field}_pts_s"]
    if not isinstance(frames, list):
        frames, times = [frames], [times]
    pairs = zip(frames, times, strict=False)
    clips = [Clip(*pair) for pair in pairs if getattr(pair[0], "ndim", 0) == 4]
    names = dict.fromkeys(fields_named(messages_of(sample)))
    of_videos = [name for name in names if kind_of(name) == "video"]
    return _with_names(field, clips, of_videos if field == "video" else ())


def _whole(fields: Mapping[str, Any], name: str) -> Recording:
    """Return the file of a recording, or its list of frames where that is whole."""
    try:
        return cast(Recording, encoded_video(fields, name))
    except DecodeError:
        return cast(bytes, fields[name])


# -- tokens ----------------------------------------------------------------------------------------
#
# Text as a model gets it: the tokens that it learns, apart from those that are masked.

MAX_TOKENS = 8192
"""Tokens of one text that are shown."""

MIN_REPEATS = 8
"""So many equal tokens in a row are shown as one, with their number: those of an image."""


def token_runs(tokenizer: Any, sample: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the text of tokens in a row that are all learned or all masked, and which they are.

    Args:
        tokenizer: The tokenizer that made them.
        sample: Has ``input_ids`` and ``labels``, and ``attention_mask`` where it is padded.
    """
    ids = [int(i) for i in sample["input_ids"]]
    labels = [int(i) for i in sample.get("labels", ids)]
    mask = [int(i) for i in sample.get("attention_mask", [1] * len(ids))]
    tokens = [
        (token, label != IGNORED_LABEL)
        for token, label, is_text in zip(ids, labels, mask, strict=True)
        if is_text
    ]
    runs = [
        (_text(tokenizer, [token for token, _ in run]), is_learned)
        for is_learned, run in groupby(tokens[:MAX_TOKENS], key=lambda token: token[1])
    ]
    if len(tokens) > MAX_TOKENS:
        runs.append((f" ... {len(tokens) - MAX_TOKENS:,} more tokens", False))
    return runs


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of token ids. Many equal ones become ``<image> x 576``."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""

    pieces: list[str] = []
    waiting: list[int] = []  # tokens are decoded together, because a character may take several
    for token, equal in groupby(ids):
        count = len(list(equal))
        if count < MIN_REPEATS:
            waiting += [token] * count
        else:
            pieces += [decode(waiting), decode([token]), f" x {count} "]
            waiting = []
    return "".join([*pieces, decode(waiting)])


def tokens_text(tokenizer: Any, sample: Mapping[str, Any]) -> str:
    """Return the tokens of a sample as text. What the model learns stands in double brackets."""
    runs = token_runs(tokenizer, sample)
    return "".join(f"[[{text}]]" if is_learned else text for text, is_learned in runs)


def token_counts(sample: Mapping[str, Any]) -> str:
    """Return how many tokens a sample has, and how many of them are learned."""
    mask = sample.get("attention_mask")
    num_tokens = len(sample["input_ids"]) if mask is None else int(sum(int(m) for m in mask))
    labels = sample.get("labels", sample["input_ids"])
    num_learned = sum(int(label) != IGNORED_LABEL for label in labels)
    return f"{num_tokens:,} tokens, {num_learned:,} learned"


def uncounted(kinds: Iterable[str]) -> str:
    """Return that these kinds of media are not in the numbers of tokens, and what counts them."""
    names = " and ".join(f"{kind}s" if kind != "audio" else kind for kind in kinds)
    return (
        f"tokens of {names} are not counted: --tokenizer with the folder of a whole Qwen-VL model "
        "counts them, or `mmstream plan --pipeline` with the pipeline of training"
    )
