"""The table of a `Decode`: its decoders by field, checked to go together.

Place in the flow: `Decode` makes its table once, and `sample.py` runs it on each sample:

    parsers        json, before anything else: filters and texts need it
    values         numbers, texts, arrays, and functions of the user
    pictures       each with its own crop, or with that of the first of its group
    coordinates    boxes and points, placed as the picture of their group was
    media          videos with their tracks, recordings
    times          placed in the span that was taken of their video or recording
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from mmstream.decoding.field import AUDIO, IMAGE, VIDEO, Field, PictureField, ValueField
from mmstream.decoding.fields import call_user, parse_json
from mmstream.decoding.followers import Boxes, Follower, Points, Times
from mmstream.decoding.image.decoder import ImageDecoder
from mmstream.decoding.media import AudioField, MediaField, VideoField, made_names
from mmstream.decoding.sample_rng import is_user_function
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.decoding.values import JSON_EXTENSIONS, built_in, decode_integer, decode_string
from mmstream.errors import ConfigError, escaped
from mmstream.wrong_arguments import shown

if TYPE_CHECKING:  # FFmpeg is slow to import, and pictures need none
    from mmstream.decoding.audio.decoder import AudioDecoder
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


@dataclass(frozen=True)
class FieldTable:
    """The decoders of a `Decode` in the order in which they run. Names are those in the batch."""

    parsers: Mapping[str, Callable[[bytes], Any]]
    """Of ``json``, and of other fields of JSON. They run first."""
    user_parsers: frozenset[str] = frozenset()
    """Those that are functions of the user."""
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
        return {each.name: each.decoder for each in fields if each.kind == kind}

    def files(self, fields: Iterable[Field]) -> frozenset[str]:
        """Return the files that fields name."""
        return frozenset(file for each in fields for file in each.sources)

    @cached_property
    def files_without_text(self) -> frozenset[str]:
        """Files of media that are decoded by field. The text leaves them alone."""
        return self.files([*self.pictures, *self.media])

    @cached_property
    def free_pictures(self) -> PictureField | None:
        """The field of the pictures that belong to the text."""
        return next((each for each in self.pictures if not each.sources), None)

    @cached_property
    def named_files(self) -> frozenset[str]:
        """Files that ``Decode(video=)`` and ``Decode(audio=)`` leave alone."""
        return self.files([*self.media, *self.values])

    @cached_property
    def media_names(self) -> list[str]:
        """The fields that decoders of videos and recordings make, also in a batch."""
        return made_names(self.media, self.sounds)

    @cached_property
    def has_user_media(self) -> bool:
        """Whether functions or classes of the user run while media are planned or decoded."""
        fields = (*self.pictures, *self.media, *self.coordinates, *self.times)
        return bool(self.user_parsers) or any(each.is_user for each in fields)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields whose pictures all have one, as decoded."""
        return {each.name: each.shape for each in self.pictures if each.shape is not None}

    @cached_property
    def lists(self) -> frozenset[str]:
        """The fields of a batch that are lists with one entry per row, whatever their shapes."""
        names = [each.name for each in (*self.coordinates, *self.times)]
        return frozenset(name for each in names for name in (each, f"{each}_visible"))


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
    made: dict[str, Any] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for key, given in fields.items():
        names = _checked_names(key)
        name = names[0]
        if name in made or free.get(name) is not None:
            raise ConfigError(f"Decode: two decoders make the field {name!r}")
        decoder = built_in(name, max_json_bytes) if isinstance(given, EllipsisType) else given
        made[name] = _made(key, names, decoder)
        sources[name] = names

    def of_type(kind: type[F]) -> list[F]:
        return [each for each in made.values() if isinstance(each, kind)]

    parsers = {"json": _Parser(partial(parse_json, max_bytes=max_json_bytes))}
    parsers |= {name: each for name, each in made.items() if isinstance(each, _Parser)}
    pictures = {each.name: each.decoder for each in of_type(PictureField)}
    pictures |= {} if free[IMAGE] is None else {IMAGE: free[IMAGE]}
    followers = of_type(Follower)
    times = [each for each in followers if isinstance(each.decoder, Times)]
    coordinates = {each.name: each for each in followers if each not in times}
    leaders = _leaders(same_geometry, pictures, coordinates)
    values, videos, recordings = of_type(ValueField), of_type(VideoField), of_type(AudioField)
    named = frozenset(file for each in (*values, *videos, *recordings) for file in each.sources)
    sounds = {each.name: each.decoder for each in recordings}
    if free[VIDEO] is not None:
        videos.append(VideoField(VIDEO, free[VIDEO], taken=named))
    if free[AUDIO] is not None:
        recordings.append(AudioField(AUDIO, free[AUDIO], taken=named))
    tracks = {each.sound: each.decoder.audio for each in videos if each.decoder.audio is not None}
    return FieldTable(
        {name: each.parse for name, each in parsers.items()},
        frozenset(name for name, each in parsers.items() if each.is_user),
        tuple(values),
        _picture_fields(pictures, leaders, sources),
        tuple(replace(each, leader=leaders[name]) for name, each in coordinates.items()),
        (*videos, *recordings),
        tuple(times),
        sounds | tracks | ({} if free[AUDIO] is None else {AUDIO: free[AUDIO]}),
    )


class _Parser(NamedTuple):
    """What parses a field of JSON before anything else."""

    parse: Callable[[bytes], Any]
    is_user: bool = False


def _made(key: str, names: tuple[str, ...], decoder: Any) -> Field | Follower | _Parser:
    """Return what a decoder by field becomes. The leader of boxes and points is not known yet."""
    name = names[0]
    if isinstance(decoder, ImageDecoder):
        return PictureField(name, _checked_picture(name, decoder), names)
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
    if _is_built_in_json(name, decoder) and len(names) == 1:
        return _Parser(decoder)
    if name == "json":
        return _Parser(partial(call_user, decoder), is_user_function(decoder))
    known = decode_integer if decoder is int else decode_string if decoder is str else None
    return ValueField(name, known or decoder, names)


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


def decoded_medium(decoder: object) -> str | None:
    """Return "video" or "audio" for a decoder of these, and None for everything else."""
    return getattr(type(decoder), "decoded_medium", None)


def _checked_names(key: object) -> tuple[str, ...]:
    """Return the files of a key: "jpg;png" names two. The first names the result."""
    names = tuple(key.split(";")) if isinstance(key, str) else ()
    for name in names:
        if not name or name != name.lower() or name.startswith((".", "__")) or name != name.strip():
            names = ()
    if not names:
        raise ConfigError(
            f"Decode: {escaped(repr(key))} is no name of a field: write it as the sample does, in "
            'lower case and without a dot before it: "jpg", "mask.png", or "jpg;png" for either'
        )
    return names


def _checked_picture(name: str, decoder: ImageDecoder) -> ImageDecoder:
    if decoder.tiles is not None:
        raise ConfigError(
            f"Decode: {name!r}: tiles goes with Decode(image=mm.ImageDecoder(...)), not with a "
            "decoder by field"
        )
    return decoder


def _is_built_in_json(name: str, decoder: Callable[[bytes], Any]) -> bool:
    is_built_in = isinstance(decoder, partial) and decoder.func is parse_json
    return is_built_in and name.rpartition(".")[2] in JSON_EXTENSIONS


def _leaders(
    same_geometry: Sequence[Any],
    decoders: Mapping[str, ImageDecoder],
    coordinates: Collection[str],
) -> dict[str, str]:
    """Return the first picture of each other name's group."""
    leaders: dict[str, str] = {}
    grouped: set[str] = set()
    for group in _groups(same_geometry):
        first = group[0]
        for name in group:
            if name not in decoders and name not in coordinates:
                known = ", ".join(map(repr, [*decoders, *coordinates])) or "none"
                raise ConfigError(
                    f"same_geometry: {name!r} is no picture, boxes or points of this Decode, which "
                    f"has {known}"
                )
            if name in grouped:
                raise ConfigError(f"same_geometry: {name!r} is named twice")
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
