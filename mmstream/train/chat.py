"""Chat models, for the training loop: Qwen-VL with images and videos as its processor makes them.

    models.open_model -> `load_chat`, `chat_decode`

The folder's processor says how large images and frames are, and how many frames a video has. So a
batch has media of many sizes, and `mm.model_inputs` arranges them.

The loss is a sum over the tokens of the assistant, so it can be cut into micro-batches and ranks. A
batch without any image or video gets a blank image from `model_inputs`, so that every parameter has
a gradient on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmstream._torchvision import import_torchvision
from mmstream.batching.valid import next_tokens, summed_loss, target_weights
from mmstream.errors import ConfigError
from mmstream.families import qwen_vl
from mmstream.train.inputs import model_inputs
from mmstream.train.tokenizer import load_pretrained, read_json
from mmstream.types import IGNORED_LABEL, Batch

if TYPE_CHECKING:
    from mmstream.decoding.decode import Decode

CHAT_FAMILIES = tuple(qwen_vl.FAMILIES)
"""The ``model_type`` of models whose processors say how images and videos are decoded."""


class ChatModel(nn.Module):
    """A vision-language model whose forward pass returns the summed loss of the label tokens.

    Args:
        vlm: a `transformers` model for image-text-to-text that `model_inputs` knows.
    """

    separable = True
    takes = "conversations with images; a Qwen-VL, saved with its processor, videos too"

    def __init__(self, vlm: Any) -> None:
        super().__init__()
        self.vlm = vlm

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight): the summed loss and its number of tokens, float32 scalars.

        Args:
            batch: ids, mask, labels and normalised media, as `mm.to_device` returns them, with or
                without padding.

        Raises:
            ConfigError: the media do not fit the model.
        """
        inputs = model_inputs(batch, self.vlm)
        targets = inputs.pop("labels")[:, 1:]
        logits = self.vlm(**{**inputs, "use_cache": False}).logits[:, :-1]
        return summed_loss(logits, targets, target_weights(batch)), self.weight_of(batch)

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss of a batch, or the sum of their weights.

        The first token of a row or document never counts: no token before it could predict it.
        """
        weights = target_weights(batch)
        if weights is not None:
            return weights.sum()
        return (next_tokens(batch) != IGNORED_LABEL).sum().float()


def load_chat(folder: str, tokenizer: Any) -> ChatModel:
    """Return the chat model that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model, or `tokenizer` belongs to another model.
    """
    import_torchvision()  # transformers imports it too
    from transformers import AutoModelForImageTextToText

    vlm = load_pretrained(
        AutoModelForImageTextToText,
        folder,
        f"{folder}: no vision-language model",
        dtype=torch.float32,
    )
    for kind in ("image", "video"):
        token_id = getattr(vlm.config, f"{kind}_token_id")
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token != f"<|{kind}_pad|>":
            raise ConfigError(
                f"{folder}: {kind}s are token {token_id}, which is {token} in the tokenizer; give "
                "the tokenizer of this model"
            )
    return ChatModel(vlm.train())


def chat_decode(
    tokenizer: Any, folder: str, max_length: int, *, field: str | None = None
) -> Decode:
    """Return the decoders that make the fields that a `ChatModel` reads.

    Args:
        tokenizer: the tokenizer of the model, with its chat template.
        folder: the folder of the model. Its processor says how images and videos are decoded.
        max_length: longest text in tokens, those of media included.
        field: where the text is, as of `TextDecoder`.

    Raises:
        ConfigError: the folder has no processor, or one that the decoders cannot follow.
    """
    import_torchvision()  # transformers imports it too
    from transformers import AutoProcessor

    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.text.decoder import TextDecoder
    from mmstream.decoding.video.decoder import VideoDecoder

    processor = load_pretrained(AutoProcessor, folder, f"{folder}: no processor")
    images, videos = processor.image_processor, processor.video_processor
    for name in ("image_mean", "image_std"):
        if tuple(getattr(images, name)) != tuple(getattr(videos, name)):
            raise ConfigError(f"{folder}: {name} differs between images and videos")
    model_type = read_json(Path(folder, "config.json")).get("model_type")
    video_length = qwen_vl.FAMILIES[str(model_type)].video_length
    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        field=field,
        image_token="<|image_pad|>",
        image_length=qwen_vl.image_length(images.patch_size, images.merge_size),
        video_token="<|video_pad|>",
        video_length=video_length(videos.patch_size, videos.merge_size, videos.temporal_patch_size),
    )
    return Decode(
        image=ImageDecoder.from_processor(images),
        video=VideoDecoder.from_processor(videos),
        text=text,
    )
