"""Ways from an audio file to samples and features: ``python -m tools.bench.audio --peers``.

Every way decodes the same files, in interleaved rounds, on one thread. The table has medians of
files/s by CPU time, so that a busy machine matters less. Every file is a recording of ``--seconds``
in one format. ``--audio FILE`` measures on another recording than the artificial one.

``--peers`` installs librosa and torchcodec in an environment of their own, and measures them too.
Without it they are measured where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import statistics
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray

import mmstream as mm
from mmstream._torchvision import import_torchvision
from tools.bench.peers.environments import run_again_in

Samples = NDArray[np.float32]
Way = Callable[[bytes], Any]

RATE = 16_000
FORMATS = {
    "wav, 16 kHz": ("wav", 16_000, 1),
    "flac, 16 kHz": ("flac", 16_000, 1),
    "mp3, 16 kHz": ("mp3", 16_000, 1),
    "ogg, 16 kHz": ("ogg", 16_000, 1),
    "wav, 44.1 kHz stereo": ("wav", 44_100, 2),
    "flac, 44.1 kHz stereo": ("flac", 44_100, 2),
    "mp3, 44.1 kHz stereo": ("mp3", 44_100, 2),
    "ogg, 44.1 kHz stereo": ("ogg", 44_100, 2),
    "opus, 48 kHz": ("opus", 48_000, 1),
    "m4a, 44.1 kHz stereo": ("m4a", 44_100, 2),
}
"""Title -> extension, samples per second, channels."""
_CODECS = {
    "wav": ("wav", "pcm_s16le", "s16"),
    "flac": ("flac", "flac", "s16"),
    "mp3": ("mp3", "libmp3lame", "fltp"),
    "opus": ("ogg", "libopus", "flt"),
    "m4a": ("mp4", "aac", "fltp"),
}
"""Extension -> FFmpeg's format, codec and type of sample."""


def main() -> None:
    """Measure all ways on all formats, then features."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--audio", type=Path, help="a recording, instead of an artificial one")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--peers", action="store_true", help="measure librosa and torchcodec too")
    options = parser.parse_args()
    if options.peers:
        arguments = [argument for argument in sys.argv[1:] if argument != "--peers"]
        run_again_in("media", "tools.bench.audio", arguments)
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    source = None if options.audio is None else options.audio.read_bytes()
    print(f"files/s of recordings of {options.seconds:g} s -> 16 kHz mono float32; one thread")
    for title, (extension, rate, num_channels) in FORMATS.items():
        samples = recording(source, options.seconds, rate, num_channels)
        report(title, encoded(samples, rate, extension), decoding_ways(extension), rounds)
    print("\nrecordings/s -> log-mel features of Whisper; one thread")
    for seconds in (5.0, 15.0, 30.0):
        for num_mels in (80, 128):
            samples = recording(source, seconds, RATE, 1)
            ways = feature_ways(samples[:, 0], num_mels)
            report(f"{seconds:g} s, {num_mels} mels", b"", ways, rounds)


def recording(source: bytes | None, seconds: float, rate: int, num_channels: int) -> Samples:
    """Return samples [T, num_channels], of a file or of noise that swells as syllables do."""
    num_samples = round(seconds * rate)
    if source is None:
        rng = np.random.default_rng(0)
        time_s = np.arange(num_samples)[:, None] / rate
        noise = rng.standard_normal((num_samples, num_channels)).cumsum(axis=0)
        noise -= soxr.resample(soxr.resample(noise, rate, 200), 200, rate)[:num_samples]
        swell = np.sin(2 * np.pi * 2 * time_s) ** 2
        artificial: Samples = (0.3 * noise / np.abs(noise).max() * swell).astype(np.float32)
        return artificial
    decoder = mm.AudioDecoder(sample_rate=rate, channels=num_channels)
    samples = np.atleast_2d(decoder(source)).T
    return np.resize(samples, (num_samples, num_channels))


def encoded(samples: Samples, rate: int, extension: str) -> bytes:
    """Return a file with these samples."""
    file = io.BytesIO()
    if extension == "ogg":
        with soundfile.SoundFile(file, "w", rate, samples.shape[1], "VORBIS", None, "OGG") as ogg:
            for start in range(0, len(samples), 4096):  # libsndfile crashes on long pieces
                ogg.write(samples[start : start + 4096])
        return file.getvalue()
    container_format, codec, sample_type = _CODECS[extension]
    layout = "mono" if samples.shape[1] == 1 else "stereo"
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout, format=sample_type)
        assert isinstance(stream, av.AudioStream)
        resampler = av.AudioResampler(sample_type, layout, rate)
        for start in range(0, len(samples), 4096):
            piece = np.ascontiguousarray(samples[start : start + 4096].T)
            frame = av.AudioFrame.from_ndarray(piece, "fltp", layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            for resampled in resampler.resample(frame):
                container.mux(stream.encode(resampled))
        container.mux(stream.encode(None))
    return file.getvalue()


def decoding_ways(extension: str) -> dict[str, Way]:
    """Return the ways by name. The first is the bare library that reads this format fastest."""
    decoder = mm.AudioDecoder()
    by_soundfile = {"soundfile + soxr": with_soundfile}
    by_pyav = {"PyAV + soxr": with_pyav}
    readers = {"opus": {**by_pyav, **by_soundfile}, "m4a": by_pyav}
    ways: dict[str, Way] = dict(readers.get(extension, {**by_soundfile, **by_pyav}))
    if is_installed("librosa") and extension != "m4a":
        import librosa

        ways["librosa.load"] = lambda data: librosa.load(io.BytesIO(data), sr=RATE)
    if is_installed("torchcodec"):
        from torchcodec.decoders import AudioDecoder

        ways["torchcodec"] = lambda data: AudioDecoder(
            data, sample_rate=RATE, num_channels=1
        ).get_all_samples()
    return {**ways, "mm.AudioDecoder": decoder}


def with_soundfile(data: bytes) -> Samples:
    """Decode with soundfile, mix with NumPy and resample with soxr."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    resampled: Samples = soxr.resample(samples.mean(axis=1), rate, RATE)
    return resampled


def with_pyav(data: bytes) -> Samples:
    """Decode with PyAV, mix with NumPy and resample with soxr."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        num_channels, rate = stream.codec_context.channels, stream.codec_context.sample_rate
        pieces = [
            frame.to_ndarray()
            if frame.format.is_planar
            else frame.to_ndarray().reshape(-1, num_channels).T
            for frame in container.decode(stream)
        ]
    samples: Any = np.concatenate(pieces, axis=1)
    if samples.dtype == np.int16:
        samples = samples / np.float32(2**15)
    resampled: Samples = soxr.resample(samples.mean(axis=0), rate, RATE)
    return resampled


def feature_ways(samples: Samples, num_mels: int) -> dict[str, Way]:
    """Return the ways to features by name, the extractor of transformers first."""
    ways: dict[str, Way] = {}
    if is_installed("transformers"):
        import_torchvision()
        from transformers import WhisperFeatureExtractor

        extractor = WhisperFeatureExtractor(feature_size=num_mels)
        ways["WhisperFeatureExtractor"] = lambda _: extractor(
            samples, sampling_rate=RATE, return_tensors="pt"
        )
    features, tensor = mm.WhisperFeatures(num_mels=num_mels), torch.from_numpy(samples)
    return {**ways, "mm.WhisperFeatures": lambda _: features(tensor)}


def is_installed(name: str) -> bool:
    """Tell whether a module can be imported."""
    return importlib.util.find_spec(name) is not None


def report(title: str, data: bytes, ways: dict[str, Way], rounds: int) -> None:
    """Time every way in interleaved rounds and print a line for each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            for _ in range(4):
                way(data)
            if number:  # the first round warms up
                seconds[name].append((time.process_time() - start) / 4)
    print(f"\n{title}" + (f", {len(data) / 1024:,.0f} KiB" if data else ""))
    ours = statistics.median(list(seconds.values())[-1])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"  {name:28} {1 / median:8,.0f}   ours is {median / ours:5.2f} x as fast")


if __name__ == "__main__":
    main()
