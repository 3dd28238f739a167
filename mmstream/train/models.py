"""Which model is trained, and the decoders that feed it: a small model, or one from a folder.

Four kinds of models are known: "clip", "vlm" (images of one size), "chat" (images and videos as the
folder's processor makes them) and "speech" (Whisper).

    loop.run -> `open_model_tokenizer`, `build_model`, `decode_for`, `normalize_for`

The loop can train every `nn.Module` with the two methods of `Trainable`. To train your own model,
write these two methods and pass the model to `mmstream.train.loop.fit`.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from mmstream.dataset.dataset import Dataset
from mmstream.dataset.mixture import Mixture
from mmstream.decoding.decode import Decode
from mmstream.decoding.fields import audio_fields, field_names, image_fields, video_fields
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.device.to_device import Normalize
from mmstream.errors import ConfigError, MMStreamError, escaped
from mmstream.train import clip
from mmstream.train.chat import CHAT_FAMILIES
from mmstream.train.config import TrainConfig
from mmstream.train.pretrained import image_settings, read_json
from mmstream.train.tokenizer import open_tokenizer
from mmstream.types import Batch

__all__ = [
    "CLIP_NORMALIZE",
    "Trainable",
    "build_model",
    "choose_attention",
    "decode_for",
    "hint_at_model",
    "needs_model",
    "normalize_for",
    "open_model_tokenizer",
]

CLIP_NORMALIZE = Normalize(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
"""Pixel statistics of OpenAI's CLIP, also used by Llava's vision tower."""

SMALL_IMAGE_SIZE = 64
"""Default side of the images of the small models, in pixels."""


class Trainable(Protocol):
    """The methods that the loop needs of an `nn.Module`.

    The loss of a step is the sum of loss_sum divided by the sum of weight, over all ranks, batches
    and micro-batches. For a mean over rows, weight is the number of rows. For a mean over tokens,
    it is the number of label tokens. Rows with ``__valid__`` False must not add to either.

    Every trained parameter must take part in each forward pass, because DDP waits for its gradient;
    multiply by zero if need be.

    Set ``separable = False`` on a model whose loss depends on the batch as a whole: the loop then
    refuses to cut or accumulate batches. Set ``takes_flat = False`` on one that needs whole rows:
    the loop then refuses `padding_free` and `pack`.
    """

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, weight), two scalars, of a batch or micro-batch on the device."""

    def weight_of(self, batch: Batch) -> Tensor:
        """Return the weight that `forward` returns for this batch, without computing the loss."""


def open_model_tokenizer(config: TrainConfig) -> Any:
    """Return the tokenizer of ``config.tokenizer``, else of the model's folder, else of bytes."""
    is_chat = _kind(config) in ("vlm", "chat")
    return open_tokenizer(config.tokenizer or _folder(config), chat=is_chat)


def build_model(config: TrainConfig, tokenizer: Any, world_size: int = 1) -> nn.Module:
    """Return the model of ``config.model`` in float32 on the CPU, the same on every rank.

    Args:
        config: settings.
        tokenizer: a `transformers` tokenizer. The vocabulary of a small model has its length.
        world_size: number of ranks that share the global batch.

    Raises:
        ConfigError: there is no such model, it is of no kind that is known, or it takes images of
            another size than `config` says.
    """
    folder = _folder(config)
    kind = _kind(config)
    if folder is not None and kind in ("chat", "speech"):
        return _load_with_processor(kind, folder, config, tokenizer)
    small = {
        "image_size": config.image_size or SMALL_IMAGE_SIZE,
        "max_length": _max_length(config),
        "seed": config.seed,
    }
    model: Any
    if kind == "vlm":
        from mmstream.train import vlm

        if folder is None:
            model = vlm.small_vlm(tokenizer=tokenizer, **small)
        else:
            model = vlm.load_vlm(folder, tokenizer=tokenizer, image_size=config.image_size)
    else:
        if folder is None:
            clip_model = clip.small_clip(vocab_size=len(tokenizer), **small)
        else:
            clip_model = clip.load_clip(folder)
        model = clip.ContrastiveClip(clip_model, config.most_rows(world_size))
    if config.image_size not in (None, model.image_size):
        raise ConfigError(
            f"train: {folder} takes images of {model.image_size} pixels, not {config.image_size}"
        )
    return model  # type: ignore[no-any-return]


def _load_with_processor(kind: str, folder: str, config: TrainConfig, tokenizer: Any) -> nn.Module:
    """Return a model whose processor says how its media are decoded."""
    if kind == "chat":
        from mmstream.train.chat import load_chat

        return load_chat(folder, tokenizer)
    from mmstream.train.speech import load_speech

    if config.image_size is not None:
        raise ConfigError(f"train: {folder} is a speech model: leave out image_size")
    return load_speech(folder)


def choose_attention(model: Any, name: str | None) -> None:
    """Set the attention of a vision-language model. None: it keeps its own.

    Raises:
        ConfigError: it has no such attention, a package is missing, or it is no such model.
    """
    if name is None:
        return
    vlm = getattr(model, "vlm", None)
    if vlm is None:
        raise ConfigError("train: attn_implementation is for vlm and chat models; leave it out")
    try:
        vlm.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"train: attn_implementation {name!r}: {escaped(error)}") from None


def needs_model(config: TrainConfig) -> bool:
    """Tell whether `decode_for` must see the model: it says the size and tokens of its images."""
    return _kind(config) in ("clip", "vlm")


def decode_for(config: TrainConfig, tokenizer: Any, model: Any) -> Decode:
    """Return the decoders that make the fields that a model of `build_model` reads."""
    folder, kind = _folder(config), _kind(config)
    if folder is not None and kind == "chat":
        from mmstream.train.chat import chat_decode

        return chat_decode(tokenizer, folder, _max_length(config), field=config.text_field)
    if folder is not None and kind == "speech":
        from mmstream.train.speech import speech_decode

        return speech_decode(tokenizer, folder, _max_length(config), field=config.text_field)
    if kind == "vlm":
        from mmstream.train import vlm

        return vlm.vlm_decode(
            tokenizer,
            model.image_size,
            model.image_length,
            _max_length(config),
            field=config.text_field,
        )
    return Decode(
        image=ImageDecoder(size=model.image_size),
        text=TextDecoder(
            tokenizer,
            max_length=_max_length(config),
            padding="longest",
            field=config.text_field,
        ),
    )


def normalize_for(config: TrainConfig) -> Normalize | None:
    """Return the pixel statistics of the model's folder; those of CLIP if it has none.

    None: the model takes no pixels.
    """
    folder = _folder(config)
    if _kind(config) == "speech":
        return None
    path, settings = (None, {}) if folder is None else image_settings(Path(folder))
    if path is None or "image_mean" not in settings or "image_std" not in settings:
        return CLIP_NORMALIZE
    try:
        return Normalize(tuple(settings["image_mean"]), tuple(settings["image_std"]))
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: image_mean and image_std: {escaped(error)}") from None


def hint_at_model(config: TrainConfig, data: Dataset | Mixture) -> str:
    """Return what the data lacks that the model needs, as a hint for an error; else "".

    The first samples of each dataset are looked at.
    """
    needs = {"clip": _clip_hint, "vlm": _vlm_hint, "speech": _speech_hint}.get(_kind(config))
    if needs is None:
        return ""
    for dataset in data.datasets.values() if isinstance(data, Mixture) else [data]:
        try:
            hint = next(filter(None, map(needs, islice(dataset, 16))), "")
        except (MMStreamError, OSError, ValueError):  # the error in hand says what is wrong
            continue
        if hint:
            return hint
    return ""


def _clip_hint(sample: dict[str, Any]) -> str:
    """CLIP takes one image and one text."""
    if len(image_fields(sample)) == 1 and "txt" in sample:
        return ""
    if audio_fields(sample) and not image_fields(sample) and "txt" in sample:
        return "; --model with the folder of a Whisper takes recordings with transcripts"
    if "cls" in sample:
        return "; train has no model for classes: see docs/classification.md"
    return '; model="vlm" takes chats, with any number of images'


def _vlm_hint(sample: dict[str, Any]) -> str:
    """Llava and the small model take images of one size, or none."""
    if not video_fields(sample):
        return ""
    return (
        "; videos need a model with a video processor: give model= the folder of a Qwen2.5-VL, "
        "saved with its processor"
    )


def _speech_hint(sample: dict[str, Any]) -> str:
    """Whisper takes one recording and its transcript."""
    if len(audio_fields(sample)) == 1:
        return ""
    return (
        "; this model takes one recording (wav, flac, mp3, ...) and its transcript in each sample, "
        f"and there is one with {field_names(sample)}"
    )


def _folder(config: TrainConfig) -> str | None:
    """Return the folder of the model; None for the small models."""
    return None if config.model in ("clip", "vlm") else config.model


def _model_config(folder: str) -> dict[str, Any]:
    """Return ``config.json`` of a model's folder."""
    try:
        model_config = read_json(Path(folder, "config.json"))
    except ConfigError as error:
        raise ConfigError(
            f"model: {folder} is not clip, vlm or a model's folder: {error}"
        ) from None
    if "vision_config" not in model_config and model_config.get("model_type") != "whisper":
        raise ConfigError(
            f"model: {folder} is not a CLIP, Llava-style, Qwen-VL or Whisper model: it has no "
            "vision tower"
        )
    return model_config


def _kind(config: TrainConfig) -> str:
    """Return "clip", "vlm", "chat" or "speech"."""
    folder = _folder(config)
    if folder is None:
        return config.model
    family = _model_config(folder).get("model_type")
    if family in ("clip", "whisper"):
        return "clip" if family == "clip" else "speech"
    # With a size of images, the model gets squares of that size and no videos.
    has_processor = image_settings(Path(folder))[0] is not None
    is_chat = family in CHAT_FAMILIES and has_processor and config.image_size is None
    return "chat" if is_chat else "vlm"


def _max_length(config: TrainConfig) -> int:
    """Return the longest text in tokens: as `config` says, else what the kind of model takes."""
    kind = _kind(config)
    folder = _folder(config)
    if kind == "speech" and folder is not None:
        positions = _model_config(folder).get("max_target_positions")
        most = positions if isinstance(positions, int) else 448  # Whisper's own
        return min(config.max_length or most, most)
    # A text as long as a pack fits into one.
    return config.max_length or config.pack or {"clip": 64, "vlm": 512, "chat": 4096}[kind]
