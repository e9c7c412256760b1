"""Plain conversations through the compiled chat template, without what Transformers does for others each time.

Before it renders, Transformers copies every message of every prefix, turns objects into dicts, drops nulls and gives
reasoning several names. Where all messages have a role and a text and nothing else, nothing of that changes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2

from eagle3.data.chat.quick import quick, without_marks
from eagle3.data.chat.tokenizer import Tokenizer

_PLAIN = (bool, int, float, str, type(None))


class DirectTemplate:
    """A tokenizer's template for plain conversations without tools."""

    def __init__(self, tokenizer: Tokenizer, template: str, kwargs: Mapping[str, Any]) -> None:
        from transformers import PreTrainedTokenizerBase
        from transformers.utils import chat_template_utils

        self._template, self._kwargs = template, {**tokenizer.special_tokens_map, **kwargs}
        # without the name below (another Transformers), and with arguments that mean more to it, it is left to it
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        fits = compile_template is not None and not own.keys() & kwargs.keys()
        fits = fits and all(type(value) in _PLAIN for value in self._kwargs.values())
        self._tracked: jinja2.Template | None = None  # as Transformers compiles it
        self._compiled: jinja2.Template | None = None
        self._marked: jinja2.Template | None = None
        if compile_template is not None and fits:
            with suppress(jinja2.TemplateError):  # Transformers then says what is wrong with it
                self._tracked = compile_template(template)
                self._compiled = quick(self._tracked, template, marked=False) or self._tracked
                self._marked = quick(self._tracked, template, marked=True)
        self._given: dict[str, Any] = {}
        if self._compiled is not None:
            self._given = {**self._compiled.globals, **self._kwargs, "tools": None, "documents": None}

    def takes(self, plain: bool, tools: list[Any] | None) -> bool:
        """Whether messages that are plain, or are not, come out as Transformers renders them."""
        return plain and self._compiled is not None and tools is None

    def text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The rendered messages, which `takes` was asked about."""
        assert self._compiled is not None
        return "".join(self._compiled.root_render_func(self._context(self._compiled, messages, add_generation_prompt)))

    def text_and_blocks(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered messages, and which characters are in `{% generation %}` blocks."""
        assert self._tracked is not None
        if self._marked is not None:
            found = without_marks(list(self._marked.root_render_func(self._context(self._marked, messages, False))))
            if found is not None:
                return found
        written: list[str] = []
        blocks: list[tuple[int, int]] = []
        environment: Any = self._tracked.environment  # with Transformers' extension
        with environment.activate_tracker(written, blocks):
            for piece in self._tracked.root_render_func(self._context(self._tracked, messages, False)):
                written.append(piece)  # blocks count the characters of what is here already
        return "".join(written), blocks

    def _context(
        self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> jinja2.runtime.Context:
        """What the template reads; made of one dict, where `Template.render` goes through several each time."""
        given = {
            **self._given,
            "messages": [dict(message) for message in messages],  # a template may change them
            "add_generation_prompt": add_generation_prompt,
        }
        return template.new_context(given, shared=True)


def is_plain(message: Mapping[str, Any]) -> bool:
    """It has a role and a text, and nothing else."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )
