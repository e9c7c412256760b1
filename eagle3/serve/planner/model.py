"""What a cycle of speculative decoding yields and costs.

A cycle of k draft steps commits L(k) tokens for each of b requests, L(k) = 1 + the sum over depths d <= k of the
share of cycles that accept the draft at depth d (arXiv 2211.17192). It takes

    verify  = verify_fixed_ms + verify_per_token_ms * draft tokens * b
    drafts  = draft_ms_per_step * k
    overhead_ms

so that tokens/s = 1000 * b * L / cycle. The line of verify holds where the target reads the same weights whatever
the batch holds, or more of them in proportion; it bends where attention or arithmetic takes over.

Shapes: S draws (the first is the estimate itself), K draft steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle3.config import MeasuredPoint

Array = NDArray[np.float64]
Values = Mapping[str, Array]
"""[S] of each of these names."""

ACCEPTANCE, FALL, GAIN = "acceptance", "acceptance_fall", "acceptance_gain"
FIXED, PER_TOKEN = "verify_fixed_ms", "verify_per_token_ms"
DRAFT, OVERHEAD = "draft_ms_per_step", "overhead_ms"
COSTS = (FIXED, PER_TOKEN, DRAFT, OVERHEAD)


@dataclass(frozen=True)
class Split:
    """[S] of a cycle's parts, in ms."""

    verify: Array
    draft: Array
    overhead: Array

    @property
    def total(self) -> Array:
        return self.verify + self.draft + self.overhead


@dataclass(frozen=True)
class Cycle:
    """[S] of a cycle, in ms, and its parts; None where only the whole is known."""

    total: Array
    split: Split | None


@dataclass(frozen=True)
class Observation:
    """One measured number."""

    point: MeasuredPoint
    quantity: str
    measured: float


@dataclass(frozen=True, eq=False)
class Model:
    """A chain's yield and a cycle's cost.

    Attributes:
        accepted: [depths] share of the cycles that accept the draft at each depth, where that is given; None where it
            is `acceptance * acceptance_fall^(depth - 1)` of those that got there.
        own_lengths: a point's own acceptance length, where it has one, stands beside its tokens/s. False where
            acceptance is fitted from the points, which takes them all together.
    """

    accepted: Array | None
    own_lengths: bool

    def accepted_at(self, values: Values, steps: int) -> Array:
        """[S, steps], the share of all cycles that accept the draft at each depth."""
        if self.accepted is None:
            rate, fall = values[ACCEPTANCE][:, None], values[FALL][:, None]
            return np.cumprod(np.clip(rate * fall ** np.arange(steps), 0, 1), 1, dtype=np.float64)
        listed = extended(self.accepted, steps)
        return np.clip(listed * values[GAIN][:, None], 0, 1)

    def length(self, values: Values, steps: int) -> Array:
        """[S], the acceptance length of `steps` drafts a cycle."""
        return 1 + self.accepted_at(values, steps).sum(1)

    def cycle(self, values: Values, steps: int, tokens: int, batch: int) -> Cycle:
        """A cycle in which each of `batch` requests has `tokens` verified."""
        verify = values[FIXED] + values[PER_TOKEN] * tokens * batch
        split = Split(verify, values[DRAFT] * steps, values[OVERHEAD])
        return Cycle(split.total, split)

    def predict(self, values: Values, seen: Observation) -> Array:
        """[S], what the model says in place of a measured number."""
        point = seen.point
        if seen.quantity == "acceptance_length":
            return self.length(values, point.steps)
        cycle = self.cycle(values, point.steps, point.tokens, point.batch)
        if seen.quantity == "tok_s":
            return 1000 * point.batch * self._length_at(values, point) / cycle.total
        if seen.quantity == "cycle_ms":
            return cycle.total
        assert cycle.split is not None, f"{seen.quantity} is fitted to by a model that splits the cycle"
        return cycle.split.verify if seen.quantity == "verify_ms" else cycle.split.draft

    def _length_at(self, values: Values, point: MeasuredPoint) -> Array:
        if point.acceptance_length is not None and (point.is_tree or self.own_lengths):
            return np.full_like(values[GAIN], point.acceptance_length)
        return self.length(values, point.steps)


def extended(accepted: Array, steps: int) -> Array:
    """[steps]: beyond the listed depths, each keeps the share that the last one kept of the one before."""
    if len(accepted) >= steps:
        return accepted[:steps]
    before = accepted[-2] if len(accepted) > 1 else 1.0
    ratio = min(accepted[-1] / before, 1.0) if before > 0 else 0.0
    return np.concatenate([accepted, accepted[-1] * ratio ** np.arange(1, steps - len(accepted) + 1)])
