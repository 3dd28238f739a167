"""Videos on their way to a device, for the tests: what stands in for NVDEC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.decoding.video.encoded import EncodedVideo, EncodedVideos
from mmstream.device.nvdec import ClipDecoder, DecodeClip, torchcodec_frames
from mmstream.reading.step import BatchLineage

__all__ = ["decoders", "lineage_of", "on_device", "pyav"]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def has_torchcodec() -> bool:
    try:
        import torchcodec.decoders  # noqa: F401
    except Exception:  # it is not installed, or finds no FFmpeg
        return False
    return True


needs_torchcodec = pytest.mark.skipif(not has_torchcodec(), reason="needs torchcodec and FFmpeg")


@dataclass(frozen=True)
class PyavFrames:
    """Decodes the frames of a clip by their numbers, in groups, as torchcodec does."""

    refused: str = ""
    """The error of every second clip. "": there is none."""
    group: int = 2

    def __call__(
        self, file: torch.Tensor, numbers: Sequence[int], picture: Any, device: torch.device
    ) -> Iterator[torch.Tensor]:
        data = file.numpy().tobytes()
        if self.refused and len(data) % 2:
            raise RuntimeError(self.refused)
        frames = torch.from_numpy(mm.VideoDecoder(indices=tuple(numbers), span=None)(data))
        assert tuple(frames.shape[1:3]) == tuple(picture)
        yield from frames.permute(0, 3, 1, 2).to(device).split(self.group)


pyav = PyavFrames()

decoders = pytest.mark.parametrize(
    ("device", "decode_clip"),
    [
        pytest.param("cpu", pyav, id="pyav"),
        pytest.param("cpu", torchcodec_frames, id="torchcodec", marks=needs_torchcodec),
        pytest.param(
            "cuda", None, id="nvdec", marks=[pytest.mark.cuda, needs_cuda, needs_torchcodec]
        ),
    ],
)
"""A device, and what decodes clips there: `to_device` takes both."""


def lineage_of(num_rows: int) -> BatchLineage:
    rows = [(0, index) for index in range(num_rows)]
    return BatchLineage(0, 0, 0, rows, [True] * num_rows, rows)


def on_device(
    video: EncodedVideo, decode_clip: DecodeClip = pyav, device: str = "cpu"
) -> torch.Tensor:
    """Decode one video as a device does, and nothing of it as the CPU's workers do."""
    batch = {
        "video": EncodedVideos.join([video], is_joined=True),
        "video_row": torch.tensor([0]),
        "__key__": ["a"],
        "__lineage__": lineage_of(1),
        "__valid__": torch.tensor([True]),
    }
    decoded = ClipDecoder(torch.device(device), decode_clip, None)(batch)
    assert decoded["__lineage__"].num_gpu_videos == 1
    frames: torch.Tensor = decoded["video"]
    return frames
