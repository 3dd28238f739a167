"""Rows of a LeRobot data set of version 3: one for each episode.

    python docs/lerobot_rows.py FOLDER DEST

The tables of LeRobot have a row for each frame, and a video holds many episodes. Copy this file and
name the columns that you train on.

- A ``json`` of more than 1 MiB is not read in training, so leave out columns of long episodes.
- For pictures in the tables (``dtype`` of "image"), add
  ``"images": [picture["bytes"] for picture in frames[KEY].to_pylist()]``. A row has at most 1,000
  media files.
- In version 2 each episode has its own table and videos, so nothing is cut.

Train on windows of the episodes::

    camera = mm.VideoDecoder(num_frames=1, size=224)
    pipeline = mm.Pipeline(
        mm.open_dataset(DEST),
        global_batch_size=256,
        decode=mm.Decode({"0.mp4": camera, "1.mp4": camera}),
        before=(draw_window,),
    )
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

import mmstream as mm

HORIZON = 3
"""Actions of a window."""


def episodes(folder: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode."""
    info = json.loads(Path(folder, "meta/info.json").read_text())
    cameras = [key for key, feature in info["features"].items() if feature["dtype"] == "video"]

    def path(template: str, prefix: str, **names: str) -> str:
        numbers = {key: episode[f"{prefix}/{key}"] for key in ("chunk_index", "file_index")}
        return f"{folder}/{info[template].format(**numbers, **names)}"

    for episode in pq.read_table(f"{folder}/meta/episodes").to_pylist():
        number = episode["episode_index"]
        frames = pq.read_table(path("data_path", "data"), filters=[("episode_index", "=", number)])
        videos = []
        for key in cameras:
            start, end = (episode[f"videos/{key}/{name}_timestamp"] for name in ("from", "to"))
            file = path("video_path", f"videos/{key}", video_key=key)
            videos.append(cut(file, start, end, info["fps"]))
        yield {
            "id": number,
            "videos": videos,
            "captions": episode["tasks"],
            "fps": info["fps"],
            "action": frames["action"].to_pylist(),
            "state": frames["observation.state"].to_pylist(),
        }


def cut(path: str, start_s: float, end_s: float, fps: float) -> bytes:
    """Return the packets of an episode as an MP4. It must begin with a key frame."""
    copy = io.BytesIO()
    with av.open(path) as source, av.open(copy, "w", format="mp4") as target:
        video = source.streams.video[0]
        stream = target.add_stream_from_template(video)
        first, last = (round((t - 0.5 / fps) / video.time_base) for t in (start_s, end_s))
        start = round(start_s / video.time_base)
        source.seek(start, stream=video)
        for packet in source.demux(video):
            if packet.size and first <= packet.pts < last:
                packet.stream = stream
                packet.pts, packet.dts = packet.pts - start, packet.dts - start
                target.mux(packet)
            elif packet.size and packet.dts >= last:
                break
    return copy.getvalue()


def draw_window(sample: dict[str, Any]) -> dict[str, Any]:
    """Draw a frame of each camera and the actions that follow. Each epoch draws another window.

    For `mm.Pipeline(before=(draw_window,))`: decoders take the part from `start_s` to `end_s`.
    """
    episode = sample["json"]
    actions, states = (np.array(episode[key], np.float32) for key in ("action", "state"))
    frame = int(mm.sample_rng(sample).integers(len(actions)))
    start, end = max(0, frame - 0.5), frame + 0.5  # between two frames, so rounding is no matter
    span = {"start_s": start / episode["fps"], "end_s": end / episode["fps"]}
    window = np.minimum(frame + np.arange(HORIZON), len(actions) - 1)  # the last one is repeated
    return {**sample, "json": span, "action": actions[window], "state": states[frame]}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python lerobot_rows.py FOLDER DEST")
    mm.convert(episodes(sys.argv[1]), sys.argv[2])
