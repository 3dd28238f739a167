"""The Trainer's loss on flat batches is the mean over all labels of an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.integrations import LoaderTrainer, model_inputs
from mmstream.integrations.trainer import token_loss
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus
from tests.helpers.families import transformers
from tests.helpers.packs import llama


@pytest.mark.parametrize("takes_count", [True, False])
def test_a_step_of_two_flat_batches_has_the_mean_over_their_labels(
    takes_count: bool, tmp_path: Path
) -> None:
    shards = write_corpus(tmp_path / "s", [8], lambda n: {"txt": b"word " * (1 + n * n)})
    pipeline = mm.Pipeline(
        mm.open_dataset(shards),
        global_batch_size=4,
        decode=mm.Decode(text=mm.TextDecoder(byte_tokenizer())),
        batching=mm.Flat(),
    )
    model = llama(vocab_size=len(byte_tokenizer()))
    model.accepts_loss_kwargs = takes_count  # Qwen-VL does not
    total, count = 0.0, 0
    for batch in mm.Loader(pipeline):
        inputs = model_inputs(batch, model)
        with torch.no_grad():
            labels = int((inputs["labels"] != -100).sum())
            total += float(model(**inputs).loss) * labels
            count += labels
    settings: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        gradient_accumulation_steps=2,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        **settings,
    )
    trainer = LoaderTrainer(model, arguments, train_dataset=mm.Loader(pipeline))
    assert (trainer.compute_loss_func is None) == takes_count
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_batch_without_a_label_has_a_loss_of_zero() -> None:
    outputs = transformers.modeling_outputs.CausalLMOutput(logits=torch.ones(1, 3, 5))
    labels = torch.full((1, 3), -100)
    assert token_loss(outputs, labels).item() == 0
    assert token_loss(outputs, labels, torch.tensor(0)).item() == 0
    assert token_loss(outputs, torch.tensor([[-100, 1, 2]]), 4).item() == pytest.approx(
        2 * torch.log(torch.tensor(5.0)).item() / 4
    )
