"""A tiny Qwen2.5-VL on chats about clips and a tiny Whisper on speech, from folders, under ranks.

Two processes play all parts one after another: as two ranks, as one, and as two again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.train import TrainConfig, TrainResult, train
from mmstream.train.models import load_chat, open_model, pipeline_of_model
from mmstream.train.tokenizer import open_tokenizer
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.gloo_ranks import play_parts, run_ranks
from tests.helpers.logged_runs import metrics
from tests.helpers.media_files import audio_file, video_file
from tests.helpers.tiny_media_models import save_tiny_qwen, save_tiny_whisper

SETTINGS = {
    "epochs": 2, "global_batch_size": 4, "num_workers": 0, "device": "cpu",
    "lr": 3e-3, "precision": "fp32", "log_keys": True, "checkpoint_every": 2,
}  # fmt: skip
MEDIA = ([], ["0.mp4"], ["0.jpg"], ["0.mp4", "1.mp4"], ["0.mp4", "1.jpg"])
"""Media of the chats, by turns."""


def chat(number: int) -> dict[str, bytes]:
    """A conversation about clips of several lengths, about pictures, or about nothing."""
    fields = {}
    for name in MEDIA[number % len(MEDIA)]:
        clip = video_file(num_frames=4 + 5 * (number % 4), first_number=number)
        fields[name] = jpeg(number, (96, 72)) if name.endswith("jpg") else clip
    parts = [
        {"type": "image" if name.endswith("jpg") else "video", "field": name} for name in fields
    ]
    question = [*parts, {"type": "text", "text": "Which number?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    return {**fields, "json": json.dumps({"messages": messages}).encode()}


def spoken(number: int) -> dict[str, bytes]:
    """A sound and its transcript."""
    kind = ("wav", "flac", "mp3")[number % 3]
    data = audio_file(kind, seconds=0.3 + 0.2 * (number % 6))
    return {kind: data, "txt": f"number {number}".encode()}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of both kinds."""
    folder = tmp_path_factory.mktemp("media")
    save_tiny_qwen(folder / "qwen")
    save_tiny_whisper(folder / "whisper")
    write_corpus(folder / "qwen-data", [9, 0, 8], chat)
    write_corpus(folder / "whisper-data", [10, 7], spoken)
    return folder


def run(folder: Path, name: str, out: str, *, is_flat: bool = False, **changes: Any) -> TrainResult:
    own = {
        "url": str(folder / f"{name}-data"),
        "out": str(folder / out),
        "model": str(folder / name),
    }
    config = TrainConfig(**{**own, **SETTINGS, **changes})

    def flat(dataset: mm.Dataset) -> mm.Pipeline:
        made = pipeline_of_model(config, dataset, open_model(config, 4)[1])
        return replace(made, batching=mm.Flat())

    return train(config, pipeline=flat if is_flat else None)


def play(rank: int, folder_name: str) -> None:
    """What each process does."""
    folder = Path(folder_name)

    def move(max_steps: int | None) -> None:
        for name in ("qwen", "whisper"):
            run(folder, name, f"{name}-moved", max_steps=max_steps)
        if max_steps == 3:
            run(folder, "qwen", "qwen-flat", max_steps=3, is_flat=True)

    play_parts(
        rank, folder, [(2, partial(move, 3)), (1, partial(move, 5)), (2, partial(move, None))]
    )


@pytest.fixture(scope="module")
def moved(material: Path) -> Path:
    """The runs that moved from two ranks to one and back."""
    run_ranks(play, str(material), num_ranks=2)
    return material


def keys_of(folder: Path) -> list[list[str]]:
    """The keys of each step, those of all ranks in their order."""
    keys: dict[int, list[str]] = {}
    for rank in range(len(list(folder.glob("metrics-rank*.jsonl")))):
        for line in metrics(folder, rank):
            keys.setdefault(line["num_steps"], []).extend(line["keys"])
    return [keys[step] for step in sorted(keys)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "whisper"])
def test_a_run_that_moved_to_other_ranks_has_the_samples_and_losses_of_an_unbroken_one(
    moved: Path, name: str
) -> None:
    result = run(moved, name, f"{name}-whole")
    whole, parts = metrics(moved / f"{name}-whole"), metrics(moved / f"{name}-moved")
    assert [line["world_size"] for line in parts] == [2] * 3 + [1] * 2 + [2] * 3
    assert result.num_steps == len(parts) == 8
    assert keys_of(moved / f"{name}-moved") == keys_of(moved / f"{name}-whole")
    for field, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[field] for line in whole]
        assert [line[field] for line in parts] == pytest.approx(expected, rel=limit)
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert not any(line["num_bad"] or line["num_cut_texts"] for line in whole)


@pytest.mark.slow
def test_ranks_without_padding_have_the_losses_of_padded_ones(moved: Path) -> None:
    padded, flat = metrics(moved / "qwen-moved")[:3], metrics(moved / "qwen-flat")
    assert [line["world_size"] for line in flat] == [2] * 3
    assert keys_of(moved / "qwen-flat") == keys_of(moved / "qwen-moved")[:3]
    for field, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[field] for line in padded]
        assert [line[field] for line in flat] == pytest.approx(expected, rel=limit)
    assert {line["padding_fraction"] for line in flat} == {0}


# -- what the data or the folder lacks ------------------------------------------------------------


def test_models_of_images_on_videos_name_the_models_of_videos(
    material: Path, tmp_path: Path
) -> None:
    videos = write_corpus(tmp_path, [4], lambda number: chat(5 * number + 1))
    with pytest.raises(
        mm.errors.BadSampleLimitError, match="a Qwen-VL, saved with its processor, videos too"
    ):
        run(material, "qwen", "squares", max_steps=1, model="vlm", url=videos)


def test_the_processor_of_a_folder_sets_the_decoders(material: Path) -> None:
    model, decode = open_model(TrainConfig(url="", out="", model=str(material / "qwen")), 4)
    video, text = decode.video, decode.text
    assert video is not None
    assert (video.fps, video.max_frames, video.multiple_of) == (2, 8, 28)
    assert text is not None
    assert text.max_length == 4096
    assert model.normalize is not None
    config = TrainConfig(url="", out="", model=str(material / "whisper"), max_length=1000)
    model, decode = open_model(config, 4)
    assert getattr(decode.audio, "features", None) is not None
    assert getattr(decode.text, "max_length", None) == 64  # the model has no more positions
    assert model.normalize is None


def without_extractor(folder: Path) -> None:
    (folder / "processor_config.json").unlink()


def with_other_colours_of_frames(folder: Path) -> None:
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["video_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("whisper", without_extractor, "no feature extractor of a speech model"),
        ("qwen", without_extractor, "has no processor; save it beside the model"),
        ("qwen", with_other_colours_of_frames, "image_mean differs between images and videos"),
    ],
)
def test_what_a_folder_lacks_is_named(
    material: Path, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    model = shutil.copytree(material / name, tmp_path / name)
    change(model)
    with pytest.raises(mm.ConfigError, match=message):
        open_model(TrainConfig(url="", out="", model=str(model)), 4)


def test_the_tokenizer_of_another_model_is_refused(material: Path) -> None:
    tokenizer = open_tokenizer(str(material / "whisper"))
    with pytest.raises(mm.ConfigError, match=r"images are token 263, which is .* in the tokenizer"):
        load_chat(str(material / "qwen"), tokenizer)
