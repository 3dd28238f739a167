"""FlashAttention of transformers, computed on the CPU: documents by their lengths, one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.families import transformers


def use_varlen(model: Any, monkeypatch: Any) -> None:
    """Let a model run as with ``attn_implementation="flash_attention_2"``."""
    utils = transformers.modeling_flash_attention_utils
    functions = (dense, varlen, None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(
        utils, "lazy_import_flash_attention", lambda *_: (functions, (arguments, None))
    )
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "flash_attention_2"


def arguments(is_causal: bool, softmax_scale: float | None = None, **others: Any) -> dict[str, Any]:
    """What the functions below take, of what transformers gives."""
    del others
    return {"is_causal": is_causal, "scale": softmax_scale}


def dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """Attention of [B, T, H, D] over all tokens of a row."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
    return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of [T, H, D] within documents."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([dense(a[None], b[None], c[None], is_causal, scale)[0] for a, b, c in parts])
