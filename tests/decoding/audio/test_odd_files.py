"""Recordings whose headers say too little, too much, or the wrong thing: no sample is lost."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

import mmstream as mm
from mmstream.decoding.audio.headers import mp3_tells_length
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.facts import media_facts
from tests.helpers.media_files import audio_file, tone

NATIVE = mm.AudioDecoder(sample_rate=None, channels=None)
FRAME = 576
"""Samples of a frame of MP3 at 16 kHz."""


def encoded(
    container: str,
    codec: str,
    samples: NDArray[np.float32],
    layout: str = "mono",
    bit_rate: int | None = None,
    **options: str,
) -> bytes:
    """Return a recording at 16 kHz with samples [C, T]."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options={"fflags": "+bitexact", **options}) as out:
        stream = out.add_stream(codec, rate=16_000, layout=layout)
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        resampler = av.AudioResampler(stream.format, layout, 16_000, stream.frame_size or None)
        frame = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate = 16_000
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


def mp3(bit_rate: int, seconds: float = 1.0, **options: str) -> bytes:
    """Return an MP3 without tags, of one bit rate."""
    settings = {"id3v2_version": "0", "write_xing": "0", **options}
    return encoded("mp3", "libmp3lame", tone(seconds), bit_rate=bit_rate, **settings)


def ogg_vorbis(samples: NDArray[np.float32]) -> bytes:
    """Return an Ogg Vorbis with samples [C, T]. Its channels keep their order."""
    file = io.BytesIO()
    soundfile.write(file, samples.T, 16_000, format="OGG", subtype="VORBIS")
    return file.getvalue()


def test_an_mp3_of_variable_bit_rate_without_a_header_keeps_its_end() -> None:
    slow, fast = mp3(32_000), mp3(128_000)
    num_samples = NATIVE(slow).shape[1] + NATIVE(fast).shape[1]
    for joined in (slow + fast, fast + slow):
        assert abs(NATIVE(joined).shape[1] - num_samples) < FRAME
        assert NATIVE.plan(joined).shape.num_samples == NATIVE(joined).shape[1]
    late = NATIVE(fast + slow, span=(1.0, 2.0))
    np.testing.assert_array_equal(late, NATIVE(fast + slow)[:, 16_000:32_000])


def test_plain_aac_is_not_taken_for_truncated_where_its_bit_rate_falls() -> None:
    slow, fast = (encoded("adts", "aac", tone(3.0), bit_rate=rate) for rate in (16_000, 96_000))
    samples = NATIVE(slow + fast)
    assert samples.shape[1] == NATIVE(slow).shape[1] + NATIVE(fast).shape[1]
    assert NATIVE(fast + slow).shape == samples.shape


def test_joined_mp3s_are_all_heard_though_the_first_header_knows_only_the_first() -> None:
    first, second = mp3(64_000, write_xing="1"), mp3(64_000, 0.5, write_xing="1")
    assert NATIVE(first).shape[1] == 16_000
    assert NATIVE(first + second).shape[1] > 24_000
    with pytest.raises(mm.DecodeError, match="damaged mp3"):  # with a tag in the middle
        NATIVE(first + mp3(64_000, id3v2_version="4", write_xing="1"))


@pytest.mark.parametrize("tag", [b"", b"TAG" + bytes(125), b"APETAGEX" + bytes(5000)])
def test_an_mp3_with_a_header_or_one_bit_rate_is_left_to_the_fast_library(tag: bytes) -> None:
    assert mp3_tells_length(mp3(64_000) + tag)
    assert mp3_tells_length(mp3(64_000, write_xing="1") + tag)
    assert mp3_tells_length(mp3(64_000, write_xing="1", id3v2_version="4") + tag)
    assert not mp3_tells_length(mp3(64_000) + mp3(32_000) + tag)
    assert mp3_tells_length(tag)  # no frame: the library says what is wrong


def test_joined_ogg_files_are_all_heard() -> None:
    first, second = ogg_vorbis(tone(1.0)), ogg_vorbis(tone(0.5, hertz=200))
    samples = NATIVE(first + second)
    assert abs(samples.shape[1] - 24_000) < 512  # FFmpeg does not trim where they meet
    np.testing.assert_allclose(samples[:, :15_000], NATIVE(first)[:, :15_000], atol=1e-3)


def test_an_opus_that_was_cut_without_encoding_keeps_its_end() -> None:
    """FFmpeg writes pages that count from the cut, and the packets before it."""
    whole, cut = audio_file("opus"), io.BytesIO()
    with (
        av.open(io.BytesIO(whole)) as source,
        av.open(cut, "w", format="ogg", options={"fflags": "+bitexact"}) as out,
    ):
        stream = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                packet.pts, packet.dts = packet.pts - 24_000, packet.dts - 24_000
                out.mux(packet)
    samples = NATIVE(cut.getvalue())
    assert 0 <= samples.shape[1] - 48_000 < 960
    np.testing.assert_array_equal(samples[:, :48_000], NATIVE(whole))


def test_a_matroska_that_begins_late_is_whole() -> None:
    whole, late = audio_file("opus"), io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(late, "w", format="matroska") as out:
        stream = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                packet.pts, packet.dts = packet.pts + 144_000, packet.dts + 144_000
                out.mux(packet)
    samples = NATIVE(late.getvalue())
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
    with av.open(file, "w", format="matroska") as out:
        for rate, layout in ((48_000, "stereo"), (16_000, "mono")):
            stream = out.add_stream("pcm_s16le", rate=rate, layout=layout)
            is_default = layout == "mono"
            stream.disposition = av.stream.Disposition.default if is_default else 0
        for stream, (rate, layout) in zip(
            out.streams.audio, ((48_000, "stereo"), (16_000, "mono")), strict=True
        ):
            silence = np.zeros((1, rate * (2 if layout == "stereo" else 1)), np.int16)
            frame = av.AudioFrame.from_ndarray(silence, format="s16", layout=layout)
            frame.sample_rate = rate
            out.mux(stream.encode(frame))
            out.mux(stream.encode())
    plan = NATIVE.plan(file.getvalue())
    facts = media_facts(file.getvalue(), "audio", Deadline.start(60))
    assert (facts["sample_rate"], facts["num_channels"]) == (plan.source_rate, plan.num_channels)
    assert plan.source_rate == 16_000
