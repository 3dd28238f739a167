"""Videos and sounds in notebooks, pages and terminals, raw and decoded."""

import base64
import io
import re
import wave

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.display.contents import batch_recordings, recordings_of
from mmstream.display.media import spectrogram, wav_of
from mmstream.display.samples import Card, card_lines
from tests.display.test_display import parse
from tests.helpers.media_files import frame_number, video_file


def tone(seconds: float, peak: float = 0.5, rate: int = 16_000) -> torch.Tensor:
    times = torch.arange(int(seconds * rate)) / rate
    return peak * torch.sin(2 * torch.pi * 440 * times)


def frames(count: int, height: int = 24, width: int = 32) -> torch.Tensor:
    grey = torch.arange(count, dtype=torch.uint8) * 20
    return grey[:, None, None, None].expand(count, 3, height, width)


def chat(*fields: str) -> dict:
    parts = [
        {"type": "video" if name.endswith("mp4") else "audio", "field": name} for name in fields
    ]
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    return {"messages": turns}


def picture_in(html: str) -> Image.Image:
    data = re.search(r'src="data:image/\w+;base64,([^"]+)"', html)[1]
    return Image.open(io.BytesIO(base64.b64decode(data)))


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


def test_of_a_long_clip_frames_that_are_spread_over_it_are_shown():
    page = parse(mm.show({"__key__": "a", "video": frames(12), "video_pts_s": np.arange(12) / 2}))
    assert len(page.images()) == 8
    assert {"0.00 s", "5.50 s"} <= set(re.findall(r"\d\.\d\d s", page.words))


def test_normalised_frames_are_stretched_alike():
    clip = (frames(3).float() - 40) / 7
    sample = {"__key__": "a", "video": clip, "video_pts_s": torch.arange(3.0)}
    shades = [image.getpixel((1, 1))[0] for image in parse(mm.show(sample)).images()]
    assert shades == pytest.approx([0, 127, 255], abs=2)


def test_a_decoded_sound_is_a_player_of_what_the_model_hears():
    sample = {"__key__": "a", "audio": tone(0.5, rate=8000)}
    shown = mm.show(sample, sample_rate=8000)
    parse(shown)
    data = base64.b64decode(re.search(r'<audio[^>]*base64,([^"]+)"', shown.html)[1])
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (8000, 4000, 1)
    for text in (shown.html, lines_of(sample, sample_rate=8000)):
        assert "4,000 samples, 0.50 s at 8,000 Hz" in text


def test_a_long_decoded_sound_has_no_player():
    html = mm.show({"__key__": "a", "audio": tone(90)}).html
    assert "<audio" not in html
    assert "not embedded: more than 2.0 MB" in html


def test_a_wav_keeps_channels_and_cuts_what_is_too_loud():
    data = wav_of(torch.tensor([[0.0, 2.0], [-2.0, 0.5]]), 8000)
    with wave.open(io.BytesIO(data)) as file:
        samples = np.frombuffer(file.readframes(2), "<i2").reshape(2, 2)
    assert samples.tolist() == [[0, -32767], [32767, 16384]]


def test_features_are_a_picture_with_the_low_bins_below():
    values = torch.zeros(80, 1000)
    values[0] = 1.0
    sample = {"__key__": "a", "audio_features": values}
    image = np.asarray(picture_in(mm.show(sample).html))
    assert image.shape == (80, 334)
    assert image[-1].min() == 255
    assert image[:-1].max() == 0
    assert "audio_features decoded: 80 bins x 1,000 frames" in lines_of(sample)
    assert spectrogram(np.zeros((4, 0))) == ""


def test_decoded_recordings_stand_where_messages_name_them():
    sample = {
        "__key__": "a",
        "json": chat("0.mp4", "1.wav", "2.mp4"),
        "video": [frames(2), frames(3, 40, 20)],
        "video_pts_s": [np.array([0.0, 1.0]), np.array([0.0, 1.0, 2.0])],
        "audio": tone(0.1),
    }
    assert list(recordings_of(sample)) == ["0.mp4", "2.mp4", "1.wav"]
    html = mm.show(sample).html
    marks = ("0.mp4: 2 frames", "1.wav: 1,600", "2.mp4: 3 frames of 20x40", "What happens?")
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)


def test_recordings_of_other_fields_keep_names_of_their_own():
    sample = {"__key__": "a", "json": chat("0.mp4"), "audio": [tone(0.1), tone(0.2)]}
    sample |= {"a.mp4": frames(2), "a.mp4_pts_s": np.array([0.0, 1.5]), "b.wav": tone(0.3)}
    sample |= {"c.wav_features": torch.zeros(80, 30), "c.wav_features_length": torch.tensor([20])}
    sample |= {"mp4": tone(0.1)}  # the sound of a video
    text = lines_of(sample)
    for line in (
        "a.mp4 decoded: 2 frames of 32x24, 0.00 to 1.50 s",
        "b.wav decoded: 4,800 samples",
        "audio 0 decoded: 1,600 samples",
        "c.wav_features decoded: 80 bins x 20 frames",
        " mp4 decoded: 1,600 samples",
    ):
        assert line in text


@pytest.mark.parametrize("as_list", [False, True])
def test_rows_of_a_batch_show_their_own_recordings(as_list):
    clips = [frames(2), frames(3)]
    batch = {
        "__key__": ["a", "b", "c"],
        "__valid__": torch.ones(3, dtype=torch.bool),
        "video": clips if as_list else torch.cat(clips),
        "video_row": torch.tensor([0, 2]),
        "video_frames": torch.tensor([2, 3]),
        "video_pts_s": torch.tensor([0.0, 1.0, 5.0, 6.0, 7.0]),
        "audio": torch.stack([tone(1), tone(1)]),
        "audio_row": torch.tensor([1, 2]),
        "audio_length": torch.tensor([8000, 16_000]),
        "audio_features": torch.zeros(2, 80, 30),
        "audio_features_length": torch.tensor([10, 30]),
    }
    rows = batch_recordings(batch)
    assert [[name for name, _ in row] for row in rows] == [
        ["video"], ["audio", "audio_features"], ["video", "audio", "audio_features"]
    ]  # fmt: skip
    clip, (sound, features) = rows[2][0][1], (recording for _, recording in rows[1])
    assert (clip.times_s.tolist(), len(clip.frames)) == ([5.0, 6.0, 7.0], 3)
    assert (sound.samples.shape, features.values.shape) == ((8000,), (80, 10))
    assert len(parse(mm.show(batch)).images()) == 2 + 1 + 3


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
        {"__key__": "b", "wav": wav_of(tone(1), 8000)},
    ]
    page = parse(mm.show(samples))
    assert [image.size[0] for image in page.images()] == [64] * 4
    assert "wav: 32.0 kB WAV" in page.words


@pytest.mark.parametrize("name", ["mp4", "wav"])
def test_a_damaged_file_says_why(name):
    data = {"mp4": video_file(), "wav": wav_of(tone(1), 8000)}[name]
    sample = {"__key__": "a", name: data[:30]}
    page = parse(mm.show(sample))
    assert page.images() == []
    for text in (page.words, lines_of(sample)):
        assert re.search("damaged|truncated|no audio|header", text)
