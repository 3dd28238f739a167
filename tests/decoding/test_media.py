"""Videos and recordings of a sample: which files, whose decoder, in what order, within limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.sample import SampleDecoding, decode_sample
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.types import SampleLineage
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_media import FakeAudioDecoder, FakeFeatures, FakeVideoDecoder, fake_file
from tests.helpers.media_files import (
    AUDIO_KINDS,
    VIDEO_KINDS,
    audio_file,
    num_bytes,
    read_by_ranges,
    video_file,
)

VIDEO, AUDIO = FakeVideoDecoder(), FakeAudioDecoder()


def sample(**fields: bytes) -> dict[str, Any]:
    named = {name.replace("__", "."): data for name, data in fields.items()}
    lineage = SampleLineage(0, 3, 1, 2, seed=5)
    return {"__key__": "k", "__url__": "a.tar", "__lineage__": lineage, **named}


def test_all_videos_of_a_sample_become_a_list_in_the_order_of_their_numbers() -> None:
    files = {"10__mp4": fake_file(3, 1), "2__webm": fake_file(2, 2)}
    decoded = decode_sample(sample(**files), mm.Decode(video=VIDEO))
    assert [tuple(video.shape) for video in decoded["video"]] == [(2, 3, 4, 6), (1, 3, 4, 6)]
    assert [video[0, 0, 0, 0].item() for video in decoded["video"]] == [20, 30]
    assert [times.tolist() for times in decoded["video_pts_s"]] == [[0, 0.25], [0]]
    assert "2.webm" not in decoded


def test_one_video_is_no_list_and_none_is_an_empty_one() -> None:
    decode = mm.Decode(video=VIDEO, audio=AUDIO)
    decoded = decode_sample(sample(mp4=fake_file(1, 2)), decode)
    assert decoded["video"].shape == (2, 3, 4, 6)
    assert decoded["video"].is_contiguous(memory_format=torch.channels_last)
    assert decoded["video_pts_s"].dtype == torch.float64
    assert decoded["audio"] == []
    without = decode_sample(sample(wav=fake_file(1, 2)), decode)
    assert without["video"] == without["video_pts_s"] == []
    assert without["audio"].tolist() == [1, 1 + 1 / 1024]
    assert "audio_video" not in without


def test_tracks_of_videos_join_the_recordings_in_the_order_of_the_files() -> None:
    decode = mm.Decode(video=FakeVideoDecoder(audio=AUDIO), audio=AUDIO)
    files = {
        "3__mp4": fake_file(4, 1),
        "2__wav": fake_file(3, 1),
        "1__mp4": fake_file(2, 1, has_track=False),
        "0__mp4": fake_file(1, 1),
    }
    decoded = decode_sample(sample(**files), decode)
    assert [int(samples[0]) for samples in decoded["audio"]] == [1, 3, 4]
    assert decoded["audio_video"].tolist() == [0, -1, 2]
    silent = decode_sample(
        sample(mp4=files["1__mp4"]), mm.Decode(video=FakeVideoDecoder(audio=AUDIO))
    )
    assert silent["audio"] == silent["audio_video"].tolist() == []


def test_features_take_the_place_of_samples_and_say_their_length() -> None:
    decode = mm.Decode(audio=FakeAudioDecoder(features=FakeFeatures(8)))
    decoded = decode_sample(sample(wav=fake_file(1, 6)), decode)
    assert decoded["audio_features"].shape == (8, 4)
    assert decoded["audio_features_length"].tolist() == [3]
    assert "audio" not in decoded


def test_a_decoder_by_field_takes_its_file_and_keeps_the_name() -> None:
    decode = mm.Decode(
        {"clip.mp4": FakeVideoDecoder(audio=AUDIO), "wav;flac": AUDIO, "mp4": len},
        video=VIDEO,
        audio=AUDIO,
    )
    files = {
        "clip__mp4": fake_file(1, 2),
        "0__mp4": fake_file(2, 1),
        "mp4": b"not a video",
        "flac": fake_file(3, 1),
        "0__wav": fake_file(4, 1),
    }
    decoded = decode_sample(sample(**files), decode)
    assert decoded["clip.mp4"].shape == (2, 3, 4, 6)
    assert decoded["clip.mp4_pts_s"].tolist() == [0, 0.25]
    assert decoded["clip.mp4_audio"].tolist() == [1, 1 + 1 / 1024]
    assert decoded["clip.mp4_audio_video"].tolist() == [0]
    assert decoded["wav"].tolist() == [3]
    assert decoded["mp4"] == len(b"not a video")
    assert int(decoded["video"][0, 0, 0, 0]) == 20
    assert decoded["audio"].tolist() == [4]
    with pytest.raises(mm.errors.DecodeError, match=r"a\.tar\[3\] k: no field wav or flac; it has"):
        decode_sample(sample(**{name: files[name] for name in ("clip__mp4", "mp4")}), decode)


def test_what_a_function_has_decoded_before_stays_as_it_is() -> None:
    frames = torch.zeros(2, 3, 4, 4)
    decode = mm.Decode({"mp4": VIDEO}, image=mm.ImageDecoder(), audio=AUDIO)
    decoded = decode_sample(sample(mp4=frames, wav=torch.ones(3), jpg=frames[0]), decode)
    assert decoded["mp4"] is frames
    assert decoded["image"] == []
    assert torch.equal(decoded["jpg"], frames[0])
    assert decoded["wav"].tolist() == [1, 1, 1]
    assert decoded["audio"] == []


def test_videos_are_written_into_the_memory_of_the_batch_where_they_fit() -> None:
    memory = torch.zeros(2, 4, 6, 3, dtype=torch.uint8)
    row = {"video": [memory]}
    decode = mm.Decode(video=VIDEO)
    decoded = decode_sample(sample(mp4=fake_file(1, 2)), decode, row)
    assert decoded["video"].data_ptr() == memory.data_ptr()
    assert len(decode_sample(sample(mp4=fake_file(2, 3)), decode, row)["video"]) == 3
    assert memory[:, 0, 0, 0].tolist() == [10, 11]


def test_limits_hold_for_all_files_of_a_sample_together() -> None:
    files = {"0__mp4": fake_file(1, 1), "1__mp4": fake_file(2, 1)}  # of 4 x 6 x 3 bytes each
    assert decode_sample(sample(**files), mm.Decode(video=FakeVideoDecoder(max_memory=144)))
    with pytest.raises(mm.errors.DecodeError, match=r"a\.tar\[3\] k\.1\.mp4: 144 exceeds 143"):
        decode_sample(sample(**files), mm.Decode(video=FakeVideoDecoder(max_memory=143)))
    recordings = {"0__wav": fake_file(1, 100), "1__wav": fake_file(2, 100)}
    with pytest.raises(mm.errors.DecodeError, match=r"k\.1\.wav: 2 exceeds 1\.5"):
        decode_sample(sample(**recordings), mm.Decode(audio=FakeAudioDecoder(max_seconds=1.5)))


def test_a_span_comes_from_the_part_that_names_the_file_or_else_from_the_row() -> None:
    parts = [
        {"type": "video", "field": "1.mp4", "start_s": 7, "end_s": 8},
        {"type": "video", "field": "0.mp4"},
    ]
    row = {"start_s": 3, "end_s": 4, "messages": [{"role": "user", "content": parts}]}
    files = {"0__mp4": fake_file(1, 1), "1__mp4": fake_file(2, 1)}
    decoded = decode_sample(sample(**files, json=json.dumps(row).encode()), mm.Decode(video=VIDEO))
    assert [times.tolist() for times in decoded["video_pts_s"]] == [[3], [7]]


def test_draws_are_those_of_the_sample_whether_they_are_planned_or_not() -> None:
    decode = mm.Decode(
        {"flac": FakeAudioDecoder(is_random=True)},
        video=FakeVideoDecoder(is_random=True),
        audio=FakeAudioDecoder(is_random=True),
    )
    files = {f"{i}__{kind}": fake_file(0, 1) for i in range(2) for kind in ("mp4", "wav")}
    first = sample(**files, flac=fake_file(0, 1))
    decoding = SampleDecoding(first, decode)
    decoding.plan(all_shapes=True)
    planned = decoding.finish()
    again = decode_sample(first, decode)
    starts = [
        [float(values[0]) for values in decoded[name]]
        for decoded in (planned, again)
        for name in ("video_pts_s", "audio")
    ]
    assert starts[:2] == starts[2:]
    assert planned["flac"].tolist() == again["flac"].tolist()
    assert len({*starts[0], *starts[1], *planned["flac"].tolist()}) == 5
    rng = mm.sample_rng(first, "video")
    assert starts[0] == [float(rng.integers(1000)) for _ in range(2)]


@pytest.mark.parametrize(
    "name",
    [
        *("video", "video_row", "video_pts_s", "audio", "audio_length"),
        *("image", "input_ids", "attention_mask", "labels"),
    ],
)
def test_a_file_named_like_a_field_of_the_decoder_is_refused(name: str) -> None:
    decode = mm.Decode(
        video=VIDEO,
        audio=AUDIO,
        image=mm.ImageDecoder(),
        text=mm.TextDecoder(byte_tokenizer()),
    )
    with pytest.raises(
        mm.errors.DecodeError, match=f"k.{name}: the decoder makes a field of this name"
    ):
        decode_sample(sample(**{name: b"1"}), decode)
    assert decode_sample(sample(**{name: b"1"}), mm.Decode())[name] == b"1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"video": AUDIO}, r"Decode\(video=\): got FakeAudioDecoder: write audio=decoder"),
        ({"audio": mm.ImageDecoder()}, r"Decode\(audio=\): got ImageDecoder: write image=decoder"),
        ({"image": VIDEO}, r"Decode\(image=\): got FakeVideoDecoder: write video=decoder"),
        ({"text": AUDIO}, r"Decode\(text=\): got FakeAudioDecoder: write audio=decoder"),
        ({"video": 8}, r"Decode\(video=\): got 8: write video=mm\.VideoDecoder\(\)"),
        ({"audio": len}, r'a function from bytes goes by field, Decode\(\{"wav": function\}\)'),
        ({"fields": VIDEO}, r"Decode: got FakeVideoDecoder: write Decode\(video=decoder\)"),
        ({"fields": {"mp4": VIDEO, "mp4;webm": VIDEO}}, "two decoders make the field 'mp4'"),
        ({"fields": {"video": VIDEO}, "video": VIDEO}, "two decoders make the field 'video'"),
        (
            {"video": FakeVideoDecoder(audio=AUDIO), "audio": FakeAudioDecoder(sample_rate=8)},
            "audio= has sample_rate=8 and the tracks of video= have 100",
        ),
    ],
)
def test_decoders_in_a_wrong_place_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.Decode(**arguments)


def test_media_that_a_decoder_takes_are_read_by_ranges() -> None:
    decode = mm.Decode({"a.mp4": AUDIO, "b.mp4": len}, video=VIDEO)
    names = ("a.mp4", "b.mp4", "c.mp4", "wav")
    assert [decode.reads_by_ranges(name) for name in names] == [True, False, True, False]


# -- spans of rows and settings --------------------------------------------------------------------

FILES = {mm.AudioDecoder: lambda: audio_file("wav"), mm.VideoDecoder: lambda: video_file("mp4")}

HUGE = 10**400
"""JSON may state it, and no float holds it."""


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "row",
    [
        {"start_s": HUGE},
        {"start_s": 0, "end_s": HUGE},
        {"start_s": "0", "end_s": 1},
        {"start_s": False, "end_s": 1},
        {"start_s": 0.5, "end_s": 0.5},
        {"start_s": -1, "end_s": 1},
        {"start_s": [0], "end_s": "x" * 10_000},
        {"start_s": float("nan")},
    ],
    ids=["huge start", "huge end", "string", "bool", "empty", "negative", "long", "NaN"],
)
def test_a_row_that_states_no_span_is_a_bad_sample(kind: Any, row: dict[str, Any]) -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=r"start_s=.*, end_s=.*: not a span in seconds"
    ) as error:
        kind().plan(FILES[kind](), row)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("span", [(0, HUGE), (1, 1), (2, 1), [0, 1], "rows"])
def test_a_setting_that_is_no_span_is_refused(kind: Any, span: Any) -> None:
    with pytest.raises(mm.ConfigError, match=r'give "row", \(start_s, end_s\) or None'):
        kind(span=span)


@pytest.mark.parametrize("kind", FILES)
def test_a_call_takes_a_span_where_the_decoder_goes_by_the_row(kind: Any) -> None:
    data = FILES[kind]()
    expected = kind(span=(0.2, 0.6))(data)
    assert kind()(data, span=(0.2, 0.6)).tolist() == expected.tolist()
    assert len(expected) < len(kind()(data))
    for setting in (None, (0, 0.5)):
        with pytest.raises(mm.ConfigError, match='it needs a decoder with span="row"'):
            kind(span=setting)(data, span=(0.2, 0.6))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        *((kind, r"__call__, which a pipeline does") for kind in FILES),
        (mm.ImageDecoder, "override `decode`"),
        (partial(mm.TextDecoder, byte_tokenizer()), r"field=function\)"),
    ],
)
def test_a_subclass_whose_call_would_be_passed_over_is_refused(kind: Any, advice: str) -> None:
    class Changed(getattr(kind, "func", kind)):  # type: ignore[misc]
        def __call__(self, data: Any, **options: Any) -> Any:
            return super().__call__(data)

    with pytest.raises(mm.ConfigError, match=rf"Changed overrides .*{advice}"):
        Changed(*getattr(kind, "args", ()))


# -- one segment of a row --------------------------------------------------------------------------

SEGMENTS = [{"start_s": i, "end_s": i + 1, "text": f"part {i}"} for i in range(5)]


def with_row(row: Any, epoch: int = 0, index: int = 0) -> dict[str, Any]:
    return {"__key__": "k", "__lineage__": SampleLineage(0, index, epoch), "json": row}


def test_a_segment_gives_the_row_its_times_and_its_text() -> None:
    before = with_row({"id": 7, "segments": SEGMENTS, "text": "the whole"})
    after = mm.one_segment(before)
    number = after["json"]["start_s"]
    assert after == {**before, "json": {"id": 7, **SEGMENTS[number]}, "txt": f"part {number}"}
    assert before["json"]["segments"] is SEGMENTS
    turns = [{"role": "user", "content": "what is it?"}]
    segment = {"start_s": 1, "end_s": 2, "messages": turns}
    assert mm.one_segment(with_row({"segments": [segment]})) == with_row(segment)


def test_each_epoch_draws_anew_and_all_segments_come() -> None:
    row = {"segments": SEGMENTS}
    drawn = [mm.one_segment(with_row(row, epoch))["json"]["start_s"] for epoch in range(40)]
    assert set(drawn) == set(range(5))
    assert drawn == [mm.one_segment(with_row(row, epoch))["json"]["start_s"] for epoch in range(40)]


@pytest.mark.parametrize("row", [{"id": 1}, [1, 2], None])
def test_a_row_without_segments_stays_as_it_is(row: Any) -> None:
    before = with_row(row)
    assert mm.one_segment(before) is before


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([], mm.SkipSample, r"json\.segments is empty"),
        ("all", mm.errors.DecodeError, r"json\.segments is 'all', not a list"),
        ([3], mm.errors.DecodeError, r"json\.segments\[0\] is 3, not an object"),
    ],
)
def test_an_empty_list_leaves_the_sample_out_and_nonsense_makes_it_bad(
    segments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mm.one_segment(with_row({"segments": segments}))


def test_decoders_take_the_span_of_the_segment(tmp_path: Path) -> None:
    row = json.dumps({"segments": SEGMENTS}).encode()
    folder = write_corpus(tmp_path, [8], lambda n: {"wav": fake_file(0, 1), "json": row})
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=8,
        before=(mm.one_segment,),
        decode=mm.Decode(audio=FakeAudioDecoder()),
    )
    for num_threads in (1, 3):
        (batch,) = mm.Loader(pipeline, num_threads=num_threads)
        starts = [row["start_s"] for row in batch["json"]]
        assert batch["audio"][:, 0].tolist() == starts
        assert batch["txt"] == [f"part {start}" for start in starts]
        assert len(set(starts)) > 1


def test_a_row_with_one_segment_is_about_that_segment(tmp_path: Path) -> None:
    rows = [{"segments": SEGMENTS[2:3]}, {"segments": SEGMENTS}, {"start_s": 4, "end_s": 5}]

    def fields(number: int) -> dict[str, bytes]:
        return {"wav": fake_file(0, 1), "json": json.dumps(rows[number]).encode()}

    pipeline = mm.Pipeline(
        mm.open_dataset(write_corpus(tmp_path, [3], fields)),
        global_batch_size=3,
        shuffle=False,
        decode=mm.Decode(audio=FakeAudioDecoder()),
    )
    (batch,) = mm.Loader(pipeline)
    assert batch["audio"][:, 0].tolist() == [2, 0, 4]


# -- files that are read by ranges -----------------------------------------------------------------


def lazy(content: bytes) -> mm.LazyBytes:
    """Return a file as it lies in a tar: other files are before and behind it."""
    sample = b"before" * 100 + content + b"behind" * 100

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [sample[start:stop] for start, stop in ranges]

    return mm.LazyBytes(len(sample), read_ranges, sample[:1000]).within(600, 600 + len(content))


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_videos_read_by_ranges_are_those_of_whole_files(kind: str) -> None:
    content = video_file(kind, num_frames=30, audio_codec="libopus" if kind == "webm" else None)
    for decoder in (
        mm.VideoDecoder(),
        mm.VideoDecoder(indices=(3, 20)),
        mm.VideoDecoder(fps=2, span=(0.5, 2.1)),
    ):
        whole, ranged = decoder.decode(content), decoder.decode(lazy(content))
        np.testing.assert_array_equal(ranged.pixels, whole.pixels)
        np.testing.assert_array_equal(ranged.times_s, whole.times_s)


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_sounds_read_by_ranges_are_those_of_whole_files(kind: str) -> None:
    content = audio_file(kind)
    for decoder in (mm.AudioDecoder(), mm.AudioDecoder(span=(0.2, 0.7))):
        np.testing.assert_array_equal(decoder(lazy(content)), decoder(content))


@pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
def test_storage_that_fails_is_no_fault_of_a_video(kind: str) -> None:
    content = video_file(kind, num_frames=30)

    def read_ranges(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        raise mm.errors.StorageError("the server is away")

    # The first bytes are there, the others are not.
    for num_first in (0, 1000, len(content) // 2, len(content) - 1):
        with pytest.raises(mm.errors.StorageError, match="away"):
            mm.VideoDecoder()(mm.LazyBytes(len(content), read_ranges, content[:num_first]))


def test_a_late_frame_is_decoded_without_what_is_before_its_key() -> None:
    content = video_file("mkv", num_frames=60, width=512, height=384, b_frames=2)
    file, ranges = read_by_ranges(content)
    decoder = mm.VideoDecoder(indices=(56,))
    plan = decoder.plan(file)
    ranges.clear()
    frames = decoder.decode(file, plan).pixels
    assert num_bytes(ranges) < len(content) / 2
    np.testing.assert_array_equal(frames[0], mm.VideoDecoder()(content)[56])
