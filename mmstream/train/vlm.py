"""Vision-language models for the training loop: a small Llava with random weights, or a folder's.

    models.open_model -> `small_vlm` or `load_vlm`, `vlm_decode`   (images of one size)
    models.open_model -> `load_chat`, `chat_decode`                (Qwen-VL: images, videos)

The processor of a Qwen-VL says how large images and frames are, and how many frames a video has. So
a batch has media of many sizes, and `mm.model_inputs` arranges them. A batch without any image or
video gets a blank image from it, so that every parameter has a gradient on every rank.

DDP waits for the gradient of every parameter on every rank. Llava reads the output of an inner
layer of the vision tower, so the layers after it never have a gradient. Those parameters are found
once, from the graph of a blank image, and frozen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmstream.batching.valid import next_tokens, summed_loss, target_weights
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import ConfigError
from mmstream.families import qwen_vl
from mmstream.families.family import import_torchvision
from mmstream.train.inputs import model_inputs
from mmstream.train.tokenizer import load_pretrained, read_json
from mmstream.types import IGNORED_LABEL, Batch

CHAT_FAMILIES = tuple(qwen_vl.FAMILIES)
"""The ``model_type`` of models whose processors say how images and videos are decoded."""

PATCH_SIZE = 16
"""Side of the patches of the small model, in pixels."""


class ChatModel(nn.Module):
    """A vision-language model whose forward pass returns the summed loss of the label tokens.

    The loss is a sum over the tokens of the assistant, so it can be cut into micro-batches and
    ranks.

    Args:
        vlm: a `transformers` model for image-text-to-text that `model_inputs` knows.
    """

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


class OneSizeModel(ChatModel):
    """A vision-language model that replaces each square image by a fixed number of vectors.

    Args:
        vlm: a `transformers` model for image-text-to-text, such as Llava.

    Attributes:
        image_size: side of the square images in pixels.
        image_length: tokens per image, which `TextDecoder` takes as ``image_length``.

    Raises:
        ConfigError: the model takes images in another form.
    """

    def __init__(self, vlm: Any) -> None:
        super().__init__(vlm)
        try:
            side = vlm.config.vision_config.image_size
            self.image_size = int(side[0] if isinstance(side, list | tuple) else side)
            blank = torch.zeros(1, 3, self.image_size, self.image_size, dtype=vlm.dtype)
            features = vlm.get_image_features(pixel_values=blank)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(vlm).__name__}: does not take images in a known form: {error}"
            ) from error
        vectors = torch.cat(list(getattr(features, "pooler_output", features)))
        self.image_length = len(vectors)
        language = [*vlm.get_decoder().parameters(), *vlm.get_output_embeddings().parameters()]
        language_ids = {id(parameter) for parameter in language}
        vision = [parameter for parameter in vlm.parameters() if id(parameter) not in language_ids]
        gradients = torch.autograd.grad(vectors.float().sum(), vision, allow_unused=True)
        for parameter, gradient in zip(vision, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)


def small_vlm(*, image_size: int, tokenizer: Any, max_length: int, seed: int) -> OneSizeModel:
    """Return a Llava with random weights: 0.8 million, and those of the token embeddings.

    The weights are the same on every rank, and the global random state of torch does not change.
    There is no dropout. On the embedded corpus, with 16 conversations per step and AdamW at 3e-3,
    the loss per token falls from 5.6 (chance) to 2.4 in 60 steps, and to 0.9 in 300. 60 steps take
    about 6 s on one core.

    Args:
        image_size: side of the square images in pixels, a multiple of 16. Each patch of 16 x 16
            pixels is a token.
        tokenizer: a `transformers` tokenizer with the token ``<image>``.
        max_length: longest text in tokens, image tokens included.
        seed: fixes the weights.
    """
    import_torchvision()  # transformers imports it too
    import transformers

    tower = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **tower, image_size=image_size, patch_size=PATCH_SIZE
        ),
        text_config=transformers.LlamaConfig(
            **tower,
            vocab_size=len(tokenizer),
            max_position_embeddings=max_length,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(image_size // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,  # the last layer, so that both layers are used
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OneSizeModel(transformers.LlavaForConditionalGeneration(config))


def load_vlm(folder: str, *, tokenizer: Any) -> OneSizeModel:
    """Return the pretrained model that is saved in a local folder, in float32.

    Nothing is downloaded, and no code in the folder is run.

    Args:
        folder: the folder of a model, as `save_pretrained` writes it.
        tokenizer: its chat template writes the model's image token.

    Raises:
        ConfigError: there is no model that `OneSizeModel` takes, or `tokenizer` belongs to another
            model.
    """
    return OneSizeModel(_load(folder, tokenizer, "image"))


def vlm_decode(tokenizer: Any, model: OneSizeModel, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `OneSizeModel` reads.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template and an image token.
        model: says the side of images and their tokens.
        max_length: longest text in tokens, image tokens included.
    """
    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        image_token=tokenizer.convert_ids_to_tokens(model.vlm.config.image_token_id),
        image_length=model.image_length,
    )
    return Decode(image=ImageDecoder(size=model.image_size), text=text)


def load_chat(folder: str, tokenizer: Any) -> ChatModel:
    """Return the chat model that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model, or `tokenizer` belongs to another model.
    """
    return ChatModel(_load(folder, tokenizer, "image", "video"))


def _load(folder: str, tokenizer: Any, *kinds: str) -> Any:
    """Return a model. Refuse a tokenizer whose chat template never writes its tokens of media."""
    message = f"{folder}: no vision-language model"
    vlm = load_pretrained("AutoModelForImageTextToText", folder, message, dtype="float32")
    for kind in kinds:
        token_id = getattr(vlm.config, f"{kind}_token_id")
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token not in str(tokenizer.chat_template):
            raise ConfigError(
                f"{folder}: {kind}s are token {token_id}, which is {token} in the tokenizer, and "
                "its chat template never writes it; give the tokenizer of this model"
            )
    return vlm.train()


def chat_decode(
    tokenizer: Any, folder: str, max_length: int, *, field: str | None = None
) -> Decode:
    """Return the decoders that make the fields that a Qwen-VL reads.

    Args:
        tokenizer: the tokenizer of the model, with its chat template.
        folder: the folder of the model. Its processor says how images and videos are decoded.
        max_length: longest text in tokens, those of media included.
        field: where the text is, as of `TextDecoder`.

    Raises:
        ConfigError: the folder has no processor, or one that the decoders cannot follow.
    """
    processor = load_pretrained("AutoProcessor", folder, f"{folder}: no processor")
    images, videos = processor.image_processor, processor.video_processor
    for name in ("image_mean", "image_std"):
        if tuple(getattr(images, name)) != tuple(getattr(videos, name)):
            raise ConfigError(f"{folder}: {name} differs between images and videos")
    model_type = read_json(Path(folder, "config.json")).get("model_type")
    family = qwen_vl.FAMILIES[str(model_type)]
    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        field=field,
        image_token="<|image_pad|>",
        image_length=qwen_vl.image_length(images.patch_size, images.merge_size),
        video_token="<|video_pad|>",
        video_length=family.video_length(
            videos.patch_size, videos.merge_size, videos.temporal_patch_size
        ),
    )
    return Decode(**family.decoders(processor), text=text)
