"""The second model of the loop: a small Llava with random weights, or a pretrained model.

Vision tower, projector, causal language model; the loss is over the tokens that the assistant says.
It is a sum over tokens, so it may be cut into micro-batches and ranks at will: the loss of a global
batch is the sum of all parts' losses by the sum of all parts' weights, whatever the cut.

Two things would hang or stop DDP, which waits for the gradient of every parameter on every rank:

- A batch without a single image leaves tower and projector out. Then they look at one blank image,
  and what they see enters the loss times zero.
- Llava takes the vision of a layer before the last (CLIP's last but one), so what lies behind that
  layer never has a gradient. It is found by looking at the graph once, and frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmstream._torchvision import import_torchvision
from mmstream.errors import ConfigError
from mmstream.train.tokenizer import image_token_of
from mmstream.train.vision import choose_image_size, image_inputs, look
from mmstream.types import IGNORED_LABEL

if TYPE_CHECKING:
    from mmstream.decoding.sample import Decode

__all__ = ["ConversationVlm", "load_vlm", "small_vlm", "vlm_decode"]

PATCH_SIZE = 16
"""Of the small model, in pixels."""


class ConversationVlm(nn.Module):
    """A vision-language model whose forward is the summed loss of the labelled tokens.

    Args:
        vlm: a `transformers` model for image-text-to-text that puts a fixed number of vectors in
            place of each image of one size, such as Llava or Qwen-VL (see `mmstream.train.vision`).
        image_size: side of the images in pixels; None: the model's own.

    Attributes:
        image_size: side of the images in pixels.
        image_length: tokens that an image takes: `TextDecoder`'s ``image_length``.
        image_token_id: the token that an image's vectors replace.
        separable: the loss of a batch is the sum of the losses of its rows.

    Raises:
        ConfigError: the model wants its images in another form.
    """

    separable = True

    def __init__(self, vlm: Any, image_size: int | None = None) -> None:
        super().__init__()
        self.vlm = vlm
        self.image_token_id = int(vlm.config.image_token_id)
        self.image_size = choose_image_size(vlm, image_size)
        try:
            vectors, seen = look(vlm, self._blank_image())
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            name = type(vlm).__name__
            raise ConfigError(f"{name}: cannot be given plain images: {error}") from error
        self.image_length = len(vectors)
        _freeze_unseen(vlm, seen)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the summed loss in float32 and the number of tokens it is over, both scalars.

        Args:
            batch: ``input_ids``, ``attention_mask`` and ``labels``, int64 [B, T], padded on either
                side; ``__valid__``, bool [B], rows with False add nothing; ``image``, normalised,
                floating [num_images, 3, S, S], in the order of rows. None, or an empty list of
                images is a batch of text.

        Raises:
            ConfigError: images that differ in size, or were not normalised.
            ValueError: image tokens and images do not match.
        """
        images = _images_of(batch)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if images is not None:
            inputs |= image_inputs(self.vlm, images)
        if "image_grid_thw" in inputs:  # by which Qwen-VL tells images from text
            inputs["mm_token_type_ids"] = (batch["input_ids"] == self.image_token_id).int()
        logits = self.vlm(**inputs, use_cache=False).logits[:, :-1]
        asked = _asked(batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            asked.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        if images is None:
            loss = loss + 0.0 * look(self.vlm, self._blank_image())[1]
        return loss, self.weight_of(batch)

    def weight_of(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of tokens that the loss of a batch is over: a float32 scalar.

        The first token of a row is never counted: nothing stands before it to predict it from.
        """
        return (_asked(batch) != IGNORED_LABEL).sum().float()

    def _blank_image(self) -> Tensor:
        side = self.image_size
        return torch.zeros(1, 3, side, side, dtype=self.vlm.dtype, device=self.vlm.device)


def small_vlm(*, image_size: int, tokenizer: Any, max_length: int, seed: int) -> ConversationVlm:
    """Return a Llava of 0.8 million weights (and the vocabulary's), random from `seed`.

    The same on every rank; torch's global random state is left as it was. No dropout. 60 steps of
    16 conversations about the embedded corpus (AdamW, 3e-3) bring the loss of a token from 5.6,
    that of chance, to 2.4 in about 6 s of one core; 300 steps to 0.9.

    Args:
        image_size: side of the images in pixels, a multiple of 16; each patch of 16 is a token.
        tokenizer: with an image token.
        max_length: longest text in tokens, those of images included.
        seed: of the weights.
    """
    import_torchvision()  # which transformers imports in its turn
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
        vision_feature_layer=-1,  # of two layers none is left out
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConversationVlm(LlavaForConditionalGeneration(config))


def load_vlm(
    folder: str, *, tokenizer: Any = None, image_size: int | None = None
) -> ConversationVlm:
    """Return a pretrained model from a local folder, in float32.

    Nothing is downloaded, and code in the folder is never run.

    Args:
        folder: as `save_pretrained` writes it.
        tokenizer: checked to write images as the model reads them.
        image_size: side of the images in pixels, where the model leaves it free; None: its own.

    Raises:
        ConfigError: no model that `ConversationVlm` can take, or another tokenizer's.
    """
    import_torchvision()
    from transformers import AutoModelForImageTextToText

    try:
        vlm = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no vision-language model: {error}") from error
    model = ConversationVlm(vlm.train(), image_size)
    if tokenizer is not None:
        token = image_token_of(tokenizer)
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id != model.image_token_id:
            raise ConfigError(
                f"{folder}: images are token {model.image_token_id}, the tokenizer's {token} is "
                f"{token_id}"
            )
    return model


def vlm_decode(tokenizer: Any, image_size: int, image_length: int, max_length: int) -> Decode:
    """Return the decoders whose samples a `ConversationVlm` takes.

    Args:
        tokenizer: with a chat template and an image token.
        image_size: side of the images in pixels, the model's.
        image_length: tokens of an image, the model's.
        max_length: longest text in tokens, those of images included.
    """
    from mmstream.decoding.image.decoder import ImageDecoder
    from mmstream.decoding.sample import Decode
    from mmstream.decoding.text.decoder import TextDecoder

    text = TextDecoder(
        tokenizer,
        max_length=max_length,
        image_token=image_token_of(tokenizer),
        image_length=image_length,
    )
    return Decode(image=ImageDecoder(size=image_size), text=text)


def _asked(batch: dict[str, Any]) -> Tensor:
    """Return the token to be predicted at each place but the last, int64 [B, T - 1], or -100."""
    asked: Tensor = batch["labels"][:, 1:]
    return asked.masked_fill(~batch["__valid__"][:, None], IGNORED_LABEL)


def _images_of(batch: dict[str, Any]) -> Tensor | None:
    images = batch.get("image")
    if images is None or len(images) == 0:
        return None
    if not isinstance(images, Tensor):
        raise ConfigError("images of several sizes: give ImageDecoder a size")
    if not images.is_floating_point():
        raise ConfigError("images of whole numbers: give to_device normalize=")
    return images


def _freeze_unseen(vlm: Any, seen: Tensor) -> None:
    """Freeze what lies between images and text but never reaches the text."""
    language = [*vlm.get_decoder().parameters(), *vlm.get_output_embeddings().parameters()]
    known = {id(parameter) for parameter in language}
    vision = [p for p in vlm.parameters() if id(p) not in known and p.requires_grad]
    gradients = torch.autograd.grad(seen, vision, allow_unused=True)
    for parameter, gradient in zip(vision, gradients, strict=True):
        if gradient is None:
            parameter.requires_grad_(False)
