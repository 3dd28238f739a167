"""Rows whose video is a list of pictures: how they are stored, described and refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmstream as mm
from mmstream.converting.duplicates import read_contents
from mmstream.converting.sidecar import write_sidecars
from mmstream.decoding.sample import decode_sample
from mmstream.display.samples import Card, card_lines, sample_html
from tests.helpers.convert_corpus import keys, parquet, pictures, rejects, run, write_rows
from tests.helpers.corpora import jpeg, write_corpus

F = [f"f{i}.jpg" for i in range(4)]
FOUR = [0, 15, 30, 60]
VIDEO = {"video": F, "sample_fps": 2, "text": "a cat"}


def converted(folder, *rows, **options):
    pictures(folder, *F)
    (folder / "small.jpg").write_bytes(jpeg(9, (8, 6)))
    (folder / "cut.jpg").write_bytes(jpeg(9)[:300])
    file = write_rows(folder / "rows.jsonl", rows)
    run(file, folder / "out", **options)
    return mm.open_dataset(folder / "out")


def members(dataset, index=0):
    return {name: data for name, data in dataset[index].items() if name[:2] != "__"}


def asked(*parts):
    return [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": "a cat"}]


def test_a_list_is_stored_as_plain_pictures_beside_its_times(tmp_path):
    stored = members(converted(tmp_path, VIDEO))
    assert list(stored) == ["frames", *(f"frames.00{i}.jpg" for i in range(4)), "txt", "json"]
    assert [stored[f"frames.00{i}.jpg"] for i in range(4)] == [jpeg(i) for i in range(4)]
    assert json.loads(stored["frames"]) == {"sample_fps": 2.0}
    assert json.loads(stored["json"]) == {"id": None, "captions": ["a cat"], "media_paths": [F]}


@pytest.mark.parametrize(
    ("row", "times"),
    [
        ({"video": F, "timestamps": [0.5, 1, "00:00:02.5", 4]}, {"timestamps": [0.5, 1, 2.5, 4]}),
        ({"video": F, "fps": "30", "indices": FOUR}, {"fps": 30, "indices": FOUR}),
        ({"videos": [F], "sample_fps": 4}, {"sample_fps": 4}),
        ({"videos": {"frames": F, "sample_fps": 4}, "fps": 25}, {"sample_fps": 4}),
        ({"video": {"frames": F}, "sample_fps": 4, "fps": 25}, {"sample_fps": 4}),
        ({"video": F, "timestamps": FOUR, "captions": ["a", "b"]}, {"timestamps": FOUR}),
        ({"messages": asked({"type": "video", "video": F, "sample_fps": "2"})}, {"sample_fps": 2}),
        ({"messages": asked({"type": "video", "video": F, "fps": 2})}, {"sample_fps": 2}),
        (
            {"messages": asked({"type": "video", "video": F, "timestamps": FOUR, "fps": 2})},
            {"timestamps": FOUR},
        ),
        (
            {"video": F, "sample_fps": 1, "conversations": [{"from": "human", "value": "<image>"}]},
            {"sample_fps": 1},
        ),
    ],
)
def test_times_are_read_in_every_form(row, times, tmp_path):
    dataset = converted(tmp_path, {"text": "a cat", **row} if "messages" not in row else row)
    stored = members(dataset)
    (name,) = [name for name in stored if name.endswith("frames")]
    assert json.loads(stored[name]) == times
    content = json.loads(stored["json"])
    assert not content.keys() & {"timestamps", "sample_fps", "indices"}
    if "messages" in content:
        assert content["messages"][0]["content"][0] == {"type": "video", "field": "0.frames"}
    decode = mm.Decode(video=mm.VideoDecoder(size=8))
    [batch] = mm.Loader(mm.Pipeline(dataset, global_batch_size=1, decode=decode), num_workers=0)
    assert len(batch["video"]) == 4


def test_frames_in_a_table_are_bytes_or_structs(tmp_path):
    structs = [{"bytes": jpeg(i), "path": None} for i in range(3)]
    file = tmp_path / "rows.parquet"
    file.write_bytes(parquet([{"video": structs, "sample_fps": 1.0, "text": "a cat"}]))
    run(file, tmp_path / "out")
    stored = members(mm.open_dataset(tmp_path / "out"))
    assert [stored[f"frames.00{i}.jpg"] for i in range(3)] == [jpeg(i) for i in range(3)]


def test_lists_files_and_pictures_stand_in_one_chat(tmp_path):
    parts = [
        {"type": "video", "video": {"frames": F[:2], "sample_fps": 1}},
        {"type": "image", "image": "f3.jpg"},
        {"type": "video", "video": F, "timestamps": [1, 2, 3, 4]},
        {"type": "text", "text": "?"},
    ]
    stored = members(converted(tmp_path, {"messages": asked(*parts)}))
    names = [name for name in stored if ".frames." not in name]
    assert names == ["0.frames", "1.jpg", "2.frames", "json"]
    assert stored["2.frames.003.jpg"] == jpeg(3)
    content = json.loads(stored["json"])["messages"][0]["content"]
    assert [part.get("field") for part in content] == ["0.frames", "1.jpg", "2.frames", None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sample_fps": None}, "video: a list of 4 frames with no times; give timestamps"),
        ({"sample_fps": None, "fps": 2}, "no times"),
        ({"timestamps": [0, 1, 2, 3]}, "two kinds of times: timestamps and sample_fps"),
        ({"indices": [0, 1, 2, 3], "fps": 1}, "two kinds of times: sample_fps and indices"),
        ({"sample_fps": None, "timestamps": [0, 2, 1, 3]}, "frame 2 is at 1 s, not after"),
        ({"sample_fps": None, "timestamps": [0, 2]}, "video: 2 timestamps for 4 frames"),
        ({"sample_fps": None, "timestamps": [-1, 0, 1, 2]}, "timestamps[0]: -1 s is before"),
        ({"sample_fps": None, "indices": [0, 1, 2, 3]}, "fps=None: expected frames per second"),
        ({"sample_fps": None, "fps": 1, "indices": [0, 1.5, 2, 3]}, "indices[1]=1.5: expected"),
        ({"sample_fps": "x"}, "sample_fps: expected a number"),
        ({"sample_fps": -2}, "sample_fps=-2.0: expected frames per second"),
        ({"video": [*F, "gone.jpg"]}, "gone.jpg: no such file"),
        ({"video": [*F, "cut.jpg"]}, "cut.jpg: "),
        ({"video": [*F, "small.jpg"]}, "small.jpg: a frame of 8x6 in a video of 40x30"),
        ({"video": [F, []]}, "video[1]: a list of no frames"),
        ({"start_s": 2.5, "end_s": 3}, "starts at 2.5 s, and the file lasts 2 s"),
        ({"video": F * 3000}, "12000 frames of videos in one row, the limit is 8192"),
    ],
)
def test_a_wrong_list_is_a_reject_that_says_why(changes, reason, tmp_path):
    options = mm.MediaOptions(check="full")
    converted(tmp_path, VIDEO, {**VIDEO, **changes}, media=options)
    assert reason in rejects(tmp_path / "out")[2]


def test_frames_are_made_smaller_as_pictures_are_also_when_they_are_stored_again(tmp_path):
    small = mm.MediaOptions(max_image_side=20, image_format="webp")
    stored = members(converted(tmp_path, VIDEO, media=small))
    sizes = [Image.open(io.BytesIO(stored[f"frames.00{i}.webp"])).size for i in range(4)]
    assert sizes == [(20, 15)] * 4
    whole = converted(tmp_path / "whole", VIDEO)
    run(tmp_path / "whole" / "out", tmp_path / "again", media=small)
    again = members(mm.open_dataset(tmp_path / "again"))
    assert again == stored
    run(tmp_path / "whole" / "out", tmp_path / "copy")
    assert members(mm.open_dataset(tmp_path / "copy")) == members(whole)


def test_a_gap_of_a_stored_list_is_not_closed(tmp_path):
    sample = {"frames": b'{"sample_fps": 1}', "frames.0.jpg": jpeg(0), "frames.2.jpg": jpeg(2)}
    write_corpus(tmp_path / "tars", [1], lambda _: sample)
    small = mm.MediaOptions(max_image_side=20, image_format="webp")
    run(tmp_path / "tars", tmp_path / "out", media=small)
    dataset = mm.open_dataset(tmp_path / "out")
    assert list(members(dataset)) == ["frames", "frames.0.webp", "frames.2.webp"]
    with pytest.raises(mm.errors.DecodeError, match="frame 1 is missing"):
        decode_sample(dataset[0], mm.Decode(video=mm.VideoDecoder()))


def sidecar(dataset):
    """The rows of the one shard."""
    return pq.read_table(f"{dataset.store.url}/shard-000000.parquet").to_pylist()


def test_a_list_is_one_medium_of_the_sidecar(tmp_path):
    dataset = converted(tmp_path, VIDEO, {**VIDEO, "sample_fps": 4}, {**VIDEO, "video": F[:3]})
    first, same, other = (row["media"] for row in sidecar(dataset))
    facts = {"field": "frames", "kind": "video", "width": 40, "height": 30, "num_frames": 4}
    facts |= {"duration_s": 2.0, "fps": 2.0, "num_bytes": sum(len(jpeg(i)) for i in range(4))}
    [medium] = first
    assert facts.items() <= medium.items()
    assert medium["xxh3"] == same[0]["xxh3"] != other[0]["xxh3"]  # whatever the times
    assert len(dataset.where("num_media = 1 and duration_s <= 1.5")) == 2
    before, hashes = sidecar(dataset), read_contents(dataset, 0).entries["media"].hashes.tolist()
    Path(dataset.store.url, "shard-000000.parquet").unlink()
    assert read_contents(dataset, 0).entries["media"].hashes.tolist() == hashes
    write_sidecars(dataset, progress=False)
    assert [row["media"] for row in sidecar(dataset)] == [row["media"] for row in before]


def test_rows_that_share_a_frame_are_not_split_apart(tmp_path):
    chain = [{**VIDEO, "video": [f"{n}.jpg", f"{n + 1}.jpg"]} for n in range(20)]
    others = [{**VIDEO, "video": [f"x{n}.jpg"]} for n in range(20)]
    pictures(tmp_path, *sorted({name for row in (*chain, *others) for name in row["video"]}))
    rows = write_rows(tmp_path / "rows.jsonl", [*chain, *others])
    run(rows, tmp_path / "out", splits={"train": 0.5, "val": 0.5}, by_media=True)
    of_chain = [
        sum(int(key) <= 20 for key in keys(tmp_path / "out" / split)) for split in ("train", "val")
    ]
    assert sorted(of_chain) == [0, 20]


def test_statistics_and_pages_show_one_video(tmp_path):
    dataset = converted(tmp_path, VIDEO)
    values = mm.statistics(dataset).values
    assert values["video seconds"].tolist() == [2.0]
    assert not [name for name in values if name.startswith("image")]
    num_bytes = sum(len(jpeg(i)) for i in range(4))
    lines = [*card_lines(Card("here", dataset[0]))]
    assert f"  frames: {num_bytes / 1000:.1f} kB of 4 frames, 0.00 to 1.50 s" in lines
    assert not [line for line in lines if "frames.00" in line]
    assert sample_html(dataset[0]).count("data:image/jpeg") == 4
