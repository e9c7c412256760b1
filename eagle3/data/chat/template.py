"""A tokenizer's chat template, applied the way a server does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from eagle3.data.chat.marks import Marks
from eagle3.data.chat.served import served_messages
from eagle3.data.chat.tokenizer import special_token_ids, template_text
from eagle3.errors import problem_error

SKIP = "leave the conversation out, or pass data.skip_bad=true"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """What is the same for all conversations: the tokenizer, its template, the arguments for it."""

    tokenizer: PreTrainedTokenizerBase
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
    def has_blocks(self) -> bool:
        """It says itself what is generated, and the tokenizer can tell where that is."""
        return self.tokenizer.is_fast and _GENERATION_TAG.search(self.source) is not None


@dataclass(frozen=True)
class Applied:
    """The template with all that is the same for every prefix of a conversation.

    Its methods raise `ProblemsError`: kinds `chat.no_template`, `chat.template_error`, `chat.two_bos`.
    """

    chat: ChatTemplate
    tools: list[Any] | None
    where: str

    def ids(self, messages: Messages, **options: Any) -> list[int]:
        return self._checked(self._apply(messages, return_dict=True, **options)["input_ids"])

    def text(self, messages: Messages, **options: Any) -> str:
        return str(self._apply(messages, tokenize=False, **options))

    def ids_and_blocks(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Ids, and which of them are in a `{% generation %}` block (all, where the template has none)."""
        if not self.chat.has_blocks:
            ids = self.ids(messages)
            return ids, [True] * len(ids)
        encoded = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
        return self._checked(encoded["input_ids"]), [bool(item) for item in encoded["assistant_masks"]]

    def _checked(self, ids: Sequence[int]) -> list[int]:
        bos = self.chat.tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:
            fix = "correct the tokenizer or its template: a server would send the same"
            raise problem_error(self.where, "chat.two_bos", "begins with two BOS tokens", fix)
        return list(ids)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        served = served_messages(messages, self.chat.source)
        try:
            return self.chat.tokenizer.apply_chat_template(served, tools=self.tools, **options, **self.chat.kwargs)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            message = f"the chat template fails: {error}"
            raise problem_error(self.where, "chat.template_error", message, SKIP) from error
