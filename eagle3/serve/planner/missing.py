"""What too few inputs leave open, and the cheapest measurements that would supply it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from eagle3.config import MeasuredPoint, PlanConfig
from eagle3.errors import Problem
from eagle3.serve.planner.fit import undetermined
from eagle3.serve.planner.model import ACCEPTANCE, DRAFT, FALL, FIXED, OVERHEAD, PER_TOKEN, Model, Observation

MEANING = {
    ACCEPTANCE: "how often drafts are accepted",
    FALL: "how acceptance falls with depth",
    FIXED: "verify's fixed time",
    PER_TOKEN: "verify's time a token",
    DRAFT: "the time of a draft step",
    OVERHEAD: "the cycle's overhead",
}
MOST_TOGETHER = 4


@dataclass(frozen=True)
class Measurement:
    """Something that could be measured.

    Attributes:
        effort: 1 is a look into a log; the cheapest set is that of the least sum.
        seen: what it would add.
        gives: parameters that need not be fitted any more.
    """

    effort: float
    what: str
    seen: tuple[Observation, ...] = ()
    gives: frozenset[str] = frozenset()


def missing_problem(
    config: PlanConfig,
    where: str,
    model: Model,
    names: Sequence[str],
    fixed: Mapping[str, float],
    seen: Sequence[Observation],
) -> Problem | None:
    """The one problem of too few inputs; None where every parameter is determined."""
    open_names = undetermined(model, names, fixed, seen)
    if not open_names:
        return None
    said = ", ".join(MEANING[name] for name in names if name in open_names)
    have = f"{len(seen)} usable measurements" if seen else "no measurement"
    message = f"{have} for {len(names)} unknowns leave open {said}"
    return Problem(where, "plan.missing", message, _fix(config, model, names, fixed, seen))


def _fix(
    config: PlanConfig, model: Model, names: Sequence[str], fixed: Mapping[str, float], seen: Sequence[Observation]
) -> str:
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
    fix = "cheapest: " + "; and ".join(item.what for item in found[1])
    left = [name for name in names if name != DRAFT]
    unseen = DRAFT in names and all(item.quantity != "draft_ms" for item in seen)
    if unseen and seen and not config.trees and not undetermined(model, left, {**fixed, DRAFT: 0.0}, seen):
        fix += (
            "; or pass cost.draft_ms_per_step=0: chains are predicted all the same, and what is then called verify's "
            "time a token holds the draft step's"
        )
    return fix


def _candidates(config: PlanConfig, names: Sequence[str]) -> list[Measurement]:
    """All that is worth measuring beside the points there are; numbers stand for what would be measured."""
    found = []
    if ACCEPTANCE in names:
        what = "`eagle3 evaluate --json` on a held-out store, which needs no server, as acceptance_file"
        found.append(Measurement(1.5, what, gives=frozenset((ACCEPTANCE, FALL))))
    for point in config.points:
        at = f"at {point.steps} steps"
        if ACCEPTANCE in names and point.acceptance_length is None:
            one = Observation(point, "acceptance_length", 2.0)
            found.append(Measurement(1, f"acceptance_length {at}, which the server says of each request", (one,)))
        if point.verify_ms is None or point.draft_ms is None:
            both = (Observation(point, "verify_ms", 20.0), Observation(point, "draft_ms", 1.0))
            found.append(Measurement(3, f"verify_ms and draft_ms {at}, from a profile of one cycle", both))
        if point.tok_s is None:
            found.append(Measurement(2, f"tok_s {at}", (Observation(point, "tok_s", 80.0),)))
    measured = {point.steps for point in config.points}
    others = [steps for steps in (2, 5, 10) if steps not in measured]
    for steps in others[:2] if measured else (3,):
        other = MeasuredPoint(steps=steps, tok_s=80.0)
        ran = Observation(other, "tok_s", 80.0)
        profiled = (Observation(other, "verify_ms", 20.0), Observation(other, "draft_ms", 1.0))
        found.append(Measurement(4, f"one more run at {steps} steps: its tok_s", (ran,)))
        what = f"one more run at {steps} steps with a profile of one cycle: its tok_s, verify_ms and draft_ms"
        found.append(Measurement(6, what, (ran, *profiled)))
    if not measured:
        far = Observation(MeasuredPoint(steps=8, tok_s=80.0), "tok_s", 80.0)
        found.append(Measurement(4, "one more run at 8 steps: its tok_s", (far,)))
    return found
