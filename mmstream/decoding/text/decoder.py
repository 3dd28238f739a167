"""`TextDecoder`: the text of a sample becomes token ids, mask and labels.

Place in the flow: `decoding.sample` calls it after ``json`` is parsed, for all samples of a step at
once:

    messages -> `chat` renders them with the chat template -> tokenizer -> labels of the turns
    caption  -> tokenizer
             -> `placeholders` repeats the tokens of images, where there are any

Ids stay unpadded here, int64 [T]. `batching.collate` pads them, because only it knows the longest
text of the batch. It asks `TextDecoder` for what to pad with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.fields import image_fields
from mmstream.decoding.image.image_shape import ImageShape
from mmstream.decoding.text.chat import Chat, Span, check_messages, probe_chat
from mmstream.decoding.text.image_lengths import ImageLength
from mmstream.decoding.text.placeholders import Ids, Placeholders, check_fields, make_placeholders
from mmstream.errors import ConfigError, DecodeError
from mmstream.types import IGNORED_LABEL

__all__ = ["TextDecoder", "Tokens", "decode_text"]

Tokens: TypeAlias = dict[str, NDArray[np.int64]]
"""``input_ids``, ``attention_mask`` and ``labels`` of a sample, each int64 [T]."""


class _Prompt(NamedTuple):
    """A text to tokenize."""

    text: str
    spans: list[Span] | None
    """The assistant's turns in a conversation. None: this is plain text."""


@dataclass(frozen=True, eq=False)
class TextDecoder:
    """Tokenize text: a callable from a sample to ids, mask and labels.

    The text of a sample is the messages in its ``json`` field, if there are any and the tokenizer
    has a chat template. Else it is the ``txt`` field.

    A decoder can be pickled, and called from many threads at once. It encodes with its own copy of
    the tokenizer's core, because `transformers` writes truncation settings into the shared one.

    Attributes:
        tokenizer: A fast tokenizer of `transformers`.
        max_length: The most tokens of a text, from 1 up. Longer texts lose their end, but special
            tokens at the end of plain text are kept.
        padding: What batches are padded to: "longest", their longest text, or "max_length".
        field: The field to take the text from. "json": only messages. Any other name: only plain
            text. None: messages, else ``txt``.
        image_token: The text for an image where the chat template cannot take images.
        image_length: For vision-language models, how many tokens an image takes: a number from 1
            up, such as the number of patches of the vision tower. Or, where the picture's size
            matters, a function from `ImageShape` to that number, such as ``mm.qwen_vl_length()``.
            Each ``image_token`` in the text becomes that many tokens. The text must hold one for
            each image of the sample. Plain text without any, such as a caption, gets all images at
            its start. None: images do not concern the text.

    Raises:
        ConfigError: The tokenizer is slow: it does not say which characters a token comes from. Or
            a number or `padding` is wrong. Or ``field="json"`` is given without a chat template. Or
            `image_length` is given, and the tokenizer would split `image_token`.

    Examples:
        >>> from mmstream.train.tokenizer import byte_tokenizer  # or AutoTokenizer.from_pretrained
        >>> decoder = TextDecoder(byte_tokenizer(), max_length=2048)
        >>> list(decoder({"txt": b"a cat on a mat"}))
        ['input_ids', 'attention_mask', 'labels']
    """

    tokenizer: Any
    max_length: int = 512
    padding: Literal["longest", "max_length"] = "longest"
    field: str | None = None
    image_token: str = "<image>"
    image_length: int | ImageLength | None = None
    _chat: Chat | None = dataclasses.field(init=False, repr=False)
    _core: Any = dataclasses.field(init=False, repr=False)
    _images: Placeholders | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "is_fast", False):
            name = type(self.tokenizer).__name__
            raise ConfigError(f"tokenizer: {name} is not a fast tokenizer (it has no offsets)")
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length!r}: give a number from 1 up")
        if self.padding not in ("longest", "max_length"):
            raise ConfigError(f'padding={self.padding!r}: "longest" or "max_length"')
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        if self.field == "json" and not has_template:
            raise ConfigError('field="json": the tokenizer has no chat template')
        core = type(self.tokenizer.backend_tokenizer).from_str(
            self.tokenizer.backend_tokenizer.to_str()
        )
        core.no_padding()
        core.enable_truncation(self.max_length)
        images = make_placeholders(core, self.image_token, self.image_length, self.max_length)
        chat = probe_chat(self.tokenizer, self.image_token) if has_template else None
        object.__setattr__(self, "_chat", chat)
        object.__setattr__(self, "_core", core)
        object.__setattr__(self, "_images", images)

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

    @property
    def needs_shapes(self) -> bool:
        """Whether the tokens of a text depend on the shapes of its sample's images."""
        return callable(self.image_length)

    def source(self, sample: dict[str, Any]) -> str:
        """Return the name of the field that a sample's text comes from."""
        if self.field is not None:
            return self.field
        row = sample.get("json")
        has_turns = isinstance(row, dict) and bool(row.get("messages"))
        return "json" if has_turns and self._chat is not None else "txt"

    def __call__(
        self, sample: dict[str, Any], shapes: Sequence[ImageShape] | None = None
    ) -> Tokens:
        """Tokenize one sample.

        Args:
            sample: A sample with ``json`` parsed. Text fields are bytes in UTF-8, or strings.
            shapes: What `ImageDecoder.prepared_shape` returns for each of the sample's images, in
                the order of `image_fields`. Needed where ``image_length`` is a function.

        Returns:
            ``input_ids``, ``attention_mask`` (ones) and ``labels``, each int64 [T] with
            1 <= T <= max_length. Labels of plain text are the ids. Labels of messages are the ids
            in the assistant's turns (content and end-of-turn mark), and -100 elsewhere. All are
            -100 when every turn is cut off, or there is none. Labels of image tokens are -100 with
            ``image_length``, and then only text after the last image is cut off.

        Raises:
            DecodeError: There is no text, it is not UTF-8, or the template or the tokenizer refuses
                it. With ``image_length`` also: the text does not show the sample's images, each
                once and in order, or ``max_length`` ends before an image does.
            ConfigError: ``image_length`` is a function, and it returned no whole number from 1 up,
                or the shape of an image is missing.
        """
        tokens = self.decode_all([sample], [shapes])[0]
        if isinstance(tokens, DecodeError):
            raise tokens
        return tokens

    def decode_all(
        self,
        samples: Sequence[dict[str, Any]],
        shapes: Sequence[Sequence[ImageShape] | None] | None = None,
    ) -> list[Tokens | DecodeError]:
        """Tokenize the texts of many samples in one call of the tokenizer.

        Args:
            samples: Samples as a call takes them.
            shapes: One entry per sample, as a call takes it.

        Returns:
            One entry per sample: what a call returns, or the DecodeError that it raises.

        Raises:
            ConfigError: As in a call.
        """
        prompts = [self._try(self._prompt, sample) for sample in samples]
        encodings: list[Any] = [None] * len(samples)
        for is_chat in (False, True):
            rows = [
                row
                for row, prompt in enumerate(prompts)
                if isinstance(prompt, _Prompt) and (prompt.spans is not None) is is_chat
            ]
            texts = [prompts[row].text for row in rows]
            for row, encoding in zip(rows, self._encode(texts, is_chat), strict=True):
                encodings[row] = encoding
        return [
            prompt
            if isinstance(prompt, DecodeError)
            else self._try(self._finish, sample, prompt, encoding, sample_shapes)
            for sample, prompt, encoding, sample_shapes in zip(
                samples, prompts, encodings, shapes or [None] * len(samples), strict=True
            )
        ]

    def _encode(self, texts: list[str], is_chat: bool) -> list[Any]:
        """Return the encoding of each text, or its error.

        Plain text is encoded without offsets, which would take as much time as the ids.
        """
        encode = self._core.encode_batch if is_chat else self._core.encode_batch_fast
        try:
            return list(encode(texts, add_special_tokens=not is_chat)) if texts else []
        except MemoryError:
            raise
        except Exception as error:  # the library's errors have no type of their own
            if len(texts) == 1:
                return [DecodeError(f"tokenizer: {' '.join(str(error).split())}")]
        # One bad text fails the whole call. Encode each text by itself to know which.
        return [self._encode([text], is_chat)[0] for text in texts]

    def _prompt(self, sample: dict[str, Any]) -> _Prompt:
        """Return the text of a sample."""
        if self.source(sample) == "json":
            return self._render(sample)
        text = self._plain_text(sample)
        return _Prompt(self._images.put_before(text, sample) if self._images else text, None)

    def _finish(
        self,
        sample: dict[str, Any],
        prompt: _Prompt,
        encoding: Any,
        shapes: Sequence[ImageShape] | None,
    ) -> Tokens:
        """Make tokens of an encoding."""
        if isinstance(encoding, DecodeError):
            raise encoding
        ids = labels = np.asarray(encoding.ids, dtype=np.int64)
        if prompt.spans is not None:
            labels = _labels(ids, encoding, prompt.spans)
        if self._images is not None:
            # Special tokens that the tokenizer put at the end. A chat template writes its own.
            num_special = 0
            if prompt.spans is None:
                is_special = reversed(encoding.special_tokens_mask)
                num_special = sum(1 for _ in takewhile(bool, is_special))
            ids, labels = self._images.expand(
                sample, prompt.text, ids, labels, shapes=shapes, keep=num_special
            )
        if not len(ids):
            raise DecodeError("empty text: no tokens")
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}

    @staticmethod
    def _try(function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result, or its DecodeError."""
        try:
            return function(*args)
        except DecodeError as error:
            return error

    def _plain_text(self, sample: dict[str, Any]) -> str:
        name = self.source(sample)
        value = sample.get(name)
        if value is None:
            raise DecodeError("no text: neither messages with a chat template nor this field")
        return decode_text(value)

    def _render(self, sample: dict[str, Any]) -> _Prompt:
        row = sample.get("json")
        if self._chat is None or not isinstance(row, dict):
            raise DecodeError("no messages: not a JSON object")
        messages = check_messages(row.get("messages"))
        if self._images is not None:
            check_fields(messages, image_fields(sample))
        return _Prompt(*self._chat.render(messages))


def _labels(ids: Ids, encoding: Any, spans: list[Span]) -> Ids:
    """Return the ids of the tokens that touch one of the assistant's spans, and -100 elsewhere."""
    labels = np.full_like(ids, IGNORED_LABEL)
    if len(labels):
        starts, stops = np.asarray(encoding.offsets, dtype=np.int64).T
        for start, stop in spans:
            inside = (starts < stop) & (stops > start)
            labels[inside] = ids[inside]
    return labels


def decode_text(value: object) -> str:
    """Return a text field as a string.

    Raises:
        DecodeError: The value is neither a string nor bytes in UTF-8.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise DecodeError(f"expected text, not {type(value).__name__}")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"not UTF-8: {error.reason} at byte {error.start}") from None
