"""What a function of lengths returns where a medium takes more than equal tokens in the text.

Place in the flow: `video_lengths` and `audio_lengths` make it. `placeholders` puts it into the text
before it is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MediaText(NamedTuple):
    """A text that takes the place of a medium's token, such as one with times between the frames.

    Examples:
        Two moments of a video, of which each takes 6 tokens:

        >>> marked = "<|vision_start|><|video_pad|><|vision_end|>"
        >>> media = MediaText(f"<0.2 seconds>{marked}<1.2 seconds>{marked}", lengths=(6, 6))
        >>> media.text.count("<|video_pad|>") == len(media.lengths)
        True
    """

    text: str
    """The text, with the medium's own token once for each entry of `lengths`."""
    lengths: Sequence[int]
    """How many tokens each of these becomes, from 1 up."""
    audio_lengths: Sequence[int] = ()
    """Of a video whose sound stands between its frames: how many tokens each token of audio in the
    text becomes. The text then has no other place for that sound."""
