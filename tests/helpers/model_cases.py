"""Small models of transformers with their real processors, and the decoders that feed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mmstream as mm
from mmstream import Decode, ImageDecoder, TextDecoder
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.chats import LLAVA, SPECIAL, byte_chat
from tests.helpers.families import FAMILIES, MARKED, QWEN_VL, Family, transformers

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
IDEFICS_TOKENS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]


@dataclass(frozen=True)
class Case:
    """A family: its processor, our decoders, and a small model of random weights."""

    family: Callable[[], Family]
    model: Callable[[Any], Any]
    """Builds the model for a tokenizer."""


def token_ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def qwen2_vl(tokenizer: Any) -> Any:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config={**QWEN_TEXT, "vocab_size": len(tokenizer)},
            vision_config=vision,
            **qwen_ids(tokenizer),
        )
    )


def qwen2_5_vl(tokenizer: Any) -> Any:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config={**QWEN_TEXT, "vocab_size": len(tokenizer)},
            vision_config={**vision, "num_heads": 2},
            **qwen_ids(tokenizer),
        )
    )


def qwen3_vl(tokenizer: Any) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    vision |= {"num_heads": 2, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    text = {**TEXT, "head_dim": 16, "vocab_size": len(tokenizer), "rope_parameters": rope}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **qwen_ids(tokenizer))
    )


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    return token_ids(
        tokenizer,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def llava_family() -> Family:
    tokenizer = byte_chat(LLAVA)
    pictures = transformers.LlavaImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    processor = transformers.LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = TextDecoder(tokenizer, 20_000, image_length=16)
    return Family(processor, LLAVA, Decode(image=ImageDecoder.from_processor(pictures), text=text))


def llava(tokenizer: Any) -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config=transformers.CLIPVisionConfig(**VISION, image_size=56),
            **token_ids(tokenizer, image_token_index="<image>"),
        )
    )


SHAPES = ((112, 56), (56, 112), (112, 112))


def llava_next_family() -> Family:
    tokenizer = byte_chat(LLAVA)
    pictures = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=[list(shape) for shape in SHAPES],
    )
    processor = transformers.LlavaNextProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    text = TextDecoder(tokenizer, 20_000, image_length=mm.families.llava.next_image_length())
    return Family(processor, LLAVA, Decode(image=ImageDecoder.from_processor(pictures), text=text))


def llava_next(tokenizer: Any) -> Any:
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config=transformers.CLIPVisionConfig(**VISION, image_size=56),
            image_grid_pinpoints=[list(shape) for shape in SHAPES],
            **token_ids(tokenizer, image_token_index="<image>"),
        )
    )


ONEVISION_SHAPES = [[56 * rows, 56 * columns] for rows in range(1, 6) for columns in range(1, 6)]


def llava_onevision_family() -> Family:
    """Pictures alone in 1 to 25 tiles of 56 pixels. The model shrinks more than 9, as published."""
    family: Family = FAMILIES["llava-onevision"](56, image_grid_pinpoints=ONEVISION_SHAPES)
    return family


def llava_onevision(tokenizer: Any) -> Any:
    return transformers.LlavaOnevisionForConditionalGeneration(
        transformers.LlavaOnevisionConfig(
            text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
            vision_config=transformers.SiglipVisionConfig(**VISION, image_size=56),
            image_grid_pinpoints=ONEVISION_SHAPES,
            vision_feature_layer=-1,
            **token_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
        )
    )


def internvl_family() -> Family:
    """Tiles of 56 pixels, which take 4 tokens."""
    family = FAMILIES["internvl"]()
    family.processor.image_seq_length = 4
    pictures = transformers.GotOcr2ImageProcessor(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=3
    )
    family.processor.image_processor = pictures
    text = replace(family.decode.text, image_length=mm.families.internvl.image_length(4))
    return replace(family, decode=Decode(image=ImageDecoder.from_processor(pictures), text=text))


def internvl(tokenizer: Any) -> Any:
    return transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(
            text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
            vision_config={**VISION, "patch_size": [14, 14], "image_size": [56, 56]},
            **token_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
        )
    )


def idefics_family(kind: str) -> Family:
    """Pictures of one square, which Idefics2 turns into 8 vectors and Idefics3 into 4."""
    marks = {2: ("", ""), 3: ("<global-img>", "")}[int(kind)]
    length = {2: 8, 3: 4}[int(kind)]
    image = f"<fake_token_around_image>{marks[0]}<image><fake_token_around_image>"
    template = QWEN_VL.replace(MARKED, image)
    tokenizer = byte_chat(template, [*SPECIAL, *IDEFICS_TOKENS])
    square = {"height": 56, "width": 56}
    if kind == "2":
        pictures = transformers.Idefics2ImageProcessor(size=square)
        processor = transformers.Idefics2Processor(pictures, tokenizer, image_seq_len=length)
    else:
        pictures = transformers.Idefics3ImageProcessor(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
        )
        processor = transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=length)
    text = TextDecoder(tokenizer, 20_000, image_length=length)
    decode = Decode(image=ImageDecoder(size=(56, 56), resize="exact"), text=text)
    return Family(processor, QWEN_VL.replace(MARKED, "<image>"), decode)


def idefics2(tokenizer: Any) -> Any:
    perceiver = {"resampler_n_latents": 8, "resampler_depth": 1, "hidden_size": 32}
    perceiver |= {"resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 2}
    return transformers.Idefics2ForConditionalGeneration(
        transformers.Idefics2Config(
            text_config=transformers.MistralConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config={**VISION, "image_size": 56},
            perceiver_config=perceiver,
            **token_ids(tokenizer, image_token_id="<image>"),
        )
    )


def idefics3(tokenizer: Any, name: str = "Idefics3") -> Any:
    """Idefics3, or SmolVLM, which has the same settings."""
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    return model(
        config(
            text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config={**VISION, "image_size": 56},
            scale_factor=2,
            **token_ids(tokenizer, image_token_id="<image>"),
        )
    )


GLM_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}


def glm_v(tokenizer: Any, name: str = "Glm4v", **settings: Any) -> Any:
    ids = token_ids(tokenizer, image_token_id="<|image|>")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope, "pad_token_id": 0}
    vision = {**GLM_VISION, "num_heads": 2, "image_size": 112}
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, **settings}, vision_config=vision, **ids
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def glm46v(tokenizer: Any) -> Any:
    config = glm_v(tokenizer).config
    parts = {"text_config": config.text_config, "vision_config": config.vision_config}
    return transformers.Glm46VForConditionalGeneration(
        transformers.Glm46VConfig(**parts, image_token_id=config.image_token_id)
    )


EXPERTS = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
}


def gemma3(tokenizer: Any) -> Any:
    """Pictures of 16 patches, which take 4 tokens. A layer sees few tokens, another one all."""
    text = {**TEXT, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 16}
    layers = ["sliding_attention", "full_attention"]
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={**text, "layer_types": layers, "vocab_size": len(tokenizer)},
            vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 56},
            mm_tokens_per_image=4,
            **token_ids(tokenizer, image_token_index="<image_soft_token>"),
        )
    )


PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 112}


def mistral3(tokenizer: Any) -> Any:
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config=PIXTRAL,
            **token_ids(tokenizer, image_token_index="[IMG]"),
        )
    )


def pixtral(tokenizer: Any) -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.MistralConfig(**TEXT, vocab_size=len(tokenizer)),
            vision_config=PIXTRAL,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            **token_ids(tokenizer, image_token_index="[IMG]"),
        )
    )


def paligemma(tokenizer: Any) -> Any:
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config=transformers.GemmaConfig(**TEXT, head_dim=16, vocab_size=len(tokenizer)),
            vision_config=transformers.SiglipVisionConfig(**VISION, image_size=56),
            projection_dim=32,
            **token_ids(tokenizer, image_token_index="<image>"),
        )
    )


CASES = {
    "qwen2_vl": Case(FAMILIES["qwen2-vl"], qwen2_vl),
    "qwen2_5_vl": Case(FAMILIES["qwen2-vl"], qwen2_5_vl),
    "qwen3_vl": Case(FAMILIES["qwen3-vl"], qwen3_vl),
    "llava": Case(llava_family, llava),
    "llava_next": Case(llava_next_family, llava_next),
    "llava_onevision": Case(llava_onevision_family, llava_onevision),
    "internvl": Case(internvl_family, internvl),
    "idefics2": Case(partial(idefics_family, "2"), idefics2),
    "idefics3": Case(partial(idefics_family, "3"), idefics3),
    "glm4v": Case(FAMILIES["glm4v"], glm_v),
    "glm4v_moe": Case(FAMILIES["glm4v"], partial(glm_v, name="Glm4vMoe", **EXPERTS)),
    "glm46v": Case(FAMILIES["glm4v"], glm46v),
    "gemma3": Case(FAMILIES["gemma3"], gemma3),
    "mistral3": Case(partial(FAMILIES["mistral3"], 112), mistral3),
    "pixtral": Case(partial(FAMILIES["mistral3"], 112, merge_size=1), pixtral),
}


# -- two towers, and classification ---------------------------------------------------------------

TOWER = {name: value for name, value in VISION.items() if name != "patch_size"}


def clip_family() -> Family:
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=56)
    return pair_family(transformers.CLIPProcessor, pictures)


def siglip_family() -> Family:
    pictures = transformers.SiglipImageProcessor(size={"height": 56, "width": 56})
    return pair_family(transformers.SiglipProcessor, pictures)


def pair_family(processor: Any, pictures: Any) -> Family:
    tokenizer = byte_tokenizer()
    text = TextDecoder(tokenizer, 64, padding="max_length")
    decode = Decode(image=ImageDecoder.from_processor(pictures), text=text)
    return Family(processor(pictures, tokenizer), "", decode)


def clip(tokenizer: Any) -> Any:
    text = {**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    ids = token_ids(tokenizer, bos_token_id="<bos>", eos_token_id="<eos>", pad_token_id="<pad>")
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**text, **ids},
            vision_config={**VISION, "image_size": 56},
            projection_dim=16,
        )
    )


def siglip(tokenizer: Any) -> Any:
    text = {**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config={**VISION, "image_size": 56})
    )


PAIRS = {"clip": Case(clip_family, clip), "siglip": Case(siglip_family, siglip)}
