"""`Decode`: which decoders a pipeline runs, as one frozen value that is checked when it is made.

Place in the flow: `Pipeline` holds it, and `sample.py` runs it on each sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from mmstream.dataset.source import ShardSource
from mmstream.decoding.by_field import FieldDecoder, FieldPlan, decoded_medium, plan_fields
from mmstream.decoding.fields import MAX_TEXT_BYTES, audio_fields, image_fields, video_fields
from mmstream.decoding.image.coordinates import Boxes, Points
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.sample_rng import is_user_function
from mmstream.decoding.stored import StoredFields
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.decoding.times import Times
from mmstream.errors import ConfigError, escaped
from mmstream.wrong_arguments import PositiveInt, checked

if TYPE_CHECKING:  # FFmpeg is slow to import, and pictures need none
    from mmstream.decoding.audio.decoder import AudioDecoder
    from mmstream.decoding.video.decoder import VideoDecoder

_ADVICE = {
    "images": "write image=mm.ImageDecoder(size=224)",
    "texts": "write text=mm.TextDecoder(tokenizer)",
    "tokenizer": "write text=mm.TextDecoder(tokenizer)",
    "videos": "write video=mm.VideoDecoder(num_frames=8, size=224)",
    "audios": "write audio=mm.AudioDecoder()",
    "transforms": "write mm.Pipeline(..., transforms=(function,))",
}
"""Arguments that are called otherwise."""


@checked(_ADVICE, own=("fields", "image", "text", "video", "audio", "same_geometry"))
@dataclass(frozen=True)
class Decode:
    """Which decoders a pipeline runs: by the names of fields, or by what they decode.

    Both ways go together. ``image=`` takes all pictures that `fields` does not name, and puts them
    into ``image``. ``video=`` and ``audio=`` do the same for videos and recordings. `fields` names
    its files, and a result keeps the name: ``batch["mask.png"]``.

    A decoder by field is one of these:

    - an `ImageDecoder`: uint8 [3, H, W], or [H, W] with ``mask=True``;
    - a `VideoDecoder`: uint8 [F, 3, H, W], with the time of each frame in ``NAME_pts_s``;
    - an `AudioDecoder`: [T] or [C, T]. Features are called ``NAME_features``;
    - a `TextDecoder`, at most one: it takes its text from this field;
    - `Boxes` or `Points`, under a name of your choice, which follow a picture of `same_geometry`;
    - `Times`, under a name of your choice, which follow a video or recording;
    - a function from bytes to a value, such as ``int``, ``str``, or your own;
    - ``...``, the built-in decoder of the extension: of ``cls`` and other numbers, ``txt``,
      ``json``, ``npy`` and ``npz`` without pickles, and of pictures.

    A name means the field of exactly this name: "jpg" is not "0.jpg" and not "mask.jpg". With
    "jpg;png", the first one that a sample has is taken, and the result is called "jpg". A sample
    that lacks a field is bad. A value that is no bytes any more, because a function of
    ``Pipeline(before=)`` has made it, stays as it is. Fields that are not named stay bytes.

    Attributes:
        fields: Decoders by the names of fields.
        image: The decoder of all other image fields of a sample. None: they stay bytes.
        text: The decoder of the messages or the text of a sample. None: they stay as they are.
        video: The decoder of all other video fields of a sample. Their tracks go to ``audio``, with
            ``VideoDecoder(audio=...)``. None: they stay bytes.
        audio: The decoder of all other audio fields of a sample. None: they stay bytes.
        same_geometry: Names of fields that are resized, cropped and flipped alike, a picture first:
            ``("jpg", "mask.png", "boxes")``. The others take the settings of the first. They need
            not repeat them. ``"image"`` means the picture of `image`. Several groups are a tuple of
            such tuples.
        max_json_bytes: The most bytes of a ``json`` field, from 1 up. A longer one makes its sample
            bad.
        min_lazy_bytes: Files of this many bytes or more are read by ranges, where their decoder
            needs a part of them. In functions of ``Pipeline(before=)`` they are `LazyBytes`. Such
            a sample is not compared with its checksum. None: all files are read whole.

    Raises:
        ConfigError: Something is no decoder, or does not go together. The message says what to
            write. Extensions that need pickle have no built-in decoder.

    Examples:
        >>> decode = mm.Decode(image=mm.ImageDecoder(size=224))
        >>> classes = mm.Decode({"jpg;png": mm.ImageDecoder(size=224), "cls": int})
        >>> clips = mm.Decode(video=mm.VideoDecoder(num_frames=8, size=224))
        >>> speech = mm.Decode({"flac;wav": mm.AudioDecoder(), "txt": str})
        >>> segmentation = mm.Decode(
        ...     {
        ...         "jpg": mm.ImageDecoder(size=224, crop="random", flip=0.5),
        ...         "mask.png": mm.ImageDecoder(mask=True),
        ...         "boxes": mm.Boxes("json.boxes", format="xywh"),
        ...     },
        ...     same_geometry=("jpg", "mask.png", "boxes"),
        ... )
    """

    fields: Mapping[str, FieldDecoder] | None = field(default=None, hash=False)
    _: KW_ONLY
    image: ImageDecoder | None = None
    text: TextDecoder | None = None
    video: VideoDecoder | None = None
    audio: AudioDecoder | None = None
    same_geometry: Sequence[str] | Sequence[Sequence[str]] = ()
    max_json_bytes: PositiveInt = MAX_TEXT_BYTES
    min_lazy_bytes: PositiveInt | None = 8 << 20
    plan: FieldPlan = field(init=False, repr=False, compare=False)
    """The decoders, sorted by what they do. For the decode stage."""
    has_media: bool = field(init=False, repr=False, compare=False)
    """Whether videos or recordings are decoded, by field or all of them."""
    has_user_functions: bool = field(init=False, repr=False, compare=False)
    """Whether functions or classes of the user take part."""
    has_user_media: bool = field(init=False, repr=False, compare=False)
    """Whether some of these run while media are planned or decoded: classes, parsers of JSON, and
    sources of boxes or times."""
    needed_shapes: frozenset[str] = field(init=False, repr=False, compare=False)
    """The kinds of media on whose shapes the tokens of a text depend."""
    is_baked: bool = field(default=False, init=False)
    """Whether samples were decoded by ``mmstream bake``; see `baked`."""
    stored: StoredFields | None = field(default=None, init=False, repr=False, compare=False)
    """The fields of the baked dataset. None: there is none, or no pipeline has one yet."""

    def __post_init__(self) -> None:
        _check_fields(self.fields)
        _check_image(self.image)
        _check_text(self.text)
        _check_medium("video", self.video)
        _check_medium("audio", self.audio)
        _check_tracks(self.video, self.audio)
        fields, text = _without_text(self.fields or {}, self.text)
        plan = plan_fields(fields, self.same_geometry, self.image, self.max_json_bytes)
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "plan", plan)
        has_media = any((plan.videos, plan.recordings, self.video, self.audio))
        object.__setattr__(self, "has_media", has_media)
        is_user = any(map(is_user_function, (self.image, self.video, self.audio)))
        has_user_media = is_user or not plan.user_fields <= plan.values.keys()
        has_functions = bool(plan.user_fields) or (text is not None and text.has_user_functions)
        object.__setattr__(self, "has_user_media", has_user_media)
        object.__setattr__(self, "has_user_functions", has_user_media or has_functions)
        needed = frozenset() if text is None else text.needs_shapes
        object.__setattr__(self, "needed_shapes", needed)
        groups = (each if isinstance(each, str) else tuple(each) for each in self.same_geometry)
        object.__setattr__(self, "same_geometry", tuple(groups))
        _check_times(plan, self.media - {"image"})
        if text is not None:
            _check_lengths(text, plan, self.media)

    @classmethod
    def baked(cls) -> Decode:
        """Return what reads the fields of a dataset that ``mmstream bake`` wrote.

        Batches are those of the pipeline that was baked.

        Examples:
            >>> mm.Decode.baked().is_baked
            True
        """
        decode = cls()
        object.__setattr__(decode, "is_baked", True)
        object.__setattr__(decode, "plan", FieldPlan({}))
        return decode

    def of_source(self, source: ShardSource, *, views: bool = False) -> Decode:
        """Return these decoders for a dataset: those of a baked one know its fields then.

        Args:
            source: The dataset.
            views: Baked arrays are views of what was read. Nobody may write to them.

        Raises:
            ConfigError: They read baked fields, and the dataset was not baked.
        """
        if not self.is_baked:
            return self
        decode = copy(self)
        stored = StoredFields.of_source(source, views=views)
        object.__setattr__(decode, "stored", stored)
        object.__setattr__(decode, "plan", FieldPlan(stored.parsers))
        return decode

    @property
    def holds_interpreter(self) -> bool:
        """Whether a sample takes short Python only: baked fields, numbers, texts and arrays.

        Threads would take the interpreter from each other. Decoders of media and tokenizers leave
        it to others; functions of the user may.
        """
        decoders = [each for each in self._decoders() if not isinstance(each, EllipsisType | type)]
        are_others = (self.image, self.text, self.plan.pictures, *decoders)
        return self.is_baked or not any(are_others)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the fields that are decoded into the memory of their batch, as uint8."""
        return self.plan.shapes(self.image) if self.stored is None else self.stored.shapes

    @property
    def has_ranged_decoders(self) -> bool:
        """Whether a decoder reads parts of a file; see `reads_by_ranges`."""
        return any(getattr(decoder, "reads_ranges", False) for decoder in self._decoders())

    def reads_by_ranges(self, field: str) -> bool:
        """Tell whether the decoder of a field takes `LazyBytes` and reads parts of the file.

        A decoder says so by a true attribute ``reads_ranges``. A function of yours may have it.
        """
        for key, decoder in (self.fields or {}).items():
            if field in key.split(";"):
                return bool(getattr(decoder, "reads_ranges", False))
        is_video, is_audio = bool(video_fields((field,))), bool(audio_fields((field,)))
        free = self.video if is_video else self.audio if is_audio else None
        return bool(getattr(free, "reads_ranges", False))

    def takes_view(self, field: str) -> bool:
        """Tell whether a file may be a view of what was read, and need not be bytes of its own.

        That is so where only `ImageDecoder` looks at it, which leaves no view in its result, or
        where it is a baked tensor. Functions of the user get bytes.
        """
        if self.stored is not None:
            return self.stored.takes_view(field)
        if self.text is not None and (callable(self.text.field) or self.text.field == field):
            return False
        plan = self.plan
        if field in plan.named_sources or field in plan.parsers:
            return False
        decoders: Sequence[ImageDecoder | None] = [self.image]
        if field in plan.picture_sources:
            decoders = [
                decoder
                for name, decoder in plan.pictures.items()
                if field in plan.sources.get(name, (name,))
            ]
        elif not image_fields((field,)):
            return False
        return all(map(_copies_nothing, decoders))

    def _decoders(self) -> list[Any]:
        return [*(self.fields or {}).values(), self.video, self.audio]

    @property
    def media(self) -> frozenset[str]:
        """The kinds of media of a text that these decoders decode."""
        has_tracks = self.video is not None and self.video.audio is not None
        decodes = {
            "image": self.image is not None,
            "video": self.video is not None,
            "audio": self.audio is not None or has_tracks,
        }
        return frozenset(kind for kind, is_decoded in decodes.items() if is_decoded)

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The fields of a batch that hold pictures with colours, which a model wants normalized."""
        if self.stored is not None:
            return self.stored.content.collate.picture_names
        by_field = [
            name
            for name, decoder in self.plan.pictures.items()
            if not decoder.mask and decoder.interpolation != "nearest"
        ]
        kinds = {"image": self.image, "video": self.video}
        named = [kind for kind, decoder in kinds.items() if decoder is not None]
        return (*by_field, *self.plan.videos, *named)


def _copies_nothing(decoder: ImageDecoder | None) -> bool:
    """Tell whether it is the built-in decoder of pictures, which also takes views."""
    return decoder is not None and not is_user_function(type(decoder))


def _without_text(
    fields: Mapping[str, Any], text: TextDecoder | None
) -> tuple[dict[str, Any], TextDecoder | None]:
    """Take the text decoder out of a mapping. It then takes its text from that field."""
    others = {}
    for name, decoder in fields.items():
        if not isinstance(decoder, TextDecoder):
            others[name] = decoder
            continue
        if text is not None:
            raise ConfigError(
                f"Decode: {name!r} is a second text decoder, and a batch has one input_ids; "
                "tokenize the other text with a function, or in transforms=(function,)"
            )
        text = decoder
        if decoder.field is None:
            text = dataclasses.replace(decoder, field=name)
        elif isinstance(decoder.field, str) and not f"{decoder.field}.".startswith(f"{name}."):
            raise ConfigError(
                f"Decode: {name!r} has TextDecoder(field={decoder.field!r}): leave out field="
            )
    return others, text


def _check_fields(fields: object) -> None:
    if fields is None or isinstance(fields, Mapping):
        return
    advice = 'give decoders by field, {"jpg": mm.ImageDecoder(size=224), "cls": int}'
    if isinstance(fields, ImageDecoder):
        advice = "write Decode(image=decoder)"
    elif isinstance(fields, TextDecoder):
        advice = "write Decode(text=decoder)"
    elif decoded_medium(fields) is not None:
        advice = f"write Decode({decoded_medium(fields)}=decoder)"
    elif isinstance(fields, Boxes | Points):
        advice = 'write Decode({"jpg": ..., "boxes": boxes}, same_geometry=("jpg", "boxes"))'
    elif isinstance(fields, Times):
        advice = 'write Decode({"events": times}, video=mm.VideoDecoder())'
    elif callable(fields):
        advice = (
            'name the field whose bytes it takes, Decode({"jpg": function}); a function of whole '
            "samples goes to Pipeline(transforms=(function,)), or before=(function,)"
        )
    raise ConfigError(f"Decode: got {_shown(fields)}: {advice}")


def _check_image(image: object) -> None:
    if image is None or (isinstance(image, ImageDecoder) and not image.mask):
        return
    advice = "write image=mm.ImageDecoder(size=224)"
    if isinstance(image, ImageDecoder):
        advice = 'a mask goes by field, Decode({"mask.png": mm.ImageDecoder(mask=True)})'
    elif any(hasattr(image, name) for name in ("image_processor", "image_mean", "pixel_values")):
        advice = "write image=mm.ImageDecoder.from_processor(processor)"
    elif isinstance(image, int | tuple):
        advice = f"write image=mm.ImageDecoder(size={image!r})"
    elif isinstance(image, TextDecoder):
        advice = "write text=decoder"
    elif decoded_medium(image) is not None:
        advice = f"write {decoded_medium(image)}=decoder"
    elif callable(image) and not isinstance(image, type):
        advice = (
            'a function from bytes goes by field, Decode({"jpg": function}); one of decoded '
            "pictures goes to Pipeline(transforms=(function,))"
        )
    raise ConfigError(f"Decode(image=): got {_shown(image)}: {advice}")


def _check_medium(kind: str, decoder: object) -> None:
    """Refuse something else than a decoder of this kind."""
    if decoder is None or decoded_medium(decoder) == kind:
        return
    name = f"{kind.capitalize()}Decoder"
    advice = f"write {kind}=mm.{name}()"
    if hasattr(decoder, f"{kind}_processor") or hasattr(decoder, "feature_extractor"):
        advice = f"write {kind}=mm.{name}.from_processor(processor)"
    elif decoded_medium(decoder) is not None:
        advice = f"write {decoded_medium(decoder)}=decoder"
    elif isinstance(decoder, ImageDecoder):
        advice = "write image=decoder"
    elif isinstance(decoder, TextDecoder):
        advice = "write text=decoder"
    elif not isinstance(decoder, type) and callable(decoder):
        advice = f'a function from bytes goes by field, Decode({{"{_EXAMPLES[kind]}": function}})'
    raise ConfigError(f"Decode({kind}=): got {_shown(decoder)}: {advice}")


_EXAMPLES = {"video": "mp4", "audio": "wav"}
"""An extension of each kind."""


def _check_tracks(video: VideoDecoder | None, audio: AudioDecoder | None) -> None:
    """Refuse tracks and recordings that would be joined though they are not alike."""
    track = None if video is None else video.audio
    if track is None or audio is None:
        return
    for setting in ("sample_rate", "channels", "dtype", "features"):
        if getattr(track, setting) != getattr(audio, setting):
            raise ConfigError(
                f"Decode: audio= has {setting}={getattr(audio, setting)!r} and the tracks of "
                f"video= have {getattr(track, setting)!r}, and a batch has one audio: give "
                "VideoDecoder(audio=) the same settings, or decode one of them by field"
            )


def _check_times(plan: FieldPlan, media: Collection[str]) -> None:
    """Refuse times that follow nothing that is decoded."""
    fields = [*plan.videos, *plan.recordings, *sorted(media)]
    for name, times in plan.times.items():
        if times.follows not in fields:
            known = ", ".join(map(repr, fields)) or "none"
            raise ConfigError(
                f"Decode: {name!r} follows={escaped(repr(times.follows))}, which is no video or "
                f"recording of this Decode: it has {known}"
            )


def _check_lengths(text: TextDecoder, plan: FieldPlan, media: Collection[str]) -> None:
    """Refuse a text that counts media which nothing decodes for it."""
    by_field = {"image": plan.pictures, "video": plan.videos, "audio": plan.recordings}
    for kind in sorted(text.counted_media - set(media)):
        if kind in text.needs_shapes:
            raise ConfigError(
                f"{kind}_length is a function of the {kind}: give Decode({kind}=) too"
            )
        if by_field[kind]:
            raise ConfigError(
                f"{kind}_length counts the files of Decode({kind}=...): give the {kind} that "
                f"belongs to the text as {kind}=, not by field"
            )


def _check_text(text: object) -> None:
    if text is None or isinstance(text, TextDecoder):
        return
    advice = "write text=mm.TextDecoder(tokenizer, max_length=512)"
    if not hasattr(text, "is_fast") and hasattr(text, "tokenizer"):
        advice = "write text=mm.TextDecoder(processor.tokenizer, max_length=512)"
    elif isinstance(text, ImageDecoder):
        advice = "write image=decoder"
    elif decoded_medium(text) is not None:
        advice = f"write {decoded_medium(text)}=decoder"
    elif isinstance(text, str):
        advice = f'write text=mm.TextDecoder(tokenizer, field="{escaped(text, 60)}")'
    elif not hasattr(text, "is_fast") and callable(text):
        advice = 'a function from bytes goes by field, Decode({"txt": function})'
    raise ConfigError(f"Decode(text=): got {_shown(text)}: {advice}")


def _shown(value: object) -> str:
    """Return a value of the wrong type for a message."""
    name = getattr(value, "__name__", None)
    if name:
        return escaped(name, 60)
    return (
        escaped(repr(value), 60) if isinstance(value, str | int | tuple) else type(value).__name__
    )
