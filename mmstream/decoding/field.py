"""What decodes one field of a sample: the protocol, and what all fields share.

Place in the flow: `Decode` turns its settings into a table of these, one for each field of the
batch, and `sample.py` runs the table on each sample:

    `ValueField` `JsonField`   numbers, texts, arrays, functions of the user; JSON
    `PictureField`             pictures, masks, tiles
    `VideoField` `AudioField`  videos with their tracks, recordings
    `Follower`                 `followers.py`: boxes, points and times, which follow the others
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from mmstream.decoding.image.decoder import Decoded
from mmstream.decoding.image.geometry import ImageShape, Plan
from mmstream.decoding.media_shapes import AudioShape, MediaShapes, Span, VideoShape
from mmstream.decoding.sample_rng import is_user_function, sample_rng, seed_generators
from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.media.fields import (
    FIELDS_OF,
    FRAMES,
    address,
    call_user,
    field_names,
    in_order,
    named_image_fields,
    with_address,
)
from mmstream.media.frames import encoded_video
from mmstream.tar.lazy_bytes import LazyBytes
from mmstream.types import Sample

T = TypeVar("T")

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""The kinds of media, and the fields of what ``Decode(image=, video=, audio=)`` decode."""


class FieldPlan(NamedTuple):
    """What is known of the files of a field before they are decoded."""

    files: tuple[str, ...]
    """The encoded files, in order."""
    details: tuple[Any, ...]
    """What the decoder has planned of each."""
    rng: np.random.Generator | None = None
    """For draws that need more than a header."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the uint8 arrays that each file is decoded into. (): they have no memory of the batch, or
    all rows have the same."""


class FieldResult(NamedTuple):
    """What a field makes of a sample."""

    files: tuple[str, ...]
    """What the results take the place of."""
    fields: dict[str, Any]
    geometry: Plan | None = None
    """How the one picture was resized, cropped and flipped. None: it is not a single picture."""
    spans: tuple[Span, ...] = ()
    """What was taken of each file, in seconds."""
    recordings: Mapping[str, Any] | None = None
    """Decoded sounds by file, which are joined across fields. None: it decodes none."""


@dataclass(frozen=True)
class Field:
    """One field of the batch, and the decoder of its files."""

    name: str
    decoder: Any
    sources: tuple[str, ...] = ()
    """The first of these files that a sample has is decoded. (): all files of its kind."""
    taken: frozenset[str] = frozenset()
    """Files that other fields take."""
    kind: ClassVar[str] = ""
    """Of medium."""
    encoded: ClassVar[tuple[type, ...]] = (bytes, LazyBytes)
    """The types of a file that is not decoded yet."""

    @cached_property
    def is_user(self) -> bool:
        """Whether a function or class of the user decodes it, which may draw at random."""
        return is_user_function(self.decoder)

    def seed(self, sample: Sample, stage: str) -> None:
        """Seed the generators of this process for a decoder of the user."""
        if self.is_user:
            seed_generators(sample, f"{stage} {self.name}")

    def rng(self, sample: Sample) -> np.random.Generator | None:
        """Return the generator of the field's draws. None: its decoder draws nothing.

        The sample's transforms have other streams.

        Raises:
            ConfigError: The sample has no lineage.
        """
        if not self.decoder.is_random:
            return None
        if "__lineage__" not in sample:
            what = "crop or flip" if self.kind == IMAGE else "part or crop"
            raise ConfigError(f"a random {what} needs the lineage that samples of a Pipeline have")
        return sample_rng(
            sample, self.kind if self.name == self.kind else f"{self.kind} {self.name}"
        )

    def source(self, sample: Sample) -> str:
        """Return the file of a field that has one.

        Raises:
            DecodeError: The sample has none of them.
        """
        for name in self.sources:
            if name in sample:
                return name
        names = " or ".join(self.sources)
        raise DecodeError(f"{address(sample, '')}: no field {names}; it has {field_names(sample)}")

    def files(self, sample: Sample) -> tuple[str, ...]:
        """Return the encoded files of a field, in order; errors as of `source`.

        A function before decoding may have decoded others already.
        """
        names: Sequence[str] = (self.source(sample),) if self.sources else self.free_files(sample)
        return tuple(name for name in names if isinstance(sample[name], self.encoded))

    def free_files(self, sample: Sample) -> list[str]:
        """Return the files of this kind that no other field takes."""
        return [name for name in FIELDS_OF[self.kind](sample) if name not in self.taken]

    def left_as_is(self, sample: Sample) -> FieldResult:
        """Return the value that a function before decoding has made."""
        source = self.source(sample)
        return FieldResult((source,), {self.name: sample[source]})


class ValueField(Field):
    """A number, a text, an array, or what a function of the user makes of a file."""

    def decode(self, sample: Sample) -> FieldResult:
        """Decode the file of a sample.

        Raises:
            DecodeError: It is missing or damaged.
        """
        if not self.files(sample):
            return self.left_as_is(sample)
        source = self.source(sample)
        self.seed(sample, "field")
        value = with_address(sample, source, call_user, self.decoder, sample[source])
        return FieldResult((source,), {self.name: value})


class JsonField(Field):
    """A field of JSON. It is parsed before anything else: filters and texts need it."""


# -- pictures, masks and tiles ---------------------------------------------------------------------
#
# A picture of a fixed shape is decoded before the rest of its sample, into the memory of its batch
# (`PictureField.is_early`). A decoder in C fills the caches of its core with pixels, and the Python
# after it runs several times slower than Python in one piece. So a step is planned, decoded and
# finished in three passes, with little Python between two pictures.
#
# All other pictures are decoded with their sample: those of any size, several of a sample, those
# that share the geometry of another, and what a decoder of the user makes.


_TOLD = ("size", "crop")
"""What `PictureField.tells_crop` adds, after the name of the field."""


@dataclass(frozen=True)
class PictureField(Field):
    """The picture of a name, or all pictures of a sample that have no field of their own."""

    leader: str = ""
    """The field whose geometry it shares. "": it has its own."""
    shape: tuple[int, ...] | None = None
    """Of each picture as decoded: uint8 [H, W, 3], of a mask [H, W]. None: they differ."""
    tells_crop: bool = False
    """Whether samples get the size of the picture and where it was cropped."""
    kind: ClassVar[str] = IMAGE
    encoded: ClassVar[tuple[type, ...]] = (bytes, memoryview, LazyBytes)

    @property
    def told(self) -> list[str]:
        """The fields that it makes besides."""
        return [f"{self.name}_{what}" for what in _TOLD if self.tells_crop]

    @property
    def is_early(self) -> bool:
        """Whether it is decoded before the rest of its sample."""
        return self.shape is not None and not self.leader and not self.is_user

    def plan(self, sample: Sample) -> FieldPlan | None:
        """Plan the one picture of a sample. None: there is none, or there are several.

        Raises:
            DecodeError: It is missing, or exceeds a limit.
        """
        files = self.files(sample)
        if len(files) != 1:
            return None
        rng = self.rng(sample)
        decoder, file = self.decoder, files[0]
        plan = with_address(sample, file, decoder.plan_picture, sample[file], rng)
        return FieldPlan(files, (plan,), rng)

    def decode(
        self,
        sample: Sample,
        plan: FieldPlan | None,
        out: Sequence[torch.Tensor],
        geometry: Plan | None = None,
    ) -> FieldResult:
        """Decode the pictures of a sample. The limits of memory and time hold for all together.

        Args:
            sample: With a lineage, where the decoder draws.
            plan: What `plan` returned. None: they are planned now.
            out: The row of the batch, for one picture. Empty: it has new memory.
            geometry: That of `leader`.

        Raises:
            DecodeError: One is missing or damaged, or has another size than that of `leader`. Or
                there are several with names of their own.
        """
        files = self.files(sample) if plan is None else plan.files
        if self.sources and not files:
            return self.left_as_is(sample)
        if not self.sources:
            check_image_names(sample, files)
        self.seed(sample, "field" if self.sources else "decode")
        decoder = self.decoder.of_sample(len(files))
        memory = out[0] if out and len(files) == 1 else None
        pixels = None if memory is None else memory.numpy()
        limits = decoder.start_limits()
        if len(files) > 1 and decoder.output_shape is not None:
            with_address(sample, "", limits.check_results, len(files), *decoder.output_shape)
        if plan is not None:
            arguments = (sample[files[0]], *plan.details, pixels, plan.rng, limits)
            results = [with_address(sample, files[0], decoder.decode_planned, *arguments)]
        else:
            rng = self.rng(sample) if geometry is None else None
            results = []
            for file in files:
                arguments = (sample[file], pixels, rng, geometry, limits)
                results.append(with_address(sample, file, decoder.decode, *arguments))
                limits = limits.holding(results[-1].pixels.nbytes)
        single = None
        if len(results) == 1 and decoder.tiles is None:
            single = Plan(results[0].picture, results[0].view)
        return FieldResult(files, self._fields(results, memory), single)

    def _fields(self, results: Sequence[Decoded], memory: torch.Tensor | None) -> dict[str, Any]:
        if self.decoder.tiles is not None:
            tiles = [torch.from_numpy(result.pixels).permute(0, 3, 1, 2) for result in results]
            sizes = np.array([result.picture for result in results], np.int64)
            return {
                IMAGE: [tile for of_picture in tiles for tile in of_picture],
                "image_tiles": np.array([len(of_picture) for of_picture in tiles], np.int64),
                "image_size": sizes.reshape(-1, 2),
            }
        # Collate need not copy what lies in the batch's memory.
        tensors = (
            [torch.from_numpy(result.pixels) for result in results] if memory is None else [memory]
        )
        if not self.decoder.mask:
            tensors = [tensor.permute(2, 0, 1) for tensor in tensors]
        fields: dict[str, Any] = {self.name: tensors[0] if len(tensors) == 1 else tensors}
        if self.tells_crop:
            pairs = [(result.picture, result.view.crop) for result in results]
            told = np.array(pairs, np.int64).reshape(-1, len(_TOLD), 2)
            told = told[0] if len(results) == 1 else told
            fields |= {name: told[..., n, :] for n, name in enumerate(self.told)}
        return fields

    def shapes(
        self, sample: Sample, files: Sequence[str], *, decodes: bool
    ) -> list[ImageShape] | None:
        """Return the shapes that the pictures of a sample will have, from their headers.

        Args:
            sample: The sample.
            files: What `files` returned for it.
            decodes: Where a header does not tell, decode the pictures. That is rare, and they are
                decoded a second time later.

        Returns:
            None: a header does not tell.

        Raises:
            DecodeError: A picture cannot be decoded.
        """
        self.seed(sample, "plan")
        decoder = self.decoder.of_sample(len(files))
        shapes = [decoder.prepared_shape(sample[file]) for file in files]
        if None not in shapes:
            return shapes
        if not decodes:
            return None
        rng, limits = self.rng(sample), decoder.start_limits()
        decoded = [
            with_address(sample, file, decoder.decode, sample[file], None, rng, None, limits)
            for file in files
        ]
        return [decoder.shape_of(result.picture) for result in decoded]


def check_image_names(sample: Sample, names: Sequence[str]) -> None:
    """Refuse several pictures of which some have names, such as ``input.jpg`` and ``target.png``.

    They mean different things, and ``image`` would not tell which is which. Messages may name them:
    then their order says it.

    Raises:
        DecodeError: Says what to write.
    """
    named = named_image_fields(names) if len(names) > 1 else []
    if not named or set(named) <= {str(part.get("field")) for part in _message_parts(sample)}:
        return
    example = ", ".join(f'"{escaped(name, 60)}": mm.ImageDecoder(...)' for name in names[:4])
    raise DecodeError(
        f"{address(sample, '')}: image= takes the pictures of a sample for a list, and "
        f"{' and '.join(escaped(name, 60) for name in named[:4])} have names of their own: decode "
        f"them by field, mm.Decode({{{example}}}), or leave some out in Pipeline(before=)"
    )


def _message_parts(sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield the parts of a sample's messages, where these have the usual form."""
    row = sample.get("json")
    messages = row.get("messages") if isinstance(row, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part


# -- videos and recordings -------------------------------------------------------------------------
#
# All rows of a step are planned from the headers of their files, so that their texts can be
# tokenized in one call and their frames have memory in the batch. Then each row is decoded:
#
#     mp4, 0.webm  -> "video", and times and rates beside it        video=VideoDecoder
#                     with their tracks also "audio", "audio_video"
#     wav, 0.flac  -> "audio", or "audio_features" and its length   audio=AudioDecoder
#     clip.mp4     -> "clip.mp4", "clip.mp4_pts_s"                  {"clip.mp4": VideoDecoder}
#
# A plan says which frames or samples become the result, and how large it is. Decoding draws nothing
# more. The limits of a decoder hold for all files of a sample that it decodes, together.


class _VideoPlans(NamedTuple):
    """What is planned for the frames of a video, and for its track."""

    frames: Any
    track: Any = None
    """None: it has no sound, or its sound is planned when it is decoded."""
    is_track_planned: bool = False

    @property
    def shape(self) -> VideoShape:
        """The shape of the frames."""
        shape: VideoShape = self.frames.shape
        return shape


@dataclass(frozen=True)
class VideoField(Field):
    """The video of a name, or all videos of a sample that have no field of their own."""

    kind: ClassVar[str] = VIDEO

    @property
    def sound(self) -> str:
        """The field of the tracks of the videos."""
        return AUDIO if self.name == VIDEO else f"{self.name}_{AUDIO}"

    def plan(self, sample: Sample, *, sounds: bool) -> FieldPlan:
        """Plan the videos of a sample, without decoding any.

        Args:
            sample: With ``json`` parsed, and its lineage.
            sounds: Whether tracks are planned too. Decoding plans them otherwise.

        Raises:
            DecodeError: A file is missing or damaged, or exceeds a limit.
            ShardError, StorageError: A file that is read by ranges cannot be read.
        """
        files = self.files(sample)
        if not files:
            return FieldPlan((), ())
        self.seed(sample, "plan")
        decoder, rng = self.decoder, self.rng(sample)
        limits = decoder.start_limits()
        track_limits: Any = None if decoder.audio is None else decoder.audio.start_limits()
        plans = []
        for name in files:
            row = row_of(sample, name)
            file = with_address(sample, name, encoded_video, sample, name)
            frames = with_address(sample, name, decoder.plan, file, row=row, rng=rng, limits=limits)
            limits = limits.holding(_num_bytes(frames.shape))
            plan = _VideoPlans(frames)
            if sounds and decoder.audio is not None:
                track = self._on_track(sample, name, "plan", frames, track_limits)
                plan = _VideoPlans(frames, track, is_track_planned=True)
                if track is not None:
                    track_limits = track_limits.holding(_seconds(track.shape))
            plans.append(plan)
        shapes = tuple(_frames_shape(plan.shape) for plan in plans)
        return FieldPlan(files, tuple(plans), shapes=shapes)

    def decode(
        self, sample: Sample, plan: FieldPlan | None, out: Sequence[torch.Tensor]
    ) -> FieldResult:
        """Decode the videos of a sample, and their tracks.

        Args:
            sample: With ``json`` parsed, and its lineage.
            plan: What `plan` returned for this very sample. None: they are planned now.
            out: Where to write each video: uint8 [F, H, W, 3] in the memory of the batch. It is
                used where the shape fits.

        Raises:
            DecodeError: A file is missing or damaged, or exceeds a limit.
            ShardError, StorageError: A file that is read by ranges cannot be read.
        """
        plan = plan or self.plan(sample, sounds=False)
        if self.sources and not plan.files:
            return self.left_as_is(sample)
        self.seed(sample, "decode")
        decoder = self.decoder
        limits = decoder.start_limits()
        track_limits: Any = None if decoder.audio is None else decoder.audio.start_limits()
        videos, times, tracks = [], [], {}
        for number, (name, planned) in enumerate(zip(plan.files, plan.details, strict=True)):
            frames = out[number] if number < len(out) else None
            if frames is None or tuple(frames.shape) != plan.shapes[number]:
                frames = torch.empty(plan.shapes[number], dtype=torch.uint8)
            options = {"plan": planned.frames, "out": frames.numpy(), "limits": limits}
            file = with_address(sample, name, encoded_video, sample, name)
            decoded = with_address(sample, name, decoder.decode, file, **options)
            limits = limits.holding(_num_bytes(planned.shape))
            videos.append(frames.permute(0, 3, 1, 2))
            times.append(torch.tensor(decoded.times_s, dtype=torch.float64))
            if decoder.audio is None or (planned.is_track_planned and planned.track is None):
                continue
            track = self._on_track(
                sample, name, "decode", planned.frames, track_limits, plan=planned.track
            )
            if track is not None:
                tracks[name] = track
                track_limits = track_limits.holding(_seconds(track.plan.shape))
        shapes = [planned.shape for planned in plan.details]
        return FieldResult(
            plan.files,
            {
                self.name: one_or_list(videos),
                f"{self.name}_pts_s": one_or_list(times),
                f"{self.name}_fps": np.array([shape.sampled_fps for shape in shapes], np.float64),
                f"{self.name}_requested_fps": np.array(
                    [shape.requested_fps for shape in shapes], np.float64
                ),
            },
            spans=tuple((shape.start_s, shape.end_s) for shape in shapes),
            recordings=None if decoder.audio is None else tracks,
        )

    def _on_track(
        self, sample: Sample, name: str, method: str, frames: Any, limits: Any, **options: Any
    ) -> Any:
        """Call a method of the decoder of a video's track. Returns None where there is no sound.

        The track is that of the video's part, also where that was drawn. The decoder's own span
        does not count.

        Args:
            sample: The sample.
            name: Its video.
            method: "plan" or "decode".
            frames: What is planned for its frames.
            limits: Of the decoder of the track.
            options: More arguments of the method.
        """
        from mmstream.media.ffmpeg import NoStreamError

        if name.rpartition(".")[2] == FRAMES:
            return None
        decoder = self.decoder
        row = row_of(sample, name) or {}
        names_part = row.get("start_s") is not None or row.get("end_s") is not None
        part = None
        if decoder.clip_s is not None or (decoder.span == "row" and names_part):
            part = {"start_s": frames.shape.start_s, "end_s": frames.shape.end_s}
        elif decoder.span not in (None, "row"):
            part = dict(zip(("start_s", "end_s"), decoder.span, strict=True))
        audio = replace(decoder.audio, span="row")

        def call() -> Any:
            try:
                return getattr(audio, method)(sample[name], row=part, limits=limits, **options)
            except NoStreamError:
                return None

        return with_address(sample, name, call)


@dataclass(frozen=True)
class AudioField(Field):
    """The recording of a name, or all recordings of a sample that have no field of their own."""

    kind: ClassVar[str] = AUDIO

    @property
    def sound(self) -> str:
        """The field of the recordings."""
        return self.name

    def plan(self, sample: Sample, *, sounds: bool) -> FieldPlan | None:
        """Plan the recordings of a sample; arguments and errors as of `VideoField.plan`."""
        if not sounds:
            return None
        files = self.files(sample)
        self.seed(sample, "plan")
        rng, limits = self.rng(sample), self.decoder.start_limits()
        plans = []
        for name in files:
            options = {"row": row_of(sample, name), "rng": rng, "limits": limits}
            plans.append(with_address(sample, name, self.decoder.plan, sample[name], **options))
            limits = limits.holding(_seconds(plans[-1].shape))
        return FieldPlan(files, tuple(plans))

    def decode(
        self, sample: Sample, plan: FieldPlan | None, _out: Sequence[torch.Tensor]
    ) -> FieldResult:
        """Decode the recordings of a sample, into new memory; as `VideoField.decode`."""
        files = self.files(sample) if plan is None else plan.files
        if self.sources and not files:
            return self.left_as_is(sample)
        self.seed(sample, "decode")
        rng, limits = self.rng(sample), self.decoder.start_limits()
        plans = [None] * len(files) if plan is None else plan.details
        recordings = {}
        for name, planned in zip(files, plans, strict=True):
            options = {"plan": planned, "row": row_of(sample, name), "rng": rng, "limits": limits}
            decoded = with_address(sample, name, self.decoder.decode, sample[name], **options)
            recordings[name] = decoded
            limits = limits.holding(_seconds(decoded.plan.shape))
        return FieldResult(files, {}, recordings=recordings)


MediaField: TypeAlias = VideoField | AudioField


def made_names(fields: Sequence[MediaField], sounds: Mapping[str, Any]) -> list[str]:
    """Return the fields that decoders of videos and recordings make, also in a batch.

    Args:
        fields: Of videos and recordings.
        sounds: The decoders of sounds, by the field of their results.
    """
    names = [
        f"{field.name}{ending}"
        for field in fields
        if field.kind == VIDEO
        for ending in ("", "_row", "_frames", "_pts_s", "_fps", "_requested_fps")
    ]
    for name, decoder in sounds.items():
        endings = ["", "_row", "_length", "_video"]
        endings += [] if decoder.features is None else ["_features", "_features_length"]
        names += [f"{name}{ending}" for ending in endings]
    by_field = {field.name for field in fields if field.sources}
    return [name for name in names if name not in by_field]


def joined_recordings(
    results: Mapping[str, FieldResult],
    fields: Sequence[MediaField],
    decoders: Mapping[str, Any],
    spans: dict[str, Sequence[Span]] | None,
) -> dict[str, Any]:
    """Return the fields of a sample's recordings and tracks, in the order of their files.

    Args:
        results: What each of `fields` has decoded.
        fields: Of videos and recordings.
        decoders: Those of sounds, by the field of their results.
        spans: Gets what was taken of each file of sound, by field. None: nobody asks for it.
    """
    recordings: dict[str, dict[str, Any]] = {AUDIO: {}} if AUDIO in decoders else {}
    numbers: dict[str, dict[str, int]] = {}
    for field in fields:
        result = results[field.name]
        if result.recordings is None:
            continue
        recordings.setdefault(field.sound, {}).update(result.recordings)
        if field.kind == VIDEO:
            numbers[field.sound] = {name: number for number, name in enumerate(result.files)}
    joined: dict[str, Any] = {}
    for name, of_field in recordings.items():
        if spans is not None:
            spans[name] = [_span(result.plan) for result in of_field.values()]
        files = in_order(of_field)
        if decoders[name].features is not None:
            features = [torch.from_numpy(of_field[file].features) for file in files]
            lengths = [of_field[file].plan.shape.num_feature_frames for file in files]
            joined[f"{name}_features"] = one_or_list(features)
            joined[f"{name}_features_length"] = np.array(lengths, dtype=np.int64)
        else:
            samples = [torch.from_numpy(of_field[file].samples) for file in files]
            joined[name] = one_or_list(samples)
        if name in numbers:
            own = [numbers[name].get(file, -1) for file in files]
            joined[f"{name}_video"] = np.array(own, dtype=np.int64)
    return joined


def media_shapes(
    plans: Mapping[str, FieldPlan], images: Sequence[ImageShape], kinds: Collection[str]
) -> MediaShapes:
    """Return the shapes of the media that belong to a sample's text.

    Tracks of videos count as recordings, in the order of the files. Files that are decoded by field
    belong to no text.

    Args:
        plans: What is planned of the sample, by field.
        images: The shapes of its images.
        kinds: Those whose shapes are needed. Of others there are none.
    """
    if not plans or not {VIDEO, AUDIO}.intersection(kinds):
        return MediaShapes(images)
    videos = _by_file(plans.get(VIDEO))
    audios: dict[str, Any] = {}
    if AUDIO in kinds:
        audios = _by_file(plans.get(AUDIO))
        audios |= {name: plan.track for name, plan in videos.items() if plan.track is not None}
    numbers = {name: number for number, name in enumerate(in_order(audios))}
    return MediaShapes(
        images,
        [
            plan.shape._replace(sound=plan.track.shape) if name in numbers else plan.shape
            for name, plan in videos.items()
        ],
        [audios[name].shape for name in numbers],
        [numbers.get(name) for name in videos],
    )


def _by_file(plan: FieldPlan | None) -> dict[str, Any]:
    return {} if plan is None else dict(zip(plan.files, plan.details, strict=True))


def row_of(sample: Sample, name: str) -> Mapping[str, Any] | None:
    """Return what may say which part of a file is meant: ``start_s`` and ``end_s``, in seconds.

    The part of the messages that names the file comes before the row itself. A row with one segment
    is about that segment, as a conversion stores a row with a span of its own.
    """
    row = sample.get("json")
    if not isinstance(row, dict):
        return None
    for part in _message_parts(sample):
        if part.get("field") == name and ("start_s" in part or "end_s" in part):
            return part
    segments = row.get("segments")
    if isinstance(segments, list) and len(segments) == 1 and isinstance(segments[0], dict):
        return {**segments[0], **row}
    return dict(row)


def one_or_list(values: list[T]) -> T | list[T]:
    """Return the only value, or all."""
    return values[0] if len(values) == 1 else values


def _frames_shape(shape: VideoShape) -> tuple[int, int, int, int]:
    return shape.num_frames, shape.height, shape.width, 3


def _num_bytes(shape: VideoShape) -> int:
    return shape.num_frames * shape.height * shape.width * 3


def _seconds(shape: AudioShape) -> float:
    return shape.num_samples / shape.sample_rate


def _span(plan: Any) -> Span:
    """Return the start and the end of what is taken of a recording, in seconds of its file."""
    return plan.start_s, plan.start_s + _seconds(plan.shape)
