"""Shared by the examples of this folder: a pipeline, and a small Qwen2-VL with random weights."""

import torch
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(chat=True)  # of a real model: AutoProcessor.from_pretrained(folder)
PROCESSOR = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84})


def make_pipeline(shards: str) -> mm.Pipeline:
    """Return a pipeline of pictures and captions: 16 rows per step, over all ranks."""
    image = mm.ImageDecoder.from_processor(PROCESSOR)
    text = mm.TextDecoder(
        TOKENIZER, max_length=160, image_length=mm.families.qwen_vl.image_length()
    )
    return mm.Pipeline(
        mm.open_dataset(shards),
        global_batch_size=16,
        seed=0,
        decode=mm.Decode(image=image, text=text),
    )


def make_model() -> nn.Module:
    """Return a Qwen2-VL of 98,240 parameters, the same on every rank."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": len(TOKENIZER),
        "bos_token_id": TOKENIZER.bos_token_id,
        "eos_token_id": TOKENIZER.eos_token_id,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKENIZER.convert_tokens_to_ids("<image>"),
    )
    return Qwen2VLForConditionalGeneration(config)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW, whose state must be saved too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
