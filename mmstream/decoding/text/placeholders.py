"""Media in text: each placeholder becomes as many tokens as the model makes vectors of the medium.

Place in the flow: `TextDecoder` calls it when it has an ``image_length``, ``video_length`` or
``audio_length``: `Placeholders.write` before the text is tokenized, `Placeholders.expand` after.

A chat template writes one token per medium (Llava ``<image>``, Qwen-VL ``<|video_pad|>`` between
two marks). The model needs one token per vector, because it replaces these tokens by the vectors.
So the tokens and the media of a sample must agree exactly. A sample that does not agree is refused
here, as one bad sample. In the model, it would stop the run or learn from the wrong picture.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.media_shapes import (
    AudioShape,
    ImageShape,
    MediaShapes,
    MediaText,
    VideoShape,
)
from mmstream.decoding.text.chat import Message, Span, flatten
from mmstream.errors import ConfigError, DecodeError, escaped
from mmstream.media.fields import FIELDS_OF
from mmstream.media.types import kind_of

Ids = NDArray[np.int64]

Length: TypeAlias = int | Callable[[Any], int | MediaText]
"""How many tokens a medium takes, or a function from its shape to that number or to a text."""

ImageLength: TypeAlias = Callable[[ImageShape], int | MediaText]
"""Says how many tokens an image of a shape takes, from 1 up, or which text takes its place."""

VideoLength: TypeAlias = Callable[[VideoShape], int | MediaText]
"""Says how many tokens a video of a shape takes, from 1 up, or which text takes its place."""

AudioLength: TypeAlias = Callable[[AudioShape], int | MediaText]
"""Says how many tokens an audio of a shape takes, from 1 up, or which text takes its place."""

IDEFICS_MARK = "<fake_token_around_image>"
"""What chat templates of Idefics write before and after a picture."""


@dataclass(frozen=True)
class Placeholder:
    """How a text decoder treats the media of one kind.

    Attributes:
        kind: "image", "video" or "audio".
        token: The token that stands for a medium, as the chat template writes it.
        token_id: Its id.
        length: How many tokens a medium takes.
    """

    kind: str
    token: str
    token_id: int
    length: Length

    def lengths(
        self,
        num_placeholders: int,
        num_media: int,
        media: Sequence[int],
        shapes: MediaShapes | None,
    ) -> list[int | MediaText]:
        """Return what each medium takes in the text.

        Args:
            num_placeholders: How many tokens the text has.
            num_media: How many media of this kind the sample has.
            media: The numbers of those that have a token of their own.
            shapes: The shapes of its media.

        Raises:
            DecodeError: The two numbers differ.
            ConfigError: A shape is missing, or the function returned no number of tokens.
        """
        if num_placeholders != len(media):
            raise DecodeError(
                f"{num_placeholders} {self.token} in the text, {len(media)} {self.kind}s"
            )
        if isinstance(self.length, int):
            return [self.length] * len(media)
        media_shapes: Sequence[Any] = getattr(shapes, f"{self.kind}s", ())
        if len(media_shapes) != num_media:
            shape = "prepared_shape" if self.kind == "image" else "planned shape"
            raise ConfigError(
                f"{self.kind}_length is a function: the text of {num_media} {self.kind}s needs the "
                f"{shape} of each, not {len(media_shapes)}"
            )
        return [self.length_of(media_shapes[number]) for number in media]

    def length_of(self, shape: Any) -> int | MediaText:
        """Return what a medium of this shape takes in the text.

        Raises:
            ConfigError: The function returned no number of tokens.
        """
        return (
            self.length
            if isinstance(self.length, int)
            else self._checked(self.length(shape), shape)
        )

    def _checked(self, length: Any, shape: Any) -> int | MediaText:
        """Return what the function returned, if it is a number of tokens or a text with them."""
        if isinstance(length, MediaText):
            is_valid = (
                0 < len(length.lengths) == length.text.count(self.token)
                and min(map(_number, length.lengths)) >= 1
            )
            if is_valid:
                return length
            advice = f"its text needs {self.token} once for each of its lengths, from 1 up"
        else:
            number = _number(length)
            if number >= 1:
                return number
            advice = "give a whole number from 1 up"
        function: Any = self.length
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ConfigError(f"{self.kind}_length: {name} returned {length!r} for {shape}: {advice}")


_Medium: TypeAlias = tuple[int, int | MediaText]
"""The number of a medium among those of its kind, and what it takes in the text."""


class MediaTokens(NamedTuple):
    """The tokens of media in a text, in the order of the text."""

    kind: str
    token: str
    token_id: int
    lengths: list[int]
    """How many tokens each of them becomes."""


class WrittenText(NamedTuple):
    """A text in which each medium has its tokens."""

    text: str
    spans: list[Span] | None
    """The assistant's turns, as in the text before."""
    tokens: list[MediaTokens]
    """Of each kind."""
    stamps: list[Span]
    """What was written in place of a placeholder, in order, such as times between frames."""


@dataclass(frozen=True)
class Placeholders:
    """How a text decoder treats media.

    Attributes:
        kinds: The kinds of media that have tokens in the text.
        max_length: The most tokens of a text.
    """

    kinds: tuple[Placeholder, ...]
    max_length: int

    def put_before(
        self, text: str, sample: Mapping[str, Any], shapes: MediaShapes | None = None
    ) -> str:
        """Put a placeholder per medium before plain text, unless the text has such placeholders."""
        tracks = self._tracks_in_videos(shapes)
        missing = [
            placeholder.token * len(_standalone(placeholder.kind, sample, shapes, tracks))
            for placeholder in self.kinds
            if placeholder.token not in text
        ]
        return "".join(missing) + text

    def _tracks_in_videos(self, shapes: MediaShapes | None) -> list[int]:
        """Return the numbers of the audios that stand between the frames of their videos.

        Raises:
            DecodeError: Another video of the sample has no sound.
            ConfigError: The tokens of sound have no length.
        """
        videos = [placeholder for placeholder in self.kinds if placeholder.kind == "video"]
        if not videos or shapes is None or all(track is None for track in shapes.tracks):
            return []
        tracks = []
        for track, shape in zip(shapes.tracks, shapes.videos, strict=True):
            length = videos[0].length_of(shape)
            if isinstance(length, MediaText) and length.audio_lengths and track is not None:
                tracks.append(track)
        if tracks and len(tracks) < len(shapes.videos):
            raise DecodeError(
                f"{len(shapes.videos) - len(tracks)} of {len(shapes.videos)} videos have no sound: "
                "in one text, the frames of all videos have their sound between them, or of none"
            )
        if tracks and all(placeholder.kind != "audio" for placeholder in self.kinds):
            raise ConfigError(
                "video_length puts the sound of videos into the text: give audio_length too"
            )
        return tracks

    def write(
        self,
        text: str,
        spans: list[Span] | None,
        sample: Mapping[str, Any],
        shapes: MediaShapes | None,
    ) -> WrittenText:
        """Find how many tokens each medium takes, and write the texts that some media take.

        Args:
            text: The text, with a token per medium.
            spans: The assistant's turns in it. None: this is plain text.
            sample: The sample. Its fields say how many media there are.
            shapes: The shapes of its media. Needed where a length is a function.

        Raises:
            DecodeError: The text has more or fewer placeholders than the sample has media.
            ConfigError: A shape is missing, or a function returned no number of tokens.
        """
        if IDEFICS_MARK in text and "<global-img>" not in text:
            text, spans, _ = _replace_tokens(text, spans, {IDEFICS_MARK: _idefics2_marks(text)})
        tokens: list[MediaTokens] = []
        texts: dict[str, list[str]] = {}
        media_of: dict[str, list[_Medium]] = {}
        tracks = self._tracks_in_videos(shapes)
        for placeholder in self.kinds:
            standalone = _standalone(placeholder.kind, sample, shapes, tracks)
            count = num_media(placeholder.kind, sample, shapes)
            lengths = placeholder.lengths(text.count(placeholder.token), count, standalone, shapes)
            media_of[placeholder.kind] = list(zip(standalone, lengths, strict=True))
        for placeholder in self.kinds:
            lengths = [length for _, length in media_of[placeholder.kind]]
            is_heard = placeholder.kind == "audio" and tracks
            in_order = (
                self._heard(text, media_of, tracks) if is_heard else media_of[placeholder.kind]
            )
            numbers = [
                int(number)
                for _, length in in_order
                for number in (length.lengths if isinstance(length, MediaText) else (length,))
            ]
            tokens.append(
                MediaTokens(placeholder.kind, placeholder.token, placeholder.token_id, numbers)
            )
            if any(isinstance(length, MediaText) for length in lengths):
                texts[placeholder.token] = [
                    length.text if isinstance(length, MediaText) else placeholder.token
                    for length in lengths
                ]
        if not texts:
            return WrittenText(text, spans, tokens, [])
        text, spans, stamps = _replace_tokens(text, spans, texts)
        return WrittenText(text, spans, tokens, stamps)

    def _heard(
        self, text: str, media_of: Mapping[str, Sequence[_Medium]], tracks: Sequence[int]
    ) -> list[_Medium]:
        """Return the audios in the order in which a text has them, where videos have sound.

        Args:
            text: The text, with a token per medium.
            media_of: By kind: its media that have a token, and what they take.
            tracks: The number of the sound of each video.

        Raises:
            DecodeError: The files have another order.
        """
        tokens = {
            placeholder.token: placeholder.kind
            for placeholder in self.kinds
            if placeholder.kind in ("video", "audio")
        }
        sounds = [
            (track, MediaText("", length.audio_lengths))
            for track, (_, length) in zip(tracks, media_of["video"], strict=True)
            if isinstance(length, MediaText)
        ]
        queues = {"video": iter(sounds), "audio": iter(media_of["audio"])}
        matches = re.finditer("|".join(map(re.escape, tokens)), text)
        heard: list[_Medium] = [next(queues[tokens[match[0]]]) for match in matches]
        order = [number for number, _ in heard]
        if order != sorted(order):
            raise DecodeError(
                f"the text has the sounds in the order {order}, counted as files are: name videos "
                "and recordings in the order of the text"
            )
        return heard

    def repeats(
        self, written: WrittenText, ids: Ids, *, keep: int
    ) -> tuple[NDArray[np.bool_], Ids]:
        """Return which tokens are of media, and how often each token of the text is repeated.

        Only text after the last medium may be cut later. A medium never is: a sample whose media do
        not all fit is refused. They are in the batch anyway, and without the text about them the
        sample would say something else.

        Args:
            written: What `write` has returned.
            ids: int64 [T], the ids of its text.
            keep: How many tokens at the end survive a cut, such as that for the end of text.

        Returns:
            Two arrays of [T]: bool, and int64, which is 1 for tokens that are of no medium.

        Raises:
            DecodeError: The tokenizer made more or fewer tokens of a kind than the text has, or a
                medium does not fit.
        """
        repeats = np.ones_like(ids)
        is_media = np.zeros(len(ids), dtype=bool)
        for tokens in written.tokens:
            is_kind = ids == tokens.token_id
            num_tokens = int(np.count_nonzero(is_kind))
            if num_tokens != len(tokens.lengths):  # a tokenizer may change the text first
                raise DecodeError(
                    f"{num_tokens} tokens {tokens.token} of the text, {len(tokens.lengths)} for "
                    f"its {tokens.kind}s"
                )
            repeats[is_kind] = tokens.lengths
            is_media |= is_kind
        ends = np.cumsum(repeats)
        room = self.max_length - keep
        if is_media.any() and ends[is_media][-1] > room:
            raise DecodeError(
                f"max_length={self.max_length} ends before the media of the text do, whose last "
                f"token is number {ends[is_media][-1]:,}"
            )
        return is_media, repeats


def make_placeholders(
    core: Any, lengths: Mapping[str, tuple[str, Length | None]], max_length: int
) -> Placeholders | None:
    """Return how a text decoder of these settings treats media.

    Args:
        core: A tokenizer of the library `tokenizers`.
        lengths: By kind: the token that stands for a medium, as the chat template writes it, and
            how many tokens it takes. None: media of this kind do not concern the text.
        max_length: The most tokens of a text.

    Returns:
        The placeholders. None where no kind has a length.

    Raises:
        ConfigError: The tokenizer would split a token. Or two kinds have the same token.
    """
    ids = {added.content: int(i) for i, added in core.get_added_tokens_decoder().items()}
    kinds: dict[str, Placeholder] = {}
    for kind, (token, length) in lengths.items():
        if length is None:
            continue
        if token not in ids:
            raise ConfigError(
                f"{kind}_token={token!r}: not an added or special token of the tokenizer: give the "
                "model's own tokenizer and token, or add it by tokenizer.add_special_tokens"
            )
        if token in kinds:
            raise ConfigError(f"{kind}_token={token!r}: {kinds[token].kind}s have the same token")
        kinds[token] = Placeholder(kind, token, ids[token], length)
    return Placeholders(tuple(kinds.values()), max_length) if kinds else None


def num_media(kind: str, sample: Mapping[str, Any], shapes: MediaShapes | None) -> int:
    """Return how many media of a kind belong to a sample's text.

    Where videos are decoded with their tracks, these count as audios, and only their shapes tell.
    """
    num_fields = len(FIELDS_OF[kind](sample))
    return max(num_fields, len(shapes.audios)) if kind == "audio" and shapes else num_fields


def _standalone(
    kind: str, sample: Mapping[str, Any], shapes: MediaShapes | None, tracks: Sequence[int]
) -> list[int]:
    """Return the numbers of the media of a kind that have a token of their own in the text.

    Those of `tracks` are the sounds that stand between the frames of their videos instead.
    """
    taken = tracks if kind == "audio" else ()
    return [number for number in range(num_media(kind, sample, shapes)) if number not in taken]


def check_fields(
    messages: list[dict[str, Any]], fields: Sequence[str], kind: str = "image"
) -> None:
    """Check that the messages show the sample's media in the order in which they are decoded.

    Args:
        messages: As `check_messages` returns them. A medium without a ``field`` is the next one.
        fields: The names of the sample's fields of this kind, in order.
        kind: "image", "video" or "audio".

    Raises:
        DecodeError: The messages name other fields, or the same ones in another order.
    """
    contents = [message["content"] for message in messages]
    items = [item for content in contents if isinstance(content, list) for item in content]
    media = [item for item in items if item["type"] == kind]
    for i, (item, field) in enumerate(zip(media, fields, strict=False)):
        if isinstance(item.get("field"), str) and item["field"] != field:
            raise DecodeError(f"{kind} {i + 1} of the messages is {item['field']}, not {field}")


def _replace_tokens(
    text: str, spans: list[Span] | None, texts: Mapping[str, Sequence[str]]
) -> tuple[str, list[Span] | None, list[Span]]:
    """Put texts in place of tokens.

    Args:
        text: The text.
        spans: Spans of its characters, in order.
        texts: By token: what takes the place of each one, in the order of the text.

    Returns:
        The text, the same spans of it, and the spans of what was put.

    Examples:
        The span of "cat" in "a <v> cat" is (6, 9). With "1 s<v>" for "<v>", the text has three more
        characters before it, and the span is (9, 12).
    """
    queues = {token: iter(replacements) for token, replacements in texts.items()}
    pieces: list[str] = []
    stops: list[int] = []  # of each token in the old text
    shifts = [0]  # by how much what stands after so many tokens moves
    stamps: list[Span] = []
    copied = 0
    for match in re.finditer("|".join(map(re.escape, texts)), text):
        replacement = next(queues[match[0]])
        start = match.start() + shifts[-1]
        stamps.append((start, start + len(replacement)))
        pieces += [text[copied : match.start()], replacement]
        copied = match.end()
        stops.append(copied)
        shifts.append(shifts[-1] + len(replacement) - len(match[0]))
    pieces.append(text[copied:])
    if spans:
        # A turn begins and ends between tokens, never inside one.
        edges = np.asarray(spans, dtype=np.int64)
        moved = edges + np.asarray(shifts)[np.searchsorted(stops, edges, side="right")]
        spans = [(int(start), int(stop)) for start, stop in moved]
    return "".join(pieces), spans, stamps


def _idefics2_marks(text: str) -> list[str]:
    """Return what takes the place of each mark around pictures, as ``Idefics2Processor`` has it.

    Pictures side by side share a mark, and a word that follows one gets a space before it. Idefics3
    does not do so: it writes ``<global-img>`` after its first mark.
    """
    followers = re.findall(rf"{IDEFICS_MARK}(?=({IDEFICS_MARK}|[^\s<])?)", text)
    return [
        "" if other == IDEFICS_MARK else IDEFICS_MARK + " " * bool(other) for other in followers
    ]


def _number(value: Any) -> int:
    """Return a whole number; 0 for anything else."""
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


# -- media that nothing decodes --------------------------------------------------------------------
#
# A template writes one token for a video, whether or not anyone decodes it. Other templates write
# nothing at all. The model would then learn to answer questions about something that it is never
# shown. So such a sample is bad, unless the user says what to do with it.

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
        kept_kinds = {kind for kind in fields if kind in self.counted or kind in decoded}
        refused = [self.placeholders[k] for k in fields if not (k in kept_kinds and fields[k])]
        pattern = _any_of(frozenset().union(*refused))
        num_dropped = 0
        kept: list[Message] = []
        for message in messages:
            content, num_lost = self._of_content(message["content"], pattern, kept_kinds)
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
        kept_kinds: Collection[str],
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
            elif part["type"] in kept_kinds:
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


LOSS_FIELD = "__text_loss__"
"""The field of a decoded sample in which its `TextLoss` travels to the lineage of the batch."""


class TextLoss(NamedTuple):
    """What a text has lost on its way to the model."""

    reason: str
    """``shard[index] key.field: `` and what was lost."""
    is_cut: bool
    """Whether `max_length` has cut its end."""
    num_dropped_parts: int
    """Parts of the conversation that its text lacks, see `TextDecoder.undecoded_parts`."""
