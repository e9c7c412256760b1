"""ShareGPT: turns of `from` and `value`, under the many names that tools give the roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.data.formats import Faults, Messages, from_json_text
from eagle3.data.formats.messages import message_faults

ROLE_OF = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
}
CALLS = ("function_call", "tool_call")
"""Turns whose value is JSON: `{"name", "arguments"}`, or a list of them."""


def read_sharegpt(record: Mapping[str, Any], column: str, faults: Faults) -> Messages:
    """The turns of `column` as messages, after the record's own `system` text, if it has one.

    Args:
        faults: what is wrong is added here.
    """
    turns = from_json_text(record[column])
    messages: Messages = []
    if (system := record.get("system")) not in (None, ""):
        messages.append({"role": "system", "content": system})
        faults += ((kind, f"system {text}") for kind, text in message_faults(messages[0]))
    for number, turn in enumerate(turns):
        where = f"{column}[{number}]"
        if not isinstance(turn, dict):
            faults.append(("messages", f"{where} is a {type(turn).__name__}, expected an object"))
            continue
        message = _message(turn, where, faults)
        if message is not None:
            faults += ((kind, f"{where} {text}") for kind, text in message_faults(message))
            messages.append(message)
    return messages


def _message(turn: Mapping[str, Any], where: str, faults: Faults) -> dict[str, Any] | None:
    name, value = turn.get("from"), turn.get("value")
    lower = name.lower() if isinstance(name, str) else None
    if lower in CALLS:
        return _calls(value, where, faults)
    if lower not in ROLE_OF:
        known = ", ".join((*ROLE_OF, *CALLS))
        faults.append(("role", f"{where} is from {name!r}, expected one of {known}"))
        return None
    others = {key: item for key, item in turn.items() if key in ("name", "reasoning_content") and item is not None}
    return {"role": ROLE_OF[lower], "content": value, **others}


def _calls(value: Any, where: str, faults: Faults) -> dict[str, Any] | None:
    found = from_json_text(value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) for call in calls):
        text = f"{where} is a call, but its value is not a JSON object of name and arguments: {str(value)[:60]!r}"
        faults.append(("call_arguments", text))
        return None
    return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return call if "function" in call else {"type": "function", "function": call}
