"""Videos and audio in text: as many tokens, and the same times, as the models' own processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.media_shapes import (
    AudioShape,
    ImageShape,
    MediaShapes,
    MediaText,
    VideoShape,
)
from tests.helpers.chats import assistant, byte_chat, learned, user
from tests.helpers.media_families import (
    MEDIA_SPECIAL,
    SEEING_TEMPLATE,
    MediaFamily,
    llava_onevision,
    qwen2_5_omni,
    qwen2_5_omni_with_sound,
    qwen2_vl,
    qwen3_omni,
    qwen3_vl,
    transformers,
)

FRAMES = [1, 2, 5, 6]
"""Of four videos. The third has an odd number."""


def video_of(num_frames: int, height: int, width: int, fps: float = 25.0) -> Any:
    """A video's frames, its metadata for a processor, and its shape for us."""
    indices = [round(i * 17.3) for i in range(num_frames)]
    metadata = transformers.video_utils.VideoMetadata(
        total_num_frames=indices[-1] + 9, fps=fps, frames_indices=list(indices)
    )
    shape = VideoShape(
        num_frames,
        height,
        width,
        (height, width),
        tuple(index / fps + 1.4 for index in indices),  # a container may begin at any time
        fps,
        metadata.sampled_fps,
        start_s=1.4,
        indices=tuple(indices),
    )
    return torch.zeros(num_frames, 3, height, width, dtype=torch.uint8), metadata, shape


def conversation(kind: str, count: int, extension: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "look: "}]
    for i in range(count):
        parts += [{"type": kind, "field": f"{i}.{extension}"}, {"type": "text", "text": f" {i}?"}]
    answer = [{"type": "text", "text": "a cat at <1.0 seconds>"}]
    messages = [user(parts), assistant(answer), user("and?"), assistant("a mat")]
    return {
        "json": {"messages": messages},
        **{f"{i}.{extension}": b"" for i in range(count)},
    }


def assert_ids_and_labels(
    family: MediaFamily, sample: dict[str, Any], shapes: MediaShapes, **media: Any
) -> None:
    """The ids are those of the processor for these media. The answers are trained."""
    tokens = family.text(sample, shapes)
    text = family.tokenizer.apply_chat_template(sample["json"]["messages"], tokenize=False)
    processed = family.processor(text=[text], add_special_tokens=False, **media)
    assert tokens["input_ids"].tolist() == list(processed["input_ids"][0])
    answers = "a cat at <1.0 seconds><|im_end|>a mat<|im_end|>"
    assert learned(family.tokenizer, tokens) == answers


@pytest.mark.parametrize("fps", [25.0, 30.0, 30000 / 1001, 23.976, 10.0])
@pytest.mark.parametrize(
    "make", [qwen2_vl, qwen3_vl, llava_onevision, qwen2_5_omni], ids=lambda make: make.__name__
)
def test_the_ids_of_videos_are_those_of_the_models_own_processor(make: Any, fps: float) -> None:
    family = make(do_sample_frames=False, do_resize=False)
    height, width = (384, 384) if make is llava_onevision else (224, 448)
    videos = [video_of(count, height, width, fps) for count in FRAMES]
    assert_ids_and_labels(
        family,
        conversation("video", len(FRAMES), "mp4"),
        MediaShapes(videos=[shape for _, _, shape in videos]),
        videos=[frames for frames, _, _ in videos],
        video_metadata=[[metadata for _, metadata, _ in videos]],
    )


def test_times_of_a_variable_frame_rate_are_the_containers() -> None:
    times = (10.0, 10.04, 13.5, 13.9)
    shape = VideoShape(4, 32, 32, (32, 32), times, 25.0, 1.0, start_s=10.0, indices=(0, 1, 2, 3))
    length = mm.families.qwen_vl.qwen3_video_length()
    frame = "<|vision_start|><|video_pad|><|vision_end|>"
    assert length(shape).text == f"<0.0 seconds>{frame}<3.7 seconds>{frame}"
    span = shape._replace(start_s=9.5)  # a span that begins before its first frame
    assert length(span).text.startswith("<0.5 seconds>")


def test_thousands_of_audio_lengths_take_as_many_tokens_as_the_omni_model_says() -> None:
    module = transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe
    frames = np.arange(1, 5000)
    expected = module._get_feat_extract_output_lengths(frames)
    length = mm.families.qwen_omni.qwen3_audio_length()
    counted = [length(AudioShape(int(n) * 160, int(n), 16_000)) for n in frames]
    assert counted == expected.tolist()


# -- Qwen omni models: the sound of videos between their frames --------------------------------


def heard_of(seconds: float) -> AudioShape:
    num_samples = round(seconds * 16_000)
    return AudioShape(num_samples, -(-num_samples // 160), 16_000)


@pytest.mark.parametrize("fps", [1.0, 2.0, 3.0, 4.5])
@pytest.mark.parametrize(
    "make", [qwen2_5_omni_with_sound, qwen3_omni], ids=lambda make: make.__name__
)
def test_the_sound_of_videos_stands_between_their_frames_as_the_processor_puts_it(
    make: Any, fps: float
) -> None:
    family = make(do_sample_frames=False, do_resize=False)
    counts = [1, 2, 5, 8, 19, 2]
    seconds = [0.31, 6.2, 2.01, 3.99, 4.01, 29.99]  # longer than the frames, and shorter
    side = 32 if make is qwen3_omni else 28
    videos = [video_of(count, 2 * side, 3 * side) for count in counts]
    sounds = [heard_of(each) for each in seconds]
    shapes = [
        shape._replace(sound=sound, requested_fps=fps)
        for (_, _, shape), sound in zip(videos, sounds, strict=True)
    ]
    assert_ids_and_labels(
        family,
        conversation("video", len(counts), "mp4"),
        MediaShapes((), shapes, sounds, range(len(sounds))),
        videos=[frames for frames, _, _ in videos],
        video_metadata=[[metadata for _, metadata, _ in videos]],
        audio=[np.zeros(sound.num_samples, np.float32) for sound in sounds],
        audio_from_video_indices=list(range(len(sounds))),
        load_audio_from_video=True,
        sampling_rate=16_000,
        fps=fps,
    )


@pytest.mark.parametrize(
    ("length", "fps", "needed"),
    [
        (mm.families.qwen_omni.video_length(), 0.5, "of 1 or more, not 0.5"),
        (mm.families.qwen_omni.video_length(), 0.0, "of 1 or more, not None"),
        (mm.families.qwen_omni.qwen3_video_length(), 0.0, "above 0, not None"),
    ],
)
def test_sound_between_frames_needs_the_rate_that_the_decoder_was_asked_for(
    length: Any, fps: float, needed: str
) -> None:
    """Below one frame per second, the processor of Qwen2.5-Omni would divide a frame."""
    _, _, shape = video_of(4, 448, 448)
    with pytest.raises(mm.ConfigError, match=rf"need one {needed}: give VideoDecoder\(fps=2\)"):
        length(shape._replace(sound=heard_of(2.0), requested_fps=fps))
    assert isinstance(length(shape), int)  # without sound, no time is counted


def test_videos_with_sound_stand_beside_recordings_in_the_order_of_the_files() -> None:
    family = qwen2_5_omni_with_sound()
    video, sounds = video_of(2, 56, 56)[2], [heard_of(1.0), heard_of(0.5)]

    def heard(kinds: list[str], shapes: MediaShapes) -> int:
        """How many tokens stand for sound, in a text of these parts."""
        messages = [user([{"type": kind} for kind in kinds]), assistant("a cat")]
        names = [f"{i}.{'mp4' if kind == 'video' else 'wav'}" for i, kind in enumerate(kinds)]
        return heard_in({"json": {"messages": messages}, **dict.fromkeys(names, b"")}, shapes)

    def heard_in(sample: dict[str, Any], shapes: MediaShapes) -> int:
        return len(positions_of(family.text(sample, shapes))["audio"])

    first, last = (
        MediaShapes((), [video._replace(requested_fps=2.0, sound=sounds[i])], sounds, [i])
        for i in (0, 1)
    )
    assert heard(["video", "audio"], first) == heard(["audio", "video"], last) == 25 + 12
    with pytest.raises(
        mm.errors.DecodeError, match=r"in the order \[1, 0\], counted as files are: name"
    ):
        heard(["video", "audio"], last)
    silent = MediaShapes((), [first.videos[0], video], sounds[:1], [0, None])
    with pytest.raises(mm.errors.DecodeError, match="1 of 2 videos have no sound: in one text"):
        heard(["video", "video"], silent)
    caption = {"txt": b"a cat", "0.mp4": b""}
    assert heard_in(caption, first._replace(audios=sounds[:1])) == 25
    deaf = mm.TextDecoder(
        family.tokenizer,
        video_token="<|video_pad|>",
        video_length=mm.families.qwen_omni.video_length(),
    )
    with pytest.raises(
        mm.ConfigError, match="puts the sound of videos into the text: give audio_len"
    ):
        deaf(caption, first)


# -- all kinds together ---------------------------------------------------------------------------


def mixed() -> tuple[dict[str, Any], MediaShapes]:
    parts = [
        {"type": "video", "field": "0.mp4"},
        {"type": "text", "text": "and"},
        {"type": "image", "field": "1.jpg"},
        {"type": "audio", "field": "2.wav"},
        {"type": "video"},
    ]
    messages = [user(parts), assistant("a cat")]
    fields = dict.fromkeys(("0.mp4", "1.jpg", "2.wav", "3.mp4"), b"")
    videos = [video_of(3, 64, 96)[2], video_of(2, 32, 32)[2]]
    shapes = MediaShapes([ImageShape(64, 64, (60, 60))], videos, [AudioShape(1600, 10, 16_000)])
    return {"json": {"messages": messages}, **fields}, shapes


def all_kinds(**options: Any) -> mm.TextDecoder:
    settings: dict[str, Any] = {
        "max_length": 1000,
        "image_token": "<|image_pad|>",
        "image_length": mm.families.qwen_vl.image_length(patch_size=16),
        "video_token": "<|video_pad|>",
        "video_length": mm.families.qwen_vl.qwen3_video_length(),
        "audio_token": "<|AUDIO|>",
        "audio_length": mm.families.qwen_audio.audio_length(),
    }
    return mm.TextDecoder(byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL), **{**settings, **options})


def positions_of(tokens: dict[str, Any]) -> dict[str, list[int]]:
    """Where each kind of medium stands in a text."""
    fast = all_kinds().tokenizer
    names = {"video": "<|video_pad|>", "image": "<|image_pad|>", "audio": "<|AUDIO|>"}
    return {
        kind: np.flatnonzero(tokens["input_ids"] == fast.convert_tokens_to_ids(token)).tolist()
        for kind, token in names.items()
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"3.mp4": None}, r"2 <\|video_pad\|> in the text, 1 videos"),
        ({"4.mp4": b""}, r"2 <\|video_pad\|> in the text, 3 videos"),
        ({"2.wav": None}, r"1 <\|AUDIO\|> in the text, 0 audios"),
        ({"0.mp4": None, "5.mp4": b""}, r"video 1 of the messages is 0\.mp4, not 3\.mp4"),
    ],
)
def test_a_sample_that_does_not_agree_with_its_text_is_bad(
    change: dict[str, Any], reason: str
) -> None:
    sample, shapes = mixed()
    changed = {name: value for name, value in {**sample, **change}.items() if value is not None}
    if "2.wav" not in changed:
        shapes = shapes._replace(audios=())
    with pytest.raises(mm.errors.DecodeError, match=reason):
        all_kinds()(changed, shapes)


def test_a_caption_gets_its_media_in_front_and_learns_no_time() -> None:
    decoder = all_kinds()
    shapes = MediaShapes(videos=[video_of(4, 32, 32)[2]], audios=[AudioShape(1600, 10, 16_000)])
    tokens = decoder({"txt": b"a cat", "mp4": b"", "wav": b""}, shapes)
    text = decoder.tokenizer.decode(tokens["input_ids"])
    assert text.startswith("<bos><0.3 seconds><|vision_start|><|video_pad|><|vision_end|><1.7 sec")
    assert text.endswith("<|AUDIO|><|AUDIO|>a cat<eos>")
    assert learned(decoder.tokenizer, tokens) == "<bos>a cat<eos>"


def test_a_template_of_strings_gets_the_token_of_each_medium() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    decoder = mm.TextDecoder(
        byte_chat(template, MEDIA_SPECIAL), video_length=2, audio_token="<|AUDIO|>", audio_length=1
    )
    parts = [{"type": "video"}, {"type": "text", "text": "hear "}, {"type": "audio"}]
    sample = {"json": {"messages": [user(parts), assistant("yes")]}, "mp4": b"", "wav": b""}
    assert decoder.tokenizer.decode(decoder(sample)["input_ids"]) == (
        "user:<video><video>hear <|AUDIO|></s>assistant:yes</s>"
    )


def test_a_video_in_an_answer_is_not_learned_and_the_words_around_it_are() -> None:
    answer = [
        {"type": "text", "text": "see "},
        {"type": "video", "field": "0.mp4"},
        {"type": "text", "text": " here"},
    ]
    sample = {"json": {"messages": [user("show"), assistant(answer)]}, "0.mp4": b""}
    decoder = all_kinds()
    tokens = decoder(sample, MediaShapes(videos=[video_of(4, 32, 32)[2]]))
    text = "see <|vision_start|><|vision_end|> here<|im_end|>"
    assert learned(decoder.tokenizer, tokens) == text


# -- what cannot work -----------------------------------------------------------------------------


def wrong_text(shape: VideoShape) -> MediaText:
    return MediaText("<|video_pad|>", (1, shape.num_frames))


def no_text(shape: VideoShape) -> MediaText:
    return MediaText("no token", (0,) * (shape.num_frames == 0))


@pytest.mark.parametrize("length", [wrong_text, no_text])
def test_a_text_without_a_token_for_each_length_is_refused(length: Any) -> None:
    sample, shapes = mixed()
    with pytest.raises(
        mm.ConfigError, match=rf"video_length: {length.__name__} returned MediaText"
    ):
        all_kinds(video_length=length)(sample, shapes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"video_length": 0}, "video_length=0: give a whole number from 1 up"),
        ({"audio_length": True}, "audio_length=True: give a whole number"),
        ({"audio_token": "<sound>"}, "audio_token='<sound>': not an added or special token"),
        ({"image_token": "a"}, "image_token='a': not an added or special token"),
        ({"audio_token": "<|video_pad|>"}, "videos have the same token"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(mm.ConfigError, match=reason):
        all_kinds(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"videos": ()}, "2 videos needs the planned shape of each, not 0"),
        (
            {"videos": [shape._replace(height=33) for shape in mixed()[1].videos]},
            "96x33 are not made of squares of 32 pixels: give Vid",
        ),
    ],
    ids=["none", "odd"],
)
def test_shapes_that_do_not_fit_the_text_are_told_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    sample, shapes = mixed()
    with pytest.raises(mm.ConfigError, match=message):
        all_kinds()(sample, shapes._replace(**changes))


@pytest.mark.parametrize(
    ("length", "shape", "error", "message"),
    [
        (
            mm.families.llava.onevision_video_length(),
            video_of(2, 224, 448)[2],
            mm.ConfigError,
            "448x224 are not squares: give VideoDecoder",
        ),
        (
            mm.families.qwen_audio.audio_length(),
            AudioShape(1600, 0, 16_000),
            mm.ConfigError,
            "the audio has no features, of which the tokens",
        ),
        (
            mm.families.qwen_audio.audio_length(),
            AudioShape(300, 2, 16_000),
            mm.errors.DecodeError,
            "audio of 300 samples is too short",
        ),
    ],
    ids=["no squares", "no features", "too short"],
)
def test_shapes_that_the_model_does_not_take_are_told_in_one_line(
    length: Any, shape: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        length(shape)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"json": {"messages": [user([{"type": "video"}, {"type": "audio"}]), assistant("a")]}},
            "an audio part, which nothing decodes",
        ),
        ({"txt": b"a cat"}, r"the text belongs to an audio \(wav\)"),
    ],
)
def test_media_that_are_not_counted_are_not_decoded_for_a_text(
    sample: dict[str, Any], message: str
) -> None:
    seeing = mm.TextDecoder(
        byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL), video_token="<|video_pad|>", video_length=2
    )
    with pytest.raises(mm.errors.DecodeError, match=message):
        seeing({**sample, "mp4": b"", "wav": b""})


def test_a_video_that_is_not_counted_must_be_in_the_sample_too() -> None:
    plain = mm.TextDecoder(byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL), video_token="<|video_pad|>")
    messages = [user([{"type": "video"}]), assistant("no")]
    [decoded] = plain.decode_all([{"json": {"messages": messages}}], media={"video"})
    assert str(decoded) == "1 videos in the conversation, 0 in the sample"
