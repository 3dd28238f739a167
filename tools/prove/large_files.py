"""Read eight frames of a minute of a video of gigabytes from S3, and count the bytes.

    python -m tools.prove.large_files                     # 2 GB, takes two minutes and 6 GB of disk
    python -m tools.prove.large_files --gigabytes 0.2

It makes a video with sound, with a group of pictures every two seconds, and its index (`moov`)
first or last. A tar on a SeaweedFS server of its own holds it, with a row that names a minute of
it. A `Pipeline` with `VideoDecoder(num_frames=8)` takes the sample, in this process and through a
reader process. The bytes that are read are compared with those that must be: the index, and from
the key before each frame to that frame. The exit code is 1 if more than 1.2 times as much is read,
or if the frames are not those of the whole file.
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

import mmstream as mm
from mmstream.dataset.checksums import checksums_name, encode_checksums
from mmstream.dataset.index import encode_index, index_name
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest, ShardInfo
from mmstream.decoding.video.frames import runs
from mmstream.storage import open_store
from mmstream.tar.writer import TarWriter
from tools.s3_server import s3_server

__all__ = ["make_video", "needed_bytes"]

MAX_RATIO = 1.2
FPS, GOP_FRAMES = 30, 60
WIDTH, HEIGHT = 640, 360
SAMPLE_RATE, AUDIO_FRAME = 16_000, 1024
CLIP_S = 60.0
NUM_FRAMES = 8


def encoded_group() -> tuple[Any, list[Any]]:
    """Return a container with two seconds of noise, and its packets."""
    file = io.BytesIO()
    options = {"preset": "ultrafast", "crf": "30", "g": str(GOP_FRAMES), "bf": "2"}
    rng = np.random.default_rng(0)
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for _ in range(GOP_FRAMES):
            pixels = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    file.seek(0)
    container: Any = av.open(file)
    return container, [packet for packet in container.demux(video=0) if packet.size]


def encoded_sound(stream: Any) -> Iterator[Any]:
    """Yield packets of noise without end, one for each `AUDIO_FRAME` samples."""
    rng = np.random.default_rng(1)
    position = 0
    while True:
        samples = rng.normal(0, 0.1, (2, AUDIO_FRAME)).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = SAMPLE_RATE, position
        position += AUDIO_FRAME
        yield from stream.encode(frame)


def make_video(path: Path, num_bytes: int, *, moov_first: bool) -> None:
    """Write an mp4 of about so many bytes: the same two seconds again and again."""
    source, packets = encoded_group()
    num_groups = max(1, num_bytes // sum(packet.size for packet in packets))
    options = {"movflags": "faststart"} if moov_first else {}
    with closing(source), av.open(str(path), "w", format="mp4", options=options) as out:
        template = source.streams.video[0]
        video = out.add_stream_from_template(template)
        sound_stream = out.add_stream("aac", rate=SAMPLE_RATE, layout="stereo")
        sound = encoded_sound(sound_stream)
        time_base = template.time_base
        group_ticks = int(Fraction(GOP_FRAMES, FPS) / time_base)
        sound_s = 0.0
        stored = [(bytes(each), each.pts, each.dts, each.is_keyframe) for each in packets]
        for group in range(num_groups):
            for data, pts, dts, is_key in stored:
                packet = av.Packet(data)
                packet.stream, packet.time_base = video, time_base
                packet.pts, packet.dts = pts + group * group_ticks, dts + group * group_ticks
                packet.duration, packet.is_keyframe = group_ticks // GOP_FRAMES, is_key
                out.mux(packet)
                while sound_s < float(packet.dts * time_base):
                    out.mux(next(sound))
                    sound_s += AUDIO_FRAME / SAMPLE_RATE


def write_dataset(url: str, video: Path, span: tuple[float, float]) -> None:
    """Write a dataset of one sample: the video, then its row."""
    store = open_store(url)
    name = "shard-000000.tar"
    row = json.dumps({"start_s": span[0], "end_s": span[1]}).encode()
    with video.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        content: Any = data
        with store.create(name) as tar:
            writer = TarWriter(tar)
            writer.add("000001", {"mp4": content, "json": row})
            writer.close()
    index = encode_index(writer.offsets)
    store.write(index_name(name), index)
    store.write(checksums_name(name), encode_checksums(writer.checksums, index))
    manifest = Manifest((ShardInfo(name, 1, writer.num_bytes),), checksums="written")
    store.write(MANIFEST_NAME, manifest.to_bytes())


def needed_bytes(video: Path, decoder: mm.VideoDecoder, row: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the index, and those from each key to the frames that are taken."""
    with video.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        index_bytes = position = 0
        while position < len(data):
            size, name = (
                int.from_bytes(data[position : position + 4], "big"),
                data[position + 4 :][:4],
            )
            if size == 1:
                size = int.from_bytes(data[position + 8 : position + 16], "big")
            index_bytes += size if name == b"moov" else 0
            position += size
        plan = decoder.plan(mapped(data), row)
    table = plan.file.table
    assert table is not None
    stops = table.offsets + table.sizes
    frame_bytes = sum(
        int(stops[first:end].max() - table.offsets[first:end].min())
        for first, end, _ in runs(plan.file.timeline, sorted(plan.packets.tolist()))
    )
    return index_bytes, frame_bytes


def mapped(data: mmap.mmap) -> mm.LazyBytes:
    """Return a map as what decoders read by ranges."""
    return mm.LazyBytes(len(data), lambda ranges: [data[start:stop] for start, stop in ranges])


def decoded_from_disk(video: Path, decoder: mm.VideoDecoder, row: dict[str, Any]) -> Any:
    """Return the frames of a file on a disk."""
    with video.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return decoder.decode(mapped(data), row=row).pixels


def measure(url: str, decoder: mm.VideoDecoder, num_workers: int) -> tuple[Any, Any, float]:
    """Return the frames of the sample, the lineage of its batch, and the seconds that it took."""
    pipeline = mm.Pipeline(
        mm.open_dataset(url), global_batch_size=1, decode=mm.Decode(video=decoder)
    )
    begin = time.monotonic()
    batches: Any = iter(mm.Loader(pipeline, num_workers=num_workers))
    with closing(batches):
        batch = next(batches)
    return batch["video"], batch["__lineage__"], time.monotonic() - begin


def main() -> int:
    """Run the proof, print a line for each case, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    arguments = parser.parse_args()
    decoder = mm.VideoDecoder(num_frames=NUM_FRAMES, size=224)
    num_failures = 0
    with tempfile.TemporaryDirectory() as folder, s3_server() as server:
        os.environ.update(server.env)
        for moov_first in (True, False):
            video = Path(folder, "video.mp4")
            make_video(video, int(arguments.gigabytes * 1e9), moov_first=moov_first)
            row = {"start_s": 0.0, "end_s": CLIP_S}
            with av.open(str(video)) as container:
                middle_s = float(container.duration or 0) / 2e6 // 2 * 2
            if middle_s > CLIP_S:
                row = {"start_s": middle_s, "end_s": middle_s + CLIP_S}
            url = f"s3://{server.bucket}/{'first' if moov_first else 'last'}"
            write_dataset(url, video, (row["start_s"], row["end_s"]))
            index_bytes, frame_bytes = needed_bytes(video, decoder, row)
            expected = decoded_from_disk(video, decoder, row)
            for num_workers in (0, 1):
                frames, lineage, seconds = measure(url, decoder, num_workers)
                is_same = torch.equal(frames, torch.from_numpy(expected).permute(0, 3, 1, 2))
                ratio = lineage.num_bytes / (index_bytes + frame_bytes)
                num_failures += ratio > MAX_RATIO or not is_same
                print(
                    f"moov {'first' if moov_first else 'last'}, {num_workers} workers: a file of "
                    f"{video.stat().st_size / 1e9:.2f} GB, index {index_bytes / 1e6:.2f} MB, "
                    f"frames {frame_bytes / 1e6:.2f} MB; read {lineage.num_bytes / 1e6:.2f} MB, "
                    f"{ratio:.3f} times as much, in {lineage.num_requests} requests and "
                    f"{seconds:.1f} s; {'the same' if is_same else 'OTHER'} frames"
                )
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
