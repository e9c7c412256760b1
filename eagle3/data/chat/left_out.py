"""What a chat template leaves out of a conversation without a word: a turn, a call, the reasoning of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3.data.formats.messages import REASONING_KEYS, call_function
from eagle3.errors import Problem


def left_out(messages: Sequence[Mapping[str, Any]], text: str, where: str) -> list[Problem]:
    """Turns of others than the assistant whose text is not in the rendered conversation.

    Args:
        messages: as they went to the template.
        text: of the whole conversation.
    """
    return [
        _problem(
            f"{where} messages[{number}]", f"this {message['role']} turn", "give it a role that the template knows"
        )
        for number, message in enumerate(messages)
        if message["role"] != "assistant" and not all(_is_in(part, text) for part in _content(message))
    ]


def answer_left_out(message: Mapping[str, Any], text: str, where: str) -> list[Problem]:
    """Calls and reasoning of an answer that are not in its own rendered text."""
    problems = []
    for call in message.get("tool_calls") or []:
        name = call_function(call)["name"]
        if name not in text:
            problems.append(_problem(where, f"the call of {name!r}", "give answer_ids, or take the call out"))
    if any(not _is_in(message.get(key) or "", text) for key in REASONING_KEYS):
        fix = "give answer_ids (`eagle3 regenerate` does), or take the reasoning out"
        problems.append(_problem(where, "the reasoning of this answer", fix))
    return problems


def _problem(where: str, what: str, fix: str) -> Problem:
    return Problem(where, "chat.left_out", f"the chat template leaves out {what}", f"{fix}; or pass data.skip_bad=true")


def _content(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    yield from [content] if isinstance(content, str) else (part["text"] for part in content)


def _is_in(part: str, text: str) -> bool:
    """Also as a JSON text, which is how some templates write a tool's result."""
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
