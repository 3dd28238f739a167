"""Videos that are lists of pictures with times: which frames are taken, and what is refused."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

import mmstream as mm
from mmstream import model_inputs
from mmstream.decoding.sample import decode_sample
from mmstream.errors import DecodeError
from mmstream.media.fields import image_fields
from mmstream.media.frames import frame_times
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.media_families import MediaFamily, qwen2_vl, qwen3_vl, transformers
from tests.helpers.media_models import assert_equal_inputs, model_of

FROM_TEN = [10.0, 10.4, 11.0, 12.0, 13.0, 13.1]
SMALL = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28}}
SMALL_3 = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 300 * 32 * 32}}


def listed(times: Any, num_frames: int = 6, name: str = "frames") -> dict[str, bytes]:
    """The members of a list of frames, in any order."""
    frames = {f"{name}.{i}.jpg": jpeg(i) for i in reversed(range(num_frames))}
    return {**frames, name: json.dumps(times).encode()}


def dataset_of(folder: Path, *samples: dict[str, bytes]) -> mm.Dataset:
    return mm.open_dataset(write_corpus(folder, [len(samples)], lambda n: samples[n]))


def batch_of(dataset: mm.Dataset, decode: mm.Decode) -> dict[str, Any]:
    """All rows, none of them bad."""
    pipeline = mm.Pipeline(dataset, global_batch_size=len(dataset), decode=decode, shuffle=False)
    [batch] = mm.Loader(pipeline, num_workers=0)
    assert batch["__valid__"].all()
    return batch


def reason_of(folder: Path, sample: dict[str, bytes], **settings: Any) -> str:
    """Why a sample is bad."""
    decode = mm.Decode(video=mm.VideoDecoder(**{"size": 8, **settings}))
    with pytest.raises(DecodeError) as caught:
        decode_sample(dataset_of(folder, sample)[0], decode)
    return str(caught.value)


# -- which frames, and when ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, FROM_TEN),
        ({"num_frames": 3}, [10.0, 12.0, 13.1]),
        ({"fps": 1}, [10.0, 12.0, 13.1]),  # 3.72 s by its mean rate
        ({"span": (10.4, 13.0)}, [10.4, 11.0, 12.0]),
        ({"span": (10.5, 10.9)}, [10.4]),
        ({"span": (0.0, 10.1)}, [10.0]),
        ({"indices": (0, 5)}, [10.0, 13.1]),
        ({"frame_multiple_of": 4}, [10.0, 11.0, 12.0, 13.1]),
    ],
)
def test_frames_are_picked_by_their_own_times(
    settings: dict[str, Any], wanted: list[float], tmp_path: Path
) -> None:
    decode = mm.Decode(video=mm.VideoDecoder(**settings))
    batch = batch_of(dataset_of(tmp_path, listed({"timestamps": FROM_TEN})), decode)
    assert batch["video_pts_s"].tolist() == wanted
    picture = mm.ImageDecoder()
    for frame, time in zip(batch["video"][0], wanted, strict=True):
        pixels = picture(jpeg(FROM_TEN.index(time)))
        assert np.array_equal(frame.permute(1, 2, 0).numpy(), pixels)


def test_a_span_of_the_row_and_its_times_count_in_the_seconds_that_are_stated(
    tmp_path: Path,
) -> None:
    row = {"start_s": 11.0, "end_s": 13.0, "events": [[11.5, 12.0], [12.5, 20.0]]}
    sample = listed({"timestamps": FROM_TEN}) | {"json": json.dumps(row).encode()}
    decode = mm.Decode(
        {"events": mm.Times("json.events", follows="video")}, video=mm.VideoDecoder(size=8)
    )
    batch = batch_of(dataset_of(tmp_path, sample), decode)
    assert batch["video_pts_s"].tolist() == [11.0, 12.0]
    assert batch["events"][0].tolist() == [[0.5, 1.0], [1.5, 2.0]]


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20),
    st.sampled_from(["timestamps", "indices", "sample_fps"]),
    st.floats(0.01, 1000),
)
def test_times_rise_or_are_refused(values: list[float], kind: str, rate: float) -> None:
    stated: dict[str, Any] = {kind: values, "fps": rate}
    expected = values
    if kind == "indices":
        stated[kind] = [int(value) for value in values]
        expected = [number / rate for number in stated[kind]]
    elif kind == "sample_fps":
        stated[kind] = rate
        expected = [number / rate for number in range(len(values))]
    if all(x < y for x, y in pairwise(expected)):
        times, fps = frame_times(stated, len(values))
        assert times.tolist() == expected
        assert fps > 0
    else:
        with pytest.raises(DecodeError, match="not after the frame before it"):
            frame_times(stated, len(values))


# -- pictures, files and lists beside each other ---------------------------------------------------


def test_frames_are_no_pictures_of_the_sample(tmp_path: Path) -> None:
    frames = listed({"sample_fps": 2}, 3, "1.frames")
    dataset = dataset_of(tmp_path, {"0.png": jpeg(7), **frames, "2.jpg": jpeg(8)})
    video, image = mm.VideoDecoder(size=16), mm.ImageDecoder(size=8)
    batch = batch_of(dataset, mm.Decode(video=video, image=image))
    assert batch["image"].shape == (2, 3, 8, 8)
    assert batch["video"].shape == (3, 3, 16, 16)
    assert not [name for name in batch if ".frames" in name]
    named = batch_of(dataset, mm.Decode({"1.frames": video}, image=image))
    assert named["1.frames"].equal(batch["video"])
    undecoded = batch_of(dataset, mm.Decode(image=image))
    assert undecoded["1.frames.2.jpg"] == [jpeg(2)]
    assert undecoded["image"].shape == (2, 3, 8, 8)


def test_pictures_without_a_list_stay_pictures(tmp_path: Path) -> None:
    pictures = {name: data for name, data in listed({}, 3).items() if name != "frames"}
    decode = mm.Decode({"frames.1.jpg": mm.ImageDecoder(size=8)}, video=mm.VideoDecoder())
    batch = batch_of(dataset_of(tmp_path, pictures), decode)
    assert batch["frames.1.jpg"].shape == (1, 3, 8, 8)
    assert len(batch["video"]) == 0
    assert image_fields(pictures) == ["frames.0.jpg", "frames.1.jpg", "frames.2.jpg"]


def test_a_list_has_no_sound(tmp_path: Path) -> None:
    decode = mm.Decode(video=mm.VideoDecoder(size=8, audio=mm.AudioDecoder()))
    batch = batch_of(dataset_of(tmp_path, listed({"sample_fps": 2})), decode)
    assert len(batch["audio"]) == 0
    assert len(batch["video"]) == 6


# -- bad lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({}, "no times; give timestamps .*, sample_fps .*, or fps and indices"),
        ({"fps": 2}, "no times"),
        ({"sample_fps": 2, "timestamps": [0] * 6}, "two kinds of times: timestamps and sample_fps"),
        ({"timestamps": [0, 1, 2, 2, 3, 4]}, "timestamps: frame 3 is at 2 s, not after"),
        ({"timestamps": [0, 1]}, "2 timestamps for 6 frames"),
        ({"timestamps": [-1, 0, 1, 2, 3, 4]}, r"timestamps\[0\]=-1: expected seconds from 0 up"),
        ({"timestamps": [0, 1, 2, 3, 4, "5"]}, r"timestamps\[5\]=5: expected seconds"),
        ({"indices": [0, 1, 2, 3, 4, 5]}, "fps=None: expected frames per second"),
        ({"fps": 2, "indices": [0, 1, 2, 3, 4, 5.5]}, r"indices\[5\]=5.5: expected whole numbers"),
        ({"sample_fps": 0}, "sample_fps=0: expected frames per second"),
        ({"sample_fps": True}, "sample_fps=True: expected"),
        ([0, 1], "expected an object of JSON"),
    ],
)
def test_a_list_with_wrong_times_is_a_bad_sample(times: Any, message: str, tmp_path: Path) -> None:
    reason = reason_of(tmp_path, listed(times))
    assert reason.startswith("shard-000000.tar[0] 000000.frames: ")
    assert re.search(message, reason)


def test_a_bad_picture_is_named(tmp_path: Path) -> None:
    good = listed({"sample_fps": 2})
    cut = good | {"frames.3.jpg": jpeg(3)[:300]}
    assert " 000000.frames: frames.3.jpg: " in reason_of(tmp_path / "cut", cut)
    other = good | {"frames.5.jpg": jpeg(5, (30, 40))}
    reason = reason_of(tmp_path / "other", other)
    assert "frames.5.jpg: a frame of 30x40 in a video of 40x30" in reason
    missing = {name: data for name, data in good.items() if name != "frames.2.jpg"}
    assert "frame 2 is missing: number the pictures" in reason_of(tmp_path / "missing", missing)
    assert "frames.0.jpg: picture of 40x30 exceeds max_pixels=1000" in reason_of(
        tmp_path / "large", good, max_pixels=1000
    )
    assert "exceeds max_bytes=2000" in reason_of(tmp_path / "bytes", good, max_bytes=2000)
    alone = {"frames": good["frames"]}
    assert "a list of no frames" in reason_of(tmp_path / "alone", alone)
    before = reason_of(tmp_path / "before", listed({"timestamps": FROM_TEN}), span=(1, 10))
    assert "the span ends at 10 s, and the video begins at 10 s" in before


def test_a_picture_that_is_not_taken_is_not_judged(tmp_path: Path) -> None:
    cut = listed({"sample_fps": 2}) | {"frames.3.jpg": b"?"}
    batch = batch_of(dataset_of(tmp_path, cut), mm.Decode(video=mm.VideoDecoder(indices=(0, 5))))
    assert batch["video_pts_s"].tolist() == [0.0, 2.5]


# -- what models get ------------------------------------------------------------------------------

STATED: dict[str, tuple[dict[str, Any], float, list[int], bool]] = {
    "each frame": ({"sample_fps": 2.0}, 2.0, list(range(9)), True),
    "of many frames": ({"sample_fps": 4.0}, 4.0, list(range(9)), True),
    "of few frames": ({"sample_fps": 0.7}, 0.7, list(range(9)), True),
    "by number": (
        {"fps": 29.97, "indices": [300 + 20 * i for i in range(9)]},
        29.97,
        [300 + 20 * i for i in range(9)],
        False,
    ),
}
"""The times of nine frames; the rate and numbers that say the same to the processor, and whether it
chooses among them."""
FAMILIES: dict[str, Callable[[], MediaFamily]] = {
    "qwen2_vl": lambda: qwen2_vl("Qwen2VLProcessor", **SMALL),
    "qwen2_5_vl": lambda: qwen2_vl(**SMALL),
    "qwen3_vl": lambda: qwen3_vl(**SMALL_3),
}


@pytest.mark.slow
@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_list_reaches_the_model_as_its_processor_makes_it(
    name: str, stated: str, tmp_path: Path
) -> None:
    times, fps, indices, is_sampled = STATED[stated]
    family = FAMILIES[name]()
    frames = [jpeg(number, (160, 120)) for number in range(9)]
    messages = [
        user([{"type": "video", "field": "0.frames"}, {"type": "text", "text": "?"}]),
        assistant([{"type": "text", "text": "a cat"}]),
    ]
    sample = {f"0.frames.{number:03d}.jpg": data for number, data in enumerate(frames)}
    sample |= {"0.frames": json.dumps(times).encode()}
    sample |= {"json": json.dumps({"messages": messages}).encode()}
    settings = {} if is_sampled else {"indices": tuple(range(9))}
    video = mm.VideoDecoder.from_processor(family.processor, **settings)
    image = mm.ImageDecoder.from_processor(family.processor)
    decode = mm.Decode(text=family.text, video=video, image=image)
    batch = batch_of(dataset_of(tmp_path, sample), decode)
    model = model_of(name, family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    del inputs["labels"]
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in frames]
    metadata = transformers.video_utils.VideoMetadata(
        total_num_frames=9 if is_sampled else 180, fps=fps, frames_indices=indices
    )
    expected = family.processor(
        text=[family.tokenizer.apply_chat_template(messages, tokenize=False)],
        videos=[torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=is_sampled,
        return_tensors="pt",
        add_special_tokens=False,
        **({"fps": 2.0} if is_sampled else {}),
    )
    assert_equal_inputs(inputs, dict(expected))


def test_a_list_that_is_decoded_by_field_leaves_no_pictures_to_the_text(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]()
    messages = [user([{"type": "image", "field": "0.jpg"}]), assistant("a cat")]
    sample = {"0.jpg": jpeg(7), **listed({"sample_fps": 1}, 3, "1.frames")}
    sample |= {"json": json.dumps({"messages": messages}).encode()}
    decode = mm.Decode(
        {"1.frames": mm.VideoDecoder(size=8)},
        text=family.text,
        video=mm.VideoDecoder.from_processor(family.processor),
        image=mm.ImageDecoder.from_processor(family.processor),
    )
    batch = batch_of(dataset_of(tmp_path, sample), decode)
    assert batch["1.frames"].shape == (3, 3, 8, 8)
    assert len(batch["image"]) == 1
