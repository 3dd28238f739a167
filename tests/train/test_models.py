"""The two models from end to end: small ones with all options, and folders of ``--model``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.train import TrainConfig, TrainResult, train
from mmstream.train.demo import corpus_rows
from mmstream.train.models import CLIP_NORMALIZE, open_model, small_clip
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_model import TinyModel


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, same_number_of_threads: None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so the run leaves the number as it is
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """12 conversations about one image, two, or none."""
    folder = tmp_path_factory.mktemp("conversations")
    rows = [json.loads(line) for line in Path(corpus_rows()).read_text().splitlines()[:12]]
    conversations = []
    for number, row in enumerate(rows):
        images = [row["image"], rows[number - 1]["image"]][: number % 3]
        asked = "".join("<image>" for _ in images) + "What is it?"
        turns = [
            {"from": "human", "value": asked},
            {"from": "gpt", "value": row["captions"][0]},
        ]
        conversations.append({"id": row["id"], "image": images, "conversations": turns})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    media = str(Path(corpus_rows()).parent)
    mm.convert(str(path), str(folder / "shards"), media_root=media, num_workers=1, progress=False)
    return str(folder / "shards")


def test_clip_on_conversations_names_the_other_model(conversations: str, tmp_path: Path) -> None:
    with pytest.raises(
        mm.errors.BadSampleLimitError, match=r'no text: .*; model="vlm" takes chats'
    ):
        run(conversations, tmp_path)


def test_what_is_said_when_the_data_is_opened_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(write_corpus(tmp_path / "shards", [4]))
    (folder / "more.tar").write_bytes((folder / "shard-000000.tar").read_bytes())
    with pytest.raises(mm.ConfigError, match="4 samples do not fill one step"):
        run(str(folder), tmp_path)
    assert caplog.text.count("1 tars are not in mmstream.json") == 1


def run(url: str, out: Path, **changes: Any) -> tuple[TrainResult, list[dict[str, Any]]]:
    options = {"num_workers": 0, "device": "cpu", "global_batch_size": 8, "image_size": 32}
    result = train(TrainConfig(url=url, out=str(out), **{**options, **changes}))
    return result, metrics(out)


@pytest.mark.slow
def test_a_vlm_trains_with_all_options_and_resumes(conversations: str, tmp_path: Path) -> None:
    options = {
        "model": "vlm", "global_batch_size": 4, "max_length": 160, "epochs": 2,
        "precision": "bf16", "accumulate": 2, "micro_batches": 3,
        "activation_checkpointing": True, "validation": conversations,
        "lr": 3e-3, "warmup_steps": 1, "log_keys": True,
    }  # fmt: skip
    whole, lines = run(conversations, tmp_path / "whole", **options)
    assert (whole.num_steps, whole.state["epoch"]) == (4, 2)  # groups of 2 and 1 batches of 3
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["tokens_per_s"] > 0
    assert whole.validation_loss is not None
    assert whole.validation_loss < lines[0]["loss"]
    run(conversations, tmp_path / "parts", **options, max_steps=3)
    _, parts = run(conversations, tmp_path / "parts", **options)
    assert [line["loss"] for line in parts] == [line["loss"] for line in lines]


def test_a_clip_folder_is_trained_on(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    tokenizer = byte_tokenizer()
    clip = small_clip(image_size=48, vocab_size=len(tokenizer), max_length=64, seed=7)
    clip.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    options = {"model": str(folder), "image_size": None, "max_steps": 2}
    result, _ = run(corpus, tmp_path / "run", **options)
    assert result.num_steps == 2
    model, _ = open_model(TrainConfig(url=corpus, out="", model=str(folder)), 8)
    for name, weight in clip.state_dict().items():
        assert weight.equal(model.clip.state_dict()[name])
    assert model.image_size == 48
    assert model.normalize.std == (0.25, 0.25, 0.25)
    with pytest.raises(
        mm.ConfigError, match="image_size is for clip and vlm; a folder says its own"
    ):
        run(corpus, tmp_path / "other", model=str(folder))


def test_what_is_no_model_is_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(mm.ConfigError, match="is not clip, vlm or a model's folder"):
        train(TrainConfig(url=corpus, out=str(tmp_path), model=str(tmp_path), device="cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(mm.ConfigError, match="no vision tower"):
        train(TrainConfig(url=corpus, out=str(tmp_path), model=str(tmp_path), device="cpu"))


# -- a pipeline and a model of the user's ---------------------------------------------------------


def tiny_pipeline(dataset: mm.Dataset) -> mm.Pipeline:
    text = mm.TextDecoder(byte_tokenizer(), field="json.caption", max_length=40)
    decode = mm.Decode(image=mm.ImageDecoder(size=32), text=text)
    return mm.Pipeline(dataset, global_batch_size=4, decode=decode)


class Captioned(TinyModel):
    """Says how its pixels are normalised."""

    normalize = CLIP_NORMALIZE

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch["image"].is_floating_point()
        return super().forward(batch)


def captioned(folder: Path, *, bad: int | None = None) -> str:
    def fields(number: int) -> dict[str, bytes]:
        row = {"title" if number == bad else "caption": f"number {number}"}
        return {"jpg": jpeg(number), "json": json.dumps(row).encode()}

    return write_corpus(folder, [9, 8], fields)


def test_everything_particular_goes_through_a_pipeline(tmp_path: Path) -> None:
    url, model = captioned(tmp_path / "data"), Captioned()
    settings = {"url": url, "num_workers": 0, "device": "cpu", "log_keys": True, "max_steps": 3}
    result = train(
        TrainConfig(out=str(tmp_path / "a"), **settings), pipeline=tiny_pipeline, model=model
    )
    assert result.num_steps == 3
    lines = metrics(tmp_path / "a")
    assert {len(line["keys"]) for line in lines} == {4}  # the batch size of the pipeline
    other = tiny_pipeline(mm.open_dataset(captioned(tmp_path / "other")))
    train(
        TrainConfig(out=str(tmp_path / "b"), **settings), pipeline=other, model=Captioned()
    )  # its dataset is replaced
    assert [line["loss"] for line in metrics(tmp_path / "b")] == [x["loss"] for x in lines]
    train(
        TrainConfig(out=str(tmp_path / "clip"), image_size=32, **settings), pipeline=tiny_pipeline
    )
    assert len(metrics(tmp_path / "clip")) == 3


def test_bad_samples_of_a_pipeline_are_recorded_where_the_metrics_are(tmp_path: Path) -> None:
    url = captioned(tmp_path / "data", bad=5)
    config = TrainConfig(url=url, out=str(tmp_path / "run"), epochs=2, num_workers=0, device="cpu")
    train(config, pipeline=tiny_pipeline, model=Captioned())
    assert "caption" in (tmp_path / "run" / "quarantine-rank0.jsonl").read_text()


def test_pipelines_that_are_none_are_one_line(tmp_path: Path) -> None:
    config = TrainConfig(url=captioned(tmp_path / "data"), out=str(tmp_path), device="cpu")
    with pytest.raises(mm.ConfigError, match=r"pipeline= gave int, and no mm\.Pipeline"):
        train(config, pipeline=lambda dataset: len(dataset))
    with pytest.raises(mm.ConfigError, match="model= needs pipeline=, with the decoders"):
        train(config, model=Captioned())
