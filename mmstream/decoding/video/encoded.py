"""Videos that a GPU will decode: clips of the packets that their frames need, instead of frames.

Place in the flow: with ``VideoDecoder(device="cuda")`` a worker plans a video as it would for
itself. Then it passes on a clip and the plan:

    decode -> EncodedVideo, one per video -> batch -> EncodedVideos, one per batch -> device

`gpu_eligible.py` says which videos go this way. The CPU decodes all others in the worker, and they
travel as pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np
import torch

from mmstream.decoding.ffmpeg.source import EncodedMedia
from mmstream.decoding.image.geometry import View
from mmstream.decoding.media_shapes import VideoShape
from mmstream.decoding.video.decoder import VideoDecoder, VideoPlan
from mmstream.decoding.video.limits import VideoLimits
from mmstream.errors import DecodeError

__all__ = ["ClipEntry", "ClipPlan", "EncodedVideo", "EncodedVideos", "encode_video"]


class ClipPlan(NamedTuple):
    """How the frames of a video are made of a clip."""

    numbers: tuple[int, ...]
    """The frame of the clip that each frame is made of, without those that pad."""
    shape: VideoShape
    """The number, the size and the times of the frames."""
    view: View
    """How each frame is made of an upright picture."""
    field: str
    """Name of the sample's field, for messages."""


@dataclass(frozen=True)
class EncodedVideo:
    """A sample's video on its way to the GPU. ``decode()`` shows it earlier, on the CPU."""

    clip: bytes
    """A video file of the packets that the frames need."""
    plan: ClipPlan
    """How the frames are made of it."""
    decoder: VideoDecoder
    """The settings."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(frames, 3, height, width) of the result."""
        shape = self.plan.shape
        return shape.num_frames, 3, shape.height, shape.width

    def decode(self) -> torch.Tensor:
        """Decode the frames on the CPU with the reference decoder.

        Returns:
            uint8 [F, 3, H, W], a view of F, H, W, 3 memory.

        Raises:
            DecodeError: A frame is damaged or lost.
        """
        from mmstream.decoding.video.file import read_video_file

        limits = self.decoder.start_limits()
        file = read_video_file(self.clip, limits.deadline, self.decoder.max_pixels)
        packets = file.timeline.display_order
        if max(self.plan.numbers) >= len(packets):
            raise DecodeError(f"its clip has {len(packets)} frames: one is damaged or lost")
        plan = VideoPlan(
            self.plan.shape, self.plan.view, packets[np.array(self.plan.numbers)], file
        )
        pixels = self.decoder.decode(self.clip, plan, limits=limits).pixels
        return torch.from_numpy(pixels).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return self.plan.shape.num_frames

    def __repr__(self) -> str:
        num_frames, _, height, width = self.shape
        return (
            f"<clip for {num_frames} frames of {width}x{height}, {len(self.clip):,} bytes, for "
            "mmstream.to_device>"
        )


def encode_video(
    data: EncodedMedia, field: str, decoder: VideoDecoder, plan: VideoPlan, limits: VideoLimits
) -> EncodedVideo | str:
    """Leave a video to the GPU, as its plan says.

    Returns:
        The video. Or why the CPU must decode it, in a few words.

    Raises:
        DecodeError: The file is damaged. Of its packets nothing is decoded, so most damage is not
            noticed.
        TimeoutError: It takes too long.
        StorageError: Reading a part of the file failed.
    """
    from mmstream.decoding.video.clip import UncopiedError, cut_clip

    try:
        clip = cut_clip(data, plan.file, plan.packets.tolist(), limits.deadline)
    except UncopiedError as error:
        return str(error)
    return EncodedVideo(clip.data, ClipPlan(clip.numbers, plan.shape, plan.view, field), decoder)


class ClipEntry(NamedTuple):
    """One clip among those of a batch."""

    start: int
    """Offset of its first byte in `EncodedVideos.data`."""
    stop: int
    """Offset after its last byte."""
    plan: ClipPlan


@dataclass(frozen=True, eq=False)
class EncodedVideos:
    """All videos of a field of a batch, some of which `mmstream.to_device` has the GPU decode.

    A sequence of `EncodedVideo` and uint8 [F, 3, H, W] tensors. A slice shares the memory.
    """

    data: torch.Tensor
    """uint8 [num_bytes], the clips end to end."""
    entries: list[ClipEntry | torch.Tensor]
    """One per video: a clip, or the frames of one that the CPU decoded."""
    decoder: VideoDecoder
    """The settings, the same for all."""
    is_joined: bool
    """Whether the frames of all videos become one tensor."""

    @classmethod
    def join(
        cls, videos: Sequence[EncodedVideo | torch.Tensor], *, is_joined: bool
    ) -> EncodedVideos:
        """Put the videos of a batch together. At least one of them must be encoded."""
        entries: list[ClipEntry | torch.Tensor] = []
        data = bytearray()
        decoder = None
        for video in videos:
            if isinstance(video, torch.Tensor):
                entries.append(video)
                continue
            decoder = video.decoder
            entries.append(ClipEntry(len(data), len(data) + len(video.clip), video.plan))
            data += video.clip
        assert decoder is not None
        return cls(torch.frombuffer(data, dtype=torch.uint8), entries, decoder, is_joined)

    def clip(self, entry: ClipEntry) -> torch.Tensor:
        """Return the bytes of a clip: uint8 [num_bytes], a view."""
        return self.data[entry.start : entry.stop]

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> EncodedVideo | torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedVideos: ...
    def __getitem__(self, index: int | slice) -> EncodedVideo | torch.Tensor | EncodedVideos:
        if isinstance(index, slice):
            return replace(self, entries=self.entries[index])
        entry = self.entries[index]
        if isinstance(entry, torch.Tensor):
            return entry
        return EncodedVideo(self.clip(entry).numpy().tobytes(), entry.plan, self.decoder)

    def __iter__(self) -> Iterator[EncodedVideo | torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        num_clips = sum(isinstance(entry, ClipEntry) for entry in self.entries)
        return f"<{num_clips} clips and {len(self) - num_clips} videos for mmstream.to_device>"
