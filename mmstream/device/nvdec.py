"""Decode videos on the GPU: the clips of a batch become frames on the device.

    to_device -> `ClipDecoder` -> `torchcodec_frames`

    EncodedVideos -> decode -> crop, resize, flip -> uint8, as the CPU's decoder

What the GPU refuses is decoded here on the CPU, one video after the other, and the loader counts
it. If the CPU refuses it too, the sample is bad. It cannot be substituted any more, because the
batch is made: its row becomes invalid and its frames black.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from mmstream.dataset.source import ShardSource
from mmstream.decoding.image.geometry import Shape
from mmstream.decoding.video.cpu_videos import CpuVideo
from mmstream.decoding.video.encoded import ClipEntry, EncodedVideos
from mmstream.device.bad_rows import BadMedium, address_of_row, mark_bad
from mmstream.device.render import render
from mmstream.errors import DecodeError
from mmstream.types import Batch

__all__ = ["ClipDecoder", "DecodeClip", "no_gpu_reason", "torchcodec_frames"]

logger = logging.getLogger(__name__)

DecodeClip: TypeAlias = Callable[
    [torch.Tensor, Sequence[int], Shape, torch.device], Iterator[torch.Tensor]
]
"""Decodes frames of a video to RGB on the device.

It gets the file, uint8 [num_bytes] on the host; the numbers of the frames, from 0; (height, width)
of an upright frame; and the device. It yields the frames in groups, uint8 [n, 3, H, W], turned as
the file says. Raises RuntimeError, IndexError or ValueError if the file cannot be decoded.
"""

GROUP_PIXELS = 2**27
"""Pixels that are decoded at a time: 384 MiB of frames at their full size."""

_SHOWN_REASON = 120


class ClipDecoder:
    """Decodes the encoded videos of batches on a device.

    Args:
        device: the device of the frames.
        decode_clip: `torchcodec_frames`, or a function that does the same. None: the CPU decodes
            everything, for `reason`.
        source: the dataset, which names the shards in messages. None: they are named by their
            number.
        reason: why nothing is decoded on the GPU.
    """

    def __init__(
        self,
        device: torch.device,
        decode_clip: DecodeClip | None,
        source: ShardSource | None,
        reason: str = "",
    ) -> None:
        self._device, self._decode_clip, self._source = device, decode_clip, source
        self._reason = reason

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its encoded videos decoded, on the device.

        A field is uint8 [frames, 3, H, W], channels_last, or a list of such tensors, as it is from
        the CPU. The rows of videos that cannot be decoded are invalid.
        """
        decoded = dict(batch)
        for name, videos in batch.items():
            if isinstance(videos, EncodedVideos):
                self._decode_field(decoded, name, videos)
        return decoded

    def _decode_field(self, batch: Batch, name: str, videos: EncodedVideos) -> None:
        """Decode a field of a batch, in place."""
        rows = batch[f"{name}_row"].tolist()
        outputs, joined = self._outputs(videos)
        bad: list[BadMedium] = []
        cpu_videos: list[CpuVideo] = []
        for index, (output, entry) in enumerate(zip(outputs, videos.entries, strict=True)):
            if isinstance(entry, torch.Tensor):  # the CPU has decoded it in a worker
                if output is not entry:
                    output.copy_(entry)
                continue
            reason = self._on_gpu(output, entry, videos)
            if not reason:
                continue
            field = entry.plan.field
            try:
                output.copy_(videos[index].decode())  # type: ignore[union-attr]
                address = address_of_row(batch, rows[index], field, self._source)
                cpu_videos.append(CpuVideo(address, reason))
            except DecodeError as error:
                output.zero_()
                damage = type(error)(f"in the packets that were left to the GPU: {error}")
                bad.append(BadMedium(rows[index], field, damage))
        batch[name] = outputs if joined is None else joined
        lineage = batch["__lineage__"]
        num_clips = sum(isinstance(entry, ClipEntry) for entry in videos.entries)
        num_on_gpu = num_clips - len(cpu_videos) - len(bad)
        batch["__lineage__"] = replace(
            lineage,
            num_gpu_videos=lineage.num_gpu_videos + num_on_gpu,
            cpu_videos=(*lineage.cpu_videos, *cpu_videos),
        )
        mark_bad(batch, bad, self._source)

    def _outputs(self, videos: EncodedVideos) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return memory for each video, [F, 3, H, W], and for all of them where they are joined.

        Where they are not, videos that the CPU has decoded stay where they are.
        """
        shapes = [
            (len(entry), *entry.shape[-2:])
            if isinstance(entry, torch.Tensor)
            else (entry.plan.shape.num_frames, *entry.plan.view.shape)
            for entry in videos.entries
        ]
        if not videos.is_joined:
            outputs = [
                entry if isinstance(entry, torch.Tensor) else self._empty(*shape)
                for entry, shape in zip(videos.entries, shapes, strict=True)
            ]
            return outputs, None
        counts = [num_frames for num_frames, _, _ in shapes]
        joined = self._empty(sum(counts), *shapes[0][1:])
        return list(torch.split(joined, counts)), joined

    def _empty(self, num_frames: int, height: int, width: int) -> torch.Tensor:
        shape = (num_frames, height, width, 3)
        return torch.empty(shape, dtype=torch.uint8, device=self._device).permute(0, 3, 1, 2)

    def _on_gpu(self, output: torch.Tensor, entry: ClipEntry, videos: EncodedVideos) -> str:
        """Decode a clip into `output`, uint8 [F, 3, H, W]. Returns why that cannot be, or ""."""
        if self._decode_clip is None:
            return self._reason
        plan = entry.plan
        picture = plan.shape.picture
        fill = torch.tensor(videos.decoder.fill, dtype=torch.float32, device=self._device)
        start = 0
        try:
            clip = videos.clip(entry)
            for frames in self._decode_clip(clip, plan.numbers, picture, self._device):
                if frames.shape[1:] != (3, *picture):
                    return "the GPU makes frames of another size"
                stop = start + len(frames)
                floats = torch.empty(
                    (len(frames), 3, *plan.view.shape), dtype=torch.float32, device=self._device
                )
                render(floats, frames, plan.view, videos.decoder.interpolation, fill)
                output[start:stop] = floats.round_().clamp_(0, 255).to(torch.uint8)
                start = stop
        except (RuntimeError, IndexError, ValueError) as error:
            if "out of memory" in str(error):
                raise
            return re.sub(r"\d+", "N", _short(error))  # one reason for all videos of a kind
        output[start:] = output[start - 1]  # frames that pad
        return ""


def torchcodec_frames(
    file: torch.Tensor, numbers: Sequence[int], picture: Shape, device: torch.device
) -> Iterator[torch.Tensor]:
    """Decode frames of a clip with torchcodec (see `DecodeClip`), on CUDA by NVDEC.

    Raises:
        RuntimeError: NVDEC does not decode this video, or the frames are others than these.
    """
    from torchcodec.decoders import VideoDecoder

    try:
        decoder = VideoDecoder(file, device=device, seek_mode="exact")
    except RuntimeError as error:
        if "Unsupported device" in str(error):
            raise RuntimeError("this torchcodec is built without CUDA") from error
        raise
    if decoder.cpu_fallback:  # it would decode on the CPU and say nothing
        if "unavailable" in str(decoder.cpu_fallback):
            raise RuntimeError("the driver's NVDEC library, libnvcuvid.so, is missing")
        raise RuntimeError("NVDEC does not take this codec, size or colours")
    start_s = decoder.metadata.begin_stream_seconds
    num_frames = max(1, GROUP_PIXELS // (picture[0] * picture[1]))
    for start in range(0, len(numbers), num_frames):
        group = list(numbers[start : start + num_frames])
        frames = decoder.get_frames_at(group)
        if not _are_at(frames.pts_seconds, start_s, group):
            raise RuntimeError("NVDEC shows other frames than these")
        yield frames.data


def _are_at(times_s: torch.Tensor, start_s: float, numbers: Sequence[int]) -> bool:
    """Tell whether frames of a clip have the times of their numbers.

    They are as far apart as `cut_clip` has put them. The end of a clip does not tell: torchcodec
    takes the start of the last frame for it where packets have no duration, as those of VP9.
    """
    from mmstream.decoding.video.clip import FRAME_TIME  # loads PyAV

    frame_s = float(FRAME_TIME)
    wanted = start_s + torch.tensor(numbers, dtype=torch.float64) * frame_s
    return bool(((times_s.cpu() - wanted).abs() < frame_s / 2).all())


def no_gpu_reason(device: torch.device) -> str:
    """Return why no video can be decoded on a device, in a few words. "": some can.

    The message that it logs then says what to do.
    """
    reason = advice = ""
    if device.type != "cuda":
        reason, advice = f'to_device has the device "{device}"', "give it a CUDA device"
    else:
        try:
            _import_torchcodec()
        except ImportError:
            reason, advice = "torchcodec is not installed", "pip install torchcodec"
        except (OSError, RuntimeError) as error:
            reason = "torchcodec does not load"
            advice = (
                "it needs a CUDA build of torch and the shared libraries of FFmpeg, such as "
                f"Debian's ffmpeg ({_short(error)})"
            )
    if reason:
        logger.warning(
            'VideoDecoder(device="cuda"): %s, so this process decodes all videos on the CPU, one '
            'after the other: %s; or give VideoDecoder(device="cpu"), and the workers decode them',
            reason,
            advice,
        )
    return reason


def _import_torchcodec() -> None:
    """Import torchcodec.

    Raises:
        ImportError: it is not installed.
        OSError, RuntimeError: it does not load, or without its decoders of videos.
    """
    import torchcodec.decoders

    if torchcodec.ffmpeg_major_version is None:
        raise RuntimeError("it finds no FFmpeg")


def _short(error: Exception) -> str:
    """Return the first line of an error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_SHOWN_REASON]
