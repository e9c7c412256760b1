"""What a plan rests on, in words and numbers: its inputs, how well they are met, and how far they reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.config import PlanConfig
from eagle3.serve.planner.inputs import Inputs
from eagle3.serve.planner.lines import LineModel
from eagle3.serve.planner.missing import MEANING
from eagle3.serve.planner.model import ACCEPTANCE, COSTS, FALL, FIXED, PER_TOKEN, Observation, Values
from eagle3.serve.planner.rows import Interval, Range, interval_of

DISAGREES = 0.05
"""Relative difference of a measured and a given acceptance length that is worth a note."""
NOTHING = 1e-6
"""ms, or a share, that the fit's bound has stopped."""


@dataclass(frozen=True)
class Input:
    """One thing the plan rests on.

    Attributes:
        kind: `given`, `fitted` or `assumed`.
        value: its number; a list of shares by depth for a listed acceptance.
        interval: 95%; of what is assumed, the range; None where it is taken as exact.
    """

    name: str
    kind: str
    value: float | tuple[float, ...]
    interval: Interval | None
    source: str


@dataclass(frozen=True)
class Residual:
    """A measurement that was fitted to, and what the fit makes of it."""

    seen: Observation
    predicted: float

    @property
    def relative(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.seen.measured - 1


def reach_of(config: PlanConfig, inputs: Inputs) -> Range:
    """What was measured of the verify line, and of acceptance."""
    verified = [
        item.point.tokens * item.point.batch
        for item in inputs.seen
        if item.quantity in ("verify_ms", "cycle_ms", "tok_s")
    ]
    tokens = (min(verified), max(verified)) if {FIXED, PER_TOKEN} & set(inputs.names) else None
    if inputs.model.accepted is not None:
        return Range(tokens, len(inputs.model.accepted))
    if ACCEPTANCE in inputs.given:
        return Range(tokens, None)
    deepest = [
        point.steps
        for point in config.points
        if not point.is_tree and (point.tok_s is not None or point.acceptance_length is not None)
    ]
    return Range(tokens, max(deepest))


def inputs_of(inputs: Inputs, values: Values, config: PlanConfig) -> tuple[Input, ...]:
    found = []
    if inputs.accepted_from is not None and inputs.model.accepted is not None:
        listed = tuple(map(float, inputs.model.accepted))
        found.append(Input("accepted_by_depth", "given", listed, None, inputs.accepted_from))
    for name in (ACCEPTANCE, FALL, *COSTS):
        if name in inputs.names:
            spread = interval_of(values[name])
            found.append(Input(name, "fitted", float(values[name][0]), spread, "points"))
        elif name in inputs.given:
            found.append(Input(name, "given", inputs.given[name], None, "acceptance" if name == ACCEPTANCE else "cost"))
        elif name in inputs.assumed:
            low, high = config.acceptance_fall
            source = "acceptance_fall" if name == FALL else f"nothing shows {MEANING[name]}"
            found.append(Input(name, "assumed", inputs.assumed[name], (low, high) if name == FALL else None, source))
    if isinstance(inputs.model, LineModel):
        for name in (one for one in inputs.names if one not in MEANING):
            found.append(Input(name, "fitted", float(values[name][0]), interval_of(values[name]), "points"))
    for item in inputs.seen:
        found.append(Input(_label(item), "given", item.measured, None, "points"))
    for batch, speed in config.baselines.items():
        found.append(Input(f"baseline tok_s at batch {batch}", "given", speed, None, "baseline"))
    return tuple(found)


def _label(seen: Observation) -> str:
    return f"{seen.quantity} at {seen.point.steps} steps, {seen.point.tokens} draft tokens, batch {seen.point.batch}"


def notes_of(
    config: PlanConfig, inputs: Inputs, values: Values, residuals: Sequence[Residual], settled: float
) -> list[str]:
    notes = []
    unknown = [batch for batch in config.batches if batch not in config.baselines]
    if unknown:
        which = ", ".join(map(str, unknown))
        notes.append(f"no baseline at batch {which}: measure tokens/s without a drafter there to know what it is worth")
    worst = max(residuals, key=lambda item: abs(item.relative), default=None)
    if worst is not None and abs(worst.relative) > 3 * config.measurement_error:
        notes.append(
            f"the points do not fit the model: {_label(worst.seen)} was {worst.seen.measured:g}, the fit says "
            f"{worst.predicted:.4g} ({worst.relative:+.0%})"
        )
    if inputs.names and settled < 0.99:
        notes.append(f"the fit did not settle in {1 - settled:.0%} of the draws: the points hardly determine it")
    at_edge = [name for name in inputs.names if name in MEANING and float(values[name][0]) < NOTHING]
    if at_edge:
        notes.append(
            f"the points want less than nothing for {', '.join(map(MEANING.__getitem__, at_edge))}: taken as 0"
        )
    lines = isinstance(inputs.model, LineModel)
    if not lines and len({point.batch for point in config.points} | set(config.batches)) > 1:
        notes.append("a draft step and the overhead are taken to cost the same at every batch")
    for point in config.points:
        if point.acceptance_length is None or point.is_tree or not inputs.model.own_lengths:
            continue
        expected = float(inputs.model.length(values, point.steps)[0])
        if abs(expected / point.acceptance_length - 1) > DISAGREES:
            notes.append(
                f"at {point.steps} steps the server's acceptance length is {point.acceptance_length:.2f}, the given "
                f"acceptance makes it {expected:.2f}: check the wiring, or that the prompts are alike"
            )
    return notes
