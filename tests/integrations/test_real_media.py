"""Real videos and recordings, from shards to the model: what the models' own processors make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.integrations import model_inputs
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import write_corpus
from tests.helpers.media_families import (
    MediaFamily,
    llava_onevision,
    qwen2_5_omni,
    qwen2_5_omni_with_sound,
    qwen2_audio,
    qwen2_vl,
    qwen3_omni,
    qwen3_vl,
    smolvlm,
    transformers,
)
from tests.helpers.media_models import model_of, positions_of
from tests.helpers.packs import assert_parity
from tests.helpers.paths import ROOT

DATA = ROOT.parent / "shared" / "data"
DEMO = "llamafactory_mllm_demo/data/mllm_demo_data"
VIDEOS = [
    ["imageio/realshort.mp4", f"{DEMO}/3.mp4"],
    [f"{DEMO}/2.avi"],
    ["torchcodec/h265_video.mp4"],
]
"""Of each row: 30.02 and 23.976 frames a second, an AVI, and ten frames a second."""
PICTURES = [
    ["000000000285", "000000000785"],
    ["000000003501"],
    [],
]
"""Of each row, for LLaVA-OneVision, which treats a picture alone in another way than several."""
SOUNDS = [[f"{DEMO}/2.wav"], [f"{DEMO}/3.flac", "fsdd/recordings/0_george_0.wav"], []]
NUM_ROWS = 3

SMALL = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28}}
SMALL_3 = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 300 * 32 * 32}}


def small_omni() -> MediaFamily:
    family = qwen2_5_omni()
    family.processor.videos_kwargs = SMALL  # which it prefers to what its video processor has
    return family


FAMILIES: dict[str, Callable[[], MediaFamily]] = {
    "qwen2_vl": lambda: qwen2_vl("Qwen2VLProcessor", **SMALL),
    "qwen2_5_vl": lambda: qwen2_vl(**SMALL),
    "qwen3_vl": lambda: qwen3_vl(**SMALL_3),
    "llava_onevision": lambda: llava_onevision(56),
    "qwen2_audio": qwen2_audio,
    "qwen2_5_omni": small_omni,
}


SEES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "qwen2_5_omni")
HEARS = ("qwen2_audio", "qwen2_5_omni")

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real files lie beside the checkout")


def messages_of(videos: list[str], sounds: list[str], pictures: list[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is "}]
    for kind, files in (("image", pictures), ("video", videos), ("audio", sounds)):
        parts += [{"type": kind}, {"type": "text", "text": " and "}] * len(files)
    return [user(parts), assistant([{"type": "text", "text": f"{len(videos)} cats"}])]


def media_of(name: str, row: int) -> tuple[list[str], list[str], list[str]]:
    """The videos, recordings and pictures of a row."""
    return (
        VIDEOS[row] if name in SEES else [],
        SOUNDS[row] if name in HEARS else [],
        [f"coco/images/{file}.jpg" for file in PICTURES[row] if name == "llava_onevision"],
    )


def dataset_of(name: str, folder: Path) -> mm.Dataset:
    def fields_of(row: int) -> dict[str, bytes]:
        media = media_of(name, row)
        fields = {"json": json.dumps({"messages": messages_of(*media)}).encode()}
        for i, file in enumerate([file for files in media for file in files]):
            path = DATA / file
            fields[f"{i}{path.suffix}"] = path.read_bytes()
        return fields

    return mm.open_dataset(write_corpus(folder, [NUM_ROWS], fields_of))


def decoders_of(name: str, family: MediaFamily) -> dict[str, Any]:
    decoders: dict[str, Any] = {}
    if name in SEES:
        options = {"num_frames": 8} if name == "llava_onevision" else {}
        decoders["video"] = mm.VideoDecoder.from_processor(family.processor, **options)
    if family.text.image_length is not None:
        decoders["image"] = mm.ImageDecoder.from_processor(family.processor, scaled_decoding=False)
    if name in HEARS:
        decoders["audio"] = mm.AudioDecoder.from_processor(family.processor)
    return decoders


def processed(name: str, family: MediaFamily) -> dict[str, Any]:
    """What the processor makes of the same files, opened by its own reader of videos."""
    texts, frames, metadata, sounds, images = [], [], [], [], []
    options = {"num_frames": 8} if name == "llava_onevision" else {"fps": 2}

    def sample_frames(metadata: Any, **_: Any) -> Any:
        return family.processor.video_processor.sample_frames(metadata, **options)

    for row in range(NUM_ROWS):
        videos, recordings, pictures = media_of(name, row)
        messages = messages_of(videos, recordings, pictures)
        images.append([Image.open(DATA / file).convert("RGB") for file in pictures])
        texts.append(family.tokenizer.apply_chat_template(messages, tokenize=False))
        for file in videos:
            video, facts = transformers.video_utils.load_video(
                str(DATA / file),
                backend="pyav",
                sample_indices_fn=sample_frames,
            )
            frames.append(torch.from_numpy(video).permute(0, 3, 1, 2))
            metadata.append(facts)
        decoder = mm.AudioDecoder()  # compared with other decoders in tests of its own
        sounds += [decoder((DATA / file).read_bytes()) for file in recordings]
    media: dict[str, Any] = {"images": images} if any(images) else {}
    if frames:
        media |= {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}
    if sounds:
        media |= {"audio": sounds, "sampling_rate": 16_000}
    settings = {"padding": True, "padding_side": "right", "add_special_tokens": False}
    return dict(family.processor(text=texts, return_tensors="pt", **media, **settings))


def cut_padding(inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    """Leave out what Qwen2.5-Omni's processor adds to audio: up to 5 minutes, which models cut."""
    length = inputs["input_features"].shape[-1]
    for key in ("input_features", "feature_attention_mask"):
        expected[key] = expected[key][..., :length]
    where = inputs["feature_attention_mask"].bool()[:, None]
    for values in (inputs, expected):
        values["input_features"] = values["input_features"].where(where, 0)


def assert_equal_inputs(inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what a model gets with what its processor makes, value by value."""
    assert inputs.keys() == expected.keys()
    for key, value in inputs.items():
        exact = not value.is_floating_point() or "second" in key
        atol = 0 if exact else 1e-3 if key == "input_features" else 1e-5
        torch.testing.assert_close(
            value,
            expected[key].to(value.dtype),
            rtol=0,
            atol=atol,
            msg=lambda m, k=key: f"{k}: {m}",
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_real_files_reach_the_model_as_its_processor_makes_them(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    decode = mm.Decode(text=family.text, **decoders_of(name, family))
    pipeline = mm.Pipeline(
        dataset_of(name, tmp_path), global_batch_size=NUM_ROWS, decode=decode, shuffle=False
    )
    [batch] = mm.Loader(pipeline)
    assert batch["__valid__"].all()
    model = model_of(name, family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    labels = inputs.pop("labels")
    expected = processed(name, family)
    if name == "qwen2_5_omni":
        cut_padding(inputs, expected)
    assert_equal_inputs(inputs, expected)
    positions = positions_of(model, inputs)
    if positions is not None:
        assert positions.equal(positions_of(model, expected))
    learned = family.tokenizer.decode(labels[0][labels[0] != -100])
    assert learned == f"{len(media_of(name, 0)[0])} cats<|im_end|>"
    assert torch.isfinite(model(**inputs, labels=labels).loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_real_files_in_one_pack_train_a_model_as_they_do_alone(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    decode = mm.Decode(text=family.text, **decoders_of(name, family))
    dataset = dataset_of(name, tmp_path)
    mm.measure(dataset, decode=decode, num_workers=0, progress=False)
    pack = mm.Pack(4096, plan=mm.plan_packs(dataset, 4096))
    pipeline = mm.Pipeline(dataset, global_batch_size=1, decode=decode, batching=pack)
    [packed] = mm.Loader(pipeline)
    assert packed["document_row"].tolist() == [0] * NUM_ROWS
    pipeline = mm.Pipeline(dataset, global_batch_size=NUM_ROWS, decode=decode, shuffle=False)
    [padded] = mm.Loader(pipeline)
    model = model_of(name, family.tokenizer).eval()
    assert_parity(
        model,
        model_inputs(packed, model, normalize=family.processor),
        model_inputs(padded, model, normalize=family.processor),
    )


def test_times_of_a_span_count_from_its_start(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]()
    video = {"type": "video", "field": "0.mp4", "start_s": 3.0, "end_s": 6.5}
    messages = [user([video, {"type": "text", "text": "?"}]), assistant("a cat")]
    fields = {
        "json": json.dumps({"messages": messages}).encode(),
        "0.mp4": (DATA / f"{DEMO}/1.mp4").read_bytes(),
    }
    dataset = mm.open_dataset(write_corpus(tmp_path, [1], lambda row: fields))
    decode = mm.Decode(text=family.text, **decoders_of("qwen3_vl", family))
    [batch] = mm.Loader(mm.Pipeline(dataset, global_batch_size=1, decode=decode, shuffle=False))
    times = batch["video_pts_s"].tolist()
    assert times == pytest.approx([3, 3.56, 4.16, 4.76, 5.32, 5.88, 6.48, 6.48])
    stamps = re.findall(r"<([\d.]+) seconds>", family.tokenizer.decode(batch["input_ids"][0]))
    means = [
        (first + second) / 2 - 3 for first, second in zip(times[::2], times[1::2], strict=True)
    ]
    assert [float(stamp) for stamp in stamps] == pytest.approx(means, abs=0.051)


@pytest.mark.parametrize(
    "file",
    [f"{DEMO}/2.avi", "torchcodec/h265_video.mp4"],
    ids=lambda file: Path(file).stem,
)
def test_a_video_reaches_smolvlm_as_its_processor_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    words = {1: "one", 4: "four", 6: "six"}
    processing = transformers.models.smolvlm.processing_smolvlm
    monkeypatch.setattr(processing, "num2words", words.__getitem__)
    family = smolvlm()
    path = DATA / file
    messages = [user([{"type": "video"}, {"type": "text", "text": "?"}]), assistant("a cat")]
    fields = {
        "json": json.dumps({"messages": messages}).encode(),
        f"0{path.suffix}": path.read_bytes(),
    }
    decode = mm.Decode(text=family.text, video=mm.VideoDecoder.from_processor(family.processor))
    dataset = mm.open_dataset(write_corpus(tmp_path, [1], lambda row: fields))
    [batch] = mm.Loader(mm.Pipeline(dataset, global_batch_size=1, decode=decode, shuffle=False))
    assert batch["__valid__"].all()
    model = model_of("smolvlm", family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    labels = inputs.pop("labels")
    template = family.processor.chat_template
    video, metadata = transformers.video_utils.load_video(
        str(path), backend="pyav", sample_indices_fn=family.processor.video_processor.sample_frames
    )
    expected = family.processor(
        text=[
            family.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        ],
        videos=[torch.from_numpy(video).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        return_tensors="pt",
        add_special_tokens=False,
    )
    assert_equal_inputs(inputs, dict(expected))
    torch.testing.assert_close(
        model(**inputs, labels=labels).loss, model(**expected, labels=labels).loss
    )


def test_whisper_gets_the_features_of_real_speech_and_its_text(tmp_path: Path) -> None:
    files = [f"fsdd/recordings/{number}_george_0.wav" for number in range(4)]
    words = ["zero", "one", "two", "three"]

    def fields_of(row: int) -> dict[str, bytes]:
        return {"wav": (DATA / files[row]).read_bytes(), "txt": words[row].encode()}

    extractor = transformers.WhisperFeatureExtractor()
    tokenizer = byte_tokenizer()
    decode = mm.Decode(
        audio=mm.AudioDecoder.from_processor(extractor), text=mm.TextDecoder(tokenizer)
    )
    dataset = mm.open_dataset(write_corpus(tmp_path, [4], fields_of))
    pipeline = mm.Pipeline(dataset, global_batch_size=4, decode=decode, shuffle=False)
    [batch] = mm.Loader(pipeline)
    model = model_of("whisper", tokenizer)
    inputs = model_inputs(batch, model)
    sounds = [mm.AudioDecoder()((DATA / file).read_bytes()) for file in files]
    expected = extractor(sounds, sampling_rate=16_000, return_tensors="pt")["input_features"]
    torch.testing.assert_close(inputs["input_features"], expected, rtol=0, atol=1e-3)
    learned = [tokenizer.decode(row[row != -100]) for row in inputs["labels"]]
    assert learned == [f"{word}<eos>" for word in words]
    assert torch.isfinite(model(**inputs).loss)


# -- Qwen omni models: the sound of a video between its frames -------------------------------------

WITH_SOUND = [
    ["imageio/realshort.mp4", f"{DEMO}/3.flac"],
    ["fsdd/recordings/0_george_0.wav"],
    ["imageio/cockatoo.mp4", "imageio/realshort.mp4"],
]
"""Of each row: videos with sound, and recordings."""
SILENT = [f"{DEMO}/3.mp4", f"{DEMO}/3.flac"]


def omni_batch(
    folder: Path, rows: list[list[str]], family: MediaFamily | None = None, fps: float = 2.0
) -> tuple[MediaFamily, dict[str, Any]]:
    """The files of each row as a batch, where the text has them in this order."""
    family = family or qwen2_5_omni_with_sound()
    is_third = family.processor.image_processor.patch_size == 16
    family.processor.videos_kwargs = SMALL_3 if is_third else SMALL

    def fields_of(row: int) -> dict[str, bytes]:
        fields = {"json": json.dumps({"messages": turns_of(rows[row])}).encode()}
        for i, file in enumerate(rows[row]):
            fields[f"{i}{Path(file).suffix}"] = (DATA / file).read_bytes()
        return fields

    decode = omni_decode(family, fps)
    dataset = mm.open_dataset(write_corpus(folder, [len(rows)], fields_of))
    [batch] = mm.Loader(
        mm.Pipeline(dataset, global_batch_size=len(rows), decode=decode, shuffle=False)
    )
    assert batch["__valid__"].all()
    return family, batch


def omni_decode(family: MediaFamily, fps: float = 2.0) -> mm.Decode:
    sound = mm.AudioDecoder.from_processor(family.processor)
    return mm.Decode(
        text=family.text,
        video=mm.VideoDecoder.from_processor(family.processor, audio=sound, fps=fps),
        audio=sound,
        image=mm.ImageDecoder.from_processor(family.processor),
    )


def turns_of(files: list[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is "}]
    for file in files:
        kind = "video" if file.endswith((".mp4", ".avi")) else "audio"
        parts += [{"type": kind}, {"type": "text", "text": " and "}]
    return [user(parts), assistant([{"type": "text", "text": f"{len(files)} cats"}])]


def omni_processed(family: MediaFamily, rows: list[list[str]], fps: float = 2.0) -> dict[str, Any]:
    """What the processor makes of the files, with the sound of videos between their frames."""
    frames, metadata, sounds, owners = [], [], [], []
    decoder = mm.AudioDecoder()

    def sample_frames(metadata: Any, **_: Any) -> Any:
        return family.processor.video_processor.sample_frames(metadata, fps=fps)

    for file in (file for files in rows for file in files):
        is_video = file.endswith(".mp4")
        if file != SILENT[0]:
            sounds.append(decoder((DATA / file).read_bytes()))
            owners.append(len(frames) if is_video else None)
        if is_video:
            video, facts = transformers.video_utils.load_video(
                str(DATA / file), backend="pyav", sample_indices_fn=sample_frames
            )
            frames.append(torch.from_numpy(video).permute(0, 3, 1, 2))
            metadata.append(facts)
    texts = [
        family.tokenizer.apply_chat_template(turns_of(files), tokenize=False) for files in rows
    ]
    return dict(
        family.processor(
            text=texts,
            videos=frames or None,
            video_metadata=metadata or None,
            audio=sounds,
            audio_from_video_indices=owners,
            load_audio_from_video=True,
            do_sample_frames=False,
            fps=fps,
            sampling_rate=16_000,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
    )


def test_the_sound_of_a_video_stands_between_its_frames_as_its_processor_puts_it(
    tmp_path: Path,
) -> None:
    fps = 3.0
    family, batch = omni_batch(tmp_path, WITH_SOUND, fps=fps)
    model = model_of("qwen2_5_omni", family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor, blank_image=False)
    labels, positions = inputs.pop("labels"), inputs.pop("position_ids")
    expected = omni_processed(family, WITH_SOUND, fps)
    cut_padding(inputs, expected)
    assert_equal_inputs(inputs, expected)
    assert positions.equal(positions_of(model, expected, use_audio_in_video=True))
    learned = family.tokenizer.decode(labels[0][labels[0] != -100])
    assert learned == "2 cats<|im_end|>"
    by_model = model(**inputs, labels=labels, use_audio_in_video=True).loss
    ours = model(**inputs, labels=labels, position_ids=positions).loss
    torch.testing.assert_close(ours, by_model)


@pytest.mark.parametrize(
    ("files", "fps"),
    [(["imageio/realshort.mp4"], 3.0), ([f"{DEMO}/3.flac"], 2.0), (SILENT, 2.0)],
    ids=["sound", "recording", "silent"],
)
def test_files_reach_qwen3_omni_as_its_processor_makes_them(
    tmp_path: Path, files: list[str], fps: float
) -> None:
    """One recording at a time: the processor's features of several depend on each other."""
    family, batch = omni_batch(tmp_path, [files], qwen3_omni(), fps)
    model = model_of("qwen3_omni", family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor, blank_image=False)
    labels, positions = inputs.pop("labels"), inputs.pop("position_ids", None)
    expected = omni_processed(family, [files], fps)
    assert_equal_inputs(inputs, expected)
    has_sound = files[0].startswith("imageio")
    options = {"use_audio_in_video": True} if has_sound else {}
    assert (positions is not None) == has_sound
    if positions is not None:
        assert positions.equal(positions_of(model, expected, **options))
        inputs["position_ids"] = positions
    by_model = model(**expected, labels=labels, **options).loss
    torch.testing.assert_close(model(**inputs, labels=labels).loss, by_model)


def test_a_row_with_a_silent_video_has_positions_as_alone(tmp_path: Path) -> None:
    rows = [["imageio/realshort.mp4"], SILENT]
    family, batch = omni_batch(tmp_path, rows)
    model = model_of("qwen2_5_omni", family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    assert inputs["input_ids"].equal(omni_processed(family, rows)["input_ids"])
    for row, has_sound in enumerate((True, False)):
        files = rows[row : row + 1]
        _, alone = omni_batch(tmp_path / str(row), files)
        expected = omni_processed(family, files)
        length = expected["input_ids"].shape[1]
        positions = positions_of(model, expected, use_audio_in_video=has_sound)
        assert inputs["position_ids"][:, row, :length].equal(positions[:, 0])
        assert (
            "position_ids" in model_inputs(alone, model, normalize=family.processor)
        ) == has_sound


@pytest.mark.parametrize(("name", "fps"), [("qwen2_5_omni", 2.0), ("qwen3_omni", 3.0)])
def test_videos_with_sound_in_one_pack_train_a_model_as_they_do_alone(
    tmp_path: Path, name: str, fps: float
) -> None:
    family = qwen3_omni() if name == "qwen3_omni" else qwen2_5_omni_with_sound()
    family, padded = omni_batch(tmp_path, [["imageio/realshort.mp4"], SILENT], family, fps)
    model = model_of(name, family.tokenizer).eval()
    decode = omni_decode(family, fps)
    dataset = mm.open_dataset(str(tmp_path))
    [packed] = mm.Loader(
        mm.Pipeline(dataset, global_batch_size=2, decode=decode, batching=mm.Flat(), shuffle=False)
    )
    assert_parity(
        model,
        model_inputs(packed, model, normalize=family.processor),
        model_inputs(padded, model, normalize=family.processor),
    )
