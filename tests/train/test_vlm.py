"""The small vision-language model: its loss, its gradients over ranks, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mmstream as mm
from mmstream.train import TrainConfig, train
from mmstream.train.demo import corpus_rows
from mmstream.train.models import OneSizeModel, load_vlm, small_vlm
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.logged_runs import metrics

SIZE, LENGTH = 32, 4
COUNTS = [2, 1, 3, 0, 0, 0]
"""Images of each row of `global_batch`: the second half is text only."""


def vlm(seed: int = 3) -> OneSizeModel:
    tokenizer = byte_tokenizer(chat=True)
    return small_vlm(image_size=SIZE, tokenizer=tokenizer, max_length=256, seed=seed)


def sample(number: int, num_images: int, answer: str | None = None) -> dict[str, Any]:
    """A decoded sample of random images and a conversation about them."""
    tokenizer = byte_tokenizer(chat=True)
    text = mm.TextDecoder(tokenizer, image_length=LENGTH)
    fields = [f"{i}.jpg" for i in range(num_images)]
    parts = [{"type": "image", "field": field} for field in fields]
    parts.append({"type": "text", "text": "what?" * (number % 3 + 1)})
    answer = answer or f"number {number}"
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    made = text({"json": {"messages": messages}, **dict.fromkeys(fields, b"")})
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(256, (num_images, 3, SIZE, SIZE), generator=generator)
    shown = list(images.to(torch.uint8))
    return {**made, "image": shown[0] if len(shown) == 1 else shown}


def batch_of(samples: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    batch = mm.collate(samples, pad_token_id=256, **options)
    if isinstance(batch["image"], torch.Tensor):
        batch["image"] = (batch["image"].float() / 255 - 0.5) / 0.25
    batch["__valid__"] = torch.ones(len(samples), dtype=torch.bool)
    return batch


def global_batch(invalid: tuple[int, ...] = (1,)) -> dict[str, Any]:
    batch = batch_of([sample(row, count) for row, count in enumerate(COUNTS)])
    batch["__valid__"][list(invalid)] = False
    return batch


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def mean_gradients(model: OneSizeModel, parts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Gradients of the mean over all parts' tokens, part by part."""
    weight = sum(model.weight_of(part) for part in parts)
    model.zero_grad()
    for part in parts:
        (model(part)[0] / weight).backward()
    return gradients(model)


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert max(gradient.abs().max() for gradient in one.values()) > 1e-2
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_one_transformers_computes() -> None:
    model, batch = vlm(), global_batch(invalid=())
    loss, weight = model(batch)
    expected = model.vlm(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        pixel_values=batch["image"],
        labels=batch["labels"],
    ).loss
    assert weight == sum(len("number 0") + 1 for _ in COUNTS)  # and <|im_end|>
    torch.testing.assert_close(loss / weight, expected)
    assert loss.shape == weight.shape == ()
    assert not weight.requires_grad


def test_invalid_rows_add_nothing() -> None:
    model, batch = vlm(), global_batch(invalid=(1, 4))
    loss, weight = model(batch)
    parts = mm.split_rows(batch, len(COUNTS))
    kept = [model(part) for row, part in enumerate(parts) if row not in (1, 4)]
    torch.testing.assert_close(loss, sum(part[0] for part in kept))
    assert weight == sum(part[1] for part in kept) == model.weight_of(batch)
    batch["labels"][1] = 7
    torch.testing.assert_close(model(batch)[0], loss)
    alone = model(parts[1])
    assert alone[0] == 0
    assert alone[1] == 0


def save_on_two_ranks(rank: int, folder: Path) -> None:
    """What each of two ranks does: rank 1 has no image at all."""
    model = DistributedDataParallel(vlm())
    part = mm.split_rows(global_batch(), 2)[rank]
    assert len(part["image"]) == (6, 0)[rank]
    weight = model.module.weight_of(part)
    dist.all_reduce(weight)
    for _ in range(2):  # DDP complains of unused parameters in the pass after
        model.zero_grad()
        (model(part)[0] * 2 / weight).backward()  # DDP takes the mean over the ranks
    torch.save(gradients(model), folder / f"vlm-{rank}.pt")


@pytest.mark.slow
def test_it_learns_the_embedded_corpus(tmp_path: Path) -> None:
    rows = []
    for row in map(json.loads, Path(corpus_rows()).read_text().splitlines()):
        turns = [("user", "<image>Describe the image."), ("assistant", row["captions"][0])]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"id": row["id"], "images": [row["image"]], "messages": messages})
    shards, media = str(tmp_path / "shards"), str(Path(corpus_rows()).parent)
    mm.convert(rows, shards, media_root=media, num_workers=1, progress=False)
    config = TrainConfig(
        url=shards, out=str(tmp_path), model="vlm", max_length=256, epochs=10, lr=3e-3,
        num_workers=0, device="cpu",
    )  # fmt: skip
    train(config)
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert len(losses) == 60
    assert 5.3 < losses[0] < 5.9  # ln(262): all tokens alike
    assert sum(losses[-6:]) / 6 < 0.5 * losses[0]


def test_a_pretrained_folder_is_the_same_model(tmp_path: Path) -> None:
    model, batch = vlm(), global_batch()
    tokenizer = byte_tokenizer(chat=True)
    model.vlm.save_pretrained(tmp_path)
    loaded = load_vlm(str(tmp_path), tokenizer=tokenizer)
    assert (loaded.image_size, loaded.image_length) == (SIZE, LENGTH)
    torch.testing.assert_close(loaded(batch), model(batch))
    assert_same_gradients(mean_gradients(model, [batch]), mean_gradients(loaded, [batch]))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<other>", "<image>"]})
    with pytest.raises(
        mm.ConfigError, match="images are token 259, which is <other> in the tokenizer"
    ):
        load_vlm(str(tmp_path), tokenizer=tokenizer)


def test_layers_behind_the_chosen_one_are_frozen(tmp_path: Path) -> None:
    model = vlm()
    model.vlm.config.vision_feature_layer = -2  # what Llava 1.5 takes
    model.vlm.save_pretrained(tmp_path)
    loaded = load_vlm(str(tmp_path), tokenizer=byte_tokenizer(chat=True))
    frozen = {name for name, p in loaded.named_parameters() if not p.requires_grad}
    tower = "vlm.model.vision_tower."
    assert {name.removeprefix(tower).split(".")[0] for name in frozen} == {
        "encoder",
        "post_layernorm",
    }
    assert all(".layers.1." in name for name in frozen if ".layers." in name)
    loaded(global_batch())[0].backward()
    assert all(p.grad is not None for p in loaded.parameters() if p.requires_grad)
