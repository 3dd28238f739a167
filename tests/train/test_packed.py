"""Training without padding has the losses of padded rows. On ranks: test_media_models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.errors import ConfigError
from mmstream.train import TrainConfig, TrainResult, step, train
from mmstream.train.data import open_loader
from mmstream.train.models import decode_for, open_model_tokenizer
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.logged_runs import metrics
from tests.helpers.tiny_media_models import save_tiny_qwen, save_tiny_whisper
from tests.helpers.unpacked import are_packs_of, train_unpacked

SETTINGS = {
    "max_steps": 4, "global_batch_size": 6, "num_workers": 0, "progress": False, "device": "cpu",
    "lr": 3e-3, "precision": "fp32", "log_keys": True, "model": "vlm", "image_size": 32,
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


def run(folder: Path, out: str, name: str = "vlm", **changes: Any) -> TrainResult:
    model = {} if name == "vlm" else {"model": str(folder / name), "image_size": None}
    given = {"url": str(folder / "chats"), "out": str(folder / out), **SETTINGS, **model}
    return train(TrainConfig(**{**given, **changes}))


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) == SETTINGS["max_steps"]
    for name, limit in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[name] for line in one]
        assert [line[name] for line in other] == pytest.approx(expected, rel=limit)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_without_padding_has_the_losses_of_one_with_it(material: Path, name: str) -> None:
    run(material, f"{name}-padded", name)
    result = run(material, f"{name}-flat", name, padding_free=True)
    padded, flat = (metrics(material / f"{name}-{way}") for way in ("padded", "flat"))
    assert_same(padded, flat)
    assert [line["keys"] for line in flat] == [line["keys"] for line in padded]
    assert min(line["padding_fraction"] for line in padded) > 0.1
    assert {line["padding_fraction"] for line in flat} == {0}
    assert result.summary is not None
    assert "0.0% of the positions are padding" in result.summary


def test_pieces_of_so_many_tokens_change_nothing(material: Path) -> None:
    run(material, "whole", padding_free=True)
    run(material, "pieces", padding_free=True, micro_batch_tokens=300, accumulate=2, max_steps=2)
    run(material, "both", padding_free=True, accumulate=2, max_steps=2)
    one, other = metrics(material / "both"), metrics(material / "pieces")
    assert [x["loss"] for x in other] == pytest.approx([x["loss"] for x in one], rel=1e-5)
    assert other[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)


def test_attention_over_all_tokens_gets_pieces_by_itself(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(material, "at-once", padding_free=True, max_steps=2)
    monkeypatch.setattr(step, "MAX_COMPARED_TOKENS", 300)
    run(material, "by-itself", padding_free=True, max_steps=2)
    run(material, "eager", padding_free=True, max_steps=2, attn_implementation="eager")
    one = [line["loss"] for line in metrics(material / "at-once")]
    for other in ("by-itself", "eager"):
        assert [x["loss"] for x in metrics(material / other)] == pytest.approx(one, rel=1e-5)


def test_attention_that_is_not_there_is_refused(material: Path, tmp_path: Path) -> None:
    for name in ("flash_attention_2", "unheard-of"):
        with pytest.raises(ConfigError, match=f"train: attn_implementation '{name}': "):
            run(material, "refused", padding_free=True, attn_implementation=name)
    with pytest.raises(ConfigError, match="attn_implementation is for vlm and chat models"):
        run(material, "refused", model="clip", attn_implementation="eager")


def test_texts_without_any_picture_train_too(material: Path) -> None:
    for name, ways in (("padded-words", {}), ("flat-words", {"padding_free": True})):
        run(material, name, url=str(material / "words"), **ways)
    assert_same(metrics(material / "padded-words"), metrics(material / "flat-words"))


def test_validation_without_padding_has_the_loss_of_padded_rows(material: Path) -> None:
    both = {"validation": str(material / "words"), "max_steps": 1}
    losses = [
        run(material, f"validated-{way}", padding_free=way, **both).validation_loss
        for way in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# -- packs ---------------------------------------------------------------------------------------


def album(number: int) -> dict[str, bytes]:
    """A conversation about no picture, or up to eight."""
    fields = {f"{i}.jpg": jpeg(number + i, (40 + 9 * i, 64)) for i in range(number * 5 % 9)}
    parts = [{"type": "image", "field": name} for name in fields]
    question = [*parts, {"type": "text", "text": "How many? " * (1 + number % 6)}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"{len(fields)}. " * (1 + number * 7 % 9)},
    ]
    return {**fields, "json": json.dumps({"messages": messages}).encode()}


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen3VL"])
def test_a_run_on_packs_has_the_losses_and_gradients_of_the_unpacked_one(
    tmp_path: Path, family: str
) -> None:
    model = str(save_tiny_qwen(tmp_path / "model", family=family))
    url = write_corpus(tmp_path / "albums", [20, 30, 10], album)
    config = TrainConfig(
        url=url, out=str(tmp_path), pack=1024, plan="default-1024",
        **{**SETTINGS, "model": model, "image_size": None, "max_steps": 2, "global_batch_size": 3},
    )  # fmt: skip
    decode = decode_for(config, open_model_tokenizer(config), None)
    mm.measure(url, decode=decode, num_workers=0, progress=False)
    mm.plan_packs(url, 1024)
    result = train(config)
    assert result.summary is not None
    assert "packs are" in result.summary
    steps = list(train_unpacked(config))
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
    # On three ranks, they have equal shares, so the log says how unequal their packs are.
    cost = mm.Cost(tokens=0, squared_tokens=1)
    loader = open_loader(config, mm.open_dataset(url), decode, world=mm.World(0, 3), cost=cost)
    next(iter(loader))
    assert loader.stats.modelled_imbalance > 1


# -- what is refused -----------------------------------------------------------------------------


def test_models_of_whole_rows_are_refused_with_a_line_that_says_so(
    material: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match='clip compares whole rows: give model="vlm"'):
        TrainConfig(url="", out="", padding_free=True)
    with pytest.raises(ConfigError, match="clip compares whole rows"):
        TrainConfig(url="", out="", pack=4096)
    save_tiny_whisper(tmp_path / "whisper")
    with pytest.raises(ConfigError, match="SpeechModel takes whole rows: leave them out"):
        run(
            material, "refused", model=str(tmp_path / "whisper"), image_size=None, padding_free=True
        )


def test_settings_that_do_not_go_together_are_refused() -> None:
    given = {"url": "", "out": "", "model": "vlm"}
    with pytest.raises(ConfigError, match="micro_batch_tokens needs padding_free or pack"):
        TrainConfig(**given, micro_batch_tokens=100)
    with pytest.raises(ConfigError, match="give micro_batches or micro_batch_tokens, not both"):
        TrainConfig(**given, padding_free=True, micro_batches=2, micro_batch_tokens=100)
    with pytest.raises(ConfigError, match="pack is 0; it must be 1 or more"):
        TrainConfig(**given, pack=0)
