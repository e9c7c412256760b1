"""Which tokens of a text are in its `{% generation %}` blocks.

A byte-level tokenizer cuts a text's bytes into tokens and loses none, so the lengths of the tokens say where each is.
That is faster than to have the tokenizer keep and hand over the place of every token.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE


class TokenLengths(dict[int, int]):
    """Bytes of each token, by id; looked up when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {index: len(token.content.encode()) for index, token in _added(tokenizer).items()}

    def __missing__(self, index: int) -> int:
        # in the vocabulary a character stands for a byte
        found = self._added[index] if index in self._added else len(str(self._tokenizer.id_to_token(index)))
        self[index] = found
        return found

    def in_blocks(self, ids: Sequence[int], text: str, blocks: Sequence[tuple[int, int]]) -> list[bool] | None:
        """As the function `in_blocks` does; None if the tokens have not as many bytes as the text.

        A block begins and ends between characters, so a token has a byte of it iff it has a part of its characters.
        """
        ends = list(accumulate(map(self.__getitem__, ids)))
        size = len(text) if text.isascii() else len(text.encode())
        if (ends[-1] if ends else 0) != size:
            return None
        found = [False] * len(ends)
        for begin, end in blocks:
            if size != len(text):
                begin, end = len(text[:begin].encode()), len(text[:end].encode())
            # each token begins where the one before ends; an empty block within a token counts, as with offsets
            first, last = bisect_right(ends, begin), min(bisect_left(ends, end) + 1, len(ends)) if end else 0
            found[first:last] = [True] * max(last - first, 0)
        return found


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


def token_lengths(tokenizer: Tokenizer) -> TokenLengths | None:
    """For tokenizers whose tokens are all of a text's bytes, as they are; None for others."""
    model, before, after = tokenizer.model, _steps(tokenizer.pre_tokenizer), _steps(tokenizer.post_processor)
    keeps_bytes = (
        isinstance(model, BPE)
        and not (model.unk_token or model.byte_fallback or model.dropout)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and tokenizer.normalizer is None
        and [step["type"] for step in before].count("ByteLevel") == 1
        and before[-1]["type"] == "ByteLevel"
        and not before[-1]["add_prefix_space"]
    )
    # some move the places of tokens off white space, or add tokens of their own
    moves = any(step["type"] != "TemplateProcessing" and step.get("trim_offsets", True) for step in after)
    return TokenLengths(tokenizer) if keeps_bytes and not moves else None


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a sequence, or the only one, as a tokenizer's file has them; read without its long vocabulary."""
    if part is None:
        return []
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found.get("pretokenizers") or found.get("processors") or [found]


def _added(tokenizer: Tokenizer) -> dict[int, Any]:
    found: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return found
