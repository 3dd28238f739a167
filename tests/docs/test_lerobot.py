"""docs/lerobot_rows.py makes rows of two episodes that share a video, and draws windows of them."""

from __future__ import annotations

import json
import runpy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmstream as mm
from tests.helpers.media_files import frame_number, video_file
from tests.helpers.paths import DOCS

LENGTHS = (4, 6)
CAMERAS = {"observation.images.top": 0, "observation.images.wrist": 50}
"""The cameras, and the number that the first frame of each shows."""
FILE = "chunk-000/file-000"
SCRIPT = DOCS / "lerobot_rows.py"


@pytest.fixture
def folder(tmp_path):
    features = {"action": {"dtype": "float32"}, **{key: {"dtype": "video"} for key in CAMERAS}}
    info = {
        "codebase_version": "v3.0",
        "fps": 10,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    listed, frames = [], []
    for number, length in enumerate(LENGTHS):
        episode = {"episode_index": number, "tasks": [f"Task {number}."], "length": length}
        for kind in ("data", *(f"videos/{key}" for key in CAMERAS)):
            episode |= {f"{kind}/chunk_index": 0, f"{kind}/file_index": 0}
        for key in CAMERAS:
            episode[f"videos/{key}/from_timestamp"] = len(frames) / 10
            episode[f"videos/{key}/to_timestamp"] = (len(frames) + length) / 10
        listed.append(episode)
        for frame in range(len(frames), len(frames) + length):
            row = {"action": [frame, -frame], "observation.state": [frame, 0.0, 1.0]}
            frames.append({"episode_index": number, **row})
    for path, rows in ((f"meta/episodes/{FILE}", listed), (f"data/{FILE}", frames)):
        (tmp_path / path).parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{path}.parquet")
    for key, first in CAMERAS.items():
        clip = video_file(num_frames=10, first_number=first, gop=4, b_frames=2, width=64, height=64)
        path = tmp_path / f"videos/{key}/{FILE}.mp4"
        path.parent.mkdir(parents=True)
        path.write_bytes(clip)
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    return tmp_path


def test_each_episode_is_a_sample_and_a_window_has_its_frame_and_actions(folder, tmp_path_factory):
    copied = runpy.run_path(str(SCRIPT))
    shards = tmp_path_factory.mktemp("shards")
    mm.convert(copied["episodes"](str(folder)), shards, progress=False)
    dataset = mm.open_dataset(shards)
    for sample, first, length in zip(dataset, (0, 4), LENGTHS, strict=True):
        content = json.loads(sample["json"])
        numbers = list(range(first, first + length))
        assert [x for x, _ in content["action"]] == [x for x, *_ in content["state"]] == numbers
        assert content["captions"] == [sample["txt"].decode()] == [f"Task {content['id']}."]
        for camera, offset in zip(("0.mp4", "1.mp4"), CAMERAS.values(), strict=True):
            shown = [frame_number(x) for x in mm.VideoDecoder(span=None)(sample[camera])]
            assert shown == [offset + number for number in numbers]

    camera = mm.VideoDecoder(num_frames=1, size=64)
    decode = mm.Decode({"0.mp4": camera, "1.mp4": camera})
    pipeline = mm.Pipeline(
        dataset, global_batch_size=2, decode=decode, before=(copied["draw_window"],)
    )
    batch = next(iter(mm.Loader(pipeline)))
    assert batch["action"].shape == (2, copied["HORIZON"], 2)
    for row in range(2):
        frame = int(batch["state"][row, 0])
        shown = [frame_number(batch[key][row].permute(1, 2, 0)) for key in ("0.mp4", "1.mp4")]
        assert shown == [frame, frame + 50]
        assert batch["action"][row, 0].tolist() == [frame, -frame]
