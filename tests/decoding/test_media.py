"""Videos and recordings of a sample: which files, whose decoder, in what order, within limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.decoding.sample import SampleDecoding, decode_sample
from mmstream.types import SampleLineage
from tests.helpers.fake_media import FakeAudioDecoder, FakeFeatures, FakeVideoDecoder, fake_file

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


def test_without_a_decoder_files_stay_bytes() -> None:
    both = sample(mp4=fake_file(1, 2), wav=fake_file(1, 2))
    assert decode_sample(both, mm.Decode(video=VIDEO))["wav"] == both["wav"]
    assert decode_sample(both, mm.Decode(audio=AUDIO))["mp4"] == both["mp4"]


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


@pytest.mark.parametrize("name", ["video", "video_row", "video_pts_s", "audio", "audio_length"])
def test_a_file_named_like_a_field_of_the_decoder_is_refused(name: str) -> None:
    with pytest.raises(
        mm.errors.DecodeError, match=f"k.{name}: the decoder makes a field of this name"
    ):
        decode_sample(sample(**{name: b"1"}), mm.Decode(video=VIDEO, audio=AUDIO))
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
