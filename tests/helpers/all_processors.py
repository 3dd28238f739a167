"""Every processor of the installed transformers that can be built without a download."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from mmstream.families.family import import_torchvision
from tests.helpers.chats import SPECIAL, byte_chat
from tests.helpers.media_families import AUDIO, MEDIA_SPECIAL, SEEING_TEMPLATE, VIDEO

import_torchvision()
import transformers  # noqa: E402
from transformers.models.auto import (  # noqa: E402
    feature_extraction_auto,
    image_processing_auto,
    video_processing_auto,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # noqa: E402

NAMES = ("image", "video", "audio", "boi", "eoi", "boa", "eoa", "bov", "eov", "vision_bos",
         "vision_eos", "vision_start", "vision_end", "audio_bos", "audio_eos", "start_image",
         "end_image", "context_image", "image_start", "image_end", "image_boundary", "fake_image",
         "image_break", "cls", "sep", "mask", "im_patch", "image_wrapper", "tile_sep",
         "img_start", "img_end", "img_context", "speech", "video_start", "video_end",
         "img_line_break", "img_patch", "tile", "tile_global", "start_of_img", "end_of_img",
         "eof", "eol",
         "img_eol", "grid_bos", "grid_eos", "slice_start", "slice_end", "image_id_start",
         "image_id_end", "audio_prompt")  # fmt: skip
TOKENS = [f"<{name}>" for name in NAMES]


def tokenizer(more: tuple[str, ...]) -> Any:
    """A tokenizer with a token for whatever a processor may look for."""
    made = byte_chat("", [*dict.fromkeys((*SPECIAL, *MEDIA_SPECIAL, *TOKENS, *more))])
    made.chat_template = None
    for name, token in zip(NAMES, TOKENS, strict=True):
        setattr(made, f"{name}_token", token)
        setattr(made, f"{name}_token_id", made.convert_tokens_to_ids(token))
    return made


def part_of(attribute: str, model_type: str, more: tuple[str, ...]) -> Any:
    """A part of a processor with the settings that its class has by default."""
    if "tokenizer" in attribute:
        return tokenizer(more)
    mapping = {
        "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
    }.get(attribute, feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES)
    names = mapping[model_type]
    if isinstance(names, dict):
        names = names.get("torchvision") or next(iter(names.values()))
    return getattr(transformers, names)()


def tokens_of(processor: Any) -> dict[str, str]:
    """By kind of media: what stands for it in a text for a processor."""
    tokens = {
        kind: getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio")
    }
    return {kind: token for kind, token in tokens.items() if isinstance(token, str)}


def template_of(tokens: dict[str, str]) -> str:
    """A chat template that writes these tokens."""
    written = {kind: tokens.get(kind, "") for kind in ("image", "video", "audio")}
    return (
        SEEING_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", written["image"])
        .replace(VIDEO, written["video"])
        .replace(AUDIO, written["audio"])
    )


def settings_of(kind: Any) -> dict[str, Any]:
    """What models set and a class leaves open."""
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default",
                "num_image_tokens": 729}  # fmt: skip
    parameters = inspect.signature(kind).parameters
    return {n: v for n, v in settings.items() if n in parameters and not parameters[n].default}


def processors() -> Iterator[tuple[str, Any]]:
    """Yield the name of each class, and a processor of it, or why it cannot be built here."""
    for name, model_type in {name: key for key, name in PROCESSOR_MAPPING_NAMES.items()}.items():
        try:
            kind = getattr(transformers, name)
            built, tokens = None, dict[str, str]()
            while built is None or tokens != tokens_of(built):  # it may look for other tokens
                tokens = {} if built is None else tokens_of(built)
                more = tuple(tokens.values())
                names = kind.get_attributes()
                parts = {each: part_of(each, model_type, more) for each in names}
                built = kind(**parts, **settings_of(kind))
        except Exception as error:
            yield name, error
            continue
        if tokens and "chat_template" in inspect.signature(kind).parameters:
            built.chat_template = template_of(tokens)
        yield name, built
