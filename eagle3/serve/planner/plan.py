"""The plan: fits what is not given, predicts every setting, and says what it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eagle3.config import PlanConfig, ScaleSection
from eagle3.errors import ProblemsError, problem_error
from eagle3.serve.planner.basis import NOTHING, Input, Residual, inputs_of, notes_of, reach_of
from eagle3.serve.planner.fit import fit
from eagle3.serve.planner.inputs import Inputs, drawn_measurements, drawn_values, read_inputs
from eagle3.serve.planner.lines import LineModel, Open, is_scaled, left_open, line_inputs, possible
from eagle3.serve.planner.measured import with_measured
from eagle3.serve.planner.missing import cheapest, missing_problem, open_parameters
from eagle3.serve.planner.model import (
    COSTS,
    Array,
    Values,
)
from eagle3.serve.planner.predict import predict_batch
from eagle3.serve.planner.rows import BatchPlan, Luck

REFUTED = 2.0
"""Points whose residuals are that many times the stated error do not fit one model of all batches; half as many are
enough where they want a part of the cycle to take less than no time."""


@dataclass(frozen=True)
class Plan:
    """Attributes:
    inputs: what it rests on.
    residuals: of every measurement that was fitted to.
    freedom: measurements less fitted parameters; with 0 the fit meets every one, right or wrong.
    error: relative standard error of a measurement behind the intervals.
    scale: what of the cycle is taken to be other than it was measured.
    batches: in the order of the config, less those that are left open.
    open: what was asked for and cannot be said; None where nothing is.
    notes: what a reader should know besides.
    """

    inputs: tuple[Input, ...]
    residuals: tuple[Residual, ...]
    freedom: int
    error: float
    scale: ScaleSection
    batches: tuple[BatchPlan, ...]
    open: Open | None
    notes: tuple[str, ...]


def make_plan(config: PlanConfig, where: str = "plan") -> Plan:
    """Predicts tokens/s at every step count, tree and batch.

    Where the points leave open how a cycle splits into verify and drafts, or do not fit one model of all batches, each
    batch with two step counts has a line of its own for its chains, and what needs the split is left open.

    Args:
        where: named in problems.

    Raises:
        ProblemsError: the acceptance file or a bench file is not one; the inputs do not even determine a batch's chains
            (one problem that names what is open, and the cheapest measurement); or a cycle would take no time.
    """
    config = with_measured(config)
    inputs = read_inputs(config)
    if not open_parameters(inputs):
        plan = _plan(config, where, inputs)
        return _by_batch(config, where, inputs, plan) or plan
    lines = line_inputs(config, inputs)
    if lines is None:
        raise ProblemsError([missing_problem(config, where, inputs)])
    return _plan_of_lines(config, where, lines, cheapest(config, inputs))


def _by_batch(config: PlanConfig, where: str, inputs: Inputs, plan: Plan) -> Plan | None:
    """Another plan where several batches' points determine one model but do not fit it; None where they do, or where
    there is no other."""
    worst = max((abs(item.relative) for item in plan.residuals), default=0.0)
    at_edge = any(item.kind == "fitted" and item.name in COSTS and item.value < NOTHING for item in plan.inputs)  # type: ignore[operator]
    limit = config.measurement_error * (1 if at_edge else REFUTED)
    fits = max(plan.error / limit, worst / limit / 1.5) <= 1 + 1e-6
    several = len({point.batch for point in config.points}) > 1
    if fits or not several or set(COSTS) & set(inputs.given):
        return None
    note = f"the points do not fit one model of all batches (largest residual {worst:.0%}): "
    if len(config.batches) == 1:
        (batch,) = config.batches
        own = config.model_copy(update={"points": [point for point in config.points if point.batch == batch]})
        try:
            other = make_plan(own, where)
        except ProblemsError:  # too few points there: the one model, whose misfit its notes tell, is all there is
            return None
        if config.trees and other.open is not None:
            return None
        return replace(other, notes=(f"{note}batch {batch} is planned from its own points", *other.notes))
    lines = None if config.trees else line_inputs(config, inputs)
    if lines is None:
        return None
    supply = f"a profile of one cycle (verify_ms, draft_ms) at a batch, asked for alone: batches=[{config.batches[0]}]"
    other = _plan_of_lines(config, where, lines, supply)
    return replace(other, notes=(f"{note}each batch has a line of its own", *other.notes))


def _plan_of_lines(config: PlanConfig, where: str, inputs: Inputs, supply: str) -> Plan:
    assert isinstance(inputs.model, LineModel) and not is_scaled(config)
    lined = [batch for batch in config.batches if batch in inputs.model.lines]
    what = left_open(config, lined)
    plan = _plan(config.model_copy(update={"batches": lined, "trees": []}), where, inputs)
    notes = list(plan.notes)
    if given := [name for name in COSTS if getattr(config.cost, name) is not None]:
        notes.append(f"not used, as the split is open: {', '.join(f'cost.{name}' for name in given)}")
    return replace(plan, open=Open(what, supply), notes=tuple(notes))


def _plan(config: PlanConfig, where: str, inputs: Inputs) -> Plan:
    """The plan from inputs that determine their model."""
    generator = np.random.default_rng(config.seed)
    values = drawn_values(inputs, config, generator)
    measured = np.array([item.measured for item in inputs.seen])
    freedom = len(inputs.seen) - len(inputs.names)
    first = fit(inputs.model, inputs.names, _first(values), inputs.seen, measured[None], 1)
    error = _error(first.predicted, measured, freedom, config.measurement_error)
    noisy = drawn_measurements(measured, error, config.draws + 1, generator)
    fitted = fit(inputs.model, inputs.names, values, inputs.seen, noisy, config.draws + 1)
    values = {**values, **fitted.values}
    baselines = config.baselines
    drawn = drawn_measurements(np.array(list(baselines.values())), error, config.draws + 1, generator)
    baseline = {batch: drawn[:, column] for column, batch in enumerate(baselines)}
    luck = Luck.draw(generator, config, error)
    if isinstance(inputs.model, LineModel):
        batches, left_out = _line_batches(config, where, inputs, inputs.model, values, baseline, luck)
    else:
        batches, left_out = _split_batches(config, where, inputs, values, baseline, luck), []
    residuals = tuple(map(Residual, inputs.seen, fitted.predicted))
    return Plan(
        inputs=inputs_of(inputs, values, config),
        residuals=residuals,
        freedom=freedom,
        error=error,
        scale=config.scale,
        batches=tuple(batches),
        open=None,
        notes=(*notes_of(config, inputs, values, residuals, fitted.settled), *left_out),
    )


def _split_batches(
    config: PlanConfig, where: str, inputs: Inputs, values: Values, baseline: dict[int, Array], luck: Luck
) -> list[BatchPlan]:
    if sum(float(values[name][0]) for name in COSTS) <= 0:
        raise problem_error(where, "plan.cost", "a cycle takes no time at all", "give the costs of `cost` in ms")
    reach = reach_of(config, inputs)
    return [
        predict_batch(inputs.model, values, config, batch, baseline.get(batch), reach, luck) for batch in config.batches
    ]


def _line_batches(
    config: PlanConfig,
    where: str,
    inputs: Inputs,
    model: LineModel,
    values: Values,
    baseline: dict[int, Array],
    luck: Luck,
) -> tuple[list[BatchPlan], list[str]]:
    """The batches with a step count that can be predicted, and notes of those that cannot."""
    steps, reach = sorted(config.steps), reach_of(config, inputs)
    batches, notes = [], []
    for batch in config.batches:
        kept = possible(model, values, steps, batch)
        if impossible := [str(one) for one in steps if one not in kept]:
            notes.append(
                f"not predicted at batch {batch}: {', '.join(impossible)} steps, whose cycle by the line of the "
                "points may take no time at all; measure nearer to them"
            )
        if kept:
            chosen, its = config.model_copy(update={"steps": kept}), luck.of_rows([steps.index(one) for one in kept])
            its_reach = replace(reach, steps=model.lines[batch])
            line = model.line(values, batch)
            batches.append(predict_batch(model, values, chosen, batch, baseline.get(batch), its_reach, its, line))
    if not batches:
        raise problem_error(where, "plan.cost", "; ".join(notes), "measure a step count near those that are asked for")
    return batches, notes


def _first(values: Values) -> dict[str, Array]:
    return {name: column[:1] for name, column in values.items()}


def _error(predicted: Sequence[float], measured: Array, freedom: int, stated: float) -> float:
    """The stated error of a measurement, or the residuals' where there are some and they are larger."""
    if freedom <= 0 or not predicted:
        return stated
    squares = np.log(np.array(predicted) / measured) ** 2
    return max(stated, math.sqrt(float(squares.sum()) / freedom))
