"""Pictures on their way to a device, for the tests: what stands in for nvJPEG, and corpora."""

from __future__ import annotations

from typing import Any

import pytest
import simplejpeg
import torch

import mmstream as mm
from mmstream.decoding.image.encoded import EncodedImage, EncodedImages
from mmstream.decoding.image.gpu_eligible import plain_jpeg
from mmstream.device.nvjpeg import DecodeJpegs, DeviceDecoder, nvjpeg
from tests.helpers.corpora import captioned
from tests.helpers.paths import PHOTOS
from tests.helpers.pictures import JPEG, PNG, read

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)


def libjpeg(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Decode as nvJPEG does: leniently, as stored; an error is one of the whole batch."""
    try:
        images = [simplejpeg.decode_jpeg(f.numpy().tobytes(), "RGB", strict=False) for f in files]
    except ValueError as error:
        raise RuntimeError(f"Error while decoding JPEG images: {error}") from error
    return [torch.from_numpy(pixels).permute(2, 0, 1).contiguous() for pixels in images]


def strict(files: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Refuse what libjpeg warns of."""
    try:
        for file in files:
            simplejpeg.decode_jpeg(file.numpy().tobytes(), "RGB")
    except ValueError as error:
        raise RuntimeError(f"Error while decoding JPEG images: {error}") from error
    return libjpeg(files, device)


def on_device(
    data: bytes,
    decode: DecodeJpegs = libjpeg,
    rng: Any = None,
    device: str = "cpu",
    **settings: Any,
) -> torch.Tensor:
    """Decode one picture that must be left to the device: on CUDA by nvJPEG."""
    decoder = mm.ImageDecoder(device="cuda", **settings)
    plan = decoder.plan(data, rng)
    assert plan is not None
    images = EncodedImages.join([EncodedImage(data, plan, "jpg", decoder)])
    decode = nvjpeg if device == "cuda" else decode
    there = torch.device(device, 0) if device == "cuda" else torch.device(device)
    image: torch.Tensor = DeviceDecoder(there, decode, str)({"image": images})["image"][0]
    return image.cpu()


def on_cpu(data: bytes, rng: Any = None, **settings: Any) -> torch.Tensor:
    return torch.from_numpy(
        mm.ImageDecoder(scaled_decoding=False, **settings)(data, rng=rng)
    ).permute(2, 0, 1)


def broken_inside() -> bytes:
    """A JPEG that looks whole from outside, and that libjpeg warns of."""
    for position in range(len(JPEG) // 2, len(JPEG) - 8):
        data = JPEG[:position] + bytes((JPEG[position] ^ 0x55,)) + JPEG[position + 1 :]
        if plain_jpeg(data, 10**8) is not None:
            try:
                simplejpeg.decode_jpeg(data, "RGB")
            except ValueError:
                return data
    raise AssertionError("no such byte")


def photograph(number: int) -> dict[str, bytes]:
    """A sample of the corpus; some are no JPEGs, and some are no plain ones."""
    data = PHOTOS[number % len(PHOTOS)].read_bytes()
    odd = {5: PNG, 11: read("pil_sample_cmyk.jpg"), 17: read("hopper_orientation_6.jpg")}
    return captioned(number) | {"jpg": odd.get(number, data)}


def make_pipeline(url: str, device: str = "cuda", rows: int = 8, **settings: Any) -> mm.Pipeline:
    names = ("shuffle", "drop_last", "bad_samples", "transforms", "seed")
    given = {name: settings.pop(name) for name in names if name in settings}
    image = {"size": 224, "scaled_decoding": False, **settings}
    given.setdefault("bad_samples", mm.BadSamplePolicy(quarantine=None))
    return mm.Pipeline(
        mm.open_dataset(url),
        global_batch_size=rows,
        decode=mm.Decode(image=mm.ImageDecoder(device=device, **image)),
        **given,
    )


def batches(pipeline: mm.Pipeline, device: str = "cpu", **settings: Any) -> list[dict[str, Any]]:
    num_workers = settings.pop("num_workers", 0)
    if device == "cpu":
        settings.setdefault("decode_jpegs", libjpeg)
    loader = mm.Loader(pipeline, num_workers=num_workers, world=mm.World(0, 1))
    try:
        return list(mm.to_device(loader, device, **settings))
    finally:
        loader.close()


def rows_of(batch: dict[str, Any]) -> tuple[Any, ...]:
    lineage = batch["__lineage__"]
    return lineage.planned, lineage.shown, lineage.bad, batch["__valid__"].tolist()
