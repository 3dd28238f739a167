"""Conversations -> text, and the characters of it that the assistant wrote.

Place in the flow: `TextDecoder` renders the messages of a sample here, and tokenizes the text.

A chat template can be any program from messages to a string. Few templates mark what the model
should learn, so the assistant's turns are located from outside:

- A turn starts where the rendering of the messages before it ends (with the generation prompt).
- It ends where the rendering of the messages up to it ends.

Some templates are not that regular: Qwen3 drops the reasoning of earlier turns, and adds an empty
one to the last. Then the turn's own text and the end-of-turn mark are searched for.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2

from mmstream.errors import DecodeError, escaped

Message = dict[str, Any]
"""One turn: ``role`` and ``content``."""

Span = tuple[int, int]
"""(start, stop) of characters in a text."""

_MARKED_LOCK = threading.Lock()
"""transformers keeps one tracker of marked turns per template, which all threads share."""

_PROBE = "mmstream-probe"
_SPACE = r"\s{0,64}?"  # bounded, because a search over white space without a limit takes n^2 steps
_LEADING_SPACE = re.compile(r"\s*")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template raises for messages that it was not written for. Other errors are bugs, and pass.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)

MAX_MESSAGES = 500
"""Most messages of a conversation."""

MAX_PARTS = 10_000
"""Most parts of all messages of a conversation."""

MAX_RENDERED = 250_000
"""Most answers times messages and parts: each answer takes a rendering of what comes before it.

A template takes up to 10 µs for a message or a part.
"""

_MAX_CANDIDATES = 1000
"""Places at which a turn's text is tried, where a template renders turns in an irregular way."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, and what it can do.

    Attributes:
        tokenizer: A tokenizer of `transformers` with a chat template.
        image_token: The text for an image where the template takes only strings.
        takes_parts: Whether content may be a list of parts (texts and images).
        end_of_turn: The text that follows the assistant's content, such as ``<|im_end|>``.
        marks_turns: Whether the template marks turns itself, with ``{% generation %}`` blocks.
    """

    tokenizer: Any
    image_token: str
    takes_parts: bool
    end_of_turn: str
    marks_turns: bool

    def render(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Render a conversation.

        Args:
            messages: As `check_messages` returns them.

        Returns:
            The text, and the spans of the assistant's turns in order. A span holds the content and
            the end-of-turn mark, without the header before and the white space after.

        Raises:
            DecodeError: The template refuses the messages, or a turn cannot be found in the text.
        """
        messages = [self._adapt(message) for message in messages]
        try:
            if self.marks_turns:
                with _MARKED_LOCK:
                    return _render_marked(self.tokenizer, messages)
            text = _render(self.tokenizer, messages)
        except _TEMPLATE_ERRORS as error:
            raise DecodeError(f"chat template: {escaped(' '.join(str(error).split()))}") from None
        spans: list[Span] = []
        position = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._find(messages, i, text, position)
                if span is None or not position <= span[0] <= span[1]:
                    raise DecodeError(
                        f"chat template: turn {i} cannot be found in the rendered text"
                    )
                spans.append(span)
                position = span[1]
        return text, spans

    def _find(self, messages: list[Message], i: int, text: str, position: int) -> Span | None:
        """Find message i, an assistant's, in the text. Earlier turns end before `position`."""
        content = flatten(messages[i]["content"], self.image_token).strip()
        # The content is no part of the pattern: to compile a megabyte takes seconds.
        end = re.compile(_SPACE + re.escape(self.end_of_turn))
        before = _try_render(self.tokenizer, messages[:i], add_generation_prompt=True)
        if before is None or not text.startswith(before):
            return _search(text, content, end, self._after(messages[:i], text, position))
        start = len(before)
        spaces = _LEADING_SPACE.match(text, start)
        body = spaces.end() if spaces else start
        if self.end_of_turn and text.startswith(content, body):
            match = end.match(text, body + len(content))
            if match:
                return start, match.end()
        with_turn = _try_render(self.tokenizer, messages[: i + 1])
        if with_turn is not None and len(with_turn) >= start and text.startswith(with_turn):
            return start, self._trim(text, start, len(with_turn))
        if text.startswith(content, body):
            return start, body + len(content)
        stop = text.find(self.end_of_turn, start) if self.end_of_turn else -1
        return None if stop < 0 else (start, stop + len(self.end_of_turn))

    def _after(self, earlier: list[Message], text: str, position: int) -> int:
        """Return the position after the messages since the assistant's last turn.

        These messages may contain the same text as the turn that is searched for.
        """
        newest_first = list(
            takewhile(lambda message: message["role"] != "assistant", reversed(earlier))
        )
        for message in reversed(newest_first):
            content = flatten(message["content"], self.image_token).strip()
            start = text.find(content, position)
            position = start + len(content) if start >= 0 else position
        return position

    def _trim(self, text: str, start: int, stop: int) -> int:
        """Move the end of a span before the white space after the end-of-turn mark."""
        trimmed = start + len(text[start:stop].rstrip())
        return trimmed if text.endswith(self.end_of_turn, start, trimmed) else stop

    def _adapt(self, message: Message) -> Message:
        """Return a message with content of the kind that the template takes."""
        content = message["content"]
        if not self.takes_parts:
            return {**message, "content": flatten(content, self.image_token)}
        if isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def probe_chat(tokenizer: Any, image_token: str) -> Chat:
    """Find out what a chat template can do, by rendering a few short conversations.

    Args:
        tokenizer: A tokenizer of `transformers` with a chat template.
        image_token: The text for an image where the template takes only strings.

    Returns:
        The template's description. A template gets strings as content if it prints a list as it is,
        drops images or fails on them.
    """
    item = {"type": "text", "text": _PROBE}
    from_string = _try_render(tokenizer, _conversation(_PROBE))
    from_parts = _try_render(tokenizer, _conversation([item]))
    with_image = _try_render(tokenizer, _conversation([{"type": "image"}, item], [item]))
    takes_parts = (
        _has_both_probes(from_parts)
        and (from_string == from_parts or not _has_both_probes(from_string))
        and with_image not in (None, from_parts)
    )
    rendered = (from_parts if takes_parts else from_string) or ""
    tail = rendered.rpartition(_PROBE)[2]
    return Chat(
        tokenizer=tokenizer,
        image_token=image_token,
        takes_parts=takes_parts,
        end_of_turn=tail.strip() or tail,
        marks_turns=bool(_GENERATION.search(tokenizer.get_chat_template())),
    )


def _search(text: str, content: str, end: re.Pattern[str], position: int) -> Span | None:
    """Return the first span from `position` on that holds `content` and then matches `end`."""
    if not content:
        match = end.search(text, position)
        return match.span() if match else None
    for _ in range(_MAX_CANDIDATES):
        start = text.find(content, position)
        if start < 0:
            return None
        if match := end.match(text, start + len(content)):
            return start, match.end()
        position = start + 1
    return None


def check_messages(messages: Any) -> list[Message]:
    """Check the messages of a dataset before a template sees them.

    Args:
        messages: Parsed JSON.

    Returns:
        The same list, which is not empty. Each message is a dict with a string ``role``. Its
        ``content`` is a string or a list of parts. A part is a dict with a ``type``, and with a
        string ``text`` if its type is "text".

    Raises:
        DecodeError: A message has another form; the error says which. Or there are more than
            `MAX_MESSAGES` messages or `MAX_PARTS` parts, or too many of both (`MAX_RENDERED`).
    """
    if not isinstance(messages, list) or not messages:
        raise DecodeError("messages: not a list of turns")
    if len(messages) > MAX_MESSAGES:
        raise DecodeError(
            f"{len(messages):,} messages, the limit is {MAX_MESSAGES:,}; split the conversation"
        )
    num_parts = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DecodeError(f"messages[{i}]: no role")
        content = message.get("content")
        num_parts += len(content) if isinstance(content, list) else 0
        if num_parts > MAX_PARTS:
            raise DecodeError(f"more than {MAX_PARTS:,} parts in the messages")
        is_valid = isinstance(content, str) or (
            isinstance(content, list) and all(map(_is_content_part, content))
        )
        if not is_valid:
            raise DecodeError(f"messages[{i}]: content is neither text nor a list of parts")
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if num_answers * (len(messages) + num_parts) > MAX_RENDERED:
        raise DecodeError(
            f"{num_answers:,} answers among {len(messages):,} messages of {num_parts:,} parts are "
            "too many to locate; split the conversation"
        )
    return messages


def flatten(content: str | list[dict[str, Any]], image_token: str) -> str:
    """Join a message's content to one string: its texts, and a token per image."""
    if isinstance(content, str):
        return content
    strings = {"image": image_token}
    return "".join(
        item["text"] if item["type"] == "text" else strings.get(item["type"], "")
        for item in content
    )


def _is_content_part(item: object) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        return False
    return item["type"] != "text" or isinstance(item.get("text"), str)


def _has_both_probes(rendered: str | None) -> bool:
    """Tell whether a rendering holds the texts of both turns of the probe conversation."""
    return rendered is not None and rendered.count(_PROBE) == 2


def _conversation(question: Any, answer: Any = None) -> list[Message]:
    answer = question if answer is None else answer
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _render(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _try_render(tokenizer: Any, messages: list[Message], **options: Any) -> str | None:
    try:
        return _render(tokenizer, messages, **options)
    except _TEMPLATE_ERRORS:
        return None


def _render_marked(tokenizer: Any, messages: list[Message]) -> tuple[str, list[Span]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(start, stop) for start, stop in spans[0]]
