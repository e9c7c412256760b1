"""Makes a store's fingerprint from the samples of its first shard.

Legend: T tokens of a sample, A aux layers, H target hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from eagle3.data.store_sample import StoredSample
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint, Rows

OtherStates = Callable[[Sequence[int]], Mapping[int, torch.Tensor]]
"""Token ids -> states [T, H] of layers beside the captured ones, by output index."""

_TOKENS = 64
_POSITIONS = 6
_CHANNELS = 16
_SEED = 0


def make_fingerprint(
    samples: Sequence[StoredSample], contract: WiringContract, other_states: OtherStates | None = None
) -> Fingerprint:
    """The fingerprint of the shortest sample of at least 64 tokens, else of the longest; of several, the first.

    Deterministic: equal samples give an equal fingerprint.

    Args:
        samples: of the first shard, at least one.
        contract: of the store.
        other_states: for states of neighbouring layers, so that a probe can say which layer another one is.
    """
    sample = min(samples, key=lambda item: _preference(len(item.input_ids)))
    ids = [int(token) for token in sample.input_ids[:_TOKENS]]
    positions = sorted({round(step * (len(ids) - 1) / (_POSITIONS - 1)) for step in range(_POSITIONS)})
    count = min(_CHANNELS, contract.hidden_size)
    channels = sorted(random.Random(_SEED).sample(range(contract.hidden_size), count))

    def rows(states: torch.Tensor) -> Rows:
        stored = states[positions][:, channels].to(getattr(torch, contract.dtype)).float()
        return tuple(tuple(_shortest(value) for value in row) for row in stored.numpy())

    slots = sample.aux_hidden_states.split(contract.hidden_size, dim=-1)
    others = other_states(ids) if other_states is not None else {}
    states = {**others, **dict(zip(contract.output_indices, slots, strict=True))}
    return Fingerprint(
        sample=sample.id,
        token_ids=tuple(ids),
        positions=tuple(positions),
        channels=tuple(channels),
        states={index: rows(states[index]) for index in sorted(states)},
        last=rows(sample.last_hidden_states),
    )


def _preference(tokens: int) -> tuple[bool, int]:
    return (tokens < _TOKENS, tokens if tokens >= _TOKENS else -tokens)


def _shortest(value: np.float32) -> float:
    """The number with the fewest digits that is `value` in float32."""
    return float(str(value))
