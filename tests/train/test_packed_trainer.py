"""The Trainer's loss on flat batches is the mean over all labels of an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import mmstream as mm
from mmstream import model_inputs
from mmstream.batching.flat import flatten
from mmstream.batching.valid import next_tokens, summed_loss, target_weights
from mmstream.train import LoaderTrainer
from mmstream.train.models import ChatModel
from mmstream.train.tokenizer import byte_tokenizer
from mmstream.train.trainer import token_loss
from tests.helpers.corpora import write_corpus
from tests.helpers.families import transformers
from tests.helpers.packs import llama


def weighed(sample: dict[str, Any]) -> dict[str, Any]:
    """Give labels a weight. Every fourth sample has none, and its labels count 1."""
    number = int(sample["__key__"])
    weights = np.where(sample["labels"] == -100, 0, 0.25 * (1 + number % 3)).astype(np.float32)
    return {**sample, "label_weights": weights} if number % 4 else sample


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [(), (weighed,)], ids=["labels", "weights"])
@pytest.mark.parametrize("takes_count", [True, False])
def test_a_step_of_two_flat_batches_has_the_mean_over_their_labels(
    takes_count: bool, transforms: tuple[Any, ...], tmp_path: Path
) -> None:
    """As a loop by hand: the losses of both, by their weights, over the sum of the weights."""
    shards = write_corpus(tmp_path / "s", [8], lambda n: {"txt": b"word " * (1 + n)})
    pipeline = mm.Pipeline(
        mm.open_dataset(shards),
        global_batch_size=4,
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
        transforms=transforms,
        batching=mm.Flat(),
    )
    model = llama(vocab_size=len(byte_tokenizer()))
    model.accepts_loss_kwargs = takes_count  # Qwen-VL does not
    by_hand, total = torch.tensor(0.0), torch.tensor(0.0)
    for batch in mm.Loader(pipeline):
        inputs = model_inputs(batch, model)
        labels = inputs.pop("labels")[0, 1:]
        weights = batch["label_weights"][0, 1:] if transforms else labels != -100
        losses = cross_entropy(model(**inputs).logits[0, :-1], labels, reduction="none")
        by_hand = by_hand + (losses * weights).sum()
        total = total + weights.sum()
    by_hand = by_hand / total
    by_hand.backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        gradient_accumulation_steps=2,
        max_steps=1,
        logging_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    gradients: dict[str, torch.Tensor] = {}

    class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients.update({n: value.grad.clone() for n, value in model.named_parameters()})

    trainer = LoaderTrainer(
        model, arguments, train_dataset=mm.Loader(pipeline), callbacks=[Gradients()]
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(by_hand.item(), rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_label_has_a_loss_of_zero() -> None:
    outputs = transformers.modeling_outputs.CausalLMOutput(logits=torch.ones(1, 3, 5))
    labels = torch.full((1, 3), -100)
    assert token_loss(outputs, labels).item() == 0
    assert token_loss(outputs, labels, torch.tensor(0)).item() == 0
    assert token_loss(outputs, torch.tensor([[-100, 1, 2]]), 4).item() == pytest.approx(
        2 * torch.log(torch.tensor(5.0)).item() / 4
    )


# -- the weights of labels find their targets ------------------------------------------------------

SAMPLES = [
    {
        "input_ids": np.array([1, 2, 3]),
        "labels": np.array([-100, 2, 3]),
        "label_weights": np.array([0, 0.5, 2], np.float32),
    },
    {"input_ids": np.array([4, 5]), "labels": np.array([4, 5])},
]


@pytest.mark.parametrize("kind", ["padded", "flat", "rows"])
def test_each_target_counts_by_its_weight(kind: str) -> None:
    if kind == "padded":
        batch = mm.collate(SAMPLES)
    else:
        layout = "rows" if kind == "rows" else "flat"
        batch = flatten(SAMPLES, [0, 1], 2, mm.Flat(layout=layout, pad_to_multiple_of=4))
    batch["__valid__"] = torch.ones(len(batch["input_ids"]) if kind == "padded" else 2) > 0
    targets = next_tokens(batch)
    logits = torch.randn(*targets.shape, 8, generator=torch.Generator().manual_seed(0))
    weight_of = {2: 0.5, 3: 2.0, 5: 1.0}
    losses = -logits.log_softmax(-1)
    expected = sum(
        weight * losses[targets == token][:, token].sum() for token, weight in weight_of.items()
    )
    assert summed_loss(logits, targets, target_weights(batch)).item() == pytest.approx(
        float(expected), rel=1e-6
    )
    assert ChatModel(None).weight_of(batch) == 3.5
    # Inputs of a model may have padding and blank pictures between.
    more = torch.cat((targets, torch.full_like(targets, -100)), dim=1)
    spread = summed_loss(torch.cat((logits, logits), dim=1), more, target_weights(batch))
    assert spread.item() == pytest.approx(float(expected), rel=1e-6)


def test_labels_without_weights_count_the_same() -> None:
    batch = flatten(SAMPLES[1:], [0], 1, mm.Flat())
    batch["__valid__"] = torch.tensor([True])
    assert target_weights(batch) is None
    assert ChatModel(None).weight_of(batch) == 1
