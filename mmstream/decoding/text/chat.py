"""Conversations -> text, and the characters of it that the assistant wrote.

Place in the flow: `TextDecoder` renders the messages of a sample here, and tokenizes the text.

A chat template can be any program from messages to a string. Some mark what the model generates,
for `transformers`: then these marks hold. With others, an answer is the difference of renderings:

- It starts after the generation prompt: what the template writes after the messages before it.
- It ends where the template goes on to the next message, without the white space after its end
  mark. Where the template writes no such mark, the token that begins the next turn ends the answer.

`message_starts` tells what the template wrote for each message, so that a long conversation is
rendered once, and once more for each role before an answer. Nothing is searched by its content.
Where a template cannot be read so, it has to mark its answers.
"""

from __future__ import annotations

import datetime
import json
import logging
import multiprocessing
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jinja2

from mmstream.decoding.text.message_starts import (
    GENERATION,
    MarkedText,
    holds_mark,
    marking_source,
    split,
)
from mmstream.decoding.text.turns import CALL, ROLES, join_calls, read_calls
from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import parse_json

_log = logging.getLogger(__name__)

Message = dict[str, Any]
"""One turn: ``role`` and ``content``."""

Span = tuple[int, int]
"""(start, stop) of characters in a text."""

DEFAULT_TODAY = datetime.date(2026, 1, 1)
"""The date that chat templates write, unless a decoder is told another one."""

_PROBE = "mmstream-probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_DATE = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")
_DEVELOPER = re.compile(r"""(["'])developer\1""")
_CLOCK = re.compile(r"strftime_now\s*\(")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_END_OF_THOUGHT = "</think>"
_INK = re.compile(r"\S|\Z")
_TAG = re.compile(r"<[^<>\s]*>")
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


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[Span]
    """The turns of the assistant that are trained, in order: what the model generates of them."""
    weights: list[float]
    """Of each span in the loss."""
    messages: list[Message]
    """As the template got them."""
    marked: MarkedText
    """Which message wrote what."""


@dataclass(frozen=True)
class Chat:
    """A chat template, and what it can do.

    Attributes:
        tokenizer: A tokenizer of `transformers` with this chat template.
        tokens: By kind of media, the text for a medium where the template takes only strings.
        template: The chat template.
        kinds: The kinds of media that it should write.
        tools: What it gets as ``tools`` while it is probed.
        today: The date that it writes, if it writes one. None: `DEFAULT_TODAY`.
        takes_parts: Whether content may be a list of parts (texts and media).
        takes_strings: Whether content may be a string.
        prompt: What the template writes for an answer to a user, before it is generated.
        header: What it writes before the content of an answer, if it writes no prompt. None:
            unknown.
        tail: What it writes between the content of an answer and the next turn. None: unknown.
        others: The tokenizer's other templates, by their text.
    """

    tokenizer: Any
    tokens: Mapping[str, str]
    template: str
    kinds: Collection[str]
    tools: list[Any] | None = None
    today: datetime.date | None = None
    takes_parts: bool = False
    takes_strings: bool = True
    prompt: str = ""
    header: str | None = None
    tail: str | None = None
    others: dict[str, Chat] = field(default_factory=dict, compare=False, repr=False)

    def chosen(self, tools: list[Any] | None) -> Chat:
        """Return what the tokenizer renders with: some have a template of their own for tools."""
        template = self.tokenizer.get_chat_template(tools=tools)
        if template == self.template:
            return self
        if template not in self.others:
            probe = [_PROBE_TOOL] if template != self.tokenizer.get_chat_template() else None
            self.others[template] = _probed(
                Chat(self.tokenizer, self.tokens, template, self.kinds, probe, self.today)
            )
        return self.others[template]

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation.

        Args:
            messages: As `check_messages` returns them.
            tools: What the template gets as ``tools``: the functions that the model may call.

        Returns:
            The text, and those turns of the assistant in it that are trained: from the first
            character that the model generates to the end mark, without the white space after it.

        Raises:
            DecodeError: The template refuses the messages, or a turn cannot be found in the text.
        """
        weights = answer_weights(messages)
        messages = [self._adapt(message) for message in messages]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            if holds_mark(messages) or holds_mark(tools):
                raise DecodeError("a message or a tool holds the character U+FDD0: remove it")
            marked = self._render(messages, tools)
            if self.marks_turns:
                owners = [number for number, _ in marked.generated]
                spans = [span for _, span in marked.generated]
            else:
                for i in answers:
                    if not marked.segments.get(i):
                        raise DecodeError(
                            f"chat template: turn {i} cannot be found in the rendered text: mark "
                            "what the model writes in the template, between {% generation %} and "
                            "{% endgeneration %}"
                        )
                owners, spans = answers, self._locate(messages, answers, marked, tools)
        except _TEMPLATE_ERRORS as error:
            raise DecodeError(f"chat template: {escaped(' '.join(str(error).split()))}") from None
        if not set(owners) <= set(answers) and any(weight != 1 for weight in weights):
            raise DecodeError(
                f"chat template: it marks {len(spans)} answers of {len(answers)}, and the messages "
                "say which of them are not trained, or how much each counts"
            )
        weight_of = dict(zip(answers, weights, strict=True))
        weights = [weight_of.get(owner, 1.0) for owner in owners]
        trained = [entry for entry in zip(spans, weights, strict=True) if entry[1]]
        return Rendered(
            marked.text,
            [span for span, _ in trained],
            [weight for _, weight in trained],
            messages,
            marked,
        )

    @cached_property
    def marks_turns(self) -> bool:
        """Whether the template marks turns itself, with ``{% generation %}`` blocks."""
        return GENERATION.search(self.template) is not None

    def writes_tools(self, rendered: Rendered) -> bool:
        """Tell whether a text that was rendered with tools differs from the one without."""
        return rendered.text != self._try_render(rendered.messages)

    def num_unwritten(
        self, text: str, messages: list[Message], tools: list[Any] | None = None
    ) -> int:
        """Return how many parts, other than texts and images, left no trace in the text.

        A template is a program: whether it writes a part shows in a text without it.
        """
        kinds = [_kind_of(part) for message in messages for part in _parts(message)]
        if not self.takes_parts:
            return sum(kind is not None and kind not in self.tokens for kind in kinds)
        num_unwritten = 0
        for kind in sorted({kind for kind in kinds if kind is not None}):
            without = [self._adapt(_without(message, kind)) for message in messages]
            if self._try_render(without, tools) == text:
                num_unwritten += kinds.count(kind)
        return num_unwritten

    def lost(self, rendered: Rendered, tools: list[Any] | None) -> tuple[list[str], int]:
        """Look for calls, thoughts and texts that the template did not write.

        Each of them is rendered once more with a trace in it. Many templates write thoughts in the
        last turns only: a model does not see its earlier ones either.

        Returns:
            What the template never writes, such as "messages[1]: a tool call"; and how many others
            it leaves out of this conversation, but writes where the conversation ends with them.
        """
        traces: dict[str, tuple[int, str]] = {}
        traced = [
            _traced(message, number, traces) if self._is_at_risk(rendered, number) else message
            for number, message in enumerate(rendered.messages)
        ]
        text = self._try_render(traced, tools) if traces else None
        if text is None:
            return [], 0
        text = text.lower()  # some templates write capitals
        absent = {trace: origin for trace, origin in traces.items() if trace not in text}
        unwritten, hidden = [], dict[str, bool]()
        for trace, (number, what) in absent.items():
            if rendered.messages[number]["role"] == "assistant" and what not in hidden:
                shorter = self._try_render(traced[: number + 1], tools)
                hidden[what] = number + 1 < len(traced) and trace in (shorter or "").lower()
            if not hidden.get(what):
                unwritten.append(f"messages[{number}]: {what}")
        return unwritten, len(absent) - len(unwritten)

    def _is_at_risk(self, rendered: Rendered, number: int) -> bool:
        """Tell whether a template may have left out something of a message."""
        message = rendered.messages[number]
        texts = [part["text"].strip() for part in _text_parts(message)]
        if message["role"] == "assistant" and (
            message.get("tool_calls")
            or any(message.get(key) for key in _THOUGHT_KEYS)
            or any(_END_OF_THOUGHT in text for text in texts)
        ):
            return True
        if number == 0 and message["role"] == "system" and self._writes_system:
            return False
        segments = rendered.marked.segments.get(number, [(0, 0)])
        return not all(
            any(rendered.text.find(text, *segment) >= 0 for segment in segments) for text in texts
        )

    @cached_property
    def _writes_system(self) -> bool:
        turns = [{"role": "system", "content": _PROBE}, *_conversation("?")]
        return _PROBE in (self._try_render([self._adapt(turn) for turn in turns], self.tools) or "")

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the template joins the arguments of a call to other texts: DeepSeek's do."""
        turns = _conversation("?")
        call: Any = {"name": _PROBE, "arguments": {}}
        turns[1]["tool_calls"] = [{"id": "call00001", "type": "function", "function": call}]
        if self._try_render(turns, self.tools) is not None:
            return False
        call["arguments"] = "{}"
        return self._try_render(turns, self.tools) is not None

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """A pattern of the tokens that the tokenizer never splits."""
        tokens = {str(token.content) for token in self.tokenizer.added_tokens_decoder.values()}
        tokens |= set(self.tokenizer.all_special_tokens)
        longest_first = sorted(tokens - {""}, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _render(
        self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> MarkedText:
        """Render messages, and tell who wrote what, if the template can be marked."""
        options = {"tools": tools} if tools else {}
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=marking_source(_dated(self.template, self.today or DEFAULT_TODAY)),
            add_generation_prompt=prompt,
            **options,
        )
        return split(text, len(messages))

    def _try_render(self, messages: list[Message], tools: list[Any] | None = None) -> str | None:
        try:
            return self._render(messages, tools).text
        except _TEMPLATE_ERRORS:
            return None

    def _locate(
        self,
        messages: list[Message],
        answers: list[int],
        marked: MarkedText,
        tools: list[Any] | None,
    ) -> list[Span]:
        """Return the span of each answer, of a text that tells who wrote what."""
        prompts: list[tuple[str, str, str]] = []
        spans = []
        for i in answers:
            (start, stop), *others = marked.segments[i]
            prompt = self._prompt_of(messages, i, marked, tools, prompts)
            following = messages[i + 1] if i + 1 < len(messages) else None
            if not i:
                start = self._first_start(messages, marked, tools)
            if others or (following is not None and not marked.segments.get(i + 1)):
                stop = self._own_end(messages, i, marked, tools)
            if not prompt and marked.text.startswith(self.prompt, start, stop):
                prompt = self.prompt  # not asked for here, and written all the same
            begin = self._begin(i, prompt, marked.text, start, stop)
            spans.append((begin, self._end(marked.text, begin, stop, following)))
        return spans

    def _prompt_of(
        self,
        messages: list[Message],
        i: int,
        marked: MarkedText,
        tools: list[Any] | None,
        earlier: list[tuple[str, str, str]],
    ) -> str:
        """Return what the template writes after the messages before answer i, to generate it.

        Args:
            messages: The conversation.
            i: The number of the answer.
            marked: The whole text.
            tools: The tools of the conversation.
            earlier: (role before the answer, prompt, what the template writes between the prompt
                and the answer's own words) of earlier answers. Gets that of this one.
        """
        if not self.prompt and self.header is None:
            raise DecodeError(
                "chat template: it writes no generation prompt, and around an answer something "
                "that cannot be told apart, so it cannot be told where the model begins"
            )
        if not self.prompt:
            return self.header or ""
        role = messages[i - 1]["role"] if i else ""
        text, (start, stop) = marked.text, marked.segments[i][0]
        own_texts = _own_words(messages[i])
        usual = [("user", self.prompt, "")] if not tools else []
        for before, prompt, between in (*usual, *earlier):
            if before == role and any(
                text.startswith(prompt + between + own_text, start) for own_text in own_texts
            ):
                return prompt
        try:
            asked = self._render(messages[:i], tools, prompt=True) if i else None
        except _TEMPLATE_ERRORS:
            asked = None
        prompt = self.prompt if asked is None else _written_behind(asked, marked, i - 1)
        begin = start + len(prompt)
        offsets = [
            offset for own_text in own_texts if (offset := text.find(own_text, begin, stop)) >= 0
        ]
        between = text[begin : min(offsets, default=begin)]
        # A prompt may hold lines of a thought, which differ from answer to answer.
        if offsets and ("\n" not in between or not between.strip()):
            earlier.append((role, prompt, between))
        return prompt

    def _begin(self, number: int, prompt: str, text: str, start: int, stop: int) -> int:
        """Return where the model begins answer `number`, whose part begins with its prompt.

        Raises:
            DecodeError: It begins with something else.
        """
        begin = self._behind(prompt, text, start, stop)
        left_out = prompt[begin - start :].strip()
        is_mark = _TAG.match(left_out) or self._added.match(left_out)
        if left_out and (begin == start or not is_mark):
            raise DecodeError(
                f"chat template: turn {number} does not begin as its generation prompt does, "
                f"{escaped(prompt, 60)}, so it cannot be told where the model begins"
            )
        return begin

    def _first_start(
        self, messages: list[Message], marked: MarkedText, tools: list[Any] | None
    ) -> int:
        """Return where a conversation's first message begins, which is an answer.

        A template may write its own beginning with it. It does not where a question comes before.

        Raises:
            DecodeError: Then the answer is written in another way.
        """
        start, stop = marked.segments[0][0]
        question = self._adapt(_conversation("?")[0])
        later = self._render([question, *messages], tools)
        own = later.text[slice(*later.segments[1][0])] if later.segments.get(1) else ""
        if not own or not marked.text.endswith(own, start, stop):
            raise DecodeError(
                "chat template: it writes an answer without a question in another way"
            )
        return stop - len(own)

    def _behind(self, prompt: str, text: str, start: int, stop: int) -> int:
        """Return the position after a prompt, or after the tokens and lines at its begin.

        A template may leave out the rest, such as the begin of a thought.
        """
        for piece in self._added.split(prompt):
            for line in piece.splitlines(keepends=True):
                if not text.startswith(line, start, stop):
                    return start
                start += len(line)
        return start

    def _own_end(
        self, messages: list[Message], i: int, marked: MarkedText, tools: list[Any] | None
    ) -> int:
        """Return the end of answer i where the template wrote the next message with it.

        Raises:
            DecodeError: The text does not begin with what the answer is without that message.
        """
        start, stop = marked.segments[i][0]
        for turn in (messages[i], _without_thought(messages[i])):
            try:
                own = self._render([*messages[:i], turn], tools)
            except _TEMPLATE_ERRORS:
                continue
            segments = own.segments.get(i)
            written = own.text[segments[0][0] : own.end].rstrip() if segments else ""
            if written and marked.text.startswith(written, start, stop):
                return start + len(written)
        raise DecodeError(
            f"chat template: it writes messages[{i + 1}] inside of messages[{i}], whose end "
            "cannot be told; leave out the text beside the tool call"
        )

    def _end(self, text: str, start: int, stop: int, following: Message | None) -> int:
        """Return where an answer ends that the template has left at `stop`."""
        trimmed = start + len(text[start:stop].rstrip())
        if self.tail is None:
            ends = [token.end() for token in self._added.finditer(text, start, trimmed)]
            return trimmed if ends and ends[-1] == trimmed else stop
        behind = next(_INK.finditer(text, stop)).start()
        if mark := self.tail.strip():  # of the last answer, it may stand after the messages
            is_behind = text.startswith(mark, behind) and not text.endswith(mark, start, trimmed)
            return behind + len(mark) if is_behind else trimmed
        # The template writes no mark: what the model generates instead begins the next turn.
        token = self._added.match(text, behind)
        is_end = following is None or following["role"] != "assistant"
        return token.end() if token and is_end else stop

    def _adapt(self, message: Message) -> Message:
        """Return a message of the kind that the template takes."""
        adapted = {key: value for key, value in message.items() if value is not None}
        if message["role"] == "developer" and not _DEVELOPER.search(self.template):
            adapted["role"] = "system"
        if message.get("tool_calls") and self._takes_text_arguments:
            adapted["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        content = message["content"]
        is_text = isinstance(content, str) or (
            all(part["type"] == "text" for part in content)
            and (len(content) < 2 or message["role"] == "tool")
        )
        if not self.takes_parts or (self.takes_strings and is_text):
            adapted["content"] = flatten(content, self.tokens)
        elif isinstance(content, str):
            adapted["content"] = [{"type": "text", "text": content}]
        return adapted


def probe_chat(
    tokenizer: Any,
    tokens: Mapping[str, str],
    kinds: Collection[str] = ("image",),
    today: datetime.date | None = None,
) -> Chat:
    """Find out what a chat template can do, by rendering a few short conversations.

    Args:
        tokenizer: A tokenizer of `transformers` with a chat template.
        tokens: By kind of media, the text for a medium where the template takes only strings.
        kinds: The kinds of media that the template should write.
        today: The date that the template writes. None: `DEFAULT_TODAY`, and the log says so.

    Returns:
        The template's description. A template gets strings as content if it prints a list as it is,
        drops media of all these kinds or fails on them.
    """
    return _probed(Chat(tokenizer, tokens, tokenizer.get_chat_template(), kinds, today=today))


def _probed(chat: Chat) -> Chat:
    """Find out what one template can do."""
    if _CLOCK.search(chat.template):
        _log_date(chat.template, chat.today)
    item = {"type": "text", "text": _PROBE}
    from_string = chat._try_render(_conversation(_PROBE), chat.tools)
    from_parts = chat._try_render(_conversation([item]), chat.tools)
    with_media = [
        chat._try_render(_conversation([{"type": kind}, item], [item]), chat.tools)
        for kind in chat.kinds
    ]
    takes_parts = (
        _has_both_probes(from_parts)
        and (from_string == from_parts or not _has_both_probes(from_string))
        and any(text not in (None, from_parts) for text in with_media)
    )
    takes_strings = _has_both_probes(from_string) or not takes_parts
    return _with_turns(replace(chat, takes_parts=takes_parts, takes_strings=takes_strings))


def _with_turns(chat: Chat) -> Chat:
    """Find out what a template writes around an answer."""
    answer_text = f"{_PROBE}-answer"
    question, answer = (chat._adapt(turn) for turn in _conversation(_PROBE, answer_text))
    try:
        marked = chat._render([question, answer, question], chat.tools)
        prompted = chat._render([question], chat.tools, prompt=True)
        unprompted = chat._render([question], chat.tools)
    except _TEMPLATE_ERRORS:
        return chat
    is_behind = prompted.text[: prompted.end] == unprompted.text[: unprompted.end]
    if prompted.segments and marked.segments.get(1) and is_behind:
        prompt = _written_behind(prompted, marked, 0)
    else:  # the template writes it inside its loop, or in a way that cannot be marked
        written = chat._behind(unprompted.text, prompted.text, 0, len(prompted.text))
        prompt = prompted.text[written:]
    segments = marked.segments.get(1, [(0, 0)])
    around = marked.text[slice(*segments[0])].split(answer_text)
    if len(around) != 2:
        return replace(chat, prompt=prompt)
    return replace(chat, prompt=prompt, header=around[0].rstrip(), tail=around[1])


def _written_behind(before: MarkedText, whole: MarkedText, i: int) -> str:
    """Return what a text has after message i, its last one, that the whole text has not there."""
    if (segments := before.segments.get(i)) and (whole_segments := whole.segments.get(i)):
        written = before.text[segments[-1][0] :]
        own = whole.text[whole_segments[-1][0] : whole.segments[i + 1][0][0]]
        if written.startswith(own):
            return written[len(own) :]
    return before.text[before.end :]


@lru_cache(maxsize=64)
def _dated(source: str, today: datetime.date) -> str:
    """Return a chat template that writes this date instead of the clock's."""
    return _DATE.sub(lambda call: json.dumps(today.strftime(call[2])), source)


@lru_cache(maxsize=64)
def _log_date(source: str, today: datetime.date | None) -> None:
    """Say once which date a chat template writes, unless it is the one that was asked for."""
    if multiprocessing.parent_process() is not None:
        return
    if _CLOCK.search(_dated(source, DEFAULT_TODAY)):
        advice = "its form is computed, so tokens differ from day to day: write it as a string"
    elif today is None:
        advice = (
            f"every text gets {DEFAULT_TODAY}, so that tokens stay the same: "
            "TextDecoder(today=datetime.date(...)) sets another one"
        )
    else:
        return
    _log.warning("the chat template writes the date of today; %s", advice)


def check_messages(messages: Any) -> list[Message]:
    """Check the messages of a dataset before a template sees them.

    Args:
        messages: Parsed JSON.

    Returns:
        A list of them, which is not empty. Each message is a dict with a string ``role``: that of
        `transformers` where it has another name for it. Its ``content`` is a string or a list of
        parts. A part is a dict with a ``type``, and with a string ``text`` if its type is "text".
        Its ``tool_calls`` have objects as arguments. What says whether it is trained is 0, 1, true
        or false, and its ``weight`` is a number from 0 up.

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
    messages = [_read(message, i) for i, message in enumerate(messages)]
    for i, message in enumerate(messages):
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
    num_answers = sum(message["role"] in ("assistant", CALL) for message in messages)
    if num_answers * (len(messages) + num_parts) > MAX_RENDERED:
        raise DecodeError(
            f"{num_answers:,} answers among {len(messages):,} messages of {num_parts:,} parts are "
            "too many to locate; split the conversation"
        )
    return join_calls(messages)


def _read(message: Message, number: int) -> Message:
    """Return a message with a role and calls as `transformers` knows them."""
    role = ROLES.get(message["role"].lower(), message["role"])
    if role != message["role"]:
        message = {**message, "role": role}
    if "tool_calls" in message or "function_call" in message:
        message = read_calls(message, number)
        if message.get("tool_calls") and message.get("content") is None:
            message["content"] = ""
    elif role == CALL and not isinstance(message.get("content"), str | list):
        message = {**message, "content": json.dumps(message.get("content"))}
    return message


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


def _own_words(message: Message) -> list[str]:
    """Return the texts that a template may write first for an answer: thoughts, content, a name."""
    texts = [value for key in _THOUGHT_KEYS if isinstance(value := message.get(key), str)]
    texts += [part["text"] for part in _text_parts(message)[:1]]
    texts += [call.get("function", call)["name"] for call in message.get("tool_calls", [])[:1]]
    return [text.strip() for text in texts if text.strip()]


def _text_parts(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message that are texts; of a string, one."""
    if isinstance(message["content"], str):
        return [{"type": "text", "text": message["content"]}]
    return [part for part in message["content"] if part["type"] == "text"]


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with a function's results in place of its texts."""
    if isinstance(message["content"], str):
        return {**message, "content": change(message["content"])}
    parts = [
        {**part, "text": change(part["text"])} if part["type"] == "text" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _without_thought(message: Message) -> Message:
    """Return a message without what its model thought before."""
    kept = {key: value for key, value in message.items() if key not in _THOUGHT_KEYS}
    return _with_texts(kept, lambda text: text.rpartition(_END_OF_THOUGHT)[2])


def _traced(message: Message, number: int, traces: dict[str, tuple[int, str]]) -> Message:
    """Return a message with a word in each thought, call and text of it.

    Args:
        message: The message.
        number: Its number.
        traces: Gets what each word stands for.
    """

    def trace(what: str) -> str:
        word = f"zq{number}x{len(traces)}qz"
        traces[word] = (number, what)
        return word

    traced = dict(message)
    trace_words: dict[str, str] = {}  # one thought may stand in several places

    def think(thought: str, what: str) -> str:
        said = thought.replace("<think>", "").strip()
        if said and said not in trace_words:
            trace_words[said] = trace(what)
        return thought + trace_words.get(said, "")

    def mark(text: str) -> str:
        thought, end, remainder = text.rpartition(_END_OF_THOUGHT)
        remainder += trace("its text") if remainder.strip() else ""
        return think(thought, "a thought in its text") + end + remainder

    for key in _THOUGHT_KEYS:
        if isinstance(thought := message.get(key), str):
            traced[key] = think(thought, "a thought")
    traced = _with_texts(traced, mark)
    if calls := message.get("tool_calls"):
        traced["tool_calls"] = [_with_name(call, trace("a tool call")) for call in calls]
    return traced


def _with_name(call: dict[str, Any], word: str) -> dict[str, Any]:
    """Return a tool call with a word after the name of its function."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_name(call["function"], word)}
    return {**call, "name": f"{call.get('name', '')}{word}"}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are JSON."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text_arguments(call["function"])}
    return {**call, "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
