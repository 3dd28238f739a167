"""Text to token ids: messages through the tokenizer's chat template, captions as they are.

Part of the decode stage, after `json` is parsed. Ids stay unpadded, int64 [T]; padding is the
collate's, which alone knows the batch's longest and asks `TextDecoder` for what to pad with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmstream.decoding.chat import Chat, check_messages, probe_chat
from mmstream.errors import ConfigError, DecodeError

IGNORED_LABEL = -100  # what torch's cross entropy leaves out


@dataclass(frozen=True, eq=False)
class TextDecoder:
    """Tokenize one sample's text: a callable from a sample to ids, mask and labels.

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

    Raises:
        ConfigError: A slow tokenizer (it cannot say which characters a token came from, so turns
            cannot be told apart), a bad number or padding, or ``field="json"`` without a chat
            template.
    """

    tokenizer: Any
    max_length: int = 512
    padding: Literal["longest", "max_length"] = "longest"
    field: str | None = None
    image_token: str = "<image>"
    _chat: Chat | None = dataclasses.field(init=False, repr=False)
    _core: Any = dataclasses.field(init=False, repr=False)

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
        chat = probe_chat(self.tokenizer, self.image_token) if has_template else None
        object.__setattr__(self, "_chat", chat)
        object.__setattr__(self, "_core", core)

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

    def source(self, sample: dict[str, Any]) -> str:
        """Name the field that this sample's text comes from."""
        if self.field is not None:
            return self.field
        row = sample.get("json")
        has_turns = isinstance(row, dict) and bool(row.get("messages"))
        return "json" if has_turns and self._chat is not None else "txt"

    def __call__(self, sample: dict[str, Any]) -> dict[str, NDArray[np.int64]]:
        """Tokenize one sample.

        Args:
            sample: With ``json`` parsed. Text fields are bytes in UTF-8, or strings.

        Returns:
            ``input_ids``, ``attention_mask`` (ones) and ``labels``, each int64 [T] with
            1 <= T <= max_length. Labels of plain text are the ids. Labels of messages are -100
            outside the assistant's turns; a turn is its content and its end-of-turn mark. All may
            be -100, when the turns are cut off or there is none.

        Raises:
            DecodeError: There is no text, it is not UTF-8, or the template refuses the messages.
        """
        if self.source(sample) == "json":
            return self._encode_messages(sample.get("json"))
        encoding = self._core.encode(self._plain_text(sample))
        return _arrays(encoding.ids, np.asarray(encoding.ids, dtype=np.int64))

    def _plain_text(self, sample: dict[str, Any]) -> str:
        name = self.source(sample)
        value = sample.get(name)
        if value is None:
            raise DecodeError("no text: neither messages with a chat template nor this field")
        return decode_text(value)

    def _encode_messages(self, row: object) -> dict[str, NDArray[np.int64]]:
        if self._chat is None or not isinstance(row, dict):
            raise DecodeError("no messages: not a JSON object")
        text, spans = self._chat.render(check_messages(row.get("messages")))
        encoding = self._core.encode(text, add_special_tokens=False)
        labels = np.full(len(encoding.ids), IGNORED_LABEL, dtype=np.int64)
        if len(labels):
            ids = np.asarray(encoding.ids, dtype=np.int64)
            starts, stops = np.asarray(encoding.offsets, dtype=np.int64).T
            for start, stop in spans:
                inside = (starts < stop) & (stops > start)
                labels[inside] = ids[inside]
        return _arrays(encoding.ids, labels)


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


def _arrays(ids: list[int], labels: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    if not ids:
        raise DecodeError("empty text: no tokens")
    input_ids = np.asarray(ids, dtype=np.int64)
    return {"input_ids": input_ids, "attention_mask": np.ones_like(input_ids), "labels": labels}
