"""Rows of speech corpora, as they are published, become batches of samples and features."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import mmstream as mm
from mmstream.types import Batch
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
