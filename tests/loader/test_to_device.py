"""The device stage: one batch ahead, never counted before it is handed over."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import mmstream as mm
from mmstream.loader import device as device_module
from mmstream.loader.device import Normalizer
from tests.helpers.corpora import write_corpus
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.fake_media import FakeAudioDecoder, FakeVideoDecoder, fake_file

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
NORMALIZE = mm.Normalize(MEAN, STD)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)


def reference(image: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (image.float() / 255 - mean) / std


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


@devices
def test_the_state_counts_what_was_handed_over_not_what_was_fetched_ahead(device: str) -> None:
    loader = FakeLoader(num_steps=4)
    stage = mm.to_device(loader, device)
    batches = iter(stage)
    assert stage.state_dict() == {"epoch": 0, "step": 0}
    for step in (1, 2):
        next(batches)
        assert loader.asked == step + 1
        assert stage.state_dict() == {"epoch": 0, "step": step}
    assert stage.stats.num_samples == 8


@devices
def test_an_epoch_ends_in_the_next_epochs_first_step(device: str) -> None:
    stage = mm.to_device(FakeLoader(num_steps=3), device)
    assert len(stage) == 3
    for epoch in (0, 1):
        assert [key[0] for key in keys(stage)] == [str(epoch)] * 12
        assert stage.state_dict() == {"epoch": epoch + 1, "step": 0}


@devices
def test_after_a_break_the_batch_fetched_ahead_comes_again(device: str) -> None:
    loader = FakeLoader(num_steps=4)
    stage = mm.to_device(loader, device)
    seen = []
    for batch in stage:
        seen += batch["__key__"]
        if len(seen) == 8:
            break
    gc.collect()
    assert loader.closed == 1
    assert stage.state_dict() == {"epoch": 0, "step": 2}
    assert seen + keys(stage) == keys(FakeLoader(num_steps=4).iter_undelivered())


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"fail_at": 2}, OSError, "worker died at step 2"),
        ({"limit_at": 2}, RuntimeError, "too many bad samples"),
    ],
    ids=["met ahead", "a limit"],
)
def test_an_error_is_raised_after_the_batch_before_it(
    fault: dict[str, int], error: type[Exception], message: str
) -> None:
    """A batch that breaks the limit of bad samples is not handed over."""
    stage = mm.to_device(FakeLoader(num_steps=4, **fault), "cpu")
    batches = iter(stage)
    next(batches)
    assert next(batches)["__key__"][0] == "0-1-0"
    with pytest.raises(error, match=message):
        next(batches)
    assert stage.state_dict() == {"epoch": 0, "step": 2}


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "is_planar"),
    [
        ((9, 3, 130, 151), False),
        ((9, 3, 130, 151), True),
        ((2, 3, 1, 1), False),
        ((0, 3, 4, 4), True),
        ((3, 40, 31), False),
        ((3, 40, 31), True),
    ],
)
def test_every_size_and_layout_is_normalised_to_the_formulas_bits(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], is_planar: bool
) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    if not is_planar:
        image = image.movedim(-3, -1).contiguous().movedim(-1, -3)
    scale = Normalizer(NORMALIZE, dtype, torch.device(device))
    normalised = scale(image.to(device))
    assert normalised.dtype == dtype
    assert 1 in shape or normalised.stride() == image.stride()
    assert torch.equal(normalised.cpu(), reference(image).to(dtype))


@devices
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"normalize": NORMALIZE}, reference),
        (
            {"normalize": NORMALIZE, "dtype": torch.bfloat16},
            lambda image: reference(image).to(torch.bfloat16),  # rounded once
        ),
        ({"normalize": mm.Normalize(0.5, 0.2)}, lambda image: (image.float() / 255 - 0.5) / 0.2),
        ({"dtype": torch.float32}, lambda image: image.float() / 255),
        ({}, lambda image: image),
    ],
    ids=["mean and std", "bfloat16", "one number for all channels", "dtype alone", "nothing"],
)
def test_pictures_are_normalised_as_the_settings_say(
    device: str, settings: dict[str, Any], expected: Any
) -> None:
    loader = FakeLoader()
    host = loader.batch(0, 0)
    moved = next(iter(mm.to_device(loader, device, **settings)))
    image = moved["image"]
    assert image.dtype == expected(host["image"]).dtype
    assert torch.equal(image.cpu(), expected(host["image"]))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.device.type == device
    assert torch.equal(moved["labels"].cpu(), host["labels"])


def test_every_byte_of_one_channel_or_three_is_normalised_alike() -> None:
    image = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    single = Normalizer(mm.Normalize((0.5,), (0.2,)), torch.float32, torch.device("cpu"))
    expected = (image.float() / 255 - 0.5) / torch.tensor(0.2)
    assert torch.equal(single(image), expected)
    assert torch.equal(single(image.expand(1, 3, 16, 16)), expected.expand(1, 3, 16, 16))
    with pytest.raises(mm.ConfigError, match="2 means for images of 3 channels"):
        Normalizer(mm.Normalize((0.5, 0.5), (1, 1)), torch.float32, torch.device("cpu"))(
            image.expand(1, 3, 16, 16)
        )


@devices
def test_nested_tensors_and_validity_move_and_names_stay(device: str) -> None:
    class Ragged(FakeLoader):
        def batch(self, epoch: int, step: int) -> dict[str, Any]:
            batch = super().batch(epoch, step)
            batch["image"] = [self.image(1), self.image(2)[:, :8]]
            batch["extra"] = {"a": (torch.arange(3), "text"), "b": [torch.ones(2)], "c": b"raw"}
            batch["__draws__"] = torch.ones(2)
            return batch

    loader = Ragged()
    host = loader.batch(0, 0)
    moved = next(iter(mm.to_device(loader, device, normalize=NORMALIZE)))
    assert [tuple(image.shape) for image in moved["image"]] == [(3, 32, 32), (3, 8, 32)]
    assert torch.equal(moved["image"][1].cpu(), reference(loader.image(2)[:, :8]))
    extra = moved["extra"]
    there = (extra["a"][0], extra["b"][0], moved["__valid__"])
    assert {tensor.device.type for tensor in there} == {device}
    assert (extra["a"][1], extra["c"]) == ("text", b"raw")
    assert moved["__draws__"].device.type == "cpu"
    for name in ("__lineage__", "__key__"):
        assert moved[name] == host[name]


def test_images_that_are_floating_already_are_not_normalised_twice() -> None:
    class Floating(FakeLoader):
        def batch(self, epoch: int, step: int) -> dict[str, Any]:
            batch = super().batch(epoch, step)
            return {**batch, "image": batch["image"].double()}

    with pytest.raises(mm.ConfigError, match=r"these are torch\.float64"):
        next(iter(mm.to_device(Floating(), "cpu", normalize=NORMALIZE)))
    moved = next(iter(mm.to_device(Floating(), "cpu", dtype=torch.float32)))
    assert torch.equal(moved["image"], FakeLoader().batch(0, 0)["image"].float())


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), (0.5, 0.5), "one mean and one std"),
        ((0.5,), (0.0,), "std must be above 0"),
        *(
            (mean, std, "not on the scale 0 to 1: divide mean and std by 255")
            for mean, std in (
                ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),  # of Caffe
                ((0, 0, 0), (255, 255, 255)),
                ((0.5,), (float("nan"),)),
            )
        ),
        *(
            (mean, (0.5,), "Normalize: mean=.*: give a number, or one per channel")
            for mean in (True, (True,), "0.5", ("0.5",), None, ([0.5],))
        ),
    ],
)
def test_a_mean_and_a_std_that_cannot_be_meant_are_refused(
    mean: Any, std: Any, message: str
) -> None:
    with pytest.raises(mm.ConfigError, match=message):
        mm.Normalize(mean, std)


@pytest.mark.cuda
@needs_cuda
def test_memory_of_a_batch_is_not_reused_while_it_is_still_read() -> None:
    loader = FakeLoader(num_steps=20, num_rows=64, size=224)
    sums = []
    for batch in mm.to_device(loader, "cuda", normalize=NORMALIZE):
        torch.cuda._sleep(20_000_000)  # the consumer's stream lags; the batch is dropped at once
        sums.append(batch["image"].sum(dtype=torch.float64))
    images = [FakeLoader(num_rows=64, size=224).batch(0, step)["image"] for step in range(20)]
    expected = [reference(image).sum(dtype=torch.float64).item() for image in images]
    assert [value.item() for value in sums] == pytest.approx(expected, rel=1e-9)


# -- videos and recordings: frames as pictures, the rest as it is ---------------------------------


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


@pytest.mark.parametrize("size", [(4, 6), None])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda frames: frames),
        ({"normalize": NORMALIZE}, reference),
        ({"normalize": NORMALIZE, "dtype": torch.bfloat16}, lambda f: reference(f).bfloat16()),
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
    frames = torch.randint(0, 256, (num_frames, 3, 4, 6), dtype=torch.uint8)
    normalizer = Normalizer(NORMALIZE, dtype, torch.device("cpu"))
    expected = normalizer(frames)
    monkeypatch.setattr(device_module, "GROUP_NUMBERS", 2 * 3 * 4 * 6)
    assert torch.equal(normalizer(frames), expected)
    assert normalizer(frames).dtype == dtype


# -- workers whose batches are pinned, as with a GPU: torch then adds a thread ---------------------


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let torch pin batches without a GPU. Gives the tensors that were pinned."""
    tensors: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.clone())
        return tensors[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tensors


def make_loader(url: str, num_workers: int) -> mm.Loader:
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    pipeline = mm.Pipeline(mm.open_dataset(url), global_batch_size=4, seed=1, decode=decode)
    return mm.Loader(pipeline, num_workers=num_workers, world=mm.World(0, 1))


def contents(batches: Any) -> list[Any]:
    return [(batch["__key__"], batch["image"].tolist()) for batch in batches]


@pytest.mark.slow
def test_pinned_batches_are_the_same_and_go_on_after_a_break(
    corpus: str, pinned: list[torch.Tensor]
) -> None:
    expected = contents(make_loader(corpus, 0))
    with closing(make_loader(corpus, 1)) as loader:
        first = next(iter(loader))
        assert any(first["image"] is tensor for tensor in pinned)
        loader.load_state_dict(loader.state_dict())
        assert contents([first]) + contents(loader) == expected
        assert loader.state_dict()["epoch"] == 1
