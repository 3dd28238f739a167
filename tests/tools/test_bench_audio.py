"""The audio benchmark: its files hold what it says, and its ways give the same samples."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tools.bench import audio as bench_audio
from tools.bench import video as bench_video
from tools.bench.peers import environments


@pytest.mark.parametrize("title", bench_audio.FORMATS)
def test_every_way_decodes_the_files_of_the_benchmark(title: str) -> None:
    extension, rate, num_channels = bench_audio.FORMATS[title]
    samples = bench_audio.recording(None, 0.5, rate, num_channels)
    assert samples.shape == (rate // 2, num_channels)
    data = bench_audio.encoded(samples, rate, extension)
    ways = bench_audio.decoding_ways(extension)
    expected = ways["mm.AudioDecoder"](data)
    assert abs(len(expected) - 8000) < 400
    for name in ("PyAV + soxr", "soundfile + soxr"):
        if name in ways and (extension, name) != ("opus", "soundfile + soxr"):
            samples = ways[name](data)
            length = min(len(samples), len(expected)) - 100  # FFmpeg ends a short Vorbis early
            assert length > 7500
            np.testing.assert_allclose(samples[:length], expected[:length], atol=1e-5)


def test_a_report_names_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    samples = bench_audio.recording(None, 0.5, 16_000, 1)
    bench_audio.report("half a second", b"", bench_audio.feature_ways(samples[:, 0], 80), rounds=1)
    lines = capsys.readouterr().out.split("\n")
    assert lines[1] == "half a second"
    assert [line.split()[0] for line in lines[2:4]] == [
        "WhisperFeatureExtractor",
        "mm.WhisperFeatures",
    ]


@pytest.mark.parametrize("bench", [bench_audio, bench_video])
def test_other_libraries_are_measured_in_an_environment_of_their_own(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(python: str, command: list[str], variables: dict[str, str]) -> None:
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(environments, "peer_python", lambda name: Path("/peers", name))
    monkeypatch.setattr(os, "execve", run)
    monkeypatch.setattr("sys.argv", ["bench.py", "--peers", "--quick"])
    with pytest.raises(SystemExit):
        bench.main()
    assert commands == [["/peers/media", "-m", bench.__name__, "--quick"]]
