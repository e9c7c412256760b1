"""Plain conversations through the compiled chat template, without what Transformers does for others each time.

Before it renders, Transformers copies every message of every prefix, turns objects into dicts, drops nulls and gives
reasoning several names. Where all messages have a role and a text and nothing else, nothing of that changes them.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

_PLAIN = (bool, int, float, str, type(None))


class DirectTemplate:
    """A tokenizer's template for plain conversations without tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, kwargs: Mapping[str, Any]) -> None:
        self._template, self._kwargs = template, {**tokenizer.special_tokens_map, **kwargs}
        # without the name below (another Transformers), and with arguments that mean more to it, it is left to it
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        fits = compile_template is not None and not own.keys() & kwargs.keys()
        fits = fits and all(type(value) in _PLAIN for value in self._kwargs.values())
        self._compiled = None
        if compile_template is not None and fits:
            with suppress(jinja2.TemplateError):  # Transformers then says what is wrong with it
                self._compiled = compile_template(template)

    def takes(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> bool:
        """Whether these are plain, and come out as Transformers renders them."""
        return (
            self._compiled is not None
            and tools is None
            and bool(messages)
            and all(
                type(message) is dict
                and len(message) == 2
                and type(message.get("role")) is str
                and type(message.get("content")) is str
                for message in messages
            )
        )

    def text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The rendered messages, which `takes` was asked about."""
        assert self._compiled is not None
        return str(
            self._compiled.render(
                messages=[dict(message) for message in messages],  # a template may change them
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        )

    def text_and_blocks(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered messages, and which characters are in `{% generation %}` blocks."""
        assert self._compiled is not None
        written: list[str] = []
        blocks: list[tuple[int, int]] = []
        given = {**self._kwargs, "tools": None, "documents": None, "add_generation_prompt": False}
        with self._compiled.environment.activate_tracker(written, blocks):
            for piece in self._compiled.generate(messages=[dict(message) for message in messages], **given):
                written.append(piece)  # blocks count the characters of what is here already
        return "".join(written), blocks


def in_blocks(offsets: Sequence[tuple[int, int]], blocks: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens have a character in a block.

    Args:
        offsets: first character and the one after the last of each token, ascending.
        blocks: the same of each block.
    """
    begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    found = [False] * len(offsets)
    for begin, end in blocks:
        first, last = bisect_right(ends, begin), bisect_left(begins, end)
        found[first:last] = [True] * max(last - first, 0)
    return found
