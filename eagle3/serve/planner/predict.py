"""Tokens/s of every step count and tree at one batch, and what follows from them.

Shapes: S draws (the first is the estimate itself), R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle3.config import PlanConfig, ScaleSection, TreeSection
from eagle3.serve.planner.model import FALL, FIXED, PER_TOKEN, Array, Cycle, Model, Split, Values
from eagle3.serve.planner.rows import BatchPlan, Decider, Interval, Line, Luck, Range, Row, interval_of


def predict_batch(
    model: Model,
    values: Values,
    config: PlanConfig,
    batch: int,
    baseline: Array | None,
    reach: Range,
    luck: Luck,
    line: Line | None = None,
) -> BatchPlan:
    """All rows of one batch.

    Args:
        values: [S] of each parameter.
        baseline: [S] tokens/s without a drafter; None if unknown.
        reach: what was measured.
        luck: what else differs between the draws.
        line: what `model` makes of a cycle whose parts are open.
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
        cycles.append(_scaled(model.cycle(values, steps, tokens, batch), config.scale))
    quick = np.stack([_speed(1000 * batch * length, cycle) for length, cycle in zip(lengths, cycles, strict=True)])
    speeds = quick * luck.run.T
    best_of = speeds.argmax(0)
    splits = [cycle.split for cycle in cycles if cycle.split is not None]
    factors = None if baseline is None or not splits else _break_even_factors(lengths, splits, batch / baseline * 1000)
    rows = []
    for place, (steps, topk, tokens) in enumerate(shapes):
        cycle, speed = cycles[place], speeds[place]
        split = cycle.split
        rows.append(
            Row(
                steps=steps,
                topk=topk,
                draft_tokens=tokens,
                acceptance_length=float(lengths[place][0]),
                cycle_ms=float(cycle.total[0]),
                verify_ms=None if split is None else float(split.verify[0]),
                draft_ms=None if split is None else float(split.draft[0]),
                overhead_ms=None if split is None else float(split.overhead[0]),
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
        break_even=None if factors is None else _highest(factors),
        break_even_cycle=None if baseline is None else _highest(quick / baseline),
        plain_step=None
        if baseline is None or line is not None
        else _plain_step(values, config.scale.verify, batch, float(baseline[0])),
        line=line,
    )


def _speed(tokens: Array, cycle: Cycle) -> Array:
    """[S] tokens / cycle; infinite in a draw whose cycle takes no time."""
    return np.divide(tokens, cycle.total, out=np.full_like(tokens, np.inf), where=cycle.total > 0)


def _highest(factors: Array) -> tuple[float, Interval]:
    """Of [R, S]: the estimate's, and the interval of each draw's."""
    return float(factors[:, 0].max()), interval_of(factors.max(0))


def _if_falling(values: Values, best_of: Array, rows: Sequence[Row]) -> tuple[float, Row] | None:
    falls = values.get(FALL)
    if falls is None or falls.min() == falls.max():
        return None
    lowest = np.argsort(falls[1:])[: max(len(falls) // 10, 1)] + 1
    return float(falls[lowest].mean()), rows[int(np.bincount(best_of[lowest]).argmax())]


def _shape(setting: int | TreeSection) -> tuple[int, int, int]:
    """(steps, topk, draft tokens)."""
    if isinstance(setting, TreeSection):
        return setting.steps, setting.topk, setting.draft_tokens
    return setting, 1, setting + 1


def _scaled(cycle: Cycle, scale: ScaleSection) -> Cycle:
    if cycle.split is None:
        return cycle
    parts = cycle.split
    split = Split(parts.verify * scale.verify, parts.draft * scale.draft, parts.overhead * scale.overhead)
    return Cycle(split.total, split)


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


def _break_even_factors(lengths: Sequence[Array], splits: Sequence[Split], plain: Array) -> Array:
    """[R, S], the factor on verify's time at which a row is as fast as no drafter, whose step takes `plain` [S] ms."""
    rows = [
        (length * plain - split.draft - split.overhead) / np.maximum(split.verify, 1e-12)
        for length, split in zip(lengths, splits, strict=True)
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
    if reach.steps is not None and not reach.steps[0] <= steps <= reach.steps[1]:
        low, high = reach.steps
        found.append(
            f"a cycle of {'fewer' if steps < low else 'more'} steps than the {low} to {high} that were measured"
        )
    listed = isinstance(setting, TreeSection) and setting.acceptance is not None
    if not listed and reach.depth is not None and steps > reach.depth:
        found.append(f"acceptance deeper than the {reach.depth} that were measured")
    if isinstance(setting, TreeSection):
        if setting.acceptance is None:
            found.append("a tree's acceptance, between a chain's and that of independent guesses")
        elif len(setting.acceptance) < steps:
            found.append(f"acceptance deeper than the {len(setting.acceptance)} that are given")
    return tuple(found)
