"""Vision-language models' processors of transformers, and the decoders that do without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image

import mmstream as mm
from mmstream import Decode, ImageDecoder, TextDecoder
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.text.placeholders import ImageLength
from mmstream.families.family import import_torchvision
from tests.helpers.chats import LLAVA, QWEN_VL, SPECIAL, VICUNA, assistant, byte_chat, user
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import encoded

import_torchvision()
import transformers  # noqa: E402

SIZES = [(288, 191), (191, 288), (640, 480), (333, 777), (1000, 120), (30, 31), (57, 900),
         (504, 504), (673, 671), (1344, 336), (336, 1009), (42, 70)]  # fmt: skip
"""Width and height."""

PICTURES = [
    encoded(Image.open(path).convert("RGB").resize(size), kind)
    for path, size, kind in zip(PHOTOS, SIZES, ["jpeg", "png", "webp"] * 4, strict=False)
]
MARKED = "<|vision_start|><|image_pad|><|vision_end|>"
INTERN_TOKENS = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>",
                 "video": "<video>"}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A processor of transformers, and how we do without it."""

    processor: Any
    processor_template: str
    """Writes the one token that the processor replaces."""
    decode: Decode


def qwen(**settings: Any) -> Family:
    tokenizer = byte_chat(QWEN_VL, [*SPECIAL, "<|video_pad|>"])
    pictures = transformers.Qwen2VLImageProcessor(**settings)
    videos = transformers.Qwen2VLVideoProcessor()
    length = mm.families.qwen_vl.image_length(pictures.patch_size, pictures.merge_size)
    text = TextDecoder(tokenizer, 20_000, image_token="<|image_pad|>", image_length=length)
    processor = transformers.Qwen2VLProcessor(pictures, tokenizer, videos)
    return Family(
        processor, QWEN_VL, Decode(image=ImageDecoder.from_processor(pictures), text=text)
    )


def llava_next() -> Family:
    tokenizer = byte_chat(LLAVA)
    pictures = transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}, crop_size=336)
    text = TextDecoder(tokenizer, 20_000, image_length=mm.families.llava.next_image_length())
    processor = transformers.LlavaNextProcessor(
        pictures,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return Family(processor, LLAVA, Decode(image=ImageDecoder.from_processor(pictures), text=text))


def llava_onevision(side: int = 384, **settings: Any) -> Family:
    tokenizer = byte_chat(LLAVA, [*SPECIAL, "<video>"])
    pictures = transformers.LlavaOnevisionImageProcessor(
        size={"height": side, "width": side}, **settings
    )
    text = TextDecoder(tokenizer, 20_000, image_length=mm.families.llava.onevision_image_length())
    processor = transformers.LlavaOnevisionProcessor(
        pictures,
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(),
        num_image_tokens=(side // 14) ** 2,
        vision_feature_select_strategy="full",
    )
    return Family(processor, LLAVA, Decode(image=ImageDecoder.from_processor(pictures), text=text))


def intern_vl() -> Family:
    template = QWEN_VL.replace(MARKED, "<img><IMG_CONTEXT></img>")
    tokenizer = byte_chat(template, [*SPECIAL, *INTERN_TOKENS.values()])
    for name, token in INTERN_TOKENS.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    pictures = transformers.GotOcr2ImageProcessor(
        size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=12
    )
    length = mm.families.internvl.image_length()
    text = TextDecoder(tokenizer, 20_000, image_token="<IMG_CONTEXT>", image_length=length)
    videos = transformers.InternVLVideoProcessor()
    processor = transformers.InternVLProcessor(pictures, tokenizer, videos)
    template = QWEN_VL.replace(MARKED, "<IMG_CONTEXT>")
    return Family(
        processor, template, Decode(image=ImageDecoder.from_processor(pictures), text=text)
    )


def seeing(
    token: str,
    length: Any,
    make: Callable[[Any], Any],
    marks: tuple[str, ...] = (),
    written: str = "",
    template: str = QWEN_VL,
) -> Family:
    """A family whose template writes one token for a picture, or this token between others."""
    template = template.replace(MARKED, written or token)
    tokenizer = byte_chat(template, [*SPECIAL, token, *marks])
    processor = make(tokenizer)
    text = TextDecoder(tokenizer, 20_000, image_token=token, image_length=length)
    return Family(
        processor, template, Decode(image=ImageDecoder.from_processor(processor), text=text)
    )


def glm_v(**settings: Any) -> Family:
    pictures = transformers.Glm4vImageProcessor(
        size={"shortest_edge": 112 * 112, "longest_edge": 400_000}, **settings
    )
    marks = ("<|begin_of_image|>", "<|end_of_image|>")
    return seeing(
        "<|image|>",
        mm.families.qwen_vl.image_length(),
        lambda tokenizer: transformers.Glm4vProcessor(
            pictures, tokenizer, transformers.Glm4vVideoProcessor()
        ),
        marks,
        "<|image|>".join(marks),
    )


def gemma3(side: int = 56, length: int = 4, **settings: Any) -> Family:
    """The template writes the image token, that of the processor the token before it."""
    pictures = transformers.Gemma3ImageProcessor(size={"height": side, "width": side})
    settings |= {"pan_and_scan_min_crop_size": 16}

    def make(tokenizer: Any) -> Any:
        tokens = {"boi": "<start_of_image>", "image": "<image_soft_token>", "eoi": "<end_of_image>"}
        for name, token in tokens.items():
            setattr(tokenizer, f"{name}_token", token)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        processor = transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=length)
        processor.images_kwargs = {**processor.images_kwargs, **settings}
        return processor

    family = seeing(
        "<image_soft_token>",
        mm.families.gemma3.image_length(length),
        make,
        ("<start_of_image>", "<end_of_image>"),
    )
    template = QWEN_VL.replace(MARKED, "<start_of_image>")
    return replace(family, processor_template=template)


def pixtral(side: int = 504, patch_size: int = 14, merge_size: int = 2) -> Family:
    pictures = transformers.PixtralImageProcessor(
        size={"longest_edge": side}, patch_size={"height": patch_size, "width": patch_size}
    )
    return seeing(
        "[IMG]",
        mm.families.mistral3.image_length(patch_size, merge_size),
        lambda tokenizer: transformers.PixtralProcessor(
            pictures, tokenizer, patch_size, merge_size
        ),
        ("[IMG_BREAK]", "[IMG_END]"),
    )


PREFIX_AND_SUFFIX = (
    "{% for m in messages %}{% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
    "{% if m.role == 'user' %}{{ bos_token }}{% endif %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    "{{ '\n' if m.role == 'user' else eos_token }}{% endfor %}"
)


def paligemma() -> Family:
    """Pictures of 56 pixels, which take 16 tokens."""
    pictures = transformers.SiglipImageProcessor(size={"height": 56, "width": 56})
    pictures.image_seq_length = 16
    return seeing(
        "<image>",
        16,
        lambda tokenizer: transformers.PaliGemmaProcessor(pictures, tokenizer),
        template=PREFIX_AND_SUFFIX,
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "qwen2-vl": partial(qwen, max_pixels=200_000),
    "qwen3-vl": partial(qwen, patch_size=16, min_pixels=2**16, max_pixels=2**18),
    "llava-next": llava_next,
    "llava-onevision": llava_onevision,
    "internvl": intern_vl,
    "glm4v": glm_v,
    "gemma3": partial(gemma3, do_pan_and_scan=True),
    "mistral3": pixtral,
}


def conversation(*pictures: bytes) -> dict[str, Any]:
    """A sample of three pictures, two of them in the middle of a turn and one in the next."""
    image = [{"type": "image", "field": f"{i}.jpg"} for i in range(3)]
    word = [{"type": "text", "text": text} for text in ("first ", " then ", "again ", " so?")]
    messages = [
        user([word[0], image[0], word[1], image[1]]),
        assistant([{"type": "text", "text": "a cat"}]),
        user([word[2], image[2], word[3]]),
        assistant([{"type": "text", "text": "a mat"}]),
    ]
    fields = {f"{i}.jpg": picture for i, picture in enumerate(pictures)}
    return {"json": {"messages": messages}, **fields}


def per_pixel(shape: ImageShape) -> int:
    """Of a native picture: a number that another shape does not have."""
    return shape.height * 3 + shape.width


def native(template: str = VICUNA, length: int | ImageLength = per_pixel, **options: Any) -> Decode:
    token = "<|image_pad|>" if template == QWEN_VL else "<image>"
    settings = {"max_length": 20_000, "image_token": token, "image_length": length, **options}
    return Decode(image=ImageDecoder(), text=TextDecoder(byte_chat(template), **settings))


def num_image_tokens(decode: Decode, tokens: dict[str, Any]) -> int:
    tokenizer = decode.text.tokenizer
    image_id = tokenizer.convert_tokens_to_ids(decode.text.image_token)
    return int((tokens["input_ids"] == image_id).sum())
