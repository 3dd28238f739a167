"""A batch as models, kernels and trainers of other libraries take it, and a check of the models.

    loader or device -> `model_inputs` -> model(**inputs)
    batch -> `check_packing`: logits of documents while others have other content
    batch -> `flex_block_mask` -> flex_attention(q, k, v, block_mask=mask)
    batch -> `flash_attention_arguments` -> flash_attn_varlen_func(q, k, v, **arguments)
    batch -> `megatron_packing` -> PackedSeqParams(**arguments)
    batch -> `torchtitan_batch` -> Trainer.forward_backward_step
    batch -> `preference_inputs` -> TRL's DPOTrainer or RewardTrainer

Text is the same for all models: ids, mask and labels. What differs is asked of the model's family:
in which form it takes pictures, videos and audio, how many tokens they take, positions.

A flat batch has documents one after the other, and no attention mask. Models of transformers see
where a document begins by its positions, FlashAttention by the lengths of documents. A model that
does not know where a document begins trains without an error, and on other text than the user
thinks. So this is measured, with the model that is trained and its attention: when a model gets its
first flat batch, three documents of a few tokens are run three times.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmstream.batching.collate import mean_rate
from mmstream.batching.flat import Flat, flatten
from mmstream.batching.valid import is_flat, valid_labels
from mmstream.decoding.threaded_calls import resolve_vector_math
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.families.family import (
    KINDS,
    Family,
    Features,
    Medium,
    Pictures,
    Videos,
    check_count,
    import_torchvision,
)
from mmstream.families.qwen_vl import needs_mrope
from mmstream.families.registry import model_and_config, origin_of, resolve
from mmstream.loader.device import Normalize, Normalizer
from mmstream.settings import PositiveInt, checked, shown
from mmstream.types import IGNORED_LABEL, Batch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The boundaries of documents, as FlashAttention takes them: all four, or none."""

_UNNAMED_ARGUMENTS = frozenset({*LENGTHS, "seq_idx", "use_cache"})
"""Arguments that many models hand on to their layers without naming them."""

MAX_DENSE_TOKENS = 16_384
"""The most tokens of several rows in one, without attention that skips other documents. A mask for
them is 0.25 GiB, and scores in float32 1 GiB a head."""

_ATTENTION_LAYERS = ("attention", "full", "sliding", "local", "global", "chunked")
"""Words in the names of layers that only look at other tokens through a mask."""


@checked(late=True)
def model_inputs(
    batch: Batch,
    model_or_family: Any,
    *,
    normalize: Any = None,
    blank_image: bool = True,
    label_field: str = "cls",
    image_field: str = "image",
    video_field: str = "video",
    audio_field: str = "audio",
    check: bool = True,
) -> dict[str, Any]:
    """Return what a Hugging Face model takes: ``model(**model_inputs(batch, model))``.

    These families are known, by the ``model_type`` of their configs:

    - Vision-language models: ``llava``, ``llava_next``, ``qwen2_vl``, ``qwen2_5_vl``, ``qwen3_vl``,
      ``internvl``, ``idefics2``, ``idefics3``, ``smolvlm``, ``llava_onevision``, ``gemma3``,
      ``glm4v``, ``mistral3``, ``paligemma``. A row may have any number of pictures. Labels are
      those of the tokens. ``qwen2_vl``, ``qwen2_5_vl``, ``qwen3_vl``, ``smolvlm`` and
      ``llava_onevision`` also take videos.
    - Language models of text only: all that transformers calls ``ForCausalLM``, such as ``llama``,
      ``qwen3``, ``gemma``, ``mistral``.
    - Models that hear: ``qwen2_audio``. ``qwen2_5_omni_thinker`` and ``qwen3_omni_moe_thinker``
      take pictures, videos and audio.
    - Speech to text: ``whisper``. A row has one recording, and its text is what is learned.
    - Two towers: ``clip``, ``siglip``. A row has one picture and one text. SigLIP gets no
      ``attention_mask``: its models were trained without one, on texts padded to ``max_length``.
    - Classification: ``vit``, ``resnet`` and every other model that is called
      ``ForImageClassification``. A row has one picture, and its class is in `label_field`.

    Flat batches, of ``Pipeline(batching=)``, are taken by all of these but PaliGemma, Whisper, two
    towers and classifiers. The model gets positions that start over in each document, no
    ``attention_mask``, and ``use_cache=False``: with a cache, or a mask, documents would see each
    other in silence. Qwen-VL and GLM-4V get positions of four rows, made here by the model's own
    rule where the batch has one. FlashAttention gets the lengths of documents.

    Pixels are normalised once. Floating pixels are taken as `mm.to_device` has normalised them, and
    do not change, whatever `normalize` says. Pixels in uint8 are normalised here, and need
    `normalize`.

    Rows whose ``__valid__`` is False do not count in the loss: their labels are -100. Models of two
    towers compare all rows of a batch, so these rows are left out of it.

    A batch without pictures and videos gets a blank picture, for vision-language models: in the
    padding of a row, or after its end; in a flat batch as one more document. The model sees its
    tokens after all others, and they have no labels. So the loss is that of the text alone, and
    every parameter of the vision tower has a gradient of zero instead of none. DDP, FSDP and ZeRO
    wait for these on every rank. In the same way, a batch without audio gets a blank recording, for
    models that hear.

    Args:
        batch: A batch of a loader, or of `mm.to_device`. It does not change.
        model_or_family: The model (also in DDP, or compiled), its config, or a ``model_type``. The
            last stands for the family's default config. Give the model or the config if your
            tokens or sizes are others.
        normalize: An `mm.Normalize`, or a processor with ``image_mean`` and ``image_std``. It is
            for uint8 pixels, which become floating of the model's dtype, or float32.
        blank_image: Whether a batch without pictures, videos or audio gets blank ones. False saves
            their tokens: for evaluation, for one process, or where the towers are not trained and
            not sharded.
        label_field: The field with the class of a row, for classification: a number, or its digits
            as bytes or a string. ``labels`` is taken where it holds numbers.
        image_field: The field with the pictures: ``image``, or that of a decoder by field, such as
            ``jpg`` with ``Decode({"jpg": mm.ImageDecoder(size=224)})``.
        video_field: The same for videos.
        audio_field: The same for audio. Its features are in ``audio_features``.
        check: Whether a model is run on three short documents when it gets its first flat batch, to
            see that it keeps them apart, as `check_packing` does. Sharded models are not run.

    Returns:
        Tensors on the device of the batch. Vision-language models: ``input_ids``,
        ``attention_mask`` and ``labels``, int64 [B, T], and pictures as the model's processor
        makes them; the same for videos and audio. A flat batch: ``position_ids``, [B, T] or
        [4, B, T], and ``use_cache`` in place of the mask. Whisper: ``input_features``,
        ``decoder_input_ids`` and ``labels``. Two towers: ``input_ids`` [V, T] and ``pixel_values``
        [V, 3, H, W] of the V valid rows, and ``return_loss``; a batch of texts or of pictures alone
        gives the inputs of one tower. Classification: ``pixel_values`` [B, 3, H, W] and ``labels``
        [B].

    Raises:
        ConfigError: The family is not known, or its pictures have another form, or stand in another
            field than `image_field`. Or pixels are uint8 and `normalize` is missing. Or the model
            lets documents of a flat batch see each other. Or a row has more or fewer pictures than
            the family takes, or no class number. Or the batch has media that the family does not
            take. Or the text has another number of tokens of images, videos or audio than these
            take (Llava, LLaVA-OneVision, InternVL, Qwen). Or a Qwen omni model gets videos of which
            the batch does not say how many frames of a second were asked for. The message says what
            to write.

    Examples:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> config = ViTConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> model = ViTForImageClassification(config)
        >>> decode = mm.Decode(image=mm.ImageDecoder(size=224))
        >>> pipeline = mm.Pipeline(mm.open_dataset("shards/"), global_batch_size=8, decode=decode)
        >>> normalize = mm.Normalize((0.5,) * 3, (0.5,) * 3)
        >>> batch = next(iter(mm.to_device(mm.Loader(pipeline), "cpu", normalize=normalize)))
        >>> batch["labels"] = [0, 1] * 4
        >>> inputs = model_inputs(batch, model)
        >>> {name: tuple(value.shape) for name, value in inputs.items()}
        {'pixel_values': (8, 3, 224, 224), 'labels': (8,)}
    """
    if "sequence_index" in batch:
        raise ConfigError(
            "model_inputs: the batch is a part of mm.cut_sequence, and its lengths are those of "
            "the whole: give the model the fields that its attention takes"
        )
    if check and is_packed(batch):
        model, config = model_and_config(model_or_family)
        if model is not None and _checked.get(model) != attention_of(config):
            _check_once(model, config, batch["input_ids"].device)
            _checked[model] = attention_of(config)
    model, config, family = resolve(model_or_family)
    # The default config of a model_type has other tokens and mel bands.
    reads_config = not isinstance(model_or_family, str)
    try:
        if is_packed(batch) and family.takes_one_a_row:
            raise ConfigError(  # noqa: TRY301
                f"model_inputs: {config.model_type} takes one sample a row: leave batching= out of "
                "the Pipeline"
            )
        fields = {"image": image_field, "video": video_field, "audio": audio_field}
        media = _media_of(batch, model, config, family, normalize, fields, reads_config)
        if family.takes_one_a_row:
            text = _text_of(batch) if "audio" in family.takes else {}
            return family.row_inputs({**batch, **text}, media, config, label_field)
        return _text_arguments(batch, media, model, config, family, blank_image, reads_config)
    except MMStreamError:
        raise
    except Exception as error:
        origin = origin_of(str(config.model_type))
        if origin is None:
            raise
        raise ConfigError(
            f"model_inputs: the family {config.model_type} of {origin} has failed: "
            f"{type(error).__name__}: {escaped(error)}: report it to that package"
        ) from error


def _text_arguments(
    batch: Batch,
    media: dict[str, Medium],
    model: Any,
    config: Any,
    family: Family,
    blank_image: bool,
    reads_config: bool,
) -> dict[str, Any]:
    """Return the arguments of a model of text, with any number of media in a row."""
    packed = is_packed(batch)
    text = _packed_text(batch) if packed else _text_of(batch)
    if packed:
        _check_quadratic(batch, config)
    sees = not media.keys().isdisjoint(("image", "video"))
    if blank_image:
        text = _with_blanks(text, media, model, config, family)
    media_inputs = {
        **family.inputs(media, text["input_ids"], config),
        **family.text_inputs(text, config),
    }
    for kind, medium in media.items() if reads_config else ():
        if (count := family.num_tokens(kind, medium, config)) is not None:
            check_count(text["input_ids"], config, kind, count, family)
    accepted = _parameters_of(config.__class__)
    if packed:
        if accepted and "position_ids" not in accepted:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes no position_ids, by which models tell "
                "documents apart: leave batching= out, so that each row is one document"
            )
        positions = family.flat_positions(text, media_inputs, model, config, sees=sees)
        text = _packed_arguments({**text, "position_ids": positions}, config)
    elif (positions := family.padded_positions(text, media_inputs, model, config)) is not None:
        text = {**text, "position_ids": positions}
    return {
        name: value
        for name, value in {**text, **media_inputs}.items()
        if not accepted or name in accepted | _UNNAMED_ARGUMENTS
    }


@lru_cache(maxsize=32)
def _parameters_of(config_type: Any) -> frozenset[str]:
    """Return the arguments of the forward pass in the installed version; empty: not known."""
    import_torchvision()
    import transformers

    for mapping in (
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        if config_type in mapping:
            return frozenset(inspect.signature(mapping[config_type].forward).parameters)
    return frozenset()


# -- text: padded rows, or documents one after the other ------------------------------------------


def is_packed(batch: Batch) -> bool:
    """Tell whether a batch has documents one after the other, as ``batching=`` makes them."""
    return "cu_seq_lens_q" in batch


def _text_of(
    batch: Batch, names: tuple[str, ...] = ("input_ids", "attention_mask", "labels")
) -> dict[str, Tensor]:
    """Return the fields of these names that the batch has. The labels of invalid rows are -100."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ConfigError("model_inputs: the batch has no input_ids; give Decode a TextDecoder")
    text = {name: batch[name] for name in names if isinstance(batch.get(name), Tensor)}
    if "labels" in text and "__valid__" in batch:
        text["labels"] = valid_labels(batch)
    return text


def _packed_text(batch: Batch) -> dict[str, Any]:
    """Return the fields of a flat batch that describe its text. Invalid rows have no labels.

    Raises:
        ConfigError: The batch lacks some of them.
    """
    names = ("input_ids", "position_ids", "document_ids", *LENGTHS)
    missing = [name for name in (*names, "document_row") if batch.get(name) is None]
    if missing:
        raise ConfigError(
            f"model_inputs: the batch has cu_seq_lens_q, and no {missing[0]}: keep all fields of "
            "batching=mm.Flat(), in transforms too"
        )
    return {name: batch[name] for name in names} | _text_of(batch, ("input_ids", "labels"))


def _packed_arguments(text: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the text of a flat batch in the form that a model of transformers takes.

    - ``use_cache`` is False. With a cache, models do not look for documents, and let them leak.
    - There is no ``attention_mask``, for the same reason.
    - The lengths of documents are there for FlashAttention, which else asks the device for them in
      every layer, and for models with layers that are not attention.
    - ``seq_idx``, the number of each token's document, is there for such layers only.
    """
    names = ["input_ids", "position_ids"] + ["labels"] * ("labels" in text)
    has_states = has_state_layers(config)
    if has_states or "flash" in attention_of(config):
        names += LENGTHS
    arguments = {name: text[name] for name in names} | {"use_cache": False}
    if has_states:
        arguments["seq_idx"] = text["document_ids"].to(torch.int32)
    return arguments


def _check_quadratic(batch: Batch, config: Any) -> None:
    """Refuse long rows for attention that computes the scores of all tokens with all others.

    Raises:
        ConfigError: Rows lie one after the other, they have more than `MAX_DENSE_TOKENS` tokens
            together, and the model's attention is eager or sdpa.
    """
    num_rows, num_tokens = batch["input_ids"].shape
    attention = attention_of(config)
    is_long = num_rows == 1 and num_tokens > MAX_DENSE_TOKENS
    if is_long and attention in ("eager", "sdpa") and (batch["document_row"] > 0).any():
        raise ConfigError(
            f"model_inputs: {attention} attention compares all {num_tokens:,} tokens with each "
            'other: give batching= layout="rows", or the model '
            'attn_implementation="flash_attention_2" or "flex_attention"'
        )


def has_state_layers(config: Any) -> bool:
    """Tell whether a model has layers with a state, such as a convolution, beside attention."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return any(
        "linear" in str(kind) or not any(word in str(kind) for word in _ATTENTION_LAYERS)
        for kind in kinds
    )


def attention_of(config: Any) -> str:
    """Return the name of a model's attention, such as "sdpa" or "flash_attention_2"."""
    return str(getattr(config.get_text_config(), "_attn_implementation", None))


# -- blank media -----------------------------------------------------------------------------------


def _with_blanks(
    text: dict[str, Any], media: dict[str, Medium], model: Any, config: Any, family: Family
) -> dict[str, Any]:
    """Return the text with the tokens of a blank medium for each tower that has nothing to do.

    The blank ones are added to `media`. The models here are causal: tokens after a text do not
    change it.
    """
    towers = {"image": ("image", "video"), "audio": ("audio",)}
    for kind, kinds in towers.items():
        if kind in family.takes and media.keys().isdisjoint(kinds):
            blank = family.blank(kind, config)
            if blank is not None:
                add = _with_document if is_packed(text) else _with_tokens
                text, row = add(text, blank.tokens)
                medium = blank.medium.in_row(row, text["input_ids"])
                if isinstance(medium, Features):
                    medium = medium.of_dtype(_dtype_of(model))
                media["video" if isinstance(medium, Videos) else kind] = medium
    return text


def _with_tokens(text: dict[str, Any], tokens: list[int]) -> tuple[dict[str, Any], int]:
    """Return the text with these tokens at the end of a row, and the number of the row.

    It is the row with most padding at its end, where they fit. Otherwise all rows become longer.
    They have an attention mask of 1 and no labels.
    """
    ids = text["input_ids"]
    mask = text.get("attention_mask", torch.ones_like(ids))
    padding = mask.flip(1).cumsum(1).eq(0).sum(1)  # of each row, at its end
    row = int(padding.argmax())
    num_added = 0 if int(padding[row]) >= len(tokens) else len(tokens)
    changed = {
        **text,
        "input_ids": F.pad(ids, (0, num_added)).clone(),
        "attention_mask": F.pad(mask, (0, num_added)).clone(),
    }
    if "labels" in text:
        changed["labels"] = F.pad(text["labels"], (0, num_added), value=IGNORED_LABEL)
    changed["input_ids"][row, -len(tokens) :] = torch.tensor(tokens, device=ids.device)
    changed["attention_mask"][row, -len(tokens) :] = 1
    return changed, row


def _with_document(text: dict[str, Any], tokens: list[int]) -> tuple[dict[str, Any], int]:
    """Return a flat text with these tokens as one more document of its last row, and that row.

    Each other row gets a document of as many tokens, with the id 0. No document sees them, and they
    have no labels.

    Example: rows of documents with 2 and 1, and with 3 tokens, have the boundaries [0, 2, 3, 6].
    With a document of one token in each row, they are [0, 2, 3, 4, 7, 8].
    """
    (num_rows, width), num_added = text["input_ids"].shape, len(tokens)
    changed = {**text, "input_ids": F.pad(text["input_ids"], (0, num_added))}
    ids, positions = changed["input_ids"], text["position_ids"]
    ids[-1, -num_added:] = torch.tensor(tokens, device=ids.device)
    if "labels" in text:
        changed["labels"] = F.pad(text["labels"], (0, num_added), value=IGNORED_LABEL)
    changed["position_ids"] = F.pad(positions, (0, num_added))
    changed["position_ids"][..., -num_added:] = torch.arange(num_added, device=positions.device)
    # The documents of a row move by the rows before it, as each of these has one more now.
    documents = text["document_ids"]
    rows = torch.arange(num_rows, device=documents.device, dtype=documents.dtype)[:, None]
    last = documents[:, -1:] + rows + 1
    changed["document_ids"] = torch.cat((documents + rows, last.expand(-1, num_added)), 1)
    # A boundary at token b lies in row (b - 1) // width. Empty documents keep theirs.
    bounds = text["cu_seq_lens_q"]
    moved = bounds + (bounds - 1).clamp(min=0) // width * num_added
    ends = torch.arange(1, num_rows + 1, device=bounds.device, dtype=bounds.dtype)
    boundaries = torch.cat((moved, ends * (width + num_added))).sort().values
    changed["cu_seq_lens_q"] = changed["cu_seq_lens_k"] = boundaries
    longest = max(text["max_length_q"], 1 << (num_added - 1).bit_length())
    changed["max_length_q"] = changed["max_length_k"] = longest
    return changed, num_rows - 1


# -- the media of a batch, normalised --------------------------------------------------------------


def _media_of(
    batch: Batch,
    model: Any,
    config: Any,
    family: Family,
    normalize: Any,
    fields: Mapping[str, str],
    reads_config: bool,
) -> dict[str, Medium]:
    """Return the media of a batch by kind, without those that it has none of.

    `fields` names the field of each kind.

    Raises:
        ConfigError: The batch has media of a kind that the family does not take.
    """
    video, audio = fields["video"], fields["audio"]
    pictures = _pictures_of(batch, fields["image"], _pixel_changer(normalize, model, "image"))
    is_present = {
        "image": pictures is not None,
        "video": _has(batch, video, f"{video}_frames"),
        "audio": _has(batch, audio, f"{audio}_features", f"{audio}_row"),
    }
    for kind, name in KINDS.items():
        if is_present[kind] and kind not in family.takes:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes no {name}, and the batch has some: leave "
                "their decoder out of Decode, and give "
                'TextDecoder(undecoded_parts="drop") where texts speak of them'
            )
    media: dict[str, Medium] = {} if pictures is None else {"image": pictures}
    if _has(batch, video):
        media["video"] = _videos_of(batch, video, _pixel_changer(normalize, model, "video"))
    if _has(batch, audio, f"{audio}_features"):
        features = _features_of(batch, audio, config, reads_config)
        media["audio"] = features.of_dtype(_dtype_of(model))
    return media


def _has(batch: Batch, *fields: str) -> bool:
    values = [batch.get(field) for field in fields]
    return any(value is not None and len(value) > 0 for value in values)


def _pictures_of(
    batch: Batch, image_field: str, change: Callable[[Tensor], Tensor]
) -> Pictures | None:
    """Return the pictures of a batch, normalised; None if it has none."""
    images = batch.get(image_field)
    if image_field not in batch:
        _check_other_fields(batch, image_field)
    if images is None or len(images) == 0:
        return None
    if not isinstance(images, Tensor | list):
        raise ConfigError(
            f"model_inputs: {image_field!r} is a {type(images).__name__}: give a tensor, or a list "
            "of tensors"
        )
    tiles = change(images) if isinstance(images, Tensor) else [change(image) for image in images]
    rows = batch.get(f"{image_field}_row")
    if rows is None:
        rows = torch.arange(len(tiles), device=tiles[0].device)
    if is_packed(batch):
        num_rows = len(batch["input_ids"])  # 1 where all rows lie one after the other
        rows = rows if num_rows > 1 else torch.zeros_like(rows)
    else:
        of_rows = batch.get("__valid__", batch.get("input_ids"))
        num_rows = int(rows.max()) + 1 if of_rows is None else len(of_rows)
    return Pictures(
        tiles,
        rows,
        num_rows,
        tiles_per_picture=_joined(batch.get(f"{image_field}_tiles")),
        sizes=_joined(batch.get(f"{image_field}_size")),
        samples=batch.get(f"{image_field}_document"),
    )


def _check_other_fields(batch: Batch, image_field: str) -> None:
    """Refuse a batch whose pictures stand in another field: the model would train without them."""
    others = [
        name
        for name, value in batch.items()
        if isinstance(value, Tensor)
        and value.ndim == 4
        and value.shape[1] == 3
        and f"{name}_frames" not in batch  # of videos
    ]
    if others or image_field != "image":
        where = " and ".join(map(repr, others)) or "no field"
        give = f", or pass image_field={others[0]!r}" if others else ""
        raise ConfigError(
            f"model_inputs: the batch has no {shown(image_field)}, and pictures in {where}: decode "
            f"them with Decode(image=){give}"
        )


def _joined(values: Any) -> Tensor | None:
    """Join what each row has of its pictures, such as [2, 1] and [3], to one tensor, [2, 1, 3]."""
    if values is None:
        return None
    by_row = [torch.as_tensor(value) for value in values if value is not None]
    return torch.cat(by_row) if by_row else None


def _pixel_changer(normalize: Any, model: Any, kind: str) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises uint8 pixels and leaves floating ones as they are.

    Args:
        normalize: As `model_inputs` takes it.
        model: The model, which has a dtype. None: float32.
        kind: "image" or "video": whose mean and deviation of a processor are taken.
    """

    def change(image: Tensor) -> Tensor:
        if image.is_floating_point():
            return image
        if image.dtype != torch.uint8:
            raise ConfigError(f"model_inputs: {kind}s are uint8 or floating, not {image.dtype}")
        if normalize is None:
            raise ConfigError(
                "model_inputs: the pixels are uint8, not normalised: "
                "to_device(loader, device, normalize=mm.Normalize(processor.image_mean, "
                "processor.image_std)), or model_inputs(..., normalize=processor)"
            )
        settings = _normalize_of(normalize, kind)
        return Normalizer(settings, _dtype_of(model), image.device)(image)

    return change


def _normalize_of(normalize: Any, kind: str) -> Normalize:
    if isinstance(normalize, Normalize):
        return normalize
    processor = getattr(normalize, "image_processor", normalize)
    processor = getattr(normalize, f"{kind}_processor", processor)
    if not hasattr(processor, "image_mean") or not hasattr(processor, "image_std"):
        raise ConfigError(
            f"model_inputs: normalize={type(normalize).__name__}: give an mm.Normalize, or a "
            "processor with image_mean and image_std"
        )
    return Normalize(processor.image_mean, processor.image_std)


def _videos_of(batch: Batch, field: str, change: Callable[[Tensor], Tensor]) -> Videos:
    """Return the videos of a batch, normalised. Their rate may be the mean over their frames.

    Raises:
        ConfigError: The batch has videos without ``video_frames``.
    """
    value, counts = batch[field], batch.get(f"{field}_frames")
    if not isinstance(counts, Tensor):
        raise ConfigError(
            f"model_inputs: the batch has {field!r} without {field}_frames: decode videos with "
            "Decode(video=mm.VideoDecoder(...))"
        )
    videos = torch.split(value, counts.tolist()) if isinstance(value, Tensor) else value
    rates = batch.get(f"{field}_fps")
    if not isinstance(rates, Tensor):
        times = torch.split(batch[f"{field}_pts_s"].to("cpu", torch.float64), counts.tolist())
        rates = torch.tensor([mean_rate(video.tolist()) for video in times], dtype=torch.float64)
    return Videos(
        [change(video) for video in videos],
        rates.to("cpu", torch.float64),
        batch.get(f"{field}_requested_fps"),
    )


def _features_of(batch: Batch, field: str, config: Any, reads_config: bool) -> Features:
    """Return the features of a batch's recordings.

    Raises:
        ConfigError: The batch has samples of recordings in place of features. Or these have another
            number of mel bands than the model takes, or several numbers.
    """
    values = batch.get(f"{field}_features")
    if values is None:
        raise ConfigError(
            f"model_inputs: {config.model_type} takes features, and the batch has samples of "
            f"{field!r}: AudioDecoder.from_processor(processor), or AudioDecoder(features=)"
        )
    if not isinstance(values, Tensor):
        raise ConfigError(
            f"model_inputs: {config.model_type} takes features of one number of mel bands, these "
            "differ"
        )
    for owner in (config, getattr(config, "audio_config", None)) if reads_config else ():
        expected = getattr(owner, "num_mel_bins", None)
        if expected is not None and values.shape[1] != expected:
            raise ConfigError(
                f"model_inputs: {config.model_type} takes {expected} mel bands, the features have "
                f"{values.shape[1]}: AudioDecoder(features=mm.families.whisper.WhisperFeatures("
                f"num_mels={expected}))"
            )
    return Features(values, batch[f"{field}_features_length"], batch[f"{field}_row"])


def _dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of a model's weights; float32 where there is no model."""
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


# -- whether a model keeps documents apart ---------------------------------------------------------

PROBE_LENGTHS = (5, 1, 7)
"""Tokens of the documents on which a model is tried with its first flat batch."""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The largest changes of a document's logits that rounding explains, by dtype, in parts of their
root mean square. What a document sees of another one is 3e-3 to 1 in models without training."""


@dataclass(frozen=True)
class PackingCheck:
    """What `check_packing` has measured."""

    num_documents: int
    """How many documents were compared."""
    leak: float
    """The largest change of a document when others change, their text and their media. It is in
    parts of the root mean square of its logits; 0 means equal."""


def check_packing(
    model: Any,
    batch: Batch,
    prepare: Callable[[Batch], dict[str, Any]] | None = None,
    *,
    normalize: Any = None,
) -> PackingCheck:
    """Check that no document of a flat batch sees another one.

    Every second document gets another text, and other pictures, videos and recordings: the logits
    of the others must stay. Then the same the other way round.

    The model is run without gradients and in evaluation mode, with its own attention. It is not
    changed, nor are the random states. Take a small batch: memory for two copies of its logits is
    needed, and time for 3 forward passes. With sharded parameters, each rank must call it, as a
    forward pass waits for all of them.

    Args:
        model: A causal model of transformers.
        batch: A flat batch of a loader, or of `mm.to_device`, on the model's device.
        prepare: From a batch to the arguments of the model. None: what `model_inputs` returns. Give
            what your trainer uses, such as a collator of your own.
        normalize: As `model_inputs` takes it.

    Raises:
        ConfigError: Documents see each other. The message names the first one, and the argument
            that is wrong. Or it says that the model itself does not keep them apart. Or the batch
            is not flat.

    Examples:
        >>> from mmstream.train import check_packing
        >>> from mmstream.train.tokenizer import byte_tokenizer
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tokenizer = byte_tokenizer()
        >>> pipeline = mm.Pipeline(
        ...     mm.open_dataset("shards/"),
        ...     global_batch_size=8,
        ...     decode=mm.Decode(text=mm.TextDecoder(tokenizer)),
        ...     batching=mm.Flat(),
        ... )
        >>> config = LlamaConfig(
        ...     vocab_size=len(tokenizer),
        ...     hidden_size=32,
        ...     intermediate_size=64,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> batch = next(iter(mm.Loader(pipeline)))
        >>> check_packing(LlamaForCausalLM(config), batch).leak
        0.0
    """
    inner, config = model_and_config(model)
    if inner is None:
        raise ConfigError("check_packing: give the model itself, as it is run")
    if not is_packed(batch):
        raise ConfigError(
            "check_packing: the batch has no cu_seq_lens_q; make it with Pipeline(batching=)"
        )
    prepare = prepare or partial(
        model_inputs, model_or_family=inner, normalize=normalize, check=False
    )
    resolve_vector_math()
    inputs, leak = prepare(batch), 0.0
    documents = batch["document_ids"]
    if len(documents.unique()) < 2:
        raise ConfigError(
            "check_packing: the batch has one document, so nothing can leak: give a batch of two "
            "or more"
        )
    with _evaluating(inner):
        logits = _logits(inner, config, inputs, documents)
        for parity in (0, 1):
            changed_batch = with_other_content(batch, parity, special_ids(config))
            changed = _logits(inner, config, prepare(changed_batch), documents)
            for number in documents[documents % 2 != parity].unique().tolist():
                is_document = documents == number
                change = _distance(logits[is_document], changed[is_document])
                if not change <= _tolerance(inner, logits):
                    raise ConfigError(
                        f"check_packing: document {number} changes with the content of others, by "
                        f"{change:.1g} of its logits: {_cause(prepare(batch), batch, config)}"
                    )
                leak = max(leak, change)
    return PackingCheck(len(documents.unique()), leak)


def _logits(model: Any, config: Any, inputs: dict[str, Any], documents: Tensor) -> Tensor:
    """Return the logits of the tokens of a batch, [B, T, V]."""
    try:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
    except ValueError as error:  # transformers itself refuses what its layers cannot keep apart
        raise ConfigError(
            f"check_packing: {config.model_type} does not run on this batch: {error}"
        ) from error
    logits: Tensor = outputs.logits[:, : documents.shape[1]]  # without a blank medium
    return logits


def _distance(values: Tensor, others: Tensor) -> float:
    """Return the root mean square of a difference, in parts of that of the values."""
    scale = values.float().square().mean().sqrt()
    distance = (values.float() - others.float()).square().mean().sqrt()
    return float(distance / scale.clamp(min=1e-30))


def _tolerance(model: Any, logits: Tensor) -> float:
    dtypes = {logits.dtype, getattr(model, "dtype", torch.float32)}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


def _cause(inputs: dict[str, Any], batch: Batch, config: Any) -> str:
    """Return what is wrong with the arguments of a model, or that the model itself is."""
    positions: Any = inputs.get("position_ids")
    has_positions = positions is not None
    text_positions = positions[0] if has_positions and positions.ndim == 3 else positions
    boundaries = batch["cu_seq_lens_q"].long()
    starts = boundaries[:-1][boundaries.diff() > 0]
    faults = {
        "attention_mask is given, and with one models do not look for documents": (
            inputs.get("attention_mask") is not None
        ),
        "use_cache is not False, and with a cache models do not look for documents": (
            inputs.get("use_cache") is not False
        ),
        "position_ids are missing": not has_positions,
        f"position_ids of {config.model_type} need four rows: text, time, height and width": (
            has_positions and needs_mrope(config) and (positions.ndim == 2 or len(positions) != 4)
        ),
        "position_ids do not begin at 0 in each document": (
            has_positions
            and text_positions.shape == batch["input_ids"].shape
            and bool(text_positions.flatten()[starts].any())
        ),
        "seq_idx is missing": has_state_layers(config) and inputs.get("seq_idx") is None,
    }
    if any(faults.values()):
        return "; ".join(fault for fault, is_present in faults.items() if is_present)
    return (
        f"{config.model_type} with {attention_of(config)} attention does not keep documents apart "
        "by these arguments: leave batching= out, so that each row is one document"
    )


def special_ids(config: Any) -> set[int]:
    """Return the ids of tokens that a config names, such as ``image_token_id``."""
    ids: set[int] = set()
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if name.endswith(("_token_id", "_token_index")):
                values = value if isinstance(value, list | tuple) else [value]
                ids |= {number for number in values if isinstance(number, int)}
    return ids


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run a model without gradients and dropout. It stays as it was, and so do random states."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def with_other_content(batch: Batch, parity: int, special: set[int]) -> Batch:
    """Return a flat batch with other tokens, pixels and sounds in every second document.

    Args:
        batch: A flat batch.
        parity: 0 changes the documents 0, 2, 4 and so on, 1 the others.
        special: Ids of tokens that stand for media or have another meaning to the model. They stay.
    """
    ids: Tensor = batch["input_ids"]
    first, second = islice((number for number in count() if number not in special), 2)
    is_text = ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device))
    is_changed = is_text & (batch["document_ids"] % 2 == parity)
    replacement = torch.where(ids == first, second, first)
    changed = {**batch, "input_ids": torch.where(is_changed, replacement, ids)}
    for companion, documents in batch.items():  # such as image_document: of each picture
        name = companion.removesuffix("_document")
        if name == companion or not isinstance(documents, Tensor):
            continue
        for field in (name, f"{name}_features"):
            values, flags = batch.get(field), documents % 2 == parity
            if isinstance(values, Tensor) and f"{name}_frames" in batch:
                flags = flags.repeat_interleave(batch[f"{name}_frames"])
            if values is not None and len(flags):
                media = [
                    _inverted(medium) if flag else medium
                    for medium, flag in zip(values, flags.tolist(), strict=True)
                ]
                changed[field] = torch.stack(media) if isinstance(values, Tensor) else media
    return changed


def _inverted(values: Tensor) -> Tensor:
    return 255 - values if values.dtype == torch.uint8 else 0.5 - values


_checked: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The attention with which a model was checked. It holds no model."""


def _check_once(model: Any, config: Any, device: torch.device) -> None:
    """Check with three short documents that a model keeps them apart.

    A model with parameters that are sharded or elsewhere is not run: a forward pass outside the
    training step waits for other ranks. The log says so.

    Raises:
        ConfigError: It does not keep them apart.
    """
    if torch.compiler.is_compiling() or any(_is_elsewhere(p, device) for p in model.parameters()):
        logger.warning(
            "model_inputs: %s: not checked whether it keeps documents apart, as it is being "
            "compiled or its parameters are sharded or on another device; call "
            "mmstream.train.check_packing(model, batch) before you wrap the model",
            config.model_type,
        )
        return
    special = special_ids(config)
    vocabulary = range(min(int(config.get_text_config().vocab_size), 1000))
    ids = np.resize([token for token in vocabulary if token not in special], sum(PROBE_LENGTHS))
    documents = np.split(ids, np.cumsum(PROBE_LENGTHS)[:-1])
    samples = [{"input_ids": document} for document in documents]
    batch = flatten(samples, range(len(samples)), len(samples), Flat())
    batch = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    prepare = partial(model_inputs, model_or_family=model, blank_image=False, check=False)
    # flex attention is not compiled for these few tokens, which would take half a minute.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        check_packing(model, batch, prepare)


def _is_elsewhere(weight: Any, device: torch.device) -> bool:
    """Tell whether a parameter is sharded (FSDP, tensor parallelism, ZeRO) or not on the device."""
    is_sharded = hasattr(weight, "placements") or hasattr(weight, "ds_id")
    return is_sharded or type(weight).__name__ == "FlatParameter" or weight.device != device


# -- flat batches as kernels and other trainers take them ------------------------------------------


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def flex_block_mask(batch: Batch, *, block_size: PositiveInt = 128) -> BlockMask:
    """Return the mask by which a token sees those before it in its own document.

    For models of your own: those of transformers make it from ``position_ids``. Blocks of other
    documents are skipped.

    Args:
        batch: A flat batch, of layout "flat" or "rows", on the device of the model.
        block_size: Side of a block, in tokens.

    Returns:
        A mask for queries and keys of [B, heads, T, D].

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> flex_block_mask(batch).shape
        (1, 1, 4, 4)
    """
    from torch.nn.attention.flex_attention import create_block_mask  # it imports the compiler

    documents: Tensor = batch["document_ids"]
    num_rows, num_tokens = documents.shape

    def is_seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return create_block_mask(
        is_seen,
        num_rows,
        None,
        num_tokens,
        num_tokens,
        device=str(documents.device),
        BLOCK_SIZE=block_size,
    )


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def flash_attention_arguments(batch: Batch) -> dict[str, Any]:
    """Return the lengths of documents under the names of ``flash_attn_varlen_func``.

    For models of your own: those of transformers get them from `model_inputs`. Queries, keys and
    values are [B * T, heads, D], the tokens of all rows one after the other.

    Args:
        batch: A flat batch, of layout "flat" or "rows".

    Returns:
        ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 [documents + 1], ``max_seqlen_q`` and
        ``max_seqlen_k``, numbers, and ``causal``, True.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> flash_attention_arguments(batch)["cu_seqlens_q"].tolist()
        [0, 3, 4]
    """
    return {
        "cu_seqlens_q": batch["cu_seq_lens_q"],
        "cu_seqlens_k": batch["cu_seq_lens_k"],
        "max_seqlen_q": batch["max_length_q"],
        "max_seqlen_k": batch["max_length_k"],
        "causal": True,
    }


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def megatron_packing(batch: Batch, *, multiple_of: PositiveInt = 1) -> dict[str, Any]:
    """Return the arguments of Megatron's ``PackedSeqParams``.

    Documents have no padding between them, so the padded lengths are the lengths. Context
    parallelism cuts each document into 2 * its size parts, and sequence parallelism the tokens.
    Then documents must be multiples of ``2 * cp * tp``: plan packs with that, or give
    ``mm.Flat(document_multiple_of=)``.

    Args:
        batch: A flat batch, of layout "flat".
        multiple_of: What each document's length must be a multiple of.

    Returns:
        ``qkv_format``, "thd"; ``cu_seqlens_q`` and ``cu_seqlens_kv``, int32 [documents + 1], and
        the same as ``cu_seqlens_q_padded`` and ``cu_seqlens_kv_padded``; ``max_seqlen_q`` and
        ``max_seqlen_kv``, the longest document, at most T; and ``total_tokens``, T.

    Raises:
        ConfigError: The batch has several rows, or a document of another length.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> samples = [{"input_ids": np.array([5, 6, 7])}, {"input_ids": np.array([8])}]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> arguments = megatron_packing(batch)
        >>> arguments["qkv_format"], arguments["cu_seqlens_q"].tolist()
        ('thd', [0, 3, 4])
    """
    num_rows, num_tokens = batch["input_ids"].shape
    if num_rows > 1:
        raise ConfigError(
            f"megatron_packing: the batch has {num_rows} rows, and thd is one line of documents: "
            'give batching= layout="flat"'
        )
    queries, keys = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]
    uneven = queries.diff() % multiple_of
    if multiple_of > 1 and bool(uneven.any()):
        number = int(uneven.nonzero()[0])
        raise ConfigError(
            f"megatron_packing: document {number} has {int(queries.diff()[number])} tokens, no "
            f"multiple of {multiple_of}: plan packs with --document-multiple-of {multiple_of}"
        )
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
        "cu_seqlens_q_padded": queries,
        "cu_seqlens_kv_padded": keys,
        "max_seqlen_q": min(batch["max_length_q"], num_tokens),
        "max_seqlen_kv": min(batch["max_length_k"], num_tokens),
        "total_tokens": num_tokens,
    }


@checked(cure="give a batch of Pipeline(batching=mm.Flat()) or mm.Pack")
def torchtitan_batch(batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """Return the ``TrainerBatch`` of torchtitan: its input and its labels.

    torchtitan shifts no labels: the label of a token is the next one. It takes the tokens of a rank
    in one line, and masks documents where ``positions`` are 0.

    Args:
        batch: A flat batch. Of layout "rows", the rows are put one after the other.

    Returns:
        ``input`` and ``positions``, int64 [T], and the labels, int64 [T]: -100 at the end of each
        document. With positions of four rows, ``mrope_positions`` are int64 [T, 3]: time, height
        and width.

    Raises:
        ConfigError: The batch has no labels.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> ids = [np.array([5, 6, 7]), np.array([8, 9])]
        >>> samples = [{"input_ids": own, "labels": own} for own in ids]
        >>> batch = flatten(samples, [0, 1], 2, mm.Flat())
        >>> inputs, labels = torchtitan_batch(batch)
        >>> inputs["positions"].tolist(), labels.tolist()
        ([0, 1, 2, 0, 1], [6, 7, -100, 9, -100])
    """
    if "labels" not in batch:
        raise ConfigError("torchtitan_batch: the batch has no labels; give TextDecoder labels")
    positions = batch["position_ids"]
    text = positions[0] if positions.ndim == 3 else positions
    # The first label of a document is -100, so shifting ends each document with -100.
    labels = torch.roll(batch["labels"].flatten(), -1)
    labels[-1] = IGNORED_LABEL
    inputs = {"input": batch["input_ids"].flatten(), "positions": text.flatten()}
    if positions.ndim == 3:
        inputs["mrope_positions"] = positions[1:].flatten(1).T.contiguous()
    return inputs, labels


@checked(late=True)
def preference_inputs(batch: Batch, pad_token_id: int) -> dict[str, Tensor]:
    """Return what TRL's collator of preferences returns: the chosen answers, then the rejected.

    `LoaderTrainerMixin` calls it for TRL's trainers.

    Args:
        batch: Of preferences, with ``TextDecoder(texts="all")`` and ``batching=mm.Flat()``. Rows
            that are not valid are left out. Without a valid row there is a pair of equal rows,
            which no loss learns from.
        pad_token_id: The tokenizer's.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, int64 [2 P, T] for P pairs: the
        question and an answer, which ones are tokens, and which ones are tokens of the answer.

    Raises:
        ConfigError: The batch is padded, has media or weights of labels, or samples without two
            texts.

    Examples:
        >>> import numpy as np
        >>> from mmstream.batching.flat import flatten
        >>> ids = [np.array([5, 6]), np.array([5, 7, 8])]
        >>> labels = [np.array([-100, 6]), np.array([-100, 7, 8])]
        >>> batch = flatten([{"input_ids": ids, "labels": labels}], [0], 1, mm.Flat())
        >>> batch["__valid__"] = torch.tensor([True])
        >>> inputs = preference_inputs(batch, pad_token_id=0)
        >>> inputs["input_ids"].tolist(), inputs["completion_mask"].tolist()
        ([[5, 6, 0], [5, 7, 8]], [[0, 1, 0], [0, 1, 1]])
    """
    if not is_flat(batch):
        raise ConfigError("preference_inputs: pass Pipeline(batching=mm.Flat())")
    if "label_weights" in batch or any(
        name.endswith("_document") and len(batch[name]) for name in batch
    ):
        raise ConfigError("preference_inputs: the batch has media or label_weights, it takes texts")
    samples = batch["document_sample"].tolist()
    counts = Counter(sample for sample in samples if sample >= 0)
    if set(counts.values()) - {2}:
        raise ConfigError(
            'preference_inputs: a sample has no two texts: pass TextDecoder(texts="all"), and '
            "samples of preferences"
        )
    is_valid = batch["__valid__"].cpu()[batch["document_row"].cpu()].tolist()
    pairs = [number for number, sample in enumerate(samples) if sample >= 0 and is_valid[number]]
    borders = batch["cu_seq_lens_q"].tolist()
    documents = [
        slice(borders[number], borders[number + 1])
        for number in (*pairs[::2], *pairs[1::2]) or (0, 0)
    ]
    ids, labels = batch["input_ids"].flatten(), valid_labels(batch).flatten()
    columns = {
        "input_ids": (ids, pad_token_id),
        "attention_mask": (torch.ones_like(ids), 0),
        "completion_mask": ((labels != IGNORED_LABEL).long(), 0),
    }
    return {
        name: pad_sequence(
            [values[part] for part in documents], batch_first=True, padding_value=fill
        )
        for name, (values, fill) in columns.items()
    }
