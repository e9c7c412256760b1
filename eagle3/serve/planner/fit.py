"""Least squares for what is not given, over many draws of the measurement errors at once.

The residual of a measurement is the logarithm of predicted / measured, so that milliseconds and tokens/s weigh alike.

Shapes: S draws, P parameters, M measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.serve.planner.model import (
    ACCEPTANCE,
    DRAFT,
    FALL,
    FIXED,
    OVERHEAD,
    PER_TOKEN,
    Array,
    Model,
    Observation,
    Values,
)

ITERATIONS = 200
SMALL = 1e-9
"""No parameter is below it, so that it keeps a slope; in ms, or a share."""
BOUNDS = {ACCEPTANCE: (1e-4, 1 - 1e-6), FALL: (0.2, 1.2)}
TYPICAL = {ACCEPTANCE: 0.6, FALL: 0.97, FIXED: 20.0, PER_TOKEN: 1.0, DRAFT: 0.3, OVERHEAD: 1.0}
TYPICAL_CYCLE = 21.0
"""Where it is asked which measurements determine which parameters; any values without a coincidence would do."""


@dataclass(frozen=True)
class Fitted:
    """Attributes:
    values: [S] of each fitted parameter.
    predicted: [M], the estimate's.
    settled: the share of the draws whose parameters stopped moving.
    """

    values: dict[str, Array]
    predicted: list[float]
    settled: float


def undetermined(
    model: Model, names: Sequence[str], fixed: Mapping[str, float], seen: Sequence[Observation]
) -> set[str]:
    """Of the parameters `names`, those that measurements of these kinds leave open, whatever they say.

    Args:
        fixed: the other parameters.
    """
    if not names:
        return set()
    of_lines = {name: TYPICAL_CYCLE for name in names if name not in TYPICAL}
    at = {name: np.array([value]) for name, value in {**TYPICAL, **of_lines, **fixed}.items()}
    slopes = np.zeros((max(len(seen), 1), len(names)))
    for column, name in enumerate(names):
        step = 1e-5
        moved = {**at, name: at[name] * (1 + step)}
        for row, item in enumerate(seen):
            change = np.log(model.predict(moved, item) / model.predict(at, item))
            slopes[row, column] = float(change[0]) / step
    _, sizes, rows = np.linalg.svd(slopes)
    rank = int((sizes > 1e-4 * max(float(sizes.max()), SMALL)).sum())
    loose = np.abs(rows[rank:])
    return {name for column, name in enumerate(names) if (loose[:, column] > 1e-2).any()}


def fit(
    model: Model, names: Sequence[str], fixed: Values, seen: Sequence[Observation], measured: Array, draws: int
) -> Fitted:
    """Levenberg-Marquardt, each draw by itself, within the parameters' bounds.

    Args:
        names: P parameters to fit.
        fixed: [S] of each other parameter.
        seen: M measurements.
        measured: [S, M], what was measured, with each draw's errors.
        draws: S.
    """

    def predict(theta: Array) -> Array:
        """[S, M]."""
        values = {**fixed, **{name: theta[:, column] for column, name in enumerate(names)}}
        return np.stack([model.predict(values, item) for item in seen], 1)

    def residuals(theta: Array) -> Array:
        return np.log(predict(theta) / measured)

    if not names:
        return Fitted({}, predict(np.empty((draws, 0)))[0].tolist() if seen else [], 1.0)
    low, high = (np.array([BOUNDS.get(name, (SMALL, np.inf))[side] for name in names]) for side in (0, 1))
    theta = np.tile(_start(names, seen), (draws, 1))
    damping, settled = np.full(draws, 1e-2), np.zeros(draws, dtype=bool)
    wrong = residuals(theta)
    for _ in range(ITERATIONS):
        slopes = np.empty((draws, len(seen), len(names)))
        for column in range(len(names)):
            moved = theta.copy()
            step = 1e-6 * np.maximum(theta[:, column], 1e-3)
            moved[:, column] += step
            slopes[:, :, column] = (residuals(moved) - wrong) / step[:, None]
        size = np.maximum(theta, 1e-3)  # steps are relative: parameters differ by orders of magnitude
        scaled = slopes * size[:, None, :]
        square = scaled.transpose(0, 2, 1) @ scaled
        steep = (scaled.transpose(0, 2, 1) @ wrong[:, :, None])[..., 0]
        stuck = ((theta <= low) & (steep > 0)) | ((theta >= high) & (steep < 0))  # at a bound, pushed against it
        square[stuck] = 0
        square = np.where(stuck[:, None, :], 0, square)
        steep = np.where(stuck, 0, steep)
        square[:, range(len(names)), range(len(names))] += (
            damping[:, None] * np.maximum(np.einsum("sii->si", square), 1e-12) + stuck
        )
        move = -np.linalg.solve(square, steep[:, :, None])[..., 0] * size
        tried = np.clip(theta + np.clip(move, -size, 2 * size), low, high)
        new = residuals(tried)
        better = (new**2).sum(1) <= (wrong**2).sum(1)
        settled = better & (np.abs(tried - theta) <= 1e-7 * size).all(1) | settled
        theta, wrong = np.where(better[:, None], tried, theta), np.where(better[:, None], new, wrong)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-12, 1e9)
        if settled.all():
            break
    values = {name: theta[:, column] for column, name in enumerate(names)}
    return Fitted(values, predict(theta)[0].tolist(), float(settled.mean()))


def _start(names: Sequence[str], seen: Sequence[Observation]) -> Array:
    """[P], of the order of the cycles that were measured."""
    cycles = [
        1500 * item.point.batch / item.measured if item.quantity == "tok_s" else item.measured
        for item in seen
        if item.quantity in ("tok_s", "cycle_ms", "verify_ms")
    ]
    cycle = float(np.median(cycles)) if cycles else TYPICAL[FIXED]
    costs = {FIXED: 0.7 * cycle, PER_TOKEN: 0.03 * cycle, DRAFT: 0.01 * cycle, OVERHEAD: 0.02 * cycle}
    start = {ACCEPTANCE: 0.6, FALL: 0.97, **costs}
    return np.array([start.get(name, cycle) for name in names])
