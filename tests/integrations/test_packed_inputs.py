"""Flat batches give a model the loss and the gradients of documents that stand alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.errors import ConfigError
from mmstream.integrations import model_inputs
from mmstream.integrations.packed_text import LENGTHS
from tests.helpers.families import transformers
from tests.helpers.model_cases import CASES
from tests.helpers.packs import (
    HALF,
    assert_parity,
    batch_of,
    conversations,
    decode_and_model,
    llama,
    texts,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return conversations(tmp_path_factory.mktemp("chats"))


EVERY = [(name, "sdpa", "flat") for name in CASES]
ROWS = [(name, "eager", "rows") for name in ("qwen2_vl", "qwen3_vl", "idefics3")]


@pytest.mark.parametrize(("name", "attention", "layout"), EVERY + ROWS)
def test_a_packed_batch_trains_as_its_documents_alone(
    name: str, attention: str, layout: Any, dataset: mm.Dataset
) -> None:
    decode, model = decode_and_model(name, attention)
    packed = batch_of(dataset, decode, mm.Flat(layout=layout))
    padded = batch_of(dataset, decode)
    assert_parity(
        model,
        model_inputs(packed, model, normalize=HALF),
        model_inputs(padded, model, normalize=HALF),
    )


@pytest.mark.parametrize(("attention", "layout"), [("sdpa", "flat"), ("eager", "rows")])
def test_packed_texts_train_a_llama_as_texts_alone(attention: str, layout: Any) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    packed = texts(layout)
    ids, starts = packed["input_ids"].flatten(), packed["position_ids"].flatten() == 0
    documents = [
        document
        for document in torch.tensor_split(ids, torch.nonzero(starts).flatten()[1:])
        if (document != 0).any()  # rows end in padding documents
    ]
    assert [document.numel() for document in documents] == [5, 1, 9, 4, 2, 7]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(document) for document in documents], batch_first=True
    )
    labels = padded.masked_fill(mask == 0, -100)
    alone = {"input_ids": padded, "attention_mask": mask, "labels": labels, "use_cache": False}
    assert_parity(model, model_inputs(packed, model), alone)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_a_packed_batch_has_the_loss_of_its_documents_on_flex(
    name: str, dataset: mm.Dataset
) -> None:
    decode, model = decode_and_model(name, "sdpa")
    # transformers lets no Qwen-VL choose flex, but its text part runs on it.
    model.config.get_text_config()._attn_implementation_internal = "flex_attention"
    packed = model_inputs(batch_of(dataset, decode, mm.Flat()), model, normalize=HALF)
    padded = model_inputs(batch_of(dataset, decode), model, normalize=HALF)
    # Uncompiled, as compiling takes half a minute. On CPUs, flex has no backward pass.
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        loss = model(**packed).loss
        model.set_attn_implementation("sdpa")
        expected = model(**padded).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "idefics3"])
def test_a_flat_batch_without_pictures_gets_a_blank_one_as_a_document_of_its_own(
    name: str, layout: Any, tmp_path: Path
) -> None:
    dataset = conversations(tmp_path, [0] * 6)
    decode, model = decode_and_model(name, "sdpa")
    batch = batch_of(dataset, decode, mm.Flat(layout=layout))
    packed = model_inputs(batch, model)
    assert "attention_mask" not in packed
    assert packed["input_ids"].shape[1] > batch["input_ids"].shape[1]
    assert packed["input_ids"].shape == packed["labels"].shape
    loss = model(**packed).loss
    loss.backward()
    alone = model(**model_inputs(batch_of(dataset, decode), model, blank_image=False)).loss
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    towers = [weight for name, weight in model.named_parameters() if "vis" in name]
    assert any(weight.grad is not None for weight in towers)
    assert all(weight.grad is None or not weight.grad.any() for weight in towers)


# -- models of text -------------------------------------------------------------------------------


def test_a_model_of_text_takes_padded_and_flat_batches() -> None:
    model = llama()
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    padded = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids}
    assert model_inputs(padded, model).keys() == padded.keys()
    flat = model_inputs(texts(), model)
    assert flat.keys() == {"input_ids", "position_ids", "labels", "use_cache"}
    assert flat["use_cache"] is False
    assert model_inputs(texts(), "llama").keys() == flat.keys()


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_rows_that_are_not_valid_have_no_labels(layout: Any) -> None:
    batch = texts(layout, valid=[True, False, True])
    labels = model_inputs(batch, llama())["labels"]
    invalid = (batch["document_row"] == 1)[batch["document_ids"].long()]
    assert labels.shape == batch["input_ids"].shape
    assert (labels[invalid] == -100).all()
    assert torch.equal(labels[~invalid], batch["labels"][~invalid])


def test_flash_attention_gets_the_lengths_of_documents() -> None:
    config = llama().config
    config._attn_implementation_internal = "flash_attention_2"
    inputs = model_inputs(texts(), config)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 19, 21, 28]
    assert inputs["cu_seq_lens_k"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 16


def test_layers_with_a_state_get_the_lengths_and_the_numbers_of_documents() -> None:
    config = transformers.Qwen3NextConfig()
    inputs = model_inputs(texts(), config)
    assert inputs["seq_idx"].dtype == torch.int32
    assert inputs["seq_idx"].tolist() == texts()["document_ids"].tolist()
    assert {*LENGTHS} <= inputs.keys()


def test_a_text_model_reads_the_text_row_of_positions_with_four_rows() -> None:
    batch = texts()
    expected = batch["position_ids"]
    batch["position_ids"] = torch.stack([expected, *[expected + 3] * 3])
    assert torch.equal(model_inputs(batch, llama())["position_ids"], expected)


# -- what is refused ------------------------------------------------------------------------------


def test_positions_of_three_rows_are_refused() -> None:
    batch = texts()
    batch["position_ids"] = batch["position_ids"].expand(3, 1, -1)
    with pytest.raises(ConfigError, match="have 3 rows; qwen2_vl tells documents apart by four"):
        model_inputs(batch, "qwen2_vl")


@pytest.mark.parametrize("family", ["clip", "siglip", "whisper", "vit"])
def test_a_family_of_one_sample_a_row_takes_no_flat_batch(family: str) -> None:
    with pytest.raises(ConfigError, match=f"{family} takes one sample a row"):
        model_inputs(texts(), family)


def test_a_model_without_positions_takes_no_flat_batch() -> None:
    with pytest.raises(ConfigError, match="bloom takes no position_ids"):
        model_inputs(texts(), "bloom")


def test_a_flat_batch_without_positions_is_refused() -> None:
    batch = texts()
    del batch["position_ids"]
    with pytest.raises(ConfigError, match="cu_seq_lens_q, and no position_ids"):
        model_inputs(batch, llama())


def test_long_rows_in_one_are_refused_where_attention_compares_all_tokens() -> None:
    batch = texts()
    longer = {name: batch[name].repeat(1, 600) for name in ("input_ids", "labels")}
    with pytest.raises(ConfigError, match=r"sdpa attention compares all 16,800 tokens .* layout"):
        model_inputs(batch | longer, llama())
