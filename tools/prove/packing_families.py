"""Which language models of transformers keep the documents of a flat batch apart.

    python -m tools.prove.packing_families [FAMILY ...]

Makes a tiny model of each causal family from its config, with random weights and one layer of each
kind, and runs `mm.check_packing` on it with sdpa, or eager where it has no sdpa. Prints one line a
family. docs/models.md has the answers for transformers 5.23. It takes one or two minutes.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import numpy as np
import torch

import mmstream as mm
from mmstream._torchvision import import_torchvision
from mmstream.batching.flat import flatten
from mmstream.errors import ConfigError
from mmstream.integrations import model_inputs
from mmstream.types import Batch

import_torchvision()
import transformers  # noqa: E402

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_inner", "lru_width"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "ffn_dim"), 32),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_expand"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "attention_window_size"), 256),
    "num_key_value_heads": 2,
    "num_attention_groups": 2,
    "rotary_dim": 4,
    "sliding_window": 8,
    "qk_head_dim": 16,
    "moe_num_experts": 4,
    "num_codebooks": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
}
MOST_WEIGHTS = 20_000_000


def main() -> None:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(description="Try all language models.")
    parser.add_argument("families", nargs="*")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for family in parser.parse_args().families or names:
        print(f"{family:28} {answer_of(family)}", flush=True)


def answer_of(family: str) -> str:
    """Return "proven", "needs kernels", "refused" or "not tried", and why."""
    try:
        config = tiny_config(family)
        with torch.device("meta"):
            shell = transformers.AutoModelForCausalLM.from_config(config)
        num_weights = sum(weight.numel() for weight in shell.parameters())
        if num_weights > MOST_WEIGHTS:
            return f"not tried: {num_weights:,} weights"
    except Exception as error:  # its config has to be made by hand
        return f"not tried: {one_line(error)}"
    answer = "not tried"
    for attention in ("sdpa", "eager"):
        try:
            model = random_model(config, attention)
        except ValueError as error:
            answer = f"not tried: {one_line(error)}"
            continue
        try:
            answer = checked(model)
        except Exception as error:  # the next family is tried
            answer = f"not tried: {one_line(error)}"
        break
    return answer


def checked(model: Any) -> str:
    """Return what `mm.check_packing` says of a model."""

    def prepare(batch: Batch) -> dict[str, Any]:
        return model_inputs(batch, model, check=False)

    try:
        check = mm.check_packing(model, documents(), prepare)
    except ConfigError as error:
        kernels = "kernels" in str(error) or "Install" in str(error)
        return f"{'needs kernels' if kernels else 'refused'}: {one_line(error)}"
    return f"proven: difference {check.difference:.0e}, leak {check.leak:.0e}"


def documents() -> Batch:
    """Return a flat batch of five documents, longer and shorter than the sliding window."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 60, length) for length in (7, 1, 12, 20, 5)]
    batch = flatten([{"input_ids": own} for own in ids], range(5), 5, mm.Flat())
    return batch | {"__valid__": torch.ones(5, dtype=torch.bool)}


def tiny_config(family: str) -> Any:
    """Return a small config of a family, with a layer of each kind that its default has."""
    kind = transformers.CONFIG_MAPPING[family]
    default = kind()
    names = {name for owner in kind.__mro__ for name in getattr(owner, "__annotations__", {})}
    names |= vars(default).keys()
    settings = {name: value for name, value in SMALL.items() if name in names}
    if "qk_rope_head_dim" in names:
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    kinds = OTHERS.get(family, {}).get("layer_types") or getattr(default, "layer_types", None)
    settings |= OTHERS.get(family, {})
    if kinds:
        layers = list(dict.fromkeys(kinds))
        settings["layer_types"] = layers if len(layers) > 1 else layers * 2
        settings["num_hidden_layers"] = len(settings["layer_types"])
    try:
        return kind(**settings)
    except Exception:  # the kinds of layers follow from other settings
        settings.pop("layer_types", None)
        return kind(**settings)


def random_model(config: Any, attention: str) -> Any:
    """Return a model with weights that are large enough to show what its tokens see."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.1)
    return model


def one_line(error: BaseException) -> str:
    """Return the beginning of a message."""
    return " ".join(str(error).split())[:160]


if __name__ == "__main__":
    main()
