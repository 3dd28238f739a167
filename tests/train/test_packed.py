"""Training without padding has the losses of padded rows. On ranks: test_media_models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mmstream as mm
from mmstream.dataset.dataset import read_sample
from mmstream.decoding.sample import decode_sample
from mmstream.loader.device import Normalizer
from mmstream.train import TrainConfig, TrainResult, loop, train
from mmstream.train.loop import micro_batches_of, prepare, seed_step, train_step
from mmstream.train.models import open_model, pipeline_of_model
from mmstream.types import Batch
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.logged_runs import metrics
from tests.helpers.media_files import audio_file
from tests.helpers.tiny_media_models import save_tiny_qwen, save_tiny_whisper
from tests.helpers.tiny_model import PROCESS

SETTINGS = {
    "max_steps": 4, "num_workers": 0, "device": "cpu", "lr": 3e-3, "precision": "fp32",
    "log_keys": True,
}  # fmt: skip
MODELS = ("vlm", "qwen")


def chat(number: int) -> dict[str, bytes]:
    """A conversation about no picture, or up to three of several sizes, of several lengths."""
    fields = {
        f"{i}.jpg": jpeg(number + i, (64 + 24 * i, 60 + 8 * (number % 5)))
        for i in range((0, 2, 1, 0, 3)[number % 5])
    }
    parts = [{"type": "image", "field": name} for name in fields]
    question = [*parts, {"type": "text", "text": "Which number? " * (1 + number % 4)}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"It is {number}. " * (1 + number * 7 % 5)},
    ]
    return {**fields, "json": json.dumps({"messages": messages}).encode()}


def spoken(number: int) -> dict[str, bytes]:
    """A sound and its transcript."""
    return {"wav": audio_file("wav", seconds=0.3), "txt": f"number {number}".encode()}


def words(number: int) -> dict[str, bytes]:
    """A conversation without any picture."""
    return {"json": chat(5 * number)["json"]}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with pictures and without, and models."""
    folder = tmp_path_factory.mktemp("packed")
    write_corpus(folder / "chats", [9, 16, 8], chat)
    write_corpus(folder / "words", [14, 12], words)
    save_tiny_qwen(folder / "qwen")
    return folder


def pipeline_of(
    config: TrainConfig, batching: mm.Flat | None, batch_size: int = 6
) -> Callable[[mm.Dataset], mm.Pipeline]:
    """Return what makes the pipeline of a model, without padding."""
    decode = open_model(config, batch_size)[1]
    return lambda dataset: replace(
        pipeline_of_model(replace(config, global_batch_size=batch_size), dataset, decode),
        batching=batching,
    )


def run(
    folder: Path, out: str, name: str = "vlm", batching: mm.Flat | None = None, **changes: Any
) -> TrainResult:
    model = {"model": name, "image_size": 32} if name == "vlm" else {"model": str(folder / name)}
    given = {"url": str(folder / "chats"), "out": str(folder / out), **SETTINGS, **model}
    config = TrainConfig(**{**given, **changes})
    return train(config, pipeline=pipeline_of(config, batching))


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) == SETTINGS["max_steps"]
    for name, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[name] for line in one]
        assert [line[name] for line in other] == pytest.approx(expected, rel=limit)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_without_padding_has_the_losses_of_one_with_it(material: Path, name: str) -> None:
    run(material, f"{name}-padded", name)
    run(material, f"{name}-flat", name, mm.Flat())
    padded, flat = (metrics(material / f"{name}-{way}") for way in ("padded", "flat"))
    assert_same(padded, flat)
    assert [line["keys"] for line in flat] == [line["keys"] for line in padded]
    assert min(line["padding_fraction"] for line in padded) > 0.1
    assert {line["padding_fraction"] for line in flat} == {0}


@pytest.mark.slow
def test_attention_over_all_tokens_gets_pieces_by_itself(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(material, "at-once", batching=mm.Flat(), accumulate=2, max_steps=2)
    monkeypatch.setattr(loop, "MAX_COMPARED_TOKENS", 300)
    run(material, "by-itself", batching=mm.Flat(), accumulate=2, max_steps=2)
    one, other = metrics(material / "at-once"), metrics(material / "by-itself")
    assert [x["loss"] for x in other] == pytest.approx([x["loss"] for x in one], rel=1e-5)
    assert other[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_validation_without_padding_has_the_loss_of_padded_rows(material: Path) -> None:
    both = {"validation": str(material / "words"), "max_steps": 1}
    losses = [
        run(material, f"validated-{batching}", batching=batching, **both).validation_loss
        for batching in (None, mm.Flat())
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# -- packs ---------------------------------------------------------------------------------------
#
# The steps of a run on packs are trained unpacked: the same samples, one a row, with padding. They
# are read again by what the lineage of a step says, so nothing of the packed batch goes into them.


class Step(NamedTuple):
    """An optimizer step on padded rows, and what the packed batch gives with the same weights."""

    packs: list[list[str]]
    """The keys of the samples of each pack."""
    loss: float
    grad_norm: float
    packed_loss: float
    least_cosine: float
    """Between the two gradients: the least of all parameters."""
    num_images: int
    fill: float


def train_unpacked(config: TrainConfig, pipeline: mm.Pipeline) -> Iterator[Step]:
    """Train on one rank and yield its steps, of packs of `pipeline`."""
    model, _ = open_model(config, 1)
    decode: Any = pipeline.decode
    normalize = Normalizer(model.normalize, torch.float32, torch.device("cpu"))
    dataset: Any = pipeline.dataset
    max_tokens = pipeline.batching.max_tokens  # type: ignore[union-attr]
    pad = decode.text.tokenizer.pad_token_id
    trained = prepare(config, model, PROCESS)
    with closing(mm.Loader(pipeline, world=mm.World(0, 1))) as loader:
        for number, batch in zip(range(config.max_steps or 0), loader, strict=False):
            batch["image"] = [normalize(image) for image in batch["image"]]
            packed_loss, packed = gradients(model, micro_batches_of(batch, 1, model))
            refs = batch["__lineage__"].shown
            samples = [decode_sample(read_sample(dataset, *ref), decode) for ref in refs]
            padded = mm.collate(samples, pad_token_id=pad)
            padded["image"] = [normalize(image) for image in padded["image"]]
            padded["__valid__"] = torch.ones(len(samples), dtype=torch.bool)
            seed_step(config.seed, number, 0)
            weight = model.weight_of(padded)
            loss, norm = train_step(trained, [padded], weight, config.lr, config, PROCESS)
            cosines = [
                torch.nn.functional.cosine_similarity(
                    parameter.grad.flatten().double(), packed[name].flatten().double(), dim=0
                ).item()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None and parameter.grad.norm() > 1e-7
            ]
            packs: list[list[str]] = [[] for _ in batch["__valid__"]]
            for row, sample in zip(batch["__lineage__"].rows, samples, strict=True):
                packs[row].append(sample["__key__"])
            yield Step(
                packs,
                loss.item(),
                norm.item(),
                packed_loss,
                min(cosines),
                len(batch["image"]),
                batch["num_tokens"] / (len(packs) * max_tokens),
            )


def are_packs_of(packs: list[list[str]], keys_of_ranks: list[list[str]]) -> bool:
    """Tell whether ranks had these packs and nothing else, whichever rank had which of them.

    The samples of a pack are neighbours in what its rank has logged.
    """
    num_keys = sum(map(len, keys_of_ranks))
    texts = [f" {' '.join(keys)} " for keys in keys_of_ranks]
    return num_keys == sum(map(len, packs)) and all(
        any(f" {' '.join(pack)} " in text for text in texts) for pack in packs
    )


def gradients(model: Any, parts: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a batch in parts and its gradient, and leave the model as it was."""
    model.zero_grad()
    weight = sum(model.weight_of(part) for part in parts)
    total = 0.0
    for part in parts:
        loss = model(part)[0] / weight
        loss.backward()
        total += loss.item()
    own = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return total, own


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen3VL"])
def test_a_run_on_packs_has_the_losses_and_gradients_of_the_unpacked_one(
    tmp_path: Path, family: str
) -> None:
    model = str(save_tiny_qwen(tmp_path / "model", family=family))
    url = write_corpus(tmp_path / "chats", [20, 30, 10], chat)
    config = TrainConfig(url=url, out=str(tmp_path), **{**SETTINGS, "model": model, "max_steps": 2})
    packed = pipeline_of(config, mm.Pack(1024), 3)
    mm.plan(packed(mm.open_dataset(url)), num_workers=0, progress=False)
    train(config, pipeline=packed)
    steps = list(train_unpacked(config, packed(mm.open_dataset(url))))
    assert len(steps) == 2
    for line, expected in zip(metrics(tmp_path), steps, strict=True):
        assert are_packs_of(expected.packs, [line["keys"]])
        assert line["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert line["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
        assert line["fill"] == pytest.approx(expected.fill, abs=1e-4)
        assert expected.packed_loss == pytest.approx(expected.loss, rel=1e-6)
        assert expected.least_cosine > 0.9999
        assert expected.num_images > 20
        assert len(expected.packs) == 3


# -- what is refused -----------------------------------------------------------------------------


def test_models_of_whole_rows_are_refused_with_a_line_that_says_so(material: Path) -> None:
    save_tiny_whisper(material / "whisper")
    with pytest.raises(mm.ConfigError, match="whisper takes one sample a row: leave batching= out"):
        run(
            material,
            "refused",
            "whisper",
            mm.Flat(),
            url=write_corpus(material / "spoken", [9], spoken),
        )
    captions = write_corpus(material / "captions", [9])
    with pytest.raises(mm.ConfigError, match="CLIP compares whole rows: leave batching= out"):
        run(material, "refused", batching=mm.Flat(), model="clip", url=captions)
