"""What a server hands to the chat template for a list of messages; SGLang 0.5.23's way, read in its `serving_chat.py`.

Text parts become one text where the template reads texts only, call arguments become objects, and no content is empty
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_READS_PARTS = re.compile(r"\bin\s+[\w.]*(content\b|\[\s*['\"]content['\"]\s*\])|\b(image|video|audio|vision)")
"""A template that goes through the parts of a content, or that knows other parts than text."""


def reads_parts(template: str) -> bool:
    """Whether the text of a template shows that it goes through the parts of a content."""
    return _READS_PARTS.search(template) is not None


def served_message(message: Mapping[str, Any], reads_parts: bool) -> dict[str, Any]:
    """The message as a server hands it to a template.

    Args:
        message: a checked one, see `eagle3.data.formats.messages`.
        reads_parts: of that template.
    """
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
