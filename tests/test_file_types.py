"""What the converter stores as audio or video, the decoders open."""

from __future__ import annotations

import pytest

from mmstream.media_types import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, container_format, sniff_file
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file


@pytest.mark.parametrize(("kinds", "make"), [(AUDIO_KINDS, audio_file), (VIDEO_KINDS, video_file)])
def test_a_container_that_is_stored_is_decoded_under_its_extension(kinds, make):
    extensions = {"audio": AUDIO_EXTENSIONS, "video": VIDEO_EXTENSIONS}
    for kind in kinds:
        stored = sniff_file(make(kind))
        assert stored.extension in extensions[stored.kind]
        assert container_format(make(kind)) is not None
