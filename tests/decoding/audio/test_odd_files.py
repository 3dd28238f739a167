"""Recordings whose headers say too little, too much, or the wrong thing: no sample is lost."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from functools import partial

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

import mmstream as mm
from mmstream.media.facts import media_facts
from mmstream.media.limits import Deadline
from tests.helpers.media_files import audio_file, num_bytes, read_by_ranges, tone

NATIVE = mm.AudioDecoder(sample_rate=None, channels=None)


def encoded(
    container: str,
    codec: str,
    samples: NDArray[np.float32],
    layout: str = "mono",
    bit_rate: int | None = None,
    rate: int = 16_000,
    **options: str,
) -> bytes:
    """Return a recording with samples [C, T]. Without a bit rate, an MP3 varies its own."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options={"fflags": "+bitexact", **options}) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        elif codec == "libmp3lame":
            stream.options = {"compression_level": "5", "flags": "+qscale", "global_quality": "472"}
        resampler = av.AudioResampler(stream.format, layout, rate, stream.frame_size or None)
        frame = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate = rate
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


def mp3(bit_rate: int | None, seconds: float = 1.0, rate: int = 16_000, **options: str) -> bytes:
    """Return an MP3 without tags. Its first second is loud, and what follows is quiet."""
    settings = {"id3v2_version": "0", "write_xing": "0", **options}
    samples = tone(seconds, sample_rate=rate)
    samples[:, :rate] += np.random.default_rng(0).uniform(-0.3, 0.3, samples[:, :rate].shape)
    return encoded("mp3", "libmp3lame", samples, bit_rate=bit_rate, rate=rate, **settings)


def ogg_vorbis(samples: NDArray[np.float32]) -> bytes:
    """Return an Ogg Vorbis with samples [C, T]. Its channels keep their order."""
    file = io.BytesIO()
    soundfile.write(file, samples.T, 16_000, format="OGG", subtype="VORBIS")
    return file.getvalue()


def test_plain_aac_is_not_taken_for_truncated_where_its_bit_rate_falls() -> None:
    slow, fast = (encoded("adts", "aac", tone(3.0), bit_rate=rate) for rate in (16_000, 96_000))
    samples = NATIVE(slow + fast)
    assert samples.shape[1] == NATIVE(slow).shape[1] + NATIVE(fast).shape[1]
    assert NATIVE(fast + slow).shape == samples.shape


def decoded_by_ffmpeg(data: bytes) -> int:
    with av.open(io.BytesIO(data), format="mp3") as file:
        return sum(frame.samples for frame in file.decode(audio=0))


def lengths(data: bytes) -> set[int]:
    """Return how long an MP3 is: decoded, planned, and for the converter that decodes or not."""
    durations = [
        media_facts(data, "audio", Deadline.start(60), decode=decode) for decode in (False, True)
    ]
    samples = [round(float(facts["duration_s"]) * int(facts["sample_rate"])) for facts in durations]
    return {NATIVE(data).shape[1], NATIVE.plan(data).shape.num_samples, *samples}


RATES = [48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("bit_rate", [32_000, 48_000, None], ids=["32", "48", "variable"])
@pytest.mark.parametrize("xing", ["0", "1"])
def test_the_length_of_an_mp3_is_that_of_its_frames(
    rate: int, bit_rate: int | None, xing: str
) -> None:
    data = mp3(bit_rate, 2.0, rate, write_xing=xing)
    assert lengths(data) == {2 * rate if xing == "1" else decoded_by_ffmpeg(data)}


def id3(num_bytes: int, flags: int = 0) -> bytes:
    """Return a tag of version 2.4 with zeros, and a footer where its flag is set."""
    size = bytes(num_bytes >> shift & 0x7F for shift in (21, 14, 7, 0))
    head = bytes((4, 0, flags)) + size
    return b"ID3" + head + bytes(num_bytes) + (b"3DI" + head if flags & 0x10 else b"")


def ape(num_bytes: int) -> bytes:
    ends = [
        b"APETAGEX" + struct.pack("<IIII", 2000, num_bytes + 32, 0, flags) + bytes(8)
        for flags in (0xA000_0000, 0x8000_0000)
    ]
    return ends[0] + bytes(num_bytes) + ends[1]


CBR = mp3(64_000, 4.0, 44_100)
STARTS = [match.start() for match in re.finditer(rb"\xff\xfb[\x50\x52]\xc4", CBR)]
"""Where its frames start."""
MIDDLE, PADDED = STARTS[60], next(start for start in STARTS[1:] if CBR[start + 2] & 2)
TAGGED = mp3(64_000, 4.0, 44_100, write_xing="1")
FRAMES_AT = TAGGED.index(b"Info") + 8
VBRI = b"VBRI" + struct.pack(">HHHIIHHHH", 1, 0, 75, len(CBR), len(STARTS), 0, 1, 2, 10)
ODD_MP3S = {
    "no frame is padded first": (CBR[PADDED:], len(STARTS) - STARTS.index(PADDED)),
    "tags before": (id3(300) + id3(70_000) + CBR, len(STARTS)),
    "a footer": (id3(300, 0x10) + CBR, len(STARTS)),
    "zeros behind a tag": (id3(300) + bytes(9000) + CBR, len(STARTS)),
    "ID3v1": (CBR + b"TAG" + bytes(125), len(STARTS)),
    "APE and ID3v1": (CBR + ape(90_000) + b"TAG" + bytes(125), len(STARTS)),
    "ID3v2 at the end": (CBR + id3(9000), len(STARTS)),
    "zeros at the end": (CBR + bytes(200_000), len(STARTS)),
    "a page at the end": (CBR + b"<html>" * 2000, len(STARTS)),
    "ones at the end": (CBR + b"\xff" * 5000, len(STARTS)),
    "cut in its last frame": (CBR[:-9], len(STARTS) - 1),
    "junk within": (CBR[:MIDDLE] + b"\xff\xfb" * 400 + CBR[MIDDLE:], len(STARTS)),
    "no tag within": (CBR[:MIDDLE] + b"ID3" + b"\xff" * 20 + CBR[MIDDLE:], len(STARTS)),
    "a tag within": (CBR[:MIDDLE] + id3(90_000) + CBR[MIDDLE:], len(STARTS)),
    "a part of a frame lost": (CBR[: MIDDLE - 99] + CBR[MIDDLE:], len(STARTS) - 1),
    "joined": (CBR + mp3(48_000, 1.0, 44_100), len(STARTS) + 40),
    "joined with headers": (TAGGED + TAGGED, 2 * len(STARTS) + 1 - 1105 / 1152),
    "a header that counts none": (
        TAGGED[:FRAMES_AT] + bytes(4) + TAGGED[FRAMES_AT + 4 :],
        len(STARTS),
    ),
    "a header that counts one": (
        TAGGED[:FRAMES_AT] + b"\0\0\0\1" + TAGGED[FRAMES_AT + 4 :],
        len(STARTS) - 1105 / 1152,
    ),
    "a header without bytes": (
        TAGGED[: FRAMES_AT + 4] + bytes(4) + TAGGED[FRAMES_AT + 8 :],
        (4 * 44_100) / 1152,
    ),
    "VBRI": (CBR[:4] + (bytes(32) + VBRI).ljust(STARTS[1] - 4, b"\0") + CBR, len(STARTS)),
}


@pytest.mark.parametrize("name", ODD_MP3S)
def test_an_mp3_with_odd_bytes_around_its_frames_is_heard_to_its_end(name: str) -> None:
    data, num_frames = ODD_MP3S[name]
    assert lengths(data) == {round(num_frames * 1152)}
    assert NATIVE.plan(read_by_ranges(data)[0]).shape.num_samples == round(num_frames * 1152)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (CBR[:MIDDLE] + bytes(9000) + CBR[MIDDLE:], "9,000 bytes within it are not frames"),
        (CBR + mp3(64_000, 1.0, 48_000), "changes its sample rate"),
        (
            CBR + encoded("mp3", "libmp3lame", tone(1.0, 44_100, 2), "stereo", 64_000, 44_100),
            "number of",
        ),
        (TAGGED[: len(TAGGED) // 2], "its header promises 4.05 s, and it ends after 2.0"),
        (CBR[:100], "damaged mp3"),
        (re.sub(rb"\xff\xfb[\x50\x52]\xc4", b"\xff\xfb\0\xc4", CBR), "damaged mp3"),  # free format
        (id3(300) + b"RIFF" * 5000, "damaged mp3"),
    ],
    ids=["hole", "rate", "channels", "cut", "no frame", "free", "no mp3"],
)
def test_an_mp3_that_lacks_sound_is_refused_everywhere(data: bytes, reason: str) -> None:
    calls: list[Callable[[], object]] = [
        *(lambda: NATIVE(data), lambda: NATIVE.plan(data)),
        *(partial(media_facts, data, "audio", Deadline.start(60), decode=d) for d in (False, True)),
    ]
    for call in calls:
        with pytest.raises(mm.errors.DecodeError, match=reason):
            call()


@pytest.mark.parametrize(
    ("num_frames", "reason"), [(60, "more than its header says"), (2**31, "promises")]
)
def test_an_mp3_whose_header_lies_is_refused_by_the_converter(num_frames: int, reason: str) -> None:
    data = TAGGED[:FRAMES_AT] + num_frames.to_bytes(4) + TAGGED[FRAMES_AT + 4 :]
    with pytest.raises(mm.errors.DecodeError, match=reason):
        media_facts(data, "audio", Deadline.start(60))


def test_of_an_mp3_with_a_header_the_end_is_not_read_for_its_length() -> None:
    data = mp3(64_000, 100.0, write_xing="1")
    file, ranges = read_by_ranges(data)
    assert NATIVE.plan(file).shape.num_samples == 1_600_000
    assert num_bytes(ranges) < len(data) // 3


def test_the_frames_of_hours_are_counted() -> None:
    frames = CBR[: STARTS[60]] * 5000  # of 26 ms
    assert NATIVE.plan(frames, {"start_s": 5.0, "end_s": 6.0}).num_source_samples == 345_600_000


def test_joined_ogg_files_are_all_heard() -> None:
    first, second = ogg_vorbis(tone(1.0)), ogg_vorbis(tone(0.5, hertz=200))
    samples = NATIVE(first + second)
    assert abs(samples.shape[1] - 24_000) < 512  # FFmpeg does not trim where they meet
    np.testing.assert_allclose(samples[:, :15_000], NATIVE(first)[:, :15_000], atol=1e-3)


def remuxed(data: bytes, container: str, delay: int = 0, **options: str) -> bytes:
    """Return the packets of a recording in another file, so many samples later."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", container, options) as out:
        stream = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                packet.pts, packet.dts = packet.pts + delay, packet.dts + delay
                out.mux(packet)
    return file.getvalue()


def test_an_opus_that_was_cut_without_encoding_keeps_its_end() -> None:
    """FFmpeg writes pages that count from the cut, and the packets before it."""
    whole = audio_file("opus")
    samples = NATIVE(remuxed(whole, "ogg", delay=-24_000, fflags="+bitexact"))
    assert 0 <= samples.shape[1] - 48_000 < 960
    np.testing.assert_array_equal(samples[:, :48_000], NATIVE(whole))


def test_an_opus_in_mp4_ends_with_its_last_packet() -> None:
    """As with FFmpeg. A packet has 960 samples, and the last one is filled up by the encoder."""
    whole = audio_file("opus", seconds=1.013)
    mp4 = remuxed(whole, "mp4")
    samples, expected = NATIVE(mp4), NATIVE(whole)
    length = expected.shape[1]
    assert 0 < samples.shape[1] - length < 960
    np.testing.assert_array_equal(samples[:, :length], expected)
    assert NATIVE.plan(mp4).shape.num_samples == samples.shape[1]


def test_a_matroska_that_begins_late_is_whole() -> None:
    whole = audio_file("opus")
    samples = NATIVE(remuxed(whole, "matroska", delay=144_000))
    np.testing.assert_array_equal(samples[:, :48_000], NATIVE(whole))


def test_eight_channels_in_planes_are_decoded() -> None:
    samples = np.concatenate([tone(0.25, hertz=100 * number) for number in range(1, 9)])
    decoded = NATIVE(encoded("matroska", "wavpack", samples, "7.1"))
    np.testing.assert_allclose(decoded, samples, atol=2**-7)  # 8 bits


def test_channels_of_vorbis_have_the_order_of_a_wav() -> None:
    """Vorbis: left, centre, right, back left, back right, bass. WAV: left, right, centre, bass."""
    samples = np.concatenate([tone(0.25, hertz=300 * number) for number in range(1, 7)])
    decoded = NATIVE(ogg_vorbis(samples))
    num_samples = min(decoded.shape[1], samples.shape[1])
    stored = samples[[0, 2, 1, 5, 3, 4], :num_samples]
    for channel, expected in zip(decoded[:, :num_samples], stored, strict=True):
        assert np.corrcoef(channel, expected)[0, 1] > 0.9


def test_facts_of_a_flac_behind_a_tag_are_those_of_the_flac() -> None:
    tagged = b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + audio_file("flac")
    facts = media_facts(tagged, "audio", Deadline.start(60))
    assert (facts["duration_s"], facts["sample_rate"], facts["num_channels"]) == (1.0, 16_000, 1)


def test_facts_are_those_of_the_track_that_is_decoded() -> None:
    file = io.BytesIO()
    tracks = ((48_000, "stereo"), (16_000, "mono"))
    with av.open(file, "w", format="matroska") as out:
        streams = [out.add_stream("pcm_s16le", rate=rate, layout=layout) for rate, layout in tracks]
        streams[0].disposition, streams[1].disposition = 0, av.stream.Disposition.default
        for stream, (rate, layout) in zip(streams, tracks, strict=True):
            silence = np.zeros((1, 2 * rate if layout == "stereo" else rate), np.int16)
            frame = av.AudioFrame.from_ndarray(silence, format="s16", layout=layout)
            frame.sample_rate = rate
            out.mux(stream.encode(frame))
            out.mux(stream.encode())
    facts = media_facts(file.getvalue(), "audio", Deadline.start(60))
    assert (facts["sample_rate"], facts["num_channels"]) == (16_000, 1)
    assert NATIVE.plan(file.getvalue()).shape.sample_rate == 16_000
    assert NATIVE(file.getvalue()).shape[0] == 1
