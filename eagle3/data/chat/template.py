"""A tokenizer's chat template, applied the way a server does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2

from eagle3.data.chat.direct import DirectTemplate, is_plain
from eagle3.data.chat.encoding import Encoder, Known
from eagle3.data.chat.marks import Marks
from eagle3.data.chat.served import reads_parts, served_message
from eagle3.data.chat.tokenizer import Tokenizer, special_token_ids, template_text
from eagle3.errors import problem_error

SKIP = "leave the conversation out, or pass data.skip_bad=true"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """What is the same for all conversations: the tokenizer, its template, the arguments for it."""

    tokenizer: Tokenizer
    kwargs: Mapping[str, Any]

    @cached_property
    def source(self) -> str:
        """Its text."""
        return template_text(self.tokenizer)

    @cached_property
    def marks(self) -> Marks:
        return Marks(self.tokenizer, self.source)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that may end a turn."""
        return frozenset(special_token_ids(self.tokenizer))

    @cached_property
    def bos(self) -> int | None:
        """Id of the token that begins a text, if there is one."""
        found: int | None = self.tokenizer.bos_token_id
        return found

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.tokenizer)

    @cached_property
    def direct(self) -> DirectTemplate:
        return DirectTemplate(self.tokenizer, self.source, self.kwargs)

    @cached_property
    def reads_parts(self) -> bool:
        """See `eagle3.data.chat.served`."""
        return reads_parts(self.source)

    @cached_property
    def _blank(self) -> dict[int, bool]:
        return {}

    def is_blank(self, token: int) -> bool:
        """It is white space."""
        if token not in self._blank:
            self._blank[token] = not str(self.tokenizer.decode([token])).strip()
        return self._blank[token]

    @cached_property
    def has_blocks(self) -> bool:
        """It says itself what is generated, and the tokenizer can tell where that is."""
        return self.tokenizer.is_fast and _GENERATION_TAG.search(self.source) is not None


@dataclass(frozen=True)
class Applied:
    """The template with all that is the same for every prefix of a conversation. What was rendered is remembered.

    Its methods raise `ProblemsError`: kinds `chat.no_template`, `chat.template_error`, `chat.two_bos`.
    """

    chat: ChatTemplate
    tools: list[Any] | None
    where: str
    _texts: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _blocks: dict[tuple[Any, ...], list[tuple[int, int]]] = field(default_factory=dict)
    _served: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = field(default_factory=dict)
    _odd: set[int] = field(default_factory=set)
    _known: list[Known | None] = field(default_factory=lambda: [None])

    def ids(self, messages: Messages, add_generation_prompt: bool = False) -> list[int]:
        if not self.chat.encoder.plain:
            options = {"add_generation_prompt": True} if add_generation_prompt else {}
            return self._checked(list(self._apply(self.served(messages), return_dict=True, **options)["input_ids"]))
        return self._checked(
            self.chat.encoder.ids_after(self.text(messages, add_generation_prompt), self._known[0]),
        )

    def text(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        key = (add_generation_prompt, *map(id, messages))
        if key not in self._texts:
            served = self.served(messages)  # holds the messages too, so that no other one gets their `id`
            if self._is_direct(served):
                with self._explained():
                    self._texts[key] = self.chat.direct.text(served, add_generation_prompt)
            else:
                options = {"add_generation_prompt": True} if add_generation_prompt else {}
                self._texts[key] = str(self._apply(served, tokenize=False, **options))
        return self._texts[key]

    def ids_and_blocks(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Ids, and which of them are in a `{% generation %}` block (all, where the template has none).

        Texts that begin as this one does are tokenized faster from now on.
        """
        served = self.served(messages)
        if not self.chat.has_blocks:
            ids = self.ids(messages)
            allowed = [True] * len(ids)
        elif self._is_direct(served):
            text, blocks = self.text_and_blocks(messages)
            ids, allowed = self.chat.encoder.ids_in_blocks(text, blocks)
            self._checked(ids)
        else:
            encoded = self._apply(served, return_dict=True, return_assistant_tokens_mask=True)
            ids, allowed = (
                self._checked(list(encoded["input_ids"])),
                [bool(item) for item in encoded["assistant_masks"]],
            )
        if self.chat.encoder.plain:
            self._known[0] = self.chat.encoder.known(self.text(messages), ids)
        return ids, allowed

    def text_and_blocks(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text, and which of its characters are in `{% generation %}` blocks; of plain conversations alone."""
        key = (False, *map(id, messages))
        if key not in self._blocks:
            served = self.served(messages)
            with self._explained():
                self._texts[key], self._blocks[key] = self.chat.direct.text_and_blocks(served)
        return self._texts[key], self._blocks[key]

    def to_tokenize(self, messages: Messages, add_generation_prompt: bool) -> tuple[str, bool] | None:
        """The text that will be tokenized for these, and whether offsets will be asked for; None if none is known."""
        served = self.served(messages)
        if not self.chat.encoder.plain:
            return None
        if add_generation_prompt or not self.chat.has_blocks:
            return self.text(messages, add_generation_prompt), False
        if not self._is_direct(served):
            return None
        return self.text_and_blocks(messages)[0], self.chat.encoder.needs_offsets

    def _is_direct(self, served: Messages) -> bool:
        plain = bool(served) and self._odd.isdisjoint(map(id, served))
        return self.chat.encoder.plain and self.chat.direct.takes(plain, self.tools)

    def served(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages as a server hands them to the template."""
        get, serve = self._served.get, self._serve
        return [(get(id(message)) or serve(message))[1] for message in messages]

    def _serve(self, message: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        served = served_message(message, self.chat.reads_parts)
        if not is_plain(served):
            self._odd.add(id(served))
        self._served[id(message)] = message, served
        return message, served

    def _checked(self, ids: list[int]) -> list[int]:
        bos = self.chat.bos
        if bos is not None and ids[:2] == [bos, bos]:
            fix = "correct the tokenizer or its template: a server would send the same"
            raise problem_error(self.where, "chat.two_bos", "begins with two BOS tokens", fix)
        return ids

    def _apply(self, served: list[dict[str, Any]], **options: Any) -> Any:
        with self._explained():
            return self.chat.tokenizer.apply_chat_template(served, tools=self.tools, **options, **self.chat.kwargs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            message = f"the chat template fails: {error}"
            raise problem_error(self.where, "chat.template_error", message, SKIP) from error
