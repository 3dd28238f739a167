"""Which model is trained, and the decoders that feed it: a small model, or one from a folder.

Four kinds of models are known: "clip", "vlm" (images of one size), "chat" (images and videos as the
folder's processor makes them) and "speech" (Whisper).

    loop.run -> `open_model` -> `small_clip` or `load_clip`, `clip_decode`
                             -> `small_vlm` or `load_vlm`, `vlm_decode`   (images of one size)
                             -> `load_chat`, `chat_decode`                (Qwen-VL: images, videos)
                             -> `load_speech`, `speech_decode`

The loop can train every `nn.Module` with the two methods of `Trainable`. To train your own model,
write these two methods and pass the model to `mmstream.train.train`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mmstream.batching.flat import Flat, Pack
from mmstream.batching.valid import (
    is_flat,
    next_tokens,
    summed_loss,
    target_weights,
    valid_labels,
)
from mmstream.dataset.dataset import Dataset, datasets_of
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.audio import AudioDecoder
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.decode import Decode
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.stored import baked_content
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import ConfigError, escaped
from mmstream.families import qwen_vl
from mmstream.families.family import import_torchvision
from mmstream.loader.device import Normalize
from mmstream.order import Buckets
from mmstream.pipeline import Pipeline
from mmstream.train.config import SMALL_MODELS, TrainConfig
from mmstream.train.inputs import model_inputs
from mmstream.train.tokenizer import image_settings, load_pretrained, open_tokenizer, read_json
from mmstream.types import IGNORED_LABEL, Batch

CLIP_NORMALIZE = Normalize(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
"""Pixel statistics of OpenAI's CLIP, also used by Llava's vision tower."""

PATCH_SIZE = 16
"""Side of the patches of the small models, in pixels."""

SMALL_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
}
"""Of each tower of the small models."""


class Trainable(Protocol):
    """The methods that the loop needs of an `nn.Module`.

    The loss of a step is the sum of loss_sum divided by the sum of weight, over all ranks, batches
    and micro-batches. For a mean over rows, weight is the number of rows. For a mean over tokens,
    it is the number of label tokens. Rows with ``__valid__`` False must not add to either.

    Every trained parameter must take part in each forward pass, because DDP waits for its gradient;
    multiply by zero if need be.

    Set ``separable = False`` on a model whose loss depends on the batch as a whole: the loop then
    refuses to cut or accumulate batches. A model may have ``normalize``, an `mm.Normalize` of its
    pixels.
    """

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight), two scalars, of a batch or micro-batch on the device."""

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the weight that `forward` returns for this batch, without computing the loss."""


def open_model(config: TrainConfig, most_rows: int) -> tuple[Any, Decode]:
    """Return the model of ``config.model`` in float32 on the CPU, and the decoders that feed it.

    The model is the same on every rank.

    Args:
        config: settings.
        most_rows: rows of the rank that has the most.

    Raises:
        ConfigError: there is no such model, or it is of no kind that is known.
    """
    folder = None if config.model in SMALL_MODELS else config.model
    kind = config.model if folder is None else _kind(folder)
    tokenizer = open_tokenizer(folder, chat=kind in ("vlm", "chat"))
    max_length = config.max_length or {"clip": 64, "vlm": 512, "chat": 4096, "speech": 448}[kind]
    small = {"image_size": config.image_size or 64, "max_length": max_length, "seed": config.seed}
    model: Any
    if kind == "chat":
        model = load_chat(config.model, tokenizer)
        decode = chat_decode(tokenizer, config.model, max_length)
    elif kind == "speech":
        model = load_speech(config.model)
        decode = speech_decode(tokenizer, config.model, max_length)
    elif kind == "vlm":
        model = small_vlm(tokenizer=tokenizer, **small) if folder is None else None
        model = model or load_vlm(config.model, tokenizer=tokenizer)
        decode = vlm_decode(tokenizer, model, max_length)
    else:
        towers = small_clip(vocab_size=len(tokenizer), **small) if folder is None else None
        model = ContrastiveClip(towers or load_clip(config.model), most_rows)
        decode = clip_decode(tokenizer, model, max_length)
    model.normalize = None if kind == "speech" else _normalize_of(folder)
    return model, decode


def checkpoint_activations(model: nn.Module) -> None:
    """Switch activation checkpointing on in the `transformers` models inside `model`."""
    # transformers 5 renamed the method; both names take the same options.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switches = [
        getattr(module, names[0], None) or getattr(module, names[1], None)
        for module in model.children()
    ]
    if not any(switches):
        raise ConfigError("activation_checkpointing: there is no transformers model in this model")
    for switch in filter(None, switches):
        switch({"use_reentrant": False})


def _normalize_of(folder: str | None) -> Normalize:
    """Return the pixel statistics of the model's folder; those of CLIP if it has none."""
    path, settings = (None, {}) if folder is None else image_settings(Path(folder))
    if path is None or "image_mean" not in settings or "image_std" not in settings:
        return CLIP_NORMALIZE
    try:
        return Normalize(tuple(settings["image_mean"]), tuple(settings["image_std"]))
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: image_mean and image_std: {escaped(error)}") from None


def _kind(folder: str) -> str:
    """Return "clip", "vlm", "chat" or "speech", by the config of a model's folder."""
    try:
        config = read_json(Path(folder, "config.json"))
    except ConfigError as error:
        raise ConfigError(
            f"model: {folder} is not clip, vlm or a model's folder: {error}"
        ) from None
    family = config.get("model_type")
    if family in ("clip", "whisper"):
        return "clip" if family == "clip" else "speech"
    if "vision_config" not in config:
        raise ConfigError(
            f"model: {folder} is not a CLIP, Llava-style, Qwen-VL or Whisper model: it has no "
            "vision tower"
        )
    if family not in CHAT_FAMILIES:
        return "vlm"
    if image_settings(Path(folder))[0] is None:
        raise ConfigError(f"model: {folder} has no processor; save it beside the model")
    return "chat"


# -- CLIP: a small one with random weights, or one from a folder -----------------------------------
#
# The loss is over the embeddings of the whole global batch. There is no dropout and there are no
# batch statistics, and the weights come from a seed. So the number of ranks changes losses and
# gradients by rounding errors only.
#
# Why the gradients are exact: rank r of W embeds its rows, e_r = f(x_r; w). All ranks gather
# e = (e_1 ... e_W) and compute the same loss L(e, s), where s is the temperature.
#
# - The backward pass of the gather adds the gradients of the W copies of L. The copies are equal,
#   so the sum is W * dL/de_r, and no communication is needed. Rank r gets W * dL/de_r * de_r/dw.
# - DDP takes the mean over the ranks: 1/W * sum_r W * dL/de_r * de_r/dw = dL/dw.
# - s enters L directly: each rank has dL/ds, and so has their mean.
#
# The loop multiplies the loss_sum of each rank by W / total_weight. Here loss_sum is L * V / W and
# total_weight is V, the number of valid rows. The product is L again.


class ContrastiveClip(nn.Module):
    """CLIP whose forward pass returns the contrastive loss of the global batch.

    Args:
        clip: a `transformers` CLIPModel without dropout.
        num_rows: rows of the rank that has the most. A gather needs equal shares, so the other
            ranks add rows that do not count.

    Attributes:
        image_size: side of the square images in pixels.
        separable: False. The loss of each row depends on all other rows, so a batch cannot be cut
            into micro-batches or accumulated.
    """

    separable = False
    takes = (
        'one image and one text a sample; model="vlm" takes chats, and docs/your-own-data.md has '
        "classes"
    )

    def __init__(self, clip: Any, num_rows: int) -> None:
        super().__init__()
        self.clip = clip
        self.num_rows = num_rows
        self.image_size: int = clip.config.vision_config.image_size

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the number of this rank's valid rows, a scalar."""
        valid: Tensor = batch["__valid__"]
        return valid.sum()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight), two scalars that are the same on every rank.

        With W ranks and V valid rows in the global batch, weight is V / W and loss_sum is
        loss * V / W. So their sums over the ranks are loss * V and V.

        Args:
            batch: a dict with these fields:

                - image: normalised, floating [B, 3, S, S]
                - input_ids: int64 [B, T]
                - attention_mask: int64 [B, T], 1 for text and 0 for padding, on either side
                - __valid__: bool [B]; False leaves a row out of the loss on all ranks

        Raises:
            ConfigError: the samples have several images or none, or no text.
        """
        if is_flat(batch):
            raise ConfigError("train: CLIP compares whole rows: leave batching= out")
        if not isinstance(batch.get("image"), Tensor) or "image_row" in batch:
            raise ConfigError(
                "train: CLIP takes exactly one image per sample; these have several or none"
            )
        if "input_ids" not in batch:
            raise ConfigError("train: CLIP takes one text per image; these samples have no text")
        image = batch["image"]
        mask = batch["attention_mask"]
        pooled = self.clip.vision_model(pixel_values=image).pooler_output
        hidden = self.clip.text_model(
            input_ids=batch["input_ids"], attention_mask=mask
        ).last_hidden_state
        # The embedding of a text is that of its last token, which has attended to all others.
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (mask * positions).argmax(dim=1)
        text = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
        image_embeddings = self.clip.visual_projection(pooled)
        text_embeddings = self.clip.text_projection(text)
        with torch.autocast(image.device.type, enabled=False):
            valid = gather_rows(batch["__valid__"], self.num_rows)
            loss = contrastive_loss(
                gather_rows(F.normalize(image_embeddings.float(), dim=1), self.num_rows),
                gather_rows(F.normalize(text_embeddings.float(), dim=1), self.num_rows),
                valid,
                self.clip.logit_scale.clamp(max=math.log(100.0)).exp(),
            )
        weight = valid.sum() / (dist.get_world_size() if dist.is_initialized() else 1)
        return loss * weight, weight


def contrastive_loss(images: Tensor, texts: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
    """Return CLIP's symmetric cross entropy over the valid rows (Radford et al., 2021), a scalar.

    Args:
        images: image embeddings of unit length, float32 [G, D].
        texts: text embeddings of the same rows, float32 [G, D].
        valid: bool [G], with at least one True. Invalid rows have no loss, and no other row can
            match them.
        scale: the inverse temperature, a scalar.
    """
    # Masks, not images[valid]: a shape that depends on the data would make the CPU wait for CUDA.
    logits = scale * images @ texts.T
    targets = torch.where(valid, torch.arange(len(valid), device=valid.device), IGNORED_LABEL)
    invalid = ~valid[None, :]
    image_loss = F.cross_entropy(logits.masked_fill(invalid, -math.inf), targets)
    text_loss = F.cross_entropy(logits.T.masked_fill(invalid, -math.inf), targets)
    return (image_loss + text_loss) / 2


def gather_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return the rows of all ranks in rank order, [W * num_rows, ...], with gradients.

    Ranks with fewer than `num_rows` rows add rows of zeros (False). For example, ranks with 2 and 1
    rows and ``num_rows=2`` give 4 rows, the last of them zeros. On one rank, or without
    torch.distributed, the result is `rows` itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    missing = num_rows - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    gathered: Tensor = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks. The backward pass needs no communication (see the module)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        world_size = dist.get_world_size()
        return grad.chunk(world_size)[dist.get_rank()] * world_size


def small_clip(*, image_size: int, vocab_size: int, max_length: int, seed: int) -> Any:
    """Return a CLIPModel with random weights: 1.1 million, and those of the token embeddings.

    `seed` fixes the weights, so they are the same on every rank. The global random state of torch
    does not change.
    """
    import_torchvision()  # transformers imports it too
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={
            **SMALL_TOWER,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_length,
            "eos_token_id": 0,  # for the pooling of CLIPModel; ContrastiveClip has its own
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
        vision_config={**SMALL_TOWER, "image_size": image_size, "patch_size": PATCH_SIZE},
        projection_dim=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIPModel(config)


def load_clip(folder: str) -> Any:
    """Return the CLIPModel that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model.
    """
    return load_pretrained("CLIPModel", folder, f"{folder}: no CLIP model", dtype="float32")


def clip_decode(tokenizer: Any, model: ContrastiveClip, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `ContrastiveClip` reads."""
    text = TextDecoder(tokenizer, max_length=max_length, padding="longest")
    return Decode(image=ImageDecoder(size=model.image_size), text=text)


# -- vision-language models ------------------------------------------------------------------------
#
# A small Llava with random weights, or a folder's. The processor of a Qwen-VL says how large images
# and frames are, and how many frames a video has. So a batch has media of many sizes, and
# `mm.model_inputs` arranges them. A batch without any image or video gets a blank image from it, so
# that every parameter has a gradient on every rank.
#
# DDP waits for the gradient of every parameter on every rank. Llava reads the output of an inner
# layer of the vision tower, so the layers after it never have a gradient. Those parameters are
# found once, from the graph of a blank image, and frozen.

CHAT_FAMILIES = tuple(qwen_vl.FAMILIES)
"""The ``model_type`` of models whose processors say how images and videos are decoded."""


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

    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **SMALL_TOWER, image_size=image_size, patch_size=PATCH_SIZE
        ),
        text_config=transformers.LlamaConfig(
            **SMALL_TOWER,
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


# -- Whisper: recordings and their transcripts -----------------------------------------------------


class SpeechModel(nn.Module):
    """A speech model whose forward pass returns the summed loss of the transcripts' tokens.

    The loss is a sum over tokens, so it can be cut into micro-batches and ranks.

    Args:
        speech: a `transformers` WhisperForConditionalGeneration.
    """

    takes = "one recording (wav, flac, mp3, ...) and its transcript a sample"

    def __init__(self, speech: Any) -> None:
        super().__init__()
        self.speech = speech

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight): the summed loss and its number of tokens, float32 scalars.

        Args:
            batch: the features of one recording a row, and the tokens of its transcript.

        Raises:
            ConfigError: a row has no recording, or several.
        """
        inputs = model_inputs(batch, self.speech)
        labels = inputs["labels"]
        logits = self.speech(**inputs, use_cache=False).logits
        return summed_loss(logits, labels), self.weight_of(batch)

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the number of tokens in the loss of a batch, a float32 scalar.

        A start token at the front of a transcript does not count: the decoder is given it.
        """
        counts = valid_labels(batch) != IGNORED_LABEL
        is_start = batch["input_ids"] == self.speech.config.decoder_start_token_id
        counts[:, 0] &= ~is_start[:, 0]
        weight: Tensor = counts.sum().float()
        return weight


def load_speech(folder: str) -> SpeechModel:
    """Return the Whisper that is saved in a local folder, in float32. No code in it is run.

    Raises:
        ConfigError: there is no such model.
    """
    speech = load_pretrained(
        "WhisperForConditionalGeneration", folder, f"{folder}: no Whisper model", dtype="float32"
    )
    return SpeechModel(speech.train())


def speech_decode(tokenizer: Any, folder: str, max_length: int) -> Decode:
    """Return the decoders that make the fields that a `SpeechModel` reads.

    Args:
        tokenizer: the tokenizer of the model.
        folder: the folder of the model. Its feature extractor says how long recordings are, and
            how many mel bins they have.
        max_length: longest transcript in tokens. The model's own limit, where that is less.

    Raises:
        ConfigError: the folder has no feature extractor.
    """
    extractor = load_pretrained(
        "AutoFeatureExtractor", folder, f"{folder}: no feature extractor of a speech model"
    )
    positions = read_json(Path(folder, "config.json")).get("max_target_positions")
    most = positions if isinstance(positions, int) else max_length
    text = TextDecoder(tokenizer, max_length=min(max_length, most))
    return Decode(audio=AudioDecoder.from_processor(extractor), text=text)


# -- the pipelines of training and validation ------------------------------------------------------


def pipeline_for(
    pipeline: Pipeline | Callable[[Any], Pipeline], data: Dataset | Mixture, folder: str | None
) -> Pipeline:
    """Return the user's pipeline with the data of the run.

    Args:
        pipeline: A pipeline, whose data are replaced, or a function from data to a pipeline.
        data: Of the run.
        folder: Gets the records of bad samples, unless the pipeline names another folder.
    """
    chosen = pipeline(data) if callable(pipeline) else pipeline
    if not isinstance(chosen, Pipeline):
        raise ConfigError(f"train: pipeline= gave {type(chosen).__name__}, and no mm.Pipeline")
    policy = chosen.bad_samples
    if policy.quarantine == BadSamplePolicy.quarantine:
        policy = replace(policy, quarantine=folder)
    return replace(chosen, dataset=data, bad_samples=policy)


def pipeline_of_model(config: TrainConfig, data: Dataset | Mixture, decode: Any) -> Pipeline:
    """Return the pipeline that a model of `mmstream.train.models` needs: its decoders, shuffled."""
    for dataset in datasets_of(data):
        if baked_content(dataset) is not None:
            raise ConfigError(
                f"{escaped(dataset.store.url)}: was written by `mmstream bake`, and the model's "
                "own pipeline decodes: give it the source of the bake, or pipeline= with "
                "mm.Decode.baked()"
            )
    return Pipeline(
        data,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        decode=decode,
        bad_samples=BadSamplePolicy(quarantine=config.log_folder),
    )


def validation_pipeline(pipeline: Pipeline, data: Dataset | Mixture) -> Pipeline:
    """Return the pipeline of the validation data: each sample once, in their order.

    A substitute would count a sample twice, so the row of a bad one is left out instead. There is
    no plan of packs: the loss is the same with one sample a row. Buckets leave samples out, so they
    stay only where pictures take their size from them.
    """
    policy, batching = pipeline.bad_samples, pipeline.batching
    if isinstance(batching, Buckets) and not (pipeline.decode and pipeline.decode.needs_bucket):
        batching = None
    action = "mask" if policy.action == "substitute" else policy.action
    folder = policy.quarantine and str(Path(policy.quarantine, "validation"))
    return replace(
        pipeline,
        dataset=data,
        shuffle=False,
        drop_last=False,
        reshuffle=None,
        batching=Flat() if isinstance(batching, Pack) else batching,
        bad_samples=replace(policy, action=action, quarantine=folder),
    )
