"""Makes a store's fingerprint from the samples of its first shard.

Legend: T tokens of a sample, A aux layers, H target hidden, P positions, C channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import StoredSample
from eagle3.draft.states import rounded
from eagle3.errors import problem_error
from eagle3.wiring.fingerprint_file import Fingerprint, Rows
from eagle3.wiring.layers import EMBEDDING, LayerWiring

OtherStates = Callable[[Sequence[int]], Mapping[int, torch.Tensor]]
"""Token ids -> states [T, H] of layers beside the captured ones, by output index."""

_TOKENS = 64
_POSITIONS = 6
_CHANNELS = 16
_SEED = 0


@dataclass(frozen=True)
class FingerprintPlace:
    """Which numbers of a shard's samples make its fingerprint.

    Attributes:
        index: of the sample in the shard.
        sample: its id.
        token_ids: its first T tokens.
        positions, channels: P rows and C columns of its states.
    """

    index: int
    sample: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    channels: tuple[int, ...]

    def numbers(self, states: torch.Tensor, dtype: torch.dtype, rows: Sequence[int] | None = None) -> Rows:
        """Those of states [T or more, H], rounded to a store's type; `rows`: where the positions are, if elsewhere."""
        chosen = states[list(self.positions if rows is None else rows)]
        return as_rows(rounded(chosen, dtype)[:, list(self.channels)])

    def fingerprint(self, states: Mapping[int, Rows], last: Rows) -> Fingerprint:
        """The fingerprint of these numbers."""
        ordered = {index: states[index] for index in sorted(states)}
        return Fingerprint(self.sample, self.token_ids, self.positions, self.channels, ordered, last)


class Tokens(Protocol):
    """A sample's id, token ids and loss mask."""

    @property
    def id(self) -> str: ...
    @property
    def input_ids(self) -> Sequence[int] | torch.Tensor: ...
    @property
    def loss_mask(self) -> Sequence[bool] | torch.Tensor: ...


def fingerprint_place(samples: Sequence[Tokens], layout: StoreLayout) -> FingerprintPlace:
    """Where all last hidden states are stored: of the shortest sample of at least 64 tokens, else of the longest; of
    several, the first. Elsewhere its positions are supervised tokens, as early as there are six of them.
    """
    found = [_window(sample, layout) for sample in samples]
    index = min(range(len(samples)), key=lambda place: found[place].preference)
    tokens, candidates = found[index].tokens, found[index].candidates
    chosen = sorted({round(step * (len(candidates) - 1) / (_POSITIONS - 1)) for step in range(_POSITIONS)})
    count = min(_CHANNELS, layout.contract.hidden_size)
    channels = sorted(random.Random(_SEED).sample(range(layout.contract.hidden_size), count))
    ids = tuple(int(token) for token in samples[index].input_ids[:tokens])
    return FingerprintPlace(index, samples[index].id, ids, tuple(candidates[at] for at in chosen), tuple(channels))


@dataclass(frozen=True)
class _Window:
    """The first tokens of a sample, and which of them may be positions; the least preference is taken."""

    tokens: int
    candidates: Sequence[int]
    preference: tuple[int, bool, int]


def _window(sample: Tokens, layout: StoreLayout) -> _Window:
    length = len(sample.input_ids)
    supervised = [place for place, marked in enumerate(sample.loss_mask) if marked]
    if layout.last_rows == "all" or not supervised:
        order = length if length >= _TOKENS else -length
        rank = 0 if layout.last_rows == "all" else _POSITIONS
        return _Window(min(length, _TOKENS), range(min(length, _TOKENS)), (rank, length < _TOKENS, order))
    enough = supervised[:_POSITIONS]
    tokens = max(enough[-1] + 1, min(length, _TOKENS))
    order = tokens if tokens >= _TOKENS else -tokens
    candidates = [place for place in supervised if place < tokens]
    return _Window(tokens, candidates, (_POSITIONS - len(enough), tokens < _TOKENS, order))


def neighbours(wiring: LayerWiring) -> list[int]:
    """The embedding and the layers before and after the captured ones, those aside, by output index."""
    near = {index + step for index in wiring.output_indices for step in (-1, 1)} | {EMBEDDING}
    return sorted(near.difference(wiring.output_indices).intersection(range(EMBEDDING, wiring.num_hidden_layers)))


def make_fingerprint(
    samples: Sequence[StoredSample], layout: StoreLayout, other_states: OtherStates | None = None
) -> Fingerprint:
    """The fingerprint of a store whose first shard holds these samples; see `fingerprint_place`.

    Deterministic: equal samples give an equal fingerprint.

    Args:
        samples: of the first shard, at least one.
        layout: of the store.
        other_states: for states of neighbouring layers, so that a probe can say which layer another one is.

    Raises:
        ProblemsError: kind `fingerprint.nothing_supervised`: the samples came without the last hidden states of any
            token.
    """
    place = fingerprint_place(samples, layout)
    sample = samples[place.index]
    slots = sample.aux_hidden_states.split(layout.contract.hidden_size, dim=-1)
    others = other_states(place.token_ids) if other_states is not None else {}
    states = {**others, **dict(zip(layout.contract.output_indices, slots, strict=True))}
    numbers = {index: place.numbers(rows, layout.dtype) for index, rows in states.items()}
    last = sample.last_hidden_states
    if len(last) == len(sample.loss_mask):
        return place.fingerprint(numbers, place.numbers(last, layout.dtype))
    if not sample.loss_mask.any():
        message = "no sample of the first shard has a supervised token, so that no last hidden states are there"
        fix = "begin the store with another sample, or extract with last_hidden_rows=all"
        raise problem_error(sample.id, "fingerprint.nothing_supervised", message, fix)
    rows = (sample.loss_mask.cumsum(0) - 1)[list(place.positions)].tolist()
    return place.fingerprint(numbers, place.numbers(last, layout.dtype, rows))


def as_rows(numbers: torch.Tensor) -> Rows:
    """Float32 numbers [P, C], each with the fewest digits that give it back."""
    return tuple(tuple(_shortest(value) for value in row) for row in numbers.float().cpu().numpy())


def _shortest(value: np.float32) -> float:
    """The number with the fewest digits that is `value` in float32."""
    return float(str(value))
