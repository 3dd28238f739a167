"""What a timeline makes of packets that no decoder shows."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import mmstream as mm
from mmstream.media.limits import Deadline
from mmstream.media.timeline import Timeline, demuxed_timeline, without_undecodable_start
from tests.helpers.media_files import video_file


def timeline(pts: list[int], keys: list[int], shown: list[bool] | None = None) -> Timeline:
    is_key = np.zeros(len(pts), bool)
    is_key[keys] = True
    is_shown = np.array(shown or [True] * len(pts))
    return Timeline(np.array(pts), np.arange(len(pts)), is_key, is_shown, Fraction(1, 10), 1)


def test_frames_in_front_of_the_first_key_are_not_counted() -> None:
    whole = without_undecodable_start(timeline([5, 8, 6, 7, 9], [1]))
    assert whole.display_order.tolist() == [1, 4]
    np.testing.assert_allclose(whole.times_s, [0, 0.1])
    assert whole.duration_s == pytest.approx(0.2)


@pytest.mark.parametrize("keys", [[], [1]])
def test_a_video_without_a_frame_that_is_shown_is_a_bad_one(keys: list[int]) -> None:
    with pytest.raises(mm.errors.DecodeError, match="has no frame"):
        without_undecodable_start(timeline([0, 1, 2], keys, [True, False, False]))


def test_files_that_were_joined_byte_by_byte_are_refused() -> None:
    """Their times start anew. By time, frames of one part would stand between those of another."""
    part = video_file("ts", num_frames=20, b_frames=2)
    assert len(mm.VideoDecoder()(part)) == 20
    with pytest.raises(mm.errors.DecodeError, match=r"jump by -1\.90 s at frame 20,"):
        mm.VideoDecoder()(part + part)


def demuxed(pts: list[int | None], keys: list[int]) -> Timeline:
    """Read the timeline of packets with these times, as PyAV gives them."""
    packets = [
        SimpleNamespace(
            size=1, pts=at, dts=None, is_keyframe=number in keys, is_discard=False, duration=1
        )
        for number, at in enumerate(pts)
    ]
    codec = SimpleNamespace(name="h264", has_b_frames=True)
    stream = SimpleNamespace(codec_context=codec, time_base=Fraction(1, 10))
    return demuxed_timeline(packets, stream, Deadline(), 100)


def test_frames_before_the_first_key_are_left_out_where_a_cut_has_removed_their_times() -> None:
    # ffmpeg -ss -c copy writes such Matroska files from videos with open groups of pictures.
    cut = demuxed([0, None, None, None, 4, 2, 1, 3], [0])
    assert cut.display_order.tolist() == [0, 6, 5, 7, 4]
    np.testing.assert_allclose(cut.times_s, [0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("pts", [[None, 0, 1], [0, 1, None], [0, 4, None, 2]])
def test_packets_without_times_are_refused_elsewhere(pts: list[int | None]) -> None:
    with pytest.raises(mm.errors.DecodeError, match="its packets have no times"):
        demuxed(pts, [0])
