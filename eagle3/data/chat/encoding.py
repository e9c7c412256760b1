"""Token ids of rendered texts; of a text that begins as a known one does, without tokenizing it all again.

A fast tokenizer cuts a text at its added tokens first, and each piece between them becomes ids for itself. So, for an
added token S that is found in the text A S T, the ids of A S T are those of A S and, after S, those of S T. Where a
prompt is rendered as the beginning of its conversation, all up to its last added token is known, and only the few
characters behind that (`assistant` and a newline, say) are tokenized. This holds where added tokens are found in the
text as it is, and take no white space along; other tokenizers, and texts that begin otherwise, take the long way.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import Any

from eagle3.data.chat.blocks import TokenLengths, in_blocks, token_lengths
from eagle3.data.chat.tokenizer import Tokenizer

_SHORT = 64
"""Characters of an ending whose ids are remembered: it is that of every prompt."""
_MOST_REMEMBERED = 4096


@dataclass(frozen=True)
class Known:
    """A text and its ids.

    Attributes:
        marks: where the text holds added tokens, by character.
        ends: the second half of these.
        places: of the same tokens, by id.
    """

    text: str
    ids: list[int]
    marks: list[tuple[int, int]]
    ends: list[int]
    places: list[int]


class Encoder:
    """Makes ids of texts that hold all of their special tokens already."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._endings: dict[str, list[int]] = {}
        self._ready: dict[tuple[bool, str], Any] = {}

    @cached_property
    def plain(self) -> bool:
        """The tokenizer and its way with a conversation are those of Transformers, not of a class of its own."""
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        own = type(self._tokenizer)
        names = ("__call__", "_encode_plus", "apply_chat_template", "set_truncation_and_padding")
        return isinstance(self._tokenizer, PreTrainedTokenizerFast) and all(
            getattr(own, name) is getattr(PreTrainedTokenizerFast, name) for name in names
        )

    def ahead(self, texts: Mapping[bool, Sequence[str]]) -> None:
        """Tokenizes several texts at once, which is faster than one by one, and has them ready until the next call.

        Args:
            texts: those of which offsets will be asked for (True), and those of which ids will be.
        """
        self._ready = {}
        for offsets, some in texts.items():
            if some:
                encode = self._backend().encode_batch if offsets else self._backend().encode_batch_fast
                encoded = encode(list(some), add_special_tokens=False)
                self._ready.update(zip(((offsets, text) for text in some), encoded, strict=True))

    def ids(self, text: str) -> list[int]:
        """Ids of the whole text."""
        if not self.plain:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        found = self._ready.pop((False, text), None)
        if found is None:
            [found] = self._backend().encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    @property
    def needs_offsets(self) -> bool:
        """Only the tokenizer can say where in a text a token is; else its own bytes do, which is faster."""
        return self._lengths is None

    def ids_in_blocks(self, text: str, blocks: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Ids of the whole text, and which of them have a character in a block.

        Args:
            blocks: first character and the one after the last of each.
        """
        if self._lengths is not None:
            ids = self.ids(text)
            found = self._lengths.in_blocks(ids, text, blocks)
            if found is not None:
                return ids, found
        encoded = self._ready.pop((True, text), None)
        if encoded is None:
            [encoded] = self._backend().encode_batch([text], add_special_tokens=False)
        return encoded.ids, in_blocks(encoded.offsets, blocks)

    def known(self, text: str, ids: list[int]) -> Known | None:
        """What is known of texts that begin as this one does; None where nothing is."""
        if self._cuts is None:
            return None
        marks = [match.span() for match in self._cuts.finditer(text)]
        places = list(compress(count(), map(self._added.__contains__, ids)))
        return Known(text, ids, marks, [end for _, end in marks], places) if len(marks) == len(places) else None

    def ids_after(self, text: str, known: Known | None) -> list[int]:
        """Ids of the whole text, as `ids` gives them."""
        if known is None or self._cuts is None:
            return self.ids(text)
        if text == known.text:
            return known.ids
        last = self._shared_marks(text, known)
        if not last:
            return self.ids(text)
        return known.ids[: known.places[last - 1]] + self._ending(text[known.marks[last - 1][0] :])

    def _shared_marks(self, text: str, known: Known) -> int:
        """How many added tokens the text holds, if it holds what the known one begins with; 0 if it does not."""
        assert self._cuts is not None
        if known.text.startswith(text):
            last = bisect_right(known.ends, len(text))
            if last == len(known.marks) or known.marks[last][0] >= len(text):  # none that is cut by the text's end
                return last
        marks = [match.span() for match in self._cuts.finditer(text)]
        last = len(marks)
        return last if marks and marks == known.marks[:last] and known.text.startswith(text[: marks[-1][1]]) else 0

    def _ending(self, text: str) -> list[int]:
        found = self._endings.get(text)
        if found is None:
            found = self.ids(text)
            if len(text) <= _SHORT and len(self._endings) < _MOST_REMEMBERED:
                self._endings[text] = found
        return found

    def _backend(self) -> Any:
        """The tokenizer itself, in the state that Transformers puts it in for a call without options."""
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self._tokenizer.split_special_tokens:
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return backend

    @cached_property
    def _lengths(self) -> TokenLengths | None:
        return None if self._cuts is None else token_lengths(self._tokenizer.backend_tokenizer)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """Finds the added tokens, of several at a place the longest, as the tokenizer does; None if it may not."""
        if not self.plain or self._tokenizer.split_special_tokens:
            return None
        added = list(self._tokenizer.backend_tokenizer.get_added_tokens_decoder().values())
        if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
            return None
        texts = sorted({token.content for token in added if token.content}, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, texts))) if texts else None
