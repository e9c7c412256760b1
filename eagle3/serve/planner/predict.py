"""Tokens/s of every step count and tree at one batch, and what follows from them.

Shapes: S draws (the first is the estimate itself), R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.config import PlanConfig, ScaleSection, TreeSection
from eagle3.serve.planner.model import FALL, FIXED, PER_TOKEN, Array, Cycle, Model, Values

Interval = tuple[float, float]
TAIL = 2.5
"""Percent of the draws outside either end of an interval."""


@dataclass(frozen=True)
class Range:
    """What the verify line and acceptance rest on.

    Attributes:
        tokens: fewest and most tokens verified at a measured point; None where verify is given.
        depth: deepest draft whose acceptance was measured; None where it is given for every depth.
    """

    tokens: tuple[int, int] | None
    depth: int | None


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
        verify_ms, draft_ms, overhead_ms: the cycle's parts.
        tok_s: predicted tokens/s of the whole batch, and its 95% interval.
        gain: tok_s / baseline - 1; None without a baseline.
        beats: share of the draws in which it beats the baseline; None without one.
        best: share of the draws in which it is the batch's best.
        break_even_length: acceptance length at which it is as fast as no drafter; None without a baseline.
        break_even_verify: factor on verify's time at which it is; 0 where even a verify of no time is not enough; None
            without a baseline.
        extrapolated: what of it lies outside of what was measured.
    """

    steps: int
    topk: int
    draft_tokens: int
    acceptance_length: float
    verify_ms: float
    draft_ms: float
    overhead_ms: float
    tok_s: float
    interval: Interval
    gain: float | None
    beats: float | None
    best: float
    break_even_length: float | None
    break_even_verify: float | None
    extrapolated: tuple[str, ...]

    @property
    def cycle_ms(self) -> float:
        return self.verify_ms + self.draft_ms + self.overhead_ms

    @property
    def parts(self) -> tuple[Part, ...]:
        """The largest first."""
        parts = []
        for name, ms in (("verify", self.verify_ms), ("draft", self.draft_ms), ("overhead", self.overhead_ms)):
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
            its interval over the draws (each with its own best row); None without a baseline.
        plain_step: a verify of one token a request by the fitted line / a step of plain decoding; None without a
            baseline.
    """

    batch: int
    baseline: float | None
    rows: tuple[Row, ...]
    best: Row
    near: tuple[Row, ...]
    deciders: tuple[Decider, ...]
    if_falling: tuple[float, Row] | None
    break_even: tuple[float, Interval] | None
    plain_step: float | None

    @property
    def wins(self) -> bool | None:
        """Whether the best row beats no drafter."""
        return None if self.best.gain is None else self.best.gain > 0


def predict_batch(
    model: Model, values: Values, config: PlanConfig, batch: int, baseline: Array | None, reach: Range, luck: Luck
) -> BatchPlan:
    """All rows of one batch.

    Args:
        values: [S] of each parameter.
        baseline: [S] tokens/s without a drafter; None if unknown.
        reach: what was measured.
        luck: what else differs between the draws.
    """
    settings: list[int | TreeSection] = [*sorted(config.steps), *config.trees]
    lengths, cycles, shapes = [], [], []
    for setting in settings:
        steps, topk, tokens = _shape(setting)
        shapes.append((steps, topk, tokens))
        if isinstance(setting, TreeSection):
            lengths.append(1 + _tree_accepted(model, values, setting, luck.tree).sum(1))
        else:
            lengths.append(model.length(values, steps))
        cycles.append(_scaled(model.cycle(values, steps, tokens * batch), config.scale))
    speeds = np.stack([1000 * batch * length / cycle.total for length, cycle in zip(lengths, cycles, strict=True)])
    speeds *= luck.run.T
    best_of = speeds.argmax(0)
    factors = None if baseline is None else _break_even_factors(lengths, cycles, batch / baseline * 1000)
    rows = []
    for place, (steps, topk, tokens) in enumerate(shapes):
        cycle, speed = cycles[place], speeds[place]
        rows.append(
            Row(
                steps=steps,
                topk=topk,
                draft_tokens=tokens,
                acceptance_length=float(lengths[place][0]),
                verify_ms=float(cycle.verify[0]),
                draft_ms=float(cycle.draft[0]),
                overhead_ms=float(cycle.overhead[0]),
                tok_s=float(speed[0]),
                interval=interval_of(speed),
                gain=None if baseline is None else float(speed[0] / baseline[0] - 1),
                beats=None if baseline is None else float((speed[1:] > baseline[1:]).mean()),
                best=float((best_of[1:] == place).mean()),
                break_even_length=None if baseline is None else float(baseline[0] * cycle.total[0] / batch / 1000),
                break_even_verify=None if factors is None else float(factors[place, 0]),
                extrapolated=_extrapolated(settings[place], steps, tokens * batch, reach),
            )
        )
    best = rows[int(best_of[0])]
    near = tuple(row for row in rows if row.tok_s >= best.tok_s * (1 - config.tie))
    return BatchPlan(
        batch=batch,
        baseline=None if baseline is None else float(baseline[0]),
        rows=tuple(rows),
        best=best,
        near=near,
        deciders=_deciders(model, values, near, {row.steps: row for row in rows if row.topk == 1}),
        if_falling=_if_falling(values, best_of, rows),
        break_even=None if factors is None else (float(factors[:, 0].max()), interval_of(factors.max(0))),
        plain_step=None if baseline is None else _plain_step(values, config.scale.verify, batch, float(baseline[0])),
    )


def _if_falling(values: Values, best_of: Array, rows: Sequence[Row]) -> tuple[float, Row] | None:
    falls = values.get(FALL)
    if falls is None or falls.min() == falls.max():
        return None
    lowest = np.argsort(falls[1:])[: max(len(falls) // 10, 1)] + 1
    return float(falls[lowest].mean()), rows[int(np.bincount(best_of[lowest]).argmax())]


def interval_of(draws: Array) -> Interval:
    """95% interval over the draws [S], the estimate itself left out."""
    low, high = np.percentile(draws[1:], [TAIL, 100 - TAIL])
    return float(low), float(high)


def _shape(setting: int | TreeSection) -> tuple[int, int, int]:
    """(steps, topk, draft tokens)."""
    if isinstance(setting, TreeSection):
        return setting.steps, setting.topk, setting.draft_tokens
    return setting, 1, setting + 1


def _scaled(cycle: Cycle, scale: ScaleSection) -> Cycle:
    return Cycle(cycle.verify * scale.verify, cycle.draft * scale.draft, cycle.overhead * scale.overhead)


def _tree_accepted(model: Model, values: Values, tree: TreeSection, luck: Array) -> Array:
    """[S, steps], the share of all cycles in which some branch is accepted at each depth.

    Where it is not given: a chain's rate a at a depth becomes something between a (the other branches never help) and
    1 - (1 - a)^w, as if each of the w branches there were a guess of its own; w is topk, or fewer where the tree's
    tokens do not reach.
    """
    if tree.acceptance is not None:
        listed = np.array(tree.acceptance)
        padded = np.concatenate([listed, np.full(max(tree.steps - len(listed), 0), listed[-1])])[: tree.steps]
        return np.tile(np.cumprod(padded), (len(luck), 1))
    accepted = model.accepted_at(values, tree.steps)
    before = np.concatenate([np.ones((len(accepted), 1)), accepted[:, :-1]], 1)
    rate = np.divide(accepted, before, out=np.zeros_like(accepted), where=before > 0).clip(0, 1)
    width = min(tree.topk, (tree.draft_tokens - 1) / tree.steps)
    most = 1 - (1 - rate) ** width
    return np.cumprod(rate + luck[:, None] * (most - rate), 1)


def _break_even_factors(lengths: Sequence[Array], cycles: Sequence[Cycle], plain: Array) -> Array:
    """[R, S], the factor on verify's time at which a row is as fast as no drafter, whose step takes `plain` [S] ms."""
    rows = [
        (length * plain - cycle.draft - cycle.overhead) / np.maximum(cycle.verify, 1e-12)
        for length, cycle in zip(lengths, cycles, strict=True)
    ]
    return np.maximum(np.stack(rows), 0)


def _plain_step(values: Values, scale: float, batch: int, baseline: float) -> float:
    return float((values[FIXED][0] + values[PER_TOKEN][0] * batch) * scale * baseline / (1000 * batch))


def _deciders(model: Model, values: Values, near: Sequence[Row], chains: dict[int, Row]) -> tuple[Decider, ...]:
    """Of the near rows that are chains, each with the next deeper one."""
    found = []
    for row in near:
        deeper = chains.get(row.steps + 1)
        if row.topk > 1 or deeper is None or deeper not in near:
            continue
        accepted = model.accepted_at(values, row.steps + 1)[0]
        get_there = accepted[row.steps - 1]
        if get_there > 0:
            needed = row.acceptance_length * (deeper.cycle_ms / row.cycle_ms - 1) / get_there
            found.append(Decider(row.steps, float(needed), float(accepted[row.steps] / get_there)))
    return tuple(found)


def _extrapolated(setting: int | TreeSection, steps: int, tokens: int, reach: Range) -> tuple[str, ...]:
    found = []
    if reach.tokens is not None and not reach.tokens[0] <= tokens <= reach.tokens[1]:
        low, high = reach.tokens
        side = "fewer" if tokens < low else "more"
        found.append(f"verify of {side} tokens than the {low} to {high} that were measured")
    listed = isinstance(setting, TreeSection) and setting.acceptance is not None
    if not listed and reach.depth is not None and steps > reach.depth:
        found.append(f"acceptance deeper than the {reach.depth} that were measured")
    if isinstance(setting, TreeSection):
        if setting.acceptance is None:
            found.append("a tree's acceptance, between a chain's and that of independent guesses")
        elif len(setting.acceptance) < steps:
            found.append(f"acceptance deeper than the {len(setting.acceptance)} that are given")
    return tuple(found)
