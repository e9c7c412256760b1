"""Distributions over tokens, and draws from them, on the CPU in float64, so that a seed gives the same anywhere.

Shapes: V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from eagle3.target.generate import narrowing


@dataclass(frozen=True)
class Narrowing:
    """How the target is sampled.

    Attributes:
        temperature: above 0.
        top_p, top_k: from the likeliest tokens only; by default from all.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int | None = None

    def shares(self, logits: Tensor) -> Tensor:
        """The distribution [V], float64 on the CPU, of logits [V]."""
        scores = logits.double().cpu()[None]
        for step in narrowing(self.temperature, self.top_p, self.top_k):
            scores = step(cast(torch.LongTensor, None), cast(torch.FloatTensor, scores))
        return scores[0].softmax(-1)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """A token by weights [V], float64 on the CPU, which need not add up to 1; never one of weight 0."""
    sums = weights.cumsum(0)
    total = sums[-1]
    assert total > 0, "nothing to draw from"
    at = torch.rand((), dtype=torch.float64, generator=generator) * total
    # The first token whose sum is above the draw has a weight; rounding may put the draw at the total itself.
    place = int(torch.searchsorted(sums, at, right=True))
    return place if place < len(weights) else int(weights.nonzero()[-1])
