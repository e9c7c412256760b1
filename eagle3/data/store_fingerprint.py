"""Makes a store's fingerprint from the samples of its first shard.

Legend: T tokens of a sample, A aux layers, H target hidden, P positions, C channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle3.data.store_sample import StoredSample
from eagle3.wiring.contract import WiringContract
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

    def numbers(self, states: torch.Tensor, contract: WiringContract) -> Rows:
        """Those of states [T or more, H], rounded as the store rounds."""
        return stored_rows(states[list(self.positions)][:, list(self.channels)], contract)

    def fingerprint(self, states: Mapping[int, Rows], last: Rows) -> Fingerprint:
        """The fingerprint of these numbers."""
        ordered = {index: states[index] for index in sorted(states)}
        return Fingerprint(self.sample, self.token_ids, self.positions, self.channels, ordered, last)


def fingerprint_place(samples: Sequence[tuple[str, Sequence[int]]], contract: WiringContract) -> FingerprintPlace:
    """The shortest sample (id, token ids) of at least 64 tokens, else the longest; of several, the first."""
    index = min(range(len(samples)), key=lambda place: _preference(len(samples[place][1])))
    ids = tuple(samples[index][1][:_TOKENS])
    positions = sorted({round(step * (len(ids) - 1) / (_POSITIONS - 1)) for step in range(_POSITIONS)})
    count = min(_CHANNELS, contract.hidden_size)
    channels = sorted(random.Random(_SEED).sample(range(contract.hidden_size), count))
    return FingerprintPlace(index, samples[index][0], ids, tuple(positions), tuple(channels))


def neighbours(wiring: LayerWiring) -> list[int]:
    """The embedding and the layers before and after the captured ones, those aside, by output index."""
    near = {index + step for index in wiring.output_indices for step in (-1, 1)} | {EMBEDDING}
    return sorted(near.difference(wiring.output_indices).intersection(range(EMBEDDING, wiring.num_hidden_layers)))


def make_fingerprint(
    samples: Sequence[StoredSample], contract: WiringContract, other_states: OtherStates | None = None
) -> Fingerprint:
    """The fingerprint of a store whose first shard holds these samples; see `fingerprint_place`.

    Deterministic: equal samples give an equal fingerprint.

    Args:
        samples: of the first shard, at least one.
        contract: of the store.
        other_states: for states of neighbouring layers, so that a probe can say which layer another one is.
    """
    place = fingerprint_place([(sample.id, sample.input_ids.tolist()) for sample in samples], contract)
    sample = samples[place.index]
    slots = sample.aux_hidden_states.split(contract.hidden_size, dim=-1)
    others = other_states(place.token_ids) if other_states is not None else {}
    states = {**others, **dict(zip(contract.output_indices, slots, strict=True))}
    numbers = {index: place.numbers(rows, contract) for index, rows in states.items()}
    return place.fingerprint(numbers, place.numbers(sample.last_hidden_states, contract))


def stored_rows(states: torch.Tensor, contract: WiringContract) -> Rows:
    """Numbers [P, C] rounded as the store rounds."""
    rounded = states.to(getattr(torch, contract.dtype)).float().cpu()
    return tuple(tuple(_shortest(value) for value in row) for row in rounded.numpy())


def _preference(tokens: int) -> tuple[bool, int]:
    return (tokens < _TOKENS, tokens if tokens >= _TOKENS else -tokens)


def _shortest(value: np.float32) -> float:
    """The number with the fewest digits that is `value` in float32."""
    return float(str(value))
