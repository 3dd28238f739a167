"""Videos and recordings on the device: frames as pictures, the rest as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.loader import normalize
from mmstream.loader.normalize import Normalizer
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_media import FakeAudioDecoder, FakeVideoDecoder, fake_file

NORMALIZE = mm.Normalize(mean=(0.25, 0.5, 0.75), std=(0.5, 0.25, 0.125))


def files(number: int) -> dict[str, bytes]:
    return {
        f"{i}.mp4": fake_file(number + i, 1 + (number + i) % 3, has_track=i == 0)
        for i in range(number % 3)
    } | {"wav": fake_file(number, 5 + number)}


def batches(folder: Path, video: FakeVideoDecoder, **settings: Any) -> tuple[Any, Any]:
    """The batches of a loader, on the host and on a device."""
    dataset = mm.open_dataset(write_corpus(folder, [8], files))
    decode = mm.Decode({"wav": FakeAudioDecoder()}, video=video)
    pipeline = mm.Pipeline(dataset, global_batch_size=4, decode=decode)
    return list(mm.Loader(pipeline)), list(mm.to_device(mm.Loader(pipeline), "cpu", **settings))


def normalised(frames: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (NORMALIZE.mean, NORMALIZE.std))
    return (frames.float() / 255 - mean) / std


@pytest.mark.parametrize("size", [(4, 6), None])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda frames: frames),
        ({"normalize": NORMALIZE}, normalised),
        ({"normalize": NORMALIZE, "dtype": torch.bfloat16}, lambda f: normalised(f).bfloat16()),
    ],
    ids=["bytes", "float32", "bfloat16"],
)
def test_frames_are_normalised_and_sounds_and_times_are_not(
    size: tuple[int, int] | None, settings: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    on_host, on_device = batches(tmp_path, FakeVideoDecoder(size=size), **settings)
    for host, device in zip(on_host, on_device, strict=True):
        assert host.keys() == device.keys()
        assert isinstance(device["video"], torch.Tensor) is (size is not None)
        for before, after in zip(host["video"], device["video"], strict=True):
            assert after.dtype == expected(before).dtype
            assert torch.equal(after, expected(before))
        for name in ("video_pts_s", "video_frames", "video_row", "wav", "wav_length"):
            assert torch.equal(host[name], device[name])
            assert host[name].dtype == device[name].dtype
        if size is not None:
            assert device["video"].is_contiguous(memory_format=torch.channels_last)


def test_a_batch_without_videos_moves_too(tmp_path: Path) -> None:
    dataset = mm.open_dataset(write_corpus(tmp_path, [4], lambda number: {"txt": b"a text"}))
    decode = mm.Decode(video=FakeVideoDecoder(size=(4, 6)), audio=FakeAudioDecoder())
    pipeline = mm.Pipeline(dataset, global_batch_size=4, decode=decode)
    (batch,) = mm.to_device(mm.Loader(pipeline), "cpu", normalize=NORMALIZE)
    assert batch["video"].shape == (0, 3, 4, 6)
    assert batch["video"].dtype == torch.float32
    assert [len(batch[name]) for name in ("video_row", "audio", "audio_length")] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_frames", [0, 1, 5, 7])
def test_many_frames_are_normalised_in_groups_to_the_same_bits(
    num_frames: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not channels_last, so the CPU runs what a GPU runs.
    frames = torch.randint(0, 256, (num_frames, 3, 4, 6), dtype=torch.uint8)
    normalizer = Normalizer(NORMALIZE, dtype, torch.device("cpu"))
    expected = normalizer(frames)
    monkeypatch.setattr(normalize, "GROUP_NUMBERS", 2 * 3 * 4 * 6)
    assert torch.equal(normalizer(frames), expected)
    assert normalizer(frames).dtype == dtype
