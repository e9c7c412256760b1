"""What a plan says of one batch: rows, what follows from them, and what they rest on.

Shapes: S draws (the first is the estimate itself), R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.config import PlanConfig
from eagle3.serve.planner.model import Array

Interval = tuple[float, float]
TAIL = 2.5
"""Percent of the draws outside either end of an interval."""


@dataclass(frozen=True)
class Range:
    """What a cycle's cost and acceptance rest on.

    Attributes:
        tokens: fewest and most tokens verified at a measured point; None where verify is given.
        depth: deepest draft whose acceptance was measured; None where it is given for every depth.
        steps: fewest and most steps of a batch's line; None where the cycle's parts are known.
    """

    tokens: tuple[int, int] | None
    depth: int | None
    steps: tuple[int, int] | None = None


@dataclass(frozen=True)
class Line:
    """A batch's cycle where its parts are open: fixed_ms + per_step_ms * steps, for chains.

    Attributes:
        fixed_interval, interval: 95%, of `fixed_ms` and of `per_step_ms`.
        steps: fewest and most that were measured.
    """

    fixed_ms: float
    fixed_interval: Interval
    per_step_ms: float
    per_step_interval: Interval
    steps: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Luck:
    """What the draws differ in besides the parameters.

    Attributes:
        tree: [S], where between a chain's acceptance (0) and that of independent guesses (1) a tree's lies.
        run: [S, R], factor on tokens/s: two runs of one setting are not alike.
    """

    tree: Array
    run: Array

    @staticmethod
    def draw(generator: np.random.Generator, config: PlanConfig, error: float) -> Luck:
        """The first draw is the estimate: the middle, and no error."""
        tree = generator.uniform(0, 1, config.draws + 1)
        run = np.exp(error * generator.standard_normal((config.draws + 1, len(config.steps) + len(config.trees))))
        tree[0], run[0] = 0.5, 1
        return Luck(tree, run)

    def of_rows(self, places: Sequence[int]) -> Luck:
        """The same of some rows only."""
        return Luck(self.tree, self.run[:, list(places)])


@dataclass(frozen=True)
class Part:
    """A part of a row's cycle.

    Attributes:
        share: of the cycle.
        most_gain: how much faster decoding would be if this part took no time; infinite where there is no other.
    """

    name: str
    share: float
    most_gain: float


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        topk: branches a step; 1 is a chain.
        draft_tokens: tokens a request that are verified.
        cycle_ms: the whole cycle.
        verify_ms, draft_ms, overhead_ms: its parts; None where they are open.
        tok_s: predicted tokens/s of the whole batch, and its 95% interval.
        gain: tok_s / baseline - 1; None without a baseline.
        beats: share of the draws in which it beats the baseline; None without one.
        best: share of the draws in which it is the batch's best.
        break_even_length: acceptance length at which it is as fast as no drafter; None without a baseline.
        break_even_verify: factor on verify's time at which it is; 0 where even a verify of no time is not enough; None
            without a baseline, or where the cycle's parts are open.
        extrapolated: what of it lies outside of what was measured.
    """

    steps: int
    topk: int
    draft_tokens: int
    acceptance_length: float
    cycle_ms: float
    verify_ms: float | None
    draft_ms: float | None
    overhead_ms: float | None
    tok_s: float
    interval: Interval
    gain: float | None
    beats: float | None
    best: float
    break_even_length: float | None
    break_even_verify: float | None
    extrapolated: tuple[str, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The largest first; none where they are open."""
        parts = []
        for name, ms in (("verify", self.verify_ms), ("draft", self.draft_ms), ("overhead", self.overhead_ms)):
            if ms is None:
                return ()
            rest = self.cycle_ms - ms
            parts.append(Part(name, ms / self.cycle_ms, ms / rest if rest > 0 else math.inf))
        return tuple(sorted(parts, key=lambda part: -part.share))

    @property
    def name(self) -> str:
        tree = "" if self.topk == 1 else f", topk {self.topk}, {self.draft_tokens} draft tokens"
        return f"{self.steps} step{'' if self.steps == 1 else 's'}{tree}"


@dataclass(frozen=True)
class Decider:
    """`steps` + 1 steps beat `steps` where, of the cycles that get to depth `steps` + 1, more than `needed` accept the
    draft there; the prediction takes `taken`."""

    steps: int
    needed: float
    taken: float


@dataclass(frozen=True)
class BatchPlan:
    """Everything about one batch.

    Attributes:
        baseline: tokens/s without a drafter; None if unknown.
        near: rows as good as the best one, that one among them, in the order of `rows`.
        if_falling: how steeply acceptance falls with depth at the assumed range's low end (mean of a tenth of the
            draws), and the row that is best there most often; None where the fall is not assumed.
        break_even: of the row that needs the least: factor on verify's time that makes it as fast as no drafter, and
            its interval over the draws (each with its own best row); None without a baseline, or where the cycle's
            parts are open.
        break_even_cycle: the same of the whole cycle's time; None without a baseline.
        plain_step: a verify of one token a request by the fitted line / a step of plain decoding; None without a
            baseline, or where the cycle's parts are open.
        line: the cycle where its parts are open; None where they are known.
    """

    batch: int
    baseline: float | None
    rows: tuple[Row, ...]
    best: Row
    near: tuple[Row, ...]
    deciders: tuple[Decider, ...]
    if_falling: tuple[float, Row] | None
    break_even: tuple[float, Interval] | None
    break_even_cycle: tuple[float, Interval] | None
    plain_step: float | None
    line: Line | None

    @property
    def wins(self) -> bool | None:
        """Whether the best row beats no drafter."""
        return None if self.best.gain is None else self.best.gain > 0


def interval_of(draws: Array) -> Interval:
    """95% interval over the draws [S], the estimate itself left out."""
    low, high = np.percentile(draws[1:], [TAIL, 100 - TAIL])
    return float(low), float(high)
