"""Smaller images beside img2dataset: ``python -m tools.bench.convert.resize``.

    python -m tools.bench.convert.resize --peers-python ~/peers/bin/python --images photos/

Both make the same JPEGs smaller, to the same longer side and quality, one image at a time. They run
in interleaved rounds, and the table has medians: images a second and core, by CPU time. The quality
is the PSNR to a reference: the whole image, resized with a Lanczos filter in floats.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

SCRIPT = Path(__file__).with_name("resize_systems.py")
SYSTEMS = ("mmstream", "img2dataset")


def main() -> None:
    """Let both systems resize the images, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEGs")
    parser.add_argument("--enlarge", type=int, default=1, help="make them so many times larger")
    parser.add_argument("--num-images", type=int, default=100)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 384, 512])
    parser.add_argument("--quality", type=int, default=95)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", required=True, help="a Python that has img2dataset")
    options = parser.parse_args()
    pythons = {"mmstream": sys.executable, "img2dataset": options.peers_python}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = folder / "images"
        images.mkdir()
        for path in sorted(options.images.glob("*.jpg"))[: options.num_images]:
            copy(path, images / path.name, options.enlarge)
        print(f"{len(list(images.iterdir()))} images, load {os.getloadavg()[0]:.1f}\n")
        print("| longer side | system | images/s a core | PSNR, dB | bytes an image |")
        print("|---|---|---|---|---|")
        for side in options.sides:
            rates: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            for number in range(options.rounds):
                for system in SYSTEMS[:: 1 if number % 2 else -1]:
                    settings = [system, images, side, options.quality, folder / system]
                    rates[system].append(rate(pythons[system], settings))
            for system in SYSTEMS:
                results = sorted((folder / system).glob("*.jpg"))
                quality = statistics.mean(psnr(images / path.name, path) for path in results)
                num_bytes = statistics.mean(path.stat().st_size for path in results)
                print(
                    f"| {side} | {system} | {statistics.median(rates[system]):.0f} "
                    f"| {quality:.1f} | {num_bytes:,.0f} |"
                )


def copy(path: Path, target: Path, enlarge: int) -> None:
    """Copy a photograph, or make a larger one of it."""
    if enlarge == 1:
        shutil.copyfile(path, target)
        return
    with Image.open(path) as image:
        size = (image.width * enlarge, image.height * enlarge)
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(target, quality=92)


def rate(python: str, settings: list[object]) -> float:
    """Return the images that a system resizes in a second of CPU time."""
    words = [python, str(SCRIPT), *map(str, settings)]
    process = subprocess.run(words, check=True, capture_output=True)
    report = json.loads(process.stdout.splitlines()[-1])
    return float(report["num_images"] / report["seconds"])


def psnr(original: Path, resized: Path) -> float:
    """Return the peak signal-to-noise ratio of a resized image to the reference, in dB."""
    with Image.open(resized) as image:
        pixels = np.asarray(image.convert("RGB"), np.float64)
    error = float(((pixels - reference(original, pixels.shape[:2])) ** 2).mean())
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def reference(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return an image, resized to (height, width) with a Lanczos filter in floats."""
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        channels = [
            np.asarray(channel.convert("F").resize((shape[1], shape[0]), Image.Resampling.LANCZOS))
            for channel in image.convert("RGB").split()
        ]
    pixels: npt.NDArray[np.float64] = np.stack(channels, 2).astype(np.float64)
    return pixels.clip(0, 255)


if __name__ == "__main__":
    main()
