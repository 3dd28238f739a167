"""What a model gets of a batch's videos and audio is what its own processor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream import model_inputs
from mmstream.batching.flat import flatten
from mmstream.decoding.media_shapes import AudioShape, ImageShape, MediaShapes, VideoShape
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import assistant, user
from tests.helpers.media_families import (
    MediaFamily,
    llava_onevision,
    qwen2_5_omni,
    qwen2_audio,
    qwen2_vl,
    qwen3_omni,
    qwen3_vl,
    smolvlm,
    transformers,
)
from tests.helpers.media_models import (
    assert_blank_media_train_nothing,
    assert_equal_inputs,
    model_of,
    positions_of,
)

UNCHANGED = {"do_sample_frames": False, "do_resize": False}
FAMILIES: dict[str, Callable[[], MediaFamily]] = {
    "qwen2_vl": lambda: qwen2_vl("Qwen2VLProcessor", **UNCHANGED),
    "qwen2_5_vl": lambda: qwen2_vl(**UNCHANGED),
    "qwen3_vl": lambda: qwen3_vl(**UNCHANGED),
    "llava_onevision": lambda: llava_onevision(56, **UNCHANGED),
    "qwen2_audio": qwen2_audio,
    "qwen2_5_omni": lambda: qwen2_5_omni(**UNCHANGED),
}
SEEN = {"qwen2_vl": (56, 112), "qwen2_5_vl": (56, 112), "qwen3_vl": (64, 96),
        "llava_onevision": (56, 56), "qwen2_5_omni": (56, 112)}  # fmt: skip
"""Height and width of videos, by the families that take them."""
HEARD = ("qwen2_audio", "qwen2_5_omni")
PICTURE = {"qwen2_vl": (112, 56), "qwen2_5_vl": (112, 56), "qwen2_5_omni": (112, 56),
           "qwen3_vl": (288, 256)}  # fmt: skip
"""Height and width of pictures, where the processor leaves them as they are."""


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


class Row:
    """A row of a batch: what each side gets of its media."""

    def __init__(self, name: str, family: MediaFamily, videos: list[int], audios: list[float]):
        self.frames, self.metadata, shapes = [], [], []
        for seed, count in enumerate(videos):
            self.frames.append(noise(count, 3, *SEEN[name], seed=seed))
            indices = [i * 12 for i in range(count)]
            metadata = transformers.video_utils.VideoMetadata(
                total_num_frames=12 * count + 5, fps=25.0, frames_indices=list(indices)
            )
            self.metadata.append(metadata)
            times = tuple(index / 25 for index in indices)
            rate = metadata.sampled_fps
            size = SEEN[name]
            shapes.append(VideoShape(count, *size, size, times, 25.0, rate, 0.0, tuple(indices)))
        rng = np.random.default_rng(0)
        self.sounds = [
            rng.standard_normal(round(16_000 * s)).astype(np.float32) / 8 for s in audios
        ]
        self.pictures = []
        if name in PICTURE and videos:
            self.pictures.append(noise(3, *PICTURE[name], seed=9))
        features = mm.families.whisper.WhisperFeatures(num_mels=128)
        lengths = [features.num_frames(len(sound)) for sound in self.sounds]
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"{len(videos)} of these "}]
        for kind, media in (("video", videos), ("image", self.pictures), ("audio", audios)):
            parts += [{"type": kind}, {"type": "text", "text": " and "}] * len(media)
        answer = [{"type": "text", "text": "a cat " * (1 + len(videos))}]
        self.messages = [user(parts), assistant(answer)]
        sample: dict[str, Any] = {"json": {"messages": self.messages}}
        extensions = (("mp4", videos), ("jpg", self.pictures), ("wav", audios))
        for extension, media in extensions:
            sample |= {f"{i}.{extension}": b"" for i in range(len(media))}
        tokens = family.text(
            sample,
            MediaShapes(
                [ImageShape(*PICTURE[name], PICTURE[name]) for _ in self.pictures],
                shapes,
                [
                    AudioShape(len(sound), length, 16_000)
                    for sound, length in zip(self.sounds, lengths, strict=True)
                ],
            ),
        )
        self.sample: dict[str, Any] = {**tokens, "image": self.pictures, "__key__": "7"}
        if name in SEEN:
            self.sample |= {
                "video": self.frames,
                "video_pts_s": [np.array(shape.times_s) for shape in shapes],
                "video_fps": np.array([shape.sampled_fps for shape in shapes]),
                "video_requested_fps": np.full(len(shapes), 2.0),
            }
        if name in HEARD:
            sounds = [features(torch.from_numpy(sound)) for sound in self.sounds]
            self.sample |= {
                "audio_features": sounds,
                "audio_features_length": np.array(lengths, dtype=np.int64),
            }


def rows_of(name: str, family: MediaFamily) -> list[Row]:
    """Rows with several media, one, and none."""
    if name == "llava_onevision":
        counts: list[list[int]] = [[4, 4], [], [4]]
    else:
        counts = [[4, 3], [], [2]] if name in SEEN else [[], [], []]
    sounds: list[list[float]] = [[1.0, 0.5], [], [2.03]] if name in HEARD else [[], [], []]
    return [
        Row(name, family, videos, audios) for videos, audios in zip(counts, sounds, strict=True)
    ]


def processed(family: MediaFamily, rows: list[Row]) -> dict[str, Any]:
    """The batch as the family's processor makes it."""
    texts = [family.tokenizer.apply_chat_template(row.messages, tokenize=False) for row in rows]
    media: dict[str, Any] = {}
    if pictures := [picture for row in rows for picture in row.pictures]:
        media["images"] = pictures
    if frames := [video for row in rows for video in row.frames]:
        media["videos"] = frames
        media["video_metadata"] = [metadata for row in rows for metadata in row.metadata]
    if sounds := [sound for row in rows for sound in row.sounds]:
        media |= {"audio": sounds, "sampling_rate": 16_000}
    options = {"padding": True, "padding_side": "right", "add_special_tokens": False}
    return dict(family.processor(text=texts, return_tensors="pt", **media, **options))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_gets_what_its_processor_makes_of_videos_and_audio(name: str) -> None:
    family = FAMILIES[name]()
    model = model_of(name, family.tokenizer)
    rows = rows_of(name, family)
    batch = mm.collate([row.sample for row in rows], pad_token_id=family.text.pad_token_id)
    inputs = model_inputs(batch, model, normalize=getattr(family, "processor", None))
    labels = inputs.pop("labels")
    expected = processed(family, rows)
    assert_equal_inputs(inputs, expected, is_cut=name == "qwen2_5_omni")
    positions = positions_of(model, inputs)
    if positions is not None:
        assert positions.equal(positions_of(model, expected))
    loss = model(**inputs, labels=labels).loss
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_without_media_gets_a_blank_one_for_each_tower(name: str) -> None:
    family = FAMILIES[name]()
    model = model_of(name, family.tokenizer)
    samples = [row.sample for row in rows_of(name, family)]
    full = mm.collate(samples, pad_token_id=family.text.pad_token_id)
    model(**model_inputs(full, model, normalize=family.processor)).loss.backward()
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    empty = mm.collate([samples[1]] * 2, pad_token_id=family.text.pad_token_id)
    assert_blank_media_train_nothing(model, empty)
    assert all(weight.grad is not None for weight in trained)


@pytest.mark.parametrize("make", [qwen3_omni, smolvlm], ids=lambda make: make.__name__)
def test_a_batch_of_texts_gives_each_tower_a_gradient_of_zero(
    make: Callable[[], MediaFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    processing = transformers.models.smolvlm.processing_smolvlm
    monkeypatch.setattr(processing, "num2words", str)  # which the processor cannot do without
    family = make()
    model = model_of(make.__name__, family.tokenizer)
    messages = [user([{"type": "text", "text": "?"}]), assistant("a cat")]
    tokens = family.text({"json": {"messages": messages}}, MediaShapes())
    batch = mm.collate([tokens] * 2, pad_token_id=family.text.pad_token_id)
    assert_blank_media_train_nothing(model, batch)
    untrained = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert [name for name in untrained if any(w in name for w in ("vis", "audio"))] == []


def test_omni_models_count_time_by_the_rate_that_the_decoder_was_asked_for() -> None:
    family = FAMILIES["qwen2_5_omni"]()
    model = model_of("qwen2_5_omni", family.tokenizer)
    batch = mm.collate([row.sample for row in rows_of("qwen2_5_omni", family)])
    batch["video_requested_fps"] = torch.tensor([2.0, 4.0, 0.5], dtype=torch.float64)
    inputs = model_inputs(batch, model, normalize=family.processor)
    assert inputs["video_second_per_grid"].tolist() == [1.0, 0.5, 4.0]
    batch["video_requested_fps"][1] = 0  # by VideoDecoder(num_frames=)
    for unknown in (batch, {k: v for k, v in batch.items() if k != "video_requested_fps"}):
        with pytest.raises(
            mm.ConfigError, match=r"in video_requested_fps: give VideoDecoder\(fps="
        ):
            model_inputs(unknown, model, normalize=family.processor)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_by_another_rule_than_the_models_are_refused_at_the_first_batch(
    name: str,
) -> None:
    family = FAMILIES[name]()
    samples = [row.sample for row in rows_of(name, family)]
    rule = mm.families.qwen_vl.QwenVLPositions.from_config(model_of(name, family.tokenizer).config)

    def positions_by(positions: Any, model: Any) -> torch.Tensor:
        batch = flatten(samples, range(len(samples)), len(samples), mm.Flat(positions=positions))
        batch["__valid__"] = torch.ones(len(samples), dtype=torch.bool)
        return model_inputs(batch, model, normalize=family.processor)["position_ids"]

    models = [model_of(name, family.tokenizer) for _ in range(3)]
    assert positions_by(rule, models[0]).equal(positions_by(None, models[0]))
    others = [lambda ids, media: rule(ids, media) * 2]
    if name == "qwen2_5_vl":  # the same tokens, at other times
        others.append(replace(rule, tokens_per_second=25))
    for other, model in zip(others, models[1:], strict=False):
        for _ in range(2):  # also when the call is tried again
            with pytest.raises(mm.ConfigError, match=f"batch are not those of this {name}"):
                positions_by(other, model)


def test_videos_alone_need_no_blank_picture() -> None:
    family = FAMILIES["qwen2_vl"]()
    model = model_of("qwen2_vl", family.tokenizer)
    row = Row("qwen2_vl", family, [], [])
    sample = {**row.sample, "video": noise(2, 3, 56, 56, seed=1), "video_pts_s": np.zeros(2)}
    ids = np.append(sample["input_ids"], [model.config.video_token_id] * 4)
    sample |= {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    inputs = model_inputs(mm.collate([sample]), model, normalize=family.processor)
    assert "pixel_values" not in inputs
    assert inputs["video_grid_thw"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (
            "qwen2_vl",
            r"video_length=mm.families.qwen_vl.video_length\(patch_size=14, merge_size=2\)",
        ),
        (
            "qwen3_vl",
            r"video_length=mm.families.qwen_vl.qwen3_video_length\(patch_size=16, merge_size=2\)",
        ),
        (
            "llava_onevision",
            r"video_length=mm.families.llava.onevision_video_length\(patch_size=14\)",
        ),
        ("qwen2_audio", r"audio_length=mm.families.qwen_audio.audio_length\(\)"),
    ],
)
def test_another_number_of_tokens_names_the_setting(name: str, setting: str) -> None:
    family = FAMILIES[name]()
    model = model_of(name, family.tokenizer)
    batch = mm.collate([row.sample for row in rows_of(name, family)])
    kind = "audio" if name in HEARD else "video"
    token = getattr(model.config, f"{kind}_token_id")
    position = (batch["input_ids"] == token).nonzero()[0]
    batch["input_ids"][tuple(position)] = 0
    with pytest.raises(mm.ConfigError, match=rf"{name} takes \d+ {kind} tokens .*{setting}"):
        model_inputs(batch, model, normalize=family.processor)


LEFT_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "internvl takes no videos, and the batch has some: leave": ("internvl", {}),
    "qwen2_audio takes no pictures, and the batch has some: leave": ("qwen2_audio", {}),
    "qwen2_vl takes no audio.*undecoded_parts": ("qwen2_vl", {"image": [], "video": []}),
    "takes features, and the batch has samples of 'aud": (
        "qwen2_audio",
        {
            "image": [],
            "video": [],
            "video_frames": None,
            "audio_features": None,
            "audio": torch.zeros(2, 100),
        },
    ),
}
"""Part of the message -> a family, and changes of a batch of another; None: the field is gone."""


@pytest.mark.parametrize("message", LEFT_OUT)
def test_media_that_a_family_does_not_take_are_never_left_out(message: str) -> None:
    family = FAMILIES["qwen2_5_omni"]()
    name, changes = LEFT_OUT[message]
    batch = mm.collate([row.sample for row in rows_of("qwen2_5_omni", family)]) | changes
    batch = {key: value for key, value in batch.items() if value is not None}
    with pytest.raises(mm.ConfigError, match=message):
        model_inputs(batch, name, normalize=family.processor)


# -- Whisper --------------------------------------------------------------------------------------


def speech_batch(texts: list[str], seconds: list[float]) -> tuple[dict[str, Any], list[Any]]:
    decoder = mm.TextDecoder(byte_tokenizer(), 200)
    features = mm.families.whisper.WhisperFeatures(num_mels=80)
    rng = np.random.default_rng(0)
    sounds = [rng.standard_normal(round(16_000 * s)).astype(np.float32) / 8 for s in seconds]
    samples = [
        {
            **decoder({"txt": text.encode()}),
            "audio_features": features(torch.from_numpy(sound)),
            "audio_features_length": np.array([features.num_frames(len(sound))]),
            "__key__": text,
        }
        for text, sound in zip(texts, sounds, strict=True)
    ]
    batch = mm.collate(samples, pad_token_id=decoder.pad_token_id)
    return {**batch, "__key__": texts}, sounds


def test_whisper_gets_the_features_of_its_extractor_and_learns_the_next_token() -> None:
    texts = ["one", "twenty two"]
    batch, sounds = speech_batch(texts, [0.7, 1.31])
    tokenizer = byte_tokenizer()
    model = model_of("whisper", tokenizer)
    inputs = model_inputs(batch, model)
    labels = inputs["labels"]
    features = transformers.WhisperFeatureExtractor()(
        sounds, sampling_rate=16_000, return_tensors="pt"
    )
    # As the model itself shifts the labels.
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    shifted = shift_tokens_right(
        labels, tokenizer.pad_token_id, model.config.decoder_start_token_id
    )
    assert_equal_inputs(inputs, {**features, "decoder_input_ids": shifted, "labels": labels})
    assert tokenizer.decode(labels[0][labels[0] != -100]) == "one<eos>"
    loss = model(**inputs).loss
    by_model = model(input_features=inputs["input_features"], labels=labels).loss
    torch.testing.assert_close(loss, by_model)
    assert torch.isfinite(loss)
    del batch["labels"]
    assert model_inputs(batch, "whisper").keys() == inputs.keys() - {"labels"}


def test_features_have_the_dtype_of_the_model() -> None:
    batch, _ = speech_batch(["one", "two"], [0.1, 0.2])
    model = model_of("whisper", byte_tokenizer()).bfloat16()
    inputs = model_inputs(batch, model)
    assert inputs["input_features"].dtype == torch.bfloat16
    assert torch.isfinite(model(**inputs).loss)
    family = FAMILIES["qwen2_audio"]()
    hearing = model_of("qwen2_audio", family.tokenizer).bfloat16()
    text = mm.collate([Row("qwen2_audio", family, [], []).sample])
    assert torch.isfinite(hearing(**model_inputs(text, hearing)).loss)  # of a blank recording


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_row": torch.tensor([0, 0])}, r"one audio a row, one has 2: leave .*SkipSample"),
        (
            {"attention_mask": torch.tensor([[0, 1], [1, 1]])},
            "whisper takes texts padded on the right",
        ),
        (
            {"audio_features": torch.zeros(2, 7, 3000)},
            r"takes \d+ mel bands, the features have 7: .*num_mels=",
        ),
    ],
    ids=["recordings", "padding", "bands"],
)
def test_whisper_takes_one_recording_a_row_and_padding_on_the_right(
    changes: dict[str, Any], message: str
) -> None:
    batch, _ = speech_batch(["one", "two"], [0.1, 0.1])
    with pytest.raises(mm.ConfigError, match=message):
        model_inputs(batch | changes, model_of("whisper", byte_tokenizer()))
