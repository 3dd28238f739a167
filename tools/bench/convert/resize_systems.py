"""Images made smaller by one system, in a process: ``python resize_systems.py SYSTEM IMAGES ...``.

It runs with the Python that has the system installed. The images are in memory before the time is
taken, and each is resized twice: the second pass counts.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """Resize: SYSTEM IMAGES SIDE QUALITY OUT. Print the CPU seconds of one pass as JSON."""
    system, images, side, quality, out = sys.argv[1:6]
    resize = {"mmstream": mmstream, "img2dataset": img2dataset}[system](int(side), int(quality))
    files = {path.stem: path.read_bytes() for path in sorted(Path(images).glob("*.jpg"))}
    results = {name: resize(data) for name, data in files.items()}
    started = time.process_time()
    for data in files.values():
        resize(data)
    seconds = time.process_time() - started
    Path(out).mkdir(exist_ok=True)
    for name, data in results.items():
        Path(out, f"{name}.jpg").write_bytes(data)
    print(json.dumps({"seconds": seconds, "num_images": len(files)}))


def mmstream(side: int, quality: int) -> Callable[[bytes], bytes]:
    """What a conversion does with an image, its checks included."""
    from mmstream.converting.media.check import checked
    from mmstream.converting.media.options import MediaOptions

    options = MediaOptions(max_image_side=side, image_quality=quality)
    return lambda data: checked("image", data, options).data


def img2dataset(side: int, quality: int) -> Callable[[bytes], bytes]:
    """The resizer of img2dataset, with its default filter."""
    from img2dataset.resizer import Resizer

    resizer = Resizer(side, "keep_ratio_largest", True, encode_quality=quality)
    return lambda data: resizer(io.BytesIO(data))[0]


if __name__ == "__main__":
    main()
