"""`mm.model_inputs`: the keyword arguments of a Hugging Face model's forward pass, from a batch.

    loader or device -> `model_inputs` -> model(**inputs)

arguments.py makes them. When a model gets its first flat batch, three documents of a few tokens are
run three times. That is cheap for a model of any size. It says whether its family, its version and
its attention keep documents apart.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from mmstream.batching.flat import Flat, flatten
from mmstream.errors import ConfigError
from mmstream.families.registry import model_and_config
from mmstream.settings import checked
from mmstream.train.arguments import Request, attention_of, is_packed, model_arguments
from mmstream.train.check_packing import check_packing, special_ids
from mmstream.types import Batch

logger = logging.getLogger(__name__)


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
      ``internvl``, ``idefics2``, ``idefics3``, ``smolvlm``, ``llava_onevision``. A row may have any
      number of pictures. Labels are those of the tokens. ``qwen2_vl``, ``qwen2_5_vl``,
      ``qwen3_vl``, ``smolvlm`` and ``llava_onevision`` also take videos.
    - Language models of text only: all that transformers calls ``ForCausalLM``, such as ``llama``,
      ``qwen3``, ``gemma``, ``mistral``.
    - Models that hear: ``qwen2_audio``. ``qwen2_5_omni_thinker`` and ``qwen3_omni_moe_thinker``
      take pictures, videos and audio.
    - Speech to text: ``whisper``. A row has one recording, and its text is what is learned.
    - Two towers: ``clip``, ``siglip``. A row has one picture and one text. SigLIP gets no
      ``attention_mask``: its models were trained without one, on texts padded to ``max_length``.
    - Classification: ``vit``, ``resnet`` and every other model that is called
      ``ForImageClassification``. A row has one picture, and its class is in `label_field`.

    Flat batches, of ``Pipeline(batching=)``, are taken by all of these but Whisper, two towers and
    classifiers. The model gets positions that begin anew in each document, no ``attention_mask``,
    and ``use_cache=False``: with a cache, or a mask, documents would see each other in silence.
    Qwen-VL gets positions of four rows, made here by the model's own rule where the batch has one.
    FlashAttention gets the lengths of documents.

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
    request = Request(normalize, blank_image, label_field, image_field, video_field, audio_field)
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
    return model_arguments(batch, model_or_family, request)


PROBE_LENGTHS = (5, 1, 7)

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
            "mmstream.train.check_packing.check_packing(model, batch) before you wrap the model",
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
    prepare = partial(model_arguments, model_or_family=model, request=Request(blank_image=False))
    # flex attention is not compiled for these few tokens, which would take half a minute.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        check_packing(model, batch, prepare)


def _is_elsewhere(weight: Any, device: torch.device) -> bool:
    """Tell whether a parameter is sharded (FSDP, tensor parallelism, ZeRO) or not on the device."""
    is_sharded = hasattr(weight, "placements") or hasattr(weight, "ds_id")
    return is_sharded or type(weight).__name__ == "FlatParameter" or weight.device != device
