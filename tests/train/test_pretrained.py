"""Folders of models and tokenizers from strangers: one-line errors, and nothing of them is run."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmstream.errors import ConfigError
from mmstream.train import TrainConfig
from mmstream.train.models import load_clip, load_vlm, open_model, small_clip
from mmstream.train.tokenizer import byte_tokenizer, open_tokenizer


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def clip_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "clip"
    tokenizer = byte_tokenizer()
    small_clip(image_size=32, vocab_size=len(tokenizer), max_length=64, seed=7).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def message_of(call: Any, *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\\n" not in message
    assert "trust_remote_code" not in message
    assert len(message) < 1000
    return message


def test_weights_that_are_a_pickle_of_more_than_tensors_are_never_opened(clip_folder, tmp_path):
    (clip_folder / "model.safetensors").unlink()
    weights = {"logit_scale": torch.zeros(()), "evil": Runs(tmp_path / "ran")}
    torch.save(weights, clip_folder / "pytorch_model.bin")
    message = message_of(load_clip, str(clip_folder))
    assert message.startswith(f"{clip_folder}: no CLIP model: ")
    assert "pickle" in message
    assert "save them as safetensors" in message
    (clip_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    assert "no CLIP model" in message_of(load_clip, str(clip_folder))
    assert not (tmp_path / "ran").exists()


def test_a_model_with_code_of_its_own_is_refused_without_advice_to_run_it(tmp_path):
    code = tmp_path / "modeling_evil.py"
    code.write_text(
        f"import os; os.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\nclass C: pass"
    )
    config = {
        "model_type": "evil",
        "vision_config": {},
        "auto_map": {
            "AutoConfig": "modeling_evil.C",
            "AutoModelForImageTextToText": "modeling_evil.Evil",
            "AutoTokenizer": ["modeling_evil.Evil", None],
        },
    }
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    for call in (partial(load_vlm, tokenizer=None), open_tokenizer):
        assert "code of a folder is never run" in message_of(call, str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"{}", b'{"a": ' * 10_000, b"\x80\x04."]
)
def test_damaged_files_of_a_tokenizer_are_one_line(clip_folder, content):
    (clip_folder / "tokenizer.json").write_bytes(content)
    assert "has no tokenizer" in message_of(open_tokenizer, str(clip_folder))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"a": ' * 10_000])
def test_damaged_files_of_a_model_are_one_line(clip_folder, content):
    config = TrainConfig(url="", out="", model=str(clip_folder))
    (clip_folder / "preprocessor_config.json").write_bytes(content)
    assert "preprocessor_config.json: not " in message_of(open_model, config, 1)
    (clip_folder / "config.json").write_bytes(content)
    assert "is not clip, vlm or a model's folder" in message_of(open_model, config, 1)


def test_damaged_weights_are_one_line(clip_folder):
    path = clip_folder / "model.safetensors"
    data = path.read_bytes()
    for damaged in (b"", data[:1000], b"\xff" * 8 + data[8:]):
        path.write_bytes(damaged)
        assert "no CLIP model" in message_of(load_clip, str(clip_folder))


@pytest.mark.parametrize("values", [["a", "b", "c"], [0.5], 7, None, [[1], [2], [3]]])
def test_pixel_statistics_that_are_no_numbers_are_refused(clip_folder, values):
    statistics = {"image_mean": values, "image_std": [1.0, 1.0, 1.0]}
    (clip_folder / "preprocessor_config.json").write_text(json.dumps(statistics))
    config = TrainConfig(url="", out="", model=str(clip_folder))
    assert "image_mean and image_std" in message_of(open_model, config, 1)


def test_pixel_statistics_are_taken_from_the_file_of_all_processors(clip_folder):
    whole = {"image_processor": {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}}
    (clip_folder / "processor_config.json").write_text(json.dumps(whole))
    config = TrainConfig(url="", out="", model=str(clip_folder))
    assert open_model(config, 1)[0].normalize.mean == (0.1, 0.1, 0.1)
    alone = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (clip_folder / "preprocessor_config.json").write_text(json.dumps(alone))
    assert open_model(config, 1)[0].normalize.mean == (0.1, 0.1, 0.1)
    (clip_folder / "processor_config.json").write_text(json.dumps({"feature_extractor": {}}))
    assert open_model(config, 1)[0].normalize.mean == (0.5, 0.5, 0.5)
