"""OpenAI's messages: `role` and `content`, tool calls and results, reasoning, content in parts."""

from __future__ import annotations

from typing import Any

from eagle3.data.formats import Faults, Messages, from_json_text, not_of_json, without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def read_messages(value: Any, faults: Faults) -> Messages:
    """The messages, without nulls; else unchanged, but for what OpenAI named otherwise before it had tools.

    Args:
        value: a list of messages, or JSON text of one.
        faults: what is wrong is added here.
    """
    value = from_json_text(value)
    if not isinstance(value, list) or not value:
        faults.append(("messages", f"messages are {_what(value)}, expected a list of messages"))
        return []
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            faults.append(("messages", f"messages[{number}] is a {type(message).__name__}, expected an object"))
            continue
        found = _with_tools(without_nulls(message))
        faults += ((kind, f"messages[{number}] {text}") for kind, text in message_faults(found))
        messages.append(found)
    return messages


def message_faults(message: dict[str, Any]) -> Faults:
    """What is wrong with one message."""
    role = message.get("role")
    if role not in ROLES:
        return [("role", f"has role {role!r}, expected one of {', '.join(ROLES)}")]
    faults = _content_faults(message.get("content"), bool(role == "assistant" and message.get("tool_calls")))
    for key in REASONING_KEYS:
        if not isinstance(message.get(key, ""), str):
            faults.append(("reasoning", f"has {key} of type {type(message[key]).__name__}, expected text"))
    for key, value in message.items():
        if foreign := not_of_json(value):
            faults.append(("value", f"has in {key} a value of type {foreign}, which JSON has not"))
    return faults + _call_faults(message.get("tool_calls", []), role)


def call_function(call: Any) -> dict[str, Any]:
    """The name and arguments of a tool call, with or without OpenAI's wrapper."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _with_tools(message: dict[str, Any]) -> dict[str, Any]:
    """`function_call` and the role `function`, as they are called since tools came."""
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    if isinstance(message.get("function_call"), dict) and "tool_calls" not in message:
        call = {"type": "function", "function": message["function_call"]}
        message = {key: value for key, value in message.items() if key != "function_call"} | {"tool_calls": [call]}
    return message


def _content_faults(content: Any, calls: bool) -> Faults:
    if isinstance(content, str) or (content is None and calls):
        return []
    if not isinstance(content, list):
        return [("content", f"has content of type {type(content).__name__}, expected text")]
    faults: Faults = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            faults.append(("content_part", f"has a part content[{number}] of type {kind!r}; only text is read"))
        elif not isinstance(part.get("text"), str):
            faults.append(("content", f"has a part content[{number}] without text"))
    return faults


def _call_faults(calls: Any, role: Any) -> Faults:
    if not isinstance(calls, list):
        return [("tool_calls", f"has tool_calls of type {type(calls).__name__}, expected a list")]
    if calls and role != "assistant":
        return [("tool_calls", f"has tool_calls, but its role is {role}")]
    faults: Faults = []
    for number, call in enumerate(calls):
        function = call_function(call)
        if not isinstance(function.get("name"), str):
            faults.append(("tool_calls", f"has a call tool_calls[{number}] without the name of a function"))
            continue
        arguments = function.get("arguments") or {}
        if not isinstance(from_json_text(arguments), dict):
            text = f"calls {function['name']!r} with arguments that are not a JSON object: {str(arguments)[:60]!r}"
            faults.append(("call_arguments", text))
    return faults


def _what(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
