"""What a server hands to the chat template for a list of messages; SGLang 0.5.23's way, read in its `serving_chat.py`.

Text parts become one text where the template reads texts only, call arguments become objects, and no content is empty
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_READS_PARTS = re.compile(r"\bin\s+[\w.]*(content\b|\[\s*['\"]content['\"]\s*\])|\b(image|video|audio|vision)")
"""A template that goes through the parts of a content, or that knows other parts than text."""


def served_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages as a server hands them to this template.

    Args:
        messages: checked ones, see `eagle3.data.formats.messages`.
        template: its text.
    """
    reads_parts = _READS_PARTS.search(template) is not None
    return [_served(message, reads_parts) for message in messages]


def _served(message: Mapping[str, Any], reads_parts: bool) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list) and (message["role"] == "tool" or not reads_parts):
        content = " ".join(part["text"] for part in content)
    served = {**message, "content": content}
    if message.get("tool_calls"):
        served["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return served


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}}
