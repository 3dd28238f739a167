"""Flat batches in the forms of FlashAttention, flex attention, torchtitan and Megatron."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from mmstream.errors import ConfigError
from mmstream.train import (
    flash_attention_arguments,
    flex_block_mask,
    megatron_packing,
    torchtitan_batch,
)
from tests.helpers.packs import texts
from tests.helpers.varlen import varlen


@pytest.fixture(params=["flat", "rows"])
def batch(request: pytest.FixtureRequest) -> Any:
    return texts(request.param)


def tokens(rows: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 2, width, 16, generator=generator) for _ in range(3)]


def flat(qkv: list[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).flatten(0, 1) for x in qkv]


def alone(batch: Any, qkv: list[Tensor]) -> Tensor:
    """Causal attention of each document by itself, [B * T, H, D]."""
    outputs = []
    for start, stop in pairwise(batch["cu_seq_lens_q"].tolist()):
        own = [x[start:stop].transpose(0, 1) for x in flat(qkv)]
        outputs.append(F.scaled_dot_product_attention(*own, is_causal=True).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_sees_the_tokens_before_in_the_document(batch: Any) -> None:
    qkv = tokens(*batch["input_ids"].shape)
    output = flex_attention(*qkv, block_mask=flex_block_mask(batch))
    torch.testing.assert_close(output.transpose(1, 2).flatten(0, 1), alone(batch, qkv))


def test_the_lengths_of_flash_attention_are_those_of_documents(batch: Any) -> None:
    qkv = tokens(*batch["input_ids"].shape)
    arguments = flash_attention_arguments(batch)
    assert arguments.keys() == {
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal")
    }
    borders = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    torch.testing.assert_close(varlen(*flat(qkv), *borders, True, None), alone(batch, qkv))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_keeps_documents_apart() -> None:
    function = pytest.importorskip("flash_attn").flash_attn_varlen_func
    batch = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in texts().items()}
    qkv = [x.cuda().bfloat16() for x in tokens(*batch["input_ids"].shape)]
    output = function(*flat(qkv), **flash_attention_arguments(batch))
    torch.testing.assert_close(output, alone(batch, qkv), rtol=2e-2, atol=2e-2)


def test_torchtitan_gets_next_tokens_as_labels(batch: Any) -> None:
    inputs, labels = torchtitan_batch(batch)
    ids, positions = inputs["input"].tolist(), inputs["positions"].tolist()
    assert len(ids) == len(positions) == len(labels) == batch["input_ids"].numel()
    borders = {start for start, position in enumerate(positions) if position == 0}
    assert borders == set(batch["cu_seq_lens_q"][:-1].tolist())
    lengths = [5, 1, 9, 4, 2, 7]  # documents of `texts`, without padding
    assert int((labels != -100).sum()) == sum(length - 1 for length in lengths)
    for place, label in enumerate(labels.tolist()):
        assert label == -100 or (label == ids[place + 1] and place + 1 not in borders)


def test_torchtitan_gets_mrope_positions_by_token() -> None:
    batch = texts()
    text = batch["position_ids"]
    batch["position_ids"] = torch.stack([text, text + 1, text + 2, text + 3])
    inputs, _ = torchtitan_batch(batch)
    assert torch.equal(inputs["positions"], text[0])
    assert torch.equal(inputs["mrope_positions"], text[0][:, None] + torch.tensor([1, 2, 3]))


def test_megatron_gets_packed_sequences_in_thd() -> None:
    arguments = megatron_packing(texts())
    names = {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"}
    for borders in (arguments[name] for name in names):
        assert borders.dtype == torch.int32
        assert borders.tolist() == [0, 5, 6, 15, 19, 21, 28]
    assert {name: arguments[name] for name in arguments if name not in names} == {
        "qkv_format": "thd",
        "max_seqlen_q": 16,
        "max_seqlen_kv": 16,
        "total_tokens": 28,
    }
    # Megatron's own fields, of megatron/core/packed_seq_params.py in August 2026
    assert arguments.keys() <= {
        *("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"),
        *("cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group"),
        *("total_tokens", "seq_idx", "tokens_per_sample", "pad_between_seqs"),
    }


def test_megatron_says_which_document_context_parallelism_cannot_cut() -> None:
    with pytest.raises(ConfigError, match="document 0 has 5 tokens, no multiple of 4"):
        megatron_packing(texts(), multiple_of=4)
    with pytest.raises(ConfigError, match=r'3 rows, and thd is one line .* layout="flat"'):
        megatron_packing(texts("rows"))
    whole = texts() | {"max_length_q": np.inf, "max_length_k": np.inf}
    assert megatron_packing(whole)["max_seqlen_q"] == 28
