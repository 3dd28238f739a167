"""What the library knows of a family of models: the base of all families, and what they exchange.

    registry.of -> a `Family` -> train/inputs.py: media as the model takes them, counts, blanks

A family is one module of this folder: tokens of a medium, tiles, positions, and a `Family` by each
``model_type``. torch is imported inside functions, because planning imports these modules too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmstream.errors import ConfigError
from mmstream.types import Batch

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
"""For annotations: it is no class at run time."""

Inputs: TypeAlias = "dict[str, Tensor]"
"""Arguments of a model's forward pass, by name."""


class DocumentMedia(NamedTuple):
    """What positions depend on beside the tokens of a document."""

    images: list[tuple[int, int]]
    """Height and width of each picture in pixels, in the order of the text."""
    videos: list[tuple[int, int, int]]
    """Frames, height and width of each video."""
    fps: list[float]
    """Frames per second of each video."""


# -- the media of a batch --------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """The pictures of a batch, normalised. There is at least one."""

    tiles: Tensor | list[Tensor]
    """Floating [num_tiles, 3, H, W], or a list of [3, H, W]. A picture without tiles is one."""
    rows: Tensor
    """int64 [num_tiles], the row of each tile, ascending."""
    num_rows: int
    tiles_per_picture: Tensor | None = None
    """int64 [num_pictures]. None: each picture is one tile."""
    sizes: Tensor | None = None
    """int64 [num_pictures, 2], height and width of the picture in its file."""
    samples: Tensor | None = None
    """int64 [num_tiles], which sample of the batch each tile is of, ascending. None: `rows`."""

    @classmethod
    def blank(cls, *shape: int, size: tuple[int, int] | None = None) -> Pictures:
        """Return a blank picture in row 0. Its pixels are 1: for Idefics, zeros are not a picture.

        Args:
            shape: That of its tiles, [num_tiles, 3, H, W].
            size: Height and width of the picture in its file. None: those of its tile.
        """
        import torch

        return cls(
            torch.ones(shape),
            torch.zeros(shape[0], dtype=torch.int64),
            1,
            tiles_per_picture=torch.tensor([shape[0]]),
            sizes=torch.tensor([size or shape[-2:]]),
        )

    def in_row(self, row: int, ids: Tensor) -> Pictures:
        """Return the same pictures in a row of a batch with these ids, on its device."""
        assert self.sizes is not None
        assert not isinstance(self.tiles, list)
        return replace(
            self,
            tiles=self.tiles.to(ids.device),
            rows=(self.rows + row).to(ids.device),
            num_rows=len(ids),
            sizes=self.sizes.to(ids.device),
        )

    def stacked(self, family: str) -> Tensor:
        """Return the tiles as one tensor, contiguous.

        Raises:
            ConfigError: They differ in size.
        """
        import torch

        if isinstance(self.tiles, torch.Tensor):
            return self.tiles.contiguous()
        if len({tile.shape for tile in self.tiles}) > 1:
            raise ConfigError(
                f"model_inputs: {family} takes pictures of one size, these differ: "
                "give ImageDecoder a size"
            )
        return torch.stack(self.tiles)

    def one_a_row(self, batch: Batch, family: str) -> Tensor:
        """Return [B, 3, H, W], the one picture of each row.

        Raises:
            ConfigError: A row has none, or several.
        """
        counts = self.rows.bincount(minlength=self.num_rows).tolist()
        require_one_each(batch, counts, family, "picture")
        return self.stacked(family)


@dataclass(frozen=True)
class Videos:
    """The videos of a batch, normalised. There is at least one."""

    frames: list[Tensor]
    """Floating [F, 3, H, W], one entry a video."""
    fps: Tensor
    """float64 [num_videos], frames per second of each."""
    requested_fps: Tensor | None = None
    """float64 [num_videos], frames per second that the decoder was asked for. 0: it was asked
    otherwise. None: the batch does not say it."""

    def in_row(self, row: int, ids: Tensor) -> Videos:
        """Return the same videos on the device of a batch."""
        return replace(self, frames=[frames.to(ids.device) for frames in self.frames])


@dataclass(frozen=True)
class Features:
    """The log-mel features of a batch's recordings. There is at least one."""

    values: Tensor
    """Floating [num_audios, M, F]."""
    lengths: Tensor
    """int64 [num_audios], frames that are not padding."""
    rows: Tensor
    """int64 [num_audios], the row of each recording, ascending."""

    def in_row(self, row: int, ids: Tensor) -> Features:
        """Return the same features in a row of a batch with these ids, on its device."""
        moved = (self.values, self.lengths, self.rows + row)
        return Features(*(tensor.to(ids.device) for tensor in moved))

    def of_dtype(self, dtype: torch.dtype) -> Features:
        """Return the same features in the dtype that a model computes in."""
        return replace(self, values=self.values.to(dtype))


Medium: TypeAlias = Pictures | Videos | Features

KINDS = {"image": "pictures", "video": "videos", "audio": "audio"}
"""The kinds of media, and what a batch has of them in messages."""


class TokenCount(NamedTuple):
    """How many tokens the media of a batch take."""

    number: int
    setting: str
    """The ``<kind>_length`` of a `TextDecoder` that counts so, for messages."""


class Blank(NamedTuple):
    """A small medium for a batch that has nothing for a tower of the model."""

    tokens: list[int]
    medium: Medium

    @classmethod
    def picture(cls, config: Any, num_tokens: int, height: int, width: int) -> Blank:
        """Return a picture of this size in pixels, which takes so many tokens."""
        return cls([config.image_token_id] * num_tokens, Pictures.blank(1, 3, height, width))


# -- the families ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """What is known of the models of one family. A subclass overrides what its models need.

    The base is a model of text: it takes no media.

    Attributes:
        takes: The kinds of media: "image", "video", "audio".
        takes_one_a_row: Whether each row has exactly one medium, so that flat batches are refused.
            Such a family overrides `row_inputs`.

    Examples:
        >>> family = mm.families.of("qwen2_vl")
        >>> family.takes
        ('image', 'video')
    """

    takes: tuple[str, ...] = ()
    takes_one_a_row: bool = False

    def decoders(self, processor: Any, **settings: dict[str, Any]) -> dict[str, Any]:
        """Return the decoders that do what a processor of transformers does, for ``mm.Decode``.

        Args:
            processor: It holds the processors of the kinds of media, or is one of them.
            **settings: By kind: settings of the decoder that replace the processor's.

        Raises:
            ConfigError: The processor is for none of the kinds.
        """
        from mmstream.decoding.audio import AudioDecoder  # it imports torch
        from mmstream.decoding.image.decoder import ImageDecoder
        from mmstream.decoding.video.decoder import VideoDecoder

        sources: dict[str, tuple[Any, str, str]] = {
            "image": (ImageDecoder, "image_processor", "ImageProcessor"),
            "video": (VideoDecoder, "video_processor", "VideoProcessor"),
            "audio": (AudioDecoder, "feature_extractor", "FeatureExtractor"),
        }
        class_name = type(processor).__name__
        decoders = {
            kind: decoder.from_processor(processor, **settings.get(kind, {}))
            for kind, (decoder, holder, its_class) in sources.items()
            if kind in self.takes and (hasattr(processor, holder) or its_class in class_name)
        }
        if self.takes and not decoders:
            wanted = " or ".join(sources[kind][1] for kind in self.takes)
            raise ConfigError(
                f"decoders: {class_name} has no {wanted}: pass the model's "
                "transformers.AutoProcessor.from_pretrained(...)"
            )
        return decoders

    def inputs(self, media: dict[str, Medium], ids: Tensor, config: Any) -> Inputs:
        """Return the media as the model takes them, as its processor in transformers returns them.

        Args:
            media: The media of a batch, by kind. A kind that the batch has not is missing.
            ids: int64 [B, T].
            config: The model's config.

        Raises:
            ConfigError: They have another form. The message names the setting of a decoder.
        """
        arrange: dict[str, Callable[[Any, Any], Inputs]] = {
            "image": self.image_inputs,
            "video": self.video_inputs,
            "audio": self.audio_inputs,
        }
        inputs: Inputs = {}
        for kind, medium in media.items():
            inputs |= arrange[kind](medium, config)
        return inputs

    def image_inputs(self, pictures: Pictures, config: Any) -> Inputs:
        """Return the pictures as the model takes them."""
        raise NotImplementedError

    def video_inputs(self, videos: Videos, config: Any) -> Inputs:
        """Return the videos as the model takes them."""
        raise NotImplementedError

    def audio_inputs(self, features: Features, config: Any) -> Inputs:
        """Return the features of recordings as the model takes them."""
        raise NotImplementedError

    def text_inputs(self, text: Inputs, config: Any) -> Inputs:
        """Return what the model takes of a text beside ids, mask and labels: by default, nothing.

        Args:
            text: ``input_ids``, and ``attention_mask`` and ``labels`` where the batch has them.
            config: The model's config.
        """
        return {}

    def row_inputs(
        self, batch: Batch, media: dict[str, Medium], config: Any, label_field: str
    ) -> dict[str, Any]:
        """Return all arguments of a model that takes one medium a row."""
        raise NotImplementedError

    def num_tokens(self, kind: str, medium: Any, config: Any) -> TokenCount | None:
        """Return how many tokens the media of a kind take. None: the model itself compares."""
        return None

    def blank(self, kind: str, config: Any) -> Blank | None:
        """Return a small medium for a batch without any, of "image" (or a video) or "audio".

        A tower of the model runs only where it has something to do. Without it, its parameters have
        no gradient, and a rank that trains with DDP, FSDP or ZeRO waits for them for ever.
        """
        return None

    def padded_positions(self, text: Inputs, media_inputs: Inputs, model: Any, config: Any) -> Any:
        """Return the positions of padded rows. None: the model itself counts them rightly."""
        return None

    def flat_positions(
        self, text: Inputs, media_inputs: Inputs, model: Any, config: Any, *, sees: bool
    ) -> Tensor:
        """Return the positions of a flat batch, int64 [B, T] or of four rows, [4, B, T].

        Args:
            text: Of `packed_text`.
            media_inputs: The media as the model takes them.
            model: The model; None where only its config is known.
            config: The model's config.
            sees: Whether there are pictures or videos that are not blank.
        """
        positions = text["position_ids"]
        return positions[0] if positions.ndim == 3 else positions


def side_of(value: Any) -> int:
    """Return the side of a square that a config states as one number or two."""
    return int(value[0] if isinstance(value, list | tuple) else value)


def require_size(model_type: str, media: str, tensor: Tensor, side: int, cure: str) -> None:
    """Refuse pictures or frames, [..., H, W], that are not squares of the tower's size.

    Raises:
        ConfigError: Names both sizes, and the setting.
    """
    height, width = tensor.shape[-2:]
    if (height, width) != (side, side):
        raise ConfigError(
            f"model_inputs: {model_type} takes {media} of {side}x{side} here, not "
            f"{width}x{height}: {cure}"
        )


def check_count(ids: Tensor, config: Any, kind: str, count: TokenCount, family: Family) -> None:
    """Check that a text has as many tokens of a kind as the model makes vectors.

    The model itself would compare numbers of other things, and name no setting.

    Args:
        ids: int64 [B, T].
        config: The model's config. Its ``<kind>_token_id`` is the token.
        kind: "image", "video" or "audio".
        count: What the media take.
        family: Has counted them.

    Raises:
        ConfigError: Says which length the model needs.
    """
    token_id = getattr(config, f"{kind}_token_id")
    num_tokens = int((ids == token_id).sum())
    if num_tokens == count.number:
        return
    token = "" if num_tokens else f", and {kind}_token= of the token with the id {token_id}"
    cure = f"TextDecoder({kind}_length={count.setting}){token}"
    owner = type(family)
    if not owner.__module__.startswith("mmstream.") and "num_tokens" not in vars(owner):
        cure = f"override {owner.__name__}.num_tokens, which it inherits, or {cure}"
    raise ConfigError(
        f"model_inputs: {config.model_type} takes {count.number:,} {kind} tokens for the "
        f"{KINDS[kind]} of this batch, the text has {num_tokens:,}: {cure}"
    )


def require_one_each(batch: Batch, counts: Sequence[int], family: str, medium: str) -> None:
    """Refuse a batch in which a row has no medium of a kind, or more than one.

    Args:
        batch: Names the row in the message, if it has keys.
        counts: How many each row has.
        family: The model's.
        medium: "picture" or "audio".

    Raises:
        ConfigError: Names the first such row.
    """
    for row, count in enumerate(counts):
        if count != 1:
            key = batch["__key__"][row] if "__key__" in batch else f"row {row}"
            raise ConfigError(
                f"model_inputs: {family} takes one {medium} a row, {key} has {count}: leave such "
                "samples out with a transform that raises mm.SkipSample"
            )


# -- torchvision -----------------------------------------------------------------------------------
#
# PyPI's torchvision wheel is compiled against a CUDA build of torch. With a CPU build of torch its
# compiled code does not load. Its Python code then stops with ``operator torchvision::nms does not
# exist``, although transforms and image grids need no compiled code.
#
# The remedy is to declare the operators that the Python code looks for. They get no implementation:
# `torchvision.ops.nms` and `torchvision.io` still raise an error when they are called.

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# torch drops the declarations with the library object, so it must live as long as the process.
_declared: list[object] = []


def import_torchvision() -> ModuleType:
    """Import torchvision. Declare the operators that its compiled code failed to provide.

    Call it before the first import of torchvision, and before importing a library that imports
    torchvision itself.

    Returns:
        The module ``torchvision``.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: torchvision fails for another reason than missing operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    import torch

    # The failed import leaves half initialised submodules behind.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _SCHEMAS:
        library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return importlib.import_module("torchvision")
