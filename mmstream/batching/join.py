"""The values of one field of a step become one tensor, or a list where their shapes differ.

    collate.collate -> join.py

Numbers and arrays are stacked. Of pictures, videos and recordings a row may have none, one or
several. So a batch holds all of them one after another, in the order of rows, and companions say
what belongs to which:

    image        all pictures            image_row, where not each row has one
    video        frames of all videos    video_row, video_frames, video_pts_s, video_fps,
                                         video_requested_fps
    audio        padded to the longest   audio_row, audio_length, audio_video
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from mmstream.errors import ConfigError
from mmstream.types import Batch, Sample

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
    shape = (len(values), *first.shape)
    num_bytes = len(values) * first.nbytes
    if take_memory is None or not num_bytes:
        stacked = empty.new_empty(shape)
    else:
        stacked = take_memory(num_bytes).view(empty.dtype).view(shape)
    np.stack(values, out=stacked.numpy())
    return stacked


def join_rows(values: Sequence[Any]) -> torch.Tensor | None:
    """Return tensors of one shape that are rows of one buffer as one tensor, without a copy.

    None: they are something else.
    """
    first = values[0]
    if not isinstance(first, torch.Tensor) or not all(
        isinstance(value, torch.Tensor) and is_alike(value, first) for value in values
    ):
        return None
    num_bytes = first.numel() * first.element_size()
    start = first.data_ptr()
    memory = first.untyped_storage()
    # Decoders write into the rows of one buffer. Then row i starts i * num_bytes after the first.
    if start + num_bytes * len(values) > memory.data_ptr() + memory.nbytes() or any(
        value.data_ptr() != start + num_bytes * i or value.stride() != first.stride()
        for i, value in enumerate(values)
    ):
        return None
    shape, strides = (len(values), *first.shape), (first.numel(), *first.stride())
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
    counts = torch.tensor([len(row) for row in images_of_rows])
    # Example: rows with 2, 0 and 1 images give [0, 0, 2].
    return {"image": joined, "image_row": torch.repeat_interleave(counts)}


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
        The field and its companions, as `collate` describes them. None: these are no videos as
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
    videos = [video for row in of_rows for video in row]
    batch: Batch = {
        name: videos if empty is None else _frames(videos, empty),
        f"{name}_row": _rows(of_rows),
        f"{name}_frames": torch.tensor([len(video) for video in videos], dtype=torch.int64),
        times: torch.cat([torch.empty(0, dtype=torch.float64), *_flat(times_of_rows)]),
    }
    for rate in (f"{name}_fps", f"{name}_requested_fps"):
        if all(rate in sample for sample in samples if name in sample):
            rates = _entries_of_rows(samples, rate, num_dims=(1,))
            if rates is not None and sum(map(len, _flat(rates))) == len(videos):
                batch[rate] = torch.cat([torch.empty(0, dtype=torch.float64), *_flat(rates)])
    return batch


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
        The field and its companions, as `collate` describes them. None: these are no recordings as
        `AudioDecoder` makes them.
    """
    stem = name.removesuffix(FEATURES)
    length, video = f"{name}_length", f"{stem}_video"
    of_rows = _entries_of_rows(samples, name, num_dims=(1, 2))
    if of_rows is None:
        return None
    recordings = _flat(of_rows)
    lengths = [recording.shape[-1] for recording in recordings]
    if name.endswith(FEATURES) and all(length in sample for sample in samples if name in sample):
        # The features of a recording may be padded already.
        own = _entries_of_rows(samples, length, num_dims=(1,))
        if own is not None and sum(map(len, _flat(own))) == len(recordings):
            lengths = [int(number) for tensor in _flat(own) for number in tensor]
    batch: Batch = {
        name: _padded(recordings, empty, take_memory),
        f"{stem}_row": _rows(of_rows),
        length: torch.tensor(lengths, dtype=torch.int64),
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


def _flat(of_rows: Sequence[Tensors]) -> Tensors:
    return [tensor for row in of_rows for tensor in row]


def _rows(of_rows: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the row of each entry: rows with 2, 0 and 1 entries give [0, 0, 2]."""
    return torch.repeat_interleave(torch.tensor([len(row) for row in of_rows], dtype=torch.int64))


def _frames(videos: Tensors, empty: torch.Tensor) -> torch.Tensor | Tensors:
    """Return the frames of all videos as one tensor; videos of several sizes stay a list.

    Decoders write the videos of a batch one behind the other. Then nothing is copied.
    """
    if not videos:
        return empty
    first = videos[0]
    kinds = {(video.shape[1:], video.dtype, video.device) for video in videos}
    if len(kinds) > 1:
        return videos
    if not all(video.is_contiguous(memory_format=torch.channels_last) for video in videos):
        return torch.cat(videos).contiguous(memory_format=torch.channels_last)
    channels, height, width = first.shape[1:]
    shape = (sum(map(len, videos)), channels, height, width)
    strides = (channels * height * width, 1, width * channels, channels)
    sizes = [video.numel() * video.element_size() for video in videos]
    starts = accumulate(sizes, initial=first.data_ptr())
    memory = first.untyped_storage()
    is_whole = all(video.data_ptr() == start for video, start in zip(videos, starts, strict=False))
    end = first.data_ptr() + sum(sizes)
    if is_whole and end <= memory.data_ptr() + memory.nbytes():
        return first.as_strided(shape, strides, first.storage_offset())
    return torch.cat(videos).contiguous(memory_format=torch.channels_last)


def _padded(
    recordings: Tensors, empty: torch.Tensor, take_memory: TakeMemory | None
) -> torch.Tensor | Tensors:
    """Return [N, ..., T], filled with zeros; recordings that differ in channels stay a list."""
    if not recordings:
        return empty
    kinds = {(recording.shape[:-1], recording.dtype) for recording in recordings}
    if len(kinds) > 1:
        return recordings
    first = recordings[0]
    longest = max(recording.shape[-1] for recording in recordings)
    shape = (len(recordings), *first.shape[:-1], longest)
    if take_memory is None or first.device.type != "cpu" or not longest:
        padded = first.new_empty(shape)
    else:
        num_bytes = math.prod(shape) * first.element_size()
        padded = take_memory(num_bytes).view(first.dtype).view(shape)
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
