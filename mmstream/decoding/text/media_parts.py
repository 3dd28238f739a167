"""Images, videos and audio of a text that nothing decodes.

Place in the flow: `TextDecoder` asks here before a chat template sees the messages.

A template writes one token for a video, whether or not anyone decodes it. Other templates write
nothing at all. The model would then learn to answer questions about something that it is never
shown. So such a sample is bad, unless the user says what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from mmstream.decoding.text.chat import Message, flatten
from mmstream.decoding.text.placeholders import FIELDS_OF, check_fields
from mmstream.errors import DecodeError, escaped
from mmstream.media_types import kind_of

UndecodedParts: TypeAlias = Literal["bad", "drop", "keep"]
"""What happens to media that nothing decodes."""

DECODED = frozenset({"image"})
"""The kinds of media that a text decoder takes for decoded, unless it is told otherwise."""

MEDIA_TOKENS = {
    "video": ("<video>", "<|video_pad|>", "<|VIDEO|>", "<video_soft_token>"),
    "audio": ("<audio>", "<|audio_pad|>", "<|AUDIO|>", "<|audio|>", "<audio_soft_token>"),
}
"""What stands for a video or an audio: in rows that no converter split, and in models."""

_ADVICE = (
    'pass TextDecoder(undecoded_parts="drop") to train without it, or "keep" if your own code '
    "decodes it, leave such rows out at conversion, or decode them with Decode(video=, audio=)"
)


@dataclass(frozen=True)
class MediaParts:
    """What a text decoder does with media that nothing decodes.

    Attributes:
        action: "bad": the sample is refused. "drop": the text loses the part. "keep": nothing.
        tokens: By kind of media, the text that stands for a medium.
        counted: The kinds of which the text must have a token per medium of the sample.
            `Placeholders` checks that later.
        placeholders: By kind, what stands for it in conversations.
        in_plain_text: What stands for video and audio that have no tokens in the text, in plain
            text: only what the tokenizer takes for media. A text may be about anything, such as the
            ``<video>`` of HTML. None: nothing does.
    """

    action: UndecodedParts
    tokens: Mapping[str, str]
    counted: frozenset[str]
    placeholders: Mapping[str, frozenset[str]]
    in_plain_text: re.Pattern[str] | None

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
        fields = {kind: fields_of(sample) for kind, fields_of in FIELDS_OF.items()}
        shown = {kind for kind in fields if kind in self.counted or kind in decoded}
        refused = [self.placeholders[k] for k in fields if not (k in shown and fields[k])]
        pattern = _any_of(frozenset().union(*refused))
        num_dropped = 0
        kept: list[Message] = []
        for message in messages:
            content, num_lost = self._of_content(message["content"], pattern, shown)
            kept.append({**message, "content": content} if num_lost else message)
            num_dropped += num_lost
        written = {self.tokens[kind] for kind in self.counted}
        for kind in fields.keys() - self.counted:
            if self.tokens[kind] in written:  # such as the images that are frames of a video
                continue
            self._check_number(kept, fields[kind], kind)
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
        for name in sample if self.counted else ():
            kind = kind_of(name)
            if kind and kind not in ("image", *decoded, *self.counted):
                self._refuse(f"the text belongs to {_a(kind)} ({escaped(name, 80)})")
                num_dropped += 1
        text, num_lost = self._of_string(text, self.in_plain_text)
        return text, num_dropped + num_lost

    def lose(self, unwritten: Collection[str]) -> int:
        """Return how many parts a conversation loses that its template does not write.

        Args:
            unwritten: What they are, such as "the tools".

        Raises:
            DecodeError: The action is "bad".
        """
        if self.action == "bad" and unwritten:
            raise DecodeError(
                f"the conversation has {', '.join(unwritten)}, which the chat template does not "
                "write; give the tokenizer a template that does, or pass "
                'TextDecoder(undecoded_parts="drop") to train without'
            )
        return len(unwritten)

    def _check_number(self, messages: list[Message], fields: list[str], kind: str) -> None:
        """Refuse messages with more media of a kind than the sample has, or with other fields."""
        check_fields(messages, fields, kind)
        token = self.tokens[kind]
        texts = (flatten(message["content"], self.tokens) for message in messages)
        num_shown = sum(text.count(token) for text in texts)
        if num_shown > len(fields):
            raise DecodeError(
                f"{num_shown} {kind}s in the conversation, {len(fields)} in the sample"
            )

    def _of_content(
        self,
        content: str | list[dict[str, Any]],
        pattern: re.Pattern[str] | None,
        shown: Collection[str],
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
            elif part["type"] in shown:
                kept.append(part)
            else:
                self._refuse(f"the conversation has {_a(part['type'])} part, which nothing decodes")
                num_dropped += 1
        return kept, num_dropped

    def _of_string(self, text: str, pattern: re.Pattern[str] | None) -> tuple[str, int]:
        """Return a string without the placeholders of undecoded media, and their number."""
        match = pattern.search(text) if pattern is not None else None
        if pattern is None or match is None:
            return text, 0
        self._refuse(f"the text has {match[0]}, which stands for media that nothing decodes")
        return pattern.subn("", text)

    def _refuse(self, problem: str) -> None:
        if self.action == "bad":
            raise DecodeError(f"{problem}; {_ADVICE}")


def media_parts(
    tokenizer: Any,
    tokens: Mapping[str, str],
    *,
    action: UndecodedParts,
    counted: Collection[str],
) -> MediaParts:
    """Return what a text decoder of these settings does with media that nothing decodes.

    Args:
        tokenizer: A tokenizer of `transformers`.
        tokens: By kind of media, the text that stands for a medium.
        action: See `MediaParts`.
        counted: See `MediaParts`.
    """
    placeholders = {"image": frozenset({"<image>"})}
    for kind in ("video", "audio"):
        own = getattr(tokenizer, f"{kind}_token", None)
        names = {*MEDIA_TOKENS[kind], tokens[kind], *([own] if own else [])}
        placeholders[kind] = frozenset(names - {tokens["image"]})
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    special = [placeholders[kind] & added for kind in ("video", "audio") if kind not in counted]
    in_plain_text = _any_of(frozenset[str]().union(*special))
    return MediaParts(action, tokens, frozenset(counted), placeholders, in_plain_text)


@lru_cache(maxsize=64)
def _any_of(tokens: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern of these tokens. None: there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens)))) if tokens else None


def _a(kind: str) -> str:
    """Return a kind of media with its article."""
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {escaped(kind, 80)}"
