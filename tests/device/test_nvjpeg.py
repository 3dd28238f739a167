"""Pictures decoded on the device: the same rows, crops and flips as on the CPU, nearly its pixels.

Without a GPU libjpeg stands in for nvJPEG: like it, it looks at no EXIF, and takes what it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmstream as mm
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.image.encoded import EncodedImage
from mmstream.decoding.image.gpu_eligible import plain_jpeg
from mmstream.decoding.sample import decode_sample
from mmstream.device import nvjpeg as ondevice
from mmstream.device.nvjpeg import DeviceDecoder
from mmstream.display import batch_html
from mmstream.loader.batch_transport import SentBatch
from mmstream.types import SampleLineage
from tests.helpers.corpora import write_corpus
from tests.helpers.device_images import (
    batches,
    devices,
    libjpeg,
    make_pipeline,
    on_cpu,
    on_device,
    photograph,
    rows_of,
)
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import JPEG, PNG, encoded, photo, psnr, read


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("photographs"), [25, 23], photograph)


@devices
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_cpu_and_pixels_nearly(
    photographs: str, num_workers: int, device: str
) -> None:
    settings = {"crop": "random", "flip": 0.5, "seed": 3}
    expected = batches(make_pipeline(photographs, "cpu", **settings))
    on_gpu = batches(make_pipeline(photographs, **settings), device, num_workers=num_workers)
    assert len(on_gpu) == len(expected) == 6
    near = []
    for one, other in zip(on_gpu, expected):
        assert one.keys() == other.keys()
        assert one["__key__"] == other["__key__"]
        assert rows_of(one) == rows_of(other)
        image = one["image"]
        assert (image.shape, image.dtype) == (other["image"].shape, torch.uint8)
        assert image.device.type == device
        assert image.is_contiguous(memory_format=torch.channels_last)
        near += [psnr(a.cpu(), b) for a, b in zip(image, other["image"])]
    # nvJPEG enlarges the colours of 4:2:0 without interpolation
    assert min(near) >= (50 if device == "cpu" else 30)
    assert np.mean(near) >= (50 if device == "cpu" else 38)


@devices
@pytest.mark.parametrize(
    "settings",
    [
        {"size": 224, "resize_size": 256},
        {"size": 96, "interpolation": "bicubic"},
        {"size": (120, 200), "resize": "exact"},
        {"size": 224, "resize": "letterbox", "fill": (200, 100, 0), "flip": 1.0},
        {"size": 100, "crop": None},
        {"resize": "max_pixels", "pixel_budget": (56 * 56, 300 * 300)},
        {"resize": "native"},
        {"size": 224, "crop": "random", "flip": 0.5},
        {"size": (224, 700), "crop": "random"},
    ],
)
def test_every_geometry_is_that_of_the_cpu(settings: dict[str, Any], device: str) -> None:
    for number, path in enumerate(PHOTOS[:6]):
        data = path.read_bytes()
        one = on_device(data, rng=np.random.default_rng(number), device=device, **settings)
        other = on_cpu(data, rng=np.random.default_rng(number), **settings)
        assert one.shape == other.shape
        assert psnr(one, other) >= (50 if device == "cpu" else 30)


@devices
@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
def test_orientation_is_applied_before_the_crop(orientation: int, device: str) -> None:
    data = read(f"hopper_orientation_{orientation}.jpg")
    settings = {"size": (50, 90), "crop": "random", "flip": 0.5}
    one = on_device(data, rng=np.random.default_rng(1), device=device, **settings)
    other = on_cpu(data, rng=np.random.default_rng(1), **settings)
    assert psnr(one, other) >= (45 if device == "cpu" else 33)


@devices
@pytest.mark.parametrize(
    "data",
    [
        encoded(photo(), "jpeg", quality=85, progressive=True),
        encoded(photo().convert("L"), "jpeg", quality=85),
        *(encoded(photo(), "jpeg", subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0")),
        encoded(photo(), "jpeg", restart_marker_blocks=2),
        encoded(photo(), "jpeg", optimize=True, comment=b"\xff\xd9"),
    ],
    ids=["progressive", "grey", "444", "422", "420", "restarts", "comment"],
)
def test_kinds_that_are_left_to_the_device(data: bytes, device: str) -> None:
    near = psnr(on_device(data, size=40, device=device), on_cpu(data, size=40))
    assert near >= (45 if device == "cpu" else 25)


@pytest.mark.parametrize(
    "data",
    [
        PNG,
        b"",
        b"\xff\xd8",
        JPEG[:-2],
        JPEG[: len(JPEG) // 2],
        JPEG + b"\0",
        JPEG[: len(JPEG) // 2] + bytes(40) + JPEG[len(JPEG) // 2 + 40 :],
        JPEG[:-6] + bytes(4) + JPEG[-2:],
        JPEG[: len(JPEG) // 2] + b"\xff\xd9" + JPEG[len(JPEG) // 2 + 2 :],
        JPEG[: len(JPEG) // 2] + b"\xff\xc4" + JPEG[len(JPEG) // 2 + 2 :],
        read("pil_sample_cmyk.jpg"),
        read("junk_jpeg_header.jpg"),
        read("jpeg_ff00_header.jpg"),
        read("truncated_jpeg.jpg"),
        encoded(photo(), "jpeg", keep_rgb=True),
        JPEG.replace(b"JFIF\0\1", b"JFIF\0\2"),
        JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        JPEG.replace(b"\xff\xc0", b"\xff\xc9"),
        JPEG.replace(b"\x01\x22\x00", b"\x01\x44\x00"),
    ],
    ids=[
        "png", "empty", "start", "no end", "half", "a byte behind", "hole",
        "zeroed tail", "end inside", "marker inside", "cmyk", "junk", "ff00", "truncated", "rgb",
        "jfif 2", "12 bits", "arithmetic", "sampling",
    ],
)  # fmt: skip
def test_everything_odd_stays_with_the_cpu(data: bytes) -> None:
    assert plain_jpeg(JPEG, 10**8) is not None
    assert data != JPEG
    assert plain_jpeg(data, 10**8) is None


def test_a_picture_that_shrinks_too_much_for_cuda_is_decoded_here_with_the_same_draws() -> None:
    decoder = mm.ImageDecoder(size=8, crop="random", flip=0.5, device="cuda")
    cpu_decoder = mm.ImageDecoder(size=8, crop="random", flip=0.5)
    data = encoded(photo(420, 600), "jpeg")
    kinds = set()
    for number in range(12):
        sample = {"__key__": "a", "jpg": data, "__lineage__": SampleLineage(0, number)}
        on_gpu = decode_sample(sample, mm.Decode(image=decoder))["image"]
        expected = decode_sample(sample, mm.Decode(image=cpu_decoder))["image"]
        kinds.add(type(on_gpu))
        pixels = on_gpu.decode() if isinstance(on_gpu, EncodedImage) else on_gpu
        assert torch.equal(pixels, expected)
    assert kinds == {EncodedImage, torch.Tensor}


def test_large_pictures_are_decoded_a_few_at_a_time(
    photographs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def counting(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        sizes.append(len(files))
        return libjpeg(files, device)

    whole = batches(make_pipeline(photographs))
    monkeypatch.setattr(ondevice, "GROUP_PIXELS", 2**18)
    parts = batches(make_pipeline(photographs), decode_jpegs=counting)
    assert 1 <= max(sizes) < 8
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(whole, parts))


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_gives_the_tail(photographs: str, stop: int) -> None:
    pipeline = make_pipeline(photographs, crop="random", flip=0.5)
    whole = batches(pipeline)
    loader = mm.Loader(pipeline, world=mm.World(0, 1))
    running = iter(mm.to_device(loader, "cpu", decode_jpegs=libjpeg))
    for _ in range(stop):
        next(running)
    state = loader.state_dict()
    again = mm.Loader(pipeline, world=mm.World(0, 1))
    again.load_state_dict(state)
    tail = list(mm.to_device(again, "cpu", decode_jpegs=libjpeg))
    assert len(tail) == len(whole) - stop
    for one, other in zip(tail, whole[stop:]):
        assert one["__key__"] == other["__key__"]
        assert torch.equal(one["image"], other["image"])


def test_normalisation_comes_after_decoding(photographs: str) -> None:
    pipeline, normalize = make_pipeline(photographs), mm.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    plain = batches(pipeline)[0]["image"]
    on_gpu = batches(pipeline, normalize=normalize, dtype=torch.bfloat16)[0]["image"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (normalize.mean, normalize.std))
    assert torch.equal(on_gpu, ((plain.float() / 255 - mean) / std).to(torch.bfloat16))


@pytest.mark.parametrize("size", [32, None])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_several_pictures_a_sample(tmp_path: Path, size: int | None, num_workers: int) -> None:
    def fields(number: int) -> dict[str, bytes]:
        on_gpu = {f"{i}.jpg": PHOTOS[number + i].read_bytes() for i in range(number % 3)}
        return {"txt": b"words", **on_gpu, "9.png": PNG}

    url = write_corpus(tmp_path, [8], fields)
    expected = batches(make_pipeline(url, "cpu", 4, size=size))
    on_gpu = batches(make_pipeline(url, "cuda", 4, size=size), num_workers=num_workers)
    for one, other in zip(on_gpu, expected):
        assert one["image_row"].tolist() == other["image_row"].tolist()
        assert type(one["image"]) is type(other["image"])
        assert [a.shape for a in one["image"]] == [b.shape for b in other["image"]]
        assert min(map(psnr, one["image"], other["image"])) >= 50


def test_a_gpu_that_is_not_there_is_said_when_it_is_needed(photographs: str) -> None:
    pipeline = make_pipeline(photographs)
    with pytest.raises(mm.ConfigError, match=r'to_device\(loader, "cuda"\), not "cpu"'):
        batches(pipeline, decode_jpegs=None)
    if not torch.cuda.is_available():
        with pytest.raises(mm.ConfigError, match="no CUDA device"):
            batches(pipeline, "cuda")


def test_without_a_gpu_samples_can_be_looked_at(photographs: str) -> None:
    seen = make_pipeline(photographs, shuffle=False).take(6)
    expected = make_pipeline(photographs, "cpu", shuffle=False).take(6)
    assert repr(seen[0]["image"]).endswith("for mmstream.to_device>")
    assert isinstance(seen[5]["image"], torch.Tensor)  # the PNG
    for one, other in zip(seen[:5], expected):
        assert torch.equal(one["image"].decode(), other["image"])
    (batch, *_) = mm.Loader(make_pipeline(photographs, shuffle=False), world=mm.World(0, 1))
    assert repr(batch["image"]) == "<7 JPEGs and 1 pictures for mmstream.to_device>"
    assert batch_html(batch).count("<img") == 8


def test_a_batch_still_encoded_is_cut_by_rows(photographs: str) -> None:
    batch = next(iter(mm.Loader(make_pipeline(photographs), world=mm.World(0, 1))))
    first, second = mm.split_rows(batch, 2)
    decode = DeviceDecoder(torch.device("cpu"), libjpeg, str)
    parts = torch.cat([decode(first)["image"], decode(second)["image"]])
    assert torch.equal(parts, decode(batch)["image"])


def test_files_cross_processes_in_one_piece(photographs: str) -> None:
    batch = next(iter(mm.Loader(make_pipeline(photographs), world=mm.World(0, 1))))
    _, (_, pickled, locations, (_, blocks, _)) = SentBatch(
        batch, BatchMemory(shared=True), receiver=0
    ).__reduce__()
    assert len(blocks) == 1
    assert len(locations) == 2  # the files together, and the validity
    assert len(pickled) < 20_000


def test_tiles_are_not_cut_on_the_device() -> None:
    with pytest.raises(mm.ConfigError, match='device="cpu"'):
        mm.ImageDecoder(size=336, tiles=mm.LlavaNextTiles(), device="cuda")
    with pytest.raises(mm.ConfigError, match="device='mps': give one of"):
        mm.ImageDecoder(device="mps")  # type: ignore[arg-type]
