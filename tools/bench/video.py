"""Ways from a video file to frames of 224x224: ``python -m tools.bench.video [FILE] --peers``.

Every way decodes the same file in interleaved rounds, on one thread. The table has medians of one
video: its processor time, so that a busy machine matters less, and the time that passes. Without a
file, it makes one of 60 s in 1280x720 with a key frame every 2 s.

Ways: `mm.VideoDecoder`; PyAV's own loop, which seeks to each frame; torchcodec's exact mode; the
loader of qwen-vl-utils. All resize by the same antialiased filter. ``--peers`` installs the last
two in an environment of their own. Without it they are measured where they are installed.

With ``device="cuda"`` there are two more: what the worker does, which is to copy packets to a clip;
and, with a GPU and torchcodec, that and the decoding of the clip by NVDEC.

A last table has the peak memory of each way, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torch.nn.functional as F

import mmstream as mm
from mmstream._torchvision import import_torchvision
from mmstream.decoding.video.encoded import EncodedVideos, encode_video
from mmstream.device.nvdec import ClipDecoder, torchcodec_frames
from mmstream.reading.step import BatchLineage
from tools.bench.peers.environments import run_again_in

SIDE = 224
Way = Callable[[Path, bytes, int], Any]


def main() -> None:
    """Measure all ways for some numbers of frames, then their memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--memory-of", help="decode in one way, and print the peak memory")
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--peers", action="store_true", help="measure the other libraries too")
    options = parser.parse_args()
    if options.peers:
        arguments = [argument for argument in sys.argv[1:] if argument != "--peers"]
        run_again_in("media", "tools.bench.video", arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or write_video(Path(folder, "video.mp4"))
        if options.memory_of:
            print(peak_mib(WAYS[options.memory_of], path, options.frames))
            return
        ways = {name: way for name, way in WAYS.items() if is_installed(name)}
        rounds = 2 if options.quick else options.rounds
        print(f"{path.name}: ms of processor time for one video; one thread, {rounds} rounds")
        for num_frames in (8, options.frames):
            report(ways, path, num_frames, rounds)
        print(f"\npeak memory for {options.frames} frames, in MiB over that before")
        for name in ways:
            command = [sys.executable, "-m", "tools.bench.video", str(path), "--memory-of", name]
            command += ["--frames", str(options.frames)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"  {name:<24}{result.stdout.splitlines()[-1]:>8}")


def report(ways: dict[str, Way], path: Path, num_frames: int, rounds: int) -> None:
    """Print a line for each way."""
    data = path.read_bytes()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first is for warming up
        for name, way in ways.items():
            start, passed = time.process_time(), time.perf_counter()
            frames = way(path, data, num_frames)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append((time.process_time() - start, time.perf_counter() - passed))
            assert len(frames) == num_frames, (name, len(frames))
    medians = {
        name: [statistics.median(column) for column in zip(*values[1:], strict=True)]
        for name, values in times.items()
    }
    print(f"\n{num_frames} frames")
    for name, (median, passed) in medians.items():
        share = median / medians["mmstream"][0]
        print(
            f"  {name:<24}{median * 1e3:>9.1f} ms{share:>8.2f} x mmstream's"
            f"{passed * 1e3:>9.1f} ms passed"
        )


def by_mmstream(_path: Path, data: bytes, num_frames: int) -> Any:
    """Decode by `mm.VideoDecoder`."""
    return mm.VideoDecoder(num_frames=num_frames, size=SIDE, resize="exact")(data)


def by_clip(_path: Path, data: bytes, num_frames: int) -> Any:
    """Copy the packets to a clip for the GPU, as a worker does."""
    decoder = mm.VideoDecoder(num_frames=num_frames, size=SIDE, resize="exact", device="cuda")
    limits = decoder.start_limits()
    return encode_video(data, "mp4", decoder, decoder.plan(data, limits=limits), limits)


def by_nvdec(path: Path, data: bytes, num_frames: int) -> Any:
    """Do what a worker does, and decode the clip on the GPU."""
    video = by_clip(path, data, num_frames)
    rows = [(0, 0)]
    batch = {
        "video": EncodedVideos.join([video], is_joined=True),
        "video_row": torch.tensor([0]),
        "__key__": ["a"],
        "__lineage__": BatchLineage(0, 0, 0, rows, [True], rows),
    }
    decoded = ClipDecoder(torch.device("cuda", 0), torchcodec_frames, None)(batch)
    assert decoded["__lineage__"].num_gpu_videos == 1, decoded["__lineage__"].cpu_videos
    return decoded["video"]


def by_pyav(_path: Path, data: bytes, num_frames: int) -> Any:
    """Seek to each frame of a known constant rate, and decode up to it."""
    frames = []
    opened: Any = av.open(io.BytesIO(data))
    with opened as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        step = 1 / (stream.average_rate * stream.time_base)
        last = None
        for number in np.linspace(0, stream.frames - 1, num_frames).round().astype(int):
            wanted = int(stream.start_time + number * step)
            if last is None or wanted - last > 2 / stream.time_base:
                container.seek(wanted, stream=stream)
            for frame in container.decode(stream):
                if frame.pts >= wanted:
                    last = frame.pts
                    break
            frames.append(resized(torch.from_numpy(frame.to_ndarray(format="rgb24"))))
    return torch.stack(frames)


def by_torchcodec(_path: Path, data: bytes, num_frames: int) -> Any:
    """Decode by torchcodec's exact mode."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(data, dimension_order="NHWC", num_ffmpeg_threads=1)
    numbers = np.linspace(0, len(decoder) - 1, num_frames).round().astype(int).tolist()
    return torch.stack([resized(frame) for frame in decoder.get_frames_at(numbers).data])


def by_qwen(path: Path, _data: bytes, num_frames: int) -> Any:
    """Decode by qwen-vl-utils, as its users do."""
    import_torchvision()
    from qwen_vl_utils import process_vision_info

    video = {
        "type": "video",
        "video": str(path),
        "nframes": num_frames,
        "resized_height": SIDE,
        "resized_width": SIDE,
    }
    _, videos = process_vision_info([{"role": "user", "content": [video]}])
    return videos[0]


def resized(pixels: torch.Tensor) -> torch.Tensor:
    """Resize a frame [H, W, 3] by the filter of mmstream."""
    return F.interpolate(
        pixels.permute(2, 0, 1)[None], (SIDE, SIDE), mode="bilinear", antialias=True
    )[0]


WAYS: dict[str, Way] = {
    "mmstream": by_mmstream,
    "mmstream, clip alone": by_clip,
    "mmstream, NVDEC": by_nvdec,
    "PyAV, own loop": by_pyav,
    "torchcodec, exact": by_torchcodec,
    "qwen-vl-utils": by_qwen,
}


def is_installed(name: str) -> bool:
    """Tell whether the library of a way is there."""
    modules = {
        "mmstream, NVDEC": "torchcodec",
        "torchcodec, exact": "torchcodec",
        "qwen-vl-utils": "qwen_vl_utils",
    }
    if name == "mmstream, NVDEC" and not torch.cuda.is_available():
        return False
    return name not in modules or importlib.util.find_spec(modules[name]) is not None


def peak_mib(way: Way, path: Path, num_frames: int) -> int:
    """Return how much memory one video takes at its peak, over that of a small one."""
    data = path.read_bytes()
    way(path, data, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_kib("VmRSS")
    way(path, data, num_frames)
    return (memory_kib("VmHWM") - before) // 1024


def memory_kib(name: str) -> int:
    """Return a number of this process's memory, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def write_video(path: Path) -> Path:
    """Write a video of 60 s that moves, and return its path."""
    noise = np.random.default_rng(0).integers(0, 255, (96, 160, 3), np.uint8)
    large = np.kron(noise, np.ones((10, 10, 1), np.uint8))
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=30, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        stream.codec_context.gop_size = 60
        for number in range(1800):
            row, column = number % 200, number * 2 % 300
            pixels = np.ascontiguousarray(large[row : row + 720, column : column + 1280])
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    return path


if __name__ == "__main__":
    main()
