"""Rows whose sound is a member of a tar beside their file: Shar of Lhotse, NeMo's tarred sets."""

from __future__ import annotations

import gzip
import json

import pytest

import mmstream as mm
from mmstream.converting.formats.tarred import with_tar
from tests.helpers.convert_corpus import rejects, write_rows
from tests.helpers.foreign_tars import write_tar
from tests.helpers.media_files import audio_file

FLAC = audio_file("flac", seconds=0.1)


def cut(name, text):
    """A cut as Lhotse 1.33 writes it: the sound of a cut that began later begins at 0."""
    recording = {
        "id": f"r-{name}",
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
        "sampling_rate": 8000,
        "num_samples": 800,
        "duration": 0.1,
        "channel_ids": [0],
    }
    supervision = {
        "id": f"s-{name}",
        "recording_id": f"r-{name}",
        "start": 0.02,
        "duration": 0.05,
        "channel": 0,
        "text": text,
    }
    return {
        "id": name,
        "start": 0,
        "duration": 0.1,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording,
        "type": "MonoCut",
    }


def write_shar(folder, number, names):
    """Write a shard of Shar, with a second field that nobody reads. The last cut has no sound."""
    lines = b"".join(json.dumps(cut(name, f"text {name}")).encode() + b"\n" for name in names)
    (folder / f"cuts.{number:06d}.jsonl.gz").write_bytes(gzip.compress(lines))
    members = []
    for name in names[:-1]:
        members += [(f"{name}.flac", FLAC + name.encode()), (f"{name}.json", b"{}")]
    members += [(f"{names[-1]}.nodata", b""), (f"{names[-1]}.nometa", b"")]
    write_tar(folder / f"recording.{number:06d}.tar", members)
    (folder / f"note.{number:06d}.jsonl.gz").write_bytes(gzip.compress(b'{"cut_id": "a"}\n'))


def converted(rows, tmp_path, **options):
    """Return {text: (sound, json)} of all samples, and the report."""
    media = mm.MediaOptions(check="none")
    report = mm.convert(
        rows, tmp_path / "out", media=media, max_rejects=1.0, progress=False, **options
    )
    samples = {}
    for sample in mm.open_dataset(tmp_path / "out"):
        sound = next(bytes(sample[name]) for name in ("flac", "wav") if name in sample)
        samples[bytes(sample["txt"]).decode()] = (sound, json.loads(bytes(sample["json"])))
    return samples, report


@pytest.mark.parametrize("rows", ["shar", "shar/cuts.*.jsonl.gz"])
def test_a_cut_of_shar_has_its_sound_from_the_tar_of_its_number(tmp_path, rows):
    """https://lhotse.readthedocs.io/en/latest/datasets.html"""
    folder = tmp_path / "shar"
    folder.mkdir()
    write_shar(folder, 0, ["a", "b"])
    write_shar(folder, 7, ["a", "c", "d"])
    samples, report = converted(f"{tmp_path}/{rows}", tmp_path)
    assert report.formats == {"lhotse": 3}
    assert {text: sound for text, (sound, _) in samples.items()} == {
        "text a": FLAC + b"a",
        "text c": FLAC + b"c",
    }
    content = samples["text c"][1]
    assert content["segments"] == [{"start_s": 0.02, "end_s": 0.07, "text": "text c"}]
    assert content["media_paths"] == ["tar://c.*::recording.000007.tar"]
    reason = "tar://b.*::recording.000000.tar: no such member of the tar"
    assert rejects(tmp_path / "out")[2] == reason


def test_a_cut_of_shar_in_a_file_without_a_number_is_a_reject():
    with pytest.raises(mm.MMStreamError, match=r"not named cuts\.NUMBER\.jsonl"):
        with_tar(cut("a", "x"), "all.jsonl")


def test_a_cut_of_shar_without_id_is_a_reject():
    row = {"recording": {"sources": [{"type": "shar", "source": ""}]}}
    with pytest.raises(mm.MMStreamError, match="a cut of Shar without id"):
        with_tar(row, "cuts.000000.jsonl")


NEMO = [
    {"audio_filepath": "a.wav", "duration": 0.1, "text": "one", "shard_id": 0},
    {"audio_filepath": "b.wav", "duration": 0.1, "text": "two", "shard_id": 1, "lang": "en"},
    {
        "audio_filepath": "b-sub1.wav",
        "duration": 0.05,
        "offset": 0.02,
        "text": "part",
        "shard_id": 1,
    },
]


@pytest.mark.parametrize("rows", ["", "/tarred_audio_manifest.json", "/sharded_manifests/*.json"])
def test_a_row_of_a_tarred_manifest_has_its_sound_from_the_tar_of_its_shard(tmp_path, rows):
    """https://docs.nvidia.com/nemo/speech/latest/asr/datasets.html"""
    folder = tmp_path / "nemo"
    (folder / "sharded_manifests").mkdir(parents=True)
    sounds = [audio_file("wav", seconds=0.1, sample_rate=rate) for rate in (8000, 16000)]
    for shard, name in enumerate("ab"):
        write_tar(folder / f"audio_{shard}.tar", [(f"{name}.wav", sounds[shard])])
        manifest = folder / "sharded_manifests" / f"manifest_{shard}.json"
        write_rows(manifest, [row for row in NEMO if row["shard_id"] == shard])
    write_rows(folder / "tarred_audio_manifest.json", NEMO)
    samples, report = converted(f"{folder}{rows}", tmp_path, media_root=folder)
    assert (report.num_rows, report.num_samples) == (3, 3)
    assert report.formats == {"speech": 2, "spans": 1}
    assert report.unread_keys == {}
    assert [samples[text][0] for text in ("one", "two", "part")] == [*sounds, sounds[1]]
    assert samples["two"][1]["lang"] == "en"
    assert samples["part"][1]["segments"] == [{"start_s": 0.02, "end_s": 0.07, "text": "part"}]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x"},
        {"audio_filepath": "s3://bucket/a.wav", "text": "x", "shard_id": 0},
        {"audio_filepath": "a.wav", "text": "x", "shard_id": None},
        {"audio_filepath": None, "shard_id": 0},
        {"recording": {"sources": [{"type": "file", "source": "a.wav"}]}},
        {"recording": {"sources": "shar"}},
        {"recording": "a.wav"},
    ],
)
def test_other_rows_stay_as_they_are(row):
    assert with_tar(row, "rows.jsonl") is row
