"""Conversations to text, and which characters of it the assistant wrote.

Part of the decode stage, called by `decoding.text`. A chat template is any program
from list of messages to string, and few mark what the model should learn. So the assistant's spans
are found from outside: the rendering of the messages before a turn (with the prompt to generate it)
ends where the turn starts, and the rendering up to and with the turn ends where it ends. Where a
template is not that regular (Qwen3 drops the reasoning of earlier turns and adds an empty one to
the last), the turn's own text and the template's end-of-turn mark are looked for instead.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2

from mmstream.errors import DecodeError

Message = dict[str, Any]
Span = tuple[int, int]

_MARKED = threading.Lock()
"""transformers marks turns in one tracker a template, which all threads share."""

_PROBE = "mmstream-probe"
_SPACE = r"\s{0,64}?"  # bounded: a long run of white space must not cost its square
_LEADING_SPACE = re.compile(r"\s*")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template raises on messages it was not written for; anything else is a bug and passes.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError)


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template and what probing it showed.

    Attributes:
        tokenizer: Of `transformers`, with a chat template.
        image_token: Stands for an image where the template cannot take one.
        takes_parts: Whether content may be a list of parts, images included.
        end_of_turn: The text that follows the assistant's content, such as ``<|im_end|>``.
        marks_turns: Whether the template has ``{% generation %}`` blocks, which then decide.
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
            The text, and the (start, stop) character ranges of the assistant's turns in order:
            content and end-of-turn mark, without the header before and white space after.

        Raises:
            DecodeError: The template refuses the messages, or a turn cannot be found in the text.
        """
        messages = [self._adapt(message) for message in messages]
        try:
            if self.marks_turns:
                with _MARKED:
                    return _render_marked(self.tokenizer, messages)
            text = _render(self.tokenizer, messages)
        except _TEMPLATE_ERRORS as error:
            raise DecodeError(f"chat template: {' '.join(str(error).split())}") from None
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
        """Find message i, an assistant's, in the text from position on."""
        content = flatten(messages[i]["content"], self.image_token).strip()
        turn = re.compile(re.escape(content) + _SPACE + re.escape(self.end_of_turn))
        before = _try_render(self.tokenizer, messages[:i], add_generation_prompt=True)
        if before is None or not text.startswith(before):
            found = turn.search(text, self._after(messages[:i], text, position))
            return found.span() if found else None
        start = len(before)
        spaces = _LEADING_SPACE.match(text, start)
        body = spaces.end() if spaces else start
        if self.end_of_turn and (found := turn.match(text, body)):
            return start, found.end()
        upto = _try_render(self.tokenizer, messages[: i + 1])
        if upto is not None and len(upto) >= start and text.startswith(upto):
            return start, self._trim(text, start, len(upto))
        if text.startswith(content, body):
            return start, body + len(content)
        stop = text.find(self.end_of_turn, start) if self.end_of_turn else -1
        return None if stop < 0 else (start, stop + len(self.end_of_turn))

    def _after(self, earlier: list[Message], text: str, position: int) -> int:
        """Move past what was said since the assistant's last turn: it may say the same."""
        said = list(takewhile(lambda message: message["role"] != "assistant", reversed(earlier)))
        for message in reversed(said):
            content = flatten(message["content"], self.image_token).strip()
            found = text.find(content, position)
            position = found + len(content) if found >= 0 else position
        return position

    def _trim(self, text: str, start: int, stop: int) -> int:
        """Leave out white space after the end-of-turn mark: no model has to learn it."""
        trimmed = start + len(text[start:stop].rstrip())
        return trimmed if text.endswith(self.end_of_turn, start, trimmed) else stop

    def _adapt(self, message: Message) -> Message:
        content = message["content"]
        if not self.takes_parts:
            return {**message, "content": flatten(content, self.image_token)}
        if isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def probe_chat(tokenizer: Any, image_token: str) -> Chat:
    """Find out, by rendering a few tiny conversations, what a chat template can do.

    Args:
        tokenizer: Of `transformers`, with a chat template.
        image_token: Stands for an image where the template cannot take one.

    Returns:
        The template's description. A template that treats content parts as a string, drops images
        or fails on them is given strings.
    """
    part = {"type": "text", "text": _PROBE}
    as_string = _try_render(tokenizer, _conversation(_PROBE))
    as_parts = _try_render(tokenizer, _conversation([part]))
    with_image = _try_render(tokenizer, _conversation([{"type": "image"}, part], [part]))
    takes_parts = (
        _is_whole(as_parts)
        and (as_string == as_parts or not _is_whole(as_string))
        and with_image not in (None, as_parts)
    )
    rendered = (as_parts if takes_parts else as_string) or ""
    tail = rendered.rpartition(_PROBE)[2]
    return Chat(
        tokenizer=tokenizer,
        image_token=image_token,
        takes_parts=takes_parts,
        end_of_turn=tail.strip() or tail,
        marks_turns=bool(_GENERATION.search(tokenizer.get_chat_template())),
    )


def check_messages(messages: Any) -> list[Message]:
    """Check what a dataset calls messages before a template sees it.

    Args:
        messages: Parsed JSON.

    Returns:
        The same list: not empty, each a dict with a string ``role`` and as ``content`` a string
        or a list of parts, each a dict with a ``type``, and with a string ``text`` if it is text.

    Raises:
        DecodeError: Says which message is not so.
    """
    if not isinstance(messages, list) or not messages:
        raise DecodeError("messages: not a list of turns")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DecodeError(f"messages[{i}]: no role")
        content = message.get("content")
        good = isinstance(content, str) or (
            isinstance(content, list) and all(map(_is_part, content))
        )
        if not good:
            raise DecodeError(f"messages[{i}]: content is neither text nor a list of parts")
    return messages


def flatten(content: str | list[dict[str, Any]], image_token: str) -> str:
    """Join content parts to a string: texts as they are, an image as its token, others empty."""
    if isinstance(content, str):
        return content
    strings = {"image": image_token}
    return "".join(
        part["text"] if part["type"] == "text" else strings.get(part["type"], "")
        for part in content
    )


def _is_part(part: object) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _is_whole(rendered: str | None) -> bool:
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
