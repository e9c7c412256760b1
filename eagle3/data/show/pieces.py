"""Token ids as pieces of text, one a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eagle3.data.show.printable import printable

_LONGEST_CHARACTER = 8
_BROKEN = "\ufffd"


class Decodes(Protocol):
    """What a tokenizer is needed for here."""

    def decode(self, ids: list[int], /) -> object: ...


@dataclass(frozen=True)
class Piece:
    """One token.

    Attributes:
        text: what it adds, printable; empty for a token that only ends a character of several tokens.
        token: its id.
        supervised: whether the drafter is trained to say it.
    """

    text: str
    token: int
    supervised: bool


@dataclass(frozen=True)
class ShownSample:
    """One sample."""

    id: str
    source: str | None
    pieces: list[Piece]

    @property
    def supervised(self) -> int:
        return sum(piece.supervised for piece in self.pieces)

    @property
    def counts(self) -> str:
        """In words."""
        tokens = len(self.pieces)
        of = "" if self.source is None else f", source {printable(self.source)}"
        return f"{tokens:,} tokens, {self.supervised:,} supervised ({self.supervised / tokens:.1%}){of}"


def shown_sample(
    tokenizer: Decodes, name: str, input_ids: Sequence[int], loss_mask: Sequence[bool], source: str | None = None
) -> ShownSample:
    """A sample's tokens with their texts. A character of several tokens is shown at the first of them."""
    texts: list[str] = []
    before: list[int] = []
    group: list[int] = []
    for place, token in enumerate(input_ids):
        group.append(token)
        text = _added(tokenizer, before, group)
        if text.endswith(_BROKEN) and len(group) < _LONGEST_CHARACTER and place + 1 < len(input_ids):
            continue
        texts += [printable(text), *[""] * (len(group) - 1)]
        before, group = group, []
    pieces = [Piece(text, *pair) for text, pair in zip(texts, zip(input_ids, loss_mask, strict=True), strict=True)]
    return ShownSample(name, source, pieces)


def _added(tokenizer: Decodes, before: list[int], group: list[int]) -> str:
    """What tokens add to the text of those before them: alone, some tokenizers drop their leading space."""
    return str(tokenizer.decode([*before, *group]))[len(str(tokenizer.decode(before))) :]
