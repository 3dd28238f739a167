"""Collating and cutting videos and recordings: all of a batch, one after another, and whose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmstream as mm

LAST = torch.channels_last


def video(number: int, num_frames: int, height: int = 2, width: int = 4) -> torch.Tensor:
    """Frames as a decoder makes them: a view of [F, H, W, 3]."""
    pixels = torch.full((num_frames, height, width, 3), number, dtype=torch.uint8)
    return pixels.permute(0, 3, 1, 2)


def times(number: int, num_frames: int) -> torch.Tensor:
    return number + torch.arange(num_frames, dtype=torch.float64) / 4


EMPTY = {"video": torch.empty((0, 3, 2, 4), dtype=torch.uint8)}
"""The settings of a decoder whose frames all have one size."""


def with_videos(*numbers_of_frames: int, first: int = 0) -> dict[str, Any]:
    """A decoded sample of such videos."""
    numbered = list(enumerate(numbers_of_frames, start=first))
    videos, stamps = [video(*each) for each in numbered], [times(*each) for each in numbered]
    if len(videos) == 1:
        return {"__key__": "k", "video": videos[0], "video_pts_s": stamps[0]}
    return {"__key__": "k", "video": videos, "video_pts_s": stamps}


def of(batch: dict[str, Any], stem: str) -> dict[str, Any]:
    """The companions of a field as lists, and the field where it is a tensor of two axes."""
    names = [name for name in batch if name.startswith(stem)]
    tensors = {name: batch[name] for name in names if isinstance(batch[name], torch.Tensor)}
    return {name: value.tolist() for name, value in tensors.items() if value.ndim <= 3}


def test_videos_of_one_size_are_one_tensor_of_frames_with_their_rows_and_times() -> None:
    samples = [with_videos(2, 1), with_videos(), with_videos(3, first=2)]
    batch = mm.collate(samples, video_fields=EMPTY)
    assert batch["video"].shape == (6, 3, 2, 4)
    assert batch["video"].is_contiguous(memory_format=LAST)
    assert batch["video"][:, 0, 0, 0].tolist() == [0, 0, 1, 2, 2, 2]
    assert of(batch, "video") == {
        "video_row": [0, 0, 2],
        "video_frames": [2, 1, 3],
        "video_pts_s": [0, 0.25, 1, 2, 2.25, 2.5],
    }
    dtypes = [batch[f"video_{name}"].dtype for name in ("row", "frames", "pts_s")]
    assert dtypes == [torch.int64, torch.int64, torch.float64]


@pytest.mark.parametrize("height", [2, 4])
def test_videos_of_any_size_are_a_list_also_if_their_sizes_agree(height: int) -> None:
    samples = [with_videos(2), with_videos(3)]
    samples[1]["video"] = video(1, 3, height)
    batch = mm.collate(samples)
    assert [tuple(each.shape) for each in batch["video"]] == [(2, 3, 2, 4), (3, 3, height, 4)]
    assert mm.collate([with_videos()])["video"] == []
    assert batch["video_frames"].tolist() == [2, 3]
    assert len(batch["video_pts_s"]) == 5


@pytest.mark.parametrize("counts", [[1], [3, 2], [1, 1, 1]])
def test_videos_in_one_buffer_become_a_batch_without_a_copy(counts: list[int]) -> None:
    memory = torch.arange(sum(counts) * 24).to(torch.uint8).view(-1, 2, 4, 3)
    videos = memory.permute(0, 3, 1, 2).split(counts)
    samples = [
        {"video": each, "video_pts_s": times(0, len(each)), "__key__": "k"} for each in videos
    ]
    batch = mm.collate(samples, video_fields=EMPTY)
    assert batch["video"].data_ptr() == memory.data_ptr()
    assert torch.equal(batch["video"], memory.permute(0, 3, 1, 2))
    backwards = mm.collate(samples[::-1], video_fields=EMPTY)
    assert torch.equal(backwards["video"], torch.cat(videos[::-1]))


def test_a_batch_without_videos_has_the_same_fields() -> None:
    batch = mm.collate([with_videos(), with_videos()], video_fields=EMPTY)
    assert list(batch) == list(mm.collate([with_videos(1)]))
    assert batch["video"].shape == (0, 3, 2, 4)
    assert batch["video"].dtype == torch.uint8
    assert [len(value) for value in batch.values()] == [0] * 4


def test_a_video_of_a_user_without_times_is_stacked_as_before() -> None:
    batch = mm.collate([{"video": torch.zeros(2, 3, 4, 4)}, {"video": torch.ones(2, 3, 4, 4)}])
    assert list(batch) == ["video"]
    assert batch["video"].shape == (2, 2, 3, 4, 4)


def test_a_transform_that_loses_frames_but_not_their_times_is_a_mistake() -> None:
    sample = with_videos(3)
    with pytest.raises(mm.ConfigError, match=r"k: video has \[2\] frames and video_pts_s \[3\]"):
        mm.collate([{**sample, "video": sample["video"][:2]}])


def recording(number: int, length: int) -> np.ndarray:
    return np.full(length, number + 1, np.float32)


STEREO = torch.ones(2, 3, dtype=torch.int16)
FEATURES = torch.ones(1, 5)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (
            [{"audio": recording(0, 3)}, {"audio": [recording(1, 1), recording(2, 2)]}],
            {
                "audio": [[1, 1, 1], [2, 0, 0], [3, 3, 0]],
                "audio_row": [0, 1, 1],
                "audio_length": [3, 1, 2],
            },
        ),
        (
            [{"audio": STEREO}, {"audio": STEREO[:, :1]}],
            {
                "audio": [[[1, 1, 1]] * 2, [[1, 0, 0]] * 2],
                "audio_row": [0, 1],
                "audio_length": [3, 1],
            },
        ),
        (  # another number of channels
            [{"audio": STEREO}, {"audio": STEREO[:1]}],
            {"audio_row": [0, 1], "audio_length": [3, 3]},
        ),
        (
            [{"audio": []}, {}],
            {"audio": [], "audio_row": [], "audio_length": []},
        ),
        (
            [
                {"audio_features": FEATURES, "audio_features_length": np.array([3])},
                {"audio_features": [], "audio_features_length": np.zeros(0)},
            ],
            {
                "audio_features": [[[1] * 5]],
                "audio_features_length": [3],
                "audio_row": [0],
            },
        ),
        (
            [{"audio_features": FEATURES}, {"audio_features": FEATURES[:, :2]}],
            {
                "audio_features": [[[1] * 5], [[1, 1, 0, 0, 0]]],
                "audio_features_length": [5, 2],
                "audio_row": [0, 1],
            },
        ),
    ],
    ids=["mono", "stereo", "mixed", "none", "features", "features of two lengths"],
)
def test_recordings_are_padded_with_silence_and_say_their_rows_and_lengths(
    samples: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    assert of(mm.collate(samples), "audio") == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_recordings_keep_their_dtype_and_their_channels(dtype: torch.dtype) -> None:
    recordings = [torch.ones(2, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)]
    mixed = mm.collate([{"audio": each} for each in recordings])["audio"]
    assert all(map(torch.equal, mixed, recordings))
    assert mm.collate([{"audio": recordings[0]}])["audio"].dtype == dtype


def test_tracks_name_their_video_among_those_of_the_batch() -> None:
    two = {**with_videos(1, 1), "audio": [recording(0, 1)], "audio_video": np.array([1])}
    more = {
        **with_videos(1),
        "audio": [recording(1, 1), recording(2, 1)],
        "audio_video": np.array([0, -1]),
    }
    assert mm.collate([two, more])["audio_video"].tolist() == [1, 2, -1]


@pytest.mark.parametrize("value", [b"RIFF", "a name", 7, [b"RIFF"], {"rate": 8000}])
def test_an_audio_field_of_something_else_is_a_list(value: Any) -> None:
    batch = mm.collate([{"audio": value}, {"audio": recording(0, 2)}])
    assert list(batch) == ["audio"]
    assert batch["audio"][0] == value


def test_fields_of_other_names_are_joined_where_a_pipeline_says_so() -> None:
    sample = {"mp4": video(0, 2), "mp4_pts_s": times(0, 2), "wav": recording(0, 2)}
    batch = mm.collate(
        [sample, sample],
        video_fields={"mp4": EMPTY["video"]},
        audio_fields={"wav": torch.empty((0, 0))},
    )
    assert batch["mp4"].shape == (4, 3, 2, 4)
    assert batch["mp4_row"].tolist() == batch["wav_row"].tolist() == [0, 1]
    assert batch["wav_length"].tolist() == [2, 2]


def test_the_rate_of_each_video_goes_with_it_into_micro_batches() -> None:
    rates = [(0.5, 2.0), (), (1.0,)]
    names = ("video_fps", "video_requested_fps")
    samples = [
        {**with_videos(*[2] * len(row)), **dict.fromkeys(names, np.array(row, dtype=np.float64))}
        for row in rates
    ]
    batch = mm.collate(samples)
    parts = mm.split_rows({**batch, "__valid__": torch.ones(3, dtype=torch.bool)}, 3)
    for name in names:
        assert batch[name].tolist() == [0.5, 2.0, 1.0]
        assert [part[name].tolist() for part in parts] == [[0.5, 2.0], [], [1.0]]


@st.composite
def media_batches(draw: Any) -> dict[str, Any]:
    """Batches of rows that have 0 to 2 videos, and their tracks or other recordings."""
    num_rows = draw(st.integers(1, 6))
    has_one_size = draw(st.booleans())
    samples = []
    for row in range(num_rows):
        lengths = draw(st.lists(st.integers(1, 3), max_size=2))
        sample = with_videos(*lengths, first=2 * row)
        if not has_one_size and lengths:
            sample["video"] = [video(2 * row + i, n, height=1 + row) for i, n in enumerate(lengths)]
            sample["video_pts_s"] = [times(2 * row + i, n) for i, n in enumerate(lengths)]
        tracks = draw(st.lists(st.integers(-1, len(lengths) - 1), max_size=3))
        sample["audio"] = [recording(10 * row + i, 1 + i) for i, _ in enumerate(tracks)]
        sample["audio_video"] = np.array(tracks, dtype=np.int64)
        samples.append(sample)
    batch = mm.collate(samples, video_fields=EMPTY if has_one_size else None)
    batch["__key__"] = [str(row) for row in range(num_rows)]
    batch["__valid__"] = torch.ones(num_rows, dtype=torch.bool)
    return batch


def by_row(batch: dict[str, Any]) -> dict[str, list[Any]]:
    """What each row of a batch has: its videos with their times, and its recordings."""
    counts = batch["video_frames"].tolist()
    videos = batch["video"]
    frames = videos if isinstance(videos, list) else list(torch.split(videos, counts))
    stamps = torch.split(batch["video_pts_s"], counts)
    of_videos = [
        [tuple(each.shape), each.flatten().tolist(), stamp.tolist()]
        for each, stamp in zip(frames, stamps, strict=True)
    ]
    columns = (batch[f"audio{name}"] for name in ("", "_length", "_video"))
    of_recordings = [
        [samples[:length].tolist(), None if number < 0 else of_videos[number]]
        for samples, length, number in zip(*columns, strict=True)
    ]
    rows: dict[str, list[Any]] = {key: [] for key in batch["__key__"]}
    for stem, media in (("video", of_videos), ("audio", of_recordings)):
        for row, each in zip(batch[f"{stem}_row"].tolist(), media, strict=True):
            rows[batch["__key__"][row]].append(each)
    return rows


@given(batch=media_batches(), num_parts=st.integers(1, 7))
def test_each_row_keeps_its_videos_and_recordings_in_a_micro_batch(
    batch: dict[str, Any], num_parts: int
) -> None:
    parts = mm.split_rows(batch, num_parts)
    shown: dict[str, list[Any]] = {}
    for part in parts:
        shown |= by_row(part)
    assert shown == by_row(batch)
    assert list(shown) == batch["__key__"]


def test_micro_batches_are_views() -> None:
    samples = [
        {**with_videos(2), "audio": recording(0, 3), "image": video(0, 1)[0], "cls": number}
        for number in range(4)
    ]
    batch = mm.collate(samples, video_fields=EMPTY) | {"__valid__": torch.ones(4, dtype=torch.bool)}
    for part in mm.split_rows(batch, 2):
        for name in ("video", "video_pts_s", "audio", "video_frames", "image", "cls"):
            first, second = part[name], batch[name]
            assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        for name in ("video", "image"):
            assert part[name].is_contiguous(memory_format=LAST)
