"""A plan that is made from some of a sweep's rows, held against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.config import PlanConfig, SweepConfig, build_config
from eagle3.errors import ProblemsError
from eagle3.serve.bench.result import baseline_of, points_of, usable
from eagle3.serve.bench.rows import Row
from eagle3.serve.planner import Plan, make_plan

Interval = tuple[float, float]


@dataclass(frozen=True)
class Held:
    """A row's prediction and its measurement, as decode tokens/s.

    Attributes:
        used: the plan was made from it.
        deviation: predicted / measured - 1.
        length: acceptance length, predicted and measured.
    """

    name: str
    steps: int
    topk: int
    used: bool
    predicted: float
    interval: Interval
    measured: float
    measured_interval: Interval
    deviation: float
    length: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """The plan at one concurrency.

    Attributes:
        missing: why there is none; the other fields are empty then.
        plan: None where it is missing.
    """

    concurrency: int
    missing: str
    held: tuple[Held, ...] = ()
    plan: Plan | None = None
    baseline: float | None = None

    @property
    def largest(self) -> Held | None:
        """Of the rows that the plan was not made from, the one that it missed by most."""
        others = [item for item in self.held if not item.used]
        return max(others, key=lambda item: abs(item.deviation), default=None)

    @property
    def sentences(self) -> list[str]:
        where = f"concurrency {self.concurrency}"
        if self.missing:
            return [f"{where}: no plan: {self.missing}"]
        largest = self.largest
        if largest is None:
            return [f"{where}: no row is left that the plan could be held against"]
        inside = sum(item.interval[0] <= item.measured <= item.interval[1] for item in self.held if not item.used)
        others = sum(not item.used for item in self.held)
        fastest = max(self.held, key=lambda item: item.measured)
        planned = max(self.held, key=lambda item: item.predicted)
        found = [
            f"{where}: the plan misses the rows that it was not made from by {largest.deviation:+.1%} at most "
            f"({largest.name}: {largest.predicted:.1f} for {largest.measured:.1f}); {inside} of {others} lie within "
            "its 95% interval"
        ]
        if planned.name == fastest.name:
            return [*found, f"{where}: plan and measurement agree that {fastest.name} is the fastest"]
        cost = 1 - planned.measured / fastest.measured
        return [*found, f"{where}: the plan's best is {planned.name}, the fastest is {fastest.name}: {cost:.1%} apart"]

    def to_dict(self) -> dict[str, Any]:
        largest = self.largest
        return {
            "concurrency": self.concurrency,
            "missing": self.missing,
            "baseline_tok_s": self.baseline,
            "rows": [asdict(item) for item in self.held],
            "largest_deviation": None if largest is None else largest.deviation,
        }


def compare(cfg: SweepConfig, concurrency: int, rows: Sequence[Row]) -> Comparison | None:
    """Makes the plan of one concurrency from `plan_from` and the baseline; None where no plan is wanted.

    Raises:
        ProblemsError: the acceptance file is not one.
    """
    if not cfg.plan_from:
        return None
    here = [row for row in rows if row.concurrency == concurrency and usable(row)]
    chosen = [row for row in here if row.facts.steps in cfg.plan_from and row.facts.topk in (None, 1)]
    lacking = sorted(set(cfg.plan_from) - {row.facts.steps for row in chosen if row.facts.steps is not None})
    if lacking:
        return Comparison(concurrency, f"{', '.join(map(str, lacking))} of plan_from have no row that worked")
    values = _plan_values(cfg, concurrency, here, chosen)
    try:
        plan = make_plan(build_config(PlanConfig, values, "the sweep's plan"), "the sweep's plan")
    except ProblemsError as error:
        if cfg.acceptance_file is not None:
            raise
        return Comparison(concurrency, "; ".join(item.message for item in error.problems))
    baseline = {item["batch"]: item["tok_s"] for item in baseline_of(here)}.get(concurrency)
    return Comparison(concurrency, "", tuple(_held(cfg, plan, here)), plan, baseline)


def _plan_values(cfg: SweepConfig, concurrency: int, here: Sequence[Row], chosen: Sequence[Row]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "points": points_of(chosen),
        "baseline": baseline_of(here),
        "batches": [concurrency],
        "steps": sorted({*cfg.steps}),
        "trees": [tree.model_dump() for tree in cfg.trees],
        "cost": cfg.plan_cost.model_dump(exclude_none=True),
    }
    deepest = max(chosen, key=lambda row: row.facts.steps or 0)
    depths = () if deepest.acceptance is None else deepest.acceptance.by_depth
    if cfg.acceptance_file is not None:
        values["acceptance_file"] = cfg.acceptance_file
    elif depths and all(item.reached for item in depths):
        values["acceptance"] = [item.share for item in depths]
    return values


def _held(cfg: SweepConfig, plan: Plan, here: Sequence[Row]) -> list[Held]:
    found = []
    predicted = {(row.steps, row.topk, row.draft_tokens): row for row in plan.batches[0].rows}
    for row in here:
        facts = row.facts
        if facts.steps is None or row.speed is None or row.acceptance is None:
            continue
        said = predicted.get((facts.steps, facts.topk or 1, facts.draft_tokens or facts.steps + 1))
        if said is None:
            continue
        speed = row.speed.decode_tok_s
        used = facts.steps in cfg.plan_from and facts.topk in (None, 1)
        found.append(
            Held(
                row.name,
                facts.steps,
                facts.topk or 1,
                used,
                said.tok_s,
                said.interval,
                speed.value,
                speed.interval,
                said.tok_s / speed.value - 1,
                (said.acceptance_length, row.acceptance.length.value),
            )
        )
    return found
