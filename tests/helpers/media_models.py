"""Small models of random weights that see videos or hear."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mmstream import model_inputs
from tests.helpers.families import transformers
from tests.helpers.model_cases import (
    QWEN_TEXT,
    TEXT,
    idefics3,
    llava_onevision,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen_ids,
    token_ids,
)

AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 128,
}


def qwen2_audio(tokenizer: Any) -> Any:
    return transformers.Qwen2AudioForConditionalGeneration(
        transformers.Qwen2AudioConfig(
            text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
            audio_config=transformers.Qwen2AudioEncoderConfig(**AUDIO),
            **token_ids(tokenizer, audio_token_index="<|AUDIO|>"),
        )
    )


def omni_ids(tokenizer: Any) -> dict[str, int]:
    return qwen_ids(tokenizer) | token_ids(
        tokenizer,
        audio_token_id="<|AUDIO|>",
        audio_start_token_id="<|audio_bos|>",
        audio_end_token_id="<|audio_eos|>",
    )


def qwen2_5_omni(tokenizer: Any) -> Any:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(
        transformers.Qwen2_5OmniThinkerConfig(
            text_config={**QWEN_TEXT, "vocab_size": len(tokenizer)},
            vision_config={**vision, "num_heads": 2},
            audio_config={**AUDIO, "output_dim": 32, "n_window": 50},
            **omni_ids(tokenizer),
        )
    )


def qwen3_omni(tokenizer: Any) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    vision |= {"num_heads": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    text = {**TEXT, **experts, "head_dim": 16, "rope_parameters": rope}
    hearing = {**AUDIO, "output_dim": 32, "downsample_hidden_size": 8}
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(
        transformers.Qwen3OmniMoeThinkerConfig(
            text_config={**text, "vocab_size": len(tokenizer)},
            vision_config=vision,
            audio_config=hearing,
            position_id_per_seconds=13,
            **omni_ids(tokenizer),
        )
    )


def whisper(tokenizer: Any) -> Any:
    sizes = {"d_model": 32, "max_target_positions": 256, "num_mel_bins": 80}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    ids = token_ids(
        tokenizer,
        decoder_start_token_id="<bos>",
        bos_token_id="<bos>",
        eos_token_id="<eos>",
        pad_token_id="<pad>",
    )
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=len(tokenizer), **sizes, **ids)
    )


MODELS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava_onevision": llava_onevision,
    "qwen2_audio": qwen2_audio,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni": qwen3_omni,
    "smolvlm": partial(idefics3, name="SmolVLM"),
    "whisper": whisper,
}


def model_of(name: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return MODELS[name](tokenizer).eval()


def positions_of(model: Any, inputs: dict[str, Any], **settings: Any) -> torch.Tensor | None:
    """The positions of a model of Qwen-VL, for each axis."""
    if not hasattr(model.model, "get_rope_index"):
        return None
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw",
             "second_per_grid_ts", "attention_mask")  # fmt: skip
    given = {name: inputs[name] for name in names if name in inputs}
    if "video_second_per_grid" in inputs:
        given.pop("mm_token_type_ids", None)
        given["second_per_grids"] = inputs["video_second_per_grid"]
        if "feature_attention_mask" in inputs:
            given["audio_seqlens"] = inputs["feature_attention_mask"].sum(1)
    positions: torch.Tensor = model.model.get_rope_index(**given, **settings)[0]
    return positions


def assert_blank_media_train_nothing(model: Any, batch: dict[str, Any]) -> None:
    """A batch of texts has the loss of its text, and a gradient of 0 for each tower."""
    loss = model(**model_inputs(batch, model)).loss
    loss.backward()
    towers = [
        weight
        for name, weight in model.named_parameters()
        if any(word in name for word in ("visual", "vision", "audio")) and weight.grad is not None
    ]
    assert towers
    assert not any(weight.grad.any() for weight in towers)
    text = model_inputs(batch, model, blank_image=False)
    assert set(text) - {"token_type_ids"} == {"input_ids", "attention_mask", "labels"}
    torch.testing.assert_close(model(**text).loss, loss)


def assert_equal_inputs(
    inputs: dict[str, Any], expected: dict[str, Any], is_cut: bool = False
) -> None:
    """Compare what a model gets with what its processor makes, value by value.

    `is_cut`: the processor fills recordings up to 5 minutes, which the model cuts again.
    """
    assert inputs.keys() == expected.keys()
    for key, value in inputs.items():
        other = expected[key].to(value.dtype)
        if is_cut and key in ("input_features", "feature_attention_mask"):
            other = other[..., : value.shape[-1]]
        exact = not value.is_floating_point() or "second" in key
        atol = 0 if exact else 1e-3 if key == "input_features" else 1e-5
        message = f"{key}: {{}}".format
        torch.testing.assert_close(value, other, rtol=0, atol=atol, msg=message)
