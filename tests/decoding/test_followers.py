"""Boxes, points, masks and times follow their picture, video or recording.

The reference is torchvision v2 with tv_tensors, for the same parameters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

import mmstream as mm
from mmstream.decoding.followers import placed_seconds
from mmstream.decoding.image.geometry import View
from mmstream.decoding.sample import decode_sample
from mmstream.families.family import import_torchvision
from mmstream.types import SampleLineage
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.pictures import encoded

import_torchvision()
from torchvision import tv_tensors  # noqa: E402 - import_torchvision comes first
from torchvision.transforms.v2 import functional as F  # noqa: E402

HEIGHT, WIDTH = 47, 81
RNG = np.random.Generator(np.random.Philox(3))
PIXELS = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
CLASSES = RNG.integers(0, 20, (HEIGHT, WIDTH), dtype=np.uint8)
BOXES = [[0, 0, 81, 47], [10, 5, 30.5, 20], [70, 30, 75, 47], [40, 0, 41, 1], [3, 40, 9, 44]]
POINTS = [[0, 0], [40.5, 23.5], [80, 46]]
GROUP = ("png", "mask.png", "boxes", "points")

SETTINGS = [
    {"size": 32},
    {"size": (20, 31), "resize_size": 40},
    {"size": (24, 40), "resize": "exact"},
    {"size": 33, "resize": "letterbox", "flip": 1.0},
    {"size": 40, "crop": None},
    {"size": 32, "crop": "random", "flip": 0.5},
    {"size": (16, 40), "crop": "random", "scale": (0.02, 0.2), "flip": 1.0},
    {"resize": "max_pixels", "multiple_of": 14},
    {},
]


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    return encoded(Image.fromarray(pixels), "png")


def sample(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "__key__": "7",
        "__url__": "c/s-0.tar",
        "__lineage__": SampleLineage(shard=0, index=index),
        "png": png(PIXELS),
        "mask.png": png(CLASSES),
        "json": {"boxes": BOXES, "points": POINTS},
        **fields,
    }


def decode_of(**settings: Any) -> mm.Decode:
    fields = {
        "png": mm.ImageDecoder(**settings),
        "mask.png": mm.ImageDecoder(mask=True),
        "boxes": mm.Boxes("json.boxes"),
        "points": mm.Points("json.points"),
    }
    return mm.Decode(fields, same_geometry=GROUP)


def view_of(decode: mm.Decode, index: int) -> View:
    """Return the geometry that a sample was given."""
    decoder = decode.table.decoders("image")["png"]
    rng = mm.sample_rng(sample(index), "image png")
    return decoder.decode(png(PIXELS), rng=rng).view


def of_torchvision(value: Any, view: View) -> Any:
    """Apply a view to a tv_tensor: crop, resize, crop or pad, flip."""
    top, left, height, width = view.box
    value = F.crop(value, top, left, height, width)
    value = F.resize(value, list(view.resized), antialias=True)
    above, before = -view.offset[0], -view.offset[1]
    visible = [min(view.shape[i], view.resized[i]) for i in (0, 1)]
    value = F.crop(value, max(0, above), max(0, before), *visible)
    if view.flip:
        value = F.horizontal_flip(value)
    right, below = (view.shape[i] - visible[i] - max(0, view.offset[i]) for i in (1, 0))
    fill = 255 if isinstance(value, tv_tensors.Mask) else 0
    return F.pad(value, [max(0, view.offset[1]), max(0, view.offset[0]), right, below], fill=fill)


@pytest.mark.parametrize("settings", SETTINGS)
def test_everything_is_where_torchvision_puts_it(settings: dict[str, Any]) -> None:
    decode = decode_of(**settings)
    for index in range(12 if decode.table.decoders("image")["png"].is_random else 1):
        result = decode_sample(sample(index), decode)
        view = view_of(decode, index)
        picture = tv_tensors.Image(torch.from_numpy(PIXELS).permute(2, 0, 1))
        mask = tv_tensors.Mask(torch.from_numpy(CLASSES))
        boxes = tv_tensors.BoundingBoxes(
            torch.tensor(BOXES), format="XYXY", canvas_size=(HEIGHT, WIDTH)
        )
        expected = of_torchvision(picture, view)
        assert (result["png"].int() - expected.int()).abs().max() <= 1
        assert torch.equal(result["mask.png"], of_torchvision(mask, view).as_subclass(torch.Tensor))
        placed = of_torchvision(boxes, view).as_subclass(torch.Tensor)
        is_seen = result["boxes_visible"] > 0
        torch.testing.assert_close(result["boxes"][is_seen], placed[is_seen], rtol=0, atol=1e-4)
        areas = (placed[:, 2:] - placed[:, :2]).prod(1)
        assert (areas[~is_seen].abs() < 1e-3).all()


def test_points_are_the_corners_of_boxes_without_a_size() -> None:
    decode = mm.Decode(
        {
            "png": mm.ImageDecoder(size=32, crop="random", flip=0.5),
            "boxes": mm.Boxes(lambda sample: [2 * point for point in sample["json"]["points"]]),
            "points": mm.Points("json.points"),
        },
        same_geometry=("png", "boxes", "points"),
    )
    for index in range(8):
        result = decode_sample(sample(index), decode)
        inside, points = result["points_visible"], result["points"]
        assert torch.equal(points[inside].repeat(1, 2), result["boxes"][inside])
        assert ((points[~inside] < 0) | (points[~inside] > 32)).any(1).all()


@pytest.mark.parametrize("box_format", ["xyxy", "xywh", "cxcywh"])
@pytest.mark.parametrize("units", ["pixels", "0-1", "0-1000"])
def test_boxes_of_all_formats_and_units_are_the_same_boxes(box_format: Any, units: Any) -> None:
    factor = {"pixels": 1, "0-1": 1, "0-1000": 1000}[units]
    scale = np.ones(4) if units == "pixels" else np.array([WIDTH, HEIGHT] * 2)
    corners = np.array(BOXES, float)
    sizes = corners[:, 2:] - corners[:, :2]
    first = corners[:, :2] + (sizes / 2 if box_format == "cxcywh" else 0)
    numbers = corners if box_format == "xyxy" else np.hstack((first, sizes))
    row = {"boxes": (numbers / scale * factor).tolist()}
    geometry = mm.ImageDecoder(size=(30, 40), resize="exact")
    decode = mm.Decode(
        {
            "png": geometry,
            "boxes": mm.Boxes(
                "json.boxes", format=box_format, units=units, to_format="xyxy", to_units="pixels"
            ),
            "same": mm.Boxes("json.boxes", format=box_format, units=units),
        },
        same_geometry=("png", "boxes", "same"),
    )
    result = decode_sample(sample(json=row), decode)
    expected = corners * np.array([40 / WIDTH, 30 / HEIGHT] * 2)
    np.testing.assert_allclose(result["boxes"], expected, atol=1e-4)
    assert result["boxes"].dtype == torch.float32
    if units != "pixels":  # stretched, so shares of the sides do not change
        np.testing.assert_allclose(result["same"], row["boxes"], rtol=1e-4, atol=1e-4)


def test_boxes_that_stick_out_are_cut_and_those_outside_have_no_area_left() -> None:
    boxes = [[0, 0, 81, 47], [30, 10, 38, 20], [-9, 10, 17, 20], [-50, 5, -10, 20], [5, 5, 5, 9]]
    decode = mm.Decode(
        {"png": mm.ImageDecoder(size=47), "boxes": mm.Boxes("json.boxes")},
        same_geometry=("png", "boxes"),
    )
    result = decode_sample(sample(json={"boxes": boxes}), decode)  # columns 17 to 63 are left
    assert result["boxes"].tolist() == [
        [0, 0, 47, 47],
        [13, 10, 21, 20],
        [0, 10, 0, 20],
        [0, 5, 0, 20],
        [0, 5, 0, 9],
    ]
    assert result["boxes_visible"].tolist() == pytest.approx([47 / 81, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([[1, 2, 3]], "not a list of 4 numbers for each box"),
        ([[1, 2, 3, "a"]], "not a list of 4 numbers"),
        ([1, 2, 3, 4], "not a list of 4 numbers"),
        ([[1, 2, 3, float("nan")]], "not a list of 4 numbers"),
        (None, "not a list of 4 numbers"),
        ([[0, 0, 1, 1], [9, 0, 3, 5]], "box 1 ends before it begins"),
    ],
)
def test_what_is_no_list_of_boxes_is_a_bad_sample(boxes: Any, reason: str) -> None:
    decode = mm.Decode({"png": ..., "b": mm.Boxes("json.boxes")}, same_geometry=("png", "b"))
    with pytest.raises(mm.errors.DecodeError, match=rf"s-0\.tar\[0\] 7\.b: {reason}"):
        decode_sample(sample(json={"boxes": boxes}), decode)


COLLECTING = mm.Decode(
    {"png": ..., "b": mm.Boxes("json.objects.*.bbox", format="xywh")}, same_geometry=("png", "b")
)


@pytest.mark.parametrize("boxes", [[], [[1, 2, 3, 4], [5, 6, 7, 8]]])
def test_a_path_may_collect_any_number_of_boxes(boxes: list[list[int]]) -> None:
    row = {"objects": [{"bbox": box} for box in boxes]}
    result = decode_sample(sample(json=row), COLLECTING)
    assert result["b"].tolist() == boxes
    assert result["b"].shape == (len(boxes), 4)
    assert result["b_visible"].shape == (len(boxes),)


def test_a_path_that_finds_no_list_is_a_bad_sample() -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=r"nothing at json\.objects\.\*: json\.objects holds dict|names"
    ):
        decode_sample(sample(json={"objects": {}}), COLLECTING)


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_pictures_of_a_group_must_have_one_size(format: str) -> None:
    smaller = encoded(Image.fromarray(PIXELS[:-1]), format)
    decode = mm.Decode(
        {"png": mm.ImageDecoder(size=32), "b.png": mm.ImageDecoder()},
        same_geometry=("png", "b.png"),
    )
    with pytest.raises(
        mm.errors.DecodeError, match=r"7\.b\.png: it has 81x46 pixels, and .* 81x47"
    ):
        decode_sample(sample(**{"b.png": smaller}), decode)


@pytest.mark.parametrize("groups", [("png", "b.png"), ()])
def test_two_pictures_get_the_same_crop_only_in_a_group(groups: tuple[str, ...]) -> None:
    random = mm.ImageDecoder(size=16, crop="random", flip=0.5)
    decode = mm.Decode({"png": random, "b.png": random}, same_geometry=groups)
    result = decode_sample(sample(**{"b.png": png(PIXELS)}), decode)
    assert torch.equal(result["png"], result["b.png"]) == bool(groups)


def test_the_picture_of_the_shorthand_may_come_first() -> None:
    random = mm.ImageDecoder(size=16, crop="random", flip=0.5)
    decode = mm.Decode(
        {"mask.png": mm.ImageDecoder(mask=True)}, image=random, same_geometry=("image", "mask.png")
    )
    marked = np.repeat(CLASSES[:, :, None], 3, 2)
    result = decode_sample(sample(png=png(marked)), decode)
    assert result["mask.png"].shape == (16, 16)
    with pytest.raises(mm.errors.DecodeError, match="has not exactly one"):
        decode_sample(sample(**{"0.png": png(marked)}), decode)


@pytest.mark.parametrize(
    ("fields", "groups", "advice"),
    [
        ({"jpg": ..., "boxes": mm.Boxes("json.b")}, (), r"same_geometry=\('jpg', 'boxes'\)"),
        ({"jpg": ..., "boxes": mm.Boxes("json.b")}, ("boxes", "jpg"), "a picture first"),
        ({"jpg": ..., "a.png": ...}, ("jpg", "a.png", "jpg"), "named twice"),
        ({"jpg": ..., "a.png": ...}, None, "give names"),
        ({"jpg": ..., "a.png": ...}, ("jpg", 1), "give the names of fields"),
        (
            {"jpg": mm.ImageDecoder(size=8), "a.png": mm.ImageDecoder(size=9)},
            ("jpg", "a.png"),
            "'a.png' has size=9 and 'jpg' has 8; leave it out",
        ),
        (
            {
                "jpg": mm.ImageDecoder(size=8, crop="random"),
                "a.png": mm.ImageDecoder(size=8, mask=True),
            },
            (),
            r"same_geometry=\('jpg', 'a.png'\)",
        ),
    ],
)
def test_a_group_that_cannot_work_is_refused_with_what_to_write(
    fields: Any, groups: Any, advice: str
) -> None:
    with pytest.raises(mm.ConfigError, match=advice):
        mm.Decode(fields, same_geometry=groups)


def test_groups_may_be_several_and_one_alone_says_that_it_is_meant() -> None:
    random = mm.ImageDecoder(size=8, crop="random")
    mask = mm.ImageDecoder(size=8, mask=True)
    mm.Decode({"jpg": random, "a.png": mask}, same_geometry=(("jpg",), ("a.png",)))
    fields = {"l.jpg": random, "l.png": mask, "r.jpg": random, "r.png": mask}
    decode = mm.Decode(fields, same_geometry=(("l.jpg", "l.png"), ("r.jpg", "r.png")))
    leaders = {field.name: field.leader for field in decode.table.pictures if field.leader}
    assert leaders == {"l.png": "l.jpg", "r.png": "r.jpg"}


# -- times in a video or recording follow its span -------------------------------------------------

EIGHTHS = st.integers(0, 80).map(lambda number: number / 8)
"""Seconds that floats add and subtract without rounding."""
VARIABLE = tuple(np.cumsum([0, *[0.1] * 10, *[0.3] * 10]).round(3).tolist())
"""When frames are shown: at ten in a second first, then at three."""


def timed(row: Any, index: int = 0, **files: bytes) -> dict[str, Any]:
    lineage = SampleLineage(0, index, 0)
    return {"__key__": "k", "__url__": "a.tar", "__lineage__": lineage, "json": row, **files}


def decoded_times(row: Any, decode: mm.Decode, index: int = 0, **files: bytes) -> dict[str, Any]:
    return decode_sample(timed(row, index, **files), decode)


@given(st.lists(st.tuples(EIGHTHS, EIGHTHS).map(sorted)), EIGHTHS, EIGHTHS.filter(bool))
def test_the_moments_of_an_interval_within_a_span_are_those_of_its_result(
    pairs: list[list[float]], start_s: float, length_s: float
) -> None:
    end_s = start_s + length_s
    moments = np.arange(0, 21, 1 / 8)
    in_span = moments[(moments >= start_s) & (moments < end_s)]
    times = mm.Times("json", follows="video")
    placed, visible = times.place({"json": pairs}, start_s, end_s)
    assert placed.shape == (len(pairs), 2)
    for before, after, share in zip(pairs, placed, visible, strict=True):
        expected = in_span[(in_span >= before[0]) & (in_span < before[1])] - start_s
        shifted = in_span - start_s
        np.testing.assert_array_equal(
            shifted[(shifted >= after[0]) & (shifted < after[1])], expected
        )
        assert 0 <= after[0] <= after[1] <= length_s
        if before[1] > before[0]:
            assert share == np.float32(len(expected) / 8 / (before[1] - before[0]))
        else:
            assert share == (before[0] in in_span)
    in_file, same = mm.Times("json", follows="video", origin="file").place(
        {"json": pairs}, start_s, end_s
    )
    np.testing.assert_array_equal(in_file, placed + start_s)
    np.testing.assert_array_equal(same, visible)


def test_points_keep_their_time_and_say_whether_they_are_in_the_span() -> None:
    times, visible = placed_seconds(np.array([0.5, 1.0, 1.5, 2.0]), 1.0, 2.0)
    assert times.tolist() == [0.5, 1.0, 1.5, 2.0]
    assert visible.tolist() == [False, True, True, False]
    points = mm.Times("json.t", follows="video", format="point")
    placed, visible = points.place({"json": {"t": []}}, 1.0, 2.0)
    assert placed.shape == visible.shape == (0,)
    assert points.place({"json": {"t": np.array([1.5])}}, 1.0, 2.0)[0].tolist() == [0.5]


def test_a_slow_part_of_a_video_ends_where_its_span_does() -> None:
    decoder = mm.VideoDecoder(span=(1.9, 3.1))
    assert decoder.plan(video_file(times_s=VARIABLE)).shape.end_s == 3.1
    film = video_file(times_s=VARIABLE, audio_codec="pcm_s16le", kind="mkv")
    clip = mm.VideoDecoder(span=(1.9, 3.1), clip_s=0.5, audio=mm.AudioDecoder())
    sound = decoded_times({}, mm.Decode(video=clip), mkv=film)["audio"]
    assert len(sound) == pytest.approx(0.5 * 16_000, abs=2)
    whole = mm.VideoDecoder().plan(video_file(num_frames=12, fps=10)).shape
    assert whole.end_s == pytest.approx(1.2)


def test_times_follow_a_random_crop_of_a_recording_and_the_sound_of_a_clip() -> None:
    row = {"times": [[0.5, 2.5]], "words": [0.5, 2.5]}
    fields = {
        "events": mm.Times("json.times", follows="wav", origin="file"),
        "words": mm.Times("json.words", follows="wav", format="point"),
    }
    crop = mm.AudioDecoder(duration_s=1.0, crop="random")
    data = audio_file("wav", seconds=3.0)
    result = decoded_times(row, mm.Decode({"wav": crop, **fields}), wav=data)
    start_s = crop.plan(data, rng=mm.sample_rng(timed(row), "audio wav")).start_s
    assert 0 < start_s < 2
    expected = [max(0.5, start_s), min(2.5, start_s + 1)]
    assert result["events"].tolist() == [pytest.approx(expected)]
    assert result["words"].tolist() == pytest.approx([0.5 - start_s, 2.5 - start_s])
    assert result["words_visible"].dtype == torch.bool
    clip = mm.VideoDecoder(span=(0.2, 0.8), audio=mm.AudioDecoder())
    track = mm.Times("json.times", follows="audio")
    film = video_file(num_frames=12, fps=10, audio_codec="pcm_s16le", kind="mkv")
    result = decoded_times(row, mm.Decode({"events": track}, video=clip), mkv=film)
    assert result["events"].tolist() == [pytest.approx([0.3, 0.6], abs=1e-4)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[2, 1]], r"interval 0 ends before it begins: \[2, 1\]"),
        ([{"start_s": 1}], "no number of seconds in"),
        ([[1, float("nan")]], "no number of seconds in"),
        ([[True, 2]], "no number of seconds in"),
        ([["1", 2]], "no number of seconds in"),
        ([[1, 10**400]], "no number of seconds in"),
        ([1, 2], "neither .start, end. nor start_s and end_s: 1"),
        ("all", "not a list with an entry for each interval: 'all'"),
    ],
)
def test_what_is_no_time_makes_a_bad_sample(value: Any, message: str) -> None:
    decode = mm.Decode({"t": mm.Times("json.t", follows="wav"), "wav": mm.AudioDecoder()})
    with pytest.raises(mm.errors.DecodeError, match=rf"a\.tar\[0\] k\.t: {message}"):
        decoded_times({"t": value}, decode, wav=audio_file("wav", seconds=0.1))


def test_times_follow_exactly_one_file() -> None:
    decode = mm.Decode({"t": mm.Times("json.t", follows="audio")}, audio=mm.AudioDecoder())
    data = audio_file("wav", seconds=0.1)
    with pytest.raises(
        mm.errors.DecodeError, match=r"k\.t: it follows the span of audio, .* has 2 enc"
    ):
        decoded_times({"t": []}, decode, **{"0.wav": data, "1.wav": data})
    with pytest.raises(mm.ConfigError, match="follows='video', which is not a video or recording"):
        mm.Decode({"t": mm.Times("json.t", follows="video")}, audio=mm.AudioDecoder())
