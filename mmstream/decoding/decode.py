"""`Decode`: which decoders a pipeline runs, as one frozen value that is checked when it is made.

Place in the flow: `Pipeline` holds it. It makes its table once, and `sample.py` runs the table on
each sample:

    parsers        json, before anything else: filters and texts need it
    values         numbers, texts, arrays, and functions of the user
    pictures       each with its own crop, or with that of the first of its group
    coordinates    boxes and points, placed as the picture of their group was
    media          videos with their tracks, recordings
    times          placed in the span that was taken of their video or recording
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from mmstream.dataset.dataset import ShardSource
from mmstream.decoding.field import (
    AUDIO,
    IMAGE,
    VIDEO,
    AudioField,
    Field,
    JsonField,
    MediaField,
    PictureField,
    ValueField,
    VideoField,
    made_names,
)
from mmstream.decoding.followers import Boxes, Follower, Points, Times
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.sample_rng import is_user_function
from mmstream.decoding.stored import CollateSettings, EmptyAudio, StoredFields
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.decoding.values import JSON_EXTENSIONS, built_in, decode_integer
from mmstream.errors import ConfigError, escaped
from mmstream.media.fields import (
    MAX_TEXT_BYTES,
    audio_fields,
    call_user,
    decode_text,
    image_fields,
    list_of_frame,
    parse_json,
    video_fields,
)
from mmstream.settings import PositiveInt, checked, refuse_broken, shown

if TYPE_CHECKING:  # FFmpeg is slow to import, and pictures need none
    from mmstream.decoding.audio import AudioDecoder
    from mmstream.decoding.video.decoder import VideoDecoder

F = TypeVar("F")

FieldDecoder: TypeAlias = (
    "ImageDecoder | VideoDecoder | AudioDecoder | TextDecoder | Boxes | Points | Times "
    "| EllipsisType | Callable[[bytes], Any]"
)
"""What a field may be given: ``...`` is the built-in decoder of its extension."""

GEOMETRY = (
    "size",
    "resize",
    "crop",
    "crop_rounding",
    "resize_size",
    "scale",
    "ratio",
    "flip",
    "multiple_of",
    "pixel_budget",
)
"""Settings of an `ImageDecoder` that all pictures of a group take from its first."""


IMAGE_FIELDS = ("image", "image_tiles", "image_size")
TEXT_FIELDS = ("input_ids", "attention_mask", "labels", "label_weights")
"""Fields that decoders make."""

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
    that lacks a field is bad. A value that is not bytes any more, because a function of
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
        ConfigError: Something is not a decoder, or does not go together. The message says what to
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
    table: FieldTable = field(init=False, repr=False, compare=False)
    """The decoders in the order in which they run. For the decode stage."""
    is_baked: bool = field(default=False, init=False)
    """Whether samples were decoded by ``mmstream bake``; see `baked`."""
    stored: StoredFields | None = field(default=None, init=False, repr=False, compare=False)
    """The fields of the baked dataset. None: there is none, or no pipeline has one yet."""

    def __post_init__(self) -> None:
        _check_fields(self.fields)
        for kind in _EXAMPLES:
            _check_decoder(kind, getattr(self, kind))
        _check_tracks(self.video, self.audio)
        fields, text = _without_text(self.fields or {}, self.text)
        free = {"image": self.image, "video": self.video, "audio": self.audio}
        table = make_table(fields, free, self.same_geometry, self.max_json_bytes)
        groups = (group if isinstance(group, str) else tuple(group) for group in self.same_geometry)
        self.__dict__.update(fields=fields, text=text, table=table, same_geometry=tuple(groups))
        _check_times(table)
        if text is not None:
            _check_lengths(text, table, self.media)

    @classmethod
    def baked(cls) -> Decode:
        """Return what reads the fields of a dataset that ``mmstream bake`` wrote.

        Batches are those of the pipeline that was baked.

        Examples:
            >>> mm.Decode.baked().is_baked
            True
        """
        decode = cls()
        decode.__dict__.update(is_baked=True, table=FieldTable({}))
        return decode

    @property
    def needs_bucket(self) -> bool:
        """Whether pictures have the size of the bucket of their step."""
        return any(picture.decoder.size == "bucket" for picture in self.table.pictures)

    def of_bucket(self, shape: tuple[int, int]) -> Decode:
        """Return these decoders with a (height, width) in place of ``size="bucket"``."""

        def sized(decoder: Any) -> Any:
            is_bucket = isinstance(decoder, ImageDecoder) and decoder.size == "bucket"
            return replace(decoder, size=shape) if is_bucket else decoder

        fields = {name: sized(decoder) for name, decoder in (self.fields or {}).items()}
        decode = replace(self, fields=fields, image=sized(self.image))
        told = {picture.name for picture in self.table.pictures if picture.decoder.size == "bucket"}
        pictures = [
            replace(picture, tells_crop=picture.name in told and not picture.decoder.mask)
            for picture in decode.table.pictures
        ]
        object.__setattr__(decode, "table", replace(decode.table, pictures=tuple(pictures)))
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
        parsers = {name: JsonField(name, parse) for name, parse in stored.parsers.items()}
        decode.__dict__.update(stored=stored, table=FieldTable(parsers))
        return decode

    @cached_property
    def has_user_functions(self) -> bool:
        """Whether functions or classes of the user take part."""
        fields = any(value.is_user for value in self.table.values)
        text = self.text is not None and self.text.has_user_functions
        return fields or text or self.table.has_user_media

    @cached_property
    def needed_shapes(self) -> frozenset[str]:
        """The kinds of media on whose shapes the tokens of a text depend."""
        return frozenset() if self.text is None else self.text.needs_shapes

    @cached_property
    def made_names(self) -> dict[str, None]:
        """The fields that decoders make, also in a batch. Samples cannot hold files of them."""
        names = [
            *(TEXT_FIELDS if self.text is not None else ()),
            *(IMAGE_FIELDS if self.image is not None else ()),
            *(name for picture in self.table.pictures for name in picture.told),
            *made_names(self.table.media, self.table.sounds),
        ]
        return dict.fromkeys(names)

    @property
    def holds_interpreter(self) -> bool:
        """Whether a sample takes short Python only: baked fields, numbers, texts and arrays.

        Threads would take the interpreter from each other. Decoders of media and tokenizers leave
        it to others; functions of the user may.
        """
        decoders = [
            decoder for decoder in self._decoders() if not isinstance(decoder, EllipsisType | type)
        ]
        are_others = (self.text, self.table.pictures, *decoders)
        return self.is_baked or not any(are_others)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the fields that are decoded into the memory of their batch, as uint8."""
        return self.table.shapes if self.stored is None else self.stored.shapes

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
        table = self.table
        if field in table.named_files or field in table.parsers or list_of_frame(field):
            return False
        named = [picture for picture in table.pictures if field in picture.sources]
        free = [
            picture for picture in table.pictures if not picture.sources and image_fields((field,))
        ]
        return bool(named or free) and not any(
            is_user_function(type(picture.decoder)) for picture in named or free
        )

    def collate_settings_at(self, seconds: float) -> CollateSettings:
        """Return `collate_settings` of batches whose recordings are padded to so many seconds."""
        fields = (_without_audio(name, of, seconds) for name, of in self.table.sounds.items())
        return msgspec.structs.replace(self.collate_settings, audio_fields=dict(fields))

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
        fields = (*self.table.pictures, *self.table.media)
        colours = [
            medium.name
            for medium in fields
            if medium.sources
            and medium.kind != "audio"
            and not getattr(medium.decoder, "mask", False)
            and (medium.kind == "video" or medium.decoder.interpolation != "nearest")
        ]
        return (*colours, *(kind for kind in ("image", "video") if getattr(self, kind) is not None))

    @property
    def collate_settings(self) -> CollateSettings:
        """What batches depend on beside the values of samples."""
        if self.stored is not None:
            return self.stored.content.collate
        table, text = self.table, self.text
        settings = CollateSettings(
            picture_names=self.picture_names,
            list_fields=tuple(sorted(table.lists)),
            picture_fields=tuple(sorted(entry.name for entry in table.pictures if entry.sources)),
            video_fields={
                name: None if decoder.output_shape is None else (0, 3, *decoder.output_shape)
                for name, decoder in table.decoders("video").items()
            },
            audio_fields=dict(
                _without_audio(name, decoder) for name, decoder in table.sounds.items()
            ),
        )
        if text is None:
            return settings
        return msgspec.structs.replace(
            settings,
            pad_token_id=text.pad_token_id,
            pad_to=text.pad_to,
            padding_side=text.padding_side,
            counted_media=tuple(sorted(text.counted_media)),
        )


# -- checks of its settings ------------------------------------------------------------------------


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
    """Refuse something else than decoders by field."""
    if fields is None or isinstance(fields, Mapping):
        return
    kind, begin = _kind_of(fields), f"Decode: got {_shown(fields)}"
    group = 'same_geometry=("jpg", "boxes")'
    refuse_broken(
        (kind, f"{begin}: write Decode({kind}=decoder)"),
        (
            isinstance(fields, Boxes | Points),
            f'{begin}: write Decode({{"jpg": ..., "boxes": boxes}}, {group})',
        ),
        (
            isinstance(fields, Times),
            f'{begin}: write Decode({{"events": times}}, video=mm.VideoDecoder())',
        ),
        (
            callable(fields),
            f'{begin}: name the field whose bytes it takes, Decode({{"jpg": function}}); one of '
            "whole samples goes to Pipeline(transforms=(function,)), or before=(function,)",
        ),
        (
            True,
            f'{begin}: give decoders by field, {{"jpg": mm.ImageDecoder(size=224), "cls": int}}',
        ),
    )


_EXAMPLES = {
    "image": ("jpg", "mm.ImageDecoder(size=224)"),
    "text": ("txt", "mm.TextDecoder(tokenizer, max_length=512)"),
    "video": ("mp4", "mm.VideoDecoder()"),
    "audio": ("wav", "mm.AudioDecoder()"),
}
"""By argument: an extension, and what to write."""

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "image_mean")
"""Attributes of the processors of models."""


def _kind_of(decoder: object) -> str | None:
    """Return the argument that takes a decoder. None: none does."""
    if isinstance(decoder, ImageDecoder):
        return "image"
    return "text" if isinstance(decoder, TextDecoder) else decoded_medium(decoder)


def _check_decoder(kind: str, decoder: object) -> None:
    """Refuse something else than a decoder of this kind."""
    own = _kind_of(decoder)
    is_mask = isinstance(decoder, ImageDecoder) and decoder.mask
    if decoder is None or (own == kind and not is_mask):
        return
    file, example = _EXAMPLES[kind]
    begin = f"Decode({kind}=): got {_shown(decoder)}"
    is_text = kind == "text"
    refuse_broken(
        (
            is_mask,
            f'{begin}: a mask goes by field, Decode({{"mask.png": mm.ImageDecoder(mask=True)}})',
        ),
        (own is not None, f"{begin}: write {own}=decoder"),
        (
            is_text and isinstance(decoder, str),
            f'{begin}: write text=mm.TextDecoder(tokenizer, field="{escaped(decoder, 60)}")',
        ),
        (
            is_text and hasattr(decoder, "tokenizer"),
            f"{begin}: write text=mm.TextDecoder(processor.tokenizer, max_length=512)",
        ),
        (
            any(hasattr(decoder, name) for name in _PROCESSOR_PARTS),
            f"{begin}: write {kind}={example.partition('(')[0]}.from_processor(processor)",
        ),
        (
            callable(decoder) and not isinstance(decoder, type) and not hasattr(decoder, "is_fast"),
            f'{begin}: a function from bytes goes by field, Decode({{"{file}": function}}); one of '
            "decoded samples goes to Pipeline(transforms=(function,))",
        ),
        (True, f"{begin}: write {kind}={example}"),
    )


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


def _check_times(table: FieldTable) -> None:
    """Refuse times that follow nothing that is decoded."""
    named = [medium.name for medium in table.media if medium.sources]
    free = {medium.name for medium in table.media} | (table.sounds.keys() & {"audio"})
    fields = [*named, *sorted(free - set(named))]
    for times in table.times:
        if times.leader not in fields:
            names = ", ".join(map(repr, fields)) or "none"
            raise ConfigError(
                f"Decode: {times.name!r} follows={escaped(repr(times.leader))}, which is not a "
                f"video or recording of this Decode: it has {names}"
            )


def _check_lengths(text: TextDecoder, table: FieldTable, media: Collection[str]) -> None:
    """Refuse a text that counts media which nothing decodes for it."""
    for kind in sorted(text.counted_media - set(media)):
        refuse_broken(
            (
                kind in text.needs_shapes,
                f"{kind}_length is a function of the {kind}: give Decode({kind}=) too",
            ),
            (
                table.decoders(kind),
                f"{kind}_length counts the files of Decode({kind}=...): give the {kind} that "
                f"belongs to the text as {kind}=, not by field",
            ),
        )


def _shown(value: object) -> str:
    """Return a value of the wrong type for a message."""
    name = getattr(value, "__name__", None)
    if name:
        return escaped(name, 60)
    return (
        escaped(repr(value), 60) if isinstance(value, str | int | tuple) else type(value).__name__
    )


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldTable:
    """The decoders of a `Decode` in the order in which they run. Names are those in the batch."""

    parsers: Mapping[str, JsonField]
    """Of ``json``, and of other fields of JSON. They run first."""
    values: tuple[ValueField, ...] = ()
    pictures: tuple[PictureField, ...] = ()
    """``image`` comes first, and the first of a group before the others."""
    coordinates: tuple[Follower, ...] = ()
    media: tuple[MediaField, ...] = ()
    """Videos come before recordings."""
    times: tuple[Follower, ...] = ()
    sounds: Mapping[str, Any] = field(default_factory=dict)
    """The decoders of recordings and tracks, by the field of their results."""

    def decoders(self, kind: str) -> dict[str, Any]:
        """Return the decoders of files of a kind of media, by field."""
        fields = (*self.pictures, *self.media)
        return {medium.name: medium.decoder for medium in fields if medium.kind == kind}

    def files(self, fields: Iterable[Field]) -> frozenset[str]:
        """Return the files that fields name."""
        return frozenset(file for entry in fields for file in entry.sources)

    @cached_property
    def files_without_text(self) -> frozenset[str]:
        """Files of media that are decoded by field. The text leaves them alone."""
        return self.files([*self.pictures, *self.media])

    @cached_property
    def free_pictures(self) -> PictureField | None:
        """The field of the pictures that belong to the text."""
        return next((picture for picture in self.pictures if not picture.sources), None)

    @cached_property
    def named_files(self) -> frozenset[str]:
        """Files that ``Decode(video=)`` and ``Decode(audio=)`` leave alone."""
        return self.files([*self.media, *self.values])

    @cached_property
    def has_user_media(self) -> bool:
        """Whether functions or classes of the user run while media are planned or decoded."""
        followers = (*self.coordinates, *self.times)
        fields = (*self.parsers.values(), *self.pictures, *self.media, *followers)
        return any(entry.is_user for entry in fields)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields whose pictures all have one, as decoded."""
        return {
            picture.name: picture.shape for picture in self.pictures if picture.shape is not None
        }

    @cached_property
    def lists(self) -> frozenset[str]:
        """The fields of a batch that are lists with one entry per row, whatever their shapes."""
        names = [follower.name for follower in (*self.coordinates, *self.times)]
        return frozenset(key for name in names for key in (name, f"{name}_visible"))


def make_table(
    fields: Mapping[str, FieldDecoder],
    free: Mapping[str, Any],
    same_geometry: Sequence[Any],
    max_json_bytes: int,
) -> FieldTable:
    """Return the table of a `Decode`.

    Args:
        fields: The decoders by field, without that of the text.
        free: The decoders of all other files, by kind of media. None: they stay bytes.
        same_geometry: One group of names, or several.
        max_json_bytes: The limit of JSON.

    Raises:
        ConfigError: They do not go together; the message says what to write.
    """
    entries: dict[str, Any] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for key, setting in fields.items():
        names = _checked_names(key)
        name = names[0]
        if name in entries or free.get(name) is not None:
            raise ConfigError(f"Decode: two decoders make the field {name!r}")
        decoder = built_in(name, max_json_bytes) if isinstance(setting, EllipsisType) else setting
        entries[name] = _made(key, names, decoder)
        sources[name] = names

    def of_type(kind: type[F]) -> list[F]:
        return [entry for entry in entries.values() if isinstance(entry, kind)]

    parsers = {"json": JsonField("json", partial(parse_json, max_bytes=max_json_bytes))}
    parsers |= {parser.name: parser for parser in of_type(JsonField)}
    pictures = {picture.name: picture.decoder for picture in of_type(PictureField)}
    pictures |= {} if free[IMAGE] is None else {IMAGE: free[IMAGE]}
    followers = of_type(Follower)
    times = [follower for follower in followers if isinstance(follower.decoder, Times)]
    coordinates = {follower.name: follower for follower in followers if follower not in times}
    leaders = _leaders(same_geometry, pictures, coordinates)
    values, videos, recordings = of_type(ValueField), of_type(VideoField), of_type(AudioField)
    named = frozenset(file for entry in (*values, *videos, *recordings) for file in entry.sources)
    sounds = {recording.name: recording.decoder for recording in recordings}
    if free[VIDEO] is not None:
        videos.append(VideoField(VIDEO, free[VIDEO], taken=named))
    if free[AUDIO] is not None:
        recordings.append(AudioField(AUDIO, free[AUDIO], taken=named))
    tracks = {
        video.sound: video.decoder.audio for video in videos if video.decoder.audio is not None
    }
    return FieldTable(
        parsers,
        tuple(values),
        _picture_fields(pictures, leaders, sources),
        tuple(replace(follower, leader=leaders[name]) for name, follower in coordinates.items()),
        (*videos, *recordings),
        tuple(times),
        sounds | tracks | ({} if free[AUDIO] is None else {AUDIO: free[AUDIO]}),
    )


def _made(key: str, names: tuple[str, ...], decoder: Any) -> Field | Follower:
    """Return what a decoder by field becomes. The leader of boxes and points is not known yet."""
    name = names[0]
    if isinstance(decoder, ImageDecoder):
        if decoder.tiles is not None:
            raise ConfigError(
                f"Decode: {name!r}: tiles goes with Decode(image=mm.ImageDecoder(...)), not with a "
                "decoder by field"
            )
        return PictureField(name, decoder, names)
    if decoded_medium(decoder) is not None:
        kind = VideoField if decoded_medium(decoder) == VIDEO else AudioField
        return kind(name, decoder, names)
    if isinstance(decoder, Boxes | Points | Times):
        return Follower(name, decoder, getattr(decoder, "follows", ""))
    if not callable(decoder):
        raise ConfigError(
            f"Decode: {{{key!r}: {escaped(repr(decoder))}}}: give a decoder, a function from "
            "bytes to a value, or ... for the built-in decoder of the extension"
        )
    is_built_in = isinstance(decoder, partial) and decoder.func is parse_json
    if is_built_in and name.rpartition(".")[2] in JSON_EXTENSIONS and len(names) == 1:
        return JsonField(name, decoder)
    if name == "json":
        return JsonField(name, partial(call_user, decoder))
    type_decoder = decode_integer if decoder is int else decode_text if decoder is str else None
    return ValueField(name, type_decoder or decoder, names)


def _picture_fields(
    decoders: Mapping[str, ImageDecoder],
    leaders: Mapping[str, str],
    sources: Mapping[str, tuple[str, ...]],
) -> tuple[PictureField, ...]:
    """Return the fields of pictures. Those of a group need the result of its first."""
    taken = frozenset(file for name in decoders for file in sources.get(name, ()))
    fields = []
    for name in sorted(decoders, key=lambda name: (name in leaders, name != IMAGE)):
        decoder, leader = decoders[name], leaders.get(name, "")
        shape: tuple[int, ...] | None = decoders[leader or name].output_shape
        if shape is not None and not decoder.mask:
            shape = (*shape, 3)
        fields.append(PictureField(name, decoder, sources.get(name, ()), taken, leader, shape))
    return tuple(fields)


def _without_audio(
    name: str, decoder: AudioDecoder, seconds: float = 0.0
) -> tuple[str, EmptyAudio]:
    """Return the name of a field of recordings, and what it is in a batch that has none.

    Args:
        name: The file.
        decoder: Its decoder.
        seconds: What recordings are padded to, if the decoder does not cut them to less.
    """
    kept_s = min(seconds, decoder.duration_s or seconds)
    length = math.ceil(round(kept_s * (decoder.sample_rate or 0), 3))
    if decoder.features is not None:
        features = decoder.features
        return f"{name}_features", ((0, features.num_mels, features.num_frames(length)), "float32")
    channels = () if decoder.channels == 1 else (decoder.channels or 0,)
    return name, ((0, *channels, length), "int16" if decoder.dtype == "int16" else "float32")


def decoded_medium(decoder: object) -> str | None:
    """Return "video" or "audio" for a decoder of these, and None for everything else."""
    return getattr(type(decoder), "decoded_medium", None)


def _checked_names(key: object) -> tuple[str, ...]:
    """Return the files of a key: "jpg;png" names two. The first names the result."""
    names = tuple(key.split(";")) if isinstance(key, str) else ("",)
    if any(n != n.strip().lower() or not n or n.startswith((".", "__")) for n in names):
        raise ConfigError(
            f"Decode: {escaped(repr(key))} is not a name of a field: write it as the sample does, "
            'in lower case and without a dot before it: "jpg", "mask.png", or "jpg;png" for either'
        )
    return names


def _leaders(
    same_geometry: Sequence[Any],
    decoders: Mapping[str, ImageDecoder],
    coordinates: Collection[str],
) -> dict[str, str]:
    """Return the first picture of each other name's group."""
    leaders: dict[str, str] = {}
    grouped: set[str] = set()
    names = ", ".join(map(repr, [*decoders, *coordinates])) or "none"
    for group in _groups(same_geometry):
        first = group[0]
        for name in group:
            refuse_broken(
                (
                    name not in decoders and name not in coordinates,
                    f"same_geometry: {name!r} is not a picture, boxes or points of this Decode, "
                    f"which has {names}",
                ),
                (name in grouped, f"same_geometry: {name!r} is named twice"),
            )
            grouped.add(name)
        if first not in decoders:
            raise ConfigError(f"same_geometry: name a picture first, not {first!r}")
        for name in group[1:]:
            leaders[name] = first
            _check_follower(name, first, decoders)
        if len(group) > 1 and decoders[first].tiles:
            raise ConfigError(f"same_geometry: {first!r} must have no tiles")
    for name in coordinates:
        if name not in leaders:
            raise ConfigError(
                f"Decode: {name!r} follows a picture: name both, same_geometry=('jpg', {name!r})"
            )
    _check_masks(decoders, grouped)
    return leaders


def _groups(same_geometry: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """Yield the groups, each a tuple of names."""
    if isinstance(same_geometry, str) or not isinstance(same_geometry, Sequence):
        raise ConfigError(f"same_geometry={shown(same_geometry)}: give names, ('jpg', 'mask.png')")
    entries = list(same_geometry)
    if entries and all(isinstance(entry, str) for entry in entries):
        entries = [entries]
    for entry in entries:
        names = tuple(entry) if isinstance(entry, tuple | list) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"same_geometry={shown(same_geometry)}: give the names of fields, "
                "('jpg', 'mask.png', 'boxes'), or several such groups"
            )
        yield names


def _check_follower(name: str, first: str, decoders: Mapping[str, ImageDecoder]) -> None:
    """Refuse a picture with a geometry of its own, or one that is not decoded by field."""
    if name not in decoders:
        return
    if name == IMAGE:
        raise ConfigError(f"same_geometry: name {IMAGE!r} first")
    decoder, leader = decoders[name], decoders[first]
    for setting in dataclasses.fields(ImageDecoder):
        if setting.name not in GEOMETRY:
            continue
        value, wanted = getattr(decoder, setting.name), getattr(leader, setting.name)
        if value not in (setting.default, wanted):
            raise ConfigError(
                f"same_geometry: {name!r} has {setting.name}={value!r} and {first!r} has "
                f"{wanted!r}; leave it out, {name!r} takes it from {first!r}"
            )


def _check_masks(decoders: Mapping[str, ImageDecoder], grouped: set[str]) -> None:
    """Refuse a mask that would be cropped unlike its picture."""
    random = [name for name, decoder in decoders.items() if decoder.is_random]
    for name, decoder in decoders.items():
        if not (decoder.mask or decoder.interpolation == "nearest") or name in grouped:
            continue
        others = [other for other in random if other != name]
        if others:
            raise ConfigError(
                f"Decode: {others[0]!r} is cropped or flipped at random, and {name!r} is not "
                f"cropped alike: same_geometry=({others[0]!r}, {name!r}), or name {name!r} alone "
                f"in a group of its own"
            )
