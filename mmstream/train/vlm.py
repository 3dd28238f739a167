"""Vision-language models with images of one size: a small Llava with random weights, or a folder's.

    models.open_model -> `small_vlm` or `load_vlm`, `vlm_decode`

The model is a vision tower, a projector and a causal language model (see `chat.ChatModel`).

DDP waits for the gradient of every parameter on every rank. Llava reads the output of an inner
layer of the vision tower, so the layers behind it never have a gradient. Those parameters are found
once, from the graph of a blank image, and frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mmstream._torchvision import import_torchvision
from mmstream.errors import ConfigError
from mmstream.train.chat import ChatModel
from mmstream.train.tokenizer import image_token_of, load_pretrained

if TYPE_CHECKING:
    from mmstream.decoding.decode import Decode

PATCH_SIZE = 16
"""Side of the patches of the small model, in pixels."""


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
        name = type(vlm).__name__
        try:
            side = vlm.config.vision_config.image_size
            self.image_size = int(side[0] if isinstance(side, list | tuple) else side)
            blank = torch.zeros(1, 3, self.image_size, self.image_size, dtype=vlm.dtype)
            features = vlm.get_image_features(pixel_values=blank)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}: does not take images in a known form: {error}") from error
        vectors = torch.cat(list(getattr(features, "pooler_output", features)))
        self.image_length = len(vectors)
        language = [*vlm.get_decoder().parameters(), *vlm.get_output_embeddings().parameters()]
        language_ids = {id(parameter) for parameter in language}
        vision = [parameter for parameter in vlm.parameters() if id(parameter) not in language_ids]
        gradients = torch.autograd.grad(vectors.float().sum(), vision, allow_unused=True)
        for parameter, gradient in zip(vision, gradients, strict=True):
            if gradient is None:
                parameter.requires_grad_(False)


def small_vlm(*, image_size: int, tokenizer: Any, max_length: int, seed: int) -> OneSizeModel:
    """Return a Llava with random weights: 0.8 million, and those of the token embeddings.

    The weights are the same on every rank, and the global random state of torch does not change.
    There is no dropout. On the embedded corpus, with 16 conversations per step and AdamW at 3e-3,
    the loss per token falls from 5.6 (chance) to 2.4 in 60 steps, and to 0.9 in 300. 60 steps take
    about 6 s on one core.

    Args:
        image_size: side of the square images in pixels, a multiple of 16. Each patch of 16 x 16
            pixels is a token.
        tokenizer: a `transformers` tokenizer with an image token.
        max_length: longest text in tokens, image tokens included.
        seed: fixes the weights.
    """
    import_torchvision()  # transformers imports it too
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tower = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**tower, image_size=image_size, patch_size=PATCH_SIZE),
        text_config=LlamaConfig(
            **tower,
            vocab_size=len(tokenizer),
            max_position_embeddings=max_length,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(image_token_of(tokenizer)),
        image_seq_length=(image_size // PATCH_SIZE) ** 2,
        vision_feature_layer=-1,  # the last layer, so that both layers are used
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OneSizeModel(LlavaForConditionalGeneration(config))


def load_vlm(folder: str, *, tokenizer: Any) -> OneSizeModel:
    """Return the pretrained model that is saved in a local folder, in float32.

    Nothing is downloaded, and no code in the folder is run.

    Args:
        folder: the folder of a model, as `save_pretrained` writes it.
        tokenizer: its image token must be that of the model.

    Raises:
        ConfigError: there is no model that `OneSizeModel` takes, or `tokenizer` belongs to another
            model.
    """
    import_torchvision()
    from transformers import AutoModelForImageTextToText

    vlm = load_pretrained(
        AutoModelForImageTextToText,
        folder,
        f"{folder}: no vision-language model",
        dtype=torch.float32,
    )
    token = image_token_of(tokenizer)
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id != vlm.config.image_token_id:
        raise ConfigError(
            f"{folder}: images are token {vlm.config.image_token_id}, the tokenizer's {token} is "
            f"{token_id}; give the tokenizer of this model"
        )
    return OneSizeModel(vlm.train())


def vlm_decode(tokenizer: Any, model: OneSizeModel, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `OneSizeModel` reads.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template and an image token.
        model: says the side of images and their tokens.
        max_length: longest text in tokens, image tokens included.
    """
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.text.decoder import TextDecoder

    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        image_token=image_token_of(tokenizer),
        image_length=model.image_length,
    )
    return Decode(image=ImageDecoder(size=model.image_size), text=text)
