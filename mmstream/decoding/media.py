"""The videos and recordings of one field: planned from their headers, then decoded.

Place in the flow: `step.py` plans all rows of a step, so that their texts can be tokenized in one
call and their frames have memory in the batch. Then `sample.py` decodes each row:

    mp4, 0.webm  -> "video", and times and rates beside it        video=VideoDecoder
                    with their tracks also "audio", "audio_video"
    wav, 0.flac  -> "audio", or "audio_features" and its length   audio=AudioDecoder
    clip.mp4     -> "clip.mp4", "clip.mp4_pts_s"                  {"clip.mp4": VideoDecoder}

A plan says which frames or samples become the result, and how large it is. Decoding draws nothing
more. The limits of a decoder hold for all files of a sample that it decodes, together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from mmstream.decoding.field import AUDIO, VIDEO, Field, FieldPlan, FieldResult
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import AudioShape, MediaShapes, Span, VideoShape
from mmstream.media.fields import in_order, with_address
from mmstream.types import Sample

T = TypeVar("T")


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
            call = partial(decoder.plan, sample[name], row=row, rng=rng, limits=limits)
            frames = with_address(sample, name, call)
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
            call = partial(decoder.decode, sample[name], **options)
            decoded = with_address(sample, name, call)
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
        requested = [shape.requested_fps for shape in shapes]
        return FieldResult(
            plan.files,
            {
                self.name: one_or_list(videos),
                f"{self.name}_pts_s": one_or_list(times),
                f"{self.name}_fps": np.array([shape.sampled_fps for shape in shapes], np.float64),
                f"{self.name}_requested_fps": np.array(requested, np.float64),
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
            row = row_of(sample, name)
            call = partial(self.decoder.plan, sample[name], row=row, rng=rng, limits=limits)
            plans.append(with_address(sample, name, call))
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
            call = partial(self.decoder.decode, sample[name], **options)
            recordings[name] = with_address(sample, name, call)
            limits = limits.holding(_seconds(recordings[name].plan.shape))
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
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            is_named = isinstance(part, dict) and part.get("field") == name
            if is_named and ("start_s" in part or "end_s" in part):
                return dict(part)
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
