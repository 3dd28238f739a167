"""Which model is trained, and the decoders that feed it: a small model, or one from a folder.

Four kinds of models are known: "clip" (``clip.py``), "vlm" (images of one size) and "chat" (images
and videos as the folder's processor makes them), both in ``vlm.py``, and "speech" (Whisper), here.

    loop.run -> `open_model`

The loop can train every `nn.Module` with the two methods of `Trainable`. To train your own model,
write these two methods and pass the model to `mmstream.train.train`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mmstream.batching.flat import Flat, Pack
from mmstream.batching.valid import summed_loss, valid_labels
from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.dataset.source import datasets_of
from mmstream.decoding.audio.decoder import AudioDecoder
from mmstream.decoding.bad_samples import BadSamplePolicy
from mmstream.decoding.decode import Decode
from mmstream.decoding.stored import baked_content
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.errors import ConfigError, escaped
from mmstream.loader.device import Normalize
from mmstream.order import Buckets
from mmstream.pipeline import Pipeline
from mmstream.train import clip, vlm
from mmstream.train.config import SMALL_MODELS, TrainConfig
from mmstream.train.inputs import model_inputs
from mmstream.train.tokenizer import image_settings, load_pretrained, open_tokenizer, read_json
from mmstream.types import IGNORED_LABEL, Batch

CLIP_NORMALIZE = Normalize(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
"""Pixel statistics of OpenAI's CLIP, also used by Llava's vision tower."""


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
        model = vlm.load_chat(config.model, tokenizer)
        decode = vlm.chat_decode(tokenizer, config.model, max_length)
    elif kind == "speech":
        model = load_speech(config.model)
        decode = speech_decode(tokenizer, config.model, max_length)
    elif kind == "vlm":
        model = vlm.small_vlm(tokenizer=tokenizer, **small) if folder is None else None
        model = model or vlm.load_vlm(config.model, tokenizer=tokenizer)
        decode = vlm.vlm_decode(tokenizer, model, max_length)
    else:
        towers = clip.small_clip(vocab_size=len(tokenizer), **small) if folder is None else None
        model = clip.ContrastiveClip(towers or clip.load_clip(config.model), most_rows)
        decode = clip.clip_decode(tokenizer, model, max_length)
    model.normalize = None if kind == "speech" else _normalize_of(folder)
    return model, decode


def what_it_takes(model: Any) -> str:
    """Return what a sample must have for a model, after an error of bad samples; "": unknown."""
    takes = getattr(model, "takes", None)
    return "" if takes is None else f"; {type(model).__name__} takes {takes}"


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
    if family not in vlm.CHAT_FAMILIES:
        return "vlm"
    if image_settings(Path(folder))[0] is None:
        raise ConfigError(f"model: {folder} has no processor; save it beside the model")
    return "chat"


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
