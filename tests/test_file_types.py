"""Three modules tell what a file is by its first bytes. They agree on files of all containers.

The converter stores a file under a type, the decoders open only formats that they know, and samples
show themselves by a label. A type that one of them did not know would be stored and never decoded.
"""

from __future__ import annotations

import pytest

from mmstream.converting.media.types import sniff_file
from mmstream.decoding.ffmpeg.sniff import container_format
from mmstream.decoding.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS
from mmstream.display.file_kinds import file_kind
from tests.helpers.media_files import AUDIO_KINDS, VIDEO_KINDS, audio_file, video_file

MAKERS = dict.fromkeys(VIDEO_KINDS, video_file) | dict.fromkeys(AUDIO_KINDS, audio_file)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_container_has_one_type_to_convert_decode_and_show(kind: str) -> None:
    data = MAKERS[kind](kind)
    stored = sniff_file(data)
    assert stored is not None
    assert container_format(data) is not None, "stored, but never decoded"
    assert stored.extension in (VIDEO_EXTENSIONS if stored.kind == "video" else AUDIO_EXTENSIONS)
    label = file_kind(data).partition(" ")[0].lower()
    assert label in ("", stored.extension)
