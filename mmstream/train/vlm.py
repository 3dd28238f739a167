"""Vision-language models for the training loop: a small Llava with random weights, or a folder's.

    models.build_model -> `small_vlm` or `load_vlm` -> `ConversationVlm`

The model is a vision tower, a projector and a causal language model. Its loss is a sum over the
tokens of the assistant, so it can be cut into micro-batches and ranks.

DDP waits for the gradient of every parameter on every rank. Two cases would make it hang:

- A batch without images does not use the vision tower and the projector. Then they get one blank
  image, and their output enters the loss multiplied by zero.
- Llava reads the output of an inner layer of the vision tower, so the layers behind it never have a
  gradient. Those parameters are found once, from the graph of a blank image, and frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmstream._torchvision import import_torchvision
from mmstream.batching.valid import is_flat, next_tokens, target_weights
from mmstream.errors import ConfigError
from mmstream.integrations.summed_loss import summed_loss
from mmstream.train.pretrained import load_pretrained
from mmstream.train.token_loss import text_loss, weight_of_labels
from mmstream.train.tokenizer import image_token_of
from mmstream.train.vision import choose_image_size, embed_images, image_inputs

if TYPE_CHECKING:
    from mmstream.decoding.decode import Decode

__all__ = ["ConversationVlm", "load_vlm", "small_vlm", "vlm_decode"]

PATCH_SIZE = 16
"""Side of the patches of the small model, in pixels."""


class ConversationVlm(nn.Module):
    """A vision-language model whose forward pass returns the summed loss of the label tokens.

    Args:
        vlm: a `transformers` model for image-text-to-text, such as Llava or Qwen-VL. It replaces
            each image of one size by a fixed number of vectors (see `mmstream.train.vision`).
        image_size: side of the square images in pixels. None: the size of the model.

    Attributes:
        image_size: side of the square images in pixels.
        image_length: tokens per image, which `TextDecoder` takes as ``image_length``.
        image_token_id: id of the token that the vectors of an image replace.
        separable: True. The loss of a batch is the sum of the losses of its rows, so a batch may be
            cut into micro-batches.
        takes_flat: True. It takes batches without padding, and packs.

    Raises:
        ConfigError: the model takes images in another form, or of another size.
    """

    separable = True
    takes_flat = True

    def __init__(self, vlm: Any, image_size: int | None = None) -> None:
        super().__init__()
        self.vlm = vlm
        self.image_token_id = int(vlm.config.image_token_id)
        self.image_size = choose_image_size(vlm, image_size)
        try:
            vectors, total = embed_images(vlm, self._blank_image())
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            name = type(vlm).__name__
            raise ConfigError(f"{name}: does not take images in a known form: {error}") from error
        self.image_length = len(vectors)
        _freeze_unused_vision(vlm, total)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight): the summed loss and its number of tokens, float32 scalars.

        Args:
            batch: a batch without padding, whose inputs `mmstream.integrations.model_inputs`
                makes. Or a dict with these fields:

                - input_ids, attention_mask, labels: int64 [B, T], padded on either side
                - __valid__: bool [B]; rows with False do not count
                - image: normalised, floating [num_images, 3, S, S], in the order of rows; missing,
                  None or empty in a batch without images

        Raises:
            ConfigError: the images differ in size, or are not normalised.
            ValueError: image tokens and images do not match.
        """
        if is_flat(batch):
            return text_loss(self.vlm, batch)
        images = _images_of(batch)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if images is not None:
            inputs |= image_inputs(self.vlm, images)
        if "image_grid_thw" in inputs:  # Qwen-VL then needs to know which tokens are images
            inputs["mm_token_type_ids"] = (batch["input_ids"] == self.image_token_id).int()
        logits = self.vlm(**inputs, use_cache=False).logits[:, :-1]
        loss = summed_loss(logits, next_tokens(batch), target_weights(batch))
        if images is None:
            loss = loss + 0.0 * embed_images(self.vlm, self._blank_image())[1]
        return loss, self.weight_of(batch)

    def weight_of(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of tokens in the loss of a batch, or the sum of their weights.

        The first token of a row or document never counts: no token before it could predict it.
        """
        return weight_of_labels(batch)

    def _blank_image(self) -> Tensor:
        side = self.image_size
        return torch.zeros(1, 3, side, side, dtype=self.vlm.dtype, device=self.vlm.device)


def small_vlm(*, image_size: int, tokenizer: Any, max_length: int, seed: int) -> ConversationVlm:
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
        return ConversationVlm(LlavaForConditionalGeneration(config))


def load_vlm(
    folder: str, *, tokenizer: Any = None, image_size: int | None = None
) -> ConversationVlm:
    """Return the pretrained model that is saved in a local folder, in float32.

    Nothing is downloaded, and no code in the folder is run.

    Args:
        folder: the folder of a model, as `save_pretrained` writes it.
        tokenizer: if given, its image token must be that of the model.
        image_size: side of the square images in pixels, for models that take several sizes. None:
            the size of the model.

    Raises:
        ConfigError: there is no model that `ConversationVlm` takes, or `tokenizer` belongs to
            another model.
    """
    import_torchvision()
    from transformers import AutoModelForImageTextToText

    vlm = load_pretrained(
        AutoModelForImageTextToText,
        folder,
        f"{folder}: no vision-language model",
        dtype=torch.float32,
    )
    model = ConversationVlm(vlm.train(), image_size)
    if tokenizer is not None:
        token = image_token_of(tokenizer)
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id != model.image_token_id:
            raise ConfigError(
                f"{folder}: images are token {model.image_token_id}, the tokenizer's {token} is "
                f"{token_id}; give the tokenizer of this model"
            )
    return model


def vlm_decode(
    tokenizer: Any,
    image_size: int,
    image_length: int,
    max_length: int,
    *,
    field: str | None = None,
) -> Decode:
    """Return the decoders that make the fields that a `ConversationVlm` reads.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template and an image token.
        image_size: side of the square images of the model, in pixels.
        image_length: tokens per image of the model.
        max_length: longest text in tokens, image tokens included.
        field: where the text is, as of `TextDecoder`.
    """
    from mmstream.decoding.decode import Decode
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.text.decoder import TextDecoder

    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        image_token=image_token_of(tokenizer),
        image_length=image_length,
        field=field,
    )
    return Decode(image=ImageDecoder(size=image_size), text=text)


def _images_of(batch: dict[str, Any]) -> Tensor | None:
    """Return the images of a batch; None if it has none."""
    images = batch.get("image")
    if images is None or len(images) == 0:
        return None
    if not isinstance(images, Tensor):
        raise ConfigError("train: the images differ in size; give ImageDecoder a size")
    if not images.is_floating_point():
        raise ConfigError("train: the images are not normalised; give to_device normalize=")
    return images


def _freeze_unused_vision(vlm: Any, total: Tensor) -> None:
    """Freeze the vision parameters that do not affect `total`, the sum of all image vectors."""
    language = [*vlm.get_decoder().parameters(), *vlm.get_output_embeddings().parameters()]
    language_ids = {id(parameter) for parameter in language}
    vision = [
        parameter
        for parameter in vlm.parameters()
        if id(parameter) not in language_ids and parameter.requires_grad
    ]
    gradients = torch.autograd.grad(total, vision, allow_unused=True)
    for parameter, gradient in zip(vision, gradients, strict=True):
        if gradient is None:
            parameter.requires_grad_(False)
