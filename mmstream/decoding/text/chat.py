"""Conversations -> text, and the characters of it that the assistant wrote.

Place in the flow: `TextDecoder` renders the messages of a sample here, and tokenizes the text.

A chat template can be any program from messages to a string. Few templates mark what the model
should learn, so the assistant's turns are located from outside:

- A turn starts where the rendering of the messages before it ends (with the generation prompt).
  For plain loops over the messages, `message_starts` tells this without rendering them.
- It ends where the rendering of the messages up to it ends.

Some templates are not that regular: Qwen3 drops the reasoning of earlier turns, and adds an empty
one to the last. Then the turn's own text and the end-of-turn mark are searched for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import jinja2

from mmstream.decoding.fields import parse_json
from mmstream.decoding.text.message_starts import MarkingTemplate, marking_template
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

_TRAINED_KEYS = ("train", "loss")
"""Keys of a message that say whether an answer is trained: Axolotl's and ms-swift's."""

MAX_WEIGHT = 1_000_000
"""The largest ``weight`` of a message, which OpenAI's format has as 0 or 1."""

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
        tokens: By kind of media, the text for a medium where the template takes only strings.
        takes_parts: Whether content may be a list of parts (texts and media).
        end_of_turn: The text that follows the assistant's content, such as ``<|im_end|>``.
        marks_turns: Whether the template marks turns itself, with ``{% generation %}`` blocks.
        marking: A copy of the template that says where messages begin. None: the template may look
            ahead, or it marks turns itself.
        generation_prompt: What the template writes for `marking` behind the last message, before an
            answer is generated.
    """

    tokenizer: Any
    tokens: Mapping[str, str]
    takes_parts: bool
    end_of_turn: str
    marks_turns: bool
    marking: MarkingTemplate | None = None
    generation_prompt: str = ""

    def render(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation.

        Args:
            messages: As `check_messages` returns them.
            tools: What the template gets as ``tools``: the functions that the model may call.

        Returns:
            The text, and the spans of those turns of the assistant that are trained, in order. A
            span holds the content and the end-of-turn mark, without the header before and the white
            space after.

        Raises:
            DecodeError: The template refuses the messages, or a turn cannot be found in the text.
        """
        options = {"tools": tools} if tools else {}
        is_trained = [weight > 0 for weight in answer_weights(messages)]
        messages = [self._adapt(message) for message in messages]
        try:
            if self.marks_turns:
                with _MARKED_LOCK:
                    text, spans = _render_marked(self.tokenizer, messages, **options)
            else:
                text, starts = self._render_with_starts(messages, **options)
                spans = self._find_all(messages, text, starts, **options)
        except _TEMPLATE_ERRORS as error:
            raise DecodeError(f"chat template: {escaped(' '.join(str(error).split()))}") from None
        if all(is_trained):
            return text, spans
        if len(spans) != len(is_trained):
            raise DecodeError(
                f"chat template: marks {len(spans)} answers of {len(is_trained)}, and the messages "
                "say which of them are not trained"
            )
        return text, [span for span, trained in zip(spans, is_trained, strict=True) if trained]

    def writes_tools(self, text: str, messages: list[Message]) -> bool:
        """Tell whether a text that was rendered with tools differs from the one without."""
        return text != _try_render(self.tokenizer, [self._adapt(message) for message in messages])

    def num_unwritten(self, text: str, messages: list[Message], tools: list[Any] | None) -> int:
        """Return how many parts, other than texts and images, left no trace in the text.

        A template is a program: whether it writes a part shows in a text without it.
        """
        kinds = [_kind_of(part) for message in messages for part in _parts(message)]
        if not self.takes_parts:
            return sum(kind is not None and kind not in self.tokens for kind in kinds)
        options = {"tools": tools} if tools else {}
        num_unwritten = 0
        for kind in sorted({kind for kind in kinds if kind is not None}):
            without = [self._adapt(_without(message, kind)) for message in messages]
            if _try_render(self.tokenizer, without, **options) == text:
                num_unwritten += kinds.count(kind)
        return num_unwritten

    def _render_with_starts(
        self, messages: list[Message], **options: Any
    ) -> tuple[str, list[int] | None]:
        """Render a conversation, and tell where each message begins. None: nobody knows."""
        if self.marking is not None and self.tokenizer.chat_template == self.marking.source:
            template = self.marking.template
            rendered = _render(self.tokenizer, messages, chat_template=template, **options)
            split = self.marking.split(rendered, len(messages))
            if split is not None:
                return split
        return _render(self.tokenizer, messages, **options), None

    def _find_all(
        self, messages: list[Message], text: str, starts: list[int] | None, **options: Any
    ) -> list[Span]:
        """Find the assistant's turns in the text. They are in order."""
        spans: list[Span] = []
        position = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._start(messages, i, text, starts, **options)
                span = self._find(messages, i, text, position, start, **options)
                if span is None or not position <= span[0] <= span[1]:
                    raise DecodeError(
                        f"chat template: turn {i} cannot be found in the rendered text"
                    )
                spans.append(span)
                position = span[1]
        return spans

    def _start(
        self,
        messages: list[Message],
        i: int,
        text: str,
        starts: list[int] | None,
        **options: Any,
    ) -> int | None:
        """Return the end of what is rendered before answer i. None: the text begins otherwise."""
        if starts is not None and i:
            is_start = text.startswith(self.generation_prompt, starts[i])
            return starts[i] + len(self.generation_prompt) if is_start else None
        before = _try_render(self.tokenizer, messages[:i], add_generation_prompt=True, **options)
        return None if before is None or not text.startswith(before) else len(before)

    def _find(
        self,
        messages: list[Message],
        i: int,
        text: str,
        position: int,
        start: int | None,
        **options: Any,
    ) -> Span | None:
        """Find message i, an assistant's, in the text.

        Args:
            messages: Of the conversation.
            i: Which of them.
            text: The rendered conversation.
            position: Where earlier turns end.
            start: Where the rendering of the messages before it ends, if the text begins with that.
            options: Of the template.
        """
        content = flatten(messages[i]["content"], self.tokens).strip()
        if start is None:
            return _search(text, content, self._end, self._after(messages[:i], text, position))
        spaces = _LEADING_SPACE.match(text, start)
        body = spaces.end() if spaces else start
        if self.end_of_turn and text.startswith(content, body):
            match = self._end.match(text, body + len(content))
            if match:
                return start, match.end()
        with_turn = _try_render(self.tokenizer, messages[: i + 1], **options)
        if with_turn is not None and len(with_turn) >= start and text.startswith(with_turn):
            return start, self._trim(text, start, len(with_turn))
        if text.startswith(content, body):
            return start, body + len(content)
        stop = text.find(self.end_of_turn, start) if self.end_of_turn else -1
        return None if stop < 0 else (start, stop + len(self.end_of_turn))

    @cached_property
    def _end(self) -> re.Pattern[str]:
        # The content is no part of the pattern: to compile a megabyte takes seconds.
        return re.compile(_SPACE + re.escape(self.end_of_turn))

    def _after(self, earlier: list[Message], text: str, position: int) -> int:
        """Return the position after the messages since the assistant's last turn.

        These messages may contain the same text as the turn that is searched for.
        """
        newest_first = list(
            takewhile(lambda message: message["role"] != "assistant", reversed(earlier))
        )
        for message in reversed(newest_first):
            content = flatten(message["content"], self.tokens).strip()
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
            return {**message, "content": flatten(content, self.tokens)}
        if isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def probe_chat(
    tokenizer: Any, tokens: Mapping[str, str], kinds: Collection[str] = ("image",)
) -> Chat:
    """Find out what a chat template can do, by rendering a few short conversations.

    Args:
        tokenizer: A tokenizer of `transformers` with a chat template.
        tokens: By kind of media, the text for a medium where the template takes only strings.
        kinds: The kinds of media that the template should write.

    Returns:
        The template's description. A template gets strings as content if it prints a list as it is,
        drops media of all these kinds or fails on them.
    """
    item = {"type": "text", "text": _PROBE}
    from_string = _try_render(tokenizer, _conversation(_PROBE))
    from_parts = _try_render(tokenizer, _conversation([item]))
    with_media = [
        _try_render(tokenizer, _conversation([{"type": kind}, item], [item])) for kind in kinds
    ]
    takes_parts = (
        _has_both_probes(from_parts)
        and (from_string == from_parts or not _has_both_probes(from_string))
        and any(text not in (None, from_parts) for text in with_media)
    )
    rendered = (from_parts if takes_parts else from_string) or ""
    tail = rendered.rpartition(_PROBE)[2]
    chat = Chat(
        tokenizer=tokenizer,
        tokens=tokens,
        takes_parts=takes_parts,
        end_of_turn=tail.strip() or tail,
        marks_turns=bool(_GENERATION.search(tokenizer.get_chat_template())),
        marking=marking_template(tokenizer.chat_template),
    )
    return chat if chat.marking is None else _with_generation_prompt(chat)


def _with_generation_prompt(chat: Chat) -> Chat:
    """Find out what a template writes behind the last message. It is the same for all messages."""
    turns = [chat._adapt(message) for message in _conversation(_PROBE)]
    try:
        text, starts = chat._render_with_starts(turns)
        prompted = _render(chat.tokenizer, turns[:1], add_generation_prompt=True)
    except _TEMPLATE_ERRORS:
        starts = None
    if starts is None or not prompted.startswith(text[: starts[1]]):
        return replace(chat, marking=None)
    return replace(chat, generation_prompt=prompted[starts[1] :])


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
        string ``text`` if its type is "text". What says whether it is trained is 0, 1, true or
        false, and its ``weight`` is a number from 0 up.

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
        _check_weight(message, i)
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if num_answers * (len(messages) + num_parts) > MAX_RENDERED:
        raise DecodeError(
            f"{num_answers:,} answers among {len(messages):,} messages of {num_parts:,} parts are "
            "too many to locate; split the conversation"
        )
    return messages


def _check_weight(message: Message, number: int) -> None:
    """Check what a message says about its training."""
    for key in _TRAINED_KEYS:
        if message.get(key) not in (None, 0, 1):
            raise DecodeError(
                f"messages[{number}]: {key} is {escaped(message[key], 60)}; give 0 or false for an "
                "answer that is not trained, 1 or true for others"
            )
    weight = message.get("weight")
    is_number = weight is None or isinstance(weight, int | float)
    if not is_number or not 0 <= (weight or 0) <= MAX_WEIGHT:
        raise DecodeError(
            f"messages[{number}]: weight is {escaped(weight, 60)}; give a number from 0 to "
            f"{MAX_WEIGHT:,}"
        )


def check_tools(tools: Any) -> list[Any] | None:
    """Return the ``tools`` of a dataset as a list. None: there are none.

    Args:
        tools: A list, or JSON of one.

    Raises:
        DecodeError: It is neither.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools.encode())
        except DecodeError as error:
            raise DecodeError(f"tools: {error}") from None
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DecodeError("tools: not a list of functions")
    return tools


def answer_weights(messages: list[Message]) -> list[float]:
    """Return the weight of each answer in the loss: its ``weight``, 0 where it is not trained."""
    return [
        float(all(message.get(key) in (None, 1) for key in _TRAINED_KEYS))
        * float(1 if message.get("weight") is None else message["weight"])
        for message in messages
        if message["role"] == "assistant"
    ]


def flatten(content: str | list[dict[str, Any]], tokens: Mapping[str, str]) -> str:
    """Join a message's content to one string: its texts, and the token of each medium's kind."""
    if isinstance(content, str):
        return content
    return "".join(
        item["text"] if item["type"] == "text" else tokens.get(item["type"], "") for item in content
    )


def _parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message; none where its content is a string."""
    return message["content"] if isinstance(message["content"], list) else []


def _kind_of(part: dict[str, Any]) -> str | None:
    """Return "video", "audio" or "other" for a part; None for a text or an image.

    There are few kinds, because a text is rendered again for each.
    """
    if part["type"] in ("text", "image"):
        return None
    return part["type"] if part["type"] in ("video", "audio") else "other"


def _without(message: Message, kind: str) -> Message:
    """Return a message without its parts of a kind."""
    if not isinstance(message["content"], list):
        return message
    return {**message, "content": [part for part in _parts(message) if _kind_of(part) != kind]}


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


def _render_marked(
    tokenizer: Any, messages: list[Message], **options: Any
) -> tuple[str, list[Span]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **options,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(start, stop) for start, stop in spans[0]]
