"""`TextDecoder`: the text of a sample becomes token ids, mask and labels.

Place in the flow: `decoding.sample` calls it after ``json`` is parsed, for all samples of a step at
once:

    messages -> `chat` renders them with the chat template -> tokenizer -> labels of the turns
    caption  -> tokenizer
             -> `placeholders` repeats the tokens of media, where there are any

Ids stay unpadded here, int64 [T]. `batching.collate` pads them, because only it knows the longest
text of the batch. It asks `TextDecoder` for what to pad with.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.media_shapes import MediaShapes
from mmstream.decoding.sample_rng import is_user_function, seed_generators
from mmstream.decoding.text.chat import (
    Chat,
    Span,
    check_messages,
    check_tools,
    probe_chat,
)
from mmstream.decoding.text.placeholders import (
    DECODED,
    AudioLength,
    Ids,
    ImageLength,
    MediaParts,
    Placeholders,
    UndecodedParts,
    VideoLength,
    WrittenText,
    check_fields,
    make_placeholders,
    media_parts,
)
from mmstream.errors import DecodeError, SampleError, escaped
from mmstream.media.fields import (
    FIELDS_OF,
    MAX_TEXT_BYTES,
    call_user,
    check_text,
    decode_text,
    field_names,
    value_at,
)
from mmstream.settings import PositiveInt, checked, refuse_broken
from mmstream.types import IGNORED_LABEL

Tokens: TypeAlias = dict[str, Any]
"""``input_ids``, ``attention_mask`` and ``labels`` of a sample, each int64 [T]; ``label_weights``,
float32 [T], where messages have weights. With ``texts="all"`` each is a list of arrays."""

_CALL_BYTES = 1 << 20
"""Bytes that one call of the tokenizer gets, unless one text alone has more.

A tokenizer keeps up to 640 bytes for each until the call returns.
"""

_NOWHERE = 1 << 62
"""A position after every text."""


class DecodedText(NamedTuple):
    """The tokens of a text, and what it has lost."""

    tokens: Tokens
    num_tokens: int
    """Length of the whole text in tokens, or of the longest one: more than there are where
    `max_length` has cut it."""
    num_dropped_parts: int
    """Parts of the conversation that its text lacks: dropped, or not written by the template."""


class Prompt(NamedTuple):
    """A text to tokenize, by a `TextDecoder` or by a processor of transformers."""

    text: str
    spans: list[Span] | None
    """The assistant's turns in a conversation. None: this is plain text."""
    num_dropped_parts: int
    written: WrittenText | None = None
    """The tokens of media in the text. None: media do not concern it."""
    weights: list[float] | None = None
    """Of the turns in `spans`. None: all count the same."""

    @property
    def needs_offsets(self) -> bool:
        """Whether the labels depend on which characters a token comes from."""
        return self.spans is not None or (self.written is not None and bool(self.written.stamps))


class _LabelledIds(NamedTuple):
    """The ids of a text, and what is trained of them."""

    ids: Ids
    labels: Ids
    weights: NDArray[np.float32] | None
    """Of the labels. None: all count the same."""
    num_special: int
    """Special tokens at the end, which a cut keeps."""
    num_appended: int
    """How many of them `append_eos` has added."""


@checked(
    {
        "field": 'give the name of a field, a path such as "json.caption", or a function from the '
        "sample",
        "today": "give a datetime.date, without a time",
    }
)
@dataclass(frozen=True, eq=False)
class TextDecoder:
    """Tokenize text: a callable from a sample to ids, mask and labels.

    The text of a sample is the messages in its ``json`` field, if there are any and the tokenizer
    has a chat template. Else it is the ``txt`` field.

    The chat template also gets the ``tools`` of the ``json`` field: a list, or JSON of one. It gets
    the arguments of tool calls as objects, also where they are stored as JSON.

    An answer is not trained if its message sets ``weight``, ``train`` or ``loss`` to 0 or false.
    Other weights are given to the tokens of their answers as ``label_weights``.

    A decoder can be pickled, and called from many threads at once. It encodes with its own copy of
    the tokenizer's core, because `transformers` writes truncation settings into the shared one.

    Attributes:
        tokenizer: A fast tokenizer of `transformers`.
        max_length: The most tokens of a text, from 1 up. Longer texts lose their end, but special
            tokens at the end of plain text are kept.
        padding: What batches are padded to: "longest", their longest text, or "max_length".
        field: Where the text is. "json": only the messages there. Another field, such as
            "caption.txt": plain text. A path into JSON, such as "json.caption",
            "json.captions.0" or "json.chat.turns": a string, or a list of messages. A function
            from the sample to a string or a list of messages; it may draw with `mm.sample_rng`.
            None: messages, else ``txt``.
        image_token: The text for an image where the chat template cannot take images.
        image_length: For vision-language models, how many tokens an image takes: a number from 1
            up, such as the number of patches of the vision tower. Or, where the picture's size
            matters, a function from `ImageShape` to that number, such as
            ``mm.families.qwen_vl.image_length()``.
            Each ``image_token`` in the text becomes that many tokens. The text must hold one for
            each image of the sample. Plain text without any, such as a caption, gets all images at
            its start. None: images do not concern the text.
        video_token: The same for a video.
        video_length: How many tokens a video takes: a number, or a function from `VideoShape` to
            it, such as ``mm.families.qwen_vl.video_length()``. A function may return a `MediaText`
            instead: a text with the tokens, such as ``mm.families.qwen_vl.qwen3_video_length()``
            writes with times. The rest is as for images.
        audio_token: The same for an audio.
        audio_length: How many tokens an audio takes: a number, or a function from `AudioShape`,
            such as ``mm.families.qwen_audio.audio_length()``. The rest is as for images.
        max_bytes: The most bytes of a text in UTF-8, from 1 up, before it is tokenized: of plain
            text, and of a rendered conversation. A longer text makes its sample bad. Time and
            memory of a tokenizer follow this number, not `max_length`.
        undecoded_parts: What happens where a text has a video, an audio or an image that nothing
            decodes, or a part of an unknown type. "bad": the sample is bad. "drop": the text is
            made without that part. "keep": the chat template gets it, because a transform or
            collate function of your own decodes it. So too where the chat template does not write
            the conversation's tools.
        unlabeled_texts: What happens to a text without a labelled token: an empty caption, a
            conversation without an answer, or one whose answers all begin after `max_length`.
            "bad": the sample is bad. "keep": it is delivered, for prompts without a loss.
        texts: How many texts a sample has. "one": a list of texts makes it bad. "all": each text
            of a list, or of what a function returns, is a document of its own. A preference, with
            ``chosen`` and ``rejected`` beside its messages, is two: the conversation with the
            chosen answer, then the one with the rejected answer. It is for batches of `mm.Flat`
            and `mm.Pack`.
        today: The date of a chat template that writes today's. It is the same for all texts, so
            that a sample has the same tokens every day. None: 2026-01-01; a warning says so.
        append_eos: Whether plain text ends with the tokenizer's token for the end of text. It is
            added where the tokenizer has not done so. Chat templates write their own.

    Raises:
        ConfigError: The tokenizer is slow: it does not say which characters a token comes from. Or
            a number or a choice is wrong. Or a subclass overrides `__call__`. Or ``field="json"``
            is given without a chat template. Or a length of media is given, and the tokenizer
            would split their token.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer  # or AutoTokenizer.from_pretrained
        >>> decoder = TextDecoder(byte_tokenizer(), max_length=2048)
        >>> list(decoder({"txt": b"a cat on a mat"}))
        ['input_ids', 'attention_mask', 'labels']
    """

    tokenizer: Any
    max_length: PositiveInt = 512
    padding: Literal["longest", "max_length"] = "longest"
    field: str | Callable[[dict[str, Any]], str | list[dict[str, Any]]] | None = None
    image_token: str = "<image>"
    image_length: PositiveInt | ImageLength | None = None
    video_token: str = "<video>"
    video_length: PositiveInt | VideoLength | None = None
    audio_token: str = "<audio>"
    audio_length: PositiveInt | AudioLength | None = None
    max_bytes: PositiveInt = MAX_TEXT_BYTES
    undecoded_parts: UndecodedParts = "bad"
    unlabeled_texts: Literal["bad", "keep"] = "bad"
    texts: Literal["one", "all"] = "one"
    append_eos: bool = False
    today: datetime.date | None = None
    _chat: Chat | None = dataclasses.field(init=False, repr=False)
    _core: Any = dataclasses.field(init=False, repr=False)
    _placeholders: Placeholders | None = dataclasses.field(init=False, repr=False)
    _media: MediaParts = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_use(self)
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        refuse_broken(
            (
                self.append_eos and self.tokenizer.eos_token_id is None,
                "append_eos=True: the tokenizer has no eos_token; set it first",
            ),
            (
                self.field == "json" and not has_template,
                'field="json": the tokenizer has no chat template',
            ),
        )
        core = own_core(self.tokenizer)
        placeholders = make_placeholders(core, self._lengths, self.max_length)
        tokens = {kind: token for kind, (token, _) in self._lengths.items()}
        kinds = self.counted_media
        # A part of another kind has no token that anybody would expand.
        written = {kind: token for kind, token in tokens.items() if kind in {"image", *kinds}}
        chat = None
        if has_template:
            chat = probe_chat(self.tokenizer, written, kinds or {"image"}, self.today)
        media = media_parts(self.tokenizer, tokens, action=self.undecoded_parts, counted=kinds)
        self.__dict__.update(_chat=chat, _core=core, _placeholders=placeholders, _media=media)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @property
    def pad_token_id(self) -> int:
        """The id that pads ``input_ids``: of the pad token, else of the end of text, else 0."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    @property
    def pad_to(self) -> int | None:
        """The length in tokens that batches are padded to. None: their longest text."""
        return self.max_length if self.padding == "max_length" else None

    @property
    def padding_side(self) -> str:
        """The side that the tokenizer pads: "right" or "left"."""
        return str(self.tokenizer.padding_side)

    @cached_property
    def counted_media(self) -> frozenset[str]:
        """The kinds of media that have tokens in the text: "image", "video", "audio"."""
        return frozenset(kind for kind, (_, length) in self._lengths.items() if length is not None)

    @cached_property
    def needs_shapes(self) -> frozenset[str]:
        """The kinds of media on whose shapes the tokens of a text depend."""
        return frozenset(kind for kind, (_, length) in self._lengths.items() if callable(length))

    @cached_property
    def _lengths(self) -> dict[str, tuple[str, Any]]:
        """By kind of media: its token, and how many of them a medium takes."""
        return {
            "image": (self.image_token, self.image_length),
            "video": (self.video_token, self.video_length),
            "audio": (self.audio_token, self.audio_length),
        }

    @cached_property
    def has_user_functions(self) -> bool:
        """Whether a function of the user finds the text or counts the tokens of media."""
        lengths = [length for _, length in self._lengths.values() if callable(length)]
        own = [self.field] if callable(self.field) else []
        return any(map(is_user_function, [type(self), *own, *lengths]))

    def source(self, sample: dict[str, Any]) -> str:
        """Return the name of the field that a sample's text comes from; "" for a function."""
        if self.field is not None:
            return self.field if isinstance(self.field, str) else ""
        row = sample.get("json")
        has_turns = isinstance(row, dict) and bool(row.get("messages"))
        return "json" if has_turns and self._chat is not None else "txt"

    def __call__(self, sample: dict[str, Any], shapes: MediaShapes | None = None) -> Tokens:
        """Tokenize one sample.

        Args:
            sample: A sample with ``json`` parsed. Text fields are bytes in UTF-8, or strings.
            shapes: Of the sample's media: what `ImageDecoder.prepared_shape` returns for each
                image, and the shape of the plan of each video and audio, in the order of their
                fields. Needed where a length is a function.

        Returns:
            ``input_ids``, ``attention_mask`` (ones) and ``labels``, each int64 [T] with
            1 <= T <= max_length. Labels of plain text are the ids. Labels of messages are the ids
            in the assistant's turns, from what follows the generation prompt to the end-of-turn
            mark, and -100 elsewhere. Where the template marks what is generated, its marks hold.
            Labels of
            media's tokens are -100, also of what a `MediaText` writes between them. Only text after
            the last medium is cut off.

        Raises:
            DecodeError: There is no text, it is not UTF-8 or too long, or the template or the
                tokenizer refuses it. It has media that nothing decodes, or no label (see
                `undecoded_parts` and `unlabeled_texts`). With a length of media also: the text
                does not show the sample's media, each once and in order, or ``max_length`` ends
                before one of them does.
            ConfigError: A length is a function, and it returned no whole number from 1 up, or the
                shape of a medium is missing.
        """
        decoded = self.decode_all([sample], [shapes])[0]
        if isinstance(decoded, SampleError):
            raise decoded
        return decoded.tokens

    def decode_all(
        self,
        samples: Sequence[dict[str, Any]],
        shapes: Sequence[MediaShapes | None] | None = None,
        *,
        media: Collection[str] = DECODED,
    ) -> list[DecodedText | SampleError]:
        """Tokenize the texts of many samples together.

        Short texts share a call of the tokenizer. A call gets 1 MiB of them at most, so that the
        memory of a step does not grow with its number of rows.

        Args:
            samples: Samples as a call takes them.
            shapes: One entry per sample, as a call takes it.
            media: The kinds of media that are decoded. A `Decode` without an image decoder has
                none.

        Returns:
            One entry per sample: its tokens, and what it has lost; or the error that a call raises.

        Raises:
            ConfigError: As in a call.
        """
        prompts = [
            self._try(self._prompts, sample, media, sample_shapes)
            for sample, sample_shapes in zip(samples, shapes or [None] * len(samples), strict=True)
        ]
        flat = [prompt for own in prompts if not isinstance(own, SampleError) for prompt in own]
        texts = iter(self._finish_all(flat))
        results: list[DecodedText | SampleError] = []
        for own in prompts:
            if isinstance(own, SampleError):
                results.append(own)
                continue
            decoded = [next(texts) for _ in own]
            # The first error of a text is that of its sample.
            error = next((text for text in decoded if isinstance(text, SampleError)), None)
            good = [text for text in decoded if not isinstance(text, SampleError)]
            results.append(error or (good[0] if self.texts == "one" else _together(good)))
        return results

    def _finish_all(self, prompts: Sequence[Prompt]) -> list[DecodedText | SampleError]:
        """Tokenize texts, in calls of the tokenizer that are not too large."""
        results: dict[int, DecodedText | SampleError] = {}
        groups: dict[tuple[bool, bool], list[int]] = {}
        for number, prompt in enumerate(prompts):
            group = (prompt.spans is not None, prompt.needs_offsets)
            groups.setdefault(group, []).append(number)
        for (is_chat, needs_offsets), numbers in groups.items():
            for call in _calls(numbers, [_num_bytes(prompts[number].text) for number in numbers]):
                texts = [prompts[number].text for number in call]
                encodings = self._encode(texts, is_chat, needs_offsets)
                for number in reversed(call):  # each encoding is freed when its tokens are made
                    results[number] = self._try(self._finish, prompts[number], encodings.pop())
        return [results[number] for number in range(len(prompts))]

    def _encode(self, texts: list[str], is_chat: bool, needs_offsets: bool) -> list[Any]:
        """Return the encoding of each text, or its error.

        Plain text is encoded without offsets, which would take as much time as the ids.
        """
        encode = self._core.encode_batch if needs_offsets else self._core.encode_batch_fast
        try:
            return list(encode(texts, add_special_tokens=not is_chat)) if texts else []
        except MemoryError:
            raise
        except Exception as error:  # the library's errors have no type of their own
            if len(texts) == 1:
                return [DecodeError(f"tokenizer: {escaped(' '.join(str(error).split()))}")]
        # One bad text fails the whole call. Encode each text by itself to know which.
        return [self._encode([text], is_chat, needs_offsets)[0] for text in texts]

    def _prompts(
        self, sample: dict[str, Any], media: Collection[str], shapes: MediaShapes | None
    ) -> list[Prompt]:
        """Return the texts of a sample, with what takes the places of its media."""
        if self.has_user_functions:
            seed_generators(sample, "text")
        values = self._texts(sample)
        return [self._prompt(value, sample, media, shapes) for value in values]

    def _prompt(
        self,
        value: str | list[Any],
        sample: dict[str, Any],
        media: Collection[str],
        shapes: MediaShapes | None,
    ) -> Prompt:
        """Return a text, from plain text or messages."""
        if isinstance(value, list):
            prompt = self._render(value, sample, media)
        else:
            text, num_dropped = self._media.of_text(value, sample, media)
            if self._placeholders:
                text = self._placeholders.put_before(text, sample, shapes)
            prompt = Prompt(text, None, num_dropped)
        if self._placeholders is None:
            return prompt
        written = self._placeholders.write(prompt.text, prompt.spans, sample, shapes)
        if written.stamps:
            check_text(written.text, self.max_bytes)
        return prompt._replace(text=written.text, spans=written.spans, written=written)

    def _finish(self, prompt: Prompt, encoding: Any) -> DecodedText:
        """Make tokens of an encoding."""
        if isinstance(encoding, DecodeError):
            raise encoding
        text = self._labelled(prompt, encoding)
        if self._placeholders is not None and prompt.written is not None:
            text = _with_media(text, prompt.written, encoding, self._placeholders)
        ids, labels, weights, num_special, num_appended = text
        num_tokens = len(ids)
        if not num_tokens:
            raise DecodeError("empty text: no tokens")
        all_labels = labels
        if num_tokens > self.max_length:
            ids = _cut(ids, self.max_length, num_special)
            labels = _cut(labels, self.max_length, num_special)
        if self.unlabeled_texts == "bad":
            self._check_labels(labels, all_labels, prompt.spans, num_appended)
        tokens = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
        if weights is not None:
            weights = weights[: self.max_length]  # a conversation has no special tokens at its end
            tokens["label_weights"] = np.where(labels == IGNORED_LABEL, np.float32(0), weights)
        return DecodedText(tokens, num_tokens, prompt.num_dropped_parts)

    def _labelled(self, prompt: Prompt, encoding: Any) -> _LabelledIds:
        """Return the ids of an encoding with their labels, before media take their places."""
        ids = np.asarray(encoding.ids, dtype=np.int64)
        if prompt.spans is not None:
            touched = _touched(encoding, prompt.spans)
            weights = None
            if prompt.weights is not None:  # the last entry, -1, is for tokens of no answer
                weights = np.asarray([*prompt.weights, 0], np.float32)[touched]
            return _LabelledIds(ids, np.where(touched >= 0, ids, IGNORED_LABEL), weights, 0, 0)
        num_special = num_appended = 0
        if self.append_eos and len(ids) and ids[-1] != self.tokenizer.eos_token_id:
            num_appended = 1
            ids = np.append(ids, self.tokenizer.eos_token_id)
        # Special tokens that the tokenizer put at the end. A chat template writes its own.
        if len(ids) > self.max_length or prompt.written is not None:
            is_special = reversed(encoding.special_tokens_mask)
            num_special = sum(1 for _ in takewhile(bool, is_special)) + num_appended
        return _LabelledIds(ids, ids, None, num_special, num_appended)

    def _check_labels(
        self, labels: Ids, all_labels: Ids, spans: list[Span] | None, num_appended: int
    ) -> None:
        """Raise DecodeError where no token of a text is trained.

        The first token of a conversation never is: no token before it could predict it.

        Args:
            labels: int64 [T].
            all_labels: int64 [num_tokens], of the whole text.
            spans: The assistant's turns; None for plain text.
            num_appended: How many tokens `append_eos` has added.
        """
        if spans is None:
            # Not the special tokens that the tokenizer adds to any text, even to an empty one.
            num_added = self._core.num_special_tokens_to_add(False) + num_appended
            num_labels = len(labels)  # of plain text, every token but those of media
            if self._placeholders is not None:
                num_labels = int(np.count_nonzero(labels != IGNORED_LABEL))
            if num_labels > num_added:
                return
            is_empty = np.count_nonzero(all_labels != IGNORED_LABEL) <= num_added
            reason = "empty text" if is_empty else f"max_length={self.max_length} leaves no text"
        elif (labels[1:] != IGNORED_LABEL).any():
            return
        elif not spans:
            reason = "the conversation has no answer of an assistant that is trained"
        elif (all_labels[1:] != IGNORED_LABEL).any():
            first = 1 + int(np.argmax(all_labels[1:] != IGNORED_LABEL))
            reason = f"the first answer begins at token {first}, max_length is {self.max_length}"
        else:
            reason = "the assistant's answers are empty"
        raise DecodeError(
            f"no token of it is trained: {reason}; "
            'TextDecoder(unlabeled_texts="keep") delivers it all the same'
        )

    @staticmethod
    def _try(function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result, or its error of a sample."""
        try:
            return function(*args)
        except SampleError as error:
            return error

    def _texts(self, sample: dict[str, Any]) -> list[str | list[Any]]:
        """Return the texts of a sample, each plain text or messages. There is one at least."""
        row = sample.get("json")
        is_json = self.source(sample) == "json"
        if self.texts == "all" and is_json and isinstance(row, dict) and _is_preference(row):
            return [_answered(row, "chosen"), _answered(row, "rejected")]
        value = self._value(sample)
        if not isinstance(value, list):
            return [decode_text(value, self.max_bytes)]
        if self.texts == "one":
            if not is_json:
                self._check_list(sample, value)
            return [value]
        if not value:
            raise DecodeError("an empty list of texts")
        values = [value] if isinstance(value[0], dict) else value  # else these are messages of one
        return [v if isinstance(v, list) else decode_text(v, self.max_bytes) for v in values]

    def _check_list(self, sample: dict[str, Any], value: list[Any]) -> None:
        """Raise DecodeError for a list that is not a conversation."""
        source = self.source(sample)
        if not value or isinstance(value[0], str):
            raise DecodeError(
                f"a list of {len(value)} texts, and a sample takes one: take the first with "
                f'field="{escaped(source or "json.captions", 60)}.0", or draw one in a function, '
                "field=function, with mm.sample_rng(sample)"
            )

    def _value(self, sample: dict[str, Any]) -> Any:
        """Return the text of a sample as it is stored, or its messages."""
        source = self.source(sample)
        if callable(self.field):
            value = call_user(self.field, sample)
        elif source == "json":
            row = sample.get("json")
            if self._chat is None or not isinstance(row, dict):
                raise DecodeError("no messages: not a JSON object")
            if self.texts == "one":
                _refuse_preference(row)
            value = row.get("messages")
            return value if isinstance(value, list) else check_messages(value)
        elif source in sample or self.field is None:
            value = sample.get(source)
            if value is None:
                raise self._no_text(sample)
        else:
            value = value_at(sample, source)
        return value

    def _no_text(self, sample: dict[str, Any]) -> DecodeError:
        """Return the error of a sample without a text."""
        row = sample.get("json")
        if isinstance(row, dict) and row.get("messages") and self._chat is None:
            return DecodeError(
                "no text: messages in json, and the tokenizer has no chat template; give one"
            )
        keys = f", and its json has {field_names(row)}" if isinstance(row, dict) else ""
        return DecodeError(
            f"no text: neither messages nor txt; the sample has {field_names(sample)}{keys}: name "
            'what has it, TextDecoder(field="NAME.txt") or TextDecoder(field="json.KEY"), or draw '
            "one of json.segments with Pipeline(before=(mm.one_segment,))"
        )

    def _render(self, value: list[Any], sample: dict[str, Any], media: Collection[str]) -> Prompt:
        if self._chat is None:
            raise DecodeError("messages, and the tokenizer has no chat template")
        messages, num_dropped = self._media.of_messages(check_messages(value), sample, media)
        for kind in sorted(self.counted_media):
            check_fields(messages, FIELDS_OF[kind](sample), kind)
        row = sample.get("json")
        tools = check_tools(row.get("tools")) if isinstance(row, dict) else None
        chat = self._chat.chosen(tools)
        rendered = chat.render(messages, tools)
        unwritten, num_hidden = chat.lost(rendered, tools)
        if tools and not chat.writes_tools(rendered):
            unwritten = ["tools", *unwritten]
        num_dropped += num_hidden + self._media.lose(unwritten)
        # Parts that are counted must be in the text exactly as often. Of others, a template that
        # does not know their kind leaves no trace.
        if self.undecoded_parts == "keep" or set(media) - self.counted_media - {"image"}:
            num_dropped += chat.num_unwritten(rendered.text, messages, tools)
        is_weighted = any(weight != 1 for weight in rendered.weights)
        return Prompt(
            check_text(rendered.text, self.max_bytes),
            rendered.spans,
            num_dropped,
            weights=rendered.weights if is_weighted else None,
        )


def own_core(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer's core, without the settings that a caller leaves in it."""
    core = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    core.no_padding()
    core.no_truncation()  # the whole length is counted, and the library keeps the rest anyway
    return core


def _refuse_preference(row: dict[str, Any]) -> None:
    """Raise DecodeError for a preference, whose ``messages`` end before the answer."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        return
    for key in ("chosen", "completion"):
        if isinstance(row.get(key), list) and row[key]:
            raise DecodeError(
                f"a preference: its answer is in json.{key}; to train on it, join both in "
                f'field=function: sample["json"]["messages"] + sample["json"]["{key}"]'
            )


def _is_preference(row: dict[str, Any]) -> bool:
    """Tell whether a row has two answers beside the turns before them."""
    return all(isinstance(row.get(key), list) and row[key] for key in ("chosen", "rejected"))


def _answered(row: dict[str, Any], key: str) -> list[Any]:
    """Return the messages of a preference with one of its answers, which alone is trained."""
    messages = row.get("messages")
    before = [
        {**message, "train": False} if isinstance(message, dict) else message
        for message in (messages if isinstance(messages, list) else [])
    ]
    return [*before, *row[key]]


def _together(texts: Sequence[DecodedText]) -> DecodedText:
    """Join the texts of a sample: each field of tokens becomes a list."""
    names = dict.fromkeys(name for text in texts for name in text.tokens)
    tokens: Tokens = {
        name: [text.tokens.get(name, _no_weights(text)) for text in texts] for name in names
    }
    return DecodedText(
        tokens,
        max(text.num_tokens for text in texts),
        sum(text.num_dropped_parts for text in texts),
    )


def _no_weights(text: DecodedText) -> NDArray[np.float32]:
    return np.where(text.tokens["labels"] == IGNORED_LABEL, np.float32(0), np.float32(1))


def _check_use(decoder: TextDecoder) -> None:
    """Refuse a subclass, a tokenizer, a source of text or a date that cannot work."""
    advice = "pass what AutoTokenizer.from_pretrained(name) returns"
    if hasattr(decoder.tokenizer, "tokenizer"):
        advice = "pass processor.tokenizer"
    refuse_broken(
        (
            type(decoder).__call__ is not TextDecoder.__call__,
            f"{type(decoder).__name__} overrides TextDecoder.__call__, which a pipeline does not "
            "call: it tokenizes a step at once. For another text pass "
            "mm.TextDecoder(tokenizer, field=function), a function from the sample to its text "
            "or messages. To change the tokens, use Pipeline(transforms=(function,))",
        ),
        (
            not getattr(decoder.tokenizer, "is_fast", False),
            f"tokenizer: {type(decoder.tokenizer).__name__} is not a fast tokenizer (it has no "
            f"offsets); {advice}",
        ),
        (
            decoder.today is not None and type(decoder.today) is not datetime.date,
            f"today={decoder.today!r}: give a datetime.date, without a time",
        ),
    )


def _with_media(
    text: _LabelledIds, written: WrittenText, encoding: Any, placeholders: Placeholders
) -> _LabelledIds:
    """Repeat the tokens of media. Labels of these are -100, and of what is written between them."""
    labels = text.labels
    if written.stamps:
        is_stamp = np.zeros(len(labels), dtype=bool)
        is_stamp[: len(encoding.ids)] = _touched(encoding, written.stamps) >= 0
        labels = np.where(is_stamp, IGNORED_LABEL, labels)
    is_media, repeats = placeholders.repeats(written, text.ids, keep=text.num_special)
    weights = None if text.weights is None else text.weights.repeat(repeats)
    labels = np.where(is_media, IGNORED_LABEL, labels)
    return text._replace(
        ids=text.ids.repeat(repeats), labels=labels.repeat(repeats), weights=weights
    )


def _touched(encoding: Any, spans: list[Span]) -> Ids:
    """Return which of the spans of characters each token touches, int64 [T]; -1: none."""
    if not len(encoding.ids) or not spans:
        return np.full(len(encoding.ids), -1)
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64)  # 3x as fast as asarray
    starts, stops = offsets[0::2], offsets[1::2]
    # Of the spans, which are in order, only the first that ends after a token's start can touch it.
    span_starts, span_stops = np.asarray([*spans, (_NOWHERE, _NOWHERE)], dtype=np.int64).T
    numbers = np.searchsorted(span_stops, starts, side="right")
    return np.where(span_starts[numbers] < stops, numbers, -1)


def _cut(values: Ids, max_length: int, num_special: int) -> Ids:
    """Cut a text to `max_length` tokens. The special tokens at its end are kept.

    For example, [1, 2, 3, 4, EOS] cut to 3 tokens with one special token is [1, 2, EOS].
    """
    num_special = min(num_special, max_length)
    end = len(values) - num_special
    return np.concatenate((values[: max_length - num_special], values[end:]))


def _calls(rows: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the rows of each call of the tokenizer, in order. `sizes` is in bytes."""
    call: list[int] = []
    size = 0
    for row, row_size in zip(rows, sizes, strict=True):
        if call and size + row_size > _CALL_BYTES:
            yield call
            call, size = [], 0
        call.append(row)
        size += row_size
    if call:
        yield call


def _num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8. A tokenizer may make a token of each byte."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
