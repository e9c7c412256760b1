"""What the config says, as the model takes it: what is given, what is to be fitted, what is assumed.

Shapes: S draws, the first without any error; M measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.config import PlanConfig
from eagle3.config.plan_schema import MEASURED
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import read_json_object
from eagle3.serve.planner.model import (
    ACCEPTANCE,
    COSTS,
    DRAFT,
    FALL,
    FIXED,
    GAIN,
    OVERHEAD,
    PER_TOKEN,
    Array,
    Model,
    Observation,
)

EVALUATION_FORMAT = "eagle3-evaluation"
EXPECTED = "its number as steps, a length of 1 or more, and an interval of two"
LONGEST = 1000.0
"""An acceptance length that is not one."""
DEVIATIONS = 1.959964
"""Standard errors from an estimate to either end of its 95% interval."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Attributes:
    model: how they hang together.
    names: the parameters to fit.
    given: each parameter that is given, and where; the acceptance of a list or a file is in the model.
    assumed: each that is assumed.
    seen: the measurements to fit to.
    gain_error: standard error of the factor on a file's (acceptance length - 1).
    accepted_from: where the model's listed acceptance comes from; None where there is none.
    """

    model: Model
    names: tuple[str, ...]
    given: dict[str, float]
    assumed: dict[str, float]
    seen: tuple[Observation, ...]
    gain_error: float
    accepted_from: str | None


def read_inputs(config: PlanConfig) -> Inputs:
    """Sorts what is known.

    Raises:
        ProblemsError: the acceptance file is not one.
    """
    accepted, source, gain_error = _listed_acceptance(config)
    given = {name: value for name in COSTS if (value := getattr(config.cost, name)) is not None}
    constant = config.acceptance if isinstance(config.acceptance, float) else None
    if constant is not None:
        given[ACCEPTANCE] = constant
    fits_acceptance = accepted is None and constant is None
    chains = {point.steps for point in config.points if point.acceptance_length is not None and not point.is_tree}
    fits_fall = fits_acceptance and len(chains) > 1
    names = [ACCEPTANCE] if fits_acceptance else []
    names += [FALL] if fits_fall else []
    names += [name for name in COSTS if name not in given and (name != OVERHEAD or _shows_overhead(config, names))]
    assumed = {} if OVERHEAD in names or OVERHEAD in given else {OVERHEAD: 0.0}
    if accepted is None and not fits_fall:
        assumed[FALL] = 1.0
    return Inputs(
        Model(accepted, own_lengths=not fits_acceptance),
        tuple(names),
        given,
        assumed,
        _observations(config, fits_acceptance, {name for name in COSTS if name in given}),
        gain_error,
        source,
    )


def _shows_overhead(config: PlanConfig, fitted: list[str]) -> bool:
    """Whether some point has verify and drafts besides the whole cycle."""
    return any(
        point.verify_ms is not None
        and point.draft_ms is not None
        and (
            point.cycle_ms is not None
            or (point.tok_s is not None and (ACCEPTANCE not in fitted or point.acceptance_length is not None))
        )
        for point in config.points
    )


def _observations(config: PlanConfig, fits_acceptance: bool, given: set[str]) -> tuple[Observation, ...]:
    """What there is to fit to: not a length where acceptance is given, nor a tree's, nor the time of a given part."""
    settled = {"draft_ms"} if DRAFT in given else set()
    settled |= {"verify_ms"} if {FIXED, PER_TOKEN} <= given else set()
    found = []
    for point in config.points:
        for name in MEASURED:
            value = getattr(point, name)
            if value is None or name in settled:
                continue
            if name != "acceptance_length" or (fits_acceptance and not point.is_tree):
                found.append(Observation(point, name, value))
    return tuple(found)


def _listed_acceptance(config: PlanConfig) -> tuple[Array | None, str | None, float]:
    """[depths] share of all cycles that accept the draft there, where from, and the error of (length - 1)."""
    if isinstance(config.acceptance, list):
        return np.cumprod(config.acceptance, dtype=np.float64), "acceptance", 0.0
    if config.acceptance_file is None:
        return None, None, 0.0
    path = Path(config.acceptance_file)
    by_steps = _read_evaluation(path)
    lengths = [length for length, _, _ in by_steps]
    accepted = np.clip(np.diff([1.0, *lengths]), 0, 1)
    last, low, high = by_steps[-1]
    error = (high - low) / 2 / DEVIATIONS / (last - 1) if last > 1 else 0.0
    return accepted, str(path), error


def _read_evaluation(path: Path) -> list[tuple[float, float, float]]:
    """(acceptance length, its interval's ends) of 1, 2, .. drafts a round."""
    value = read_json_object(path, "evaluation")
    fix = "pass the file that `eagle3 evaluate --json` printed, of a store whose answers have rounds"
    if value.get("format") != EVALUATION_FORMAT or value.get("format_version") != 1:
        message = f"is no evaluation: format {value.get('format')!r}, version {value.get('format_version')!r}"
        raise problem_error(str(path), "plan.acceptance_file", message, fix)
    rows = value.get("by_steps")
    if not isinstance(rows, list) or not rows:
        raise problem_error(str(path), "plan.acceptance_file", "has no by_steps", fix)
    found = [_row_numbers(steps, row) for steps, row in enumerate(rows, 1)]
    wrong = [place for place, numbers in enumerate(found) if numbers is None]
    raise_problems(
        Problem(
            str(path), "plan.acceptance_file", f"by_steps[{place}] is {_short(rows[place])}, expected {EXPECTED}", fix
        )
        for place in wrong
    )
    return [numbers for numbers in found if numbers is not None]


def _row_numbers(steps: int, row: Any) -> tuple[float, float, float] | None:
    if not isinstance(row, dict) or row.get("steps") != steps or not isinstance(row.get("interval"), list):
        return None
    numbers = [row.get("length"), *row["interval"]]
    if len(numbers) != 3 or not all(isinstance(one, int | float) and 1 <= one < LONGEST for one in numbers):
        return None
    length, low, high = map(float, numbers)
    return length, low, high


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + ".."


def drawn_values(inputs: Inputs, config: PlanConfig, generator: np.random.Generator) -> dict[str, Array]:
    """[S] of every parameter that is not fitted, by name."""
    draws = config.draws + 1
    values: dict[str, Array] = {
        name: np.full(draws, value) for name, value in {**inputs.given, **inputs.assumed}.items()
    }
    if FALL in inputs.assumed:
        low, high = config.acceptance_fall
        values[FALL] = _estimate_first(generator.uniform(low, high, draws), 1.0)
    gain = np.exp(inputs.gain_error * generator.standard_normal(draws))
    values[GAIN] = _estimate_first(gain, 1.0)
    return values


def drawn_measurements(measured: Array, error: float, draws: int, generator: np.random.Generator) -> Array:
    """[S, M] of [M] measurements, each with its error, but for the first row."""
    noise = np.exp(error * generator.standard_normal((draws, len(measured))))
    noise[0] = 1
    return measured * noise


def _estimate_first(values: Array, estimate: float) -> Array:
    values[0] = estimate
    return values
