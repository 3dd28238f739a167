"""Decoders by the names of fields: ``Decode({"jpg": ..., "mask.png": ..., "cls": int})``.

Place in the flow: `Decode` resolves its mapping here once, when it is made. `sample.py` then runs
the decoders of a `FieldPlan` on each sample:

    parsers                json, before anything else: filters and texts need it
    values                 numbers, texts, arrays, and functions of the user
    pictures               each with its own crop, or with that of the first of its group
    videos, recordings     one of each name
    coordinates            boxes and points, placed as the picture of their group was
    times                  placed in the span that was taken of their video or recording
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mmstream.decoding.address import with_address
from mmstream.decoding.fields import call_user, field_names, parse_json
from mmstream.decoding.image.coordinates import Boxes, Points
from mmstream.decoding.image.decoder import Decoded, ImageDecoder
from mmstream.decoding.image.geometry import Plan
from mmstream.decoding.sample_rng import is_user_function, sample_rng, seed_generators
from mmstream.decoding.text.decoder import TextDecoder
from mmstream.decoding.times import Times
from mmstream.decoding.values import JSON_EXTENSIONS, built_in, decode_integer, decode_string
from mmstream.errors import ConfigError, DecodeError, SampleError, escaped
from mmstream.lazy_bytes import LazyBytes
from mmstream.types import Sample
from mmstream.wrong_arguments import shown

if TYPE_CHECKING:  # FFmpeg is slow to import, and pictures need none
    from mmstream.decoding.audio.decoder import AudioDecoder
    from mmstream.decoding.video.decoder import VideoDecoder

FieldDecoder: TypeAlias = (
    "ImageDecoder | VideoDecoder | AudioDecoder | TextDecoder | Boxes | Points | Times "
    "| EllipsisType | Callable[[bytes], Any]"
)
"""What a field may be given: ``...`` is the built-in decoder of its extension."""

IMAGE = "image"
"""The name of the pictures that ``Decode(image=)`` decodes."""

EarlyPictures: TypeAlias = Mapping[str, Decoded | SampleError]
"""By field: what became of the pictures that were decoded before the rest of their sample."""

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
class FieldPlan:
    """The decoders of a `Decode`, sorted by what they do. Names are those in the batch."""

    parsers: Mapping[str, Callable[[bytes], Any]]
    """Of ``json``, and of other fields of JSON. They run first."""
    values: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    pictures: Mapping[str, ImageDecoder] = field(default_factory=dict)
    coordinates: Mapping[str, Boxes | Points] = field(default_factory=dict)
    leaders: Mapping[str, str] = field(default_factory=dict)
    """The picture whose geometry a picture, boxes or points share; not for the first itself."""
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The files that a field may come from, where there are several: "jpg", "png"."""
    picture_sources: frozenset[str] = frozenset()
    """All files of `pictures`. ``Decode(image=)`` and the text leave them alone."""
    videos: Mapping[str, VideoDecoder] = field(default_factory=dict)
    recordings: Mapping[str, AudioDecoder] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)
    media_sources: frozenset[str] = frozenset()
    """All files of `videos` and `recordings`. The text leaves them alone."""
    named_sources: frozenset[str] = frozenset()
    """These, and the files of `values`. ``Decode(video=)`` and ``Decode(audio=)`` leave them alone.
    """
    user_fields: frozenset[str] = frozenset()
    """All that a function or class of the user decodes or finds."""

    def source(self, sample: Mapping[str, Any], name: str) -> str:
        """Return the name of the file that a field comes from.

        Raises:
            DecodeError: The sample has none of them.
        """
        names = self.sources.get(name, (name,))
        source = next((each for each in names if each in sample), None)
        if source is None:
            raise DecodeError(f"no field {' or '.join(names)}; it has {field_names(sample)}")
        return source

    def shapes(self, image: ImageDecoder | None) -> dict[str, tuple[int, ...]]:
        """Return the shape of each field of pictures that all have one shape, as decoded.

        Args:
            image: The decoder of `IMAGE`.
        """
        decoders = dict(self.pictures)
        if image is not None:
            decoders[IMAGE] = image
        shapes: dict[str, tuple[int, ...]] = {}
        for name, decoder in decoders.items():
            leader = decoders.get(self.leaders.get(name, name))
            shape = None if leader is None else leader.output_shape
            if shape is not None:
                shapes[name] = shape if decoder.mask else (*shape, 3)
        return shapes

    def decode_values(self, sample: Sample, decoded: Sample) -> None:
        """Decode numbers, texts, arrays, and what functions of the user take, into `decoded`.

        A value that is no bytes any more stays as it is: a function before decoding has made it.

        Raises:
            DecodeError: A field is missing or damaged.
        """
        for name, decode in self.values.items():
            source = with_address(sample, "", partial(self.source, sample, name))
            value = sample[source]
            if isinstance(value, bytes | LazyBytes):
                if name in self.user_fields:
                    seed_generators(sample, f"field {name}")
                value = with_address(sample, source, partial(call_user, decode, value))
            decoded.pop(source, None)
            decoded[name] = value

    def decode_pictures(
        self,
        sample: Sample,
        decoded: Sample,
        out: Mapping[str, torch.Tensor],
        image: Decoded | None,
        early: EarlyPictures,
    ) -> None:
        """Decode pictures, boxes and points into `decoded`.

        Args:
            sample: The sample.
            decoded: Where the results go. Its other fields are decoded.
            out: Rows of the batch to write into, by field.
            image: What became of the one picture of `IMAGE`.
            early: What became of pictures that are decoded already.

        Raises:
            DecodeError: A field is missing or damaged, or a picture differs in size from the first
                of its group.
            ConfigError: A random crop or flip is set and the sample has no lineage.
        """
        results = {} if image is None else {IMAGE: image}
        # Those of a group need the result of its first.
        for name in sorted(self.pictures, key=lambda name: name in self.leaders):
            source = with_address(sample, "", partial(self.source, sample, name))
            data = decoded.pop(source)
            if not isinstance(data, bytes | memoryview):
                decoded[name] = data
                continue
            decoder = self.pictures[name]
            if name in self.user_fields:
                seed_generators(sample, f"field {name}")
            memory = out.get(name)
            result = early_picture(early, name)
            if result is None:
                plan = None
                if name in self.leaders:
                    leader = with_address(sample, name, partial(self._leader, name, results))
                    plan = Plan(leader.picture, leader.view)
                rng = picture_rng(sample, name) if decoder.is_random and plan is None else None
                pixels = None if memory is None else memory.numpy()
                decode = partial(decoder.decode, data, pixels, rng, plan)
                result = with_address(sample, source, decode)
            results[name] = result
            tensor = torch.from_numpy(result.pixels) if memory is None else memory
            decoded[name] = tensor if decoder.mask else tensor.permute(2, 0, 1)
        for name, coordinates in self.coordinates.items():
            leader = with_address(sample, name, partial(self._leader, name, results))
            if name in self.user_fields:
                seed_generators(sample, f"field {name}")
            place = partial(coordinates.place, decoded, leader.picture, leader.view)
            placed, visible = with_address(sample, name, place)
            decoded[name] = torch.from_numpy(placed)
            decoded[f"{name}_visible"] = torch.from_numpy(visible)

    def place_times(
        self,
        sample: Sample,
        decoded: Sample,
        spans: Mapping[str, Sequence[tuple[float, float]]],
    ) -> None:
        """Put the times of a sample into `decoded`.

        Args:
            sample: The sample.
            decoded: Where the results go. Its other fields are decoded.
            spans: What was taken of each file, in seconds of the file, by field.

        Raises:
            DecodeError: There are no such times, or not one file that they follow.
        """
        for name, times in self.times.items():
            span = with_address(sample, name, partial(_followed_span, times, spans))
            if name in self.user_fields:
                seed_generators(sample, f"field {name}")
            placed, visible = with_address(sample, name, partial(times.place, decoded, *span))
            decoded[name] = torch.from_numpy(placed)
            decoded[f"{name}_visible"] = torch.from_numpy(visible)

    def _leader(self, name: str, results: Mapping[str, Decoded]) -> Decoded:
        leader = self.leaders[name]
        if leader not in results:
            raise DecodeError(
                f"it shares the geometry of {leader}, of which the sample has not exactly one "
                "encoded picture"
            )
        return results[leader]

    @property
    def lists(self) -> frozenset[str]:
        """The fields of a batch that are lists with one entry per row, whatever their shapes."""
        names = (*self.coordinates, *self.times)
        return frozenset(field for name in names for field in (name, f"{name}_visible"))


def _followed_span(
    times: Times, spans: Mapping[str, Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    files = spans.get(times.follows, ())
    if len(files) != 1:
        raise DecodeError(
            f"it follows the span of {times.follows}, of which the sample has {len(files)} encoded "
            "files, not one"
        )
    return files[0]


def picture_rng(sample: Sample, field: str) -> Any:
    """Return the generator of a field's pictures. The sample's transforms have other streams.

    Raises:
        ConfigError: The sample has no lineage.
    """
    if "__lineage__" not in sample:
        raise ConfigError("a random crop or flip needs the lineage that samples of a Pipeline have")
    return sample_rng(sample, IMAGE if field == IMAGE else f"{IMAGE} {field}")


def early_picture(early: EarlyPictures, field: str) -> Decoded | None:
    """Return a picture that is decoded already. None: it is not.

    Raises:
        DecodeError: It is damaged.
    """
    result = early.get(field)
    if isinstance(result, SampleError):
        raise result
    return result


def plan_fields(
    fields: Mapping[str, FieldDecoder],
    same_geometry: Sequence[Any],
    image: ImageDecoder | None,
    max_json_bytes: int,
) -> FieldPlan:
    """Sort the decoders of a `Decode` by what they do, and check that they go together.

    Args:
        fields: The decoders by field, without that of the text.
        same_geometry: One group of names, or several.
        image: The decoder of `IMAGE`.
        max_json_bytes: The limit of JSON.

    Raises:
        ConfigError: They do not; the message says what to write.
    """
    parse = partial(parse_json, max_bytes=max_json_bytes)
    parsers: dict[str, Callable[[bytes], Any]] = {"json": parse}
    values: dict[str, Callable[[bytes], Any]] = {}
    pictures: dict[str, ImageDecoder] = {}
    coordinates: dict[str, Boxes | Points] = {}
    times: dict[str, Times] = {}
    media: dict[str, dict[str, Any]] = {"video": {}, "audio": {}}
    sources: dict[str, tuple[str, ...]] = {}
    functions: dict[str, Any] = {}
    for key, given in fields.items():
        decoder: Any = given
        names = _checked_names(key)
        name = names[0]
        others = {*values, *pictures, *coordinates, *times, *media["video"], *media["audio"]}
        if name in others or (name == IMAGE and image is not None):
            raise ConfigError(f"Decode: two decoders make the field {name!r}")
        if len(names) > 1:
            sources[name] = names
        if isinstance(decoder, EllipsisType):
            decoder = built_in(name, max_json_bytes)
        functions[name] = decoder
        if isinstance(decoder, ImageDecoder):
            pictures[name] = _checked_picture(name, decoder)
        elif (medium := decoded_medium(decoder)) is not None:
            media[medium][name] = decoder
        elif isinstance(decoder, Boxes | Points):
            coordinates[name] = decoder
        elif isinstance(decoder, Times):
            times[name] = decoder
        else:
            _add_function(key, names, decoder, parsers, values)
    decoders = pictures if image is None else {**pictures, IMAGE: image}
    leaders = _leaders(same_geometry, decoders, coordinates)

    def files_of(fields: Iterable[str]) -> frozenset[str]:
        return frozenset(file for name in fields for file in sources.get(name, (name,)))

    return FieldPlan(
        parsers,
        values,
        pictures,
        coordinates,
        leaders,
        sources,
        picture_sources=files_of(pictures),
        videos=media["video"],
        recordings=media["audio"],
        times=times,
        media_sources=files_of([*media["video"], *media["audio"]]),
        named_sources=files_of([*media["video"], *media["audio"], *values]),
        user_fields=frozenset(
            name for name, function in functions.items() if is_user_function(function)
        ),
    )


def _add_function(
    key: str,
    names: Sequence[str],
    decoder: Any,
    parsers: dict[str, Callable[[bytes], Any]],
    values: dict[str, Callable[[bytes], Any]],
) -> None:
    """Add a function from bytes to the parsers of JSON or to the values."""
    if not callable(decoder):
        raise ConfigError(
            f"Decode: {{{key!r}: {escaped(repr(decoder))}}}: give a decoder, a function from "
            "bytes to a value, or ... for the built-in decoder of the extension"
        )
    name = names[0]
    if _is_built_in_json(name, decoder) and len(names) == 1:
        parsers[name] = decoder
    elif name == "json":
        parsers[name] = partial(call_user, decoder)
    else:
        known = decode_integer if decoder is int else decode_string if decoder is str else None
        values[name] = known or decoder


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
    coordinates: Mapping[str, Boxes | Points],
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
