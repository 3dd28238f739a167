"""Text to token ids: messages through the tokenizer's chat template, captions as they are.

Part of the decode stage, after `json` is parsed. Ids stay unpadded, int64 [T]; padding is the
collate's, which alone knows the batch's longest and asks `TextDecoder` for what to pad with.
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
"""``input_ids``, ``attention_mask`` and ``labels`` of a sample."""


class _Prompt(NamedTuple):
    """What is tokenized."""

    text: str
    spans: list[Span] | None
    """Of a conversation, the assistant's turns; None: plain text."""


@dataclass(frozen=True, eq=False)
class TextDecoder:
    """Tokenize text: a callable from a sample to ids, mask and labels.

    Takes the messages of the ``json`` field when there are turns and the tokenizer has a chat
    template, else ``txt``. Can be pickled, and called from many threads at once: it encodes with
    its own copy of the tokenizer's core, since `transformers` writes truncation settings into the
    shared one.

    Attributes:
        tokenizer: A fast tokenizer of `transformers`.
        max_length: Tokens to keep, from the left; special tokens at the end of plain text survive.
        padding: What the collate pads to: the batch's longest, or always ``max_length``.
        field: The field to take instead: "json" insists on messages, any other name on text.
        image_token: Stands for an image in the text where the chat template cannot take images.
        image_length: For vision-language models: tokens that an image takes, such as the patches of
            the vision tower; or, where that depends on the picture, a function from `ImageShape` to
            it, such as ``mm.qwen_vl_length()``. Each ``image_token`` in the text becomes so many;
            the text must hold one for each image of the sample. Before plain text without any, such
            as a caption, all images are put. None: images are no concern of the text.

    Raises:
        ConfigError: A slow tokenizer (it cannot say which characters a token came from, so turns
            cannot be told apart), a bad number or padding, ``field="json"`` without a chat
            template, or ``image_length`` with an ``image_token`` that the tokenizer would split.
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
        """Id to pad ``input_ids`` with: the pad token's, else the end-of-text token's, else 0."""
        for token_id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    @property
    def pad_to(self) -> int | None:
        """The fixed length to pad to, or None for the batch's longest."""
        return self.max_length if self.padding == "max_length" else None

    @property
    def padding_side(self) -> str:
        """The tokenizer's, "right" or "left"."""
        return str(self.tokenizer.padding_side)

    @property
    def needs_shapes(self) -> bool:
        """Whether the tokens of a text depend on the shapes of its sample's images."""
        return callable(self.image_length)

    def source(self, sample: dict[str, Any]) -> str:
        """Name the field that this sample's text comes from."""
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
            sample: With ``json`` parsed. Text fields are bytes in UTF-8, or strings.
            shapes: Where ``image_length`` is a function: `ImageDecoder.prepared_shape` of each of
                the sample's images, in the order of `image_fields`.

        Returns:
            ``input_ids``, ``attention_mask`` (ones) and ``labels``, each int64 [T] with
            1 <= T <= max_length. Labels of plain text are the ids. Labels of messages are -100
            outside the assistant's turns; a turn is its content and its end-of-turn mark. All may
            be -100, when the turns are cut off or there is none. With ``image_length`` labels of
            image tokens are -100, and only what follows the last image is ever cut off.

        Raises:
            DecodeError: There is no text, it is not UTF-8, or the template or the tokenizer refuses
                it. With ``image_length`` also: the text does not show the sample's images, each
                once and in order, or ``max_length`` ends before an image does.
            ConfigError: ``image_length`` is a function and returned no whole number from 1 up, or
                has not been given a shape for each image.
        """
        found = self.decode_all([sample], [shapes])[0]
        if isinstance(found, DecodeError):
            raise found
        return found

    def decode_all(
        self,
        samples: Sequence[dict[str, Any]],
        shapes: Sequence[Sequence[ImageShape] | None] | None = None,
    ) -> list[Tokens | DecodeError]:
        """Tokenize the texts of many samples in one call of the tokenizer.

        Args:
            samples: As a call takes them.
            shapes: Of the images of each, where calls need them.

        Returns:
            Of each sample what calling this returns, or the error that it raises.
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
            else self._try(self._finish, sample, prompt, encoding, of_sample)
            for sample, prompt, encoding, of_sample in zip(
                samples, prompts, encodings, shapes or [None] * len(samples), strict=True
            )
        ]

    def _encode(self, texts: list[str], is_chat: bool) -> list[Any]:
        """Return the encoding of each text, or the error of those that have none.

        Plain text needs no offsets, which cost as much as the ids.
        """
        encode = self._core.encode_batch if is_chat else self._core.encode_batch_fast
        try:
            return list(encode(texts, add_special_tokens=not is_chat)) if texts else []
        except MemoryError:
            raise
        except Exception as error:  # the library's have no type of their own
            if len(texts) == 1:
                return [DecodeError(f"tokenizer: {' '.join(str(error).split())}")]
        return [self._encode([text], is_chat)[0] for text in texts]

    def _prompt(self, sample: dict[str, Any]) -> _Prompt:
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
        if isinstance(encoding, DecodeError):
            raise encoding
        ids = labels = np.asarray(encoding.ids, dtype=np.int64)
        if prompt.spans is not None:
            labels = _labels(ids, encoding, prompt.spans)
        if self._images is not None:
            num_last = 0  # special tokens at the end, of plain text alone
            if prompt.spans is None:
                num_last = sum(1 for _ in takewhile(bool, reversed(encoding.special_tokens_mask)))
            ids, labels = self._images.expand(
                sample, prompt.text, ids, labels, shapes=shapes, keep=num_last
            )
        if not len(ids):
            raise DecodeError("empty text: no tokens")
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}

    @staticmethod
    def _try(function: Callable[..., Any], *args: Any) -> Any:
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
    """Return the ids where a token touches one of the assistant's spans, -100 elsewhere."""
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
        DecodeError: It is neither a string nor bytes in UTF-8.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise DecodeError(f"text expected, found {type(value).__name__}")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"not UTF-8: {error.reason} at byte {error.start}") from None
