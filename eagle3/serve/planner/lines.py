"""Where how a cycle splits into verify and drafts is open: the whole cycle as a line over draft steps, for each batch.

At one batch the model makes a chain's cycle

    (verify_fixed_ms + verify_per_token_ms * b + overhead_ms) + k * (verify_per_token_ms * b + draft_ms_per_step)

so that two step counts with speeds and known acceptance determine every chain there. The line's parameters are the
cycles of the fewest and of the most steps measured: both are positive, however the line slopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from eagle3.config import MeasuredPoint, PlanConfig
from eagle3.serve.planner.fit import undetermined
from eagle3.serve.planner.inputs import Inputs
from eagle3.serve.planner.model import ACCEPTANCE, COSTS, FALL, GAIN, Cycle, Model, Values
from eagle3.serve.planner.rows import Line, interval_of

SPEEDS = ("tok_s", "cycle_ms")
IMPOSSIBLE = 0.01
"""Share of the draws whose cycle takes no time, from which on a step count is not predicted."""
SPLIT_IS_OPEN = "what limits (verify, drafts or overhead), and how much cheaper verify must get"


@dataclass(frozen=True)
class Open:
    """What a plan leaves open.

    Attributes:
        what: each thing that was not predicted, in words.
        cheapest: the measurements that would supply it.
    """

    what: tuple[str, ...]
    cheapest: str


@dataclass(frozen=True, eq=False)
class LineModel(Model):
    """Attributes:
    lines: of each batch that has one, the fewest and the most steps that were measured.
    """

    lines: Mapping[int, tuple[int, int]]

    def cycle(self, values: Values, steps: int, tokens: int, batch: int) -> Cycle:
        """A chain's cycle, at a batch that has a line."""
        assert tokens == steps + 1, "a line is of chains"
        low, high = self.lines[batch]
        first, last = (values[name] for name in parameters(batch, (low, high)))
        return Cycle(first + (last - first) * ((steps - low) / (high - low)), None)

    def line(self, values: Values, batch: int) -> Line:
        """The estimate of a batch's line, and its intervals."""
        low, high = self.lines[batch]
        first, last = (values[name] for name in parameters(batch, (low, high)))
        slope = (last - first) / (high - low)
        fixed = first - slope * low
        return Line(float(fixed[0]), interval_of(fixed), float(slope[0]), interval_of(slope), (low, high))


def parameters(batch: int, steps: tuple[int, int]) -> tuple[str, str]:
    """Names of a line's two parameters."""
    low, high = (f"cycle_ms of {one} steps at batch {batch}" for one in steps)
    return low, high


def measured_steps(points: Iterable[MeasuredPoint], batch: int) -> set[int]:
    """The chains of a batch whose cycle or speed was measured."""
    return {
        point.steps
        for point in points
        if point.batch == batch and not point.is_tree and any(getattr(point, name) is not None for name in SPEEDS)
    }


def is_scaled(config: PlanConfig) -> bool:
    """Whether it is asked what would be if a part of the cycle took another time."""
    return any(value != 1 for value in config.scale.model_dump().values())


def accepts_known(config: PlanConfig, inputs: Inputs) -> bool:
    """Whether acceptance is given, or was measured by itself."""
    if ACCEPTANCE not in inputs.names:
        return True
    names = [name for name in inputs.names if name in (ACCEPTANCE, FALL)]
    seen = [item for item in inputs.seen if item.quantity == "acceptance_length"]
    return not undetermined(inputs.model, names, {**inputs.given, **inputs.assumed, GAIN: 1.0}, seen)


def line_inputs(config: PlanConfig, inputs: Inputs) -> Inputs | None:
    """The inputs of the batches' lines; None where no batch that is asked for has one, or a part is to be scaled."""
    lines = {}
    for batch in sorted({point.batch for point in config.points} & set(config.batches)):
        steps = measured_steps(config.points, batch)
        if len(steps) > 1:
            lines[batch] = (min(steps), max(steps))
    if not lines or is_scaled(config) or not accepts_known(config, inputs):
        return None
    of_acceptance = [name for name in inputs.names if name not in COSTS]
    seen = tuple(
        item
        for item in inputs.seen
        if item.quantity == "acceptance_length"
        or (item.quantity in SPEEDS and not item.point.is_tree and item.point.batch in lines)
    )
    return replace(
        inputs,
        model=LineModel(inputs.model.accepted, inputs.model.own_lengths, lines),
        names=(*of_acceptance, *(name for batch, steps in lines.items() for name in parameters(batch, steps))),
        given={name: value for name, value in inputs.given.items() if name not in COSTS},
        assumed={name: value for name, value in inputs.assumed.items() if name not in COSTS},
        seen=seen,
    )


def possible(model: Model, values: Values, steps: Iterable[int], batch: int) -> list[int]:
    """Of these step counts, sorted, those whose cycle takes some time in all but a few of the draws."""
    cycles = {one: model.cycle(values, one, one + 1, batch).total for one in sorted(steps)}
    return [one for one, total in cycles.items() if total[0] > 0 and np.mean(total <= 0) < IMPOSSIBLE]


def left_open(config: PlanConfig, lined: Iterable[int]) -> tuple[str, ...]:
    """What lines do not answer of what was asked for."""
    found = [SPLIT_IS_OPEN]
    if config.trees:
        trees = (f"{tree.steps} steps, topk {tree.topk}, {tree.draft_tokens} draft tokens" for tree in config.trees)
        found.append("trees: " + "; ".join(trees))
    others = [str(batch) for batch in config.batches if batch not in set(lined)]
    if others:
        found.append(f"batch {', '.join(others)}: no two step counts were measured there")
    return tuple(found)
