"""Ways from JPEG bytes to 224x224 on one thread: ``python -m tools.bench.decode [--quick]``.

Every way decodes the same files, in interleaved rounds. The table has medians of images/s by CPU
time, so that a busy machine matters less. The last columns have the PSNR in dB against torchvision
on the image decoded at full size.

The files are mosaics of the demo's photographs, which have the detail of a small photograph at
every size. ``--images FOLDER`` measures other JPEGs. Only `ImageDecoder` rotates by EXIF, so the
PSNR of other ways is low where a file needs that.
"""

from __future__ import annotations

import argparse
import importlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image

import mmstream
from mmstream import ImageDecoder
from mmstream._torchvision import import_torchvision
from mmstream.decoding.image.reduced import decode_reduced

Pixels = NDArray[np.uint8]
Way = Callable[[bytes], Any]

SIZE = 224
SHAPES = {(500, 375): 24, (2000, 1500): 8, (4000, 3000): 4}
"""(width, height) of the files -> files per round."""
QUALITY = 80


def main() -> None:
    """Measure all ways on all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder of JPEGs, instead of mosaics")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two rounds, no 12 MP")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    if options.images:
        files = [path.read_bytes() for path in sorted(options.images.glob("*.jp*g"))[:32]]
        report(f"{options.images}, {len(files)} files", files, rounds)
        return
    for shape, count in SHAPES.items():
        if not options.quick or shape[0] < 4000:
            files = [mosaic(shape, number) for number in range(count)]
            report(f"{shape[0]}x{shape[1]}, {count} mosaics", files, rounds)


def mosaic(shape: tuple[int, int], seed: int) -> bytes:
    """Return a JPEG of this (width, height) with photographs side by side, not scaled."""
    folder = Path(mmstream.__file__).parent / "demo" / "corpus" / "images"
    photos = sorted(folder.glob("*.jpg"))
    order = np.random.default_rng(seed).permutation(len(photos))
    canvas = Image.new("RGB", shape)
    corners = [(x, y) for y in range(0, shape[1], 190) for x in range(0, shape[0], 190)]
    for number, corner in enumerate(corners):
        with Image.open(photos[order[number % len(order)]]) as photo:
            canvas.paste(photo, corner)
    file = io.BytesIO()
    canvas.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def report(title: str, files: Sequence[bytes], rounds: int) -> None:
    """Time every way on these files and print a table."""
    ways = all_ways()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            for data in files:
                way(data)
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    base = statistics.median(seconds[REFERENCE])
    kb = sum(map(len, files)) / len(files) / 1024
    print(f"\n{title} of {kb:,.0f} KiB -> {SIZE}, {rounds} rounds, one thread")
    print(f"{'':44} images/s    ratio   PSNR mean    worst")
    for name, way in ways.items():
        median = statistics.median(seconds[name])
        decibels = [psnr(way(data), resize_whole(ImageDecoder()(data))) for data in files]
        quality = f"{statistics.mean(decibels):9.1f} {min(decibels):8.1f}" if decibels[0] else ""
        print(f"{name:44} {len(files) / median:8.0f} {base / median:8.2f}   {quality}")


REFERENCE = "Pillow, torchvision Resize, float, normalise"


def all_ways() -> dict[str, Way]:
    """Return the ways by name, the usual one first. OpenCV's are there if it is installed."""
    import_torchvision()
    from torchvision.transforms import v2

    row = np.empty((SIZE, SIZE, 3), np.uint8)
    crop = [v2.Resize(SIZE, antialias=True), v2.CenterCrop(SIZE)]
    to_float = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    floats = v2.Compose([*crop, *to_float, v2.Normalize([0.5] * 3, [0.25] * 3)])
    bytes_only = v2.Compose(crop)
    scaled, exact = ImageDecoder(size=SIZE), ImageDecoder(size=SIZE, scaled_decoding=False)
    ways: dict[str, Way] = {
        REFERENCE: lambda data: floats(Image.open(io.BytesIO(data)).convert("RGB")),
        "Pillow, torchvision Resize, uint8": lambda data: np.asarray(
            bytes_only(Image.open(io.BytesIO(data)).convert("RGB"))
        ),
        "Pillow draft, reduced resize, uint8": pillow_draft,
        "libjpeg at 1/4, decode only": lambda data: at_a_quarter(data)[:0],
        "decode_reduced at 1/4, decode only": decode_only,
        "simplejpeg whole, decode only": lambda data: simplejpeg.decode_jpeg(data)[:0],
        "simplejpeg whole, ATen resize": lambda data: resize_whole(simplejpeg.decode_jpeg(data)),
        "ImageDecoder(size=224, scaled_decoding=False)": lambda data: exact(data, row),
        "ImageDecoder(size=224)": lambda data: scaled(data, row),
    }
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError:
        return ways
    cv2.setNumThreads(1)
    for name, flag in (("whole", 1), ("REDUCED_2", 17), ("REDUCED_4", 33), ("REDUCED_8", 65)):
        ways[f"OpenCV {name}, INTER_AREA"] = partial(opencv, cv2, flag)
    return ways


def at_a_quarter(data: bytes) -> Pixels:
    """Return an image that libjpeg decodes at a quarter of its size."""
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    small: Pixels = simplejpeg.decode_jpeg(
        data, "RGB", min_height=-(-height // 4), min_width=-(-width // 4)
    )
    return small


def decode_only(data: bytes) -> Pixels | None:
    """Decode at a quarter of the size by the compiled module; None: it does not take the file."""
    image = decode_reduced(data, 4)
    return None if image is None else image[:0]


def resize_whole(image: Pixels) -> Pixels:
    """Resize and crop the decoded image, bit for bit as torchvision's v2 does on a tensor."""
    height, width, _ = image.shape
    new = (SIZE, int(SIZE * width / height))
    if height > width:
        new = (int(SIZE * height / width), SIZE)
    view = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(view, new, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    return crop_centre(resized.numpy())


def pillow_draft(data: bytes) -> Pixels:
    """Return an image that Pillow decodes at a reduced size and resizes with its own filter."""
    image = Image.open(io.BytesIO(data))
    scale = SIZE / min(image.size)
    new = (int(image.width * scale), int(image.height * scale))
    image.draft("RGB", new)
    return crop_centre(np.asarray(image.resize(new, Image.Resampling.BILINEAR)))


def opencv(cv2: Any, flag: int, data: bytes) -> Pixels:
    """Return an image from OpenCV; an image that was decoded too small is enlarged."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    scale = SIZE / min(image.shape[:2])
    new = (max(SIZE, int(image.shape[1] * scale)), max(SIZE, int(image.shape[0] * scale)))
    resized = cv2.resize(image, new, interpolation=cv2.INTER_AREA)
    return crop_centre(cv2.cvtColor(resized, cv2.COLOR_BGR2RGB))


def crop_centre(image: Pixels) -> Pixels:
    """Return the central square, as torchvision does."""
    top, left = round((image.shape[0] - SIZE) / 2), round((image.shape[1] - SIZE) / 2)
    return np.ascontiguousarray(image[top : top + SIZE, left : left + SIZE])


def psnr(image: Any, expected: Pixels) -> float:
    """Return decibels: 99 for equal images, 0 if the way returns no uint8 image."""
    if getattr(image, "dtype", None) != np.uint8 or image.shape != expected.shape:
        return 0.0
    error = float(np.mean((image.astype(np.float64) - expected) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else 99.0


if __name__ == "__main__":
    main()
