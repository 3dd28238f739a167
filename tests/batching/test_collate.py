"""Collating: what stacks is a tensor, what does not is a list, and no sample breaks a batch."""

from __future__ import annotations

import collections
import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from PIL import Image
from torch.utils.data import default_collate

import mmstream as mm
from tests.helpers.bad_corpus import make_pipeline
from tests.helpers.chats import tokenizer

LAST = torch.channels_last


def batch_of(name: str, *values: Any, **settings: Any) -> dict[str, Any]:
    """Collate a field; a value that is MISSING is not in its sample."""
    samples = [
        {"__key__": str(row)} | ({} if value is MISSING else {name: value})
        for row, value in enumerate(values)
    ]
    return mm.collate(samples, **settings)


MISSING = object()


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Length(float):
    """A float of a class of its own."""


def buffer(rows: int, height: int = 4, width: int = 6) -> torch.Tensor:
    count = rows * height * width * 3
    return torch.arange(count).remainder(251).to(torch.uint8).view(rows, height, width, 3)


def picture(number: int, height: int = 4, width: int = 6) -> torch.Tensor:
    return buffer(number + 1, height, width)[number].permute(2, 0, 1)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_one_buffer_become_a_batch_without_a_copy(rows):
    memory = buffer(rows)
    image = batch_of("image", *(row.permute(2, 0, 1) for row in memory))["image"]
    assert image.data_ptr() == memory.data_ptr()
    assert image.is_contiguous(memory_format=LAST)
    assert torch.equal(image, memory.permute(0, 3, 1, 2))


BUFFER = buffer(4).permute(0, 3, 1, 2)
BIG = buffer(1, 8, 6)[0].permute(2, 0, 1)


@pytest.mark.parametrize(
    "pictures",
    [
        *(
            [BUFFER[row] for row in rows]
            for rows in ([0, 2, 1], [1, 2, 3], [0, 0, 0], [3, 2, 1, 0])
        ),
        [BUFFER[0], picture(7), BUFFER[2]],  # a substitute from elsewhere
        [BIG[:, :4], BIG[:, 4:]],  # crops of one big picture
        [BIG[:, :, :2], BIG[:, :, 2:4], BIG[:, :, 4:]],
        [*torch.rand(3, 3, 4, 6)],  # of a user's own layout
        [*buffer(3).permute(0, 3, 1, 2).contiguous()],
    ],
)
def test_pictures_that_are_no_whole_buffer_in_order_are_right_too(pictures):
    image = batch_of("image", *pictures)["image"]
    assert torch.equal(image, torch.stack(pictures))
    assert image.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        ([2, 1], [0, 0, 1]),
        ([0, 1, 3], [1, 2, 2, 2]),
        ([1, 0], [0]),
        ([2, 2], [0, 0, 1, 1]),
        ([0, 0], []),
    ],
)
def test_several_or_no_pictures_a_sample_are_numbered_by_row(counts, rows):
    flat = [picture(number) for number in range(len(rows))]
    images = iter(flat)
    values = [[next(images) for _ in range(count)] for count in counts]
    batch = batch_of("image", *(v[0] if len(v) == 1 else v for v in values))
    assert batch["image_row"].tolist() == rows
    assert batch["image_row"].dtype == torch.int64
    assert len(batch["image"]) == len(flat)
    assert all(torch.equal(a, b) for a, b in zip(batch["image"], flat))
    assert isinstance(batch["image"], torch.Tensor) == bool(flat)


@pytest.mark.parametrize("value", [b"raw", "text", Image.new("RGB", (2, 2)), 3, [b"a"]])
def test_an_image_field_of_something_else_is_a_list(value):
    batch = batch_of("image", value, picture(1))
    assert batch["image"][0] is value
    assert "image_row" not in batch


@pytest.mark.parametrize(
    ("side", "expected"),
    [("right", [[5, 6, 7], [8, 9, 9]]), ("left", [[5, 6, 7], [9, 9, 8]])],
)
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_tokens_are_padded_on_either_side(side, expected, kind):
    batch = batch_of("input_ids", kind([5, 6, 7]), kind([8]), pad_token_id=9, padding_side=side)
    assert batch["input_ids"].tolist() == expected
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "fill"), [("attention_mask", 0), ("labels", torch.nn.CrossEntropyLoss().ignore_index)]
)
def test_masks_are_padded_with_zero_and_labels_with_what_a_loss_ignores(name, fill):
    assert batch_of(name, [1, 1], [1])[name].tolist() == [[1, 1], [1, fill]]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad_to", [1, 2, 3, 6])
def test_a_fixed_length_pads_and_cuts(side, pad_to):
    rows = [[1, 2, 3], [4], []]
    padded = batch_of("input_ids", *rows, pad_to=pad_to, padding_side=side)["input_ids"]
    for row, padded_row in zip(rows, padded.tolist(), strict=True):
        kept, fill = row[:pad_to], [0] * (pad_to - len(row))
        assert padded_row == (kept + fill if side == "right" else fill + kept)
    assert batch_of("input_ids", [], [])["input_ids"].shape == (2, 0)


@pytest.mark.parametrize("odd", ["text", b"bytes", 7, [0.5], np.ones((2, 2)), MISSING, None, {}])
@pytest.mark.parametrize("name", ["input_ids", "labels", "other"])
def test_one_odd_sample_makes_a_list_and_breaks_nothing(name, odd):
    usual = np.array([1, 2])
    column = batch_of(name, usual, odd, usual)[name]
    assert isinstance(column, list)
    assert len(column) == 3
    expected = None if odd is MISSING else odd
    assert np.array_equal(np.asarray(column[1]), np.asarray(expected))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2), torch.tensor([1, 2])),
        ((1, 2.5), torch.tensor([1.0, 2.5], dtype=torch.float64)),
        ((True, False), torch.tensor([True, False])),
        ((True, 2), torch.tensor([1, 2])),
        ((np.int64(1), 2), torch.tensor([1, 2])),
        ((np.float64(0.5), np.float32(1)), torch.tensor([0.5, 1.0], dtype=torch.float64)),
        ((np.float32(0.5), 1e300), torch.tensor([0.5, 1e300], dtype=torch.float64)),
        ((np.arange(3), np.arange(3)[::-1]), torch.tensor([[0, 1, 2], [2, 1, 0]])),
        ((torch.arange(2), np.arange(2)), torch.tensor([[0, 1], [0, 1]])),
        ((np.frombuffer(b"ab", np.uint8),) * 2, torch.tensor([[97, 98]] * 2, dtype=torch.uint8)),
        (
            (np.array(1.5), torch.tensor(1.5, dtype=torch.float64)),
            torch.tensor([1.5, 1.5], dtype=torch.float64),
        ),
    ],
)
def test_numbers_and_arrays_of_one_shape_are_stacked(values, expected):
    field = batch_of("x", *values)["x"]
    assert torch.equal(field, expected)
    assert field.dtype == expected.dtype


@pytest.mark.parametrize("value", [1.7e9 + 0.125, 1e300, -7, True])
@pytest.mark.parametrize(
    "kind",
    [
        float,
        int,
        bool,
        Level,
        Length,
        np.float64,
        np.float32,
        np.float16,
        np.int64,
        np.int8,
        np.uint16,
        np.bool_,
    ],
)
@pytest.mark.parametrize("name", ["x", "labels"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_are_those_of_torchs_collate(name, kind, value):
    if issubclass(kind, int | np.integer):
        value = int(np.clip(value, 0, 1 if kind is Level else 100))
    expected = default_collate([kind(value)] * 2)
    field = batch_of(name, *[kind(value)] * 2)[name]
    assert torch.equal(field, expected)
    assert field.dtype == expected.dtype


@pytest.mark.parametrize(
    "values",
    [
        ("", "text"),
        (b"", b"bytes"),
        ({"a": {"b": [1]}}, {"c": None}),
        ([1, 2], [3]),
        (1, None),
        (1, "1"),
        (2**70, 1),
        (2**53 + 1, 0.5),
        (-(2**63) - 1, 5),
        (np.float32(1), None),
        (None, None),
        ({}, {}),
    ],
)
def test_everything_else_is_a_list_as_it_came(values):
    assert batch_of("x", *values)["x"] == list(values)


@pytest.mark.parametrize(
    "values",
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array(["a"]), np.array(["b"])),
        (np.array([None]), np.array([1])),
        (np.zeros(2, dtype=">i4"),) * 2,
        (np.array("2020", "M8[D]"),) * 2,
    ],
)
def test_arrays_that_do_not_stack_are_a_list(values):
    field = batch_of("x", *values)["x"]
    assert isinstance(field, list)
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(field, values, strict=True))


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.none()),
    st.sampled_from(
        [
            MISSING,
            picture(0),
            picture(0, 2, 2),
            [picture(0)],
            [picture(0), picture(1, 2, 2)],
            (),
            np.arange(3),
            np.arange(4.0),
            np.array("a"),
            np.float32(1),
            torch.ones(2, 2),
            np.arange(3)[::-1],
            np.array([None]),
            torch.tensor(True),
            [b"a", None],
        ]
    ),
)


@pytest.mark.slow
@given(st.sampled_from(["image", "input_ids", "labels", "x"]), st.lists(values, min_size=1))
@example("x", [MISSING, MISSING])
def test_no_mixture_of_values_breaks_a_batch(name, column):
    batch = batch_of(name, *column)
    if "image_row" in batch:
        assert len(batch["image"]) == len(batch["image_row"])
    elif name in batch:
        assert len(batch[name]) == len(column)
    else:
        assert all(value is MISSING for value in column)


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_a_users_own_collate_gets_the_samples_and_keeps_the_lineage(corpus, kind):
    def keys_only(samples):
        return kind({"names": [s["__key__"] for s in samples], "__valid__": "overwritten"})

    for batch in mm.Loader(make_pipeline(corpus, collate=keys_only)):
        assert type(batch) is dict
        assert batch["names"] == batch["__key__"]
        assert batch["__valid__"].tolist() == [True] * 12
        assert set(batch) == {"names", "__key__", "__url__", "__valid__", "__lineage__"}


@pytest.mark.parametrize("value", [None, [1], torch.zeros(2)])
def test_a_collate_that_returns_no_dict_is_refused(corpus, value):
    with pytest.raises(mm.ConfigError, match=f"collate returned {type(value).__name__}"):
        list(mm.Loader(make_pipeline(corpus, collate=lambda samples: value)))


def test_captions_are_padded_to_the_length_and_on_the_side_that_the_decoder_names(corpus):
    left = tokenizer(padding_side="left")
    text = mm.TextDecoder(left, max_length=10, padding="max_length")
    for batch in mm.Loader(make_pipeline(corpus, decode=mm.Decode(text=text))):
        assert batch["input_ids"].shape == batch["labels"].shape == (12, 10)
        assert batch["attention_mask"][:, -1].all()
        assert isinstance(batch["txt"], list)
        assert all(isinstance(data, bytes) for data in batch["jpg"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_weights_of_labels_are_padded_with_zeros(side: str) -> None:
    samples: list[dict[str, Any]] = [
        {"labels": np.array([1, -100, 2]), "label_weights": np.array([0.5, 0, 2], np.float32)},
        {"labels": np.array([-100, 3])},
    ]
    batch = mm.collate(samples, pad_to=4, padding_side=side)
    rows = [[0.5, 0, 2, 0], [0, 1, 0, 0]] if side == "right" else [[0, 0.5, 0, 2], [0, 0, 0, 1]]
    assert batch["label_weights"].tolist() == rows
    assert batch["label_weights"].dtype == torch.float32


# -- videos and recordings -------------------------------------------------------------------------


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
