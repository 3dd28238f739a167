"""Which model is trained, and what it wants to be fed: the small ones, or a folder's.

For the loop a model is a module with the two methods of `Trainable`. To train one of your own,
write those and hand it to `mmstream.train.loop.fit`.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.fields import image_fields
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.sample import Decode
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.device.to_device import Normalize
from mmstream.errors import ConfigError, MMStreamError
from mmstream.train import clip
from mmstream.train.config import TrainConfig
from mmstream.train.tokenizer import open_tokenizer
from mmstream.types import Batch

__all__ = [
    "CLIP_NORMALIZE",
    "Trainable",
    "build_model",
    "decode_for",
    "hint_at_model",
    "normalize_for",
    "open_model_tokenizer",
]

CLIP_NORMALIZE = Normalize(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
"""OpenAI CLIP's pixel statistics, which Llava's vision tower has too."""

SMALL_SIZE = 64


class Trainable(Protocol):
    """What the loop asks of an `nn.Module`.

    The loss of a global step is the sum of loss_sum over ranks, batches and micro-batches, divided
    by the sum of weight: rows for a mean over rows, label tokens for a mean over tokens. Rows with
    ``__valid__`` False add to neither. Every trained parameter takes part in each forward, if only
    times zero: DDP waits for its gradient. ``separable = False`` says that the loss of a batch is
    not the mean over its parts.
    """

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight), two scalars, of a batch on the device or a part of one."""

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the weight that forward will give this batch, from the batch alone."""


def open_model_tokenizer(config: TrainConfig) -> Any:
    """Return the tokenizer: as told, else the model folder's, else bytes (with turns for a VLM)."""
    return open_tokenizer(config.tokenizer or _folder(config), chat=_kind(config) == "vlm")


def build_model(config: TrainConfig, tokenizer: Any, world_size: int = 1) -> nn.Module:
    """Return the model of ``config.model`` in float32 on the CPU, the same on every rank.

    Args:
        config: settings.
        tokenizer: of `transformers`; a small model's vocabulary is its length.
        world_size: number of ranks that share the global batch.

    Raises:
        ConfigError: no such model, its folder has none of the two kinds, or it takes images of
            another size than `config` says.
    """
    folder = _folder(config)
    small = {
        "image_size": config.image_size or SMALL_SIZE,
        "max_length": _max_length(config),
        "seed": config.seed,
    }
    model: Any
    if _kind(config) == "vlm":
        from mmstream.train import vlm

        if folder is None:
            model = vlm.small_vlm(tokenizer=tokenizer, **small)
        else:
            model = vlm.load_vlm(folder, tokenizer=tokenizer, image_size=config.image_size)
    else:
        if folder is None:
            inner = clip.small_clip(vocab_size=len(tokenizer), **small)
        else:
            inner = clip.load_clip(folder)
        model = clip.ContrastiveClip(inner, config.most_rows(world_size))
    if config.image_size not in (None, model.image_size):
        raise ConfigError(
            f"train: {folder} takes images of {model.image_size} pixels, not {config.image_size}"
        )
    return model  # type: ignore[no-any-return]


def decode_for(config: TrainConfig, tokenizer: Any, model: Any) -> Decode:
    """Return the decoders that make what a model of `build_model` reads."""
    if _kind(config) == "vlm":
        from mmstream.train import vlm

        return vlm.vlm_decode(tokenizer, model.image_size, model.image_length, _max_length(config))
    return Decode(
        image=ImageDecoder(size=model.image_size),
        text=TextDecoder(tokenizer, max_length=_max_length(config), padding="longest"),
    )


def normalize_for(config: TrainConfig) -> Normalize:
    """Return the pixel statistics that the model was trained with; CLIP's where nothing says so."""
    folder = _folder(config)
    path = None if folder is None else Path(folder, "preprocessor_config.json")
    if path is None or not path.exists():
        return CLIP_NORMALIZE
    about = json.loads(path.read_text(encoding="utf-8"))
    if "image_mean" not in about or "image_std" not in about:
        return CLIP_NORMALIZE
    return Normalize(tuple(about["image_mean"]), tuple(about["image_std"]))


def hint_at_model(config: TrainConfig, data: Dataset | Mixture) -> str:
    """Return what to add to an error of CLIP's where a VLM could take the data; else nothing.

    A VLM needs no such hint: captions with an image are short chats to it.
    """
    if _kind(config) == "vlm":
        return ""
    for dataset in data.datasets.values() if isinstance(data, Mixture) else [data]:
        try:
            if not all(map(_is_captioned, islice(dataset, 16))):
                return '; model="vlm" takes chats, with any number of images'
        except (MMStreamError, OSError, ValueError):  # the error itself says what is wrong
            continue
    return ""


def _is_captioned(sample: dict[str, Any]) -> bool:
    """Tell whether CLIP can take a raw sample: one image, one text."""
    return len(image_fields(sample)) == 1 and "txt" in sample


def _folder(config: TrainConfig) -> str | None:
    return None if config.model in ("clip", "vlm") else config.model


def _about(folder: str) -> dict[str, Any]:
    try:
        about = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {folder} is not clip, vlm or a model's folder: {error}"
        ) from None
    if not isinstance(about, dict) or "vision_config" not in about:
        raise ConfigError(
            f"model: {folder} is no CLIP or Llava-style model: it has no vision tower"
        )
    return about


def _kind(config: TrainConfig) -> str:
    folder = _folder(config)
    if folder is None:
        return config.model
    return "clip" if _about(folder).get("model_type") == "clip" else "vlm"


def _max_length(config: TrainConfig) -> int:
    return config.max_length or (512 if _kind(config) == "vlm" else 64)
