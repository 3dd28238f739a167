"""Processors of models that see videos or hear, and the text decoders that do without them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mmstream as mm
from mmstream import TextDecoder
from tests.helpers.chats import QWEN_VL, SPECIAL, byte_chat
from tests.helpers.families import transformers
from tests.helpers.model_cases import ONEVISION_SHAPES

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
SEEING_TEMPLATE = QWEN_VL.replace(
    "{% elif 'text' in p %}",
    f"{{% elif p.type == 'video' %}}{VIDEO}"
    f"{{% elif p.type == 'audio' %}}{AUDIO}"
    "{% elif 'text' in p %}",
)
"""Renders what the templates of Qwen's models render for images, videos and audio."""
LLAVA_TEMPLATE = (
    SEEING_TEMPLATE.replace(VIDEO, "<video>\n")
    .replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>\n")
    .replace(AUDIO, "")
)
MEDIA_SPECIAL = [*SPECIAL, "<|video_pad|>", "<video>", "<|AUDIO|>", "<|audio_bos|>",
                 "<|audio_eos|>"]  # fmt: skip


@dataclass(frozen=True)
class MediaFamily:
    """A processor of transformers, and the text decoder that makes the same ids."""

    processor: Any
    text: TextDecoder

    @property
    def tokenizer(self) -> Any:
        return self.text.tokenizer


def qwen_tokens(tokenizer: Any) -> Any:
    """Give a tokenizer the names of tokens that the omni processors look for."""
    names = {
        "image": "<|image_pad|>",
        "video": "<|video_pad|>",
        "audio": "<|AUDIO|>",
        "vision_bos": "<|vision_start|>",
        "vision_eos": "<|vision_end|>",
        "audio_bos": "<|audio_bos|>",
        "audio_eos": "<|audio_eos|>",
    }
    for name, token in names.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


QWEN_TEXT = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def qwen2_vl(name: str = "Qwen2_5_VLProcessor", **settings: Any) -> MediaFamily:
    tokenizer = byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL)
    pictures = transformers.Qwen2VLImageProcessor(max_pixels=200_000)
    videos = transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **settings)
    processor = getattr(transformers, name)(pictures, tokenizer, videos)
    text = TextDecoder(
        tokenizer,
        200_000,
        **QWEN_TEXT,
        image_length=mm.families.qwen_vl.image_length(),
        video_length=mm.families.qwen_vl.video_length(),
    )
    return MediaFamily(processor, text)


def qwen3_vl(**settings: Any) -> MediaFamily:
    tokenizer = byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL)
    pictures = transformers.Qwen2VLImageProcessor(patch_size=16, min_pixels=2**16, max_pixels=2**18)
    videos = transformers.Qwen3VLVideoProcessor(**{"cap_pixels_per_frame": False, **settings})
    processor = transformers.Qwen3VLProcessor(pictures, tokenizer, videos)
    text = TextDecoder(
        tokenizer,
        200_000,
        **QWEN_TEXT,
        image_length=mm.families.qwen_vl.image_length(patch_size=16),
        video_length=mm.families.qwen_vl.qwen3_video_length(),
    )
    return MediaFamily(processor, text)


def llava_onevision(side: int = 384, **settings: Any) -> MediaFamily:
    tokenizer = byte_chat(LLAVA_TEMPLATE, MEDIA_SPECIAL)
    size = {"height": side, "width": side}
    videos = transformers.LlavaOnevisionVideoProcessor(size=size, **settings)
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(
            size=size, **({"image_grid_pinpoints": ONEVISION_SHAPES} if side == 56 else {})
        ),
        tokenizer,
        videos,
        num_image_tokens=(side // 14) ** 2,
        vision_feature_select_strategy="full",
    )
    text = TextDecoder(
        tokenizer,
        200_000,
        image_length=mm.families.llava.onevision_image_length(),
        video_length=mm.families.llava.onevision_video_length(),
    )
    return MediaFamily(processor, text)


def smolvlm() -> MediaFamily:
    """Frames of 56 pixels, which take 4 tokens. The processor needs the package ``num2words``."""
    marks = ["<fake_token_around_image>", "<global-img>"]
    template = SEEING_TEMPLATE.replace(VIDEO, "<image>")
    tokenizer = byte_chat(template, [*SPECIAL, *marks])
    side = {"longest_edge": 56}
    processor = transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(size=side, max_image_size=side),
        tokenizer,
        transformers.SmolVLMVideoProcessor(
            size={"longest_edge": 101}, max_image_size=side, fps=1, num_frames=6
        ),
        image_seq_len=4,
        chat_template=SEEING_TEMPLATE.replace(VIDEO, "<video>"),
    )
    text = TextDecoder(
        tokenizer,
        20_000,
        video_token="<image>",
        video_length=mm.families.idefics.smolvlm_video_length(4),
    )
    return MediaFamily(processor, text)


def qwen2_audio() -> MediaFamily:
    tokenizer = byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    processor = transformers.Qwen2AudioProcessor(
        extractor, tokenizer, chat_template=SEEING_TEMPLATE
    )
    text = TextDecoder(
        tokenizer,
        200_000,
        audio_token="<|AUDIO|>",
        audio_length=mm.families.qwen_audio.audio_length(),
    )
    return MediaFamily(processor, text)


def qwen2_5_omni_with_sound(**settings: Any) -> MediaFamily:
    """The sound of a video stands between its frames."""
    family = qwen2_5_omni(**settings)
    text = replace(family.text, video_length=mm.families.qwen_omni.video_length())
    return replace(family, text=text)


def qwen3_omni(**settings: Any) -> MediaFamily:
    """The sound of a video stands between its frames."""
    tokenizer = qwen_tokens(byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL))
    pictures = transformers.Qwen2VLImageProcessor(patch_size=16, min_pixels=2**16, max_pixels=2**18)
    videos = {"patch_size": 16, "cap_pixels_per_frame": False, **settings}
    processor = transformers.Qwen3OmniMoeProcessor(
        pictures,
        transformers.Qwen2VLVideoProcessor(**videos),
        transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer,
    )
    length = mm.families.qwen_omni.qwen3_video_length(
        audio_token="<|AUDIO|>",
        audio_start_token="<|audio_bos|>",
        audio_end_token="<|audio_eos|>",
    )
    text = TextDecoder(
        tokenizer,
        200_000,
        **QWEN_TEXT,
        image_length=mm.families.qwen_vl.image_length(patch_size=16),
        video_length=length,
        audio_token="<|AUDIO|>",
        audio_length=mm.families.qwen_omni.qwen3_audio_length(),
    )
    return MediaFamily(processor, text)


def qwen2_5_omni(**settings: Any) -> MediaFamily:
    tokenizer = qwen_tokens(byte_chat(SEEING_TEMPLATE, MEDIA_SPECIAL))
    processor = transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(max_pixels=200_000),
        transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **settings),
        transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=40),
        tokenizer,
    )
    text = TextDecoder(
        tokenizer,
        200_000,
        **QWEN_TEXT,
        image_length=mm.families.qwen_vl.image_length(),
        video_length=mm.families.qwen_vl.video_length(),
        audio_token="<|AUDIO|>",
        audio_length=mm.families.qwen_audio.audio_length(),
    )
    return MediaFamily(processor, text)
