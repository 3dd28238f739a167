"""The videos and recordings of one sample: planned from their headers, then decoded.

Place in the flow: `stage.py` plans all rows of a step, so that their texts can be tokenized in one
call and their frames have memory in the batch. Then `sample.py` decodes each row:

    mp4, 0.webm  -> "video", and times and rates beside it        video=VideoDecoder
                    with their tracks also "audio", "audio_video"
    wav, 0.flac  -> "audio", or "audio_features" and its length   audio=AudioDecoder
    clip.mp4     -> "clip.mp4", "clip.mp4_pts_s"                  {"clip.mp4": VideoDecoder}

A plan says which frames or samples become the result, and how large it is. Decoding draws nothing
more. The limits of a decoder hold for all files of a sample that it decodes, together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from mmstream.decoding.address import with_address
from mmstream.decoding.fields import audio_fields, in_order, video_fields
from mmstream.decoding.image.geometry import ImageShape
from mmstream.decoding.media_shapes import AudioShape, MediaShapes, VideoShape
from mmstream.decoding.sample_rng import sample_rng, seed_generators
from mmstream.errors import ConfigError
from mmstream.lazy_bytes import LazyBytes
from mmstream.types import Sample

if TYPE_CHECKING:
    from mmstream.decoding.decode import Decode

VIDEO = "video"
"""The field of the videos that ``Decode(video=)`` decodes."""
AUDIO = "audio"
"""The field of the recordings that ``Decode(audio=)`` decodes, and of the tracks of `VIDEO`."""

MediaPlans: TypeAlias = dict[str, Any]
"""What decoders have planned for a file, by the file's field."""

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


class _Video(NamedTuple):
    """A decoded video."""

    frames: torch.Tensor
    """uint8 [F, 3, H, W], a view of [F, H, W, 3]."""
    times_s: torch.Tensor
    """float64 [F]."""
    track: Any
    """Its decoded sound. None: it has none, or nobody wants it."""


def video_decoders(decode: Decode) -> dict[str, Any]:
    """Return the decoders of videos by the field of their results."""
    return {**({} if decode.video is None else {VIDEO: decode.video}), **decode.plan.videos}


def audio_decoders(decode: Decode) -> dict[str, Any]:
    """Return the decoders of recordings and tracks by the field of their results."""
    decoders = dict(decode.plan.recordings)
    for name, decoder in video_decoders(decode).items():
        if decoder.audio is not None:
            decoders[_track_field(name)] = decoder.audio
    if decode.audio is not None:
        decoders[AUDIO] = decode.audio
    return decoders


def video_files(sample: Sample, decode: Decode) -> dict[str, list[str]]:
    """Return the files that become the videos of each field, in order.

    Raises:
        DecodeError: A file that is decoded by field is missing.
    """
    files = _files_by_field(sample, decode.plan.videos, decode)
    if decode.video is not None:
        files[VIDEO] = _free_files(sample, video_fields(sample), decode)
    return files


def _audio_files(sample: Sample, decode: Decode) -> dict[str, list[str]]:
    """Return the files that become the recordings of each field; as `video_files`."""
    files = _files_by_field(sample, decode.plan.recordings, decode)
    if decode.audio is not None:
        files[AUDIO] = _free_files(sample, audio_fields(sample), decode)
    return files


def plan_media(sample: Sample, decode: Decode, *, audio: bool = True) -> MediaPlans:
    """Plan the videos and recordings of a sample, without decoding any.

    Args:
        sample: A sample with ``json`` parsed, and its lineage.
        decode: The decoders.
        audio: Whether recordings are planned too. Decoding plans them otherwise.

    Raises:
        DecodeError: A file is missing or damaged, or exceeds a limit.
        ShardError, StorageError: A file that is read by ranges cannot be read.
    """
    plans: MediaPlans = {}
    _plan_videos(sample, video_files(sample, decode), decode, plans, audio)
    if audio:
        _plan_recordings(sample, _audio_files(sample, decode), decode, plans)
    return plans


def media_shapes(
    sample: Sample,
    decode: Decode,
    plans: MediaPlans,
    images: Sequence[ImageShape],
    *,
    audio: bool,
) -> MediaShapes:
    """Return the shapes of the media that belong to a sample's text.

    Tracks of videos count as recordings, in the order of the files. Files that are decoded by field
    belong to no text.

    Args:
        sample: A sample with ``json`` parsed.
        decode: The decoders.
        plans: What `plan_media` has planned for it.
        images: The shapes of its images.
        audio: Whether recordings are planned. There are no shapes of them otherwise.
    """
    videos = {name: plans[name] for name in video_files(sample, decode).get(VIDEO, ())}
    audios: MediaPlans = {}
    if audio:
        audios = {name: plans[name] for name in _audio_files(sample, decode).get(AUDIO, ())}
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


def decode_media(
    sample: Sample,
    decoded: Sample,
    decode: Decode,
    plans: MediaPlans,
    memory: Mapping[str, torch.Tensor],
) -> None:
    """Decode the videos and recordings of a sample into `decoded`.

    Args:
        sample: A sample with ``json`` parsed, and its lineage.
        decoded: Where the results go. Their files are removed from it.
        decode: The decoders.
        plans: What `plan_media` has planned for this very sample. What it lacks is planned now.
        memory: Where to write videos, by file: uint8 [F, H, W, 3] in the memory of the batch. It is
            used where the shape fits.

    Raises:
        DecodeError: A file is missing or damaged, or exceeds a limit.
        ShardError, StorageError: A file that is read by ranges cannot be read.
    """
    plans = dict(plans)
    decoders = audio_decoders(decode)
    recordings: dict[str, dict[str, Any]] = {AUDIO: {}} if AUDIO in decoders else {}
    numbers: dict[str, dict[str, int]] = {}
    videos = video_files(sample, decode)
    _plan_videos(sample, videos, decode, plans, audio=False)
    for field, names in videos.items():
        decoder = video_decoders(decode)[field]
        _seed(sample, decode, f"decode {field}")
        decoded_videos = _decode_videos(sample, names, decoder, plans, memory)
        for name in names:
            del decoded[name]
        decoded[field] = _one_or_list([video.frames for video in decoded_videos.values()])
        decoded[f"{field}_pts_s"] = _one_or_list([v.times_s for v in decoded_videos.values()])
        shapes = [plans[name].shape for name in names]
        decoded[f"{field}_fps"] = np.array([each.sampled_fps for each in shapes], np.float64)
        requested = np.array([each.requested_fps for each in shapes], np.float64)
        decoded[f"{field}_requested_fps"] = requested
        if decoder.audio is not None:
            tracks = {name: video.track for name, video in decoded_videos.items()}
            has_track = {name: track for name, track in tracks.items() if track is not None}
            recordings.setdefault(_track_field(field), {}).update(has_track)
            numbers[_track_field(field)] = {name: i for i, name in enumerate(names)}
    for field, names in _audio_files(sample, decode).items():
        _seed(sample, decode, f"decode {field}")
        results = _decode_recordings(sample, field, names, decoders[field], plans)
        recordings.setdefault(field, {}).update(results)
        for name in names:
            del decoded[name]
    for field, of_field in recordings.items():
        has_features = decoders[field].features is not None
        decoded |= _recorded(field, of_field, has_features, numbers.get(field))
    if decode.plan.times:
        spans = {field: [_video_span(plans[name]) for name in videos[field]] for field in videos}
        for field, of_field in recordings.items():
            spans[field] = [_audio_span(result.plan) for result in of_field.values()]
        decode.plan.place_times(sample, decoded, spans)


def _seed(sample: Sample, decode: Decode, stage: str) -> None:
    """Seed the generators of this process for a decoder, which may be a class of the user."""
    if decode.has_user_media:
        seed_generators(sample, stage)


def _video_span(plan: _VideoPlans) -> tuple[float, float]:
    """Return the start and the end of what is taken of a video, in seconds of its file."""
    return plan.shape.start_s, plan.shape.end_s


def _audio_span(plan: Any) -> tuple[float, float]:
    """Return the start and the end of what is taken of a recording, in seconds of its file."""
    shape: AudioShape = plan.shape
    return plan.start_s, plan.start_s + shape.num_samples / shape.sample_rate


def _files_by_field(
    sample: Sample, decoders: Mapping[str, Any], decode: Decode
) -> dict[str, list[str]]:
    """Return the one file of each field that a decoder by field makes."""
    files = {
        field: with_address(sample, "", partial(decode.plan.source, sample, field))
        for field in decoders
    }
    return {field: [name] for field, name in files.items() if _is_encoded(sample[name])}


def _free_files(sample: Sample, names: list[str], decode: Decode) -> list[str]:
    """Return the files among these that no decoder by field takes."""
    named = decode.plan.named_sources
    return [name for name in names if name not in named and _is_encoded(sample[name])]


def _is_encoded(value: Any) -> bool:
    """Tell whether a value is a file. A function before decoding may have decoded it already."""
    return isinstance(value, bytes | LazyBytes)


def _track_field(field: str) -> str:
    """Return the field of the tracks of a field of videos."""
    return AUDIO if field == VIDEO else f"{field}_{AUDIO}"


def _plan_videos(
    sample: Sample,
    files: Mapping[str, list[str]],
    decode: Decode,
    plans: MediaPlans,
    audio: bool,
) -> None:
    """Plan the videos that have no plan yet, those of a field in order, and their tracks."""
    for field, names in files.items():
        if plans.keys() >= set(names):
            continue
        decoder = video_decoders(decode)[field]
        _seed(sample, decode, f"plan {field}")
        rng = _rng(sample, VIDEO, field, decoder)
        limits = decoder.start_limits()
        track_limits = None if decoder.audio is None else decoder.audio.start_limits()
        for name in names:
            row = _row(sample, name)
            plan = partial(decoder.plan, sample[name], row=row, rng=rng, limits=limits)
            frames = with_address(sample, name, plan)
            limits = _holding(limits, frames.shape)
            plans[name] = _VideoPlans(frames)
            if audio and decoder.audio is not None:
                track = _on_track(sample, name, "plan", decoder, frames, track_limits)
                plans[name] = _VideoPlans(frames, track, is_track_planned=True)
                if track is not None:
                    track_limits = _holding(track_limits, track.shape)


def _on_track(
    sample: Sample, name: str, method: str, decoder: Any, frames: Any, limits: Any, **options: Any
) -> Any:
    """Call a method of the decoder of a video's track. Returns None where there is no sound.

    The track is that of the video's part, also where that was drawn. The decoder's own span does
    not count.

    Args:
        sample: The sample.
        name: Its video.
        method: "plan" or "decode".
        decoder: Of the video.
        frames: What it has planned.
        limits: Of the decoder of the track.
        options: More arguments of the method.
    """
    from mmstream.media.ffmpeg import NoStreamError

    shape: VideoShape = frames.shape
    row = _row(sample, name) or {}
    names_part = row.get("start_s") is not None or row.get("end_s") is not None
    part = None
    if decoder.clip_s is not None or (decoder.span == "row" and names_part):
        part = {"start_s": shape.start_s, "end_s": shape.end_s}
    elif decoder.span not in (None, "row"):
        part = dict(zip(("start_s", "end_s"), decoder.span, strict=True))
    audio = replace(decoder.audio, span="row")

    def call() -> Any:
        try:
            return getattr(audio, method)(sample[name], row=part, limits=limits, **options)
        except NoStreamError:
            return None

    return with_address(sample, name, call)


def _plan_recordings(
    sample: Sample,
    files: Mapping[str, list[str]],
    decode: Decode,
    plans: MediaPlans,
) -> None:
    """Plan recordings, those of a field in order."""
    for field, names in files.items():
        decoder = audio_decoders(decode)[field]
        _seed(sample, decode, f"plan {field}")
        rng = _rng(sample, AUDIO, field, decoder)
        limits = decoder.start_limits()
        for name in names:
            row = _row(sample, name)
            plan = partial(decoder.plan, sample[name], row=row, rng=rng, limits=limits)
            plans[name] = with_address(sample, name, plan)
            limits = _holding(limits, plans[name].shape)


def _rng(sample: Sample, kind: str, field: str, decoder: Any) -> np.random.Generator | None:
    """Return the generator of a field's draws, where its decoder draws."""
    if not decoder.is_random:
        return None
    if "__lineage__" not in sample:
        raise ConfigError("a random part or crop needs the lineage that samples of a Pipeline have")
    return sample_rng(sample, kind if field in (VIDEO, AUDIO) else f"{kind} {field}")


def _row(sample: Sample, name: str) -> Mapping[str, Any] | None:
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


def _holding(limits: Any, shape: VideoShape | AudioShape) -> Any:
    """Return the limits of a sample's next file, after a result of this shape."""
    if isinstance(shape, VideoShape):
        return limits.holding(shape.num_frames * shape.height * shape.width * 3)
    return limits.holding(shape.num_samples / shape.sample_rate)


def _decode_videos(
    sample: Sample,
    names: Sequence[str],
    decoder: Any,
    plans: MediaPlans,
    memory: Mapping[str, torch.Tensor],
) -> dict[str, _Video]:
    """Return the videos of these files."""
    videos: dict[str, _Video] = {}
    limits = decoder.start_limits()
    track_limits = None if decoder.audio is None else decoder.audio.start_limits()
    for name in names:
        plan: _VideoPlans = plans[name]
        frames, times = _frames(sample, name, decoder, plan, memory.get(name), limits)
        limits = _holding(limits, plan.shape)
        track = None
        if decoder.audio is not None and (plan.track is not None or not plan.is_track_planned):
            track = _on_track(
                sample, name, "decode", decoder, plan.frames, track_limits, plan=plan.track
            )
        if track is not None:
            track_limits = _holding(track_limits, track.plan.shape)
        videos[name] = _Video(frames, times, track)
    return videos


def _frames(
    sample: Sample,
    name: str,
    decoder: Any,
    plan: _VideoPlans,
    out: torch.Tensor | None,
    limits: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frames of a video, and their times."""
    shape = (plan.shape.num_frames, plan.shape.height, plan.shape.width, 3)
    if out is None or tuple(out.shape) != shape:
        out = torch.empty(shape, dtype=torch.uint8)
    decode = partial(decoder.decode, sample[name], plan=plan.frames, out=out.numpy(), limits=limits)
    times = torch.tensor(with_address(sample, name, decode).times_s, dtype=torch.float64)
    return out.permute(0, 3, 1, 2), times


def _decode_recordings(
    sample: Sample, field: str, names: Sequence[str], decoder: Any, plans: MediaPlans
) -> dict[str, Any]:
    rng = _rng(sample, AUDIO, field, decoder)
    limits = decoder.start_limits()
    results = {}
    for name in names:
        row = _row(sample, name)
        plan = plans.get(name)
        decode = partial(decoder.decode, sample[name], plan=plan, row=row, rng=rng, limits=limits)
        results[name] = with_address(sample, name, decode)
        limits = _holding(limits, results[name].plan.shape)
    return results


def _recorded(
    field: str, results: Mapping[str, Any], has_features: bool, numbers: dict[str, int] | None
) -> dict[str, Any]:
    """Return the fields of a sample's recordings, in the order of their files.

    Args:
        field: Their field.
        results: By file.
        has_features: Whether they are features.
        numbers: The number of each file among the videos, where recordings are tracks.
    """
    names = in_order(results)
    fields: dict[str, Any] = {}
    if has_features:
        features = [torch.from_numpy(results[name].features) for name in names]
        lengths = [results[name].plan.shape.num_feature_frames for name in names]
        fields[f"{field}_features"] = _one_or_list(features)
        fields[f"{field}_features_length"] = np.array(lengths, dtype=np.int64)
    else:
        fields[field] = _one_or_list([torch.from_numpy(results[name].samples) for name in names])
    if numbers is not None:
        own = [numbers.get(name, -1) for name in names]
        fields[f"{field}_video"] = np.array(own, dtype=np.int64)
    return fields


def _one_or_list(values: list[T]) -> T | list[T]:
    return values[0] if len(values) == 1 else values
