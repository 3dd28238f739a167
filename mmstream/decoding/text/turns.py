r"""Roles and tool calls of conversations, as people write them -> as chat templates take them.

Place in the flow: a conversion reads roles here, and so does `TextDecoder` for samples that others
wrote. `transformers` defines the form: an answer has ``tool_calls``, whose ``arguments`` are
objects, and the result of a call is a message of the role "tool".

Other trainers write a call as a turn of its own, whose content is JSON:

    {"role": "tool_call", "content": "{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}"}
"""

from __future__ import annotations

from typing import Any

from mmstream.errors import DecodeError, escaped
from mmstream.media.fields import parse_json

CALL = "tool_call"

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool_call", "function_call"), CALL),
    **dict.fromkeys(("tool", "tool_response", "function", "function_response"), "tool"),
    **dict.fromkeys(("observation", "ipython"), "tool"),
    **{role: role for role in ("system", "developer")},
}
"""The role of a turn, by the name that a row gives it. `CALL` is for `join_calls` only."""


_CALL_KEYS = {"name", "arguments", "id", "type", "index"}
"""Keys of a call. One without arguments that has others may have its arguments there."""


def join_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make answers with ``tool_calls`` of turns that are calls.

    Calls in a row are one answer, together with the answer right before them, if both are trained
    alike.

    Args:
        messages: Turns with roles of `ROLES`. The content is a string or a list of parts.

    Raises:
        DecodeError: The content of a call is not JSON with a name and arguments.
    """
    joined: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message.get("role") != CALL:
            joined.append(message)
            continue
        thought, calls = _calls_of(message, number)
        is_list = isinstance(message["content"], list)
        content: Any = [{"type": "text", "text": thought}] if thought and is_list else thought
        turn = {**message, "role": "assistant", "content": content or ([] if is_list else "")}
        before = joined[-1] if joined and number else None
        if before is not None and not thought and _may_join(before, turn):
            joined[-1] = {**before, "tool_calls": [*(before.get("tool_calls") or []), *calls]}
        else:
            joined.append({**turn, "tool_calls": calls})
    return joined


def read_calls(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message whose tool calls have objects as ``arguments``.

    Args:
        message: A message. The ``function_call`` of OpenAI's first form becomes a tool call.
            An empty list of calls is left out.
        number: Its number, for errors.

    Raises:
        DecodeError: A call has another form.
    """
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    without_calls = {k: v for k, v in message.items() if k not in ("tool_calls", "function_call")}
    if not calls:
        return without_calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DecodeError(f"messages[{number}]: tool_calls is not a list of calls")
    return {**without_calls, "tool_calls": [_read_call(call, number) for call in calls]}


def _read_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a call with a name and an object as ``arguments``: {} where they are null or empty."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _read_call(call["function"], number)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, number) if arguments.strip() else {}
    others = {key for key, value in call.items() if value is not None} - _CALL_KEYS
    if not isinstance(call.get("name"), str) or (arguments is None and others):
        raise DecodeError(
            f"messages[{number}]: a tool call needs a name and arguments: {escaped(call, 60)}"
        )
    if not isinstance(arguments, dict) and call.get("arguments") is not None:
        raise DecodeError(
            f"messages[{number}]: the arguments of a tool call are not a JSON object: "
            f"{escaped(call['arguments'], 60)}"
        )
    return {**call, "arguments": arguments or {}}


def _calls_of(message: dict[str, Any], number: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the thought before the calls of a turn, and the calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    thought, end, text = str(content).rpartition("</think>")
    value = _parsed(text, number)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise DecodeError(f"messages[{number}]: an empty list of calls")
    if not all(isinstance(call, dict) for call in calls):
        raise DecodeError(
            f"messages[{number}]: a call needs JSON with name and arguments: "
            f"{escaped(text.strip(), 60)}"
        )
    functions = [_read_call(call, number) for call in calls]
    return thought + end, [{"type": "function", "function": function} for function in functions]


def _may_join(before: dict[str, Any], turn: dict[str, Any]) -> bool:
    keys = ("weight", "train", "loss")
    return before.get("role") == "assistant" and all(
        before.get(key) == turn.get(key) for key in keys
    )


def _parsed(text: str, number: int) -> Any:
    try:
        return parse_json(text.encode("utf-8", "surrogatepass"))
    except DecodeError as error:
        raise DecodeError(
            f"messages[{number}]: a tool call is not JSON: {error}: {escaped(text.strip(), 60)}"
        ) from None
