"""Control marks that somebody wrote into a conversation, such as a user's `<|im_end|>`.

A server tokenizes the rendered text as one, so there they become the control tokens that they spell: the turn ends, an
answer begins. Encoding them as letters here would train on a prompt that no server sees, so such conversations are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3.data.chat.tokenizer import Tokenizer
from eagle3.errors import Problem

_FIX = "take it out of the text, leave the conversation out, or pass data.skip_bad=true"


class Marks:
    """A tokenizer's control marks: its special tokens, and added ones that its template writes (`<think>` ...).

    The second sort may stand in an answer: templates read reasoning from there.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        written = {token.content for token in added if token.content in template}
        self._special, self._any = _pattern(special), _pattern(special | written)

    def problems(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, where: str) -> list[Problem]:
        """Every place in messages and tools that spells a control mark."""
        if self._any is None or not self._any.search("\0".join(_texts([messages, tools]))):
            return []  # as most have none: all texts at once, of which none can hold a mark that they do not together
        places: list[tuple[str, Any, re.Pattern[str] | None]] = [
            (f"{where} messages[{number}]", message, self._special if message["role"] == "assistant" else self._any)
            for number, message in enumerate(messages)
        ]
        places.append((f"{where} tools", tools, self._any))
        problems = []
        for place, value, pattern in places:
            found = pattern and next((match for text in _texts(value) if (match := pattern.search(text))), None)
            if found:
                message = f"its text spells the control token {found[0]!r}, and a server would take it for one"
                problems.append(Problem(place, "chat.control_token", message, _FIX))
        return problems


def _pattern(marks: set[str]) -> re.Pattern[str] | None:
    longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
    return re.compile("|".join(map(re.escape, longest_first))) if marks else None


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
