"""Rows of speech corpora, as they are published, become batches of samples and features."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import mmstream as mm
from mmstream.converting.formats.formats import with_tar
from mmstream.types import Batch
from tests.helpers.convert_corpus import rejects, write_rows
from tests.helpers.foreign_tars import write_tar
from tests.helpers.media_files import audio_file
from tests.helpers.paths import ROOT

TEXTS = ("ZERO", "ONE TWO", "THREE")
SECONDS = (0.5, 0.8, 0.65)
DIGITS = ROOT.parent / "shared" / "data" / "fsdd" / "recordings"


class Rows(NamedTuple):
    """What is converted, and the seconds that each text takes."""

    rows: str
    media_root: str | None
    seconds: dict[str, float]


def librispeech(folder: Path) -> Rows:
    chapter = folder / "dev-clean" / "84" / "121123"
    chapter.mkdir(parents=True)
    lines = []
    for number, (text, seconds) in enumerate(zip(TEXTS, SECONDS, strict=True)):
        name = f"84-121123-{number:04d}"
        (chapter / f"{name}.flac").write_bytes(audio_file("flac", seconds=seconds))
        lines.append(f"{name} {text}\n")
    (chapter / "84-121123.trans.txt").write_text("".join(lines))
    return Rows(f"{folder}/dev-clean/**/*.trans.txt", None, dict(zip(TEXTS, SECONDS, strict=True)))


def common_voice(folder: Path) -> Rows:
    clips = folder / "clips"
    clips.mkdir()
    lines = ["client_id\tpath\tsentence\tup_votes\n"]
    for number, (text, seconds) in enumerate(zip(TEXTS, SECONDS, strict=True)):
        data = audio_file("mp3", seconds=seconds, sample_rate=32_000)
        (clips / f"common_voice_en_{number}.mp3").write_bytes(data)
        lines.append(f"abc\tcommon_voice_en_{number}.mp3\t{text}\t2\n")
    (folder / "train.tsv").write_text("".join(lines))
    return Rows(f"{folder}/train.tsv", str(clips), dict(zip(TEXTS, SECONDS, strict=True)))


def nemo(folder: Path) -> Rows:
    """Two rows are parts of one long file."""
    (folder / "long.wav").write_bytes(audio_file("wav", seconds=3.0, sample_rate=8000))
    (folder / "short.wav").write_bytes(audio_file("wav", seconds=0.65, sample_rate=8000))
    rows = [
        {"audio_filepath": "long.wav", "offset": 1.0, "duration": 0.5, "text": "ZERO"},
        {"audio_filepath": "long.wav", "offset": 2.0, "duration": 0.8, "text": "ONE TWO"},
        {"audio_filepath": "short.wav", "duration": 0.65, "text": "THREE"},
    ]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Rows(f"{folder}/manifest.jsonl", str(folder), dict(zip(TEXTS, SECONDS, strict=True)))


def digits(folder: Path) -> Rows:
    """Real recordings at 8 kHz."""
    import soundfile

    files = sorted(DIGITS.glob("*_jackson_0.wav"))
    if not files:
        pytest.skip("needs the recordings of shared/data/fsdd")
    rows = [{"audio": file.name, "text": f"digit {file.name[0]}"} for file in files]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = {row["text"]: soundfile.info(f).duration for row, f in zip(rows, files, strict=True)}
    return Rows(f"{folder}/digits.jsonl", str(DIGITS), seconds)


def first_batch(url: str, decoder: mm.AudioDecoder, num_rows: int) -> Batch:
    pipeline = mm.Pipeline(
        mm.open_dataset(url),
        global_batch_size=num_rows,
        before=(mm.one_segment,),
        decode=mm.Decode(audio=decoder),
    )
    return next(iter(mm.Loader(pipeline)))


@pytest.mark.parametrize("corpus", [librispeech, common_voice, nemo, digits])
def test_rows_of_speech_become_batches(corpus: Callable[[Path], Rows], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    rows, media_root, seconds = corpus(tmp_path / "corpus")
    report = mm.convert(rows, f"{tmp_path}/shards", media_root=media_root, progress=False)
    assert report.num_rejects == 0
    num_rows = report.num_samples
    batch = first_batch(f"{tmp_path}/shards", mm.AudioDecoder(), num_rows)
    texts = [row["captions"][0] if "captions" in row else row["text"] for row in batch["json"]]
    assert batch["audio_row"].tolist() == list(range(num_rows))
    assert set(texts) == set(seconds)
    for text, length, samples in zip(texts, batch["audio_length"], batch["audio"], strict=True):
        assert int(length) == pytest.approx(seconds[text] * 16_000, abs=2)
        assert np.abs(samples[: int(length)].numpy()).max() > 0.05
        assert not samples[int(length) :].any()
    features = first_batch(
        f"{tmp_path}/shards", mm.AudioDecoder(features=mm.WhisperFeatures()), num_rows
    )
    assert features["audio_features"].shape == (num_rows, 80, 3000)
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
