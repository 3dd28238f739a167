"""Rows of speech corpora, as they are published, become batches of samples and features."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import mmstream as mm
from mmstream.converting.formats.spans import with_tar
from mmstream.types import Batch
from tests.helpers.convert_corpus import jsonl, rejects, run, write_files, write_rows
from tests.helpers.foreign_tars import write_tar
from tests.helpers.media_files import audio_file

SECONDS = {"ZERO": 0.5, "ONE TWO": 0.8, "THREE": 0.65}
"""What is said in the corpus, and how long it takes."""


def nemo(folder: Path) -> tuple[Path, Path]:
    """Two rows are parts of one long file."""
    long, short = (audio_file("wav", seconds=s, sample_rate=8000) for s in (3.0, 0.65))
    write_files(folder, {"long.wav": long, "short.wav": short})
    rows = [
        {"audio_filepath": "long.wav", "offset": 1.0, "duration": 0.5, "text": "ZERO"},
        {"audio_filepath": "long.wav", "offset": 2.0, "duration": 0.8, "text": "ONE TWO"},
        {"audio_filepath": "short.wav", "duration": 0.65, "text": "THREE"},
    ]
    return write_rows(folder / "manifest.jsonl", rows), folder


def first_batch(folder: Path, decoder: mm.AudioDecoder) -> Batch:
    pipeline = mm.Pipeline(
        mm.open_dataset(folder),
        global_batch_size=3,
        before=(mm.one_segment,),
        decode=mm.Decode(audio=decoder),
    )
    return next(iter(mm.Loader(pipeline)))


def test_rows_of_speech_become_batches(tmp_path: Path) -> None:
    rows, media_root = nemo(tmp_path / "corpus")
    assert run(rows, tmp_path / "shards", media_root=media_root).num_samples == 3
    batch = first_batch(tmp_path / "shards", mm.AudioDecoder())
    texts = [row["captions"][0] if "captions" in row else row["text"] for row in batch["json"]]
    assert batch["audio_row"].tolist() == [0, 1, 2]
    assert set(texts) == set(SECONDS)
    for text, length, samples in zip(texts, batch["audio_length"], batch["audio"], strict=True):
        assert int(length) == pytest.approx(SECONDS[text] * 16_000, abs=2)
        assert np.abs(samples[: int(length)].numpy()).max() > 0.05
        assert not samples[int(length) :].any()
    decoder = mm.AudioDecoder(features=mm.families.whisper.WhisperFeatures())
    features = first_batch(tmp_path / "shards", decoder)
    assert features["audio_features"].shape == (3, 80, 3000)
    frames = [-(-int(length) // 160) for length in batch["audio_length"]]
    assert features["audio_features_length"].tolist() == frames


# -- sound that is a member of a tar beside its file of rows: Shar of Lhotse, tarred sets of NeMo


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
    cuts = gzip.compress(jsonl([cut(name, f"text {name}") for name in names]))
    notes = gzip.compress(b'{"cut_id": "a"}\n')
    files = {f"cuts.{number:06d}.jsonl.gz": cuts, f"note.{number:06d}.jsonl.gz": notes}
    write_files(folder, files)
    members = []
    for name in names[:-1]:
        members += [(f"{name}.flac", FLAC + name.encode()), (f"{name}.json", b"{}")]
    members += [(f"{names[-1]}.nodata", b""), (f"{names[-1]}.nometa", b"")]
    write_tar(folder / f"recording.{number:06d}.tar", members)


def converted(rows, tmp_path, **options):
    """Return {text: (sound, json)} of all samples, and the report."""
    media = mm.MediaOptions(check="none")
    report = run(rows, tmp_path / "out", media=media, max_rejects=1.0, **options)
    samples = {}
    for sample in mm.open_dataset(tmp_path / "out"):
        sound = next(bytes(sample[name]) for name in ("flac", "wav") if name in sample)
        samples[bytes(sample["txt"]).decode()] = (sound, json.loads(bytes(sample["json"])))
    return samples, report


@pytest.mark.parametrize("rows", ["shar", "shar/cuts.*.jsonl.gz"])
def test_a_cut_of_shar_has_its_sound_from_the_tar_of_its_number(tmp_path, rows):
    """https://lhotse.readthedocs.io/en/latest/datasets.html"""
    write_shar(tmp_path / "shar", 0, ["a", "b"])
    write_shar(tmp_path / "shar", 7, ["a", "c", "d"])
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


@pytest.mark.parametrize(
    ("row", "file", "reason"),
    [
        (cut("a", "x"), "all.jsonl", r"not named cuts\.NUMBER\.jsonl"),
        (
            {"recording": {"sources": [{"type": "shar", "source": ""}]}},
            "cuts.000000.jsonl",
            "a cut of Shar without id",
        ),
    ],
)
def test_a_cut_of_shar_whose_sound_cannot_be_named_is_a_reject(row, file, reason):
    with pytest.raises(mm.MMStreamError, match=reason):
        with_tar(row, file)


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
    sounds = [audio_file("wav", seconds=0.1, sample_rate=rate) for rate in (8000, 16000)]
    for shard, name in enumerate("ab"):
        write_tar(folder / f"audio_{shard}.tar", [(f"{name}.wav", sounds[shard])])
        rows_of_shard = jsonl([row for row in NEMO if row["shard_id"] == shard])
        write_files(folder, {f"sharded_manifests/manifest_{shard}.json": rows_of_shard})
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
