"""Images, videos and audio of a text that nothing decodes.

Place in the flow: `TextDecoder` asks here before a chat template sees the messages.

A template writes one token for a video, whether or not anyone decodes it. Other templates write
nothing at all. The model would then learn to answer questions about something that it is never
shown. So such a sample is bad, unless the user says what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mmstream.decoding.fields import AUDIO_EXTENSIONS, VIDEO_EXTENSIONS, image_fields
from mmstream.decoding.text.chat import Message, flatten
from mmstream.decoding.text.placeholders import check_fields
from mmstream.errors import DecodeError, escaped

UndecodedParts: TypeAlias = Literal["bad", "drop", "keep"]
"""What happens to media that nothing decodes."""

DECODED = frozenset({"image"})
"""The kinds of media that a text decoder takes for decoded, unless it is told otherwise."""

MEDIA_TOKENS = (
    "<video>",
    "<audio>",
    "<|video_pad|>",
    "<|audio_pad|>",
    "<|VIDEO|>",
    "<|AUDIO|>",
    "<|audio|>",
    "<video_soft_token>",
    "<audio_soft_token>",
)
"""What stands for a video or an audio: in rows that no converter split, and in models."""

_ADVICE = (
    'pass TextDecoder(undecoded_parts="drop") to train without it, or "keep" if your own code '
    "decodes it, or leave such rows out at conversion"
)


@dataclass(frozen=True)
class MediaParts:
    """What a text decoder does with media that nothing decodes.

    Attributes:
        action: "bad": the sample is refused. "drop": the text loses the part. "keep": nothing.
        image_token: The text that stands for an image.
        counts_images: Whether the text must have an image token per image of the sample.
            `Placeholders` checks that later.
        others: Finds what stands for video and audio in a conversation.
        others_or_image: Finds ``<image>`` too.
        special: Finds those tokens that the tokenizer takes for media, for plain text. A text may
            be about anything, such as the ``<video>`` of HTML. None: there are none.
    """

    action: UndecodedParts
    image_token: str
    counts_images: bool
    others: re.Pattern[str]
    others_or_image: re.Pattern[str]
    special: re.Pattern[str] | None

    def of_messages(
        self, messages: list[Message], sample: dict[str, Any], decoded: Collection[str]
    ) -> tuple[list[Message], int]:
        """Look for media that nothing decodes in a conversation.

        Args:
            messages: As `check_messages` returns them.
            sample: Their sample.
            decoded: The kinds of media that are decoded, such as "image".

        Returns:
            The messages for the chat template, and how many parts they have lost.

        Raises:
            DecodeError: A part or a placeholder has no decoder, or no field in the sample.
        """
        if self.action == "keep":
            return messages, 0
        images = image_fields(sample)
        shows_images = self.counts_images or "image" in decoded
        pattern = self.others if images and shows_images else self.others_or_image
        num_dropped = 0
        kept: list[Message] = []
        for message in messages:
            content, num_lost = self._of_content(message["content"], pattern, shows_images)
            kept.append({**message, "content": content} if num_lost else message)
            num_dropped += num_lost
        if not self.counts_images:
            check_fields(kept, images)
            texts = (flatten(message["content"], self.image_token) for message in kept)
            num_shown = sum(text.count(self.image_token) for text in texts)
            if num_shown > len(images):
                raise DecodeError(
                    f"{num_shown} images in the conversation, {len(images)} in the sample"
                )
        return kept, num_dropped

    def of_text(
        self, text: str, sample: Iterable[str], decoded: Collection[str]
    ) -> tuple[str, int]:
        """Look for media that nothing decodes in plain text, and beside it.

        Fields of video and audio count where the text is about media: where it counts images.

        Args:
            text: The text.
            sample: Its sample, or the names of its fields.
            decoded: The kinds of media that are decoded, such as "image".

        Returns:
            The text, and how many parts it has lost.

        Raises:
            DecodeError: There are such media.
        """
        if self.action == "keep":
            return text, 0
        num_dropped = 0
        for name in sample if self.counts_images else ():
            kind = _kind(name)
            if kind is not None and kind not in decoded:
                self._refuse(f"the text belongs to {_a(kind)} ({escaped(name, 80)})")
                num_dropped += 1
        if self.special is not None:
            text, num_lost = self._of_string(text, self.special)
            num_dropped += num_lost
        return text, num_dropped

    def drop_tools(self) -> int:
        """Return how many parts a conversation loses whose template does not write its tools.

        Raises:
            DecodeError: The action is "bad".
        """
        if self.action == "bad":
            raise DecodeError(
                "the conversation has tools, which the chat template does not write; give the "
                'tokenizer a template that does, or pass TextDecoder(undecoded_parts="drop") to '
                "train without them"
            )
        return 1

    def _of_content(
        self, content: str | list[dict[str, Any]], pattern: re.Pattern[str], shows_images: bool
    ) -> tuple[str | list[dict[str, Any]], int]:
        """Return the content of a message without undecoded media, and their number."""
        if isinstance(content, str):
            return self._of_string(content, pattern)
        kept = []
        num_dropped = 0
        for part in content:
            if part["type"] == "text":
                text, num_lost = self._of_string(part["text"], pattern)
                kept.append({**part, "text": text} if num_lost else part)
                num_dropped += num_lost
            elif part["type"] == "image" and shows_images:
                kept.append(part)
            else:
                self._refuse(f"the conversation has {_a(part['type'])} part, which nothing decodes")
                num_dropped += 1
        return kept, num_dropped

    def _of_string(self, text: str, pattern: re.Pattern[str]) -> tuple[str, int]:
        """Return a string without the placeholders of undecoded media, and their number."""
        match = pattern.search(text)
        if match is None:
            return text, 0
        self._refuse(f"the text has {match[0]}, which stands for media that nothing decodes")
        return pattern.subn("", text)

    def _refuse(self, problem: str) -> None:
        if self.action == "bad":
            raise DecodeError(f"{problem}; {_ADVICE}")


def media_parts(
    tokenizer: Any, image_token: str, *, action: UndecodedParts, counts_images: bool
) -> MediaParts:
    """Return what a text decoder of these settings does with media that nothing decodes."""
    named = [getattr(tokenizer, name, None) for name in ("video_token", "audio_token")]
    others = {*MEDIA_TOKENS, *(token for token in named if token)} - {image_token}
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    special = others & added
    return MediaParts(
        action,
        image_token,
        counts_images,
        _any_of(others),
        _any_of({*others, "<image>"}),
        _any_of(special) if special else None,
    )


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens))))


def _a(kind: str) -> str:
    """Return a kind of media with its article."""
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {escaped(kind, 80)}"


def _kind(name: str) -> str | None:
    """Return "video" or "audio" for a field of such media, by its extension."""
    extension = name.rpartition(".")[2]
    if extension in VIDEO_EXTENSIONS:
        return "video"
    return "audio" if extension in AUDIO_EXTENSIONS else None
