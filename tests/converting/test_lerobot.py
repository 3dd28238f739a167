"""Data sets of LeRobot: episodes become samples, with their own frames and numbers."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import av
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.draft import FrameSpan, RowError
from mmstream.converting.formats import lerobot as lerobot_format
from mmstream.converting.formats.formats import draft_of
from mmstream.converting.media.cut import cut_frames
from mmstream.converting.rows import lerobot
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.image.limits import MAX_PIXELS
from mmstream.decoding.video.file import read_video_file
from mmstream.errors import ConfigError, MMStreamError
from mmstream.lazy_bytes import LazyBytes
from tests.helpers.convert_corpus import rejects
from tests.helpers.media_files import frame_number, frame_pixels, video_file

FPS = 10
LENGTHS = (4, 7, 5, 6, 3, 8)
FILES = ((0, 1, 2), (3, 4, 5))
"""Episodes of each file of version 3."""
CAMERAS = ("observation.images.top", "observation.images.wrist")
TASKS = [["Pick the cube."], ["Pick the cube."], ["Stack.", "Wave."], ["Stack."], [], ["Wave."]]


def feature(dtype, *shape, names=None):
    return {"dtype": dtype, "shape": list(shape), "names": names}


FEATURES = {
    "observation.state": feature("float32", 3, names=["x", "y", "grip"]),
    "action": feature("float64", 2, names={"motors": ["a", "b"]}),
    "success": feature("bool", 1),
    "subtask": feature("string", 1),
    "timestamp": feature("float32", 1),
    "frame_index": feature("int64", 1),
    "episode_index": feature("int64", 1),
    "index": feature("int64", 1),
    "task_index": feature("int64", 1),
    **{camera: feature("video", 48, 64, 3) for camera in CAMERAS},
}


def columns(episode):
    """Return the numbers of an episode, as the tables have them."""
    length = LENGTHS[episode]
    generator = np.random.default_rng(episode)
    return {
        "observation.state": generator.normal(size=(length, 3)).astype(np.float32),
        "action": generator.normal(size=(length, 2)),
        "success": generator.random(length) > 0.5,
        "subtask": [f"part {i // 2}" for i in range(length)],
        "timestamp": (np.arange(length) / FPS).astype(np.float32),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, episode),
        "index": np.arange(length) + sum(LENGTHS[:episode]),
        "task_index": np.full(length, episode % 3),
    }


def table(episode):
    arrays = {}
    for key, values in columns(episode).items():
        if getattr(values, "ndim", 1) == 2:
            values = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        arrays[key] = pa.array(values)
    return pa.table(arrays)


def first_number(episode, camera):
    """The number that the first frame of an episode shows."""
    return 100 * episode + 50 * CAMERAS.index(camera) + 1


def clip(episode, camera, b_frames=0):
    number = first_number(episode, camera)
    length = LENGTHS[episode]
    return video_file(num_frames=length, first_number=number, gop=2 + b_frames, b_frames=b_frames)


def joined(clips):
    """Return one video of several, as LeRobot joins them: by FFmpeg, without encoding."""
    target = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{number}.mp4" for number in range(len(clips))]
        for name, data in zip(names, clips, strict=True):
            Path(folder, name).write_bytes(data)
        listed = Path(folder, "list.txt")
        listed.write_text("".join(f"file '{name}'\n" for name in names))
        with (
            av.open(str(listed), format="concat") as source,
            av.open(target, "w", format="mp4") as out,
        ):
            template = source.streams.video[0]
            stream = out.add_stream_from_template(template, opaque=True)
            for packet in source.demux(template):
                if packet.size:
                    packet.stream = stream
                    out.mux(packet)
    return target.getvalue()


def write_info(folder, version, data_path, video_path, **changes):
    info = {
        "codebase_version": version,
        "robot_type": "so100",
        "fps": FPS,
        "chunks_size": 1000,
        "features": FEATURES,
        "data_path": data_path,
        "video_path": video_path,
        **changes,
    }
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "meta/info.json").write_text(json.dumps(info))


def write_file(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_v3(folder, b_frames=0):
    """Write a data set of version 3: two files of each kind, with three episodes each."""
    write_info(
        folder,
        "v3.0",
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    listed = []
    for number, episodes in enumerate(FILES):
        name = f"chunk-000/file-{number:03d}"
        path = folder / f"data/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = pa.concat_tables([table(episode) for episode in episodes])
        pq.write_table(rows, path, row_group_size=6)  # groups end within episodes
        for camera in CAMERAS:
            clips = [clip(episode, camera, b_frames) for episode in episodes]
            write_file(folder / f"videos/{camera}/{name}.mp4", joined(clips))
        start_s = 0.0
        for episode in episodes:
            row = {
                "episode_index": episode,
                "tasks": TASKS[episode],
                "length": LENGTHS[episode],
                "data/chunk_index": 0,
                "data/file_index": number,
                "dataset_from_index": sum(LENGTHS[:episode]),
                "dataset_to_index": sum(LENGTHS[: episode + 1]),
                "stats/action/mean": [0.0, 0.0],
                "meta/episodes/chunk_index": 0,
            }
            for camera in CAMERAS:
                row[f"videos/{camera}/chunk_index"] = 0
                row[f"videos/{camera}/file_index"] = number
                row[f"videos/{camera}/from_timestamp"] = start_s
                row[f"videos/{camera}/to_timestamp"] = start_s + LENGTHS[episode] / FPS
            listed.append(row)
            start_s += LENGTHS[episode] / FPS
    write_episodes(folder, listed)
    return folder


def write_episodes(folder, listed):
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(listed), path)


def read_episodes(folder):
    return pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()


def write_v21(folder):
    """Write a data set of version 2.1: a table and a video of each camera for each episode."""
    write_info(
        folder,
        "v2.1",
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        chunks_size=4,
    )
    lines = []
    for episode, length in enumerate(LENGTHS):
        chunk, name = f"chunk-{episode // 4:03d}", f"episode_{episode:06d}"
        path = folder / f"data/{chunk}/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(episode), path)
        for camera in CAMERAS:
            write_file(folder / f"videos/{chunk}/{camera}/{name}.mp4", clip(episode, camera))
        lines.append({"episode_index": episode, "tasks": TASKS[episode], "length": length})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "meta/episodes.jsonl").write_text(text)
    return folder


def convert(folder, dest, **options):
    return mm.convert(folder, dest, num_workers=1, **options)


def frames_of(data):
    """Return the decoded frames, uint8 [F, H, W, 3]."""
    return mm.VideoDecoder(span=None)(data)


def require_episode(sample, episode, b_frames=0):
    """Compare a sample with the source."""
    length = LENGTHS[episode]
    expected = columns(episode)
    for key in ("observation.state", "action", "success", "timestamp", "task_index"):
        array = np.load(io.BytesIO(sample[f"{key}.npy"]))
        assert array.dtype == expected[key].dtype
        assert array.shape == (length, *FEATURES[key]["shape"])
        np.testing.assert_array_equal(array, expected[key].reshape(array.shape))
    assert msgspec.json.decode(sample["subtask.json"]) == expected["subtask"]
    for camera in CAMERAS:
        first = first_number(episode, camera)
        pixels = frames_of(sample[f"{camera}.mp4"])
        assert [frame_number(frame) for frame in pixels] == list(range(first, first + length))
        np.testing.assert_array_equal(pixels, frames_of(clip(episode, camera, b_frames)))
    content = msgspec.json.decode(sample["json"])
    assert content["captions" if TASKS[episode] else "id"] == (TASKS[episode] or episode)
    assert sample.get("txt", b"").decode() == "".join(TASKS[episode][:1])
    assert (content["episode_index"], content["fps"], content["length"]) == (episode, FPS, length)
    assert content["names"]["observation.state"] == ["x", "y", "grip"]


@pytest.mark.parametrize("b_frames", [0, 2])
def test_each_episode_of_version_3_has_its_own_frames_and_numbers(tmp_path, b_frames):
    convert(write_v3(tmp_path / "in", b_frames), tmp_path / "out")
    dataset = mm.open_dataset(tmp_path / "out")
    assert len(dataset) == len(LENGTHS)
    for episode in range(len(LENGTHS)):
        require_episode(dataset[episode], episode, b_frames)
    spans = msgspec.json.decode(dataset[1]["json"])["videos"]
    assert spans[CAMERAS[0]] == {
        "path": "videos/observation.images.top/chunk-000/file-000.mp4",
        "start_s": 0.4,
    }


def test_each_episode_of_version_2_keeps_its_videos_byte_for_byte(tmp_path):
    convert(write_v21(tmp_path / "in"), tmp_path / "out")
    dataset = mm.open_dataset(tmp_path / "out")
    assert len(dataset) == len(LENGTHS)
    for episode in range(len(LENGTHS)):
        require_episode(dataset[episode], episode)
        for camera in CAMERAS:
            assert dataset[episode][f"{camera}.mp4"] == clip(episode, camera)


def write_pictures(folder):
    """Write a data set of version 2.1 whose first camera has its frames in the tables."""
    write_v21(folder)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][CAMERAS[0]] = feature("image", 48, 64, 3)
    (folder / "meta/info.json").write_text(json.dumps(info))
    for episode, length in enumerate(LENGTHS):
        chunk, name = f"chunk-{episode // 4:03d}", f"episode_{episode:06d}"
        pictures = [
            {"bytes": picture(episode, frame), "path": f"frame_{frame:06d}.png"}
            for frame in range(length)
        ]
        column = pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        path = folder / f"data/{chunk}/{name}.parquet"
        pq.write_table(table(episode).append_column(CAMERAS[0], column), path, row_group_size=3)
    return folder


def picture(episode, frame):
    buffer = io.BytesIO()
    pixels = frame_pixels(first_number(episode, CAMERAS[0]) + frame)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def take_frame(sample):
    """Draw a frame of the episode, and leave its pictures of other frames undecoded."""
    frame = int(mm.sample_rng(sample).integers(sample["json"]["length"]))
    taken = sample[f"{CAMERAS[0]}.{frame:06d}.png"]
    others = {k: v for k, v in sample.items() if not k.startswith(CAMERAS[0])}
    return {**others, "picture.png": taken, "json": {**sample["json"], "frame": frame}}


def test_pictures_in_the_tables_are_members_of_their_frames(tmp_path):
    """https://github.com/huggingface/lerobot: ``datasets.Image`` where the dtype is image"""
    convert(write_pictures(tmp_path / "in"), tmp_path / "out")
    dataset = mm.open_dataset(tmp_path / "out")
    for episode, length in enumerate(LENGTHS):
        sample = dataset[episode]
        frames = [sample[f"{CAMERAS[0]}.{frame:06d}.png"] for frame in range(length)]
        assert frames == [picture(episode, frame) for frame in range(length)]
        assert f"{CAMERAS[0]}.{length:06d}.png" not in sample
        assert sample[f"{CAMERAS[1]}.mp4"] == clip(episode, CAMERAS[1])
        content = msgspec.json.decode(sample["json"])
        assert len(content["media_paths"]) == 1  # of the video; pictures have no path
        assert "pictures" not in content
    decode = mm.Decode({"picture.png": mm.ImageDecoder(), "action.npy": ...})
    pipeline = mm.Pipeline(dataset, global_batch_size=6, decode=decode, before=(take_frame,))
    batch = next(iter(mm.Loader(pipeline, num_workers=0)))
    for row, content in enumerate(batch["json"]):
        pixels = batch["picture.png"][row].permute(1, 2, 0)
        first = first_number(content["episode_index"], CAMERAS[0])
        assert frame_number(pixels) == first + content["frame"]


def test_frames_that_are_no_pictures_reject_their_episode(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "in")
    values = [{"bytes": b"", "path": "a.png"}, {"bytes": b"no picture"}, 5]
    for episode, value in enumerate(values):
        path = folder / f"data/chunk-000/episode_{episode:06d}.parquet"
        column = pa.array([value] * LENGTHS[episode])
        pq.write_table(table(episode).append_column(CAMERAS[0], column), path)
    monkeypatch.setattr(lerobot_format, "MAX_PICTURES", 5)
    assert convert(folder, tmp_path / "out", max_rejects=1.0).num_samples == 1
    reasons = rejects(tmp_path / "out")
    assert reasons[1].endswith(f"{CAMERAS[0]}: frame 0 has no bytes")
    assert reasons[2].endswith(f"{CAMERAS[0]}: frame 0 is no picture (starts with b'no picture')")
    assert reasons[3].endswith(f"{CAMERAS[0]}: no pictures but int64")
    assert reasons[4].startswith("6 pictures, the limit of an episode is 5")


def draw_window(sample):
    """Draw a frame of the episode: the decoders of all cameras take this one."""
    episode = sample["json"]
    frame = int(mm.sample_rng(sample).integers(episode["length"]))
    start, end = max(0, frame - 0.5), frame + 0.5
    times = {"start_s": start / episode["fps"], "end_s": end / episode["fps"]}
    return {**sample, "json": {**episode, **times, "frame": frame}}


def cut_window(sample):
    """Take the actions of three frames from the drawn one on. The last one is repeated."""
    last = sample["json"]["length"] - 1
    frames = np.minimum(sample["json"]["frame"] + np.arange(3), last)
    return {**sample, "action.npy": sample["action.npy"][frames]}


def test_a_window_has_the_same_frame_of_all_cameras_and_of_the_numbers(tmp_path):
    folder = write_v21(tmp_path / "in")
    convert(folder, tmp_path / "out")
    names = {f"{camera}.mp4": mm.VideoDecoder(num_frames=1) for camera in CAMERAS}
    pipeline = mm.Pipeline(
        mm.open_dataset(tmp_path / "out"),
        global_batch_size=6,
        decode=mm.Decode({**names, "action.npy": ...}),
        before=(draw_window,),
        transforms=(cut_window,),
    )
    batch = next(iter(mm.Loader(pipeline, num_workers=0)))
    assert batch["action.npy"].shape == (6, 3, 2)
    for row, content in enumerate(batch["json"]):
        episode, start = content["episode_index"], content["frame"]
        expected = columns(episode)["action"][
            np.minimum(np.arange(start, start + 3), LENGTHS[episode] - 1)
        ]
        np.testing.assert_array_equal(batch["action.npy"][row], expected)
        for camera in CAMERAS:
            pixels = batch[f"{camera}.mp4"][row][0].permute(1, 2, 0)
            assert frame_number(pixels) == first_number(episode, camera) + start
    assert len({content["episode_index"] for content in batch["json"]}) == 6


def test_an_episode_that_cannot_be_whole_is_rejected_with_the_reason(tmp_path):
    folder = write_v3(tmp_path / "in")
    listed = read_episodes(folder)
    top = f"videos/{CAMERAS[0]}"
    listed[0]["length"] = 5
    listed[1][f"{top}/to_timestamp"] = 0.9
    listed[2][f"{top}/from_timestamp"] += 0.2
    listed[2][f"{top}/to_timestamp"] += 0.2
    listed[3][f"{top}/file_index"] = 7
    listed[4]["data/file_index"] = 7
    write_episodes(folder, listed)
    assert convert(folder, tmp_path / "out", max_rejects=1.0).num_samples == 1
    assert rejects(tmp_path / "out") == {
        1: "episode 0: data/chunk-000/file-000.parquet: 4 rows of the episode, and its length is 5",
        2: "episode 1: videos/observation.images.top: 5 frames from 0.4 to 0.9 s, and the episode "
        "has 7",
        3: "videos/observation.images.top/chunk-000/file-000.mp4: 3 frames from 1.3 s on, and the "
        "episode has 5",
        4: "videos/observation.images.top/chunk-000/file-007.mp4: no such file",
        5: "episode 4: data/chunk-000/file-007.parquet: no such file",
    }


def test_episodes_of_version_2_that_cannot_be_whole_are_rejected(tmp_path):
    folder = write_v21(tmp_path / "in")
    top = folder / "videos/chunk-000" / CAMERAS[0]
    (top / "episode_000000.mp4").unlink()
    (top / "episode_000001.mp4").write_bytes(clip(0, CAMERAS[0]))
    path = folder / "data/chunk-000/episode_000002.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    changed = table(3).set_column(1, "action", pa.array([[1.0], [2.0, 3.0]] * 3))
    pq.write_table(changed, folder / "data/chunk-000/episode_000003.parquet")
    pq.write_table(table(4).drop(["success"]), folder / "data/chunk-001/episode_000004.parquet")
    with (folder / "meta/episodes.jsonl").open("a") as file:
        file.write("[]\n")
    assert convert(folder, tmp_path / "out", max_rejects=1.0).num_samples == 1
    reasons = rejects(tmp_path / "out")
    assert reasons[1].endswith("episode_000000.mp4: no such file")
    assert reasons[2].endswith("episode_000001.mp4: 4 frames, and the episode has 7")
    assert "episode_000002.parquet: damaged Parquet" in reasons[3]
    assert reasons[4].endswith("episode_000003.parquet: action: its rows have different lengths")
    assert reasons[5].endswith("episode_000004.parquet: has no column success")
    assert reasons[7] == "no object of an episode"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version 'v1.6' is not read"),
        ({"fps": 0}, "fps and chunks_size must be above 0"),
        ({"fps": "ten"}, "Expected `float`, got `str`"),
        ({"video_path": None}, "is a video, and there is no video_path"),
        ({"features": {"a": feature("language", 1)}}, "a: dtype 'language' is not read"),
        ({"features": {"a": feature("i4,(", 1)}}, "a: dtype 'i4,(' is not read"),
        ({"features": {"a": feature("2147483648f4", 1)}}, "a: dtype '2147483648f4' is not read"),
        ({"features": {"a": feature("float32", -1, -1)}}, "Expected `int` >= 0"),
        ({"features": {k: feature("float32", 1) for k in "aA"}}, "differs from it in capital"),
        ({"features": {"../a": feature("float32", 1)}}, "no name of a file in a tar"),
    ],
)
def test_a_data_set_that_is_not_read_is_refused_with_the_feature(tmp_path, changes, reason):
    folder = write_v3(tmp_path / "in")
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, **changes}))
    with pytest.raises(ConfigError, match=r"meta/info\.json: ") as caught:
        convert(folder, tmp_path / "out")
    assert reason in str(caught.value)
    with pytest.raises(ConfigError, match="holds a data set of LeRobot; convert it alone"):
        convert([folder, folder / "meta/info.json"], tmp_path / "out")


@pytest.mark.parametrize(
    "template",
    ["../{episode_index}", "/etc/{episode_index}", "{episode_index.real}/../..", "s3://a/b"],
)
def test_a_template_leads_to_no_file_outside(tmp_path, template):
    folder = write_v21(tmp_path / "in")
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "data_path": template}))
    with pytest.raises(MMStreamError, match=r"none of 6 rows .*: lies outside the data set"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_folder_is_no_data_set_of_lerobot_without_a_small_file_of_features(
    tmp_path, monkeypatch, is_folder
):
    monkeypatch.setattr(lerobot, "MAX_INFO_BYTES", 100)
    path = tmp_path / "meta/info.json"
    path.parent.mkdir()
    if is_folder:
        path.mkdir()
    else:
        path.write_text('{"codebase_version": "v3.0"}' + " " * 100)
    assert not lerobot.is_lerobot(str(tmp_path))


def test_a_list_of_episodes_that_is_missing_is_named(tmp_path):
    for folder in (write_v3(tmp_path / "3"), write_v21(tmp_path / "2")):
        for path in folder.glob("meta/episodes*"):
            path.rename(tmp_path / f"old-{folder.name}")
        with pytest.raises(ConfigError, match=r"list(s)? the episodes; fetch"):
            convert(folder, tmp_path / "out")


@pytest.mark.parametrize("b_frames", [0, 2])
def test_only_the_header_and_the_packets_of_the_frames_are_read(b_frames):
    clips = [video_file(num_frames=12, gop=6, b_frames=b_frames, first_number=n) for n in (0, 50)]
    data = joined([clips[0], *[clips[1]] * 150])
    read = []

    def read_ranges(ranges):
        read.extend(stop - start for start, stop in ranges)
        return [data[start:stop] for start, stop in ranges]

    copy = cut_frames(LazyBytes(len(data), read_ranges), FrameSpan(1.2, 12, 10), 1 << 30)
    assert [frame_number(frame) for frame in frames_of(copy)] == list(range(50, 62))
    assert copy == cut_frames(data, FrameSpan(1.2, 12, 10), 1 << 30)
    assert sum(read) < len(data) / 2 > 100_000


@pytest.mark.parametrize(
    ("span", "max_bytes", "reason"),
    [
        (FrameSpan(0.2, 4, 10), 1 << 30, "its frame at 0.2 s cannot be decoded without those"),
        (FrameSpan(0.6, 7, 10), 1 << 30, "6 frames from 0.6 s on, and the episode has 7"),
        (FrameSpan(0.6, 4, 20), 1 << 30, "are not 20 per second"),
        (FrameSpan(0.6, 6, 10), 100, "its frames are over 100 bytes"),
        (FrameSpan(0.0, 12, 10), 100, "its frames are over 100 bytes"),
        (FrameSpan(None, 11, 10), 1 << 30, "12 frames, and the episode has 11"),
    ],
)
def test_frames_that_cannot_be_cut_out_are_refused(span, max_bytes, reason):
    with pytest.raises(RowError, match=reason):
        cut_frames(video_file(num_frames=12, gop=6), span, max_bytes)


def test_a_file_without_a_video_is_refused():
    with pytest.raises(RowError, match="not those of a known audio or video format"):
        cut_frames(b"no video" * 100, FrameSpan(0.0, 1, 10), 1 << 30)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fps": 0}, "Expected `float` > 0.0"),
        ({"length": 0}, "Expected `int` >= 1"),
        ({"videos": {"a": {"path": "a.mp4", "start_s": -1.0}}}, "Expected `float` >= 0.0"),
        ({"videos": {"../a": {"path": "a.mp4", "start_s": 0.0}}}, "the member '../a.mp4'"),
        ({"members": {"txt": b"a"}}, "the member 'txt'"),
        ({"members": {"a.npy": b"", "A.npy": b""}}, "two members of one name"),
        ({"tasks": 7}, "Expected `array`, got `int`"),
    ],
)
def test_a_row_that_somebody_else_made_is_no_episode(changes, reason):
    row = {
        "id": 0,
        "codebase_version": "v3.0",
        "robot_type": None,
        "episode_index": 0,
        "length": 3,
        "fps": 10,
        "tasks": ["Wave."],
        "names": {},
        "videos": {"top": {"path": "a.mp4", "start_s": 0.0}},
        "members": {"action.npy": b""},
    }
    assert (draft_of(row).media[0].field, draft_of(row).format) == ("top.mp4", "lerobot")
    with pytest.raises(RowError, match="no messages in the row"):
        draft_of(row, "messages")  # the caller's word counts
    with pytest.raises(RowError, match="no row of an episode: ") as caught:
        draft_of({**row, **changes})
    assert reason in str(caught.value)


def test_frames_in_front_of_their_key_are_no_beginning():
    data = video_file(num_frames=18, gop=6, b_frames=2, open_gop=True)
    timeline = read_video_file(data, Deadline(), MAX_PIXELS).timeline
    shown = timeline.display_order
    key = next(i for i in range(1, 18) if timeline.is_key[shown[i]] and shown[i - 1] > shown[i])
    first = next(i for i in range(key) if (shown[i:] >= shown[key]).all())  # such as 4 of a key 6
    span = FrameSpan(first / 10, 18 - first, 10)
    with pytest.raises(RowError, match="cannot be decoded without those before it"):
        cut_frames(data, span, 1 << 30)
