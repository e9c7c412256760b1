"""What too few inputs leave open, and the cheapest measurements that would supply it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from eagle3.config import MeasuredPoint, PlanConfig
from eagle3.errors import Problem
from eagle3.serve.planner.fit import undetermined
from eagle3.serve.planner.inputs import Inputs
from eagle3.serve.planner.lines import accepts_known, is_scaled, measured_steps
from eagle3.serve.planner.model import ACCEPTANCE, DRAFT, FALL, FIXED, GAIN, OVERHEAD, PER_TOKEN, Observation

MEANING = {
    ACCEPTANCE: "how often drafts are accepted",
    FALL: "how acceptance falls with depth",
    FIXED: "verify's fixed time",
    PER_TOKEN: "verify's time a token",
    DRAFT: "the time of a draft step",
    OVERHEAD: "the cycle's overhead",
}
MOST_TOGETHER = 4
LOOK, PROFILE, RUN = 1.0, 3.0, 4.0
"""Efforts: a look into a log, a profile of a server that runs, another start of one."""


@dataclass(frozen=True)
class Measurement:
    """Something that could be measured.

    Attributes:
        effort: the cheapest set is that of the least sum.
        seen: what it would add.
        gives: parameters that need not be fitted any more.
    """

    effort: float
    what: str
    seen: tuple[Observation, ...] = ()
    gives: frozenset[str] = frozenset()


def open_parameters(inputs: Inputs) -> set[str]:
    """Of the parameters to fit, those that the measurements leave open."""
    return undetermined(inputs.model, inputs.names, _fixed(inputs), inputs.seen)


def missing_problem(config: PlanConfig, where: str, inputs: Inputs) -> Problem:
    """The one problem of inputs that leave something open."""
    open_names = open_parameters(inputs)
    said = ", ".join(MEANING[name] for name in inputs.names if name in open_names)
    count = len(inputs.seen)
    have = f"{count} usable measurement{'' if count == 1 else 's'}" if count else "no measurement"
    message = f"{have} for {len(inputs.names)} unknowns leave open {said}"
    effort, everything = _cheapest(config, inputs)
    chains = None if is_scaled(config) or config.trees else _of_a_line(config, inputs)
    fix = f"cheapest: {everything}"
    if chains is not None and chains[0] < effort:
        fix += f"; for the chains at batch {config.batches[0]} alone: {chains[1]}"
    return Problem(where, "plan.missing", message, fix)


def cheapest(config: PlanConfig, inputs: Inputs) -> str:
    """The cheapest measurements that would determine every parameter, in words."""
    return _cheapest(config, inputs)[1]


def _fixed(inputs: Inputs) -> dict[str, float]:
    return {**inputs.given, **inputs.assumed, GAIN: 1.0}


def _of_a_line(config: PlanConfig, inputs: Inputs) -> tuple[float, str]:
    """What the first batch lacks of a line of its own, and the effort of it."""
    batch = config.batches[0]
    measured = measured_steps(config.points, batch)
    effort, words = 0.0, []
    known, at = accepts_known(config, inputs), "" if batch == 1 else f", batch {batch}"
    chain = next((point for point in config.points if not point.is_tree), None)
    if not known and chain is not None:
        effort += LOOK
        words.append(f"acceptance_length {_at(chain)}, which the server says of each request")
    if not measured:
        bring = "tok_s" if known or chain is not None else "tok_s and acceptance_length"
        return effort + 2 * RUN, "; and ".join([*words, f"runs at 1 and 5 steps{at}: {bring} of each"])
    if len(measured) == 1:
        (only,) = measured
        effort += RUN
        words.append(f"one more run at {_steps(5 if only < 3 else 1)}{at}: its tok_s")
    return effort, "; and ".join(words)


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _at(point: MeasuredPoint) -> str:
    return f"at {_steps(point.steps)}" + ("" if point.batch == 1 else f", batch {point.batch}")


def _cheapest(config: PlanConfig, inputs: Inputs) -> tuple[float, str]:
    model, names, fixed, seen = inputs.model, inputs.names, _fixed(inputs), inputs.seen
    found: tuple[float, tuple[Measurement, ...]] | None = None
    candidates = _candidates(config, names)
    for count in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(candidates, count):
            effort = sum(item.effort for item in chosen)
            if found is not None and effort >= found[0]:
                continue
            given = frozenset().union(*(item.gives for item in chosen))
            left = [name for name in names if name not in given]
            together = [*seen, *(one for item in chosen for one in item.seen)]
            if not undetermined(model, left, fixed, together):
                found = effort, chosen
    assert found is not None, "a profile and acceptance at two step counts determine everything"
    return found[0], "; and ".join(item.what for item in found[1])


def _candidates(config: PlanConfig, names: Sequence[str]) -> list[Measurement]:
    """All that is worth measuring beside the points there are; numbers stand for what would be measured."""
    found = []
    if ACCEPTANCE in names:
        what = "`eagle3 evaluate --json` on a held-out store, which needs no server, as acceptance_file"
        found.append(Measurement(1.5, what, gives=frozenset((ACCEPTANCE, FALL))))
    for point in config.points:
        at = _at(point)
        if ACCEPTANCE in names and point.acceptance_length is None:
            one = Observation(point, "acceptance_length", 2.0)
            found.append(Measurement(LOOK, f"acceptance_length {at}, which the server says of each request", (one,)))
        if point.verify_ms is None or point.draft_ms is None:
            both = (Observation(point, "verify_ms", 20.0), Observation(point, "draft_ms", 1.0))
            found.append(Measurement(PROFILE, f"verify_ms and draft_ms {at}, from a profile of one cycle", both))
        if point.tok_s is None:
            found.append(Measurement(2, f"tok_s {at}", (Observation(point, "tok_s", 80.0),)))
    measured = {point.steps for point in config.points}
    others = [steps for steps in (2, 5, 10) if steps not in measured]
    for steps in others[:2] if measured else (3,):
        other = MeasuredPoint(steps=steps, tok_s=80.0)
        ran = Observation(other, "tok_s", 80.0)
        profiled = (Observation(other, "verify_ms", 20.0), Observation(other, "draft_ms", 1.0))
        found.append(Measurement(RUN, f"one more run at {steps} steps: its tok_s", (ran,)))
        what = f"one more run at {steps} steps with a profile of one cycle: its tok_s, verify_ms and draft_ms"
        found.append(Measurement(6, what, (ran, *profiled)))
    if not measured:
        far = Observation(MeasuredPoint(steps=8, tok_s=80.0), "tok_s", 80.0)
        found.append(Measurement(RUN, "one more run at 8 steps: its tok_s", (far,)))
    return found
