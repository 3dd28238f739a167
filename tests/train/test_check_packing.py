"""`check_packing` tells models and fields that keep documents apart from those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream import model_inputs
from mmstream.batching.flat import flatten
from mmstream.train import check_packing
from mmstream.train.inputs import LENGTHS
from tests.helpers.families import transformers
from tests.helpers.model_cases import CASES, TEXT
from tests.helpers.packs import HALF, batch_of, conversations, decode_and_model, llama, texts
from tests.helpers.varlen import use_varlen

Change = Callable[[dict[str, Any], Any], dict[str, Any]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> mm.Dataset:
    return conversations(tmp_path_factory.mktemp("chats"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gemma3"}))  # it refuses pictures
def test_known_models_keep_documents_with_pictures_apart(name: str, dataset: mm.Dataset) -> None:
    decode, model = decode_and_model(name, "sdpa")
    layout = "rows" if name == "qwen3_vl" else "flat"
    check = check_packing(model, batch_of(dataset, decode, mm.Flat(layout=layout)), normalize=HALF)
    assert check.num_documents >= 6
    assert check.leak < 1e-6


def test_the_model_and_random_states_stay_as_they_were() -> None:
    model = llama(attention_dropout=0.5)
    model.train()
    model.model.norm.eval()
    state = torch.get_rng_state()
    check_packing(model, texts())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.norm.training
    assert all(weight.grad is None for weight in model.parameters())


# -- wrong fields ---------------------------------------------------------------------------------


def counted_on(inputs: dict[str, Any], _: Any) -> dict[str, Any]:
    ids = inputs["input_ids"]
    return inputs | {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)}


def moved(inputs: dict[str, Any], _: Any) -> dict[str, Any]:
    borders = inputs["cu_seq_lens_q"].clone()
    borders[1:-1] += 1
    return inputs | {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}


def without(name: str) -> Change:
    return lambda inputs, _: {key: inputs[key] for key in inputs if key != name}


QWEN_VL = ("qwen2_vl", "qwen3_vl")
LLAMA = ("llama", "llama in rows")
VARLEN = ("llama by lengths",)
FAULTS: dict[str, tuple[tuple[str, ...], Change]] = {
    "position_ids of qwen.* need four rows": (
        QWEN_VL[:1],
        lambda inputs, batch: inputs | {"position_ids": batch["position_ids"]},
    ),
    "position_ids are missing": (QWEN_VL[:1], without("position_ids")),
    "position_ids do not begin at 0 in each document": (LLAMA, counted_on),
    "attention_mask is given": (
        LLAMA[:1],
        lambda inputs, _: inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])},
    ),
    "use_cache is not False": (LLAMA[:1], lambda inputs, _: inputs | {"use_cache": True}),
    "does not keep documents apart by these arguments": (VARLEN, moved),
}
"""The message -> the models that it is about, and the fault."""


@pytest.mark.parametrize(
    ("message", "name"), [(message, name) for message in FAULTS for name in FAULTS[message][0]]
)
def test_a_wrong_field_is_named(
    message: str, name: str, dataset: mm.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = FAULTS[message][1]
    if name in QWEN_VL:
        decode, model = decode_and_model(name, "sdpa")
        batch = batch_of(dataset, decode, mm.Flat())
    else:
        model, batch = llama(), texts("rows" if name.endswith("rows") else "flat")
    if name in VARLEN:
        use_varlen(model, monkeypatch)
        assert check_packing(model, batch).leak == 0
    with pytest.raises(mm.ConfigError, match=message):
        check_packing(
            model,
            batch,
            lambda batch: change(model_inputs(batch, model, normalize=HALF), batch),
        )


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_qwen_vl_keeps_documents_apart_by_lengths_alone(
    name: str, dataset: mm.Dataset, monkeypatch: Any
) -> None:
    decode, model = decode_and_model(name, "sdpa")
    use_varlen(model, monkeypatch)
    check = check_packing(model, batch_of(dataset, decode, mm.Flat()), normalize=HALF)
    assert check.leak == 0


# -- models that do not keep documents apart ------------------------------------------------------


def small(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_a_hybrid_is_refused_without_its_kernels() -> None:
    config = transformers.Qwen3NextConfig(
        **TEXT | {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = small(config)
    with pytest.raises(
        mm.ConfigError, match=r"qwen3_next does not run on this batch: .*causal_conv1d"
    ):
        model_inputs(texts(), model)  # transformers refuses seq_idx without kernels

    def without_lengths(batch: Any) -> dict[str, Any]:
        """Without them, transformers does not notice."""
        inputs = model_inputs(batch, model, check=False)
        return {name: inputs[name] for name in inputs if name not in (*LENGTHS, "seq_idx")}

    with pytest.raises(mm.ConfigError, match=r"document 1 changes .*: seq_idx is missing"):
        check_packing(model, texts(), without_lengths)


@pytest.mark.parametrize("kind", ["OPT", "Falcon"])
def test_a_model_that_ignores_positions_is_refused(kind: str) -> None:
    settings = {"vocab_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, ffn_dim=32, word_embed_proj_dim=32, **settings
    )
    model = small(config)
    with pytest.raises(mm.ConfigError, match="does not keep documents apart by these"):
        check_packing(model, texts(), lambda batch: model_inputs(batch, model, check=False))


def test_a_padded_batch_is_no_flat_one() -> None:
    with pytest.raises(mm.ConfigError, match="no cu_seq_lens_q"):
        check_packing(llama(), {"input_ids": torch.ones(1, 4)})
    with pytest.raises(mm.ConfigError, match="give the model itself"):
        check_packing("llama", texts())


def test_a_batch_of_one_document_is_refused() -> None:
    alone = flatten([{"input_ids": np.array([5, 6, 7])}], [0], 1, mm.Flat())
    with pytest.raises(mm.ConfigError, match="has one document, so nothing can leak"):
        check_packing(llama(), alone)


@pytest.mark.parametrize("name", ["input_ids", "document_ids", "document_row", "max_length_k"])
def test_a_flat_batch_that_lost_a_field_is_refused(name: str) -> None:
    batch = texts()
    del batch[name]
    with pytest.raises(mm.ConfigError, match=rf"no {name}: keep all fields of batching=mm\.Flat"):
        check_packing(llama(), batch)
