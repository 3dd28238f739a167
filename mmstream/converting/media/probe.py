"""Facts about audio and video files, for the converter.

check -> PROBE
"""

from __future__ import annotations

from mmstream.converting.draft import RowError
from mmstream.decoding.ffmpeg.deadline import Deadline
from mmstream.decoding.ffmpeg.facts import Facts, media_facts
from mmstream.decoding.ffmpeg.open import MediaKind
from mmstream.errors import DecodeError

__all__ = ["DECODE_TIMEOUT_S", "Facts", "probe"]

DECODE_TIMEOUT_S = 300.0
"""Seconds that reading or decoding a file may take. A busy machine must not reject a file."""


def probe(data: bytes, kind: MediaKind, decode: bool) -> Facts:
    """Return the facts about an audio or video file, as `media_facts` does.

    Raises:
        RowError: It cannot be opened or decoded, has no stream of its kind, or ends too early.
    """
    try:
        return media_facts(data, kind, Deadline.start(DECODE_TIMEOUT_S), decode=decode)
    except DecodeError as error:
        raise RowError(str(error)) from None
