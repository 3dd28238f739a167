"""Rows inside one JSON object, and transcripts: corpora whose files are no lists of rows."""

from __future__ import annotations

import json

import pytest

import mmstream as mm
from mmstream.converting.draft import RowError
from mmstream.converting.formats.formats import draft_of
from mmstream.converting.rows.open import open_rows
from mmstream.converting.rows.transcripts import is_transcripts

AUDIO = {"aid": "P1", "path": "a.opus", "segments": [{"begin_time": 0, "end_time": 2, "text": "x"}]}
CLIP = {"duration": 3, "timestamps": [[0, 1]], "sentences": ["x"]}


def values_of(*names):
    with open_rows(list(map(str, names)) if len(names) > 1 else str(names[0])) as source:
        return [(row.number, row.value) for row in source.select(range(source.num_rows)).read()]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("value", "rows"),
    [
        # https://github.com/SpeechColab/GigaSpeech
        ({"dataset": "GigaSpeech", "audios": [AUDIO, AUDIO]}, [AUDIO, AUDIO]),
        # https://cs.stanford.edu/people/ranjaykrishna/densevid
        ({"v_1": CLIP}, [{"video_id": "v_1", "id": "v_1", **CLIP}]),
        # https://www.microsoft.com/en-us/research/publication/msr-vtt
        (
            {
                "info": {},
                "videos": [{"video_id": "v0", "url": "https://host/0"}, {"video_id": "v1"}],
                "sentences": [
                    {"video_id": "v0", "caption": "x", "sen_id": 0},
                    {"video_id": "v0", "caption": "y", "sen_id": 1},
                ],
            },
            [
                {
                    "video": "v0.mp4",
                    "video_id": "v0",
                    "url": "https://host/0",
                    "captions": ["x", "y"],
                },
                {"video": "v1.mp4", "video_id": "v1"},
            ],
        ),
        # http://youcook2.eecs.umich.edu and http://activity-net.org
        (
            {
                "version": "1",
                "taxonomy": [{"nodeName": "x"}],
                "database": {
                    "v0": {
                        "video_url": "https://www.youtube.com/watch?v=v0",
                        "annotations": [{"segment": [1, 2], "sentence": "x"}],
                    },
                    "v1": {"annotations": [{"segment": [1, 2], "label": "y"}]},
                },
            },
            [
                {
                    "video_id": "v0",
                    "id": "v0",
                    "url": "https://www.youtube.com/watch?v=v0",
                    "annotations": [{"segment": [1, 2], "sentence": "x"}],
                },
                {
                    "video_id": "v1",
                    "id": "v1",
                    "annotations": [{"segment": [1, 2], "label": "y"}],
                },
            ],
        ),
        # https://www.cs.rice.edu/~vo9/sbucaptions
        (
            {"image_urls": ["https://h/1.jpg", "https://h/2.jpg"], "captions": ["x", "y"]},
            [
                {"image_urls": "https://h/1.jpg", "captions": "x"},
                {"image_urls": "https://h/2.jpg", "captions": "y"},
            ],
        ),
        # what `DataFrame.to_json` writes
        (
            {"image": {"0": "a.jpg", "7": "b.jpg"}, "text": {"0": "x", "7": None}},
            [{"image": "a.jpg", "text": "x"}, {"image": "b.jpg", "text": None}],
        ),
        # one document, and no columns
        (
            {"images": ["a.jpg", None], "texts": [None, "x"]},
            [{"images": ["a.jpg", None], "texts": [None, "x"]}],
        ),
        ({"images": ["a.jpg"], "captions": ["x"]}, [{"images": ["a.jpg"], "captions": ["x"]}]),
        (
            {"image": ["a.jpg", "b.jpg"], "captions": ["x", "y", "z"]},
            [{"image": ["a.jpg", "b.jpg"], "captions": ["x", "y", "z"]}],
        ),
        ({"data": [{"image": "a.jpg", "text": "x"}]}, [{"image": "a.jpg", "text": "x"}]),
        (
            {"a": {"file": "a.jpg", "words": "x"}, "b": {"file": "b.jpg", "words": "y"}},
            [
                {"id": "a", "file": "a.jpg", "words": "x"},
                {"id": "b", "file": "b.jpg", "words": "y"},
            ],
        ),
        (
            {"a.jpg": ["x", "y"], "b.PNG": "z", "c.mp4": 5},
            [
                {"image": "a.jpg", "captions": ["x", "y"]},
                {"image": "b.PNG", "captions": "z"},
                {"video": "c.mp4", "captions": 5},
            ],
        ),
        ({"a.jpg": 1, "b.jpg": 2}, [{"a.jpg": 1, "b.jpg": 2}]),
        ({"a": {"x": 1}, "b": {"y": 2}}, [{"a": {"x": 1}, "b": {"y": 2}}]),
        ({"text": "one row"}, [{"text": "one row"}]),
        ({"a": 1, "b": [2]}, [{"a": 1, "b": [2]}]),
    ],
)
def test_rows_inside_an_object_are_rows(tmp_path, value, rows, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(value, indent=indent))
    assert values_of(path) == list(enumerate(rows, 1))


def test_a_conversation_alone_in_its_file_is_one_row(tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert values_of(tmp_path / "rows.jsonl") == [(1, row)]


def test_transcripts_of_librispeech_name_the_sound_beside_them(tmp_path):
    """https://www.openslr.org/12"""
    folder = tmp_path / "84" / "121123"
    folder.mkdir(parents=True)
    path = folder / "84-121123.trans.txt"
    path.write_text("84-121123-0000 GO DO YOU HEAR\n84-121123-0001 YES, HE'S\n")
    (_, first), _ = values_of(path)
    assert first == {
        "id": "84-121123-0000",
        "audio": "84-121123-0000.flac",
        "text": "GO DO YOU HEAR",
    }
    (_, first), _ = values_of(f"{tmp_path}/**/*.trans.txt")
    assert first["audio"] == "84/121123/84-121123-0000.flac"
    assert draft_of(first).texts == ("GO DO YOU HEAR",)
    (folder / "84-121123-0000.flac").write_bytes(b"fLaC" + bytes(60))
    report = mm.convert(
        f"{tmp_path}/**/*.trans.txt",
        tmp_path / "out",
        media_root=tmp_path,
        max_rejects=1.0,
        media=mm.MediaOptions(check="none"),
        progress=False,
    )
    assert (report.num_samples, report.num_rejects) == (1, 1)


def test_sentences_of_no_video_are_a_reject(tmp_path):
    path = tmp_path / "rows.json"
    lists = {"videos": [{"video_id": 1}], "sentences": [{"video_id": 2, "caption": "x"}]}
    path.write_text(json.dumps(lists))
    _, (_, lost) = values_of(path)
    assert str(lost) == "sentences: video_id 2: no video has this id"


def test_each_entry_of_a_video_has_its_sentences_and_those_without_a_caption_are_left_out(tmp_path):
    videos = [{"video_id": "v0", "start": 0}, {"video_id": "v0", "start": 9}]
    sentences = [{"video_id": "v0", "caption": caption} for caption in ("x", None, "y")]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"videos": videos, "sentences": sentences}))
    assert [value["captions"] for _, value in values_of(path)] == [["x", "y"]] * 2


@pytest.mark.parametrize("line", ["utt_001|spk1|hello|en", "utt_001|hello", "utt_001|hello| "])
def test_lines_that_have_not_the_three_columns_of_ljspeech_are_no_transcripts(line):
    assert is_transcripts(b"utt_001|hello|hello\n")
    assert not is_transcripts(f"{line}\n".encode())


def test_transcripts_of_ljspeech_name_the_sound_in_the_folder_wavs(tmp_path):
    """https://keithito.com/LJ-Speech-Dataset; a quote is part of the text"""
    lines = ['LJ001-0001|In "1440, he|In "fourteen forty, he', "LJ001-0002||x"]
    path = tmp_path / "metadata.csv"
    path.write_text("\n".join([*lines, ""]))
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs" / "LJ001-0001.wav").write_bytes(b"RIFF")
    for rows in (path, tmp_path):
        assert values_of(rows)[0] == (
            1,
            {
                "id": "LJ001-0001",
                "audio": "wavs/LJ001-0001.wav",
                "text": 'In "fourteen forty, he',
                "raw_text": 'In "1440, he',
            },
        )


def test_a_line_of_transcripts_without_a_text_is_a_reject(tmp_path):
    path = tmp_path / "x.trans.txt"
    path.write_text("84-1-0000 GO\n" * 6000 + "84-1-0001\n")
    number, value = values_of(path)[-1]
    assert number == 6001
    assert isinstance(value, RowError)


def test_a_row_of_python_with_half_a_character_is_a_reject(tmp_path):
    with open_rows([{"text": "\ud800"}, {"text": "x"}]) as source:
        (first, second) = (row.value for row in source.select(range(2)).read())
    assert isinstance(first, RowError)
    assert "no Unicode: surrogates not allowed" in str(first)
    assert second == {"text": "x"}


def test_columns_are_said_in_the_log(tmp_path, caplog):
    (tmp_path / "rows.json").write_text('{"image": ["a.jpg", "b.jpg"], "text": ["x", "y"]}')
    assert [row for _, row in values_of(tmp_path / "rows.json")] == [
        {"image": "a.jpg", "text": "x"},
        {"image": "b.jpg", "text": "y"},
    ]
    assert "is read as columns: 2 rows of image, text" in caplog.text


def test_segments_of_a_database_are_spans_of_its_video(tmp_path):
    row = {"annotations": [{"segment": [41, 54.5], "id": 0, "sentence": "cut it"}], "duration": 60}
    (tmp_path / "rows.json").write_text(json.dumps({"database": {"v0": row}}))
    [(_, row)] = values_of(tmp_path / "rows.json")
    draft = draft_of(row)
    assert [ref.path for ref in draft.media] == ["v0.mp4"]
    expected = [{"start_s": 41.0, "end_s": 54.5, "text": "cut it", "id": 0}]
    assert draft.content["segments"] == expected


@pytest.mark.parametrize("indent", [None, 1])
def test_a_byte_order_mark_before_an_object_of_rows_is_no_part_of_it(tmp_path, indent):
    value = {"data": [{"image": "a.jpg", "text": "x"}, {"image": "b.jpg", "text": "y"}]}
    (tmp_path / "rows.json").write_text(json.dumps(value, indent=indent), encoding="utf-8-sig")
    assert [row for _, row in values_of(tmp_path / "rows.json")] == value["data"]
