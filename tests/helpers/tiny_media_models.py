"""Tiny models of video and of speech with random weights, saved as folders with their processors.

Each is made from a config, with a tokenizer of one token per byte: nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing

from mmstream.families.family import import_torchvision
from mmstream.train.tokenizer import byte_tokenizer

import_torchvision()
import transformers  # noqa: E402

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen-VL's, without its system prompt."""

CHAT_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
        "patch_size": 16,
    },
}
"""What the vision towers of the families have of their own."""
VIDEO_PROCESSORS = {"Qwen3VL": transformers.Qwen3VLVideoProcessor}
SPEECH_TOKENS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>",
                 "<|notimestamps|>"]  # fmt: skip


def save_tiny_qwen(folder: Path, max_frames: int = 8, family: str = "Qwen2_5_VL") -> Path:
    """Save a Qwen-VL of 0.1 million weights, for clips of a few frames of about 100 pixels.

    Args:
        folder: Where to save model, tokenizer and processors.
        max_frames: The most frames of a video, at 2 a second.
        family: Qwen2VL, Qwen2_5_VL or Qwen3VL, as `transformers` calls it.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CHAT_TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in CHAT_TOKENS}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, **VISION[family]}
    config = getattr(transformers, f"{family}Config")(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    _save(getattr(transformers, f"{family}ForConditionalGeneration"), config, folder)
    patch = config.vision_config.patch_size
    pixels = {"min_pixels": (4 * patch) ** 2, "max_pixels": (8 * patch) ** 2, "patch_size": patch}
    kind = VIDEO_PROCESSORS.get(family, transformers.Qwen2VLVideoProcessor)
    videos = {**pixels, "fps": 2, "min_frames": 2, "max_frames": max_frames}
    getattr(transformers, f"{family}Processor")(
        transformers.Qwen2VLImageProcessor(
            **pixels, image_mean=kind.image_mean, image_std=kind.image_std
        ),
        tokenizer,
        kind(**videos),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_tiny_whisper(folder: Path, seconds: int = 2) -> Path:
    """Save a Whisper of 0.1 million weights.

    Args:
        folder: Where to save model, tokenizer and feature extractor.
        seconds: The length that all recordings are padded or cut to; Whisper's own has 30.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPEECH_TOKENS})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPEECH_TOKENS}
    end, *start = SPEECH_TOKENS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{' '.join(start)} $A {end}", special_tokens=list(ids.items())
    )
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_source_positions=50 * seconds,
        max_target_positions=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    _save(transformers.WhisperForConditionalGeneration, config, folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=seconds)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def _save(kind: Any, config: Any, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        kind(config).save_pretrained(folder)
