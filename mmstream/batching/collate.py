"""The samples of a step become a batch: a dict of tensors and lists.

Place in the flow: after decoding, before the loader. `make_batch` calls `collate`, or the user's
own function, and adds where each row comes from.

A field whose shape differs from row to row becomes a list. So one odd sample never breaks a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from mmstream.batching.join import (
    TakeMemory,
    are_pictures,
    as_tensor,
    join_audio,
    join_pictures,
    join_values,
    join_videos,
    stack_pictures,
    stack_values,
)
from mmstream.batching.valid import is_flat, mask_labels
from mmstream.decoding.step import DecodedStep
from mmstream.errors import ConfigError
from mmstream.reading.step import BatchLineage
from mmstream.settings import checked
from mmstream.types import IGNORED_LABEL, Batch, Sample

Collate = Callable[[list[Sample]], Batch]
"""A function from the samples of a batch to the batch."""

_AUDIO_FIELDS = dict.fromkeys(("audio", "audio_features"), torch.empty((0, 0)))

UNCHANGED_TYPES = frozenset({bytes, memoryview, str})
"""A field whose values all have one of these types becomes a list, whatever its name is."""


def make_batch(step: DecodedStep, collate: Collate) -> Batch:
    """Return the batch of a step: the fields of `collate`, and where the rows come from.

    Args:
        step: The decoded samples, one per row.
        collate: The function that makes the fields.

    Returns:
        The dict of `collate` with more fields. ``__key__`` and ``__url__`` are lists of B, and
        so is ``__source__`` in a mixture. ``__valid__`` is bool [B]: False for padding, for masked
        rows and for rows that no sample could fill. ``__lineage__`` is a `BatchLineage`. Where
        ``labels`` has one label per token, the labels of invalid rows are -100, so that a loss
        leaves them out.

    Raises:
        ConfigError: `collate` returned something else than a dict, or ``document_row``.
    """
    lineage, samples = step
    collated = collate(samples)
    if not isinstance(collated, Mapping):  # transformers' BatchEncoding is a Mapping, not a dict
        raise ConfigError(f"collate returned {type(collated).__name__}: it must return a dict")
    batch = dict(collated)
    if is_flat(batch):
        raise ConfigError(
            "collate returned document_row, the mark of batches of mm.Flat: rename it"
        )
    batch["__key__"] = [sample["__key__"] for sample in samples]
    batch["__url__"] = [sample["__url__"] for sample in samples]
    if "__source__" in samples[0]:
        batch["__source__"] = [sample["__source__"] for sample in samples]
    return with_lineage(batch, lineage)


def with_lineage(batch: Batch, lineage: BatchLineage) -> Batch:
    """Return a batch with ``__valid__`` and ``__lineage__``, changed in place.

    Labels of rows that are not valid become -100.
    """
    batch["__valid__"] = torch.tensor(lineage.valid)
    if not all(lineage.valid):
        mask_labels(batch)
    batch["__lineage__"] = lineage
    return batch


@checked(late=True)
def collate(
    samples: list[Sample],
    *,
    pad_token_id: int = 0,
    pad_to: int | None = None,
    padding_side: str = "right",
    picture_fields: Collection[str] = (),
    row_fields: Collection[str] = (),
    list_fields: Collection[str] = (),
    video_fields: Mapping[str, torch.Tensor | None] | None = None,
    audio_fields: Mapping[str, torch.Tensor] | None = None,
    take_memory: TakeMemory | None = None,
) -> Batch:
    """Make a batch of decoded samples.

    A `Pipeline` calls it with what it knows of its decoders. Call it in a collate function of your
    own to add fields.

    Args:
        samples: The decoded samples, one per row. B is their number.
        pad_token_id: The id that pads ``input_ids``.
        pad_to: Length of token fields, in tokens; longer ones are cut. None: the longest row.
        padding_side: The side that is padded, "right" or "left".
        picture_fields: Pictures that are decoded by field. They are joined as ``image`` is, without
            a copy where they lie in one buffer. Pictures of several shapes are a list of B.
        row_fields: Tensors that were decoded into rows of one buffer. They are joined without a
            copy.
        list_fields: Fields that are lists of B even if all shapes are the same, such as boxes.
        video_fields: Fields of videos, which come with the times of their frames, ``NAME_pts_s``.
            Where all frames have one size: what the field is without any, uint8 [0, 3, H, W].
            None: sizes differ, and the field is a list. Default: ``{"video": None}``.
        audio_fields: Fields of recordings, and of their features, which end with ``_features``; and
            what they are without any, such as float32 [0, 0]. Default: ``audio`` and
            ``audio_features``.
        take_memory: Returns memory for padded recordings, uint8 [num_bytes]: that of the batch, in
            which they cross to the main process. None: new memory.

    Returns:
        A dict of fields. Fields whose names start with ``__`` are left out.

        ``image`` is uint8 [B, 3, H, W], channels_last, if every sample has exactly one image and
        all have one shape. Else it holds all images of the batch in the order of rows: uint8
        [num_images, 3, H, W], or a list where shapes differ. Then ``image_row``, int64
        [num_images], is the row of each image.

        ``video`` holds the frames of all videos of the batch in the order of rows. It is uint8
        [num_frames, 3, H, W], channels_last, where the settings of the decoder fix their size. Else
        it is a list with one entry for each video, [F, 3, H, W]. ``video_row`` and
        ``video_frames``, int64 [num_videos], are the row of each video and its number of frames.
        ``video_pts_s``, float64 [num_frames], is the time of each frame in its file in seconds.
        ``video_fps``, float64 [num_videos], is how many frames of a second were taken, and
        ``video_requested_fps`` how many the decoder was asked for: 0 if it was asked otherwise.

        ``audio`` is [num_audios, T], or [num_audios, C, T] with channels, in the decoder's dtype.
        It is padded with 0 at the end. ``audio_row`` and ``audio_length``, int64 [num_audios], are
        the row of each recording and its samples without padding. ``audio_features`` is float32
        [num_audios, M, F], with ``audio_features_length``, the frames without padding. Where videos
        are decoded with their tracks, ``audio_video``, int64 [num_audios], is the number of the
        video that a recording belongs to, or -1. Recordings that differ in channels are a list.

        ``input_ids``, ``attention_mask`` and ``labels`` are int64 [B, T], padded with
        `pad_token_id`, 0 and -100. ``label_weights``, where rows have them, is float32 [B, T],
        padded with 0. Labels of a row without them have 1.

        Other fields are stacked to a tensor of B rows if all values are numbers, or are arrays of
        one shape and type. Floats become float64, whole numbers int64, and numpy scalars of one
        type keep it. Otherwise, or if a sample lacks the field, a field is a list of B, with
        None where it is missing. The same holds for fields of the names above with other content,
        such as class numbers in ``labels``.

    Examples:
        >>> import numpy as np
        >>> batch = collate([{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}])
        >>> batch["input_ids"].tolist()
        [[5, 6, 7], [8, 0, 0]]
    """
    batch: Batch = {}
    names = dict.fromkeys(chain.from_iterable(samples))
    fills = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORED_LABEL}
    kept_apart = {"image", *fills, *picture_fields}
    media = _media(
        names,
        samples,
        video_fields or {"video": None},
        audio_fields or _AUDIO_FIELDS,
        take_memory,
    )
    joined = media | pad_weights(names, samples, pad_to, padding_side)
    for name in names:
        if name in joined:
            batch |= joined[name]
            continue
        if name.startswith("__"):
            continue
        values = [sample.get(name) for sample in samples]
        if UNCHANGED_TYPES.issuperset(map(type, values)):
            batch[name] = values
            continue
        if name in fills and all(map(is_ids, values)):
            batch[name] = pad_tokens(values, fills[name], pad_to, padding_side)
            continue
        if name not in kept_apart:
            batch[name] = (
                list(map(as_tensor, values))
                if name in list_fields
                else join_values(values, name in row_fields, take_memory)
            )
            continue
        values = list(map(as_tensor, values))
        pictures = [value for value in values if isinstance(value, torch.Tensor)]
        if name in picture_fields and len(pictures) == len(values):
            batch[name] = stack_pictures(pictures)
        elif name == "image" and all(map(are_pictures, values)):
            batch |= join_pictures(values)
        elif name in fills and all(map(are_tokens, values)):
            batch[name] = pad_tokens(values, fills[name], pad_to, padding_side)
        else:
            batch[name] = stack_values(values)
    return batch


def _media(
    names: Iterable[str],
    samples: Sequence[Sample],
    video_fields: Mapping[str, torch.Tensor | None],
    audio_fields: Mapping[str, torch.Tensor],
    take_memory: TakeMemory | None,
) -> dict[str, Batch]:
    """Return what the fields of videos and recordings become, with nothing for their companions."""
    media: dict[str, Batch] = {}
    for name in names:
        joined = None
        if name in video_fields:
            joined = join_videos(name, samples, video_fields[name])
        elif name in audio_fields:
            joined = join_audio(name, samples, audio_fields[name], take_memory)
        if joined is not None:
            media |= {key: {} for key in joined} | {name: joined}
    return media


# -- tokens --------------------------------------------------------------------------


def is_ids(value: Any) -> bool:
    """Tell whether a value is an array as `TextDecoder` makes it. Then no tensor is needed."""
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype == np.int64


def are_tokens(value: Any) -> bool:
    """Tell whether a value of a user is one row of whole numbers."""
    if isinstance(value, torch.Tensor):  # int64 does not hold all of uint64
        is_whole = not (value.is_floating_point() or value.is_complex())
        return value.ndim == 1 and is_whole and value.dtype != torch.uint64
    return isinstance(value, list) and all(
        type(item) is int and abs(item) < 1 << 63 for item in value
    )


def pad_tokens(values: Sequence[Any], fill: int, pad_to: int | None, side: str) -> torch.Tensor:
    """Return int64 [B, T]: the first T tokens of each row, padded on one side."""
    rows = [
        np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value, dtype=np.int64)
        for value in values
    ]
    return _padded(rows, fill, np.int64, pad_to, side)


def pad_weights(
    names: Collection[str], samples: Sequence[Sample], pad_to: int | None, side: str
) -> dict[str, Batch]:
    """Return the weights of labels, float32 [B, T], where each sample has labels as text has them.

    They are padded with 0. Labels of a row without weights have 1.
    """
    if "label_weights" not in names:
        return {}
    rows = []
    for sample in samples:
        labels, weights = sample.get("labels"), sample.get("label_weights")
        if labels is None or not is_ids(labels):
            return {}
        if weights is None:
            weights = labels != IGNORED_LABEL
        if not isinstance(weights, np.ndarray) or weights.shape != labels.shape:
            return {}
        rows.append(weights)
    return {"label_weights": {"label_weights": _padded(rows, 0, np.float32, pad_to, side)}}


def _padded(
    rows: Sequence[NDArray[Any]], fill: int, dtype: DTypeLike, pad_to: int | None, side: str
) -> torch.Tensor:
    """Return [B, T]: the first T entries of each row, padded on one side."""
    width = pad_to or max(map(len, rows))
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for row, padded_row in zip(rows, padded, strict=True):
        kept = row[:width]
        start = width - len(kept) if side == "left" else 0
        padded_row[start : start + len(kept)] = kept
    return torch.from_numpy(padded)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Make tensors on the CPU and outside of inference mode, while this context lasts.

    `torch.set_default_device` and `torch.inference_mode` are settings of a thread. They would
    change batches of the caller's thread, and not those of helper threads and workers. A tensor
    that is made in inference mode cannot be trained on, also where its memory is used again later.
    """
    with ExitStack() as settings:
        if torch.is_inference_mode_enabled():
            settings.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            settings.enter_context(torch.device("cpu"))
        yield
