"""Videos and sounds in notebooks, pages and terminals, raw and decoded."""

import re

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.display.contents import recordings_of
from mmstream.display.samples import Card, card_lines
from tests.display.test_display import parse
from tests.helpers.media_files import audio_file, frame_number, video_file


def frames(count: int, height: int = 24, width: int = 32) -> torch.Tensor:
    grey = torch.arange(count, dtype=torch.uint8) * 20
    return grey[:, None, None, None].expand(count, 3, height, width)


def chat(*fields: str) -> dict:
    parts = [
        {"type": "video" if name.endswith("mp4") else "audio", "field": name} for name in fields
    ]
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    return {"messages": turns}


def lines_of(sample: dict, **options) -> str:
    return "\n".join(card_lines(Card("a[0]", sample), **options))


def test_a_short_file_is_shown_itself():
    lines = lines_of({"__key__": "k", "cls": b"12", "id": bytes(3), "npy": b"x" * 40}).splitlines()
    assert lines[1:] == ["  cls: b'12'", "  id: <3 bytes>", "  npy: 40 bytes"]


def test_a_decoded_clip_is_a_row_of_frames_with_their_times():
    times = torch.tensor([0.0, 0.4, 1.7, 2.5])
    sample = {"__key__": "a", "video": frames(4), "video_pts_s": times}
    page = parse(mm.show(sample))
    images = page.images()
    assert [image.size for image in images] == [(32, 24)] * 4
    assert [image.getpixel((5, 5))[0] // 10 for image in images] == [0, 2, 4, 6]
    assert re.findall(r"\d\.\d\d s", page.words)[:4] == ["0.00 s", "0.40 s", "1.70 s", "2.50 s"]
    assert "video decoded: 4 frames of 32x24, 0.00 to 2.50 s" in lines_of(sample)


def test_normalised_frames_are_stretched_alike():
    clip = (frames(3).float() - 40) / 7
    sample = {"__key__": "a", "video": clip, "video_pts_s": torch.arange(3.0)}
    shades = [image.getpixel((1, 1))[0] for image in parse(mm.show(sample)).images()]
    assert shades == pytest.approx([0, 127, 255], abs=2)


def test_decoded_recordings_stand_where_messages_name_them():
    sample = {
        "__key__": "a",
        "json": chat("0.mp4", "1.wav", "2.mp4"),
        "video": [frames(2), frames(3, 40, 20)],
        "video_pts_s": [np.array([0.0, 1.0]), np.array([0.0, 1.0, 2.0])],
        "audio": torch.zeros(1600),
    }
    assert list(recordings_of(sample)) == ["0.mp4", "2.mp4"]
    html = mm.show(sample).html
    marks = ("0.mp4: 2 frames", "2.mp4: 3 frames of 20x40", "What happens?")
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)


def test_videos_of_other_fields_keep_names_of_their_own():
    sample = {"__key__": "a", "json": chat("0.mp4"), "b.wav": torch.zeros(4800)}
    sample |= {"a.mp4": frames(2), "a.mp4_pts_s": np.array([0.0, 1.5])}
    text = lines_of(sample)
    assert "a.mp4 decoded: 2 frames of 32x24, 0.00 to 1.50 s" in text
    assert "b.wav: float32 [4800]" in text


def test_files_that_have_the_names_of_decoded_fields_are_no_recordings():
    sample = {"__key__": "a", "video": b"x", "audio": b"y", "audio_features": [b"z", 3]}
    assert recordings_of(sample) == {}
    parse(mm.show(sample))
    assert "decoded" not in lines_of(sample)


def test_a_clip_without_frames_is_said():
    sample = {"__key__": "a", "video": frames(0), "video_pts_s": torch.zeros(0)}
    assert "no video" in parse(mm.show(sample)).words


# -- files ----------------------------------------------------------------------------------------


def test_a_file_of_a_video_shows_frames_of_all_of_it_and_what_it_holds():
    sample = {"__key__": "a", "mp4": video_file(num_frames=20, audio_codec="aac")}
    assert re.search(r"mp4: [\d.]+ kB MP4: h264 64x48, 10 fps, 20 frames, 2\.0 s; aac 48,000 Hz, "
                     r"1 channel, 2\.\d s", lines_of(sample))  # fmt: skip
    page = parse(mm.show(sample))
    assert page.tags.count("video") == 1
    numbers = [frame_number(image) for image in page.images()]
    assert (len(numbers), numbers) == (8, sorted(numbers))
    assert (numbers[0], numbers[-1]) == (0, 19)
    times = re.findall(r"\d\.\d\d s", page.words)
    assert (times[0], times[-1]) == ("0.00 s", "1.90 s")


def test_a_file_that_no_browser_plays_is_shown_by_its_frames():
    page = parse(
        mm.show({"__key__": "a", "json": chat("0.avi"), "0.avi": video_file("avi", num_frames=20)})
    )
    assert "video" not in page.tags
    assert len(page.images()) == 8
    assert "AVI" in page.words


def test_samples_side_by_side_show_frames_or_what_the_sound_is():
    samples = [
        {"__key__": "a", "mp4": video_file()},
        {"__key__": "b", "wav": audio_file("wav", seconds=2.0, sample_rate=8000)},
    ]
    page = parse(mm.show(samples))
    assert [image.size[0] for image in page.images()] == [64] * 4
    assert "wav: 32.0 kB WAV" in page.words


@pytest.mark.parametrize("name", ["mp4", "wav"])
def test_a_damaged_file_says_why(name):
    data = {"mp4": video_file(), "wav": audio_file("wav", seconds=2.0, sample_rate=8000)}[name]
    sample = {"__key__": "a", name: data[:30]}
    page = parse(mm.show(sample))
    assert page.images() == []
    for text in (page.words, lines_of(sample)):
        assert re.search("damaged|truncated|no audio|header", text)
