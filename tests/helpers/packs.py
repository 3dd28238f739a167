"""Conversations with no, one and several pictures, as flat batches and as padded ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import mmstream as mm
from mmstream.batching.collate import collate
from mmstream.batching.flat import flatten
from mmstream.types import Batch, Sample
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import write_corpus
from tests.helpers.families import transformers
from tests.helpers.model_cases import CASES, TEXT
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded

HALF = mm.Normalize((0.5,) * 3, (0.5,) * 3)
NUM_PICTURES = [2, 0, 1, 3, 0, 0]
"""Of each conversation."""


def conversations(folder: Path, numbers: list[int] = NUM_PICTURES) -> mm.Dataset:
    """A corpus of conversations with so many pictures of 56 x 56 pixels each."""
    pictures = [
        encoded(Image.open(path).convert("RGB").resize((56, 56)), "png") for path in PHOTOS[:3]
    ]

    def fields_of(number: int) -> dict[str, bytes]:
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"question {number} "}]
        fields: dict[str, bytes] = {}
        for i in range(numbers[number]):
            parts += [{"type": "image", "field": f"{i}.png"}, {"type": "text", "text": f" and {i}"}]
            fields[f"{i}.png"] = pictures[(number + i) % 3]
        answer = assistant([{"type": "text", "text": f"an answer{' and more' * number}"}])
        return {"json": json.dumps({"messages": [user(parts), answer]}).encode(), **fields}

    return mm.open_dataset(write_corpus(folder, [len(numbers)], fields_of))


def batch_of(dataset: mm.Dataset, decode: mm.Decode, batching: mm.Flat | None = None) -> Batch:
    """All conversations: padded, or with `batching` as documents in rows of three."""
    assert decode.image is not None
    decode = replace(decode, image=replace(decode.image, scaled_decoding=False))

    def in_rows(samples: list[Sample]) -> Batch:
        assert batching is not None
        rows = [number // 3 for number in range(len(samples))]
        return {"flat": flatten(samples, rows, rows[-1] + 1, batching)}

    pipeline = mm.Pipeline(
        dataset,
        global_batch_size=len(NUM_PICTURES),
        decode=decode,
        shuffle=False,
        collate=collate if batching is None else in_rows,
    )
    batch = next(iter(mm.Loader(pipeline)))
    if batching is not None:
        batch |= batch.pop("flat")
        batch["__valid__"] = batch["__valid__"][::3]
    return batch


def decode_and_model(name: str, attention: str) -> tuple[mm.Decode, Any]:
    case = CASES[name]
    decode = case.family().decode
    assert decode.text is not None
    torch.manual_seed(0)
    model = case.model(decode.text.tokenizer)
    model.set_attn_implementation(attention)
    return decode, model


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    small = {**TEXT, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**small | settings)
    return transformers.LlamaForCausalLM(config)


def texts(layout: Any = "flat", valid: Sequence[bool] = (True, True, True)) -> Batch:
    """Three rows with two, one and three documents."""
    lengths, rows = [5, 1, 9, 4, 2, 7], [0, 0, 1, 2, 2, 2]
    generator = np.random.default_rng(0)
    ids = [generator.integers(3, 64, length) for length in lengths]
    samples = [
        {"__key__": str(i), "__url__": "a.tar", "input_ids": own, "labels": own}
        for i, own in enumerate(ids)
    ]
    batch = flatten(samples, rows, 3, mm.Flat(layout=layout))
    return batch | {"__valid__": torch.tensor(valid)}


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of the vision part and of the rest, each as one vector."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    towers: dict[str, list[torch.Tensor]] = {"vision": [], "text": []}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            tower = "vision" if "visual" in name or "vision" in name else "text"
            towers[tower].append(weight.grad.flatten().clone())
    return loss.item(), {tower: torch.cat(grads) for tower, grads in towers.items() if grads}


def assert_parity(model: Any, packed: dict[str, Any], padded: dict[str, Any]) -> None:
    """Require the loss and the gradients of a padded batch from a packed one."""
    loss, gradients = loss_and_gradients(model, packed)
    expected_loss, expected = loss_and_gradients(model, padded)
    assert abs(loss - expected_loss) <= 1e-6 * expected_loss
    assert gradients.keys() == expected.keys()
    for tower, gradient in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gradient, expected[tower], dim=0)
        assert cosine >= 0.9999, (tower, cosine)
        assert gradient.norm() > 0
