"""The samples of a step become a batch: a dict of tensors and lists.

Place in the flow: after decoding, before the loader. `make_batch` calls `collate`, or the user's
own function, and adds where each row comes from.

A field whose shape differs from row to row becomes a list. So one odd sample never breaks a batch.
Numbers and arrays are stacked. Of pictures, videos and recordings a row may have none, one or
several. So a batch holds all of them one after another, in the order of rows, and companions say
what belongs to which:

    image        all pictures            image_row, where not each row has one
    video        frames of all videos    video_row, video_frames, video_pts_s, video_fps,
                                         video_requested_fps
    audio        padded to one length    audio_row, audio_length, audio_video
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from mmstream.batching.valid import is_flat, mask_labels
from mmstream.decoding.step import DecodedStep
from mmstream.decoding.stored import CollateSettings
from mmstream.errors import ConfigError, escaped
from mmstream.media.fields import address
from mmstream.reading.step import BatchLineage
from mmstream.settings import checked
from mmstream.types import IGNORED_LABEL, Batch, Sample

Collate = Callable[[list[Sample]], Batch]
"""A function from the samples of a batch to the batch."""

_AUDIO_FIELDS = dict.fromkeys(("audio", "audio_features"), torch.empty((0, 0)))

UNCHANGED_TYPES = frozenset({bytes, memoryview, str})
"""A field whose values all have one of these types becomes a list, whatever its name is."""


def make_batch(step: DecodedStep, collate: Collate, repeat: int = 1) -> Batch:
    """Return the batch of a step: the fields of `collate`, and where the rows come from.

    Args:
        step: The decoded samples, one per row.
        collate: The function that makes the fields.
        repeat: Rows of the batch for each sample, side by side.

    Returns:
        The dict of `collate` with more fields. ``__key__`` and ``__url__`` are lists of B, and
        so is ``__source__`` in a mixture. ``__valid__`` is bool [B]: False for padding, for masked
        rows and for rows that no sample could fill. ``__lineage__`` is a `BatchLineage`. With
        `repeat`, ``__repeat__`` is int64 [B]: the number of a row among those of its sample. Where
        ``labels`` has one label per token, the labels of invalid rows are -100, so that a loss
        leaves them out.

    Raises:
        ConfigError: `collate` returned something else than a dict, or ``document_row``.
    """
    lineage, samples = step
    if repeat > 1:
        lineage, samples = replace(lineage, repeat=repeat), _repeated(samples, repeat)
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
    if repeat > 1:
        batch["__repeat__"] = torch.arange(repeat).repeat(len(lineage.valid))
    return with_lineage(batch, lineage)


def _repeated(samples: list[Sample], repeat: int) -> list[Sample]:
    """Return each sample `repeat` times in a row. Nothing that can be written to is shared."""
    return [
        (_copied_sample(sample) if number else sample) | {"__repeat__": number}
        for sample in samples
        for number in range(repeat)
    ]


def _copied_sample(sample: Sample) -> Sample:
    copied = {}
    for name, value in sample.items():
        try:
            copied[name] = _copied(value)
        except Exception as error:
            raise ConfigError(
                f"{address(sample, name)}: repeat= copies each field, and this "
                f"{type(value).__name__} cannot be copied ({escaped(str(error))}): make it in "
                "collate="
            ) from error
    return copied


def _copied(value: Any) -> Any:
    """Return a copy of a value of a sample. Only views of bytes, which are read-only, are shared.

    ``deepcopy`` of a tensor would copy the memory of the whole batch, which it is a part of.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value if isinstance(value, memoryview) else deepcopy(value)


def with_lineage(batch: Batch, lineage: BatchLineage) -> Batch:
    """Return a batch with ``__valid__`` and ``__lineage__``, changed in place.

    Labels of rows that are not valid become -100.
    """
    batch["__valid__"] = torch.tensor(lineage.valid).repeat_interleave(lineage.repeat)
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
            what they are without any, such as float32 [0, 0], whose last side is the least that
            they are padded to. Default: ``audio`` and ``audio_features``.
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
        values: list[Any] = [sample.get(name) for sample in samples]
        if name == "image" or name in list_fields or name in picture_fields:
            values = list(map(as_tensor, values))
        if name in list_fields or UNCHANGED_TYPES.issuperset(map(type, values)):
            batch[name] = values
        elif name in fills and all(map(are_tokens, values)):
            batch[name] = pad_tokens(values, fills[name], pad_to, padding_side)
        elif name in picture_fields and all(isinstance(value, torch.Tensor) for value in values):
            batch[name] = stack_pictures(values)
        elif name == "image" and all(map(are_pictures, values)):
            batch |= join_pictures(values)
        else:
            batch[name] = join_values(values, name in row_fields, take_memory)
    return batch


@dataclass(frozen=True)
class Collator:
    """`collate`, with what it must know of the decoders.

    Attributes:
        settings: Of the decoders.
        row_fields: As for `collate`.
        take_memory: The same.
        min_tokens: The least length that token fields are padded to.
    """

    settings: CollateSettings = field(default_factory=CollateSettings)
    row_fields: Collection[str] = ()
    take_memory: TakeMemory | None = None
    min_tokens: int | None = None

    def __call__(self, samples: list[Sample]) -> Batch:
        """Make a batch of decoded samples."""
        settings = self.settings
        if self.min_tokens is not None:
            rows: list[Any] = [sample.get("input_ids") for sample in samples]
            longest = (len(row) for row in rows if are_tokens(row))
            settings = msgspec.structs.replace(settings, pad_to=max(self.min_tokens, *longest, 0))
        return collate(
            samples,
            pad_token_id=settings.pad_token_id or 0,
            pad_to=settings.pad_to,
            padding_side=settings.padding_side,
            picture_fields=settings.picture_fields,
            row_fields=self.row_fields,
            list_fields=settings.list_fields,
            video_fields={
                name: None if shape is None else torch.empty(shape, dtype=torch.uint8)
                for name, shape in settings.video_fields.items()
            },
            audio_fields={
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (shape, dtype) in settings.audio_fields.items()
            },
            take_memory=self.take_memory,
        )


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


def are_tokens(value: Any) -> bool:
    """Tell whether a value is one row of whole numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "biu" and value.dtype != np.uint64
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
        if not isinstance(labels, np.ndarray) or not are_tokens(labels):
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


# -- the values of one field become one tensor, or a list ------------------------------------------

TakeMemory: TypeAlias = Callable[[int], torch.Tensor]
"""Returns memory of so many bytes, uint8 [num_bytes]."""


def as_list(value: Any) -> Sequence[Any]:
    """Return the values of a field of a sample: none, one or several."""
    return value if isinstance(value, list | tuple) else () if value is None else (value,)


def join_values(values: Sequence[Any], are_rows: bool, take_memory: TakeMemory | None) -> Any:
    """Return the values of a field as one tensor, or as they are where they do not make one.

    Args:
        values: One of each sample.
        are_rows: Tensors may be rows of one buffer. They are joined without a copy.
        take_memory: As `collate` has it.
    """
    joined = _stack_arrays(values, take_memory)
    if joined is None and are_rows:
        joined = join_rows(values)
    return stack_values(list(map(as_tensor, values))) if joined is None else joined


def as_tensor(value: Any) -> Any:
    """Return an array as a tensor where torch has its type."""
    if not isinstance(value, np.ndarray):
        return value
    try:  # a plain copy, because torch refuses reversed views and warns about read-only arrays
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):
        return value


def stack_values(values: list[Any]) -> Any:
    """Return the values as one tensor, or as they are where they do not make one.

    Numbers keep their type, as torch's ``default_collate`` keeps it: floats are float64, whole
    numbers int64, and numpy scalars of one type have that.
    """
    kinds = set(map(type, values))
    if any(issubclass(kind, np.generic) for kind in kinds):
        numbers = as_tensor(np.array(values)) if len(kinds) == 1 else None
        if isinstance(numbers, torch.Tensor):
            return numbers
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
        kinds = set(map(type, values))
    if all(issubclass(kind, int | float) for kind in kinds):  # enumerations' numbers among them
        has_floats = any(issubclass(kind, float) for kind in kinds)
        try:
            joined = torch.tensor(values, dtype=torch.float64 if has_floats else None)
        except (RuntimeError, OverflowError, ValueError):  # an integer beyond 64 bits
            return values
        is_exact = len(kinds) == 1 or all(
            isinstance(number, float) or number == kept
            for number, kept in zip(values, joined.tolist(), strict=True)
        )  # whole numbers beyond 2^53 among floats are not
        return joined if is_exact else values
    if all(isinstance(value, torch.Tensor) for value in values) and (
        len({(value.shape, value.dtype, value.device) for value in values}) == 1
    ):
        return torch.stack(values)
    return values


def _stack_arrays(values: Sequence[Any], take_memory: TakeMemory | None) -> torch.Tensor | None:
    """Return arrays of one shape and type as one tensor, with one copy. None: they are not."""
    first = values[0]
    if not all(
        type(value) is np.ndarray and value.shape == first.shape and value.dtype == first.dtype
        for value in values
    ):
        return None
    try:
        empty = torch.from_numpy(np.empty(0, first.dtype))
    except (TypeError, ValueError):  # a type that torch does not have
        return None
    stacked = _taken((len(values), *first.shape), empty, take_memory)
    np.stack(values, out=stacked.numpy())
    return stacked


def _taken(
    shape: tuple[int, ...], like: torch.Tensor, take_memory: TakeMemory | None
) -> torch.Tensor:
    """Return memory for a field, of the type of a tensor: that of the batch on the CPU, if any."""
    num_bytes = math.prod(shape) * like.element_size()
    if take_memory is None or like.device.type != "cpu" or not num_bytes:
        return like.new_empty(shape)
    return take_memory(num_bytes).view(like.dtype).view(shape)


def join_rows(values: Sequence[Any]) -> torch.Tensor | None:
    """Return tensors of one shape that are rows of one buffer as one tensor, without a copy.

    None: they are something else.
    """
    first = values[0]
    if not isinstance(first, torch.Tensor) or not all(
        isinstance(value, torch.Tensor) and is_alike(value, first) for value in values
    ):
        return None
    shape, strides = (len(values), *first.shape), (first.numel(), *first.stride())
    return _in_one_buffer(values, shape, strides)


def _in_one_buffer(
    tensors: Sequence[torch.Tensor], shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor | None:
    """Return a view of tensors that lie one after the other in one buffer. None: they do not.

    Decoders write into the rows of one buffer.
    """
    first, memory = tensors[0], tensors[0].untyped_storage()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    starts = list(accumulate(sizes, initial=first.data_ptr()))
    if starts.pop() > memory.data_ptr() + memory.nbytes() or any(
        tensor.data_ptr() != start or tensor.stride() != first.stride()
        for tensor, start in zip(tensors, starts, strict=True)
    ):
        return None
    return first.as_strided(shape, strides, first.storage_offset())


def is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape, type and device."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.device == second.device
    )


# -- pictures --------------------------------------------------------------------------------------


def are_pictures(value: Any) -> bool:
    """Tell whether a value is what ``image`` may be: a picture, several, or none."""
    return all(isinstance(image, torch.Tensor) for image in as_list(value))


def join_pictures(values: Sequence[Any]) -> Batch:
    """Return ``image``, and ``image_row`` where not every row has one image of one shape."""
    images_of_rows = list(map(as_list, values))
    images = [image for row in images_of_rows for image in row]
    joined = stack_pictures(images)
    if isinstance(joined, torch.Tensor) and all(len(row) == 1 for row in images_of_rows):
        return {"image": joined}
    return {"image": joined, "image_row": _rows(images_of_rows)}


def stack_pictures(images: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return images of one shape as one tensor, without a copy where they are rows of one buffer.

    Images of several shapes stay a list.
    """
    if not images or any(not is_alike(image, images[0]) for image in images):
        return images
    rows = join_rows(images)
    joined = torch.stack(images) if rows is None else rows
    return joined.contiguous(memory_format=torch.channels_last) if joined.ndim == 4 else joined


# -- videos and recordings -------------------------------------------------------------------------

FEATURES = "_features"
"""How the name of a field ends that holds features of recordings in place of their samples."""

Tensors: TypeAlias = list[torch.Tensor]


def join_videos(name: str, samples: Sequence[Sample], empty: torch.Tensor | None) -> Batch | None:
    """Join a field of videos, each [F, C, H, W], with as many times in seconds.

    Args:
        name: The field. A sample has one video, a list of them, or none.
        samples: The decoded samples, one per row.
        empty: The field without any video, [0, C, H, W]. None: it is a list.

    Returns:
        The field and its companions, as `collate` describes them. None: these are not videos as
        `VideoDecoder` makes them.

    Raises:
        ConfigError: A video has not as many times as frames.
    """
    times = f"{name}_pts_s"
    if not all(times in sample for sample in samples if name in sample):
        return None
    of_rows = _entries_of_rows(samples, name, num_dims=(4,))
    times_of_rows = _entries_of_rows(samples, times, num_dims=(1,))
    if of_rows is None or times_of_rows is None:
        return None
    _check_times(name, samples, of_rows, times_of_rows)
    videos = list(chain(*of_rows))
    batch: Batch = {
        name: videos if empty is None else _frames(videos, empty),
        f"{name}_row": _rows(of_rows),
        f"{name}_frames": torch.tensor([len(video) for video in videos], dtype=torch.int64),
        times: torch.cat([torch.empty(0, dtype=torch.float64), *chain(*times_of_rows)]),
    }
    for rate in (f"{name}_fps", f"{name}_requested_fps"):
        rates = _numbers_of(rate, name, samples, len(videos), torch.float64)
        if rates is not None:
            batch[rate] = rates
    return batch


def _numbers_of(
    name: str, media: str, samples: Sequence[Sample], num_media: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a field with one number for each medium of a batch, [num_media]. None: it has not."""
    if not all(name in sample for sample in samples if media in sample):
        return None
    of_rows = _entries_of_rows(samples, name, num_dims=(1,))
    if of_rows is None:
        return None
    numbers = torch.cat([torch.empty(0, dtype=dtype), *chain(*of_rows)])
    return numbers.to(dtype) if len(numbers) == num_media else None


def join_audio(
    name: str,
    samples: Sequence[Sample],
    empty: torch.Tensor,
    take_memory: TakeMemory | None = None,
) -> Batch | None:
    """Join a field of recordings, each [T] or [C, T], or of their features, each [M, T].

    Args:
        name: The field. A sample has one recording, a list of them, or none.
        samples: The decoded samples, one per row.
        empty: The field without any recording, such as float32 [0, 0].
        take_memory: Returns memory, uint8 [num_bytes]. None: new memory.

    Returns:
        The field and its companions, as `collate` describes them. None: these are not recordings as
        `AudioDecoder` makes them.
    """
    stem = name.removesuffix(FEATURES)
    length, video = f"{name}_length", f"{stem}_video"
    of_rows = _entries_of_rows(samples, name, num_dims=(1, 2))
    if of_rows is None:
        return None
    recordings = list(chain(*of_rows))
    lengths = torch.tensor([recording.shape[-1] for recording in recordings], dtype=torch.int64)
    if name.endswith(FEATURES):  # the features of a recording may be padded already
        own = _numbers_of(length, name, samples, len(recordings), torch.int64)
        lengths = lengths if own is None else own
    batch: Batch = {
        name: _padded_audio(recordings, empty, take_memory),
        f"{stem}_row": _rows(of_rows),
        length: lengths,
    }
    if any(video in sample for sample in samples):
        batch[video] = _videos_of_tracks(video, samples, of_rows)
    return batch


def mean_rate(times_s: Sequence[float]) -> float:
    """Return the mean number of frames in a second; 1 where times do not say it."""
    span = float(times_s[-1] - times_s[0])
    return (len(times_s) - 1) / span if span > 0 else 1.0


def _entries_of_rows(
    samples: Sequence[Sample], name: str, num_dims: Collection[int]
) -> list[list[Any]] | None:
    """Return the tensors of a field for each row.

    None: some value is something else, or has another number of dimensions.
    """
    rows = [[_as_tensor(value) for value in as_list(sample.get(name))] for sample in samples]
    are_fit = (entry is not None and len(entry.shape) in num_dims for row in rows for entry in row)
    return rows if all(are_fit) else None


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor of numbers, without a copy where that is possible; None: there is none."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        # torch refuses reversed views, and warns about read-only arrays.
        return torch.from_numpy(np.require(value, requirements=("C", "W")))
    return value if isinstance(value, torch.Tensor) else None


def _check_times(
    name: str, samples: Sequence[Sample], of_rows: list[list[Any]], times_of_rows: list[Tensors]
) -> None:
    for sample, videos, times in zip(samples, of_rows, times_of_rows, strict=True):
        if list(map(len, videos)) != list(map(len, times)):
            raise ConfigError(
                f"{sample.get('__key__', '')}: {name} has {list(map(len, videos))} frames and "
                f"{name}_pts_s {list(map(len, times))} times: a transform that leaves out frames "
                "must leave out their times too"
            )


def _rows(of_rows: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the row of each entry: rows with 2, 0 and 1 entries give [0, 0, 2]."""
    return torch.repeat_interleave(torch.tensor([len(row) for row in of_rows], dtype=torch.int64))


def _frames(videos: Tensors, empty: torch.Tensor) -> torch.Tensor | Tensors:
    """Return the frames of all videos as one tensor; videos of several sizes stay a list.

    Decoders write the videos of a batch one after the other. Then nothing is copied.
    """
    if not videos:
        return empty
    if len({(video.shape[1:], video.dtype, video.device) for video in videos}) > 1:
        return videos
    joined = None
    if all(video.is_contiguous(memory_format=torch.channels_last) for video in videos):
        channels, height, width = videos[0].shape[1:]
        shape = (sum(map(len, videos)), channels, height, width)
        strides = (channels * height * width, 1, width * channels, channels)
        joined = _in_one_buffer(videos, shape, strides)
    if joined is None:
        joined = torch.cat(videos).contiguous(memory_format=torch.channels_last)
    return joined


def _padded_audio(
    recordings: Tensors, empty: torch.Tensor, take_memory: TakeMemory | None
) -> torch.Tensor | Tensors:
    """Return [N, ..., T], filled with zeros; recordings that differ in channels stay a list."""
    if not recordings:
        return empty
    kinds = {(recording.shape[:-1], recording.dtype) for recording in recordings}
    if len(kinds) > 1:
        return recordings
    first = recordings[0]
    longest = max(empty.shape[-1], *(recording.shape[-1] for recording in recordings))
    padded = _taken((len(recordings), *first.shape[:-1], longest), first, take_memory)
    for recording, row in zip(recordings, padded, strict=True):
        num_samples = recording.shape[-1]
        row[..., :num_samples] = recording
        row[..., num_samples:] = 0
    return padded


def _videos_of_tracks(
    video: str, samples: Sequence[Sample], of_rows: list[Tensors]
) -> torch.Tensor:
    """Return the number of the video that each recording is the track of, and -1 for the others.

    A sample numbers its own videos. A batch numbers all videos of all rows.
    """
    numbers: list[int] = []
    num_before = 0
    # "audio_video" counts the videos of "video", and "mp4_audio_video" those of "mp4".
    videos = video.removesuffix("audio_video").removesuffix("_") or "video"
    for sample, row in zip(samples, of_rows, strict=True):
        own = np.atleast_1d(np.asarray(sample.get(video, ()), dtype=np.int64)).tolist()
        if len(own) != len(row):
            own = [-1] * len(row)
        numbers += [number + num_before if number >= 0 else -1 for number in own]
        num_before += len(as_list(sample.get(videos)))
    return torch.tensor(numbers, dtype=torch.int64)
