"""Real videos and recordings, from shards to the model: what the models' own processors make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream import model_inputs
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
from tests.helpers.media_models import assert_equal_inputs, model_of, positions_of
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


def corpus_of(folder: Path, rows: list[tuple[list[dict[str, Any]], list[str]]]) -> mm.Dataset:
    """A corpus of conversations, each with its files."""

    def fields_of(row: int) -> dict[str, bytes]:
        messages, files = rows[row]
        media = {f"{i}{Path(f).suffix}": (DATA / f).read_bytes() for i, f in enumerate(files)}
        return {"json": json.dumps({"messages": messages}).encode(), **media}

    return mm.open_dataset(write_corpus(folder, [len(rows)], fields_of))


def dataset_of(name: str, folder: Path) -> mm.Dataset:
    media = [media_of(name, row) for row in range(NUM_ROWS)]
    return corpus_of(folder, [(messages_of(*each), sum(each, [])) for each in media])


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


TO_TENSORS: dict[str, Any] = {
    "return_tensors": "pt",
    "padding": True,
    "padding_side": "right",
    "add_special_tokens": False,
}


def processed(name: str, family: MediaFamily) -> dict[str, Any]:
    """What the processor makes of the same files, opened by its own reader of videos."""
    texts, videos, sounds, images = [], [], [], []
    options = {"num_frames": 8} if name == "llava_onevision" else {"fps": 2}
    decoder = mm.AudioDecoder()  # compared with other decoders in tests of its own
    for row in range(NUM_ROWS):
        media = media_of(name, row)
        texts.append(family.tokenizer.apply_chat_template(messages_of(*media), tokenize=False))
        videos += [opened(file, family, **options) for file in media[0]]
        sounds += [decoder((DATA / file).read_bytes()) for file in media[1]]
        images.append([Image.open(DATA / file).convert("RGB") for file in media[2]])
    given: dict[str, Any] = {"images": images} if any(images) else {}
    if videos:
        frames, metadata = zip(*videos, strict=True)
        given |= {"videos": list(frames), "video_metadata": list(metadata)}
        given |= {"do_sample_frames": False}
    if sounds:
        given |= {"audio": sounds, "sampling_rate": 16_000}
    return dict(family.processor(text=texts, **given, **TO_TENSORS))


def without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Zero the features behind each recording, which the model does not read."""
    where = inputs["feature_attention_mask"].bool()[:, None]
    return {**inputs, "input_features": inputs["input_features"].where(where, 0)}


def opened(file: str, family: MediaFamily, **options: Any) -> tuple[torch.Tensor, Any]:
    """The frames of a video that its processor takes, and its metadata, by transformers alone."""

    def sample_frames(metadata: Any, **_: Any) -> Any:
        return family.processor.video_processor.sample_frames(metadata, **options)

    video, metadata = transformers.video_utils.load_video(
        str(DATA / file), backend="pyav", sample_indices_fn=sample_frames
    )
    return torch.from_numpy(video).permute(0, 3, 1, 2), metadata


def batch_of(dataset: mm.Dataset, decode: mm.Decode, **settings: Any) -> dict[str, Any]:
    """All rows, none of them bad; padded, or as a setting says."""
    pipeline = mm.Pipeline(
        dataset,
        **{"global_batch_size": len(dataset), "decode": decode, "shuffle": False, **settings},
    )
    [batch] = mm.Loader(pipeline)
    assert batch["__valid__"].all()
    return batch


def assert_same_training(
    model: Any, family: MediaFamily, packed: dict[str, Any], padded: dict[str, Any]
) -> None:
    assert_parity(
        model,
        model_inputs(packed, model, normalize=family.processor),
        model_inputs(padded, model, normalize=family.processor),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_real_files_reach_the_model_as_its_processor_makes_them(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    decode = mm.Decode(text=family.text, **decoders_of(name, family))
    dataset = dataset_of(name, tmp_path)
    batch = batch_of(dataset, decode)
    model = model_of(name, family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    labels = inputs.pop("labels")
    expected = processed(name, family)
    is_omni = name == "qwen2_5_omni"
    both = [without_padding(each) if is_omni else each for each in (inputs, expected)]
    assert_equal_inputs(*both, is_cut=is_omni)
    positions = positions_of(model, inputs)
    if positions is not None:
        assert positions.equal(positions_of(model, expected))
    learned = family.tokenizer.decode(labels[0][labels[0] != -100])
    assert learned == f"{len(media_of(name, 0)[0])} cats<|im_end|>"

    # In one pack they train the model as they do alone.
    pipeline = mm.Pipeline(dataset, global_batch_size=1, decode=decode)
    mm.plan(pipeline, 4096, num_workers=0, progress=False)
    packed = batch_of(dataset, decode, global_batch_size=1, batching=mm.Pack(4096), shuffle=True)
    assert packed["document_row"].tolist() == [0] * NUM_ROWS
    assert_same_training(model, family, packed, batch)


def test_times_of_a_span_count_from_its_start(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]()
    video = {"type": "video", "field": "0.mp4", "start_s": 3.0, "end_s": 6.5}
    messages = [user([video, {"type": "text", "text": "?"}]), assistant("a cat")]
    decode = mm.Decode(text=family.text, **decoders_of("qwen3_vl", family))
    batch = batch_of(corpus_of(tmp_path, [(messages, [f"{DEMO}/1.mp4"])]), decode)
    times = batch["video_pts_s"].tolist()
    assert times == pytest.approx([3, 3.56, 4.16, 4.76, 5.32, 5.88, 6.48, 6.48])
    stamps = re.findall(r"<([\d.]+) seconds>", family.tokenizer.decode(batch["input_ids"][0]))
    means = np.array(times).reshape(-1, 2).mean(axis=1) - 3
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
    messages = [user([{"type": "video"}, {"type": "text", "text": "?"}]), assistant("a cat")]
    decode = mm.Decode(text=family.text, video=mm.VideoDecoder.from_processor(family.processor))
    batch = batch_of(corpus_of(tmp_path, [(messages, [file])]), decode)
    model = model_of("smolvlm", family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor)
    labels = inputs.pop("labels")
    frames, metadata = opened(file, family)
    text = family.tokenizer.apply_chat_template(
        messages, chat_template=family.processor.chat_template, tokenize=False
    )
    expected = family.processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        return_tensors="pt",
        add_special_tokens=False,
    )
    assert_equal_inputs(inputs, dict(expected))
    torch.testing.assert_close(
        model(**inputs, labels=labels).loss, model(**expected, labels=labels).loss
    )


def test_whisper_gets_the_features_of_real_speech_and_its_text(tmp_path: Path) -> None:
    words = ["zero", "one", "two", "three"]
    files = [
        (DATA / f"fsdd/recordings/{number}_george_0.wav").read_bytes()
        for number in range(len(words))
    ]

    def fields_of(row: int) -> dict[str, bytes]:
        return {"wav": files[row], "txt": words[row].encode()}

    extractor = transformers.WhisperFeatureExtractor()
    tokenizer = byte_tokenizer()
    decode = mm.Decode(
        audio=mm.AudioDecoder.from_processor(extractor), text=mm.TextDecoder(tokenizer)
    )
    batch = batch_of(mm.open_dataset(write_corpus(tmp_path, [4], fields_of)), decode)
    model = model_of("whisper", tokenizer)
    inputs = model_inputs(batch, model)
    sounds = [mm.AudioDecoder()(file) for file in files]
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

    dataset = corpus_of(folder, [(turns_of(files), files) for files in rows])
    return family, batch_of(dataset, omni_decode(family, fps))


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
    for file in (file for files in rows for file in files):
        is_video = file.endswith(".mp4")
        if file != SILENT[0]:
            sounds.append(mm.AudioDecoder()((DATA / file).read_bytes()))
            owners.append(len(frames) if is_video else None)
        if is_video:
            video, facts = opened(file, family, fps=fps)
            frames.append(video)
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
            **TO_TENSORS,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "fps"),
    [
        ("qwen2_5_omni", WITH_SOUND, 3.0),
        ("qwen3_omni", [["imageio/realshort.mp4"]], 3.0),
        ("qwen3_omni", [[f"{DEMO}/3.flac"]], 2.0),
        ("qwen3_omni", [SILENT], 2.0),
    ],
    ids=["all", "sound", "recording", "silent"],
)
def test_the_sound_of_a_video_stands_between_its_frames_as_its_processor_puts_it(
    name: str, rows: list[list[str]], fps: float, tmp_path: Path
) -> None:
    """Qwen3-Omni has one recording at a time: its features of several depend on each other."""
    is_third = name == "qwen3_omni"
    family, batch = omni_batch(tmp_path, rows, qwen3_omni() if is_third else None, fps)
    model = model_of(name, family.tokenizer)
    inputs = model_inputs(batch, model, normalize=family.processor, blank_image=False)
    labels, positions = inputs.pop("labels"), inputs.pop("position_ids", None)
    expected = omni_processed(family, rows, fps)
    both = [each if is_third else without_padding(each) for each in (inputs, expected)]
    assert_equal_inputs(*both, is_cut=not is_third)
    has_sound = rows[0][0].startswith("imageio")
    options = {"use_audio_in_video": True} if has_sound else {}
    assert (positions is not None) == has_sound
    by_model = model(**inputs, labels=labels, **options).loss
    if positions is not None:
        assert positions.equal(positions_of(model, expected, **options))
        inputs["position_ids"] = positions
    torch.testing.assert_close(model(**inputs, labels=labels).loss, by_model)
    learned = family.tokenizer.decode(labels[0][labels[0] != -100])
    assert learned == f"{len(rows[0])} cats<|im_end|>"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fps"), [("qwen2_5_omni", 2.0), ("qwen3_omni", 3.0)])
def test_videos_with_sound_in_one_pack_train_a_model_as_they_do_alone(
    tmp_path: Path, name: str, fps: float
) -> None:
    family = qwen3_omni() if name == "qwen3_omni" else qwen2_5_omni_with_sound()
    family, padded = omni_batch(tmp_path, [["imageio/realshort.mp4"], SILENT], family, fps)
    model = model_of(name, family.tokenizer).eval()
    dataset = mm.open_dataset(str(tmp_path))
    packed = batch_of(dataset, omni_decode(family, fps), batching=mm.Flat())
    assert_same_training(model, family, packed, padded)


# -- pictures in their own sizes -------------------------------------------------------------------
