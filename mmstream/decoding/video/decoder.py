"""`VideoDecoder`: the bytes of a video become uint8 RGB frames of the size that a model wants.

Place in the flow: `decoding.field` plans all videos of a step, so that texts know their tokens,
and then decodes them:

    header, packets -> `media.timeline` knows the time of each frame -> `sampling` chooses frames
                    -> `frames` decodes just the groups of pictures that hold them
                    -> `image.resize` writes each frame to its row of the batch

Only one decoded frame exists at a time beside the frames that a codec itself holds. Pixels stay
uint8 on the CPU. Normalization belongs to the device.

All files follow the same rules:

- Times are those of the container, in seconds from the first frame.
- The rotation that the file states is applied. Pixels count as square.
- Colours follow the matrix and the range that the file states.
- A damaged or lost frame makes the video a bad one. No other frame takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.image.decoder import SETTINGS_ADVICE, ImageDecoder, Resize, interpolation_of
from mmstream.decoding.image.geometry import View, budgeted_shape, whole_view
from mmstream.decoding.image.resize import render, render_bytes
from mmstream.decoding.media_shapes import Span, VideoShape, require_span, row_of_span, row_span
from mmstream.decoding.video.sampling import (
    FAMILY_SAMPLING,
    FrameRequest,
    budgeted_video_shape,
    capped_frame_pixels,
    frames_of_span,
    is_constant_rate,
    longest_shape,
    uniform_frames,
    uniform_number,
)
from mmstream.errors import ConfigError, DecodeError
from mmstream.media.frames import FrameList
from mmstream.media.limits import Limits
from mmstream.media.timeline import Timeline
from mmstream.media.types import EncodedMedia, Shape
from mmstream.media.video import VideoFile, pictures, read_video_file, refuse_many_decoded
from mmstream.settings import (
    Fraction,
    Level,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    arguments_gone,
    checked,
    refuse_broken,
    refuse_overridden,
    shown,
)
from mmstream.types import IntArray

MAX_BYTES = 4 * 2**30
MAX_PIXELS = 36 * 2**20
MAX_MEMORY = 2 * 2**30
MAX_DURATION_S = 6 * 3600.0
MAX_DECODED_FRAMES = 50_000
TIMEOUT_S = 60.0

CODEC_BYTES_PER_PIXEL = 36
"""Memory of a codec: 17 frames of 1.5 bytes a pixel that others are predicted from, and its own."""

CLOCK_S = 1e-6
"""Times that are no further apart are equal: floats that were added up."""

_IMAGE_SETTINGS = (
    *("size", "resize", "crop", "crop_rounding", "resize_size", "scale", "ratio", "flip"),
    *("multiple_of", "pixel_budget", "interpolation", "fill"),
)


class VideoPlan(NamedTuple):
    """What `VideoDecoder.decode` will make of a video, known without decoding it."""

    shape: VideoShape
    """The number, the size and the times of the frames."""
    view: View
    """How each frame is made of a picture, or of what `first_view` makes of it."""
    packets: IntArray
    """The packet of each frame, without those that pad. A packet may stand here repeatedly."""
    file: VideoFile
    """What is known of the file: its timeline, the stored size and the rotation."""
    first_view: View | None = None
    """How a picture is resized before, for `VideoDecoder.resize_longest`."""


class DecodedVideo(NamedTuple):
    """The frames of a video, and when they are shown."""

    pixels: NDArray[np.uint8]
    """uint8 [F, H, W, 3], RGB."""
    times_s: NDArray[np.float64]
    """float64 [F], seconds from the first frame of the file."""


@checked(
    {
        **SETTINGS_ADVICE,
        **arguments_gone("VideoDecoder"),
        "indices": "give numbers of frames from 0 up, such as (0, 8)",
        "fill": "give (red, green, blue), 0 to 255",
    },
    own=("span",),
)
@dataclass(frozen=True, kw_only=True)
class VideoDecoder:
    """Decode some frames of one video: a callable from bytes to a uint8 array.

    It holds settings and no state: it can be pickled, and called from many threads at once.

    Give one of `fps`, `num_frames` and `indices`, or none for all frames. Settings of size, crop
    and interpolation are those of `ImageDecoder`. A random crop or flip is the same for all frames.

    Attributes:
        fps: Frames to take per second of video. Between `min_frames` and `max_frames` are taken,
            evenly spread.
        num_frames: How many frames to take, evenly spread from the first to the last.
        indices: Numbers of the frames to take, from 0, in the order in which frames are shown.
        sampling: The rule by which frames are spread. "uniform": evenly from the first to the last,
            by time where the rate varies. "qwen2_vl" (also Qwen2.5-VL), "qwen3_vl",
            "llava_onevision", "smolvlm": exactly the frames that the processor of this family
            takes.
        span: Which part of the video counts: (start, end) in seconds from the first frame, the end
            left out. "row": the span that the row states by ``start_s`` and ``end_s``, or the whole
            video. An end beyond the video's is cut. None: the whole video.
        clip_s: Seconds of a random clip within the span, drawn again in each epoch. A shorter video
            is taken whole.
        min_frames: Fewest frames. A video that has fewer gives all that it has.
        max_frames: Most frames. Neither counts where `num_frames` or `indices` says how many.
        frame_multiple_of: The number of frames is a multiple of it, the model's temporal patch. It
            is rounded down, and otherwise the last frame is repeated.
        size: As `ImageDecoder.size`.
        resize: As `ImageDecoder.resize`.
        crop: As `ImageDecoder.crop`.
        crop_rounding: As `ImageDecoder.crop_rounding`.
        resize_size: As `ImageDecoder.resize_size`.
        resize_longest: Length in pixels that the longer side of each frame is scaled to before all
            else, as the processor of SmolVLM does. None: frames are resized once.
        scale: As `ImageDecoder.scale`.
        ratio: As `ImageDecoder.ratio`.
        flip: As `ImageDecoder.flip`.
        multiple_of: As `ImageDecoder.multiple_of`.
        pixel_budget: (fewest, most) pixels of a frame, with ``resize="max_pixels"``.
        video_pixel_budget: (fewest, most) pixels of all frames together, in place of
            `pixel_budget`: the rule of Qwen3-VL.
        max_frame_pixels: Most pixels of a frame, with `video_pixel_budget`. Otherwise the few
            frames of a short video share the budget of a long one. None: no limit.
        max_video_pixels: Most pixels of all frames together, with `pixel_budget`. Each frame has an
            even share, but at least 1.05 times the fewest of the budget. None: no limit.
        interpolation: As `ImageDecoder.interpolation`.
        fill: As `ImageDecoder.fill`.
        audio: The decoder of the video's own sound. None: the sound is left out.
        max_pixels: Limit on height x width of the stored frames. The default is 36 Mi pixels.
        max_bytes: Limit on the size of the file. The default is 4 GiB.
        max_duration_s: Limit on the length of the video, in seconds. The default is 6 hours.
        max_decoded_frames: Limit on the frames that must be decoded for those that are taken. The
            default is 50,000.
        max_memory: Limit on the bytes that decoding needs at its peak, besides the file. The
            results count, and those of the sample's earlier videos. The default is 2 GiB.
        timeout_s: Seconds of processor time that decoding the videos of one sample may take, all
            together. It is a last resort: the limits above hold on every machine alike. A sample
            that takes longer is bad, and has an `mmstream.errors.TimeoutError`. The default is a
            minute. None: no limit.

    Raises:
        ConfigError: A setting has the wrong type or range, or does not go with another. The message
            names the setting and says what to give.

    Examples:
        >>> two_a_second = VideoDecoder(fps=2, max_frames=64, size=224)
        >>> eight_frames = VideoDecoder(num_frames=8, size=224, crop="random", clip_s=4)
        >>> qwen2_5_vl = VideoDecoder(
        ...     fps=2, sampling="qwen2_vl", min_frames=4, frame_multiple_of=2, resize="max_pixels",
        ...     pixel_budget=(128 * 28 * 28, 768 * 28 * 28), interpolation="bicubic",
        ... )
    """

    decoded_medium: ClassVar[str] = "video"
    reads_ranges: ClassVar[bool] = True

    fps: PositiveFloat | None = None
    num_frames: PositiveInt | None = None
    indices: tuple[NonNegativeInt, ...] | None = None
    sampling: Literal["uniform", "qwen2_vl", "qwen3_vl", "llava_onevision", "smolvlm"] = "uniform"
    span: Span | Literal["row"] | None = "row"
    clip_s: PositiveFloat | None = None
    min_frames: PositiveInt = 1
    max_frames: PositiveInt = 768
    frame_multiple_of: PositiveInt = 1
    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    resize: Resize | None = None
    crop: Literal["center", "random"] | None = "center"
    crop_rounding: Literal["even", "down"] = "even"
    resize_size: PositiveInt | None = None
    resize_longest: PositiveInt | None = None
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    flip: Fraction = 0.0
    multiple_of: PositiveInt = 28
    pixel_budget: tuple[PositiveInt, PositiveInt] = (128 * 28 * 28, 768 * 28 * 28)
    video_pixel_budget: tuple[PositiveInt, PositiveInt] | None = None
    max_frame_pixels: PositiveInt | None = None
    max_video_pixels: PositiveInt | None = None
    interpolation: Literal["bilinear", "bicubic", "lanczos", "nearest"] = "bilinear"
    fill: tuple[Level, Level, Level] = (0, 0, 0)
    audio: Any = None
    max_pixels: PositiveInt = MAX_PIXELS
    max_bytes: PositiveInt = MAX_BYTES
    max_duration_s: PositiveFloat = MAX_DURATION_S
    max_decoded_frames: PositiveInt = MAX_DECODED_FRAMES
    max_memory: PositiveInt = MAX_MEMORY
    timeout_s: PositiveFloat | None = TIMEOUT_S

    def __post_init__(self) -> None:
        refuse_overridden(self, VideoDecoder, "frames")
        _check_settings(self)
        _ = self._picture_decoder  # checks the settings that both share

    @classmethod
    def from_processor(cls, processor: Any, **settings: Any) -> VideoDecoder:
        """Take over the settings of a Hugging Face processor.

        Args:
            processor: A video processor, or a processor that holds a ``video_processor``. Known are
                those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2.5-Omni, Qwen3-Omni, LLaVA-OneVision
                and SmolVLM.
            **settings: Settings of the decoder that replace the processor's. `fps`, `num_frames` or
                `indices` replaces what the processor says of the frames it takes. Without any, the
                Qwen models take two frames a second.

        Returns:
            A decoder that takes the same frames and makes the same pixels. A video that its file
            turns is turned, which the processors do not do. It does not normalize: give
            ``processor.video_processor.image_mean`` and ``image_std`` to `Normalize`.

        Raises:
            ConfigError: The processor is not known, or does something that this decoder cannot do;
                the message says what.
        """
        return cls(**{**settings_of(processor, settings), **settings})

    @property
    def output_shape(self) -> Shape | None:
        """(height, width) of every frame, or None where it differs from video to video."""
        return self._picture_decoder.output_shape

    @property
    def is_random(self) -> bool:
        """Whether results depend on a random generator."""
        return self._picture_decoder.is_random or self.clip_s is not None

    def __call__(
        self,
        data: EncodedMedia | FrameList,
        out: NDArray[np.uint8] | None = None,
        rng: np.random.Generator | None = None,
        span: Span | None = None,
    ) -> NDArray[np.uint8]:
        """Decode the frames of one video.

        Args:
            data: The encoded file, or a way to read parts of it: MP4, MOV, MKV, WebM, AVI, MPEG-TS
                and others, of any codec that FFmpeg knows. Or a list of frames.
            out: Where to write the result: uint8 [F, H, W, 3], C-contiguous, of the shape that
                `plan` tells. After a DecodeError its content is undefined.
            rng: The generator for random clips, crops and flips, which need one. In a pipeline it
                is the sample's own, ``mm.sample_rng(sample, "video")``.
            span: (start_s, end_s), for a decoder with ``span="row"``. None: the whole video.

        Returns:
            uint8 [F, H, W, 3], RGB, C-contiguous, in the order of time. It is ``out`` where that
            was given.

        Raises:
            DecodeError: The file is not a whole video, or exceeds a limit. The reason is one line.
            TimeoutError: Decoding takes longer than `timeout_s`.
            StorageError: Reading a part of the file failed.
            ConfigError: ``out`` cannot hold the result, or ``rng`` is missing. Or the decoder has
                another span.
        """
        return self.decode(data, out=out, row=row_of_span(span, self.span), rng=rng).pixels

    def plan(
        self,
        data: EncodedMedia | FrameList,
        row: Mapping[str, Any] | None = None,
        rng: np.random.Generator | None = None,
        limits: Limits | None = None,
    ) -> VideoPlan:
        """Choose the frames of a video.

        Nothing is decoded of an MP4. Of other files it is the first key frame, for the rotation.

        Args:
            data: The encoded file.
            row: The row's values or the part of a message, with ``start_s`` and ``end_s`` in
                seconds. They count with ``span="row"``.
            rng: As in a call.
            limits: What `start_limits` returned for this sample. None: they start now.

        Returns:
            The plan. Its ``shape`` says how many frames there will be, how large, and when.

        Raises:
            DecodeError: As in a call. Or the span of the row is none, or lies after the video.
            TimeoutError: As in a call.
            StorageError: As in a call.
            ConfigError: ``rng`` is missing.
        """
        if self.is_random and rng is None:
            raise ConfigError(
                'rng: a random clip, crop or flip needs mm.sample_rng(sample, "video")'
            )
        limits = limits or self.start_limits()
        if len(data) > self.max_bytes:
            raise DecodeError(f"video of {len(data)} bytes exceeds max_bytes={self.max_bytes}")
        file = read_video_file(data, limits.deadline, self.max_pixels)
        if file.timeline.duration_s > self.max_duration_s:
            raise DecodeError(
                f"video of {file.timeline.duration_s:.0f} s exceeds "
                f"max_duration_s={self.max_duration_s:g}"
            )
        span = row_span(row) if self.span == "row" else self.span
        return self._plan(file, span, rng, limits)

    def decode(
        self,
        data: EncodedMedia | FrameList,
        plan: VideoPlan | None = None,
        out: NDArray[np.uint8] | None = None,
        row: Mapping[str, Any] | None = None,
        rng: np.random.Generator | None = None,
        limits: Limits | None = None,
    ) -> DecodedVideo:
        """Decode one video as a call does. The outcome also has the times of the frames.

        Args:
            data: The encoded file.
            plan: What `plan` returned for this file. None: it is planned now.
            out: As in a call.
            row: As in `plan`. Not used with a plan.
            rng: As in a call. Not used with a plan.
            limits: What `start_limits` returned for this sample. None: they start now.

        Raises:
            DecodeError: As in a call.
            TimeoutError: As in a call.
            StorageError: As in a call.
            ConfigError: As in a call.
        """
        limits = limits or self.start_limits()
        plan = plan or self.plan(data, row, rng, limits)
        shape = plan.shape
        wanted = (shape.num_frames, shape.height, shape.width, 3)
        if out is None:
            out = np.empty(wanted, np.uint8)
        elif out.shape != wanted or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ConfigError(f"out: {out.dtype} {out.shape} cannot hold frames of {wanted}")
        positions: dict[int, list[int]] = {}
        for position, packet in enumerate(plan.packets.tolist()):
            positions.setdefault(packet, []).append(position)
        decoded = pictures(
            plan.file, data, sorted(positions), limits.deadline, self.max_decoded_frames
        )
        for packet, picture in decoded:
            first, *others = positions[packet]
            if plan.first_view is not None:
                picture = render(picture, plan.first_view, self.interpolation, self.fill)
            render(picture, plan.view, self.interpolation, self.fill, out[first])
            for position in others:
                out[position] = out[first]
        out[len(plan.packets) :] = out[len(plan.packets) - 1]
        return DecodedVideo(out, np.array(shape.times_s))

    def start_limits(self) -> Limits:
        """Return the limits of decoding the videos of one sample, in this thread, from now on."""
        return Limits.start(self.max_pixels, self.max_memory, self.timeout_s)

    @cached_property
    def _picture_decoder(self) -> ImageDecoder:
        """The settings that frames share with images."""
        settings = {name: getattr(self, name) for name in _IMAGE_SETTINGS}
        return ImageDecoder(**settings, max_pixels=self.max_pixels, max_memory=self.max_memory)

    def _plan(
        self,
        file: VideoFile,
        span: Span | None,
        rng: np.random.Generator | None,
        limits: Limits,
    ) -> VideoPlan:
        timeline = file.timeline
        start_s, end_s = self._cut_span(timeline, span, rng)
        first_s = float(timeline.times_s[0])
        is_whole = start_s <= first_s and end_s >= timeline.end_s
        numbers = frames_of_span(timeline.times_s, None if is_whole else (start_s, end_s))
        duration_s = end_s - max(start_s, first_s)
        chosen = self._choose(file, numbers, duration_s)
        picture = file.picture
        first_view = None
        if self.resize_longest is not None:
            first_view = whole_view(picture, longest_shape(picture, self.resize_longest))
        resized = picture if first_view is None else first_view.shape
        view = self._view(resized, len(chosen), rng, limits)
        num_padding = -len(chosen) % self.frame_multiple_of
        num_frames = len(chosen) + num_padding
        packets = timeline.display_order[chosen]
        height, width = view.shape
        limits.check_memory(
            num_frames * height * width * 3
            + (0 if first_view is None else render_bytes(first_view, picture))
            + render_bytes(view, resized)
            + CODEC_BYTES_PER_PIXEL * picture[0] * picture[1],
            height,
            width,
            f"video, stored as {picture[1]}x{picture[0]}, with {num_frames} frames",
        )
        refuse_many_decoded(timeline, packets.tolist(), self.max_decoded_frames)
        padded = np.append(chosen, np.repeat(chosen[-1:], num_padding))
        shape = VideoShape(
            num_frames=num_frames,
            height=height,
            width=width,
            picture=picture,
            times_s=tuple(timeline.times_s[padded].tolist()),
            fps=file.fps,
            sampled_fps=_sampled_fps(file, numbers, len(chosen), duration_s),
            start_s=start_s,
            indices=tuple(padded.tolist()) if timeline.stated_s is None else (),
            num_padding=num_padding,
            end_s=end_s,
            requested_fps=self.fps or 0.0,
        )
        return VideoPlan(shape, view, packets, file, first_view)

    def _cut_span(
        self, timeline: Timeline, span: Span | None, rng: np.random.Generator | None
    ) -> Span:
        """Return the span within the video, with its random clip drawn."""
        start, end = span or (0.0, timeline.end_s)
        if start > 0 and start >= timeline.end_s - CLOCK_S:
            raise DecodeError(
                f"the span starts at {start:g} s, and the video ends at {timeline.end_s:g} s"
            )
        end = min(end, timeline.end_s)
        if end <= timeline.times_s[0] > 0:
            raise DecodeError(
                f"the span ends at {end:g} s, and the video begins at {timeline.times_s[0]:g} s"
            )
        if self.clip_s is not None and rng is not None:
            start = max(start, float(timeline.times_s[0]))
            start += rng.random() * max(0.0, end - start - self.clip_s)
            end = min(end, start + self.clip_s)
        return start, end

    def _choose(self, file: VideoFile, numbers: IntArray, duration_s: float) -> IntArray:
        """Return the numbers of the frames that are taken, by time.

        Args:
            file: The file.
            numbers: The frames of the span.
            duration_s: How long the span is, in seconds.
        """
        times = file.timeline.times_s
        if self.indices is not None:
            if max(self.indices) >= len(times):
                raise DecodeError(f"has {len(times)} frames, and no frame {max(self.indices)}")
            return np.array(self.indices, np.int64)
        if self.sampling != "uniform":
            request = FrameRequest(
                fps=self.fps,
                num_frames=self.num_frames,
                min_frames=self.min_frames,
                max_frames=self.max_frames,
                multiple_of=self.frame_multiple_of,
            )
            taken = FAMILY_SAMPLING[self.sampling](len(numbers), file.fps, request)
        else:
            number = self.num_frames or uniform_number(
                len(numbers),
                duration_s,
                self.fps,
                self.min_frames,
                self.max_frames,
                self.frame_multiple_of,
            )
            taken = uniform_frames(times[numbers], number)
        return numbers[taken]

    def _view(
        self, picture: Shape, num_frames: int, rng: np.random.Generator | None, limits: Limits
    ) -> View:
        if self.video_pixel_budget is not None:
            low, high = self.video_pixel_budget
            if self.max_frame_pixels is not None:
                most = capped_frame_pixels(num_frames, low, self.max_frame_pixels, high)
                high = most * num_frames
            resized = budgeted_video_shape(
                picture, num_frames, self.multiple_of, self.frame_multiple_of, (low, high)
            )
            return whole_view(picture, resized)
        if self.max_video_pixels is not None:
            low, high = self.pixel_budget
            most = capped_frame_pixels(num_frames, low, high, self.max_video_pixels)
            return whole_view(picture, budgeted_shape(picture, self.multiple_of, low, most))
        (view,) = self._picture_decoder.views(picture, rng, limits)
        return view


def _sampled_fps(file: VideoFile, numbers: IntArray, num_chosen: int, duration_s: float) -> float:
    """Return how many frames of a second of the span are taken.

    With a constant rate it is computed as transformers does, to the last bit: models round what
    they make of it to whole positions.
    """
    if is_constant_rate(file.timeline.times_s[numbers]):
        return num_chosen / len(numbers) * file.fps
    return num_chosen / max(duration_s, CLOCK_S)


# -- checks of the settings ------------------------------------------------------------------------


def _check_settings(decoder: VideoDecoder) -> None:
    """Refuse settings that do not go with each other."""
    fps, num_frames, indices = decoder.fps, decoder.num_frames, decoder.indices
    number = num_frames if indices is None else len(indices)
    low, high = decoder.min_frames, decoder.max_frames
    audio, budget = decoder.audio, decoder.video_pixel_budget
    is_max_pixels = decoder.resize == "max_pixels"
    require_span(decoder.span)
    refuse_broken(
        (
            sum(setting is not None for setting in (fps, num_frames, indices)) > 1,
            "give one of fps, num_frames and indices",
        ),
        (
            decoder.sampling == "smolvlm" and fps is None and indices is None,
            'sampling="smolvlm" takes frames per second: give fps and max_frames',
        ),
        (low > high, f"min_frames={low} is above max_frames={high}"),
        (
            audio is not None and getattr(type(audio), "decoded_medium", None) != "audio",
            f"audio={shown(audio)}: give mm.AudioDecoder(), or None to leave the sound out",
        ),
        (indices == (), "indices=(): give numbers of frames from 0 up, such as (0, 8)"),
        (  # a number of frames beside bounds that it is beyond: they would not count
            number and (number < low or number > high != type(decoder).max_frames),
            f"{number} frames by num_frames= or indices=, and min_frames={low}, "
            f"max_frames={high}: these are for other numbers of frames, so leave them out",
        ),
        (
            decoder.max_frame_pixels is not None and budget is None,
            "max_frame_pixels goes with video_pixel_budget",
        ),
        (
            decoder.max_video_pixels is not None and (not is_max_pixels or budget is not None),
            'max_video_pixels goes with resize="max_pixels", and without video_pixel_budget',
        ),
        (
            budget is not None and not is_max_pixels,
            'video_pixel_budget goes with resize="max_pixels"',
        ),
        (
            budget is not None and budget[0] > budget[1],
            f"video_pixel_budget={budget!r}: give (low, high), above zero",
        ),
    )


# -- settings of Hugging Face video processors -----------------------------------------------------
#
# Normalization is left out: it belongs to the device (`mm.Normalize`).

_INTERPOLATIONS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of the filters."""

_FAMILIES = {
    "Qwen2VL": "qwen2_vl",
    "Qwen3VL": "qwen3_vl",
    "LlavaOnevision": "llava_onevision",
    "SmolVLM": "smolvlm",
}
"""The rule of sampling, by names of classes up to ``VideoProcessor``."""

_SIZE_KEYS = {"llava_onevision": {"height", "width"}, "smolvlm": {"longest_edge"}}
"""What the sizes of a family say. Those of the others are numbers of pixels."""

_SHARE_OF_TOKENS = 0.9
"""How much of ``max_video_tokens`` the frames of Qwen2-VL may take."""

SMOLVLM_MAX_SIDE = 4096
"""Most pixels of a side that SmolVLM resizes a frame to first."""

DEFAULT_FPS = 2.0
"""Frames per second that the Qwen models are trained on, where the processor does not say it."""


@checked(cure="processor=: a setting that its class does not write; run it as a transform")
def settings_of(processor: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a `VideoDecoder` that makes the same frames.

    Args:
        processor: A video processor, or a processor that holds one.
        chosen: Settings that the user gives. They say which frames of a video are taken, in place
            of the processor's `fps` or `num_frames`.

    Raises:
        ConfigError: The class is not known, or a setting has no counterpart. The message names it.
    """
    # Those of the omni models give their video processor a size at each call.
    called_with = getattr(processor, "videos_kwargs", None) or {}
    processor = getattr(processor, "video_processor", processor)
    name = type(processor).__name__
    family = _FAMILIES.get(name.partition("VideoProcessor")[0])
    if family is None:
        raise ConfigError(f"{name}: not one of {', '.join(_FAMILIES)}; run it as a transform")
    interpolation = interpolation_of(processor, _INTERPOLATIONS)
    if getattr(processor, "do_center_crop", None):
        raise ConfigError(f"{name}.do_center_crop: no rule of the video decoder")
    settings = {
        "sampling": family,
        "interpolation": interpolation,
        **_frames(processor, family, chosen),
    }
    edges = dict(called_with.get("size") or processor.size)
    size = {key: side for key, side in edges.items() if side is not None}
    if size.keys() != _SIZE_KEYS.get(family, {"shortest_edge", "longest_edge"}):
        raise ConfigError(f"{name}.size={size}: no rule of the video decoder")
    if family == "llava_onevision":
        return {**settings, "size": (size["height"], size["width"]), "resize": "exact"}
    if family == "smolvlm":
        side = dict(processor.max_image_size)["longest_edge"]
        longest = min(size["longest_edge"], SMOLVLM_MAX_SIDE)
        return {**settings, "resize_longest": longest, "size": (side, side), "resize": "exact"}
    # For these processors, the two "edges" are numbers of pixels: of a frame, or of all frames.
    budget = "video_pixel_budget" if family == "qwen3_vl" else "pixel_budget"
    return {
        **settings,
        **_cap(processor, family),
        "resize": "max_pixels",
        "multiple_of": processor.patch_size * processor.merge_size,
        "frame_multiple_of": processor.temporal_patch_size,
        budget: (size["shortest_edge"], size["longest_edge"]),
    }


def _cap(processor: Any, family: str) -> dict[str, int]:
    """Return the limit of ``cap_pixels_per_frame``, which counts in tokens.

    Qwen3-VL limits the tokens of a frame, and Qwen2-VL those of a video, to 90 % of
    ``max_video_tokens``.
    """
    if not getattr(processor, "cap_pixels_per_frame", None):
        return {}
    token = (processor.patch_size * processor.merge_size) ** 2
    if family == "qwen3_vl":
        return {"max_frame_pixels": processor.max_video_tokens * token}
    share = int(processor.max_video_tokens * token * _SHARE_OF_TOKENS)
    return {"max_video_pixels": share * processor.temporal_patch_size}


def _frames(processor: Any, family: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say how many frames are taken."""
    num_frames, fps = getattr(processor, "num_frames", None), getattr(processor, "fps", None)
    if chosen.keys() & {"num_frames", "indices"}:
        return {}
    if family == "smolvlm":  # its number is the most frames
        own = {"fps": fps, "max_frames": num_frames}
        if not all(value is not None or name in chosen for name, value in own.items()):
            raise ConfigError(
                f"{type(processor).__name__} does not say which frames it takes: "
                "VideoDecoder.from_processor(processor, fps=1, max_frames=64)"
            )
        return {name: value for name, value in own.items() if value is not None}
    if num_frames is not None and "fps" not in chosen:
        return {"num_frames": num_frames}
    bounds: dict[str, Any] = {}
    if family != "llava_onevision":
        bounds = {"min_frames": processor.min_frames, "max_frames": processor.max_frames}
    if "fps" in chosen:
        return bounds
    if fps is None and family == "llava_onevision":
        raise ConfigError(
            f"{type(processor).__name__} does not say which frames it takes: "
            "VideoDecoder.from_processor(processor, num_frames=8)"
        )
    return {**bounds, "fps": float(DEFAULT_FPS if fps is None else fps)}
